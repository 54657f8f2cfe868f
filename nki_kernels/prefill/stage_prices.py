"""What the stages of the prefill kernel take: columns, elements, descriptors, bytes and runs.

Prices are those of `nki_sim.time.costs` for whole row tiles and parts of weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from nki_kernels.common.axes import AxisTiles
from nki_kernels.common.chip import BANK_BYTES, BANK_FLOATS, BANKS, chip_in_force
from nki_kernels.common.formula import Limits, num_projections
from nki_kernels.common.weight_formats import ITEM_BYTES
from nki_kernels.prefill.config import (
    PrefillConfig,
    bias_terms,
    core_depth,
    core_width,
    inner_banks,
    stored_rows,
    stores_pieces,
)
from nki_sim.time.costs import DmaPrice

QUEUES: Final = 9
TENSOR, VECTOR, SCALAR, GPSIMD, LOADS, GATHERS, STORES, TABLES, LINK = range(QUEUES)


class Work(NamedTuple):
    """An instruction or several of an engine: until it takes more, and until they are done."""

    busy_ns: float
    latency_ns: float


class Copies(NamedTuple):
    """What copies by turns take, each: on the Vector and on the Scalar engine; which is first."""

    vector: Work
    scalar: Work
    first: int


class Activation(NamedTuple):
    """What lies between the projections of a tile and the down projection.

    Attributes:
        before: operators on the gate, on the Vector engine.
        function: the activation, on the Scalar engine.
        beside: operators on the other projection, on the Vector engine.
        product: of both, on the Vector engine.
    """

    before: Work | None
    function: Work
    beside: Work | None
    product: Work | None


@dataclass(frozen=True, slots=True)
class StagePrices:
    """What the stages of a configuration take, in ns.

    Attributes:
        turn_ns, turned: transpose a row tile; copy a bank of it to SBUF.
        scaled: multiply a row tile with the affinities of its tokens, before it is transposed.
        in_ns, activated: one tile of the intermediate axis, gate and up; what follows it.
        copied, exchanged, added_up: where the hidden axis is split: copy a tile of both to SBUF,
            swap it with the other core, add up.
        out_ns: one part of the down weights.
        evicted, banks: one PSUM bank of it, and how many.
        turn_banks: PSUM banks of turned rows, which are the first of those of output rows.
        fetch_ns, step_ns: fetch an entry of the lists, step a counter.
        gather, store: rows of a tile.
        load_in, load_out: transfers of one part of the weights.
        beside_in, beside_out: transfers of its biases and scales.
        overlaps: the Vector engine takes an instruction before the last one's result is there.
    """

    turn_ns: float
    scaled: Work | None
    turned: Copies
    in_ns: float
    activated: Activation
    copied: Copies
    exchanged: Work
    added_up: Work
    out_ns: float
    evicted: Copies
    banks: int
    turn_banks: int
    fetch_ns: float
    step_ns: float
    gather: DmaPrice
    store: DmaPrice
    load_in: DmaPrice
    load_out: DmaPrice
    beside_in: tuple[DmaPrice, ...]
    beside_out: tuple[DmaPrice, ...]
    overlaps: bool

    @classmethod
    def of(cls, config: PrefillConfig, live_rows: float, *, overlaps: bool) -> StagePrices:
        """Return the prices of a configuration.

        Args:
            config: what the kernel is compiled for.
            live_rows: rows of a tile that hold a token.
            overlaps: the Vector engine takes an instruction before the last one's result is there.
        """
        chip = chip_in_force()
        R, loop = config.tile_rows, config.loop
        depth, i_count = config.h_axis.count, config.i_axis.count * loop.in_parts
        halves = num_projections(config.formula)
        column_ns = chip.matmul_calibration_factor / chip.tensor_clock_ghz
        columns = max(R, chip.matmul_floor_cycles)
        width = core_width(config) // loop.out_parts
        banks = -(-width // BANK_FLOATS)
        turns = -(-depth * R * 2 // BANK_BYTES)
        sum_ns = halves * R / chip.two_input_share / chip.vector_clock_ghz
        turned = _copies(depth * R / turns, chip.fast_copy_speedup, overlaps, first=VECTOR)
        evicted = _copies(width / banks, 1.0, overlaps, first=SCALAR)
        out_ns = i_count * max(width, banks * chip.matmul_floor_cycles) * column_ns
        return cls(
            turn_ns=_into_banks(config, depth * columns * column_ns, turns, turned),
            scaled=_scaling(config, overlaps),
            turned=turned,
            in_ns=halves * depth * columns * column_ns,
            activated=_activation(config, overlaps),
            copied=_copies(halves * R, 1.0, overlaps, first=VECTOR),
            exchanged=_exchange(config, overlaps),
            added_up=Work(sum_ns, sum_ns),
            out_ns=_into_banks(config, out_ns, banks, evicted),
            evicted=evicted,
            banks=banks,
            turn_banks=turns,
            fetch_ns=(chip.gpsimd_simple_overhead_cycles + 1) / chip.gpsimd_clock_ghz,
            step_ns=(chip.gpsimd_overhead_cycles + chip.gpsimd_two_input_cycles_per_element)
            / chip.gpsimd_clock_ghz,
            gather=_rows_price(config, live_rows, stores=False),
            store=_rows_price(config, live_rows, stores=True),
            load_in=_gate_up_price(config),
            load_out=_down_price(config),
            beside_in=_beside_in(config),
            beside_out=_beside_out(config),
            overlaps=overlaps,
        )


def vector_work(columns: float, overlaps: bool, count: int = 1) -> Work:
    """Return what the Vector engine takes for so many columns, or several instructions of them."""
    chip = chip_in_force()
    cycles = count * (columns + chip.vector_overhead_cycles)
    busy = count * max(columns, chip.vector_floor_cycles) if overlaps else cycles
    return Work(busy / chip.vector_clock_ghz, cycles / chip.vector_clock_ghz)


def _scalar_work(columns: float) -> Work:
    """Return what the Scalar engine takes for so many columns."""
    chip = chip_in_force()
    busy = max(columns, chip.vector_floor_cycles) + chip.scalar_issue_cycles
    latency = columns + chip.scalar_overhead_cycles
    return Work(busy / chip.scalar_clock_ghz, latency / chip.scalar_clock_ghz)


def _copies(columns: float, speedup: float, overlaps: bool, *, first: int) -> Copies:
    """Return what copies take that the Vector and the Scalar engine do in turn."""
    return Copies(vector_work(columns / speedup, overlaps), _scalar_work(columns), first)


def _into_banks(config: PrefillConfig, product_ns: float, count: int, copies: Copies) -> float:
    """Return what products into so many banks take; each waits until a bank of those that rows have
    is copied.
    """
    chip, each_ns = chip_in_force(), product_ns / count
    copied_ns = max(copies.vector.latency_ns, copies.scalar.latency_ns)
    around_ns = each_ns + chip.matmul_drain_ns + copied_ns + 2 * chip.semaphore_ns
    return count * max(each_ns, around_ns / (BANKS - inner_banks(config)))


def _scaling(config: PrefillConfig, overlaps: bool) -> Work | None:
    """Return what it takes to scale a row tile before its projections, if that is done."""
    if config.scaling != "pre" or config.loop.turns == "dma":
        return None
    speedup = chip_in_force().fast_copy_contiguous_speedup
    return vector_work(core_width(config) / speedup, overlaps)


def _exchange(config: PrefillConfig, overlaps: bool) -> Work:
    """Return how long an exchange keeps the way between the cores, and how long it takes.

    Args:
        config: what the kernel is compiled for.
        overlaps: an exchange need not wait until the one before has ended.
    """
    chip, i_axis = chip_in_force(), config.i_axis
    columns = i_axis.count * num_projections(config.formula) * config.tile_rows
    engines = min(chip.dma_engines, -(-i_axis.rows // chip.dma_rows_per_engine))
    moving_ns = _engine_ns(i_axis.rows, i_axis.rows * columns * 4, engines)
    whole_ns = chip.sendrecv_ns + moving_ns
    return Work(moving_ns if overlaps else whole_ns, whole_ns)


def _activation(config: PrefillConfig, overlaps: bool) -> Activation:
    """Return what lies between the projections of a tile and the down projection."""
    formula, R = config.formula, config.tile_rows
    gate = formula.gate_limits if formula.has_gate else formula.up_limits
    with_gate = _operators(config, gate) if _clamps(gate) or config.has_scales else 0
    with_up = max(0, _operators(config, formula.up_limits) - 1)  # the last one is in the product
    before, beside = -(-with_gate // 2), -(-with_up // 2)
    return Activation(
        vector_work(R, overlaps, before) if before else None,
        _scalar_work(R),
        vector_work(R, overlaps, beside) if beside and formula.has_gate else None,
        vector_work(R, overlaps) if formula.has_gate else None,
    )


def _operators(config: PrefillConfig, limits: Limits) -> int:
    """Return how many scalar operators a projection needs, of which an instruction does two."""
    formula = config.formula
    shifts = formula.has_gate_up_bias or formula.up_offset != 0.0
    return int(config.has_scales) + int(shifts) + _clamps(limits)


def _clamps(limits: Limits) -> int:
    return int(limits.has_upper) + int(limits.has_lower)


def table_price(rows: int, size_bytes: int, swdge_ns: float = 0.0) -> DmaPrice:
    """Return the price of a small table in HBM.

    Args:
        rows: on as many partitions.
        size_bytes: of all.
        swdge_ns: to make descriptors of indices; 0 where there are none.
    """
    chip = chip_in_force()
    engines = min(chip.dma_engines, -(-rows // chip.dma_rows_per_engine))
    each_ns = _engine_ns(rows, size_bytes, engines)
    made_by, ns = ("swdge", swdge_ns) if swdge_ns else ("auto", chip.dma_auto_issue_ns)
    return DmaPrice(engines, each_ns, each_ns, made_by, ns, 0.0, size_bytes)


def _rows_price(config: PrefillConfig, live_rows: float, *, stores: bool) -> DmaPrice:
    """Return the price to gather the rows of a tile, or to store them."""
    chip = chip_in_force()
    R, width = config.tile_rows, core_width(config)
    is_whole = stores and (config.stores == "tiles" or stores_pieces(config))
    rows, count = live_rows, R // stored_rows(config)
    if is_whole:  # on average the last piece that holds a token is half empty
        rows = min(float(R), live_rows + stored_rows(config) / 2)
    is_turned = config.loop.turns == "dma" and not stores
    lines = config.h_axis.rows if is_turned else R  # on the side of SBUF
    engines = min(chip.dma_engines, -(-lines // chip.dma_rows_per_engine))
    pieces = max(lines, rows) if is_turned else rows
    size = rows * width * 2
    each = _engine_ns(pieces + (R - rows) * chip.dma_skipped_row_share, size, engines)
    if is_turned:
        each /= chip.dma_transpose_hbm_share
    if is_whole:
        one = _hwdge(engines, each / count, size / count)
        return _together(one, count)
    names_ns = R * chip.swdge_index_ns
    return DmaPrice(engines, each, each, "swdge", chip.swdge_ns + names_ns, names_ns, int(size))


def _gate_up_price(config: PrefillConfig) -> DmaPrice:
    """Return the price of one part of the gate and up weights."""
    loop, item = config.loop, ITEM_BYTES[config.weight_format]
    halves = num_projections(config.formula)
    columns, axis = core_depth(config) // loop.in_parts, config.h_axis
    axis = replace(axis, size=axis.size // loop.h_parts, count=axis.count // loop.h_parts)
    if loop.by_parts or not (loop.in_parts > 1 or config.shard.splits_i):
        return _matrix_price(axis, halves * columns * item, 1, follows=True)
    return _matrix_price(axis, columns * item, halves, follows=False)


def _down_price(config: PrefillConfig) -> DmaPrice:
    """Return the price of one part of the down weights, `in_parts` transfers together."""
    loop, item = config.loop, ITEM_BYTES[config.weight_format]
    columns = core_width(config) // loop.out_parts
    follows = loop.by_parts or not (loop.out_parts > 1 or config.shard.splits_h)
    one = _matrix_price(config.i_axis, columns * item, 1, follows=follows)
    return _together(one, loop.in_parts)


def _beside_in(config: PrefillConfig) -> tuple[DmaPrice, ...]:
    """Return the prices of biases and scales of the gate and up projections."""
    halves, axis = num_projections(config.formula), config.i_axis
    count = int(config.formula.has_gate_up_bias) + int(config.has_scales)
    return (_small_price(axis.rows, axis.size * 4),) * halves * count


def _beside_out(config: PrefillConfig) -> tuple[DmaPrice, ...]:
    """Return the prices of biases and scales of the down projection."""
    row_bytes = core_width(config) // config.loop.out_parts * 2
    scales = (_small_price(3, 3 * row_bytes),) if config.has_scales else ()
    terms = bias_terms(config) if config.formula.has_down_bias else 0
    return (*scales, *((_small_price(terms, terms * row_bytes),) if terms else ()))


def _small_price(rows: int, size_bytes: int) -> DmaPrice:
    engines = -(-rows // chip_in_force().dma_rows_per_engine)
    return _hwdge(engines, _engine_ns(rows, size_bytes, engines), size_bytes)


def _matrix_price(axis: AxisTiles, piece_bytes: int, pieces: int, *, follows: bool) -> DmaPrice:
    """Return the price of a matrix whose rows are spread over partitions; see `load_matrix`.

    Args:
        axis: how the rows lie.
        piece_bytes: of a piece of a row.
        pieces: of a row.
        follows: rows follow each other in HBM, so that those of a partition may be one run.
    """
    chip = chip_in_force()
    engines = min(chip.dma_engines, -(-axis.rows // chip.dma_rows_per_engine))
    runs = axis.rows if axis.is_strided and follows else axis.size * pieces
    size = axis.size * pieces * piece_bytes
    transfers = 1 if axis.is_strided or axis.tail == axis.rows else 2
    one = _hwdge(engines, _engine_ns(runs, size, engines) / transfers, size / transfers)
    return _together(one, transfers)


def _together(price: DmaPrice, count: int) -> DmaPrice:
    """Return the price of so many transfers, one after the other."""
    return replace(
        price,
        engine_ns=count * price.engine_ns,
        single_queue_ns=count * price.single_queue_ns,
        generator_ns=count * price.generator_ns,
        hbm_bytes=count * price.hbm_bytes,
    )


def expected_price(price: DmaPrice, present: float) -> DmaPrice:
    """Return the mean price of a transfer that is left out, but for its descriptors, where there is
    no visit; `present` is the share that is.
    """
    if present == 1.0:
        return price
    chip = chip_in_force()
    bytes_ns = price.hbm_bytes / price.engines / chip.dma_engine_bytes_per_ns
    left_out_ns = max(0.0, price.engine_ns - bytes_ns) * chip.dma_skipped_row_share
    return replace(
        price,
        engine_ns=present * price.engine_ns + (1.0 - present) * left_out_ns,
        hbm_bytes=int(present * price.hbm_bytes),
    )


def _engine_ns(runs: float, size_bytes: float, engines: int) -> float:
    """Return the time of each DMA engine of a transfer."""
    chip = chip_in_force()
    busiest = -(-runs // engines) * chip.dma_run_ns
    return busiest + size_bytes / engines / chip.dma_engine_bytes_per_ns


def _hwdge(engines: int, each_ns: float, size_bytes: float) -> DmaPrice:
    chip = chip_in_force()
    return DmaPrice(
        engines, each_ns, each_ns, "hwdge", chip.hwdge_ns, chip.dma_register_ns, int(size_bytes)
    )
