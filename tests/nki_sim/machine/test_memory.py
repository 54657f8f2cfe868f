"""The record of defined bytes agrees with a plain mask, whatever is added and removed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_sim import dtypes
from nki_sim.machine import memory
from nki_sim.machine.memory import Allocation, Box, Coverage, MemoryRegion, Walk

ROWS, PITCH, UNIT = 8, 32, 4


def accesses() -> Any:
    """Boxes with a column step: (first row, rows, first byte, elements, step, bytes an element)."""
    return st.tuples(
        st.integers(0, ROWS - 1),
        st.integers(1, ROWS),
        st.sampled_from([0, 4, 8, 12, 2, 6]),
        st.integers(1, 8),
        st.integers(1, 2),
        st.sampled_from([1, 2, 4]),
    )


def as_walk(access: tuple[int, ...]) -> tuple[Box, Walk] | None:
    row, rows, byte, count, step, item = access
    rows = min(rows, ROWS - row)
    byte -= byte % item
    last = byte + (count - 1) * step * item + item
    if last > PITCH:
        return None
    box = Box(row, row + rows, byte, last, step == 1 or count == 1)
    return box, Walk(row * PITCH + byte, (rows, count), (PITCH, step * item), item)


def bytes_of(walk: Walk) -> Any:
    offset, (rows, count), (row_stride, stride), item = walk
    starts = offset + np.arange(rows)[:, None] * row_stride + np.arange(count)[None, :] * stride
    return (starts[..., None] + np.arange(item)).reshape(rows, count, item)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "where"]), accesses()), max_size=20))
def test_a_coverage_agrees_with_a_mask(steps: list[tuple[str, tuple[int, ...]]]) -> None:
    coverage = Coverage(ROWS, PITCH, UNIT)
    plain = np.zeros(ROWS * PITCH, dtype=bool)
    for what, access in steps:
        found = as_walk(access)
        if found is None:
            continue
        box, walk = found
        positions = bytes_of(walk)
        assert coverage.covers(box, walk) == plain[positions].all()
        assert coverage.touches(box, walk) == plain[positions].any()
        chosen = (np.arange(positions.shape[0] * positions.shape[1]) % 3 == 0).reshape(
            positions.shape[:2]
        )
        if what == "add":
            coverage.add(box, walk)
            plain[positions] = True
        elif what == "where":
            coverage.add_where(walk, chosen)
            plain[positions[chosen]] = True
        else:
            coverage.remove(walk, chosen)
            plain[positions[chosen]] = False
        assert np.array_equal(coverage.elements_of(walk), plain[positions].all(axis=-1))


def test_neighbouring_boxes_join_until_the_tensor_is_full() -> None:
    coverage = Coverage(ROWS, PITCH, UNIT)
    for column in range(0, PITCH, 8):
        assert not coverage.full
        coverage.add(Box(0, ROWS, column, column + 8, True), Walk(column, (ROWS, 2), (PITCH, 4), 4))
    assert coverage.full


def test_a_removed_box_is_no_longer_covered() -> None:
    coverage = Coverage(ROWS, PITCH, UNIT, full=True)
    coverage.remove_box(2, 4, 8, 12)
    inside, outside = Walk(2 * PITCH + 8, (1, 1), (PITCH, 4), 4), Walk(0, (2, 8), (PITCH, 4), 4)
    assert not coverage.covers(Box(2, 3, 8, 12, True), inside)
    assert coverage.covers(Box(0, 2, 0, 32, True), outside)


def test_pieces_that_fill_the_tensor_make_it_full() -> None:
    coverage = Coverage(ROWS, PITCH, UNIT)
    first, second = (Walk(start, (ROWS, 4), (PITCH, 8), 4) for start in (0, 4))
    coverage.add(Box(0, ROWS, 0, PITCH - 4, False), first)
    coverage.add(Box(0, ROWS, 4, PITCH, False), second)
    assert not coverage.full  # one is as good; it is seen with the next dense access
    end = Walk((ROWS - 1) * PITCH + PITCH - 4, (1, 1), (PITCH, 4), 4)
    coverage.add(Box(0, 1, 0, 4, True), Walk(0, (1, 1), (PITCH, 4), 4))
    assert not coverage.full
    coverage.add(Box(ROWS - 1, ROWS, PITCH - 4, PITCH, True), end)
    assert coverage.full


@pytest.mark.parametrize("is_held", [False, True])
def test_memory_is_used_again_unless_somebody_holds_it(
    is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_POOL", {})
    owner = SimpleNamespace(loop_depth=0)
    alloc = Allocation(owner, MemoryRegion.sbuf, (128, 64), dtypes.float32, "")
    place, held = alloc.data.ctypes.data, alloc.data if is_held else None
    del alloc
    again = Allocation(owner, MemoryRegion.sbuf, (128, 64), dtypes.float32, "")
    assert (again.data.ctypes.data != place) == (held is not None)


def boxes(size: int) -> list[tuple[Box, Walk]]:
    """Every dense box of a grid of so many rows and words."""
    runs = list(itertools.combinations(range(size + 1), 2))
    return [
        (
            Box(row, row_end, UNIT * word, UNIT * word_end, True),
            Walk(
                UNIT * (size * row + word), (row_end - row, word_end - word), (UNIT * size, UNIT), 4
            ),
        )
        for (row, row_end), (word, word_end) in itertools.product(runs, runs)
    ]


def test_any_two_boxes_are_told_apart() -> None:
    every = boxes(3)
    for first, second in itertools.product(every, every):
        coverage, plain = Coverage(3, 3 * UNIT, UNIT), np.zeros((3, 3), bool)
        coverage.add(*first)
        a, b = (
            np.s_[box.row_start : box.row_end, box.byte_start // UNIT : box.byte_end // UNIT]
            for box, _ in (first, second)
        )
        plain[a] = True
        assert coverage.covers(*second) == plain[b].all()
        assert coverage.touches(*second) == plain[b].any()
        coverage.add(*second)
        plain[b] = True
        joined = Coverage(3, 3 * UNIT, UNIT)
        joined.add(*first)
        joined.add(*second)
        assert joined.full == plain.all()
        for box, walk in (first, second):
            assert coverage.covers(box, walk)
        whole = Walk(0, (3, 3), (3 * UNIT, UNIT), 4)
        assert np.array_equal(coverage.elements_of(whole), plain)


def test_elements_between_two_words_count_by_half_a_word() -> None:
    coverage = Coverage(2, 16, 4)
    between = Walk(2, (2, 2), (16, 4), 4)
    coverage.add(Box(0, 2, 2, 10, False), between)
    plain = np.zeros((2, 16), bool)
    plain[:, 2:10] = True
    assert np.array_equal(coverage.elements_of(Walk(0, (2, 16), (16, 1), 1)), plain)
    assert not coverage.covers(Box(0, 1, 0, 4, True), Walk(0, (1, 1), (16, 4), 4))
    assert coverage.touches(Box(0, 1, 0, 4, True), Walk(0, (1, 1), (16, 4), 4))
    assert coverage.covers(Box(1, 2, 6, 10, True), Walk(22, (1, 1), (16, 4), 4))
