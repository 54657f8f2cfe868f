"""Vector instructions: meaning against formulas, documented constraints, rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nki_sim import IllegalOperand, SimOptions, isa
from nki_sim.language import api as nl
from nki_sim.testing import Tile, execute
from nki_sim.trace import ENGINE_NAMES

Array = np.ndarray[Any, Any]
RANDOM = np.random.default_rng(0)
P, F = 48, 20
X = RANDOM.normal(size=(P, F)).astype(np.float32)
Y = RANDOM.normal(size=(P, F)).astype(np.float32)
V = RANDOM.normal(size=(P, 1)).astype(np.float32)
INTS = RANDOM.integers(-50, 50, (P, F)).astype(np.int32)
BIG = RANDOM.integers(-(1 << 31), 1 << 31, (P, F)).astype(np.int32)
BIG2 = RANDOM.integers(-(1 << 31), 1 << 31, (P, F)).astype(np.int32)
BYTES = RANDOM.integers(0, 256, (P, F)).astype(np.uint8)
BYTES2 = RANDOM.integers(0, 256, (P, F)).astype(np.uint8)
FLAGS = RANDOM.integers(0, 2, (P, F)).astype(np.uint8)
BF16 = ml_dtypes.bfloat16
FP32_MIN = np.finfo(np.float32).min
ODD = (1 << 24) + 1  # the first int that float32 has not


def out(dtype: Any = "float32", shape: tuple[int, ...] = (P, F), **where: Any) -> Tile:
    return Tile(shape=shape, dtype=dtype, **where)


def i64(array: Array) -> Array:
    return array.astype(np.int64)


def wrap(array: Array) -> Array:
    return ((array + (1 << 31)) % (1 << 32) - (1 << 31)).astype(np.int32)


TILES: dict[str, Tile] = {
    "x": Tile(X),
    "x_ps": Tile(X, space="psum"),
    "y": Tile(Y),
    "v": Tile(V),
    "bf16_v": Tile(V.astype(BF16)),
    "abs_x": Tile(np.abs(X)),
    "ones": Tile(np.ones((P, F), np.float32)),
    "ints": Tile(INTS),
    "big": Tile(BIG),
    "big2": Tile(BIG2),
    "big_v": Tile(BIG2[:, :1].copy()),
    "odd": Tile(np.full((P, F), ODD, np.int32)),
    "zeros_v": Tile(np.zeros((P, 1), np.float32)),
    "count": Tile(np.arange(P * F, dtype=np.uint32).reshape(P, F)),
    "firsts_v": Tile(np.arange(0, P * F, F, dtype=np.float32)[:, None]),
    "u": Tile(BYTES),
    "w": Tile(BYTES2),
    "p": Tile(FLAGS),
    "p32": Tile(FLAGS.astype(np.uint32)),
    "lo": Tile(np.full((P, 1), 103, np.float32)),
    "hi": Tile(np.arange(P, dtype=np.float32)[:, None] + 105),
}
# id: (instruction on tiles of these names, contents of the first afterwards). A `dst` has the shape
# and type of these, float32 for float64.
MEANINGS: dict[str, tuple[Callable[..., Any], Array]] = {
    "tensor_tensor-f32": (lambda dst, x, y: isa.tensor_tensor(dst, x, y, nl.multiply), X * Y),
    "tensor_tensor-psum-rank-3": (
        lambda dst, x_ps, y: isa.tensor_tensor(dst, x_ps.reshape((P, 4, 5)), y, nl.subtract),
        X - Y,
    ),
    "tensor_tensor-compare-int-float": (
        lambda dst, ints, x: isa.tensor_tensor(dst, ints, x, nl.less),
        np.where(INTS < X, 1.0, 0.0).astype(BF16),
    ),
    "tensor_tensor-int32-exact": (
        lambda dst, big, big2: isa.tensor_tensor(dst, big, big2, nl.add),
        wrap(i64(BIG) + i64(BIG2)),
    ),
    "tensor_tensor-int32-multiply-wraps": (
        lambda dst, big, ints: isa.tensor_tensor(dst, big, ints, nl.multiply),
        wrap(i64(BIG) * i64(INTS)),
    ),
    "tensor_tensor-int32-on-vector-is-float32": (
        lambda dst, big, big2: isa.tensor_tensor(
            dst, big, big2, nl.maximum, engine=isa.engine.vector
        ),
        np.minimum(i64(np.maximum(BIG, BIG2).astype(np.float32)), (1 << 31) - 1).astype(np.int32),
    ),
    "tensor_tensor-bits": (
        lambda dst, u, w: isa.tensor_tensor(dst, u, w, nl.bitwise_xor),
        BYTES ^ BYTES2,
    ),
    "tensor_tensor-logical": (
        lambda dst, p, u: isa.tensor_tensor(dst, p, u, nl.logical_and),
        ((FLAGS != 0) & (BYTES != 0)).astype(np.uint8),
    ),
    "tensor_tensor-power-gpsimd": (
        lambda dst, abs_x, y: isa.tensor_tensor(dst, abs_x, y, nl.power),
        np.exp(Y.astype(np.float64) * np.log(np.abs(X).astype(np.float64))),
    ),
    "tensor_scalar-two-ops": (
        lambda dst, x: isa.tensor_scalar(dst, x, nl.multiply, 2.5, op1=nl.add, operand1=-1.0),
        X * 2.5 - 1.0,
    ),
    "tensor_scalar-reversed-vector": (
        lambda dst, x, v: isa.tensor_scalar(
            dst, x, nl.subtract, v, True, nl.subtract, 3.0, reverse1=True
        ),
        3.0 - (V - X),
    ),
    "tensor_scalar-bf16-operand": (
        lambda dst, x, bf16_v: isa.tensor_scalar(dst, x, nl.multiply, bf16_v),
        X * V.astype(BF16).astype(np.float32),
    ),
    "tensor_scalar-none-skips": (
        lambda dst, x: isa.tensor_scalar(dst, x, None, None, op1=nl.maximum, operand1=0),
        np.where(X > 0, X, 0),
    ),
    "tensor_scalar-abs": (
        lambda dst, x: isa.tensor_scalar(dst, x, nl.abs, None, op1=nl.minimum, operand1=0.5),
        np.minimum(np.sqrt(X * X), 0.5),
    ),
    "tensor_scalar-int32-address-arithmetic": (
        lambda dst, big: isa.tensor_scalar(dst, big, nl.multiply, 3, op1=nl.add, operand1=7),
        wrap(i64(BIG) * 3 + 7),
    ),
    "tensor_scalar-int32-float-operand-is-float32": (
        lambda dst, odd: isa.tensor_scalar(dst, odd, nl.add, 1.0),
        np.full((P, F), ODD - 1, np.int32),
    ),
    "tensor_scalar-int32-float-vector-is-float32": (
        lambda dst, odd, zeros_v: isa.tensor_scalar(dst, odd, nl.add, zeros_v),
        np.full((P, F), ODD - 1, np.int32),
    ),
    "tensor_scalar-int32-integer-vector-is-exact": (
        lambda dst, big, big_v: isa.tensor_scalar(dst, big, nl.add, big_v),
        wrap(i64(BIG) + i64(BIG2[:, :1])),
    ),
    "tensor_scalar-int32-maximum-is-float32": (
        lambda dst, odd: isa.tensor_scalar(
            dst, odd, nl.maximum, 1, op1=nl.subtract, operand1=ODD - 1
        ),
        np.zeros((P, F), np.int32),
    ),
    "tensor_scalar-uint32-equal-fp32-operand": (
        lambda dst, count, firsts_v: isa.tensor_scalar(dst, count, nl.equal, firsts_v),
        (np.arange(F) == 0) * np.ones((P, 1)),
    ),
    "tensor_scalar-shift-and-mask": (
        lambda dst, u: isa.tensor_scalar(dst, u, nl.right_shift, 4, op1=nl.bitwise_and, operand1=3),
        BYTES // 16 % 4,
    ),
    "tensor_scalar-rsqrt-gpsimd": (
        lambda dst, abs_x: isa.tensor_scalar(
            dst, abs_x, nl.add, 1.0, op1=nl.rsqrt, operand1=None, engine=isa.engine.gpsimd
        ),
        (np.abs(X) + 1.0) ** -0.5,
    ),
    "tensor_scalar-scalar-engine": (
        lambda dst, x, v: isa.tensor_scalar(
            dst, x, nl.multiply, v, op1=nl.add, operand1=1.0, engine=isa.engine.scalar
        ),
        X * V + 1.0,
    ),
    "scalar_tensor_tensor": (
        lambda dst, x_ps, v, y: isa.scalar_tensor_tensor(dst, x_ps, nl.multiply, v, nl.add, y),
        X * V + Y,
    ),
    "scalar_tensor_tensor-reversed": (
        lambda dst, x, y: isa.scalar_tensor_tensor(
            dst, x, nl.subtract, 2.0, nl.subtract, y, reverse0=True, reverse1=True
        ),
        Y - (2.0 - X),
    ),
    "tensor_reduce-add": (
        lambda dst, x: isa.tensor_reduce(dst, nl.add, x, axis=1),
        X.astype(np.float64).sum(axis=1, keepdims=True),
    ),
    "tensor_reduce-max-negated-two-axes": (
        lambda dst, x: isa.tensor_reduce(
            dst, nl.maximum, x.reshape((P, 2, 2, 5)), axis=(2, 3), negate=True
        ),
        -X.reshape(P, 2, 10).max(axis=2),
    ),
    "tensor_reduce-named-max": (
        lambda dst, x: isa.tensor_reduce(dst, nl.max, x, axis=-1),
        X.max(axis=1, keepdims=True),
    ),
    "tensor_reduce-bits": (
        lambda dst, u: isa.tensor_reduce(dst, nl.bitwise_xor, u, axis=1),
        np.bitwise_xor.reduce(BYTES, axis=1)[:, None],
    ),
    "reciprocal": (lambda dst, x: isa.reciprocal(dst, x), 1.0 / X.astype(np.float64)),
    "tensor_tensor_scan-cumulative-sum": (
        lambda dst, ones, y: isa.tensor_tensor_scan(dst, ones, y, 2.0, nl.multiply, nl.add),
        2.0 + np.cumsum(Y, axis=1),
    ),
    "tensor_copy-same-bits": (lambda dst, big: isa.tensor_copy(dst, big), BIG),
    "tensor_copy-rank-change-scalar-engine": (
        lambda dst, x_ps: isa.tensor_copy(dst, x_ps, engine=isa.engine.scalar),
        X.astype(BF16).reshape(P, 1, F),
    ),
    "tensor_copy-int32-to-uint8-saturates": (
        lambda dst, big: isa.tensor_copy(dst, big),
        np.clip(BIG, 0, 255).astype(np.uint8),
    ),
    "memset-float": (lambda dst: isa.memset(dst, -1.5), np.full((P, F), -1.5)),
    "memset-int-into-float": (lambda dst: isa.memset(dst, 3), np.full((P, F), 3.0)),
    "memset-int": (lambda dst: isa.memset(dst, -7), np.full((P, F), -7, np.int16)),
    "tensor_copy_predicated": (
        lambda x, y, p: isa.tensor_copy_predicated(x, y, p),
        np.where(FLAGS == 1, Y, X),
    ),
    "tensor_copy_predicated-reversed-scalar": (
        lambda x, p32: isa.tensor_copy_predicated(x, 4.0, p32, reverse_pred=True),
        np.where(FLAGS == 1, X, 4.0),
    ),
    "select_reduce": (
        lambda dst, p, x: isa.select_reduce(dst, p, x, -2.0),
        np.where(FLAGS == 1, X, -2.0),
    ),
    "select_reduce-reversed-vector": (
        lambda dst, p, x, v: isa.select_reduce(dst, p, x, v, reverse_pred=True),
        np.where(FLAGS == 0, X, V),
    ),
    "range_select": (
        lambda dst, x, lo, hi: isa.range_select(
            dst, x, nl.greater_equal, nl.less, lo, hi, range_start=100
        ),
        np.where((np.arange(F) >= 3) & (np.arange(F) < np.arange(P)[:, None] + 5), X, FP32_MIN),
    ),
}


@pytest.mark.parametrize("case", MEANINGS)
def test_an_instruction_means_its_formula(case: str) -> None:
    call, expected = MEANINGS[case]
    dtype = "float32" if expected.dtype == np.float64 else expected.dtype
    known = TILES | {"dst": out(dtype, expected.shape)}
    names = call.__code__.co_varnames[: call.__code__.co_argcount]
    result = execute(call, **{name: known[name] for name in names})
    assert not result.unwritten[names[0]].any()
    found = result[names[0]].astype(np.float64)
    np.testing.assert_allclose(found, expected.astype(np.float64), rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("reverse0", [False, True])
@pytest.mark.parametrize("reverse1", [False, True])
@pytest.mark.parametrize("op0", ["add", "subtract", "multiply", "maximum"])
def test_a_scan_is_the_recurrence_written_out(op0: str, reverse0: bool, reverse1: bool) -> None:
    formula = getattr(np, op0)
    result = execute(
        lambda dst, x, y, v: isa.tensor_tensor_scan(
            dst, x, y, v, getattr(nl, op0), nl.subtract, reverse0, reverse1
        ),
        dst=out(shape=(3, F)),
        x=Tile(X[:3]),
        y=Tile(Y[:3]),
        v=Tile(V[:3]),
    )
    for row in range(3):
        state = float(V[row, 0])
        for column in range(F):
            x, y = float(X[row, column]), float(Y[row, column])
            inner = formula(state, x) if reverse0 else formula(x, state)
            state = y - inner if reverse1 else inner - y
            assert result["dst"][row, column] == pytest.approx(state, rel=1e-4, abs=1e-4)


def test_a_reduction_may_write_among_what_it_reads() -> None:
    """A shift is of elements that go to as many others; a sum goes to one."""
    result = execute(lambda x: isa.tensor_reduce(x[:, 4:5], nl.add, x, 1), x=Tile(X))
    np.testing.assert_allclose(result["x"][:, 4:5], X.sum(1, keepdims=True), rtol=1e-5)
    assert result.run.findings == []


@pytest.mark.parametrize("op", ["add", "multiply", "maximum", "minimum"])
def test_tensor_scalar_reduce_combines_rows_across_instructions(op: str) -> None:
    code, formula = getattr(nl, op), partial(getattr(np, op).reduce, axis=1)

    def body(a: Any, b: Any, c: Any, dst: Any, first: Any, second: Any, third: Any) -> None:
        isa.tensor_scalar_reduce(dst, a, nl.add, 1.0, code, first)
        isa.tensor_scalar_reduce(
            dst,
            b,
            nl.add,
            1.0,
            code,
            second,
            reduce_cmd=isa.reduce_cmd.reduce,
            reduce_res_negate=True,
        )
        isa.tensor_scalar_reduce(
            dst, c, nl.abs, 0, code, third, reduce_cmd=isa.reduce_cmd.load_reduce, reduce_init=0.5
        )

    column = out(shape=(P, 1))
    result = execute(
        body, a=Tile(X), b=Tile(Y), c=Tile(X), dst=out(), first=column, second=column, third=column
    )
    x, y = X.astype(np.float64), Y.astype(np.float64)
    both = np.concatenate((x, y), axis=1) + 1
    loaded = np.concatenate((np.full((P, 1), 0.5), np.abs(x)), axis=1)
    np.testing.assert_allclose(result["first"][:, 0], formula(x + 1), rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(result["second"][:, 0], -formula(both), rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(result["third"][:, 0], formula(loaded), rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(result["dst"], np.abs(X), rtol=1e-6)


def test_selections_keep_the_row_maximum_in_the_accumulators() -> None:
    def body(dst: Any, p: Any, x: Any, y: Any, lo: Any, hi: Any, one: Any, two: Any) -> None:
        isa.select_reduce(dst, p, x, -9.0, one, isa.reduce_cmd.reset_reduce)
        isa.range_select(
            dst, y, nl.greater_equal, nl.less, lo, hi, isa.reduce_cmd.reduce, reduce_res=two
        )

    bounds = {
        "lo": Tile(np.full((P, 1), 2, np.float32)),
        "hi": Tile(np.full((P, 1), 6, np.float32)),
    }
    column = out(shape=(P, 1))
    result = execute(
        body,
        dst=out("bfloat16"),
        p=Tile(FLAGS),
        x=Tile(X),
        y=Tile(Y),
        one=column,
        two=column,
        **bounds,
    )
    first = np.where(FLAGS == 1, X, -9.0).max(axis=1)
    np.testing.assert_array_equal(result["one"][:, 0], first)
    np.testing.assert_array_equal(result["two"][:, 0], np.maximum(first, Y[:, 2:6].max(axis=1)))
    assert np.isneginf(result["dst"][:, :2].astype(np.float32)).all()  # narrowed fill value


START = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}


@pytest.mark.parametrize("op", START)
def test_tensor_scalar_cumulative_writes_the_running_value(op: str) -> None:
    def body(dst: Any, more: Any, x: Any) -> None:
        isa.tensor_scalar_cumulative(dst, x, nl.multiply, getattr(nl, op), 0.5)
        isa.tensor_scalar_cumulative(
            more, x, nl.multiply, getattr(nl, op), 0.5, reduce_cmd=isa.reduce_cmd.reduce
        )

    result = execute(body, dst=out(shape=(2, F)), more=out(shape=(2, F)), x=Tile(X[:2]))
    for row in range(2):
        state = START[op]
        for column in range(2 * F):
            state = getattr(np, op)(float(X[row, column % F]) * 0.5, state)
            tile = result["dst"] if column < F else result["more"]
            assert tile[row, column % F] == pytest.approx(state, rel=1e-4, abs=1e-5)


def test_an_unwritten_start_value_makes_the_result_unwritten() -> None:
    def body(dst: Any, x: Any, start: Any, total: Any) -> None:
        isa.tensor_scalar_reduce(
            dst,
            x,
            nl.add,
            1.0,
            nl.add,
            total,
            reduce_cmd=isa.reduce_cmd.load_reduce,
            reduce_init=start,
        )

    column = out(shape=(P, 1))
    result = execute(body, dst=out(), x=Tile(X), start=column, total=column)
    assert result.unwritten["total"].all()
    assert not result.unwritten["dst"].any()


def test_exponential_subtracts_the_maximum_and_sums() -> None:
    def body(dst: Any, x: Any, v: Any, total: Any) -> None:
        isa.exponential(dst, x, v, total, isa.reduce_cmd.load_reduce, 1.0)

    result = execute(
        body,
        dst=out(),
        x=Tile(X),
        v=Tile(V),
        total=out(shape=(P, 1)),
        options=SimOptions(target="trn3"),
    )
    expected = np.exp(X.astype(np.float64) - V)
    np.testing.assert_allclose(result["dst"], expected, rtol=1e-6)
    np.testing.assert_allclose(result["total"][:, 0], 1.0 + expected.sum(axis=1), rtol=1e-5)


def test_generation_4_keeps_the_smaller_magnitude() -> None:
    result = execute(
        lambda dst, x, y: isa.tensor_tensor(dst, x, y, nl.abs_min),
        dst=out(),
        x=Tile(X),
        y=Tile(X[::-1].copy()),
        options=SimOptions(target="trn3"),
    )
    other = X[::-1]
    np.testing.assert_array_equal(result["dst"], np.where(np.abs(X) < np.abs(other), X, other))


def test_an_instruction_records_its_engine_and_shape() -> None:
    engines = []

    def body(dst: Any, x: Any, y: Any, i: Any, j: Any) -> None:
        engines.append(isa.tensor_tensor(dst, x, y, nl.add))
        engines.append(isa.tensor_tensor(i, i, j, nl.add))

    result = execute(body, dst=out(), x=Tile(X), y=Tile(Y), i=Tile(BIG), j=Tile(BIG2))
    records = [(record.op, ENGINE_NAMES[record.engine]) for record in result.run.trace]
    assert records == [("tensor_tensor", "vector"), ("tensor_tensor", "gpsimd")]


READERS: dict[str, Callable[..., Any]] = {
    "select_reduce": lambda d, x, m, b, r: isa.select_reduce(
        d, m, x, 0.0, r, isa.reduce_cmd.reset_reduce
    ),
    "range_select": lambda d, x, m, b, r: isa.range_select(
        d, x, nl.less, nl.less, b, b, reduce_res=r
    ),
    "tensor_scalar_reduce": lambda d, x, m, b, r: isa.tensor_scalar_reduce(
        d, x, nl.add, 1.0, nl.add, r
    ),
    "exponential": lambda d, x, m, b, r: isa.exponential(d, x, 0.0, r, isa.reduce_cmd.reset_reduce),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("reads", [False, True])
def test_storing_an_accumulator_is_part_of_the_cost(name: str, reads: bool) -> None:
    def body(d: Any, x: Any, m: Any, b: Any, r: Any) -> None:
        READERS[name](d, x, m, b, r if reads else None)

    result = execute(
        body,
        d=out(),
        x=Tile(X),
        m=Tile(FLAGS),
        b=Tile(V),
        r=out(shape=(P, 1)),
        options=SimOptions(target="trn3"),
    )
    (record,) = list(result.run.trace)
    assert record.facts.reads_accumulator is reads


def test_the_dtype_of_older_releases_is_accepted_and_reported() -> None:
    result = execute(
        lambda d, x, y: isa.scalar_tensor_tensor(d, x, nl.add, 1.0, nl.add, y, dtype=nl.bfloat16),
        d=out(),
        x=Tile(X),
        y=Tile(Y),
    )
    np.testing.assert_allclose(result["d"], X + 1.0 + Y, rtol=1e-6)
    (finding,) = result.run.findings
    assert (finding.kind, "dtype is ignored" in finding.text) == ("deprecated", True)


PATTERNS: dict[str, tuple[tuple[int, ...], int]] = {
    # (columns kept of each axis of a [8, 4, 4, 4, 4] tile, free dimensions that remain)
    "whole": ((4, 4, 4, 4), 1),
    "inner-part": ((4, 4, 4, 2), 2),
    "two-parts": ((4, 2, 4, 2), 3),
    "one-of-an-axis": ((2, 1, 2, 2), 3),
    "all-parts": ((2, 2, 2, 2), 4),
}


@pytest.mark.parametrize("case", PATTERNS)
def test_a_pattern_has_at_most_three_free_dimensions(case: str) -> None:
    (a, b, c, d), dims = PATTERNS[case]
    cube = np.zeros((8, 4, 4, 4, 4), np.float32)

    def body(x: Any) -> None:
        part = x[:, :a, :b, :c, :d]
        isa.tensor_scalar(part, part, nl.add, 1.0)

    if dims <= 3:
        assert execute(body, x=Tile(cube))["x"].sum() == 8 * a * b * c * d
    else:
        with pytest.raises(IllegalOperand, match="dst: expected at most 3 free dimensions"):
            execute(body, x=Tile(cube))


def test_idle_makes_the_accumulators_unknown() -> None:
    def body(dst: Any, p: Any, x: Any) -> None:
        isa.select_reduce(dst, p, x, 0.0, reduce_cmd=isa.reduce_cmd.reset_reduce)
        isa.select_reduce(dst, p, x, 0.0)
        isa.select_reduce(dst, p, x, 0.0, reduce_cmd=isa.reduce_cmd.reduce)

    with pytest.raises(IllegalOperand, match="registers that nobody set"):
        execute(body, dst=out(), p=Tile(FLAGS), x=Tile(X))
