"""Scalar instructions: activation functions, accumulators, constraints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nki_sim import SimOptions, isa
from nki_sim.language import api as nl
from nki_sim.testing import Tile, execute
from nki_sim.trace import ENGINE_NAMES

RANDOM = np.random.default_rng(0)
P, F = 40, 12
X = RANDOM.normal(size=(P, F)).astype(np.float32)
Y = RANDOM.normal(size=(P, F)).astype(np.float32)
S = RANDOM.uniform(0.5, 1.5, (P, 1)).astype(np.float32)
B = RANDOM.normal(size=(P, 1)).astype(np.float32)
BF16 = ml_dtypes.bfloat16
RESET_REDUCE = isa.reduce_cmd.reset_reduce
GEN4 = SimOptions(target="trn3")


def out(dtype: Any = "float32", shape: tuple[int, ...] = (P, F), **where: Any) -> Tile:
    return Tile(shape=shape, dtype=dtype, **where)


COLUMN = out(shape=(P, 1))


def test_activation_scales_shifts_and_applies() -> None:
    result = execute(
        lambda dst, x, s, b: isa.activation(dst, nl.exp, x, bias=b, scale=s),
        dst=out(),
        x=Tile(X, space="psum"),
        s=Tile(S),
        b=Tile(B.astype(BF16)),
    )
    shift = B.astype(BF16).astype(np.float64)
    np.testing.assert_allclose(result["dst"], np.exp(X.astype(np.float64) * S + shift), rtol=2e-6)


@pytest.mark.parametrize("engine", ["scalar", "gpsimd"])
def test_an_activation_gives_the_same_on_both_engines_of_gen4(engine: str) -> None:
    chosen = getattr(isa.engine, engine)

    def kernel(dst: Any, pair: Any, x: Any, s: Any) -> None:
        isa.activation(dst, nl.tanh, x, scale=s, engine=chosen)
        isa.activate2(pair, nl.tanh, x, s, 0.5, nl.multiply, nl.add, engine=chosen)

    tiles = {"dst": out(), "pair": out(), "x": Tile(X), "s": Tile(S)}
    result = execute(kernel, options=GEN4, **tiles)
    np.testing.assert_allclose(result["dst"], np.tanh(X * S), rtol=2e-6)
    np.testing.assert_allclose(result["pair"], np.tanh(X * S + np.float32(0.5)), rtol=2e-6)
    assert [ENGINE_NAMES[record.engine] for record in result.run.trace] == [engine, engine]


def test_activation_takes_numbers_and_widens_integers() -> None:
    x = RANDOM.integers(-5, 5, (P, F)).astype(np.int8)
    result = execute(
        lambda dst, x: isa.activation(dst, nl.copy, x, bias=1.0, scale=0.5),
        dst=out("bfloat16", (P, 2, 6)),
        x=Tile(x),
    )
    expected = (x * 0.5 + 1.0).astype(BF16)
    np.testing.assert_array_equal(result["dst"].reshape(P, F), expected)


def test_row_sums_persist_across_activations_and_are_taken_before_rounding() -> None:
    def body(x: Any, y: Any, dst: Any, one: Any, two: Any, three: Any) -> None:
        isa.activation(dst, nl.exp, x, reduce_op=nl.add, reduce_res=one, reduce_cmd=RESET_REDUCE)
        isa.activation(dst, nl.copy, y)  # idle: leaves the registers alone
        isa.activation(
            dst, nl.square, y, reduce_op=nl.add, reduce_res=two, reduce_cmd=isa.reduce_cmd.reduce
        )
        isa.activation(
            dst, nl.square, y, reduce_op=nl.add, reduce_res=three, reduce_cmd=isa.reduce_cmd.reset
        )

    result = execute(
        body, x=Tile(X), y=Tile(Y), dst=out("bfloat16"), one=COLUMN, two=COLUMN, three=COLUMN
    )
    x, y = X.astype(np.float64), Y.astype(np.float64)
    first = np.exp(x).sum(axis=1)
    np.testing.assert_allclose(result["one"][:, 0], first, rtol=1e-5)
    np.testing.assert_allclose(result["two"][:, 0], first + (y * y).sum(axis=1), rtol=1e-5)
    assert (result["three"] == 0).all()


def test_activation_reduce_starts_anew_each_time() -> None:
    def body(x: Any, dst: Any, one: Any) -> None:
        isa.activation_reduce(dst, nl.square, x, nl.add, one)
        isa.activation_reduce(dst, nl.square, x, nl.add, one, scale=2.0)

    result = execute(body, x=Tile(X), dst=out(), one=COLUMN)
    np.testing.assert_allclose(
        result["one"][:, 0], 4 * np.square(X.astype(np.float64)).sum(axis=1), rtol=1e-5
    )


def test_a_reduction_may_drop_its_elements_in_one_place() -> None:
    def body(x: Any, dst: Any, one: Any, both: Any) -> None:
        place = dst.ap(pattern=[[1, P], [0, F]])
        isa.activation_reduce(place, nl.square, x, nl.add, one)
        place = both.ap(pattern=[[1, P], [0, F]])
        isa.tensor_scalar(place, x, nl.multiply, 2.0, op1=nl.add, operand1=1.0)

    result = execute(body, x=Tile(X), dst=COLUMN, one=COLUMN, both=COLUMN)
    np.testing.assert_allclose(
        result["one"][:, 0], np.square(X.astype(np.float64)).sum(axis=1), rtol=1e-5
    )
    np.testing.assert_array_equal(result["both"][:, 0], X[:, -1] * np.float32(2) + np.float32(1))


def test_the_result_of_a_reduction_may_alias_the_destination() -> None:
    x = X[:, :1]
    result = execute(
        lambda dst, x: isa.activation_reduce(dst, nl.exp, x, nl.add, dst),
        dst=COLUMN,
        x=Tile(x),
    )
    np.testing.assert_allclose(result["dst"], np.exp(x), rtol=1e-6)


def test_lanes_of_the_accumulators_are_partitions() -> None:
    """Work on other partitions in between leaves the registers of these lanes alone."""

    def body(low: Any, high: Any, dst: Any, dst_high: Any, total: Any) -> None:
        isa.activation(dst, nl.copy, low, reduce_op=nl.add, reduce_cmd=RESET_REDUCE)
        isa.activation(dst_high, nl.copy, high, reduce_op=nl.add, reduce_cmd=isa.reduce_cmd.reduce)
        isa.activation(
            dst, nl.copy, low, reduce_op=nl.add, reduce_res=total, reduce_cmd=isa.reduce_cmd.reduce
        )

    low, high = X[:32], Y[:32]
    result = execute(
        body,
        low=Tile(low),
        high=Tile(high, start=64),
        dst=out(shape=(32, F)),
        dst_high=out(shape=(32, F), start=64),
        total=out(shape=(32, 1)),
    )
    np.testing.assert_allclose(result["total"][:, 0], 2 * low.sum(axis=1), rtol=1e-5, atol=1e-5)


PIPELINES: dict[str, tuple[tuple[Any, Any], dict[str, bool], Callable[[Any], Any]]] = {
    "multiply-add": ((nl.multiply, nl.add), {}, lambda x: x * 2.0 + 0.5),
    "multiply-subtract": ((nl.multiply, nl.subtract), {}, lambda x: x * 2.0 - 0.5),
    "multiply-reversed": ((nl.multiply, nl.subtract), {"reverse1": True}, lambda x: 0.5 - x * 2.0),
    "multiply": ((nl.multiply, nl.bypass), {}, lambda x: x * 2.0),
    "add": ((nl.add, nl.bypass), {}, lambda x: x + 2.0),
    "subtract": ((nl.subtract, nl.bypass), {"reverse0": True}, lambda x: 2.0 - x),
    "bypass": ((nl.bypass, nl.bypass), {}, lambda x: x),
}


@pytest.mark.parametrize("case", PIPELINES)
def test_activate2_runs_its_operator_pairs(case: str) -> None:
    (op0, op1), reverses, formula = PIPELINES[case]
    result = execute(
        lambda dst, x: isa.activate2(dst, nl.tanh, x, 2.0, 0.5, op0, op1, **reverses),
        dst=out(),
        x=Tile(X),
        options=GEN4,
    )
    np.testing.assert_allclose(
        result["dst"], np.tanh(formula(X.astype(np.float64))), rtol=2e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("op", "formula"),
    [
        ("add", lambda row: row.sum()),
        ("maximum", lambda row: row.max()),
        ("minimum", lambda row: row.min()),
        ("abs_max", lambda row: row[np.abs(row).argmax()]),
        ("abs_min", lambda row: row[np.abs(row).argmin()]),
    ],
)
def test_activate2_reduces_with_each_operator(op: str, formula: Callable[..., float]) -> None:
    result = execute(
        lambda dst, x, s, total: isa.activate2(
            dst,
            nl.copy,
            x,
            s,
            0.0,
            nl.multiply,
            nl.bypass,
            reduce_op=getattr(nl, op),
            reduce_res=total,
            reduce_cmd=RESET_REDUCE,
        ),
        dst=out(),
        x=Tile(X),
        s=Tile(S),
        total=COLUMN,
        options=GEN4,
    )
    expected = [formula(row) for row in X * S]
    np.testing.assert_allclose(result["total"][:, 0], expected, rtol=1e-4, atol=1e-5)


def test_activate2_has_the_parametric_rectifier() -> None:
    result = execute(
        lambda dst, x, s: isa.activate2(
            dst, nl.prelu, x, None, None, nl.bypass, nl.bypass, relu_param=s
        ),
        dst=out(),
        x=Tile(X),
        s=Tile(S),
        options=GEN4,
    )
    np.testing.assert_allclose(result["dst"], np.where(X > 0, X, X * S), rtol=1e-6)


@pytest.mark.parametrize(
    ("op", "value"), [("sin", 4.0), ("log", 1e30), ("sqrt", -1.0), ("reciprocal", 1e-20)]
)
def test_an_input_outside_the_range_of_a_function_is_reported(op: str, value: float) -> None:
    x = np.array([[0, value, 0, 0]], np.float32)
    result = execute(
        lambda dst, x: isa.activation(dst, getattr(nl, op), x), dst=out(shape=(1, 4)), x=Tile(x)
    )
    (finding,) = [f for f in result.run.findings if f.kind == "range"]
    assert op in finding.text
    inside = execute(
        lambda dst, x: isa.activation(dst, getattr(nl, op), x, scale=0.0, bias=1.0),
        dst=out(shape=(1, 4)),
        x=Tile(x),
    )
    assert not [f for f in inside.run.findings if f.kind == "range"]
