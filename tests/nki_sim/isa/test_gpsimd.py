"""GpSimd instructions: meaning against loops written out, and constraints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nki_sim import OutOfBounds, isa
from nki_sim.language import api as nl
from nki_sim.testing import Tile, execute

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 24)).astype(np.float32)


def out(dtype: Any = "float32", shape: tuple[int, ...] = (32, 24), **where: Any) -> Tile:
    return Tile(shape=shape, dtype=dtype, **where)


PATTERNS: dict[str, tuple[list[list[int]], int, int]] = {
    "row": ([[1, 24]], 0, 0),
    "row-and-partition": ([[2, 24]], 5, 100),
    "two-dims": ([[10, 4], [1, 6]], -3, 1),
    "four-dims-with-repeat": ([[100, 2], [0, 3], [-7, 2], [1, 2]], 1, -2),
}


def affine(case: str) -> Any:
    """Values of a pattern, one loop per dimension."""
    pattern, offset, multiplier = PATTERNS[case]
    rows = []
    for partition in range(32):
        values = [offset + partition * multiplier]
        for step, count in pattern:
            values = [value + index * step for value in values for index in range(count)]
        rows.append(values)
    return np.array(rows)


@pytest.mark.parametrize("case", PATTERNS)
@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16"])
def test_iota_writes_its_pattern(case: str, dtype: str) -> None:
    pattern, offset, multiplier = PATTERNS[case]
    result = execute(
        lambda dst: isa.iota(dst, pattern, offset, multiplier), dst=out(dtype, (32, 4, 6))
    )
    expected = affine(case)
    if dtype == "bfloat16":
        expected = expected.astype(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(result["dst"].reshape(32, 24), expected)


def test_iota_counts_partitions_from_its_destination_and_saturates_small_integers() -> None:
    result = execute(
        lambda dst: isa.iota(dst, [[0, 1]], 250, 2), dst=out("uint8", (8, 1), start=64)
    )
    assert result["dst"][:, 0].tolist() == [250, 252, 254, 255, 255, 255, 255, 255]


def test_without_an_offset_patterns_count_from_zero() -> None:
    counted = execute(lambda dst: isa.iota(dst, [[3, 4]]), dst=out("int32", (2, 4)))["dst"]
    assert counted.tolist() == [[0, 3, 6, 9]] * 2
    kept = execute(
        lambda dst, x: isa.affine_select(dst, [[1, 4]], 1, x, 0.0, cmp_op=nl.equal),
        dst=out(shape=(2, 4)),
        x=Tile(np.ones((2, 4), np.float32)),
    )["dst"]
    assert kept.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]


def test_iota_takes_its_offset_from_a_register() -> None:
    def body(dst: Any) -> None:
        isa.iota(dst, [[1, 4]], isa.register_alloc(7))

    assert execute(body, dst=out("int32", (1, 4)))["dst"].tolist() == [[7, 8, 9, 10]]


@pytest.mark.parametrize(
    "op", ["equal", "not_equal", "greater", "greater_equal", "less", "less_equal"]
)
def test_affine_select_compares_the_pattern_with_zero(op: str) -> None:
    result = execute(
        lambda dst, x: isa.affine_select(
            dst, [[-1, 24]], 1, x, -5.0, cmp_op=getattr(nl, op), offset=2
        ),
        dst=out(),
        x=Tile(X),
    )
    pattern = 2 + np.arange(32)[:, None] - np.arange(24)
    np.testing.assert_array_equal(result["dst"], np.where(getattr(np, op)(pattern, 0), X, -5.0))


def test_affine_select_converts_through_float32() -> None:
    x = RANDOM.integers(-9, 9, (32, 24)).astype(np.int32)
    result = execute(
        lambda dst, x: isa.affine_select(dst, [[1, 24]], 0, x, 1.5, cmp_op=nl.less, offset=-12),
        dst=out("bfloat16"),
        x=Tile(x),
    )
    np.testing.assert_array_equal(
        result["dst"].astype(np.float32), np.where(np.arange(24) < 12, x, 1.5)
    )


@pytest.mark.parametrize(
    ("per_index", "valid"), [(1, 48), (1, 37), (2, 9), (4, 20), (8, 5), (16, 2), (32, 1)]
)
def test_local_gather_reads_its_list_column_by_column(per_index: int, valid: int) -> None:
    source = RANDOM.normal(size=(32, 40)).astype(np.float32)
    index = RANDOM.integers(0, 41 - per_index, (32, 3)).astype(np.uint16)
    result = execute(
        lambda dst, x, i: isa.local_gather(dst, x, i, per_index, valid),
        dst=out(shape=(32, valid * per_index)),
        x=Tile(source),
        i=Tile(index),
    )
    for partition in range(32):
        group = partition // 16 * 16
        for j in range(valid):
            first = index[group + j % 16, j // 16]
            for t in range(per_index):
                assert result["dst"][partition, j * per_index + t] == source[partition, first + t]


def test_local_gather_uses_all_indices_by_default() -> None:
    index = RANDOM.integers(0, 24, (16, 2)).astype(np.uint16)
    result = execute(
        lambda dst, x, i: isa.local_gather(dst, x, i),
        dst=out(shape=(16, 32)),
        x=Tile(X[:16]),
        i=Tile(index),
    )
    np.testing.assert_array_equal(result["dst"][3], X[3][index.T.ravel()])


def test_local_gather_ignores_the_lanes_that_nobody_wrote() -> None:
    """Rows of the source without values only make the same rows of the result unwritten."""
    written = np.zeros((16, 24), bool)
    written[:5] = True
    index = RANDOM.integers(0, 24, (16, 1)).astype(np.uint16)
    result = execute(
        lambda dst, x, i: isa.local_gather(dst, x, i, 1, 16),
        dst=out(shape=(16, 16)),
        x=Tile(X[:16], written=written),
        i=Tile(index),
    )
    np.testing.assert_array_equal(result["dst"][:5], X[:5][:, index[:, 0]])
    assert result.unwritten["dst"].tolist() == [[row >= 5] * 16 for row in range(16)]


def test_n_gather_picks_inside_each_partition() -> None:
    indices = RANDOM.integers(0, 24, (32, 2, 5)).astype(np.uint32)
    result = execute(
        lambda dst, x, i: isa.nc_n_gather(dst, x, i),
        dst=out(shape=(32, 10)),
        x=Tile(X.reshape(32, 4, 6)),
        i=Tile(indices),
    )
    for partition in range(32):
        expected = [X[partition, position] for position in indices[partition].ravel()]
        assert result["dst"][partition].tolist() == expected


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("partitions", [1, 17, 128])
def test_nonzero_with_count_serves_every_16th_partition(partitions: int, dtype: Any) -> None:
    x = RANDOM.integers(0, 2, (partitions, 2, 6)).astype(dtype)
    old = np.full((partitions, 13), 77, np.int32)
    result = execute(
        lambda dst, x: isa.nonzero_with_count(dst, x, index_offset=100, padding_val=-3),
        dst=Tile(old),
        x=Tile(x),
    )
    for partition in range(partitions):
        expected = [77] * 13
        if partition % 16 == 0:
            found = [100 + k for k, v in enumerate(x[partition].ravel()) if v != 0]
            expected = found + [-3] * (12 - len(found)) + [len(found)]
        assert result["dst"][partition].tolist() == expected


def test_nonzero_with_count_reads_no_other_partition() -> None:
    """Partitions that it does not serve may be unwritten."""
    written = np.zeros((32, 4), bool)
    written[[0, 16]] = True
    result = execute(
        lambda dst, x: isa.nonzero_with_count(dst, x),
        dst=out("int32", (32, 5)),
        x=Tile(np.ones((32, 4), np.float32), written=written),
    )
    assert not result.run.findings
    assert result.unwritten["dst"][:, 0].tolist() == [row % 16 != 0 for row in range(32)]


@pytest.mark.parametrize(("n", "k"), [(8, 1), (100, 7), (384, 384)])
def test_topk_reads_the_snake_and_answers_ascending(n: int, k: int) -> None:
    distinct = RANDOM.permutation(32 * 24).astype(np.float32).reshape(32, 24) / 4
    src = distinct.astype(ml_dtypes.bfloat16)
    result = execute(
        lambda v, i, x: isa.topk(v, i, x, n),
        v=out("bfloat16", (32, k)),
        i=out("uint32", (32, k)),
        x=Tile(src),
    )
    for group in (0, 16):
        elements = [float(src[group + e % 16, e // 16]) for e in range(n)]
        expected = sorted(elements)[n - k :]
        for row in range(group, group + 16):
            assert result["v"][row].astype(np.float64).tolist() == expected
            positions = result["i"][row].tolist()
            assert [elements[e] for e in positions] == expected
            assert len(set(positions)) == k


@pytest.mark.parametrize(
    ("op", "formula"), [("add", np.sum), ("average", np.mean), ("maximum", np.max)]
)
def test_partitions_reduce_into_one(op: str, formula: Callable[..., Any]) -> None:
    result = execute(
        lambda dst, x: isa.tensor_partition_reduce(dst, getattr(nl, op), x),
        dst=out(shape=(1, 24)),
        x=Tile(X),
    )
    expected = formula(X.astype(np.float64), axis=0)
    np.testing.assert_allclose(result["dst"][0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["bitwise_or", "bitwise_and"])
def test_partitions_reduce_bit_patterns(op: str) -> None:
    x = RANDOM.integers(0, 256, (3, 24)).astype(np.uint8)
    result = execute(
        lambda dst, x: isa.tensor_partition_reduce(dst, getattr(nl, op), x),
        dst=out("uint8", (1, 24)),
        x=Tile(x),
    )
    assert result["dst"][0].tolist() == getattr(np, op).reduce(x).tolist()


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_sequence_bounds_mark_each_element_with_its_segment(dtype: Any) -> None:
    ids = np.array([[3, 3, 3, 1, 0, 0, 2, 2, 5]], dtype)
    result = execute(
        lambda dst, x: isa.sequence_bounds(dst, x),
        dst=out(np.dtype(dtype).name, (1, 2, 9)),
        x=Tile(ids),
    )
    starts = [0, 0, 0, 3, 9, 9, 6, 6, 8]
    ends = [3, 3, 3, 4, -1, -1, 8, 8, 9]
    assert result["dst"].tolist() == [[starts, ends]]


def test_positions_outside_the_row_are_refused() -> None:
    far = np.full((32, 2), 24)
    with pytest.raises(OutOfBounds, match="index: expected positions up to 23; found 24"):
        execute(
            isa.local_gather,
            dst=out(shape=(32, 32)),
            src_buffer=Tile(X),
            index=Tile(far, "uint16"),
        )
    with pytest.raises(OutOfBounds, match="indices: expected positions up to 23; found 24"):
        execute(isa.nc_n_gather, dst=out(shape=(32, 2)), data=Tile(X), indices=Tile(far, "uint32"))


@pytest.mark.parametrize("valid", [5, 16, 17, 20])
def test_positions_behind_the_valid_ones_may_be_anything(valid: int) -> None:
    """The list of a group goes down its 16 partitions first, then to the next column."""
    index = np.full((32, 2), 0xFFFF, np.uint16)
    order = index.reshape(2, 16, 2).transpose(0, 2, 1)  # a view: group, column, partition
    for group in range(2):
        for position in range(valid):
            order[group, position // 16, position % 16] = 3
    tiles = {"x": Tile(X), "i": Tile(index)}
    result = execute(
        lambda dst, x, i: isa.local_gather(dst, x, i, 1, valid), dst=out(shape=(32, valid)), **tiles
    )
    np.testing.assert_array_equal(result["dst"], np.repeat(X[:, 3:4], valid, axis=1))
    with pytest.raises(OutOfBounds):
        execute(
            lambda dst, x, i: isa.local_gather(dst, x, i, 1, valid + 1),
            dst=out(shape=(32, valid + 1)),
            **tiles,
        )
