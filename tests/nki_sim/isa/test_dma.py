"""DMA: copies, gathers, scatters, transposes and sums against NumPy, and their limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_sim
from nki_sim import IllegalOperand, OutOfBounds, SimOptions, isa
from nki_sim import trace as tr
from nki_sim.language import api as nl
from nki_sim.testing import Tile, execute

RANDOM = np.random.default_rng(1)
X = RANDOM.normal(size=(40, 64)).astype(np.float32)
SKIP = isa.oob_mode.skip
LAST = len(X) - 1
BF16 = ml_dtypes.bfloat16


def hbm(values: Any) -> Tile:
    return Tile(values, space="hbm")


# dma_copy


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "int8", "uint8", "float8_e4m3"])
def test_a_copy_casts_through_float32(dtype: str) -> None:
    values = (X * 40).astype(np.float32)
    result = execute(
        lambda dst, x: isa.dma_copy(dst, x), x=hbm(values), dst=Tile(shape=X.shape, dtype=dtype)
    )
    target = nl.DType(dtype).numpy
    if target.kind in "iu":
        bounds = np.iinfo(target)
        expected = np.clip(np.rint(values), bounds.min, bounds.max).astype(target)
    else:
        expected = values.astype(target)
    assert result["dst"].tobytes() == expected.tobytes()


def test_a_copy_of_equal_types_moves_bits() -> None:
    bits = RANDOM.integers(0, 1 << 32, (16, 8), dtype=np.uint32)
    result = execute(
        lambda dst, x: isa.dma_copy(dst, x),
        x=hbm(bits.view(np.float32)),
        dst=Tile(shape=(16, 8)),
    )
    assert result["dst"].tobytes() == bits.tobytes()


def test_elements_pair_in_row_major_order_whatever_the_shapes() -> None:
    result = execute(
        lambda dst, x: isa.dma_copy(dst, x.permute((1, 0))), x=hbm(X), dst=Tile(shape=(64, 8, 5))
    )
    assert np.array_equal(result["dst"], X.T.reshape(64, 8, 5))


def test_a_copy_may_start_at_any_partition() -> None:
    result = execute(
        lambda dst, x: isa.dma_copy(dst[17:57], x), x=hbm(X), dst=Tile(shape=(128, 64))
    )
    assert np.array_equal(result["dst"][17:57], X)
    assert result.unwritten["dst"][:17].all()
    assert result.unwritten["dst"][57:].all()


def test_a_partition_stride_of_zero_repeats_a_row_of_hbm() -> None:
    result = execute(
        lambda dst, x: isa.dma_copy(dst, x.ap([[0, 128], [1, 64]], offset=64)),
        x=hbm(X),
        dst=Tile(shape=(128, 64)),
    )
    assert np.array_equal(result["dst"], np.repeat(X[1:2], 128, axis=0))


def test_a_copy_onto_itself_moves_and_checks_nothing() -> None:
    """It serves as a fence in published kernels, also on tensors without values."""
    run = execute(lambda dst: isa.dma_copy(dst, dst), dst=Tile(shape=(4, 8), space="hbm")).run
    assert run.findings == []
    assert [record.op for record in run.trace] == ["dma_copy"]


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: isa.dma_copy(x[0:20], x[10:30]),
        lambda x: isa.dma_copy(x.ap([[1, 128]], offset=64), x.ap([[1, 128]], offset=128)),
    ],
    ids=["rows", "runs-over-rows"],
)
def test_a_copy_onto_overlapping_elements_is_refused(copy: Callable[..., Any]) -> None:
    with pytest.raises(IllegalOperand, match="overlap"):
        execute(copy, x=hbm(X))


# Gather and scatter


def gather(dst: Any, x: Any, i: Any, mode: Any = isa.oob_mode.error) -> None:
    isa.dma_copy(dst, x.ap([[64, i.size], [1, 64]], vector_offset=i), oob_mode=mode)


@pytest.mark.parametrize(
    ("rows", "dtype", "options", "message"),
    [
        (8, np.int32, {"dge_mode": isa.dge_mode.hwdge}, "swdge"),
        (8, np.float32, {}, "integer"),
        (9, np.int32, {}, "8 indices"),
    ],
)
def test_a_gather_refuses(rows: int, dtype: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(IllegalOperand, match=message):
        execute(
            lambda dst, x, i: isa.dma_copy(
                dst, x.ap([[64, 8], [1, 64]], vector_offset=i), **options
            ),
            dst=Tile(shape=(8, 64)),
            x=hbm(X),
            i=Tile(np.zeros((rows, 1), dtype)),
        )


@pytest.mark.parametrize("index_dtype", [np.int32, np.uint32])
@pytest.mark.parametrize("shape", [(48, 1), (48, 1, 1)], ids=["P1", "P11"])
def test_a_gather_reads_the_row_of_each_index(index_dtype: Any, shape: tuple[int, ...]) -> None:
    rows = RANDOM.integers(0, 40, 48)
    result = execute(
        gather,
        dst=Tile(shape=(48, 64)),
        x=hbm(X),
        i=Tile(rows.reshape(shape).astype(index_dtype)),
    )
    assert np.array_equal(result["dst"], X[rows])


def test_skipped_rows_keep_what_was_there() -> None:
    rows = RANDOM.integers(-60, 80, (48, 1)).astype(np.int32)
    before = RANDOM.normal(size=(48, 64)).astype(np.float32)
    result = execute(
        lambda dst, x, i: gather(dst, x, i, SKIP), dst=Tile(before), x=hbm(X), i=Tile(rows)
    )
    good = (rows[:, 0] >= 0) & (rows[:, 0] < 40)
    expected = before.copy()
    expected[good] = X[rows[good, 0]]
    assert 0 < good.sum() < 48
    assert np.array_equal(result["dst"], expected)


def test_uint32_maximum_is_a_negative_index() -> None:
    rows = np.full((4, 1), 0xFFFFFFFF, np.uint32)
    body = lambda dst, x, i: gather(dst, x, i, SKIP)  # noqa: E731
    result = execute(body, dst=Tile(np.zeros((4, 64), np.float32)), x=hbm(X), i=Tile(rows))
    assert not result["dst"].any()
    with pytest.raises(OutOfBounds, match="index -1 at position 0"):
        execute(gather, dst=Tile(shape=(4, 64)), x=hbm(X), i=Tile(rows))


GATHERS: dict[str, tuple[Callable[..., Any], list[int], Any]] = {
    "vector-select": (lambda x, i: x.vector_select(0, i), [6, 2], X[[6, 2]]),
    # Published kernels pass a meaningless leading stride with a vector_offset.
    "rows-of-the-base": (lambda x, i: x.ap([[7, 2], [1, 64]], vector_offset=i), [3, 1], X[[3, 1]]),
    "rows-of-a-reshaped-base": (
        lambda x, i: x.reshape((160, 1, 16)).ap([[24, 3], [1, 16]], vector_offset=i),
        [159, 5, 6],
        X.reshape(160, 16)[[159, 5, 6]],
    ),
    "parts-of-rows": (
        lambda x, i: x.ap([[64, 3], [16, 2], [1, 4]], offset=8, vector_offset=i),
        [2, 0, 39],
        X[[2, 0, 39]][:, [8, 9, 10, 11, 24, 25, 26, 27]],
    ),
}


@pytest.mark.parametrize("name", GATHERS)
def test_a_gather_reads_what_its_view_shows(name: str) -> None:
    view, rows, expected = GATHERS[name]
    result = execute(
        lambda dst, x, i: isa.dma_copy(dst, view(x, i)),
        dst=Tile(shape=expected.shape),
        x=hbm(X),
        i=Tile(np.array(rows, np.int32)[:, None]),
    )
    assert np.array_equal(result["dst"], expected)


def test_the_range_is_checked_before_the_static_offset() -> None:
    """A padding index of -1 with an offset must not reach the row before the offset."""
    rows = np.array([[-1], [0]], np.int32)
    values = np.arange(20, dtype=np.float32).reshape(10, 2)
    result = execute(
        lambda dst, x, i: isa.dma_copy(
            dst, x.ap([[2, 2], [1, 2]], offset=10, vector_offset=i), oob_mode=SKIP
        ),
        dst=Tile(np.zeros((2, 2), np.float32)),
        x=hbm(values),
        i=Tile(rows),
    )
    assert np.array_equal(result["dst"], [[0, 0], [10, 11]])


def test_a_scatter_writes_the_rows_in_range_and_the_last_of_equal_ones() -> None:
    rows = np.array([[4], [-1], [7], [4], [99]], np.int32)
    options = SimOptions(scatter="report")
    values = RANDOM.normal(size=(5, 64)).astype(np.float32)
    result = execute(
        lambda x, src, i: isa.dma_copy(
            x.ap([[64, 5], [1, 64]], vector_offset=i), src, oob_mode=SKIP
        ),
        x=hbm(X),
        src=Tile(values),
        i=Tile(rows),
        options=options,
    )
    expected = X.copy()
    expected[4], expected[7] = values[3], values[2]
    assert np.array_equal(result["x"], expected)


@pytest.mark.parametrize(
    ("rows", "values", "is_found"),
    [
        ([4, 1, 4], [1, 2, 3], "error"),
        ([99, 1, 99], [1, 2, 3], ""),
        ([4, 1, 4], [1, 2, 1], ""),
        ([4, 1, 5], [1, 2, 3], ""),
        ([LAST, 1, LAST], [1, 2, 3], "finding"),
        ([LAST, 4, LAST, 4], [1, 2, 3, 5], "error"),
    ],
    ids=["other-values", "skipped", "equal-values", "other-rows", "padding-row", "and-another"],
)
def test_equal_rows_of_a_scatter_with_other_values_are_found(
    rows: list[int], values: list[int], is_found: str
) -> None:
    def scatter() -> Any:
        return execute(
            lambda x, src, i: isa.dma_copy(
                x.ap([[64, len(rows)], [1, 64]], vector_offset=i), src, oob_mode=SKIP
            ),
            x=hbm(X),
            src=Tile(np.repeat(np.array(values, np.float32)[:, None], 64, axis=1)),
            i=Tile(np.array(rows, np.int32)[:, None]),
        )

    if is_found == "error":
        with pytest.raises(IllegalOperand, match="several values for the row at element 256"):
            scatter()
    else:
        kinds = [finding.kind for finding in scatter().run.findings]
        assert kinds == (["scatter"] if is_found else [])


def test_copying_unwritten_memory_is_reported() -> None:
    result = execute(
        lambda dst, src: isa.dma_copy(dst, src),
        dst=Tile(shape=(4, 8)),
        src=Tile(shape=(4, 8)),
    )
    assert [finding.kind for finding in result.run.findings] == ["uninitialized"]
    assert "32 of 32 elements unwritten" in result.run.findings[0].text
    assert result.unwritten["dst"].all()


def test_a_scatter_leaves_other_rows_unwritten() -> None:
    result = execute(
        lambda dst, x, i: isa.dma_copy(dst.ap([[64, 3], [1, 64]], vector_offset=i), x),
        dst=Tile(shape=(8, 64), space="hbm"),
        x=Tile(X[:3]),
        i=Tile(np.array([[5], [0], [2]], np.int32)),
    )
    assert np.array_equal(~result.unwritten["dst"].all(axis=1), [1, 0, 1, 0, 0, 1, 0, 0])


@pytest.mark.parametrize("last", [3, 4], ids=["written", "unwritten"])
def test_a_gather_reads_the_rows_that_were_written(last: int) -> None:
    def kernel(x: Any, rows: Any) -> Any:
        index = nl.ndarray((2, 1), nl.int32)
        isa.dma_copy(index, rows)
        half = nl.ndarray((8, 64), nl.float32, buffer=nl.private_hbm)
        isa.dma_copy(half[0:4], x[0:4])
        out = nl.ndarray((2, 64), nl.float32, buffer=nl.shared_hbm)
        isa.dma_copy(out, half.vector_select(0, index))
        return out

    rows = np.array([[0], [last]], np.int32)
    if last < 4:
        assert np.array_equal(nki_sim.run(kernel, X, rows).outputs, X[[0, last]])
        return
    with pytest.raises(nki_sim.UninitializedRead):
        nki_sim.run(kernel, X, rows)


# Scalar offsets


@pytest.mark.parametrize("kind", ["tensor", "register"])
def test_a_scalar_offset_counts_rows_of_the_base(kind: str) -> None:
    weights = RANDOM.normal(size=(5, 16, 3, 8)).astype(np.float32)

    def body(dst: Any, w: Any, e: Any) -> None:
        where = isa.register_alloc(e) if kind == "register" else e
        isa.dma_copy(dst, w.ap([[24, 16], [1, 8]], offset=8, scalar_offset=where, indirect_dim=0))

    expert = Tile(np.array([[3]], np.int32))
    result = execute(body, dst=Tile(shape=(16, 8)), w=hbm(weights), e=expert)
    assert np.array_equal(result["dst"], weights[3, :, 1])


@pytest.mark.parametrize("space", ["hbm", "sbuf"])
def test_indirect_dim_chooses_the_axis_of_the_base(space: str) -> None:
    copy = isa.dma_copy if space == "hbm" else isa.tensor_copy
    result = execute(
        lambda dst, x, i: copy(dst, x.ap([[64, 40], [1, 4]], scalar_offset=i, indirect_dim=1)),
        dst=Tile(shape=(40, 4)),
        x=Tile(X, space=space),
        i=Tile(np.array([[9]], np.int32)),
    )
    assert np.array_equal(result["dst"], X[:, 9:13])


def test_a_register_past_its_axis_is_refused_though_the_tensor_goes_on() -> None:
    with pytest.raises(OutOfBounds, match="inside 48 elements"):
        execute(
            lambda dst, x: isa.dma_copy(dst, x[0:2].select(1, isa.register_alloc(6))),
            dst=Tile(shape=(2, 8)),
            x=hbm(np.zeros((4, 6, 8), np.float32)),
        )


@pytest.mark.parametrize(
    ("row", "written"),
    [(0, 16), (30, 10), (39, 1), (40, 0), (-1, 0), (-1_000_000, 0)],
    ids=["inside", "hangs-over", "last-row", "behind", "minus-one", "far-below"],
)
def test_skip_leaves_out_the_rows_that_do_not_fit(row: int, written: int) -> None:
    """The unit is a row of the pattern, also for a scalar offset."""
    values = RANDOM.normal(size=(16, 64)).astype(np.float32)
    result = execute(
        lambda x, src, r: isa.dma_copy(
            x.ap([[64, 16], [1, 64]], scalar_offset=r), src, oob_mode=SKIP
        ),
        x=hbm(X),
        src=Tile(values),
        r=Tile(np.array([[row]], np.int32)),
    )
    expected = X.copy()
    if written:
        expected[row : row + written] = values[:written]
    assert np.array_equal(result["x"], expected)


def test_rows_may_be_gathered_from_the_tensor_they_go_to() -> None:
    rows = np.array([[5], [7]], np.int32)
    result = execute(lambda x, i: gather(x[0:2], x, i), x=hbm(X), i=Tile(rows))
    assert np.array_equal(result["x"], np.concatenate((X[[5, 7]], X[2:])))


# dma_transpose


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((16, 100), (1, 0)),
        ((4, 12, 32), (2, 1, 0)),
        ((6, 1, 1, 128), (3, 1, 2, 0)),
        ((2, 3, 8, 64), (3, 1, 2, 0)),
    ],
    ids=["2d", "3d", "4d-index-block", "4d"],
)
@pytest.mark.parametrize("dtype", [np.int32, BF16], ids=["int32", "bfloat16"])
def test_a_transpose_reverses_the_axes(shape: tuple[int, ...], order: Any, dtype: Any) -> None:
    values = RANDOM.integers(-100, 100, shape).astype(dtype)
    expected = values.transpose(order)
    result = execute(
        lambda dst, x: isa.dma_transpose(dst, x),
        dst=Tile(shape=expected.shape, dtype=values.dtype),
        x=hbm(values),
    )
    assert result["dst"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("columns", [1, 2], ids=["one-column", "two-columns"])
def test_a_transpose_of_gathered_rows_counts_indices_column_by_column(columns: int) -> None:
    values = RANDOM.normal(size=(300, 64)).astype(BF16)
    rows = RANDOM.integers(0, 300, (128, columns)).astype(np.uint32)
    count = 128 * columns
    result = execute(
        lambda dst, x, i: isa.dma_transpose(dst, x.ap([[64, count], [1, 64]], vector_offset=i)),
        dst=Tile(shape=(64, count), dtype="bfloat16"),
        x=hbm(values),
        i=Tile(rows),
    )
    assert np.array_equal(result["dst"], values[rows.T.reshape(-1)].T)


def test_skipped_columns_of_a_gathered_transpose_stay() -> None:
    values = RANDOM.normal(size=(30, 64)).astype(BF16)
    rows = np.arange(16, dtype=np.uint32).reshape(16, 1)
    rows[5] = 0xFFFFFFFF
    before = np.full((64, 16), 7.0, BF16)
    result = execute(
        lambda dst, x, i: isa.dma_transpose(
            dst, x.ap([[64, 16], [1, 64]], vector_offset=i), oob_mode=SKIP
        ),
        dst=Tile(before),
        x=hbm(values),
        i=Tile(rows),
    )
    expected = values[:16].T.copy()
    expected[:, 5] = 7.0
    assert np.array_equal(result["dst"], expected)
    (finding,) = result.run.findings
    assert "issue 1390" in finding.text


def test_a_gathered_transpose_takes_uint32() -> None:
    with pytest.raises(IllegalOperand, match="indices of uint32"):
        execute(
            lambda dst, x, i: isa.dma_transpose(dst, x.ap([[64, 16], [1, 64]], vector_offset=i)),
            dst=Tile(shape=(64, 16), dtype="bfloat16"),
            x=hbm(np.zeros((30, 64), BF16)),
            i=Tile(np.zeros((16, 1), np.int32)),
        )


# dma_compute


def test_a_sum_is_rounded_once() -> None:
    parts = [RANDOM.normal(size=(16, 64)).astype(BF16) for _ in range(3)]
    result = execute(
        lambda dst, a, b, c: isa.dma_compute(dst, [a, b, c], nl.add, scales=(1.0, 1.0, 1.0)),
        dst=Tile(shape=(16, 64), dtype="bfloat16"),
        a=hbm(parts[0]),
        b=hbm(parts[1]),
        c=Tile(parts[2]),
    )
    expected = sum(part.astype(np.float32) for part in parts).astype(BF16)
    assert np.array_equal(result["dst"], expected)


@pytest.mark.parametrize("is_scatter", [False, True], ids=["gather", "scatter"])
def test_a_sum_takes_rows_or_adds_to_them(is_scatter: bool) -> None:
    def body(x: Any, tile: Any, i: Any) -> None:
        rows = x.ap([[64, 3], [1, 64]], vector_offset=i)
        target = rows if is_scatter else tile
        isa.dma_compute(target, [rows, tile], nl.add, oob_mode=SKIP)

    values = RANDOM.normal(size=(3, 64)).astype(np.float32)
    rows = np.array([[3], [-1], [9]], np.int32)
    result = execute(body, x=hbm(X), tile=Tile(values), i=Tile(rows))
    x, tile = X.copy(), values.copy()
    if is_scatter:
        x[[3, 9]] += values[[0, 2]]
    else:
        tile[[0, 2]] += X[[3, 9]]
    assert np.array_equal(result["x"], x)
    assert np.array_equal(result["tile"], tile)


def test_equal_rows_are_refused_in_a_read_modify_write() -> None:
    def body(x: Any, src: Any, i: Any) -> None:
        target = x.ap([[64, 2], [1, 64]], vector_offset=i)
        isa.dma_compute(target, [target, src], nl.add)

    with pytest.raises(IllegalOperand, match="unique"):
        execute(body, x=hbm(X), src=Tile(X[:2]), i=Tile(np.array([[3], [3]], np.int32)))


# The trace


def facts_of(body: Callable[..., Any], **tiles: Tile) -> Any:
    return next(iter(execute(body, **tiles).run.trace)).facts


@pytest.mark.parametrize(("columns", "hbm_runs"), [(32, 40), (64, 1)])
def test_the_trace_counts_descriptors_and_bytes(columns: int, hbm_runs: int) -> None:
    """Rows that are neighbours in HBM are one run there."""
    facts = facts_of(
        lambda dst, x: isa.dma_copy(dst, x[:, 0:columns]),
        dst=Tile(shape=(40, columns)),
        x=hbm(X),
    )
    assert (facts.moved_bytes, facts.rows, facts.runs) == (40 * columns * 4, 40, 40)
    assert (facts.hbm_read_bytes, facts.hbm_write_bytes) == (40 * columns * 4, 0)
    assert facts.hbm_runs == hbm_runs


def test_the_trace_counts_indirect_and_skipped_rows() -> None:
    rows = np.array([[3], [-1], [9], [99]], np.int32)
    facts = facts_of(
        lambda dst, x, i: gather(dst, x, i, SKIP),
        dst=Tile(np.zeros((4, 64), np.float32)),
        x=hbm(X),
        i=Tile(rows),
    )
    assert (facts.indirect_rows, facts.skipped_rows, facts.dge) == (4, 2, "swdge")
    assert facts.hbm_read_bytes == 2 * 64 * 4


def test_the_trace_is_the_same_in_both_modes() -> None:
    def kernel(x: Any, i: Any) -> Any:
        out = nl.ndarray((4, 64), x.dtype, buffer=nl.shared_hbm)
        rows = nl.ndarray((4, 1), nl.int32)
        isa.dma_copy(rows, i)
        tile = nl.ndarray((4, 64), x.dtype)
        isa.memset(tile, 0)
        gather(tile, x, rows, SKIP)
        isa.dma_copy(out, tile)
        return out

    rows = np.array([[3], [-1], [9], [99]], np.int32)
    runs = [
        nki_sim.run(kernel, X.copy(), rows, options=SimOptions(mode=mode))
        for mode in ("full", "indices")
    ]
    assert list(runs[0].trace) == list(runs[1].trace)


def test_rows_that_nobody_wrote_do_not_contest_a_place() -> None:
    rows = np.zeros((3, 1), np.int32)

    def body(x: Any, src: Any, i: Any) -> None:
        isa.dma_copy(x.ap([[64, 3], [1, 64]], vector_offset=i), src)

    for written, kinds in ((False, ["uninitialized"]), (True, ["scatter", "uninitialized"])):
        values = np.arange(3 * 64).reshape(3, 64)
        result = execute(
            body,
            options=SimOptions(uninitialized="report", scatter="report"),
            x=hbm(np.zeros((9, 64), np.float32)),
            i=Tile(rows),
            src=Tile(values, "float32", written=np.array([[written], [False], [False]])),
        )
        assert sorted({found.kind for found in result.run.findings}) == kinds


@pytest.mark.parametrize("spaces", [("hbm", "sbuf"), ("sbuf", "hbm")])
def test_the_price_of_skipped_rows_hangs_on_where_they_lie(spaces: tuple[str, str]) -> None:
    def body(dst: Any, x: Any) -> None:
        last = isa.register_alloc(7)
        moved = x.ap([[8, 32], [1, 2]], scalar_offset=last, indirect_dim=1)
        isa.dma_copy(dst, moved, oob_mode=isa.oob_mode.skip)

    values = np.zeros((32, 8), np.float32)
    found = []
    for space in spaces:
        done = execute(body, dst=Tile(values[:, :2]), x=Tile(values, space=space))
        (record,) = done.run.trace
        found.append((record.facts.skipped_rows, record.facts.src_space))
    assert found == [(1, {"sbuf": tr.SBUF, "hbm": tr.HBM}[space]) for space in spaces]


def test_an_empty_slice_moves_nothing_and_is_told() -> None:
    def kernel(x: Any) -> Any:
        out = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        tile = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.sbuf)
        isa.dma_copy(dst=tile, src=x[0:4])
        isa.dma_copy(dst=tile[nl.ds(0, 0)], src=x[nl.ds(4, 0)])
        isa.dma_copy(dst=out, src=tile)
        return out

    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    found = nki_sim.run(kernel, x)
    assert np.array_equal(found.outputs, x[:4])
    assert [each.kind for each in found.findings] == ["empty"]
    assert "dma_copy" in found.findings[0].text
