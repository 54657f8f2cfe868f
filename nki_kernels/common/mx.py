"""Experts in MX words: the layout of their bytes, and matmuls with them.

In MX formats a *word* is four consecutive elements of the axis that is summed over, and the shared
powers of two belong to 8 words, as checkpoints store them. Words are on partitions in their order,
tiles of up to 128; the columns they are multiplied for go along the partition. An expert comes in
chunks of its intermediate axis; a chunk is two runs of bytes for each partition:

    gate_up  [h, H/4h, 2, 4, i] words, then scales, then biases [2, 4] float32 of row i = h
    down     [i, H/h * h] words, then scales

Slot j of word p of the intermediate axis is row p of tile j, and so for the hidden axis: axes are
in fours of tiles. The tensor engine takes the scales of 128 words from 16 partitions, four of each
quadrant of 32, which may begin at 4 places in it. So a run has the scales of one tile in four: of
gate and up, tiles of the words; of the down projection, tiles of the columns. Half of the
partitions have none.

Sources: NKI 0.6 ISA (nc_matmul_mx, quantize_mx); the guide of MX matmuls; Trainium 3 architecture
guide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

from nki_kernels.common.axes import AxisTiles, tile_axis_in_fours
from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.tiles import rows_of
from nki_kernels.common.weight_formats import MX_GROUP, MX_WORD_BYTES

QUADRANT = 32  # partitions that one call for scales may not cross
PLACES = 4  # where the scales of a tile may begin in a quadrant
WORD = 4  # elements
GROUP_WORDS = MX_GROUP // WORD  # words that share a power of two
_QUADRANT_SCALES = QUADRANT // GROUP_WORDS  # partitions of a quadrant that hold its scales
_MAX_CHUNK_BYTES = 48 * 1024  # per partition, of the words of a chunk

Shape = tuple[int, int]


@dataclass(frozen=True)
class MxForm(NKIObject):
    """The layout of the experts of a rank.

    Attributes:
        format: one of MX_WORD_BYTES.
        H: hidden size.
        I: intermediate size of this rank.
        chunks: C, of the intermediate axis.
        has_bias: runs of gate and up have biases.
        h_axis: the hidden axis on partitions.
        i_axis: the intermediate axis of a chunk.
    """

    format: str
    H: int
    I: int  # noqa: E741  the axis letter
    chunks: int
    has_bias: bool
    h_axis: AxisTiles
    i_axis: AxisTiles


def make_mx_form(
    weight_format: str,
    H: int,
    I: int,  # noqa: E741  the axis letter
    chunks: int,
    has_bias: bool,
) -> MxForm:
    """Return the layout of experts of some sizes in so many chunks, each of whole groups."""
    i_axis = tile_axis_in_fours(-(-I // (chunks * MX_GROUP)) * MX_GROUP)
    return MxForm(weight_format, H, I, chunks, has_bias, tile_axis_in_fours(H), i_axis)


def is_mx_format(weight_format: str) -> bool:
    """Whether a format has words of four elements and scales of its own."""
    return weight_format.endswith("_x4")


def mx_chunks(
    weight_format: str,
    H: int,
    I: int,  # noqa: E741  the axis letter
    is_alone: bool,
) -> int:
    """Return the chunks of an expert: up to 128 words of I each, few bytes.

    Args:
        weight_format: one of MX_WORD_BYTES.
        H: hidden size.
        I: intermediate size of this rank.
        is_alone: a step may touch a single expert. Then the number is even, so that the cores can
            share it; it is where there are several chunks, too.
    """
    chunks = -(-I // (WORD * PARTITIONS))
    if chunks > 1 or (is_alone and I > MX_GROUP):
        chunks = -(-chunks // 2) * 2
    bytes_each = MX_WORD_BYTES[weight_format] / WORD
    while bytes_each * H * (2 * I / chunks / PARTITIONS + 1) > _MAX_CHUNK_BYTES:
        if I <= MX_GROUP * chunks:
            return chunks
        chunks = 2 * chunks
    return chunks


def whole_quadrants(rows: int) -> int:
    """Return the partitions that a product of so many words takes."""
    return -(-rows // QUADRANT) * QUADRANT


def scale_place(tile: int) -> int:
    """Return the first partition of a tile's scales."""
    return PLACES * (tile % PLACES)


def fours_of(axis: AxisTiles) -> int:
    """Return the tiles of words of an axis."""
    return axis.count // axis.group


def num_biases(form: MxForm) -> int:
    """Return the float32 numbers at the end of a run of gate and up."""
    return 2 * form.i_axis.count if form.has_bias else 0


def in_columns(form: MxForm) -> int:
    """Return the columns of gate and up in a chunk."""
    return 2 * form.i_axis.count * form.i_axis.rows


def in_words(form: MxForm) -> int:
    """Return the words of gate and up on a partition."""
    return fours_of(form.h_axis) * in_columns(form)


