"""How an axis is cut into tiles on the partitions."""

from __future__ import annotations

from dataclasses import dataclass

from nki.language import NKIObject

from nki_kernels.common.chip import PARTITIONS


@dataclass(frozen=True)
class AxisTiles(NKIObject):
    """An axis spread over partitions in `count` tiles of `rows` (the last one of `tail`).

    With `is_strided`, row p of tile t is element p * count + t: a partition owns consecutive
    elements, so that its part of a matrix is one contiguous run. Otherwise `group` tiles at a time
    alternate: it is (t // group) * group * rows + p * group + t % group, and the last group has
    `tail` rows a tile.
    """

    size: int
    rows: int
    count: int
    tail: int
    is_strided: bool
    group: int = 1


def tile_axis(size: int) -> AxisTiles:
    """Cut an axis into tiles of at most 128 rows.

    The strided form needs a divisor; it is taken if it costs at most 1/16 more tiles.

    Example:
        >>> tile_axis(2880).rows, tile_axis(2880).count
        (120, 24)
    """
    fewest = -(-size // PARTITIONS)
    count = fewest
    while size % count:
        count += 1
    if 16 * count <= 17 * fewest:
        return AxisTiles(size, size // count, count, size // count, True)
    return AxisTiles(size, PARTITIONS, fewest, size - (fewest - 1) * PARTITIONS, False)


def tile_axis_in_fours(size: int, most_rows: int = PARTITIONS) -> AxisTiles:
    """Cut an axis into tiles of which four alternate: 4 consecutive elements are one MX word.

    Args:
        size: a multiple of 4.
        most_rows: words of a tile, if there are more of them.
    """
    words = size // 4
    fours = -(-words // most_rows)
    rows = min(words, most_rows)
    return AxisTiles(size, rows, 4 * fours, words - (fours - 1) * rows, False, 4)
