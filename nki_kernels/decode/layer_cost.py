"""What a launch of `decode_layer` moves and multiplies, counted from its sizes."""

from __future__ import annotations

from math import prod

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.costs import KernelCost
from nki_kernels.common.rank_sums import cost_rank_sum, rest_in_hbm
from nki_kernels.decode.config import DIRECT_IN, item_bytes
from nki_kernels.decode.cost import columns_of_item, cost_decode_moe
from nki_kernels.decode.layer_config import LayerConfig
from nki_kernels.decode.layout import weight_shapes
from nki_kernels.decode.norm import WARM_UPS, is_direct

_WORD_BYTES, _BFLOAT16_BYTES = 4, 2


def cost_decode_layer(
    config: LayerConfig, touched: int, *, norm_bytes: int = 2, residual_bytes: int = 2
) -> KernelCost:
    """Count bytes and columns of a launch; equal to those of its trace.

    Args:
        config: what the kernel is compiled for.
        touched: local experts that some token chose.
        norm_bytes: of an element of the norm's weight.
        residual_bytes: of an element of the residual.
    """
    moe = config.moe
    T, H, K, cores = moe.T, moe.H, moe.K, moe.num_cores
    read = columns = written = 0
    if config.form.has_norm:
        read += cores * H * norm_bytes
        columns += cores * _norm_columns(config)
    read += cores * (_router_bytes(config) - 2 * T * K * _WORD_BYTES)
    passes = moe.h_axis.count + int(config.router.has_bias)
    columns += cores * passes * _tiles(T) * (moe.num_experts // config.router_parts)
    if is_direct(T, moe.h_axis) and T > DIRECT_IN:  # decode_moe transposes these
        columns -= cores * moe.h_axis.count * T
    shared_read, shared_columns = _shared_cost(config)
    read, columns = read + shared_read, columns + shared_columns
    if config.form.has_residual:
        read += min(cores, T) * -(-T // cores) * H * residual_bytes
    if config.form.has_padding:
        read += cores * T * _WORD_BYTES
    if config.form.returns_routing:
        written += 2 * T * K * _WORD_BYTES
    row_bytes = H * (4 if moe.output_dtype == "float32" else 2)
    output = cost_rank_sum(rest_in_hbm(config.form.ranks), T, row_bytes)
    return cost_decode_moe(moe, touched) + KernelCost(read, written, columns) + output


def _shared_cost(config: LayerConfig) -> tuple[int, int]:
    """Return bytes read and columns multiplied for the shared experts and their gate."""
    moe, shared = config.moe, config.shared
    read = columns = 0
    if config.form.shared_width:
        read += sum(prod(shape) for shape in weight_shapes(shared)) * item_bytes(shared)
        columns += shared.E * shared.chunks * columns_of_item(shared)
    if config.form.has_shared_gate:
        read += moe.num_cores * moe.h_axis.count * moe.h_axis.rows * _BFLOAT16_BYTES
        columns += moe.num_cores * moe.h_axis.count * moe.T
    return read, columns


def _tiles(num_tokens: int) -> int:
    return -(-num_tokens // PARTITIONS)


def _norm_columns(config: LayerConfig) -> int:
    """Return the columns with which a core adds up squares, those that warm the engine up too."""
    T, h_axis = config.moe.T, config.moe.h_axis
    alone = int(T % PARTITIONS == 1)  # a token with a tile of its own is squared elsewhere
    products = 0 if is_direct(T, h_axis) else h_axis.count * (T - alone)
    return WARM_UPS * PARTITIONS + products + T


def _router_bytes(config: LayerConfig) -> int:
    """Return the bytes a core reads to route."""
    moe, router = config.moe, config.router
    weight_bytes = 4 if config.form.router_dtype == "float32" else 2
    weight = moe.h_axis.rows * moe.h_axis.count * (moe.num_experts // config.router_parts)
    rows = int(router.has_bias) + int(router.has_selection_bias) * min(PARTITIONS, moe.T)
    return weight * weight_bytes + rows * moe.num_experts * _WORD_BYTES
