"""Stages of the decode kernels for MX weights: quantise activations on chip, multiply words.

    tokens   [h, H/4h, T] words  = x^T in groups of 8 partitions x 4 elements, e4m3 with a power of
                                   two each, once per launch
    inner    [i, T] words        = the inner activations of an item, which bear the tokens' weights

The rest of the kernel does not know: projections come out in PSUM as ever (common/mx.py).
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.mx import out_weights, project_words, quantize
from nki_kernels.common.tiles import copy_alternating, rows_of
from nki_kernels.decode.buffers import DecodeBuffers
from nki_kernels.decode.items import mx_form


def quantize_tokens(b: DecodeBuffers, transposed_sb: nl.NkiTensor) -> None:
    """Make words of x^T, a [h, H/h, T] view: four elements of a token side by side, quantised."""
    config = b.config
    axis, fours_sb = config.h_axis, b.mx.fours[0]
    # Whole quadrants are quantised: what no element fills must be a number.
    if axis.tail < fours_sb.shape[0]:
        nisa.memset(dst=fours_sb, value=0.0)
    for quad in range(axis.count // axis.group):
        first = quad * axis.group
        rows = rows_of(axis, first)
        copy_alternating(
            fours_sb[0:rows, quad, 0 : config.T, 0 : axis.group].permute((0, 2, 1)),
            transposed_sb[0:rows, first : first + axis.group, 0 : config.T],
            quad,
        )
    quantize(b.mx.tokens[0], fours_sb, b.mx.token_scales[0])


def quantize_inner(b: DecodeBuffers, item: int) -> None:
    """Make words of the inner activations of an item."""
    ring = item % len(b.mx.inner)
    quantize(b.mx.inner[ring], b.mx.inner_fours[ring], b.mx.inner_scales[ring])


def project_words_in(
    b: DecodeBuffers, dst_ps: nl.NkiTensor, buffer: int, half: int, tile: int
) -> None:
    """Multiply gate (half 0) or up weights of a tile of I with the tokens, [i, T]."""
    tokens_sb, scales_sb = b.mx.tokens[0], b.mx.token_scales[0]
    project_words(mx_form(b.config), dst_ps, b.gate_up[buffer], tokens_sb, scales_sb, half, tile)


def multiply_words_out(
    b: DecodeBuffers, dst_ps: nl.NkiTensor, item: int, tile: int, adds: bool
) -> None:
    """Multiply an item's inner activations with a tile of H of its down weights.

    Args:
        b: buffers.
        dst_ps: [h, T] float32 in PSUM.
        item: number of the item, for the rings.
        tile: of H.
        adds: whether the product is added to what is there.
    """
    run_sb, ring = b.down[item % b.config.weight_buffers], item % len(b.mx.inner)
    words_sb, powers_sb = out_weights(mx_form(b.config), run_sb, tile)
    nisa.nc_matmul_mx(
        dst=dst_ps,
        stationary=words_sb,
        moving=b.mx.inner[ring],
        stationary_scale=powers_sb,
        moving_scale=b.mx.inner_scales[ring],
        accumulate=adds,
    )