def in_scales(form: MxForm) -> Shape:
    """Return where the scales of gate and up begin and end in a run."""
    begin = in_words(form) * MX_WORD_BYTES[form.format]
    return begin, begin + -(-fours_of(form.h_axis) // PLACES) * in_columns(form)


def in_biases(form: MxForm) -> int:
    """Return where the biases of a run begin: on a whole word of float32."""
    return -(-in_scales(form)[1] // 4) * 4


def in_shape(form: MxForm) -> Shape:
    """Return partitions and bytes of each, of gate and up of a chunk."""
    rows = max(form.h_axis.rows, form.i_axis.rows if form.has_bias else 0)
    return whole_quadrants(rows), in_biases(form) + 4 * num_biases(form)


def out_words(form: MxForm) -> int:
    """Return the words of the down projection on a partition."""
    return form.h_axis.count * form.h_axis.rows


def out_shape(form: MxForm) -> Shape:
    """Return partitions and bytes of each, of the down projection of a chunk."""
    scales = -(-form.h_axis.count // PLACES) * form.h_axis.rows
    size = out_words(form) * MX_WORD_BYTES[form.format] + scales
    return whole_quadrants(form.i_axis.rows), -(-size // 4) * 4


def bias_tile(form: MxForm, run_sb: nl.NkiTensor) -> nl.NkiTensor:
    """Return the biases [i, 2, 4] float32 of a run of gate and up."""
    begin = in_biases(form)
    part_sb = run_sb[0 : run_sb.shape[0], begin:]
    return part_sb.view(nl.float32).reshape_dim(1, (2, form.i_axis.count))


def quantize(words_sb: nl.NkiTensor, fours_sb: nl.NkiTensor, scales_sb: nl.NkiTensor) -> None:
    """Make words of e4m3 of activations whose elements are four by four, a scale for 8 words."""
    nisa.quantize_mx(dst=words_sb, src=fours_sb, dst_scale=scales_sb)


def project_words(
    form: MxForm,
    dst_ps: nl.NkiTensor,
    run_sb: nl.NkiTensor,
    words_sb: nl.NkiTensor,
    scales_sb: nl.NkiTensor,
    half: int,
    tile: int,
) -> None:
    """Multiply gate (half 0) or up weights of a tile of a chunk with tokens, [i, T].

    Args:
        form: layout of the experts.
        dst_ps: [i, T] float32 in PSUM.
        run_sb: the chunk's gate and up.
        words_sb, scales_sb: tokens as words, [h, H/4h, T].
        half: 0 for gate, 1 for up.
        tile: elements tile, tile + 4, .. of the chunk.
    """
    width, rows, T = in_columns(form), form.i_axis.rows, words_sb.shape[2]
    first = (half * form.i_axis.count + tile) * rows
    columns = slice(first, first + rows)
    fours = fours_of(form.h_axis)
    weights_sb = _words(form, run_sb, in_words(form)).reshape_dim(1, (fours, width))
    begin, end = in_scales(form)
    powers_sb = run_sb[0 : run_sb.shape[0], begin:end].reshape_dim(
        1, ((end - begin) // width, width)
    )
    for quad in range(fours):
        depth = whole_quadrants(rows_of(form.h_axis, quad * form.h_axis.group))
        nisa.nc_matmul_mx(
            dst=dst_ps,
            stationary=weights_sb[0:depth, quad, columns],
            moving=words_sb[0:depth, quad, 0:T],
            stationary_scale=powers_sb[scale_rows(quad, depth), quad // PLACES, columns],
            moving_scale=scales_sb[scale_rows(0, depth), quad, 0:T],
            accumulate=quad > 0,
        )


def out_weights(form: MxForm, run_sb: nl.NkiTensor, tile: int) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Return words [i, h] of a chunk's down projection for a tile of H, and their scales."""
    rows, count, depth = form.h_axis.rows, rows_of(form.h_axis, tile), run_sb.shape[0]
    words_sb = _words(form, run_sb, out_words(form))
    begin = out_words(form) * MX_WORD_BYTES[form.format] + tile // PLACES * rows
    return (
        words_sb[0:depth, tile * rows : tile * rows + count],
        run_sb[scale_rows(tile, depth), begin : begin + count],
    )


def scale_rows(tile: int, depth: int) -> slice:
    """Return the partitions from a tile's first scale to its last."""
    first = scale_place(tile)
    return slice(first, first + depth - QUADRANT + _QUADRANT_SCALES)


def _words(form: MxForm, run_sb: nl.NkiTensor, count: int) -> nl.NkiTensor:
    """Return the words of a run, which begins with them."""
    size = count * MX_WORD_BYTES[form.format]
    return run_sb[0 : run_sb.shape[0], 0:size].view(_word_dtype(form.format))


def _word_dtype(weight_format: str) -> Any:
    """Return the element type of four weights."""
    if weight_format == "float4_e2m1fn_x4":
        return nl.float4_e2m1fn_x4
    if weight_format == "float8_e5m2_x4":
        return nl.float8_e5m2_x4
    return nl.float8_e4m3fn_x4
