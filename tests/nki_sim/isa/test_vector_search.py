"""Searches, shuffles and statistics of the Vector engine: meaning and constraints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_sim import isa
from nki_sim.testing import Tile, execute

RANDOM = np.random.default_rng(0)
P, F = 16, 24
# Few distinct values, so that ties are the rule.
TIES = RANDOM.integers(0, 6, (P, F)).astype(np.float32)
FLOATS = RANDOM.normal(size=(P, F)).astype(np.float32)
EIGHT = RANDOM.integers(0, 9, (P, 8)).astype(np.float32)


def out(dtype: Any = "float32", shape: tuple[int, ...] = (P, 8), **where: Any) -> Tile:
    return Tile(shape=shape, dtype=dtype, **where)


def find_in_order(row: list[float], vals: list[float], slots: range) -> list[int]:
    """Positions of values that each use up one occurrence, in the given order of slots."""
    left = list(enumerate(row))
    found = [-1] * 8
    for slot in slots:
        for entry in left:
            if entry[1] == vals[slot]:
                found[slot] = entry[0]
                left.remove(entry)
                break
    return found


def test_max8_lists_the_largest_with_duplicates() -> None:
    result = execute(lambda dst, x: isa.max8(dst, x), dst=out(), x=Tile(TIES.reshape(P, 4, 6)))
    assert result["dst"].tolist() == [sorted(row.tolist(), reverse=True)[:8] for row in TIES]


def test_max8_orders_zeros_and_nans_alike_on_every_processor() -> None:
    row = np.tile(np.array([[-0.0, 0.0, -np.nan, -1.0, -np.inf]], np.float32), 8)
    top = execute(lambda dst, x: isa.max8(dst, x), dst=out(shape=(1, 8)), x=Tile(row))["dst"]
    assert (top.view(np.uint32) == 0x7FC00000).all()
    row[np.isnan(row)] = -2.0
    row[0, 5:] = -3.0
    top = execute(lambda dst, x: isa.max8(dst, x), dst=out(shape=(1, 8)), x=Tile(row))["dst"]
    assert top[0].tolist() == [0.0, 0.0, -1.0, -2.0, -3.0, -3.0, -3.0, -3.0]
    assert np.signbit(top[0, :2]).tolist() == [False, True]


@pytest.mark.parametrize("elements", [8, 16_384])
def test_max8_takes_the_documented_sizes(elements: int) -> None:
    x = np.arange(elements, dtype=np.float32)[None, :]
    result = execute(lambda dst, x: isa.max8(dst, x), dst=out(shape=(1, 8)), x=Tile(x))
    assert result["dst"].tolist() == [list(range(elements - 1, elements - 9, -1))]


@pytest.mark.parametrize("shape", [(2, 12), (24,), (2, 1, 12), (1, 2, 12), (2, 12, 1)], ids=str)
def test_max8_takes_two_axes_of_more_than_one_element(shape: tuple[int, ...]) -> None:
    x = Tile(TIES.reshape(P, *shape))
    result = execute(lambda dst, x: isa.max8(dst, x), dst=out(), x=x)
    assert result["dst"].tolist() == [sorted(row.tolist(), reverse=True)[:8] for row in TIES]


def test_max8_rounds_to_the_type_of_its_destination() -> None:
    result = execute(lambda dst, x: isa.max8(dst, x), dst=out("int32"), x=Tile(FLOATS * 10))
    expected = [[round(v) for v in sorted(row.tolist(), reverse=True)[:8]] for row in FLOATS * 10]
    assert result["dst"].tolist() == expected


@pytest.mark.parametrize(("dtype", "no_match"), [("uint32", 0xFFFFFFFF), ("uint16", 0xFFFF)])
def test_find_index8_gives_successive_positions_to_equal_values(dtype: str, no_match: int) -> None:
    result = execute(
        lambda dst, x, v: isa.nc_find_index8(dst, x, v),
        dst=out(dtype),
        x=Tile(TIES),
        v=Tile(EIGHT),
    )
    for row in range(P):
        expected = find_in_order(TIES[row].tolist(), EIGHT[row].tolist(), range(8))
        assert result["dst"][row].tolist() == [no_match if e < 0 else e for e in expected]


def test_match_replace8_serves_the_last_slot_first() -> None:
    result = execute(
        lambda dst, x, v, i: isa.nc_match_replace8(dst, x, v, -1.0, i),
        dst=out(shape=(P, F)),
        x=Tile(TIES),
        v=Tile(EIGHT),
        i=out("uint32"),
    )
    for row in range(P):
        positions = find_in_order(TIES[row].tolist(), EIGHT[row].tolist(), range(7, -1, -1))
        expected = TIES[row].copy()
        for position in positions:
            if position >= 0:
                expected[position] = -1.0
        assert result["dst"][row].tolist() == expected.tolist()
        assert result["i"][row].tolist() == [0xFFFFFFFF if p < 0 else p for p in positions]


def test_match_replace8_may_write_over_its_input() -> None:
    def body(x: Any, v: Any) -> None:
        isa.max8(v, x)
        isa.nc_match_replace8(x, x, v, -9.0)

    result = execute(body, x=Tile(FLOATS), v=out())
    for row in range(P):
        largest = sorted(FLOATS[row].tolist(), reverse=True)[:8]
        expected = [-9.0 if value in largest else value for value in FLOATS[row].tolist()]
        assert result["x"][row].tolist() == expected


MASK = [int(m) for m in RANDOM.permutation(32)]


@pytest.mark.parametrize("partitions", [32, 64, 128])
def test_stream_shuffle_moves_partitions_inside_each_quadrant(partitions: int) -> None:
    x = RANDOM.normal(size=(partitions, 3)).astype(np.float32)
    result = execute(
        lambda dst, x: isa.nc_stream_shuffle(dst, x, MASK), dst=out(shape=x.shape), x=Tile(x)
    )
    for row in range(partitions):
        assert result["dst"][row].tolist() == x[row // 32 * 32 + MASK[row % 32]].tolist()


def test_stream_shuffle_leaves_partitions_of_mask_255() -> None:
    x = RANDOM.normal(size=(32, 3)).astype(np.float32)
    old = np.zeros((32, 3), np.float32)
    mask = [255] * 32
    mask[5] = 7
    result = execute(lambda dst, x: isa.nc_stream_shuffle(dst, x, mask), dst=Tile(old), x=Tile(x))
    old[5] = x[7]
    assert result["dst"].tolist() == old.tolist()


def test_stream_shuffle_in_place_reads_before_it_writes() -> None:
    x = RANDOM.normal(size=(32, 3)).astype(np.float32)
    result = execute(lambda x: isa.nc_stream_shuffle(x, x, MASK), x=Tile(x))
    assert result["x"].tolist() == x[MASK].tolist()


@pytest.mark.parametrize("partitions", [1, 20, 32])
def test_stream_shuffle_broadcasts_one_partition_to_another_quadrant(partitions: int) -> None:
    x = RANDOM.normal(size=(1, 3)).astype(np.float32)
    result = execute(
        lambda dst, x: isa.nc_stream_shuffle(dst, x, [0] * 32),
        dst=out(shape=(partitions, 3), start=64),
        x=Tile(x, start=32),
    )
    assert result["dst"].tolist() == np.repeat(x, partitions, axis=0).tolist()


@pytest.mark.parametrize("length", [1, 2, 7, 512])
def test_statistics_split_even_and_odd_elements(length: int) -> None:
    x = RANDOM.normal(size=(4, length)).astype(np.float32) + 3
    result = execute(lambda dst, x: isa.bn_stats(dst, x), dst=out(shape=(4, 6)), x=Tile(x))
    for row in range(4):
        for half in (0, 1):
            part = x[row, half::2].astype(np.float64)
            count, mean, spread = result["dst"][row, 3 * half : 3 * half + 3]
            assert count == part.size
            if part.size:
                assert mean == pytest.approx(part.mean(), rel=1e-5)
                assert spread == pytest.approx(part.var() * part.size, rel=1e-3, abs=1e-5)


def test_statistics_of_tiles_merge_to_mean_and_variance() -> None:
    x = RANDOM.normal(size=(4, 900)).astype(np.float32) * 2 + 1

    def body(x: Any, parts: Any, dst: Any) -> None:
        isa.bn_stats(parts[:, 0:6], x[:, 0:512])
        isa.bn_stats(parts[:, 6:12], x[:, 512:900])
        isa.bn_aggr(dst, parts)

    result = execute(body, x=Tile(x), parts=out(shape=(4, 12)), dst=out(shape=(4, 2)))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(result["dst"][:, 0], wide.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(result["dst"][:, 1], wide.var(axis=1), rtol=1e-5)
