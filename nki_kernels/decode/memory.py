"""What the decode kernels keep in SBUF: tables that allocation and accounting both read.

Some small buffers that depend on biases, scales or scaling are counted as many as any of these
needs, so that the fit of the weights is the same.
"""

from __future__ import annotations

from typing import NamedTuple

import nki.language as nl

from nki_kernels.common.chip import BANK_FLOATS, PARTITIONS
from nki_kernels.common.memory import Tiles, tiles
from nki_kernels.common.mx import whole_quadrants
from nki_kernels.common.tiles import weight_dtype
from nki_kernels.decode.config import (
    DecodeConfig,
    bias_partitions,
    bias_quadrants,
    group_size,
    is_direct,
    is_direct_in,
    is_direct_out,
    is_mx,
    keeps_scales,
    list_width,
    loads_bias,
    most_exchanged,
    most_tiles,
    output_dtype,
    rows_out,
    shares_halves,
    sum_shape,
)
from nki_kernels.decode.items import packed_shapes


class TokenTable(NamedTuple):
    """The tokens and their sums, which every expert works on."""

    transposed: Tiles  # x^T
    total: Tiles  # y, in rows or transposed


def token_table(config: DecodeConfig) -> TokenTable:
    """Return the buffers of tokens and sums."""
    rows, count, T = config.h_axis.rows, config.h_axis.count, config.T
    shape = (rows, count, T)
    if is_direct_in(config):
        shape = (rows, T, count)
    return TokenTable(tiles(1, shape, nl.bfloat16), tiles(1, sum_shape(config), nl.float32))


class ExpertTable(NamedTuple):
    """What computing experts takes; the names are those of `DecodeBuffers`."""

    gate_up: Tiles
    down: Tiles
    gate_up_bias: Tiles
    gate_up_scale: Tiles
    down_scale: Tiles
    down_bias: Tiles
    kept_scale: Tiles
    inner: Tiles
    gate: Tiles
    up: Tiles
    column_row: Tiles
    input_scale: Tiles
    experts: Tiles
    weights: Tiles
    inputs: Tiles
    scratch: Tiles
    halves: Tiles  # projections of the other core's tiles, and those from it


