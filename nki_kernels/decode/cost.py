"""What a launch of `decode_moe` moves and multiplies, counted from its sizes."""

from __future__ import annotations

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.costs import KernelCost
from nki_kernels.decode.config import (
    DIRECT_OUT,
    DecodeConfig,
    is_direct,
    is_direct_in,
    is_mx,
    item_bytes,
    joins_projections,
    list_width,
    loads_bias,
    row_width,
    shares_halves,
    weighs_inner,
)
from nki_kernels.decode.items import packed_shapes

_WORD_BYTES, _BFLOAT16_BYTES = 4, 2


def cost_decode_moe(config: DecodeConfig, touched: int) -> KernelCost:
    """Count bytes and columns of a launch; equal to those of its trace.

    Args:
        config: what the kernel is compiled for.
        touched: local experts that some token chose; not used where the kernel does not list them.
    """
    experts = touched
    if config.mode == "all":
        experts = config.E
    elif is_direct(config):
        experts = config.K
    T, H, K = config.T, config.H, config.K
    read = columns = 0
    for core in range(config.num_cores):
        entries, items, biases = _share(config, experts, core)
        read += items * _item_bytes(config)
        if core > 0 and shares_halves(config):
            read += experts % 2 * _extra_bytes(config)
        if loads_bias(config):
            read += biases * H * _BFLOAT16_BYTES
            columns += biases * (H if config.gives_rows else config.h_axis.count * T)
        read += 2 * T * K * _WORD_BYTES + T * H * _BFLOAT16_BYTES
        if not is_direct(config):
            read += min(T, PARTITIONS) * _WORD_BYTES
        columns += entries * _columns_of_entry(config) + _columns_of_ends(config, core)
        columns += items * columns_of_item(config)
    written = T * H * (4 if config.output_dtype == "float32" else 2)
    return KernelCost(read, written, columns)


def _share(config: DecodeConfig, experts: int, core: int) -> tuple[int, int, int]:
    """Return list entries, chunks and first chunks of experts that a core computes.

    What is shared by halves counts as core 0's.
    """
    chunks = config.chunks
    if config.num_cores == 1:
        return experts, experts * chunks, experts
    half = (chunks + 1) // 2 if core == 0 else chunks // 2
    if config.shard == "intermediate":
        return experts, experts * half, experts
    pairs, odd = experts // 2, experts % 2
    if half == 0 and config.mode == "selective" and not is_direct(config):
        half = 0 if shares_halves(config) else chunks  # computed for nothing
    shared = odd if half > 0 or shares_halves(config) else 0
    return pairs + shared, pairs * chunks + odd * half, pairs + shared


def _item_bytes(config: DecodeConfig) -> int:
    """Return the bytes of a chunk but for the down bias."""
    H, size, item = config.H, config.i_axis.size, item_bytes(config)
    if config.weights.layout == "packed":
        return sum(rows * run for rows, run in packed_shapes(config)) * item
    return 3 * H * size * item + _extra_bytes(config)


def _extra_bytes(config: DecodeConfig) -> int:
    """Return the bytes that are loaded beside the plain weights of a chunk."""
    formula, weights = config.formula, config.weights
    words = 2 * config.i_axis.size * (int(formula.has_gate_up_bias) + int(weights.has_scales))
    if weights.down_scale == "channel":
        words += config.H
    elif weights.down_scale == "expert":
        words += PARTITIONS
    return words * _WORD_BYTES


def columns_of_item(config: DecodeConfig) -> int:
    """Return the columns of an item's products."""
    depth, tiles, T = config.h_axis.count, config.i_axis.count, config.T
    if is_mx(config):  # four tiles at once, of the tokens and of what comes in between
        return (2 * tiles * depth // config.h_axis.group + depth) * T
    columns_in = (1 if joins_projections(config) else 2) * depth * T
    return tiles * (columns_in + (row_width(config) if config.gives_rows else depth * T))


def _columns_of_entry(config: DecodeConfig) -> int:
    """Return the columns that spread what tokens take of an expert over the partitions."""
    spreads = int(config.scaling == "pre") + int(
        weighs_inner(config) or config.formula.has_down_bias
    )
    return spreads * config.T


def _columns_of_ends(config: DecodeConfig, core: int) -> int:
    """Return the columns of the list, and of transposing x and y."""
    T, axis = config.T, config.h_axis
    tiles = -(-T // PARTITIONS)
    columns = 0
    if config.mode == "selective" and not is_direct(config):
        columns += tiles * config.E
    if not is_direct(config):
        columns += list_width(config)
    if not is_direct_in(config):
        columns += axis.count * T
    if config.gives_rows:
        return columns
    size = -(-T // config.num_cores)
    skipped = core * (2 * size - T) if config.num_cores > 1 else 0
    if size > skipped and not (axis.is_strided and size <= DIRECT_OUT):
        columns += -(-size // PARTITIONS) * axis.count * axis.rows
    return columns
