"""Weights laid out so that every item of the decode kernels is two transfers of long runs.

    gate_up  [E, C, h, run]       run: [H/h, 2, Ic] weights, then float32 numbers, as bytes:
                                  biases [2] and scales [2] of row i = h of the chunk, down scales
                                  [H/h] of these elements of H, or the expert's one
    down     [E, C, Ic, H/h * h]  columns in the order of the tiles of H; with a bias inside
                                  (`bias_is_inside`) Ic + 1 rows, the first chunk's last the bias

C chunks of Ic <= 128 rows; missing rows and columns are zeros. The layout depends on sizes and
formats only, not on the number of tokens. Other down biases stay as they are.

Axes: E experts, C chunks, h partitions of a tile of H, Ic rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_kernels.common.tiles import elements_of, rows_of
from nki_kernels.decode.config import (
    DecodeConfig,
    bias_is_inside,
    extra_floats,
    item_bytes,
    packed_weights,
)
from nki_kernels.decode.items import packed_shapes

Array = NDArray[Any]


def weight_shapes(config: DecodeConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of gate and up, and of down weights in HBM."""
    if config.weights.layout == "packed":
        gate_up, down = packed_shapes(config)
        return (config.E, config.chunks, *gate_up), (config.E, config.chunks, *down)
    return (config.E, config.H, 2 * config.I), (config.E, config.I, config.H)


def pack_gate_up(
    config: DecodeConfig,
    gate_up_EH2I: Array,
    gate_up_bias_E2I: Array | None = None,
    gate_up_scale_E2I: Array | None = None,
    down_scale: Array | None = None,
) -> Array:
    """Return the packed gate and up weights, [E, C, h, run] of the weights' type.

    Args:
        config: a configuration with the packed layout.
        gate_up_EH2I: [E, H, 2I] codes, gate columns first.
        gate_up_bias_E2I: [E, 2I] float32, if the configuration has biases.
        gate_up_scale_E2I: [E, 2I] float32, if it has scales.
        down_scale: [E, H] or [E, 1] float32, as the configuration says.
    """
    h_axis, size = config.h_axis, config.i_axis.size
    shape = weight_shapes(config)[0]
    packed = np.zeros(shape, gate_up_EH2I.dtype)
    weights = packed[..., : packed_weights(config)].reshape(
        (*shape[:3], h_axis.count, 2, size), copy=False
    )
    chunked = _chunk(config, gate_up_EH2I)  # [E, H, 2, C, Ic]
    for tile in range(h_axis.count):
        rows = rows_of(h_axis, tile)
        part = chunked[:, elements_of(h_axis, tile)]
        weights[:, :, :rows, tile] = part.transpose((0, 3, 1, 2, 4))
    if extra_floats(config) == 0:
        return packed
    begin = shape[3] - extra_floats(config) * 4 // item_bytes(config)
    extras = np.ascontiguousarray(packed[..., begin:]).view(np.float32)
    position = 0
    for values in (gate_up_bias_E2I, gate_up_scale_E2I):
        if values is not None:
            per_row = _chunk(config, values[:, None, :])[:, 0].transpose((0, 2, 3, 1))
            extras[:, :, :size, position : position + 2] = per_row
            position += 2
    if config.weights.down_scale == "expert" and down_scale is not None:
        extras[..., position] = down_scale[:, :, None]
    elif down_scale is not None:
        for tile in range(h_axis.count):
            rows = rows_of(h_axis, tile)
            extras[:, :, :rows, position + tile] = down_scale[:, None, elements_of(h_axis, tile)]
    packed[..., begin:] = extras.view(packed.dtype)
    return packed


def pack_down(config: DecodeConfig, down_EIH: Array, down_bias_EH: Array | None = None) -> Array:
    """Return the packed down weights, [E, C, Ic, H/h * h], with a bias inside a row more.

    Args:
        config: a configuration with the packed layout.
        down_EIH: [E, I, H] codes.
        down_bias_EH: [E, H] of the same type; used where `bias_is_inside`.
    """
    h_axis, size = config.h_axis, config.i_axis.size
    packed = np.zeros(weight_shapes(config)[1], down_EIH.dtype)
    tiles = packed.reshape((*packed.shape[:3], h_axis.count, h_axis.rows), copy=False)
    padded = np.zeros((config.E, config.chunks * size, config.H), down_EIH.dtype)
    padded[:, : config.I] = down_EIH
    chunked = padded.reshape(config.E, config.chunks, size, config.H)
    for tile in range(h_axis.count):
        rows, columns = rows_of(h_axis, tile), elements_of(h_axis, tile)
        tiles[:, :, :size, tile, :rows] = chunked[..., columns]
        if bias_is_inside(config) and down_bias_EH is not None:
            tiles[:, 0, size, tile, :rows] = down_bias_EH[:, columns]
    return packed


def _chunk(config: DecodeConfig, values: Array) -> Array:
    """Return [E, n, 2I] values as [E, n, 2, C, Ic], zeros where the last chunk is short."""
    size, (experts, rows) = config.i_axis.size, values.shape[:2]
    halves = values.reshape(experts, rows, 2, config.I)
    padded = np.zeros((experts, rows, 2, config.chunks * size), values.dtype)
    padded[..., : config.I] = halves
    return padded.reshape(experts, rows, 2, config.chunks, size)