def expert_table(config: DecodeConfig) -> ExpertTable:
    """Return the buffers of experts: weights, what belongs to them, and activations on the way."""
    T, count, h_axis, i_axis = config.T, config.weight_buffers, config.h_axis, config.i_axis
    formula, form, weights = config.formula, config.weights, weight_dtype(config.weights.format)
    is_packed, by_channel = form.layout == "packed", form.down_scale == "channel"
    gate_up = (h_axis.rows, most_tiles(h_axis, config) * 2 * i_axis.size)
    down = (i_axis.rows, most_tiles(i_axis, config) * config.H)
    inner = (rows_out(config), i_axis.count, T)
    if is_packed:
        gate_up, down = packed_shapes(config)
    if is_mx(config):
        inner = (whole_quadrants(i_axis.rows), T, i_axis.count)
    # A packed run has biases and scales in it.
    apart = 0 if is_packed else count
    per_row = (i_axis.rows, 2, i_axis.count)
    scales = (PARTITIONS, h_axis.count if by_channel else 1, 1)
    numbers = (min(T, PARTITIONS), config.unroll)
    row_tiles = -(-T // PARTITIONS)
    halves = (i_axis.rows, most_exchanged(config), 2 * T)
    down_bias = (bias_partitions(config), config.H // bias_quadrants(config))
    chunks = 2 * group_size(config) if config.parts == 1 else 2
    return ExpertTable(
        gate_up=tiles(count, gate_up, weights),
        down=tiles(count, down, weights),
        gate_up_bias=Tiles(apart if formula.has_gate_up_bias else 0, per_row, nl.float32, count),
        gate_up_scale=Tiles(apart if form.has_scales else 0, per_row, nl.float32, count),
        down_scale=Tiles(
            apart if form.down_scale != "none" else 0,
            scales,
            nl.float32,
            count if by_channel else 0,
        ),
        down_bias=tiles(count if loads_bias(config) else 0, down_bias, nl.bfloat16),
        kept_scale=Tiles(
            2 if keeps_scales(config) else 0, scales, nl.float32, 2 if by_channel else 0
        ),
        inner=tiles(chunks, inner, nl.bfloat16),
        gate=tiles(2, (i_axis.rows, T), nl.float32),
        up=tiles(2, (rows_out(config), T), nl.float32),
        column_row=Tiles(
            2 if loads_bias(config) else 0, (bias_partitions(config), T), nl.bfloat16, 2
        ),
        input_scale=Tiles(2 if config.scaling == "pre" else 0, (PARTITIONS, T), nl.float32, 2),
        experts=tiles(1, (1, config.unroll), nl.int32),
        weights=tiles(row_tiles, numbers, nl.float32),
        inputs=tiles(row_tiles, numbers, nl.float32),
        scratch=tiles(_scratch_banks(config), (PARTITIONS, BANK_FLOATS), nl.float32),
        halves=tiles(2 * int(shares_halves(config)), halves, nl.float32),
    )


class MxTable(NamedTuple):
    """What quantised activations take; the names are those of `MxBuffers`."""

    fours: Tiles
    tokens: Tiles
    token_scales: Tiles
    inner: Tiles
    inner_scales: Tiles


def mx_table(config: DecodeConfig) -> MxTable:
    """Return the buffers of quantised activations, none where weights are no MX words."""
    is_used, T = int(is_mx(config)), config.T
    count = is_used * expert_table(config).inner.number
    shape = (whole_quadrants(config.h_axis.rows), config.h_axis.count // 4, T)
    inner = (whole_quadrants(config.i_axis.rows), T)
    return MxTable(
        fours=tiles(is_used, (*shape, 4), nl.bfloat16),
        tokens=tiles(is_used, shape, nl.float8_e4m3fn_x4),
        token_scales=tiles(is_used, shape, nl.uint8),
        inner=tiles(count, inner, nl.float8_e4m3fn_x4),
        inner_scales=tiles(count, inner, nl.uint8),
    )


def _scratch_banks(config: DecodeConfig) -> int:
    """Return how many banks of y may wait for GpSimd on their way to sums in SBUF."""
    return 6 if config.T <= 128 else 3


class RoutingTable(NamedTuple):
    """What the loop over experts goes by; the names are those of `Routing`."""

    listed: Tiles
    weights: Tiles
    inputs: Tiles


def routing_table(config: DecodeConfig) -> RoutingTable:
    """Return the buffers of the list and of what tokens take of its entries."""
    wide = list_width(config)
    listed = (1, wide)
    if config.mode == "selective" and not is_direct(config):
        # nonzero_with_count takes all partitions and gives E entries and their number.
        listed = (PARTITIONS, config.E + 1)
    table = tiles(-(-config.T // PARTITIONS), (min(config.T, PARTITIONS), wide), nl.float32)
    return RoutingTable(
        listed=tiles(1, listed, nl.int32),
        weights=table,
        inputs=table if config.scaling == "pre" else tiles(0, (1, 1), nl.float32),
    )


class EndsTable(NamedTuple):
    """Rows of tokens at the two ends of a kernel."""

    loaded: Tiles  # before they are transposed
    received: Tiles  # sums of the other core
    stored: Tiles  # rows of y, rounded
    residual: Tiles  # what is added to them


def ends_table(config: DecodeConfig) -> EndsTable:
    """Return the buffers of the ends.

    A core stores its share of the tokens, 128 at a time, or its share of the columns of rows.
    """
    T, rows, count = config.T, config.h_axis.rows, config.h_axis.count
    share = -(-T // config.num_cores)
    received: tuple[int, ...] = (rows, count, T)
    stored: tuple[int, ...] = (min(share, PARTITIONS), rows * count)
    if is_direct_out(config, share):
        stored = (rows, share, count)
    if config.gives_rows:
        received = stored = (T, config.H // config.num_cores)
    loaded = (min(T, PARTITIONS), config.H)
    return EndsTable(
        loaded=tiles(-(-T // PARTITIONS), loaded, nl.bfloat16),
        received=tiles(1, received, nl.float32),
        stored=tiles(1, stored, output_dtype(config)),
        residual=tiles(1, stored, nl.bfloat16),
    )
