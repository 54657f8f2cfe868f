"""Stages of the decode kernels for MX weights: quantise activations on chip, multiply words.

    tokens   [h, H/4h, T] words  = x^T in groups of 8 partitions x 4 elements, e4m3 with a power of
                                   two each, once per launch
    inner    [i, T] words        = the inner activations of an item, which bear the tokens' weights

The tensor engine multiplies words of both sides and their scales, four elements deep at once. The
rest of the kernel does not know: projections come out in PSUM as ever, slot j of word p in tile j.

Sources: NKI 0.6 ISA (nc_matmul_mx, quantize_mx); the guide of MX matmuls; Trainium 3 architecture
guide.
"""

from typing import Any

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.tiles import copy_alternating, rows_of
from nki_kernels.decode.buffers import DecodeBuffers
from nki_kernels.decode.config import DecodeConfig
from nki_kernels.decode.items import (
    GROUP_WORDS,
    PLACES,
    QUADRANT,
    in_columns,
    in_scales,
    in_words,
    out_words,
    scale_place,
    whole_quadrants,
    word_bytes,
)

_QUADRANT_SCALES = QUADRANT // GROUP_WORDS  # partitions of a quadrant that hold its scales


def quantize_tokens(config: DecodeConfig, b: DecodeBuffers, turned_sb: nl.NkiTensor) -> None:
    """Make words of x^T, a [h, H/h, T] view: four elements of a token side by side, quantised."""
    axis, fours_sb = config.h_axis, b.mx.fours[0]
    if axis.tail < fours_sb.shape[0]:
        nisa.memset(dst=fours_sb, value=0.0)
    for quad in range(axis.count // axis.group):
        first = quad * axis.group
        rows = rows_of(axis, first)
        copy_alternating(
            fours_sb[0:rows, quad, 0 : config.T, 0 : axis.group].permute((0, 2, 1)),
            turned_sb[0:rows, first : first + axis.group, 0 : config.T],
            quad,
        )
    nisa.quantize_mx(dst=b.mx.tokens[0], src=fours_sb, dst_scale=b.mx.token_scales[0])


def quantize_inner(config: DecodeConfig, b: DecodeBuffers, item: int) -> None:
    """Make words of the inner activations of an item."""
    ring = item % len(b.mx.inner)
    nisa.quantize_mx(
        dst=b.mx.inner[ring], src=b.mx.inner_fours[ring], dst_scale=b.mx.inner_scales[ring]
    )


def project_words(
    config: DecodeConfig, b: DecodeBuffers, dst_ps: nl.NkiTensor, buffer: int, half: int, tile: int
) -> None:
    """Multiply gate (half 0) or up weights of a tile of I with the tokens, [i, T].

    Args:
        config, b: sizes and buffers.
        dst_ps: [i, T] float32 in PSUM.
        buffer: the weight buffer.
        half: 0 for gate, 1 for up.
        tile: elements tile, tile + 4, .. of the chunk.
    """
    run_sb, width, rows = b.gate_up[buffer], in_columns(config), config.i_axis.rows
    fours = config.h_axis.count // config.h_axis.group
    first = (half * config.i_axis.count + tile) * rows
    columns = slice(first, first + rows)
    words_sb = _words(config, run_sb, in_words(config)).reshape_dim(1, (fours, width))
    begin, end = in_scales(config)
    scales_sb = run_sb[0 : run_sb.shape[0], begin:end].reshape_dim(
        1, ((end - begin) // width, width)
    )
    for quad in range(fours):
        depth = whole_quadrants(rows_of(config.h_axis, quad * config.h_axis.group))
        nisa.nc_matmul_mx(
            dst=dst_ps,
            stationary=words_sb[0:depth, quad, columns],
            moving=b.mx.tokens[0][0:depth, quad, 0 : config.T],
            stationary_scale=scales_sb[_scale_rows(quad, depth), quad // PLACES, columns],
            moving_scale=b.mx.token_scales[0][_scale_rows(0, depth), quad, 0 : config.T],
            accumulate=quad > 0,
        )


def multiply_words_out(
    config: DecodeConfig,
    b: DecodeBuffers,
    dst_ps: nl.NkiTensor,
    item: int,
    tile: int,
    adds: bool,
) -> None:
    """Multiply an item's inner activations with a tile of H of its down weights.

    Args:
        config, b: sizes and buffers.
        dst_ps: [h, T] float32 in PSUM.
        item: number of the item, for the rings.
        tile: of H.
        adds: whether the product is added to what is there.
    """
    run_sb, axis = b.down[item % config.weight_buffers], config.h_axis
    ring, depth, count = item % len(b.mx.inner), run_sb.shape[0], rows_of(axis, tile)
    words_sb = _words(config, run_sb, out_words(config))
    begin = out_words(config) * word_bytes(config) + tile // PLACES * axis.rows
    nisa.nc_matmul_mx(
        dst=dst_ps,
        stationary=words_sb[0:depth, tile * axis.rows : tile * axis.rows + count],
        moving=b.mx.inner[ring],
        stationary_scale=run_sb[_scale_rows(tile, depth), begin : begin + count],
        moving_scale=b.mx.inner_scales[ring][_scale_rows(0, depth), 0 : config.T],
        accumulate=adds,
    )


def _words(config: DecodeConfig, run_sb: nl.NkiTensor, count: int) -> nl.NkiTensor:
    """Return the words of a run, which begins with them."""
    size = count * word_bytes(config)
    return run_sb[0 : run_sb.shape[0], 0:size].view(_word_dtype(config.weights.format))


def _word_dtype(weight_format: str) -> Any:
    """Return the element type of four weights."""
    if weight_format == "float4_e2m1fn_x4":
        return nl.float4_e2m1fn_x4
    if weight_format == "float8_e5m2_x4":
        return nl.float8_e5m2_x4
    return nl.float8_e4m3fn_x4


def _scale_rows(tile: int, depth: int) -> slice:
    """Return the partitions from a tile's first scale to its last."""
    first = scale_place(tile)
    return slice(first, first + depth - QUADRANT + _QUADRANT_SCALES)
