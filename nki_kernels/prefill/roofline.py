"""How long the experts of a prefill take, about: a roofline of each work tile, added up.

A work tile takes as long as the busiest of what runs side by side: products, copies out of PSUM,
descriptors of rows, and what the memory gives; and what nothing hides. It ranks configurations,
nothing else: times of a kernel come from its trace.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nki_kernels.common.chip import BANK_FLOATS, BANKS, chip_in_force, core
from nki_kernels.common.formula import num_projections
from nki_kernels.common.mx import in_shape, out_shape
from nki_kernels.common.slot_sums import best_sum_ns
from nki_kernels.common.weight_formats import ITEM_BYTES
from nki_kernels.common.work_tiles import loops_of
from nki_kernels.prefill.config import (
    PrefillConfig,
    core_width,
    inner_banks,
    is_alone,
    is_mx,
    largest_work_tile_of,
    loads_in_parts,
    mx_form,
    num_partials,
    num_work_tiles,
    stores_pieces,
)

# Assumed: loads that may not run ahead of the tensor engine wait at times.
_ONE_BUFFER_PENALTY = 1.05
# What a work tile takes beyond its engine, read off simulated work tiles of GPT-OSS, Qwen3,
# DeepSeek, Llama 4 and Mixtral shapes: per row tile and per row of it; per part of the weights and
# row tile; per exchange between the cores; for a transfer of rows that has no buffer of its own. An
# intermediate tile takes so long at least, until the activation has made room for the one after
# the next.
_TILE_NS, _ROW_NS, _PART_NS, _EXCHANGE_NS, _STORE_NS = 750.0, 0.5, 300.0, 3_700.0, 1_000.0
_INNER_NS, _COPY_NS, _LOAD_NS = 350.0, 1_600.0, 100.0
_PART_SHARE = 0.1  # of products or loads, which go on less beside each other with each such part
_OUTER_BUFFERS = 3  # with fewer, an output tile waits for a store
_ROWS_SHARE = 0.05  # of loads, behind which first rows stand that have one buffer
_WHOLE_SHARE = 0.02  # of the loads of whole experts, behind which rows stand
_LOOP_NS = 1_000.0  # to find out that a loop has no iteration
# Between two iterations that load for themselves: rows, and the part of the weights that comes
# first.
_EDGE_NS, _EDGE_LOADS = 3_000.0, 1.4


def estimate_us(
    config: PrefillConfig, tokens_E: NDArray[np.int64], spread: Sequence[float]
) -> float:
    """Return the estimated time of experts and combine, both cores, in microseconds.

    Args:
        config: what the kernel is compiled for.
        tokens_E: [E] tokens of each expert.
        spread: tokens with 0, 1, ... K pairs here.
    """
    return (experts_ns(config, tokens_E) + best_sum(config, spread)[1]) / 1e3


def best_sum(config: PrefillConfig, spread: Sequence[float]) -> tuple[int, float]:
    """Return columns and time of `best_sum_ns` behind experts of a configuration."""
    return best_sum_ns(spread, config.E, config.H, num_partials(config), config.num_cores)


def experts_ns(config: PrefillConfig, tokens_E: NDArray[np.int64]) -> float:
    """Return the estimated time of the work tiles of experts with so many tokens each, [E], in ns.

    Lanes run work tiles of about the same size side by side.
    """
    tiles_E = -(-tokens_E // config.tile_rows)
    tiles = int(tiles_E.sum())
    if not tiles:
        return 0.0
    rows = float(tokens_E.sum()) / tiles
    lanes = config.shard.num_lanes
    if not config.loop.is_dynamic:  # every work tile there may be, most without a tile
        return num_work_tiles(config) * work_tile_ns(
            config, 1, rows * tiles / num_work_tiles(config) / lanes
        )
    steps = Counter(_sizes(config, tiles_E)[::lanes])
    total = sum(count * work_tile_ns(config, size, rows) for size, count in steps.items())
    if is_alone(config.loop):
        more_E = tokens_E.copy()
        more_E[0] += config.tile_rows  # experts hardly have as many tiles each
        steps = Counter(_sizes(config, -(-more_E // config.tile_rows))[::lanes])
        total += _num_iterations(steps, config.loop.pairs) * edge_ns(config)
    return total + _LOOP_NS * len(loops_of(config.loop.classes))


def edge_ns(config: PrefillConfig) -> float:
    """Return an estimate of the time between two iterations that load for themselves, in ns."""
    loop, chip = config.loop, core(config.chip)
    load_in, load_out = weights_ns(config)
    steps = loop.in_parts * loop.h_parts
    first_load = load_in / steps
    if steps > 1:  # down weights come before its other parts
        first_load += loop.weight_buffers * load_out / loop.out_parts
    return _EDGE_NS * chip.transfers + _EDGE_LOADS * first_load


def _num_iterations(steps: Counter[int], pairs: int) -> int:
    """Return the iterations through work tiles of so many row tiles each; see `list_work_tiles`."""
    singles, large = steps[1], sorted((size for size in steps if size > 1), reverse=True)
    beside = min(singles, sum(steps[size] for size in large))
    loops = [-(-(singles - beside) // 2)]
    for size in large:
        mixed = min(beside, steps[size])
        beside -= mixed
        loops += [mixed, -(-(steps[size] - mixed) // 2)]
    return sum(count // pairs + (count % pairs).bit_count() for count in loops)


def _sizes(config: PrefillConfig, tiles_E: NDArray[np.int64]) -> list[int]:
    """Return the row tiles of each work tile, descending."""
    largest, found = largest_work_tile_of(config), list[int]()
    for tiles in tiles_E.tolist():
        found += _sizes_of_one(tiles, largest)
    return sorted(found, reverse=True)


@functools.lru_cache(maxsize=4096)
def _sizes_of_one(tiles: int, largest: int) -> tuple[int, ...]:
    """Return the row tiles of each work tile of an expert with so many."""
    work_tiles = -(-tiles // largest)
    return tuple(len(range(k, tiles, work_tiles)) for k in range(work_tiles))


def work_tile_ns(config: PrefillConfig, tiles: int, live_rows: float) -> float:
    """Return an estimate of the time of a work tile, in ns.

    Args:
        config: what the kernel is compiled for.
        tiles: row tiles of the work tile.
        live_rows: rows of a tile that hold a token.
    """
    loop, H, chip = config.loop, core_width(config), core(config.chip)
    columns = max(config.tile_rows, chip.matmul_floor_columns)
    i_count = config.i_axis.count * loop.in_parts
    depth = config.h_axis.count * columns / chip.tensor_cycles_per_ns
    deep = config.h_axis.group  # elements that a matmul adds up on a partition
    inner = max(num_projections(config.formula) * depth / deep, _INNER_NS * chip.steps)
    in_parts = loop.in_parts * loop.h_parts
    into = tiles * (i_count * inner + depth + in_parts * _PART_NS * chip.steps)
    # A bank of PSUM takes the next product once the last one is copied.
    bank_ns = i_count * BANK_FLOATS / deep / chip.tensor_cycles_per_ns
    turn_ns = (bank_ns + _COPY_NS * chip.steps) / max(1, BANKS - inner_banks(config))
    out = tiles * H / BANK_FLOATS * max(bank_ns, turn_ns)
    out += tiles * loop.out_parts * _PART_NS * chip.steps
    load_in, load_out = weights_ns(config)
    rows = tiles * 2 * live_rows * H * 2 / chip.hbm_bytes_per_ns
    beside = max(tiles * _evict_ns(config), tiles * _names_ns(config))
    load = load_in + load_out + rows
    wait = tiles * (_TILE_NS * chip.steps + _ROW_NS * config.tile_rows)
    wait += in_parts * _LOAD_NS * chip.transfers
    if in_parts * loop.out_parts == 1:
        wait += _WHOLE_SHARE * load
    if loop.outer_buffers < _OUTER_BUFFERS:
        wait += tiles * _STORE_NS * chip.transfers
    if loop.first_buffers == 1 and loop.weight_buffers == 2:
        wait += _ROWS_SHARE * (load_in + load_out)
    if loop.weight_buffers == 2 and loads_in_parts(loop):
        # The first part of each kind came beside the other kind; the others one ahead of their use.
        go_in = into / in_parts + _all_but_one(in_parts, into, load_in)
        go_out = out / loop.out_parts + _all_but_one(loop.out_parts, out, load_out)
        wait += _PART_SHARE * max(0, loop.h_parts - 2) * min(into + out, load)
        return max(go_in + go_out, load, beside) + wait
    if loop.weight_buffers == 2:
        if config.shard.splits_h:
            wait += _EXCHANGE_NS * chip.exchanges
        return max(into + out, beside, load) + wait
    if loop.in_parts == loop.out_parts == 1:
        apart = max(into, load_out + rows / 2) + max(out, load_in + rows / 2)
        return max(_ONE_BUFFER_PENALTY * apart, beside) + wait
    return into + out + load_in + load_out


def _all_but_one(parts: int, work_ns: float, load_ns: float) -> float:
    """Return the time of all parts but the first, each computed while the next one loads."""
    return (parts - 1) * max(work_ns, load_ns) / parts


def weights_ns(config: PrefillConfig) -> tuple[float, float]:
    """Return the time to load an expert's gate and up weights, and its down weights."""
    if is_mx(config):
        form = mx_form(config)
        loads = []
        for rows, run in (in_shape(form), out_shape(form)):
            loads.append(_load_ns(form.chunks * rows, form.chunks * rows * run, config.chip))
        return loads[0], loads[1]
    loop, item, H = config.loop, ITEM_BYTES[config.weight_format], core_width(config)
    halves, i_size = num_projections(config.formula), config.i_axis.size * loop.in_parts
    runs = config.h_axis.rows * loop.in_parts * loop.h_parts
    if (loop.in_parts > 1 or config.shard.splits_i) and not loop.by_parts:
        runs = halves * H * loop.in_parts
    load_in = _load_ns(runs, halves * H * i_size * item, config.chip)
    runs = config.i_axis.rows * loop.in_parts * loop.out_parts
    if (loop.out_parts > 1 or config.shard.splits_h) and not loop.by_parts:
        runs = i_size * loop.out_parts
    return load_in, _load_ns(runs, H * i_size * item, config.chip)


