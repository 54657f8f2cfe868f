"""Which mode, split and buffers a decode step gets.

The estimate is a coarse model of a chip, used to rank plans that fit, nothing else; times of a
kernel come from its trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from nki_kernels.decode.buffers import scratch_banks
from nki_kernels.decode.config import (
    BANK_FLOATS,
    DIRECT_OUT,
    MAX_ACCUMULATOR_BANKS,
    DecodeConfig,
    accumulator_banks,
    extra_floats,
    group_size,
    is_direct,
    item_bytes,
    joins_projections,
    list_width,
    packed_chunks,
    read_ahead,
    with_split,
)

SBUF_BYTES = 207 * 1024  # usable per partition on Trn2: 212,984 bytes (KLR Trace.lean), rounded
SMALL_TILES_BYTES = 4 * 1024  # identities, constants, counters
MAX_CHUNKS = 512

# Trainium 2, one core; sources of each in nki_sim.hardware.
PE_CYCLES_PER_NS = 2.4
PE_FLOOR_COLUMNS = 64
VECTOR_CYCLES_PER_NS = 0.96
VECTOR_OVERHEAD = 144
HBM_BYTES_PER_NS = 358.0
DMA_ENGINES = 16
DMA_BYTES_PER_NS = 27.2
DMA_RUN_NS = 32.0
DGE_NS = 600.0
ACTIVATE_NS = 1500.0  # from the last projection to the inner activations
ALL_MARGIN = 1.025  # where a list costs less than that, a rare skew wins more
LIST_NS = 4500.0  # from the index to the first transfer of weights (simulated)


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
    T, H, item = config.T, config.H, item_bytes(config)
    depth, i_axis, weight_buffers = config.h_axis.count, config.i_axis, config.weight_buffers
    columns = depth * config.h_axis.rows if config.weight_layout == "packed" else H
    gate_up = depth * 2 * i_axis.size * item + 4 * extra_floats(config)
    total = weight_buffers * (gate_up + i_axis.count * columns * item)
    total += depth * T * (2 + 4)  # x^T and y^T
    total += (
        2 * group_size(config) * i_axis.count * T * 2
        + 4 * T * 4
        + 2 * T * (4 + 2)
        + 20 * config.unroll
    )
    total += weight_buffers * (2 * 2 * i_axis.count * 4 + (H * 2 if config.has_down_bias else 0))
    total += (weight_buffers + 2) * depth * 4 if config.down_scale == "channel" else 0
    total += scratch_banks(config) * BANK_FLOATS * 4
    return max(total, _ends_bytes(config)) + SMALL_TILES_BYTES + _routing_bytes(config)


def _routing_bytes(config: DecodeConfig) -> int:
    tiles, width = -(-config.T // 128), list_width(config)
    tables = 2 if config.scaling == "pre" else 1
    wide = width + read_ahead(config)
    return 4 * (tables * tiles * wide + 3 * wide + tiles * (2 * config.E + 32) + 2 * config.E)


def _ends_bytes(config: DecodeConfig) -> int:
    """Return the bytes that the ends take: at first rows and x^T, at last y^T, parts and rows."""
    T, depth = config.T, config.h_axis.count
    out = 4 if config.output_dtype == "float32" else 2
    share = -(-T // config.num_cores)
    at_first = -(-T // 128) * config.H * 2 + depth * T * 2
    rows = depth * config.h_axis.rows
    if config.h_axis.is_strided and share <= DIRECT_OUT:
        rows = depth * share
    # Rows wait to be stored beside a residual in bfloat16.
    at_last = 2 * depth * T * 4 + rows * (out + 2)
    if config.h_axis.is_strided and share <= DIRECT_OUT:
        at_last += depth * share * 4
    return max(at_first, at_last)


def fits_psum(config: DecodeConfig) -> bool:
    """Whether y^T can be added up in PSUM, with room for the projections beside it."""
    banks = accumulator_banks(config)
    if config.down_scale == "channel" or banks > MAX_ACCUMULATOR_BANKS:
        return False
    return banks < MAX_ACCUMULATOR_BANKS or 6 * config.T <= BANK_FLOATS


def choose_decode(
    config: DecodeConfig,
    chunks: int = 0,
    weight_buffers: int = 0,
    most_bytes: int = SBUF_BYTES,
    front_ns: float = 0.0,
) -> DecodeConfig:
    """Return the configuration with the least estimated time among those that fit.

    Args:
        config: sizes; mode and shard may be "auto".
        chunks, weight_buffers: fixed if not 0.
        most_bytes: SBUF per partition to use.
        front_ns: time until the choices are on chip, in which mode "all" already loads weights.

    Raises:
        ValueError: nothing fits.
    """
    config = replace(config, sums_in_psum=fits_psum(config))
    modes = ("selective", "all") if config.mode == "auto" else (config.mode,)
    shards = ("experts", "intermediate") if config.shard == "auto" else (config.shard,)
    touched = skewed_experts(config) if config.mode == "auto" else expected_experts(config)
    best: DecodeConfig | None = None
    best_ns = float("inf")
    for mode in modes:
        for shard in shards:
            asked = replace(config, mode=mode, shard=shard)
            trial = _first_that_fits(asked, chunks, weight_buffers, most_bytes)
            margin = ALL_MARGIN if mode == "all" and len(modes) > 1 else 1.0
            if trial is None:
                continue
            trial_ns = margin * (decode_ns(trial, touched) + (front_ns if mode != "all" else 0.0))
            if trial_ns < best_ns:
                best, best_ns = trial, trial_ns
    if best is None:
        raise ValueError(
            f"T={config.T}, H={config.H}, I={config.I}, shard={config.shard!r}, chunks={chunks}: "
            "no part of an expert fits SBUF, or the parts do not divide by the cores. Leave shard "
            "and chunks open, or use fewer tokens."
        )
    return replace(best, reason=_reason(best, LIST_NS + front_ns))


def _first_that_fits(
    config: DecodeConfig, chunks: int, weight_buffers: int, most_bytes: int
) -> DecodeConfig | None:
    """Return the plan with the fewest parts that fits, and then the most buffers."""
    for count in _chunk_counts(config, chunks):
        for size in (weight_buffers,) if weight_buffers else (8, 4, 2):
            trial = with_split(config, shard=config.shard, chunks=count, weight_buffers=size)
            if sbuf_bytes(trial) <= most_bytes:
                return trial
    return None


def _reason(config: DecodeConfig, list_ns: float) -> str:
    """Return why mode and shard are what they are."""
    few, many = skewed_experts(config), expected_experts(config)
    return (
        f"{config.mode}: {config.T} tokens touch about {few:.1f} (skewed) to {many:.1f} (uniform) "
        f"of {config.E} local experts, and a list of them costs {list_ns / 1e3:.1f} us; the cores "
        f"split the {config.shard}"
    )


def _chunk_counts(config: DecodeConfig, chunks: int) -> Iterator[int]:
    """Yield the numbers of equal parts to cut an expert into, few first."""
    share = config.num_cores if config.shard == "intermediate" else 1
    if config.weight_layout == "packed":
        if chunks not in (0, packed_chunks(config)):
            raise ValueError(
                f"chunks={chunks}: packed weights have {packed_chunks(config)}. Leave it open."
            )
        chunks = packed_chunks(config)
    for count in range(share, min(MAX_CHUNKS, config.I) + 1, share):
        divides = config.I % count == 0 or config.weight_layout == "packed"
        if divides and chunks in (0, count):
            yield count


def decode_ns(config: DecodeConfig, touched: float) -> float:
    """Return an estimate of the time of a launch, in ns.

    Args:
        config: a whole plan.
        touched: local experts that are chosen by some token.
    """
    experts = float(config.E) if config.mode == "all" else max(1.0, touched)
    items = experts * config.chunks / config.num_cores
    if config.shard == "experts" and config.chunks % config.num_cores:
        # An odd expert is shared as well as its chunks allow; every other list has one.
        items += 0.5 / config.num_cores
    start = LIST_NS if config.mode == "selective" and not is_direct(config) else 0.0
    return start + items * max(_load_ns(config), _compute_ns(config)) + _compute_ns(config)


def _load_ns(config: DecodeConfig) -> float:
    """Return the time to load an item, both cores loading."""
    i_axis, item, H = config.i_axis, item_bytes(config), config.H
    runs = config.h_axis.rows + i_axis.rows
    if config.weight_layout == "ehi" and config.chunks > 1:
        runs = 2 * H + i_axis.rows
    size = 3 * H * i_axis.size * item
    engines = runs / DMA_ENGINES * DMA_RUN_NS + size / DMA_ENGINES / DMA_BYTES_PER_NS
    return max(engines, size / HBM_BYTES_PER_NS, 2 * DGE_NS)


def _compute_ns(config: DecodeConfig) -> float:
    """Return the time to compute an item."""
    T, columns = config.T, max(config.T, PE_FLOOR_COLUMNS)
    tiles = config.i_axis.count
    passes = 2 if joins_projections(config) else 3
    matmuls = passes * config.h_axis.count * tiles * columns / PE_CYCLES_PER_NS
    vector = tiles * 4 * (T + VECTOR_OVERHEAD) / VECTOR_CYCLES_PER_NS
    if not config.sums_in_psum:
        banks = accumulator_banks(config)
        vector += (config.h_axis.count * T + banks * VECTOR_OVERHEAD) / VECTOR_CYCLES_PER_NS
    return max(matmuls + ACTIVATE_NS, vector)
