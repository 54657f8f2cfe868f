"""Axes: every element on one partition of one tile."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nki_kernels.common.axes import tile_axis, tile_axis_in_fours
from nki_kernels.common.tiles import elements_of, rows_of


@given(st.integers(1, 20_000))
def test_an_axis_is_covered_once(size: int) -> None:
    axis = tile_axis(size)
    assert axis.rows <= 128
    assert (axis.count - 1) * axis.rows + axis.tail == size
    assert axis.count <= max(1, 17 * -(-size // 128) // 16)


@given(st.integers(1, 3000))
def test_four_tiles_that_alternate_hold_words(num_words: int) -> None:
    axis = tile_axis_in_fours(4 * num_words)
    held = [np.arange(axis.size)[elements_of(axis, tile)] for tile in range(axis.count)]
    assert [len(elements) for elements in held] == [rows_of(axis, t) for t in range(axis.count)]
    words = [np.stack(held[first : first + 4], axis=1) for first in range(0, axis.count, 4)]
    assert np.array_equal(np.concatenate(words).reshape(-1), np.arange(axis.size))
