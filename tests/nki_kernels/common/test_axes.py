"""Axes: every element on one partition of one tile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nki_kernels.common.axes import tile_axis, tile_axis_evenly


@given(st.integers(1, 20_000))
def test_an_axis_is_covered_once(size: int) -> None:
    axis = tile_axis(size)
    assert axis.rows <= 128
    assert (axis.count - 1) * axis.rows + axis.tail == size
    assert axis.count <= max(1, 17 * -(-size // 128) // 16)


def test_even_tiles_hold_consecutive_elements() -> None:
    axis = tile_axis_evenly(2880)
    assert (axis.rows, axis.count, axis.tail, axis.is_strided) == (120, 24, 120, False)
