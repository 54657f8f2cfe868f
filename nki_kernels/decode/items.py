"""Packed items: how many bytes of a chunk of an expert each partition has, and where they lie.

In MX formats a *word* is four consecutive elements of the axis that is summed over, and the shared
powers of two belong to 8 words, as checkpoints store them. Words lie on partitions in their order,
tiles of up to 128; the columns they are multiplied for go along the partition. An item is two runs
of bytes for each partition:

    gate_up  [h, H/4h, 2, 4, i] words, then scales, then biases [2, 4] float32 of row i = h
    down     [i, H/h * h] words, then scales

The tensor engine takes the scales of 128 words from 16 partitions, four of each quadrant of 32,
which may begin at 4 places in it. So a run has the scales of one tile in four: of gate and up,
tiles of the words; of the down projection, tiles of the columns. Half of the partitions have none.
"""

from __future__ import annotations

from nki_kernels.common.weight_formats import MX_WORD_BYTES
from nki_kernels.decode.config import (
    DecodeConfig,
    extra_floats,
    is_mx,
    packed_rows,
    packed_run,
)

Shape = tuple[int, int]

QUADRANT = 32  # partitions that one call for scales may not cross
PLACES = 4  # where the scales of a tile may begin in a quadrant
GROUP_WORDS = 8  # words that share a power of two


def word_bytes(config: DecodeConfig) -> int:
    """Return the bytes of four weights."""
    return MX_WORD_BYTES[config.weights.format]


def whole_quadrants(rows: int) -> int:
    """Return the partitions that a product of so many words takes."""
    return -(-rows // QUADRANT) * QUADRANT


def scale_place(tile: int) -> int:
    """Return the first partition of a tile's scales."""
    return PLACES * (tile % PLACES)


def in_columns(config: DecodeConfig) -> int:
    """Return the columns of gate and up in an item."""
    return 2 * config.i_axis.count * config.i_axis.rows


def in_words(config: DecodeConfig) -> int:
    """Return the words of gate and up on a partition."""
    return config.h_axis.count // 4 * in_columns(config)


def in_scales(config: DecodeConfig) -> tuple[int, int]:
    """Return where the scales of gate and up begin and end in a run."""
    begin = in_words(config) * word_bytes(config)
    return begin, begin + -(-config.h_axis.count // 4 // PLACES) * in_columns(config)


def in_extras(config: DecodeConfig) -> int:
    """Return where the float32 numbers of a run begin: on a whole word."""
    return -(-in_scales(config)[1] // 4) * 4


def in_shape(config: DecodeConfig) -> Shape:
    """Return partitions and bytes of each, of gate and up of an item."""
    floats = extra_floats(config)
    rows = max(config.h_axis.rows, config.i_axis.rows if floats > 0 else 0)
    return whole_quadrants(rows), in_extras(config) + 4 * floats


def out_words(config: DecodeConfig) -> int:
    """Return the words of the down projection on a partition."""
    return config.h_axis.count * config.h_axis.rows


def out_shape(config: DecodeConfig) -> Shape:
    """Return partitions and bytes of each, of the down projection of an item."""
    scales = -(-config.h_axis.count // PLACES) * config.h_axis.rows
    size = out_words(config) * word_bytes(config) + scales
    return whole_quadrants(config.i_axis.rows), -(-size // 4) * 4


def packed_shapes(config: DecodeConfig) -> tuple[Shape, Shape]:
    """Return partitions and elements of each, of gate and up, and of down weights of an item."""
    if is_mx(config):
        return in_shape(config), out_shape(config)
    gate_up = (packed_rows(config), packed_run(config))
    return gate_up, (config.i_axis.size, config.h_axis.count * config.h_axis.rows)
