"""Which mode, split and buffers a decode step gets.

The estimate is a coarse model of a chip, used to rank plans that fit, nothing else; times of a
kernel come from its trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nki_kernels.decode_config import (
    BANK_FLOATS,
    MAX_ACCUMULATOR_BANKS,
    DecodeConfig,
    accumulator_banks,
    item_bytes,
    list_width,
    with_plan,
)

SBUF_BYTES = 207 * 1024  # usable per partition on Trn2: 212,984 bytes (KLR Trace.lean), rounded
SMALL_TILES_BYTES = 4 * 1024  # identities, constants, counters
MAX_CHUNKS = 512


def expected_experts(config: DecodeConfig) -> float:
    """Return U, the local experts that uniform routing touches on average."""
    missed = (1.0 - config.K / config.num_experts) ** config.T
    return config.E * (1.0 - missed)


def sbuf_bytes(config: DecodeConfig) -> int:
    """Return the bytes per partition that the buffers of the kernel take (computed)."""
    T, H, item = config.T, config.H, item_bytes(config)
    depth, i_axis, size = config.h_axis.count, config.i_axis, config.slots
    total = size * (depth * 2 * i_axis.size + i_axis.count * H) * item
    total += depth * T * (2 + 4)  # x^T and y^T
    # The ends: rows in, rows out, the other core's sums and the sum of both.
    total += max(-(-T // 128) * H * 2, 2 * depth * T * 4 // config.num_cores) + H * 4
    total += 2 * i_axis.count * T * 2 + 6 * T * 4
    total += size * (2 * 2 * i_axis.count * 4 + (H * 2 if config.has_down_bias else 0))
    total += size * depth * 4 if config.down_scale == "channel" else 0
    total += 2 * 3 * 4 * (list_width(config) + 1) + (6 * 4 * config.E)
    return total + SMALL_TILES_BYTES


def fits_psum(config: DecodeConfig) -> bool:
    """Whether y^T can be added up in PSUM, with room for the projections beside it."""
    banks = accumulator_banks(config)
    if config.down_scale == "channel" or banks > MAX_ACCUMULATOR_BANKS:
        return False
    return banks < MAX_ACCUMULATOR_BANKS or 6 * config.T <= BANK_FLOATS


def choose_decode(config: DecodeConfig, chunks: int = 0, slots: int = 0) -> DecodeConfig:
    """Return the configuration with every choice made that it leaves open.

    Args:
        config: sizes; mode and shard may be "auto".
        chunks, slots: fixed if not 0.

    Raises:
        ValueError: nothing fits.
    """
    config = replace(config, sums_in_psum=fits_psum(config))
    if config.mode == "auto":
        config = replace(config, mode="selective" if expected_experts(config) < 0.9 * config.E
                         else "all")  # fmt: skip
    if config.shard == "auto":
        few = list_width(config) < 8
        config = replace(config, shard="intermediate" if few and config.I % 2 == 0 and
                         config.num_cores == 2 and config.I >= 128 else "experts")  # fmt: skip
    for count in _chunk_counts(config, chunks):
        for size in (slots,) if slots else (2,):
            trial = with_plan(config, shard=config.shard, chunks=count, slots=size)
            if sbuf_bytes(trial) <= SBUF_BYTES:
                return replace(trial, reason=f"{config.mode}")
    raise ValueError(
        f"T={config.T}, H={config.H}, I={config.I}: no part of an expert fits SBUF. Use fewer "
        "tokens or more ranks of tensor parallelism."
    )


def _chunk_counts(config: DecodeConfig, chunks: int) -> Iterator[int]:
    """Yield the numbers of equal parts to cut an expert into, few first."""
    share = config.num_cores if config.shard == "intermediate" else 1
    if chunks:
        yield chunks
        return
    for count in range(share, min(MAX_CHUNKS, config.I) + 1, share):
        if config.I % count == 0:
            yield count
