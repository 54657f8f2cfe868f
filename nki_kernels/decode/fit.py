"""Which mode, split and buffers a decode step gets.

The estimate is a coarse model of a chip, used to rank candidates that fit, nothing else; times of a
kernel come from its trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from nki_kernels.common.axes import AxisTiles, tile_axis
from nki_kernels.common.chip import (
    BANK_FLOATS,
    PARTITIONS,
    core,
    fitted_sbuf_bytes,
    most_sbuf_bytes,
)
from nki_kernels.common.memory import table_bytes, tiles_bytes
from nki_kernels.decode.config import (
    DecodeConfig,
    DecodeRequest,
    accumulator_banks,
    asks_early,
    core_chunks,
    extra_floats,
    is_direct,
    is_mx,
    is_written_out,
    item_bytes,
    joins_projections,
    list_width,
    loop_sizes,
    out_banks,
    packed_chunks,
    shares_halves,
    sum_floats,
    tiles_beside_columns,
    weighs_inner,
)
from nki_kernels.decode.items import mx_form, packed_shapes
from nki_kernels.decode.memory import (
    ends_table,
    expert_table,
    mx_table,
    routing_table,
    token_table,
)
from nki_kernels.decode.schedule import make_loops

# Simulated with these kernels.
_ACTIVATE_NS = 1500.0  # from the last projection to the inner activations
_LIST_NS = 4500.0  # from the index to the first transfer of weights
_EXCHANGE_NS = 4000.0  # for the projections of an expert that the cores share by halves
_EDGE_NS = 3500.0  # from the last product of an iteration to the first weights of the next one
_EDGES_OF_AN_ITERATION, _LONGEST_ITERATION = 12, 16  # entries, powers of two

SMALL_TILES_BYTES = 4 * 1024  # identities, constants, counters
_MAX_CHUNKS = 512
_BUFFERS = 4  # that keep the memory busy over the edge of a loop


def expected_experts(config: DecodeConfig) -> float:
    """Return U, the local experts that uniform routing touches on average."""
    missed = (1.0 - config.K / config.num_experts) ** config.T
    return config.E * (1.0 - missed)


def skewed_experts(config: DecodeConfig) -> float:
    """Return the local experts that Zipf's law (the n-th expert chosen 1/n as often) touches.

    Drawing K different experts takes expert n with probability 1 - exp(-c / n), about, where c is
    such that these add up to K.
    """
    ranks = range(1, config.num_experts + 1)
    low, high = 0.0, 64.0 * config.num_experts
    for _step in range(60):
        middle = (low + high) / 2
        if sum(1.0 - math.exp(-middle / n) for n in ranks) < config.K:
            low = middle
        else:
            high = middle
    missed = sum(math.exp(-config.T * low / n) for n in ranks)
    return config.E * (1.0 - missed / config.num_experts)


def sbuf_bytes(config: DecodeConfig) -> int:
    """Return the bytes per partition that the buffers of the kernel take (computed)."""
    tokens, ends, routing = token_table(config), ends_table(config), routing_table(config)
    experts = table_bytes(tokens) + table_bytes(expert_table(config))
    experts += table_bytes(mx_table(config))
    if config.weights.layout == "ehi":
        # What is kept beside the weights has tiles of its own there, small ones.
        experts += config.weight_buffers * 4 * extra_floats(config)
    at_first = tiles_bytes(ends.loaded) + tiles_bytes(tokens.transposed)
    if asks_early(config):
        experts += tiles_bytes(ends.loaded)
    at_last = table_bytes(ends) - tiles_bytes(ends.loaded) + tiles_bytes(tokens.total)
    passing = _passing_floats(config) * 4
    return max(experts, at_first, at_last) + SMALL_TILES_BYTES + table_bytes(routing) + passing


def _passing_floats(config: DecodeConfig) -> int:
    """Return the numbers that listing and weighing experts hold for a moment."""
    width, E = list_width(config), config.E
    passing = 3 * width + E + 2 * (len(loop_sizes(config)) + 1)
    return passing + -(-config.T // PARTITIONS) * (2 * E + 32)


def _holds_projections(config: DecodeConfig) -> bool:
    """Whether PSUM holds all projections of a chunk in parts beside what else is in it."""
    columns = 2 * int(config.scaling == "pre" and weighs_inner(config)) + 2
    beside = 2 * tiles_beside_columns(config)
    return out_banks(config) > 0 and (columns + beside) * config.T <= BANK_FLOATS


def fit_decode(draft: DecodeConfig, request: DecodeRequest) -> DecodeConfig:
    """Return the configuration with the least estimated time among those that fit.

    Args:
        draft: sizes, formula and weights; mode and shard may be "auto".
        request: chunks and weight buffers if they are fixed; the time of what comes before.

    Raises:
        ValueError: nothing fits.
    """
    for room in (fitted_sbuf_bytes(draft.chip), most_sbuf_bytes(draft.chip)):
        found = _fastest(draft, request, room)
        if found is not None:
            return found
    raise ValueError(
        f"T={draft.T}, H={draft.H}, I={draft.I}, shard={draft.shard!r},"
        f" chunks={request.chunks}: no chunk of an expert fits SBUF, or the chunks do not"
        " divide by the cores. Leave shard and chunks open, or use fewer tokens."
    )


def _fastest(draft: DecodeConfig, request: DecodeRequest, room: int) -> DecodeConfig | None:
    """Return the configuration with the least estimated time in so many bytes of SBUF, or None."""
    modes = ("selective", "all") if draft.mode == "auto" else (draft.mode,)
    shards = ("experts", "intermediate") if draft.shard == "auto" else (draft.shard,)
    touched = skewed_experts(draft) if draft.mode == "auto" else expected_experts(draft)
    best: DecodeConfig | None = None
    best_ns = float("inf")
    for mode in modes:
        for shard in shards:
            found = _best_that_fits(replace(draft, mode=mode, shard=shard), request, touched, room)
            if found is None:
                continue
            found_ns = decode_ns(found, touched)
            if mode != "all":
                found_ns += request.front_ns  # in which mode "all" already loads weights
            if found_ns < best_ns:
                best, best_ns = found, found_ns
    if best is None:
        return None
    reason = _reason(best, _list_ns(best) + request.front_ns)
    return replace(best, reason=reason, loops=make_loops(best))


def _best_that_fits(
    draft: DecodeConfig, request: DecodeRequest, touched: float, room: int
) -> DecodeConfig | None:
    """Return the configuration with the least estimated time among those that fit.

    Of equal ones it is that with the fewest chunks and parts, and then the most buffers.
    """
    best: DecodeConfig | None = None
    best_ns = float("inf")
    for chunks in _chunk_counts(draft, request.chunks):
        found = False
        for parts in _part_counts(draft, chunks, request.parts):
            candidate = _first_that_fits(draft, request, chunks, parts, room)
            if candidate is None:
                continue
            found = True
            candidate_ns = decode_ns(candidate, touched)
            if candidate_ns < best_ns:
                best, best_ns = candidate, candidate_ns
        if found and chunks > 1:
            break
    return best


def _first_that_fits(
    draft: DecodeConfig, request: DecodeRequest, chunks: int, parts: int, room: int
) -> DecodeConfig | None:
    """Return the configuration with the most buffers that fits."""
    for buffers in (request.weight_buffers,) if request.weight_buffers else (8, 4, 2):
        candidate = _with_chunks(draft, chunks, parts, buffers)
        if buffers > _BUFFERS and not request.weight_buffers and _waits_for_memory(candidate):
            continue
        if parts > 1 and not _holds_projections(candidate):
            continue
        if sbuf_bytes(candidate) <= room:
            return candidate
    return None


def _waits_for_memory(config: DecodeConfig) -> bool:
    """Whether computing takes less than loading, so that longer iterations gain nothing.

    What is prefetched past the end of a list, and is not there, holds up what the cores share.
    Where activating is most of computing, they gain nothing either.
    """
    load, activate = _load_ns(config), _ACTIVATE_NS * core(config.chip).steps
    return _compute_ns(config) < max(load, load / 2 + activate)


def _with_chunks(
    config: DecodeConfig, chunks: int, parts: int, weight_buffers: int
) -> DecodeConfig:
    """Return the configuration with other chunks; the intermediate axis is cut to match."""
    trial = replace(config, chunks=chunks, parts=parts, weight_buffers=weight_buffers)
    trial = replace(trial, i_axis=_chunk_axis(config, chunks))
    unroll = 2
    while unroll * core_chunks(trial) * parts < weight_buffers:
        unroll *= 2
    # Iterations long enough for their edges to be a small part of them.
    entry_ns = core_chunks(trial) * max(_load_ns(trial), _compute_ns(trial))
    while unroll < _LONGEST_ITERATION and unroll * entry_ns < _EDGES_OF_AN_ITERATION * _edge_ns(
        trial
    ):
        unroll *= 2
    return replace(trial, unroll=unroll)


def _edge_ns(config: DecodeConfig) -> float:
    """Return how long the memory waits between iterations, as nothing is loaded ahead."""
    return _EDGE_NS * core(config.chip).transfers + _compute_ns(config) / config.parts


def _chunk_axis(config: DecodeConfig, chunks: int) -> AxisTiles:
    """Cut a chunk of the intermediate axis; one of MX words has whole groups."""
    if is_mx(config):
        return mx_form(replace(config, chunks=chunks)).i_axis
    return tile_axis(-(-config.I // chunks))


def _part_counts(draft: DecodeConfig, chunks: int, parts: int) -> Iterator[int]:
    """Yield the numbers of parts to load a chunk in, few first."""
    i_axis = tile_axis(-(-draft.I // chunks))
    is_even = draft.h_axis.is_strided and i_axis.is_strided
    biases_apart = draft.weights.down_scale == "channel" and draft.formula.has_down_bias
    can_part = draft.weights.layout == "ehi" and is_even and not biases_apart
    most = min(draft.h_axis.count, i_axis.count) if can_part else 1
    for count in range(1, most + 1):
        if parts in (0, count):
            yield count


def _reason(config: DecodeConfig, list_ns: float) -> str:
    """Return why mode and shard are what they are."""
    few, many = skewed_experts(config), expected_experts(config)
    return (
        f"{config.mode}: {config.T} tokens touch about {few:.1f} (skewed) to {many:.1f} (uniform) "
        f"of {config.E} local experts, and a list of them costs {list_ns / 1e3:.1f} us; the cores "
        f"split the {config.shard}"
    )


def _chunk_counts(config: DecodeConfig, chunks: int) -> Iterator[int]:
    """Yield the numbers of equal chunks to cut an expert into, few first."""
    share = config.num_cores if config.shard == "intermediate" else 1
    if config.weights.layout == "packed":
        if chunks not in (0, packed_chunks(config)):
            raise ValueError(
                f"chunks={chunks}: packed weights have {packed_chunks(config)}. Leave it open."
            )
        chunks = packed_chunks(config)
    for count in range(share, min(_MAX_CHUNKS, config.I) + 1, share):
        divides = config.I % count == 0 or config.weights.layout == "packed"
        if divides and chunks in (0, count):
            yield count


def decode_ns(config: DecodeConfig, touched: float) -> float:
    """Return an estimate of the time of a launch, in ns.

    Args:
        config: with all choices made.
        touched: local experts that are chosen by some token.
    """
    experts = float(config.E) if config.mode == "all" else max(1.0, touched)
    items = experts * config.chunks / config.num_cores
    load, compute, chip = _load_ns(config), _compute_ns(config), core(config.chip)
    start = _list_ns(config) if config.mode == "selective" and not is_direct(config) else 0.0
    if shares_halves(config):
        start += _odd_share(config) * _EXCHANGE_NS * chip.exchanges
    elif config.shard == "experts" and config.chunks % config.num_cores:
        # An odd expert is shared as well as its chunks allow.
        items += _odd_share(config) / config.num_cores
    if not is_written_out(config):
        # At the end of an iteration nothing is computed while the last chunk is activated.
        compute += _ACTIVATE_NS * chip.steps / (config.unroll * core_chunks(config))
        edge_ns = _edge_ns(config) / (config.unroll * core_chunks(config))
        load, compute = load + edge_ns, compute + edge_ns
    if config.weight_buffers < 2 * config.parts:
        load += _ACTIVATE_NS * chip.steps  # the next chunk is not on chip before this one is done
    return start + items * max(load, compute) + compute / config.parts


def _odd_share(config: DecodeConfig) -> float:
    """Return how often the cores share an expert: where it is not known, for every other list."""
    if config.mode == "all" or is_direct(config):
        return float(list_width(config) % config.num_cores)
    return 0.5


def _list_ns(config: DecodeConfig) -> float:
    """Return the time to list the touched experts: engines in turn, then the first transfer."""
    chip = core(config.chip)
    return _LIST_NS * (chip.steps + chip.transfers) / 2


def _load_ns(config: DecodeConfig) -> float:
    """Return the time to load a chunk, both cores loading."""
    i_axis, item, H, chip = config.i_axis, item_bytes(config), config.H, core(config.chip)
    runs = config.parts * (config.h_axis.rows + i_axis.rows)
    size = 3 * H * i_axis.size * item
    if is_mx(config):
        size = sum(rows * run for rows, run in packed_shapes(config))
    if config.weights.layout == "ehi" and config.chunks > 1:
        runs = 2 * H + config.parts * i_axis.rows
    engines = (
        runs / chip.dma_engines * chip.dma_run_ns + size / chip.dma_engines / chip.dma_bytes_per_ns
    )
    return max(engines, size / chip.hbm_bytes_per_ns, 2 * config.parts * chip.dge_ns)


def _compute_ns(config: DecodeConfig) -> float:
    """Return the time to compute a chunk."""
    T, chip = config.T, core(config.chip)
    columns = max(T, chip.matmul_floor_columns)
    tiles, depth = config.i_axis.count, config.h_axis.count
    columns_in = (1 if joins_projections(config) else 2) * depth * columns
    products = tiles * (columns_in + max(sum_floats(config), depth * columns))
    if is_mx(config):
        products = depth * (2 * tiles // config.h_axis.group + 1) * columns
    matmuls = products / chip.tensor_cycles_per_ns
    vector = tiles * 4 * (T + chip.vector_overhead_cycles) / chip.vector_cycles_per_ns
    banks = accumulator_banks(config)
    vector += (sum_floats(config) + banks * chip.vector_overhead_cycles) / chip.vector_cycles_per_ns
    return max(matmuls + _ACTIVATE_NS * chip.steps, vector)