def _evict_ns(config: PrefillConfig) -> float:
    """Return the time that Vector and Scalar engine together take to empty PSUM, for a row tile."""
    R, H, i_count = config.tile_rows, core_width(config), config.i_axis.count * config.loop.in_parts
    transposed = config.h_axis.count * R
    columns = transposed + H + 3 * i_count * R
    instructions = -(-transposed // 1024) + -(-H // 512) + 3 * i_count
    chip = core(config.chip)
    return (columns + instructions * chip.vector_overhead_cycles) / 2 / chip.vector_cycles_per_ns


def _names_ns(config: PrefillConfig) -> float:
    """Return the time that GpSimd takes to make the descriptors of the rows of a tile: of their
    gather, and where rows are stored one by one of their store.
    """
    chip = chip_in_force(config.chip)
    one_by_one = config.stores == "rows" and not stores_pieces(config)
    names = chip.swdge_ns + config.tile_rows * chip.swdge_index_ns
    return (2 if one_by_one else 1) * names


def _load_ns(runs: int, size_bytes: int, name: str) -> float:
    chip = core(name)
    engines = (
        runs / chip.dma_engines * chip.dma_run_ns
        + size_bytes / chip.dma_engines / chip.dma_bytes_per_ns
    )
    return max(engines, size_bytes / chip.hbm_bytes_per_ns)
