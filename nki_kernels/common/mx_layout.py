"""MX weights from the order of checkpoints into that of mx.py: bytes move, none changes.

    words   [E, X, W]    four consecutive elements of the axis that is summed over, W words of it;
                         uint16 (the first element in the lowest bits) or uint32
    scales  [E, X, W/8]  uint8, s for 2^(s - 127)

X are the output channels: of gate and up [2I], gate first, over words of H; of the down projection
[H] over words of I, whose last group is filled up with zeros. That is the order of MXFP4
checkpoints, whose blocks [E, X, W/8, 16] of bytes are these words.

Axes: E experts, C chunks, h and i words on partitions, u tiles of words of H, G groups of 8 words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_kernels.common.axes import AxisTiles
from nki_kernels.common.mx import (
    GROUP_WORDS,
    PLACES,
    QUADRANT,
    MxForm,
    fours_of,
    in_biases,
    in_scales,
    in_shape,
    in_words,
    out_shape,
    out_words,
    scale_place,
)
from nki_kernels.common.weight_formats import MX_GROUP, MX_WORD_BYTES

Array = NDArray[Any]


def pack_mx_gate_up(
    form: MxForm,
    words_EXW: Array,
    scales_EXG: Array,
    gate_up_bias_E2I: Array | None = None,
) -> Array:
    """Return the packed gate and up weights, [E, C, h, run] bytes.

    Args:
        form: layout to make.
        words_EXW: [E, 2I, H/4] words, gate channels first.
        scales_EXG: [E, 2I, H/32] uint8.
        gate_up_bias_E2I: [E, 2I] float32, if the form has biases.

    Raises:
        ValueError: shapes that are not those of the form.
    """
    words_EXW = _checked(words_EXW, "words_EXW", (2 * form.I, form.H // 4))
    scales_EXG = _checked(scales_EXG, "scales_EXG", (2 * form.I, form.H // MX_GROUP))
    axis, E, C = form.h_axis, len(words_EXW), form.chunks
    fours = fours_of(axis)
    packed = np.zeros((E, C, *in_shape(form)), np.uint8)
    # To h, tile of H, half, slot of I, word of I inside a chunk.
    words = _by_chunk(form, _filled(words_EXW, fours * axis.rows))
    words = words.reshape(*words.shape[:5], fours, axis.rows).transpose(0, 2, 6, 5, 1, 4, 3)
    size = in_words(form) * MX_WORD_BYTES[form.format]
    as_bytes = np.ascontiguousarray(words).reshape(E, C, axis.rows, -1).view(np.uint8)
    packed[:, :, : axis.rows, :size] = as_bytes
    # To group of H in its tile, tile of H, columns.
    groups = _groups(axis)
    scales = _by_chunk(form, _filled(scales_EXG, fours * groups))
    scales = scales.reshape(*scales.shape[:5], fours, groups).transpose(0, 2, 6, 5, 1, 4, 3)
    scales = np.ascontiguousarray(scales).reshape(E, C, groups, fours, -1)
    begin, end = in_scales(form)
    room = np.zeros((E, C, packed.shape[2], -(-fours // PLACES), scales.shape[-1]), np.uint8)
    for tile in range(fours):
        room[:, :, _scale_rows(groups, tile), tile // PLACES] = scales[:, :, :, tile]
    packed[..., begin:end] = room.reshape(*room.shape[:3], -1)
    if gate_up_bias_E2I is not None:
        bias = np.asarray(gate_up_bias_E2I, np.float32)[..., None]
        biases = _by_chunk(form, bias)[..., 0].transpose(0, 2, 3, 1, 4)  # [E, C, i, 2, slot]
        biases = np.ascontiguousarray(biases).reshape(E, C, form.i_axis.rows, -1)
        packed[:, :, : form.i_axis.rows, in_biases(form) :] = biases.view(np.uint8)
    return packed


def pack_mx_down(form: MxForm, words_EXW: Array, scales_EXG: Array) -> Array:
    """Return the packed down weights, [E, C, i, run] bytes.

    Args:
        form: layout to make.
        words_EXW: [E, H, 8 ceil(I/32)] words.
        scales_EXG: [E, H, ceil(I/32)] uint8.

    Raises:
        ValueError: shapes that are not those of the form.
    """
    groups = -(-form.I // MX_GROUP)
    words_EXW = _checked(words_EXW, "words_EXW", (form.H, groups * GROUP_WORDS))
    scales_EXG = _checked(scales_EXG, "scales_EXG", (form.H, groups))
    E, C, rows = len(words_EXW), form.chunks, form.i_axis.rows
    packed = np.zeros((E, C, *out_shape(form)), np.uint8)
    words = _columns_in_tiles(form.h_axis, _filled(words_EXW, C * rows))
    words = np.ascontiguousarray(words).reshape(E, C, rows, -1)
    size = out_words(form) * MX_WORD_BYTES[form.format]
    packed[:, :, :rows, :size] = words.view(np.uint8)
    own = rows // GROUP_WORDS
    scales = _columns_in_tiles(form.h_axis, _filled(scales_EXG, C * own))
    tiles, width = scales.shape[2:]
    scales = scales.reshape(E, C, own, tiles, width)
    room = np.zeros((E, C, packed.shape[2], -(-tiles // PLACES), width), np.uint8)
    for tile in range(tiles):
        room[:, :, _scale_rows(own, tile), tile // PLACES] = scales[:, :, :, tile]
    count = room.shape[3] * width
    packed[..., size : size + count] = room.reshape(*room.shape[:3], -1)
    return packed


def _checked(values: Array, name: str, shape: tuple[int, ...]) -> Array:
    if values.shape[1:] != shape:
        raise ValueError(
            f"{name}: shape {list(values.shape)} must be [E, {shape[0]}, {shape[1]}]. Give the"
            " weights of these sizes, output channels before what is summed over."
        )
    return values


def _filled(values: Array, width: int) -> Array:
    """Return the values with zeros at the end of the last axis."""
    missing = width - values.shape[-1]
    return np.pad(values, ((0, 0),) * (values.ndim - 1) + ((0, missing),)) if missing else values


def _by_chunk(form: MxForm, values: Array) -> Array:
    """Return [E, 2I, n] values as [E, 2, C, word of I, slot, n], zeros past the end of I."""
    E, C, rows = len(values), form.chunks, form.i_axis.rows
    padded = np.zeros((E, 2, C * rows * 4, values.shape[-1]), values.dtype)
    padded[:, :, : form.I] = values.reshape(E, 2, form.I, -1)
    return padded.reshape(E, 2, C, rows, 4, -1)


def _columns_in_tiles(axis: AxisTiles, values: Array) -> Array:
    """Return [E, H, n] values as [E, n, tiles of H, elements of a tile]."""
    E, H, n = values.shape
    fours = axis.count // axis.group
    padded = np.zeros((E, fours * axis.rows * axis.group, n), values.dtype)
    padded[:, :H] = values
    tiled = padded.reshape(E, fours, axis.rows, axis.group, n).transpose(0, 4, 1, 3, 2)
    return np.ascontiguousarray(tiled).reshape(E, n, axis.count, axis.rows)


def _groups(axis: AxisTiles) -> int:
    """Return the groups of a tile of words."""
    return axis.rows // GROUP_WORDS


def _scale_rows(groups: int, tile: int) -> Array:
    """Return the partitions of the scales of a tile of so many groups."""
    per_quadrant = QUADRANT // GROUP_WORDS
    group = np.arange(groups)
    return group // per_quadrant * QUADRANT + scale_place(tile) + group % per_quadrant
