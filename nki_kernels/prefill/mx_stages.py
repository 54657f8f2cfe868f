"""Stages of the prefill kernel for MX weights: transpose rows into words, multiply words.

Legend: s parity of a work tile, j row tile of a work tile, part of the intermediate axis, quad:
four tiles of the hidden axis, which hold the four elements of words.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.mx import (
    fours_of,
    out_weights,
    project_words,
    quantize,
    scale_rows,
)
from nki_kernels.common.tiles import copy_alternating, elements_of, rows_of
from nki_kernels.prefill.buffers import Buffers
from nki_kernels.prefill.config import mx_form


def transpose_into_words(b: Buffers, rows_sb: nl.NkiTensor, transposed: int, j: int) -> None:
    """Transpose a row tile so that four elements are side by side, and quantise it.

    Args:
        b: sizes and buffers.
        rows_sb: [R, H] rows.
        transposed: which buffer of words to fill.
        j: the row tile.
    """
    axis, R, fours_sb = b.config.h_axis, b.config.tile_rows, b.transposed[j % 2]
    for quad in range(fours_of(axis)):
        first = quad * axis.group
        rows = rows_of(axis, first)
        bank_ps = b.transposed_ps[quad % len(b.transposed_ps)]
        for slot in range(axis.group):
            nisa.nc_transpose(
                dst=bank_ps[0:rows, slot * R : (slot + 1) * R],
                data=rows_sb[0:R, elements_of(axis, first + slot)],
                engine=nisa.engine.tensor,
            )
        # The transposes leave the four elements of a word in four runs; this copy interleaves them.
        copy_alternating(
            fours_sb[0:rows, quad, 0:R, 0 : axis.group].permute((0, 2, 1)),
            bank_ps[0:rows, 0 : axis.group * R],
            quad,
        )
    quantize(b.words[transposed], fours_sb, b.word_scales[transposed])


def multiply_words_in(
    b: Buffers, buffer: int, transposed: int, tile: int, bank_ps: nl.NkiTensor
) -> None:
    """Multiply a row tile with one tile of the gate and up words of a part."""
    config = b.config
    form, rows, R = mx_form(config), config.i_axis.rows, config.tile_rows
    # Quantised once a row tile; every tile of I reads the same words.
    words_sb, scales_sb = b.words[transposed], b.word_scales[transposed]
    for half in range(2):
        dst_ps = bank_ps[0:rows, half, 0:R]
        project_words(form, dst_ps, b.gate_up[buffer], words_sb, scales_sb, half, tile)


def quantize_inner(b: Buffers, inner: int, part: int) -> None:
    """Make words of what goes into the down projection, of one part of the intermediate axis."""
    rows, R = b.inner[inner].shape[0], b.config.tile_rows
    quantize(
        b.inner_words[inner][0:rows, part, 0:R],
        b.inner[inner][0:rows, part, 0:R, 0 : b.config.i_axis.group],
        b.inner_scales[inner][0:rows, part, 0:R],
    )


def project_words_out(b: Buffers, buffer: int, s: int, j: int, outer: int) -> None:
    """Multiply with the down words; leave the rows in `outer`, elements in their order."""
    config = b.config
    axis, R = config.h_axis, config.tile_rows
    for quad in range(fours_of(axis)):
        first = quad * axis.group
        rows = rows_of(axis, first)
        bank_ps = b.outer_ps[quad % len(b.outer_ps)]
        for slot in range(axis.group):
            dst_ps = bank_ps[0:R, slot * rows : (slot + 1) * rows]
            _multiply_tile(b, dst_ps, buffer, j, first + slot)
            if b.share.adds_bias and config.formula.has_down_bias:
                nisa.nc_matmul(
                    dst=dst_ps,
                    stationary=b.ones[0:1, 0:R],
                    moving=b.down_bias[buffer][0:1, elements_of(axis, first + slot)],
                    accumulate=True,
                )
        begin = first * axis.rows
        # Slot k holds every fourth column, from the k-th on: the eviction puts them back in order.
        wide_sb = b.outer[outer][0:R, begin : begin + axis.group * rows]
        outer_sb = wide_sb.reshape_dim(1, (rows, axis.group)).permute((0, 2, 1))
        evict(b, s, j, outer_sb, bank_ps[0:R, 0 : axis.group * rows], quad)


def _multiply_tile(b: Buffers, dst_ps: nl.NkiTensor, buffer: int, j: int, tile: int) -> None:
    """Multiply a row tile's words with a tile of H of all parts of the down words, [R, h]."""
    form, R = mx_form(b.config), b.config.tile_rows
    depth, parts, run = b.down[buffer].shape
    for part in range(parts):
        words_sb, powers_sb = out_weights(form, b.down[buffer][0:depth, part, 0:run], tile)
        nisa.nc_matmul_mx(
            dst=dst_ps,
            stationary=b.inner_words[j][0:depth, part, 0:R],
            moving=words_sb,
            stationary_scale=b.inner_scales[j][scale_rows(0, depth), part, 0:R],
            moving_scale=powers_sb,
            accumulate=part > 0,
        )


def evict(
    b: Buffers, s: int, j: int, outer_sb: nl.NkiTensor, rows_ps: nl.NkiTensor, turn: int
) -> None:
    """Move output rows out of PSUM: scale them if asked, and round once."""
    if b.config.scaling == "post":
        nisa.tensor_scalar(
            dst=outer_sb,
            data=rows_ps,
            op0=nl.multiply,
            operand0=b.out_scale[s][0 : b.config.tile_rows, j : j + 1],
            engine=nisa.engine.vector if turn % 2 == 1 else nisa.engine.scalar,
        )
    else:
        copy_alternating(outer_sb, rows_ps, turn + 1)
