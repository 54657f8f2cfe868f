"""Every documented constraint of the Vector instructions is refused, naming operand and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nki_sim import IllegalOperand, SimOptions, isa
from nki_sim.language import api as nl
from nki_sim.testing import Tile, execute

RANDOM = np.random.default_rng(0)
P, F = 48, 20
X = RANDOM.normal(size=(P, F)).astype(np.float32)
Y = RANDOM.normal(size=(P, F)).astype(np.float32)
V = RANDOM.normal(size=(P, 1)).astype(np.float32)
INTS = RANDOM.integers(-50, 50, (P, F)).astype(np.int32)
BIG = RANDOM.integers(-(1 << 31), 1 << 31, (P, F)).astype(np.int32)
BYTES = RANDOM.integers(0, 256, (P, F)).astype(np.uint8)
FLAGS = RANDOM.integers(0, 2, (P, F)).astype(np.uint8)
BF16 = ml_dtypes.bfloat16


def out(dtype: Any = "float32", shape: tuple[int, ...] = (P, F), **where: Any) -> Tile:
    return Tile(shape=shape, dtype=dtype, **where)


COLUMN = Tile(V)
BINARY = {"dst": out(), "x": Tile(X), "y": Tile(Y)}
UNARY = {"dst": out(), "x": Tile(X)}


def add(dst: Any, x: Any, y: Any) -> None:
    isa.tensor_tensor(dst, x, y, nl.add)


def scale(dst: Any, x: Any, v: Any) -> None:
    isa.tensor_scalar(dst, x, nl.multiply, v)


def keep(dst: Any, x: Any, p: Any) -> None:
    isa.tensor_copy_predicated(dst, x, p)


def select(dst: Any, p: Any, x: Any) -> None:
    isa.select_reduce(dst, p, x, 0.0)


def in_range(dst: Any, x: Any, lo: Any, hi: Any, **options: Any) -> None:
    isa.range_select(dst, x, nl.greater_equal, nl.less, lo, hi, **options)


BOUNDS = {"lo": COLUMN, "hi": COLUMN}
REFUSALS: dict[str, tuple[Callable[..., Any], dict[str, Tile], str]] = {
    "tt-hbm": (add, BINARY | {"x": Tile(X, space="hbm")}, r"data1: expected .*\.dma_copy moves"),
    "tt-both-psum": (
        add,
        BINARY | {"x": Tile(X, space="psum"), "y": Tile(Y, space="psum")},
        "data2: expected SBUF where data1 is in PSUM",
    ),
    "tt-row": (add, BINARY | {"y": Tile(Y[:1])}, r"found 1\. .* row\.ap\(\[\[0, 48\], \[1, col"),
    "tt-unary-op": (
        lambda dst, x, y: isa.tensor_tensor(dst, x, y, nl.exp),
        BINARY,
        "op: expected an ALU",
    ),
    "tt-bits-on-floats": (
        lambda dst, x, y: isa.tensor_tensor(dst, x, y, nl.bitwise_or),
        BINARY,
        "dst: expected an integer type for bitwise_or; found float32",
    ),
    "tt-power-psum": (
        lambda dst, x, y: isa.tensor_tensor(dst, x, y, nl.power),
        BINARY | {"x": Tile(X, space="psum")},
        "data1: expected a tensor in SBUF, as GpSimd",
    ),
    "tt-engine": (
        lambda dst, x, y: isa.tensor_tensor(dst, x, y, nl.add, engine=isa.engine.scalar),
        BINARY,
        "engine: expected one of vector, gpsimd; found scalar",
    ),
    "tt-abs-min-gen3": (
        lambda dst, x, y: isa.tensor_tensor(dst, x, y, nl.abs_min),
        BINARY,
        "needs gen4",
    ),
    "ts-operand-integer": (
        scale,
        UNARY | {"v": Tile(V.astype(np.int32))},
        "operand0: expected a floating-point",
    ),
    "ts-mixed-kinds": (
        lambda dst, x: isa.tensor_scalar(dst, x, nl.bitwise_and, 1, op1=nl.add, operand1=1),
        {"dst": out("uint8"), "x": Tile(BYTES)},
        "op1: expected two bit operators or two",
    ),
    "ts-bits-on-floats": (
        lambda dst, x: isa.tensor_scalar(dst, x, nl.left_shift, 1),
        UNARY,
        "data: expected an integer type for left_shift",
    ),
    "ts-bits-float-operand": (
        lambda dst, x: isa.tensor_scalar(dst, x, nl.left_shift, 1.0),
        {"dst": out("uint8"), "x": Tile(BYTES)},
        "operand0: expected an integer for left_shift",
    ),
    "ts-unary-with-operand": (
        lambda dst, x: isa.tensor_scalar(dst, x, nl.abs, 2.0),
        UNARY,
        "operand0: expected None or 0 for abs",
    ),
    "ts-operand-without-op": (
        lambda dst, x: isa.tensor_scalar(dst, x, nl.add, 2.0, operand1=1.0),
        UNARY,
        "operand1: expected None where op1 is None",
    ),
    "ts-rsqrt-on-vector": (
        lambda dst, x: isa.tensor_scalar(dst, x, nl.rsqrt, None, engine=isa.engine.vector),
        UNARY,
        "engine: expected one of gpsimd; found vector",
    ),
    "ts-gpsimd-without-rsqrt": (
        lambda dst, x: isa.tensor_scalar(dst, x, nl.add, 1.0, engine=isa.engine.gpsimd),
        UNARY,
        "engine: expected one of vector, scalar; found gpsimd",
    ),
    "ts-scalar-engine-pair": (
        lambda dst, x: isa.tensor_scalar(dst, x, nl.maximum, 1.0, engine=isa.engine.scalar),
        UNARY,
        "engine: expected vector, or gen3 with multiply",
    ),
    "stt-bits": (
        lambda dst, x, y: isa.scalar_tensor_tensor(dst, x, nl.add, 1.0, nl.bitwise_or, y),
        BINARY,
        "op1: expected an arithmetic operator",
    ),
    "stt-both-psum": (
        lambda dst, x, y: isa.scalar_tensor_tensor(dst, x, nl.add, 1.0, nl.add, y),
        BINARY | {"x": Tile(X, space="psum"), "y": Tile(Y, space="psum")},
        "operand1: expected SB",
    ),
    "tr-partition-axis": (
        lambda dst, x: isa.tensor_reduce(dst, nl.add, x, axis=0),
        UNARY,
        "axis: expected the last",
    ),
    "tr-not-last-axis": (
        lambda dst, x: isa.tensor_reduce(dst, nl.add, x, axis=1),
        {"dst": out(shape=(P, 5)), "x": Tile(X.reshape(P, 4, 5))},
        "axis: expected the last free",
    ),
    "tr-op": (
        lambda dst, x: isa.tensor_reduce(dst, nl.equal, x, axis=1),
        {"dst": out(shape=(P, 1)), "x": Tile(X)},
        "op: expected a reduction operator; found equal",
    ),
    "tr-negate-bits": (
        lambda dst, x: isa.tensor_reduce(dst, nl.bitwise_or, x, axis=1, negate=True),
        {"dst": out("uint8", (P, 1)), "x": Tile(BYTES)},
        "negate: expected False",
    ),
    "tr-bits-on-floats": (
        lambda dst, x: isa.tensor_reduce(dst, nl.bitwise_or, x, axis=1),
        {"dst": out(shape=(P, 1)), "x": Tile(X)},
        "data: expected an integer type",
    ),
    "scan-both-psum": (
        lambda dst, x, y: isa.tensor_tensor_scan(dst, x, y, 0.0, nl.add, nl.add),
        BINARY | {"x": Tile(X, space="psum"), "y": Tile(Y, space="psum")},
        "data1: expected SBUF",
    ),
    "scan-bits": (
        lambda dst, x, y: isa.tensor_tensor_scan(dst, x, y, 0.0, nl.bitwise_or, nl.add),
        BINARY,
        "op0: expected an arithmetic operator",
    ),
    "copy-gpsimd-psum": (
        lambda dst, x: isa.tensor_copy(dst, x, engine=isa.engine.gpsimd),
        UNARY | {"x": Tile(X, space="psum")},
        "src: expected a tensor in SBUF, as GpSimd",
    ),
    "copy-engine": (
        lambda dst, x: isa.tensor_copy(dst, x, engine=isa.engine.tensor),
        UNARY,
        "engine: expected",
    ),
    "copy-packed": (
        lambda dst, x: isa.tensor_copy(dst, x),
        {"dst": out(), "x": Tile(BIG.view(np.uint32), "float8_e4m3fn_x4")},
        "dst: expected float8_e4m3fn_x4, as packed types are not converted",
    ),
    "memset-float-into-int": (
        lambda dst: isa.memset(dst, 1.5),
        {"dst": out("int32")},
        "value: expected an int",
    ),
    "memset-nan-into-int": (
        lambda dst: isa.memset(dst, float("nan")),
        {"dst": out("int32")},
        "value: expected an int",
    ),
    "memset-infinity-into-int": (
        lambda dst: isa.memset(dst, float("inf")),
        {"dst": out("int32")},
        "value: expected an int",
    ),
    "memset-out-of-range": (
        lambda dst: isa.memset(dst, 256),
        {"dst": out("uint8")},
        "value: expected an int",
    ),
    "memset-packed": (
        lambda dst: isa.memset(dst, 1),
        {"dst": out("float4_e2m1fn_x4")},
        "value: expected 0 for",
    ),
    "memset-gpsimd-psum": (
        lambda dst: isa.memset(dst, 0.0, engine=isa.engine.gpsimd),
        {"dst": out(space="psum")},
        "dst: expected a tensor in SBUF, as GpSimd",
    ),
    "memset-scalar-engine": (
        lambda dst: isa.memset(dst, 0.0, engine=isa.engine.scalar),
        {"dst": out()},
        "engine: expected one of vector, gpsimd; found scalar",
    ),
    "tcp-predicate-dtype": (
        keep,
        UNARY | {"p": Tile(FLAGS.astype(np.int8))},
        "predicate: expected uint8, uint16",
    ),
    "tcp-dtype": (
        keep,
        {"dst": out("bfloat16"), "x": Tile(X), "p": Tile(FLAGS)},
        "src: expected bfloat16",
    ),
    "tcp-both-psum": (
        keep,
        UNARY | {"x": Tile(X, space="psum"), "p": Tile(FLAGS, space="psum")},
        "predicate: expected SBUF",
    ),
    "sr-predicate-dtype": (
        select,
        UNARY | {"p": Tile(FLAGS.astype(np.uint32))},
        "predicate: expected int8, uint8",
    ),
    "sr-on-true-int32": (
        select,
        {"dst": out(), "x": Tile(INTS), "p": Tile(FLAGS)},
        "on_true: expected a type other",
    ),
    "sr-reduce-op": (
        lambda dst, p, x: isa.select_reduce(dst, p, x, 0.0, reduce_op=nl.add),
        UNARY | {"p": Tile(FLAGS)},
        "reduce_op: expected maximum; found add",
    ),
    "sr-reduce-res-int": (
        lambda dst, p, x, r: isa.select_reduce(dst, p, x, 0.0, r, isa.reduce_cmd.reset_reduce),
        UNARY | {"p": Tile(FLAGS), "r": out("int32", (P, 1))},
        "reduce_res: expected a floating",
    ),
    "sr-reduce-without-reset": (
        lambda dst, p, x, r: isa.select_reduce(dst, p, x, 0.0, r, isa.reduce_cmd.reduce),
        UNARY | {"p": Tile(FLAGS), "r": out(shape=(P, 1))},
        "reduce_cmd: expected a reset_reduce",
    ),
    "rs-bound-dtype": (
        in_range,
        UNARY | BOUNDS | {"hi": Tile(V.astype(BF16))},
        "bound1: expected float32",
    ),
    "rs-integers": (in_range, UNARY | BOUNDS | {"x": Tile(INTS)}, "on_true_tile: expected a float"),
    "rs-comparison": (
        lambda dst, x, lo, hi: isa.range_select(dst, x, nl.not_equal, nl.less, lo, hi),
        UNARY | BOUNDS,
        "comp_op0: expected equal, greater",
    ),
    "rs-fill": (
        lambda **tiles: in_range(**tiles, on_false_value=0.0),
        UNARY | BOUNDS,
        "on_false_value: e",
    ),
    "rs-range": (
        lambda **tiles: in_range(**tiles, range_start=1 << 24),
        UNARY | BOUNDS,
        "range_start: exp",
    ),
    "rs-reduce-op": (
        lambda **tiles: in_range(**tiles, reduce_op=nl.add),
        UNARY | BOUNDS,
        "reduce_op: expected",
    ),
    "tsr-reverse": (
        lambda dst, x: isa.tensor_scalar_reduce(dst, x, nl.add, 1.0, nl.add, reverse0=True),
        UNARY,
        "reverse0: expected False",
    ),
    "tsr-bits": (
        lambda dst, x: isa.tensor_scalar_reduce(dst, x, nl.bitwise_and, 1, nl.add),
        {"dst": out("uint8"), "x": Tile(BYTES)},
        "op0: expected an arithmetic",
    ),
    "tsr-integer-operand": (
        lambda dst, x, v: isa.tensor_scalar_reduce(dst, x, nl.add, v, nl.add),
        UNARY | {"v": Tile(np.ones((P, 1), np.int32))},
        "operand0: expected a floating-point",
    ),
    "tsr-reduce-op": (
        lambda dst, x: isa.tensor_scalar_reduce(dst, x, nl.add, 1.0, nl.subtract),
        UNARY,
        "reduce_op: expected add, maximum, minimum, multiply",
    ),
    "tsr-idle": (
        lambda dst, x: isa.tensor_scalar_reduce(
            dst, x, nl.add, 1.0, nl.add, reduce_cmd=isa.reduce_cmd.idle
        ),
        UNARY,
        "reduce_cmd: expected reset_reduce, reduce, load_reduce; found idle",
    ),
    "tsr-init-missing": (
        lambda dst, x: isa.tensor_scalar_reduce(
            dst, x, nl.add, 1.0, nl.add, reduce_cmd=isa.reduce_cmd.load_reduce
        ),
        UNARY,
        "reduce_init: expected a number or",
    ),
    "tsr-init-unused": (
        lambda dst, x: isa.tensor_scalar_reduce(dst, x, nl.add, 1.0, nl.add, reduce_init=1.0),
        UNARY,
        "reduce_init: expected None unless",
    ),
    "tsc-int32": (
        lambda dst, x: isa.tensor_scalar_cumulative(dst, x, nl.add, nl.add, 1.0),
        {"dst": out(), "x": Tile(INTS)},
        "src: expected a float or an 8- or 16-bit",
    ),
    "tsc-op1": (
        lambda dst, x: isa.tensor_scalar_cumulative(dst, x, nl.add, nl.logical_or, 1.0),
        UNARY,
        "op1: expected add, maximum",
    ),
    "tsc-idle": (
        lambda dst, x: isa.tensor_scalar_cumulative(
            dst, x, nl.add, nl.add, 1.0, reduce_cmd=isa.reduce_cmd.idle
        ),
        UNARY,
        "reduce_cmd: expected",
    ),
    "exponential-gen3": (lambda dst, x: isa.exponential(dst, x), UNARY, "expected gen4"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_documented_constraint_is_refused(case: str) -> None:
    call, tiles, message = REFUSALS[case]
    with pytest.raises(IllegalOperand, match=message):
        execute(call, **tiles)


def test_the_scalar_engine_copies_from_the_second_generation_on_only() -> None:
    tiles = {"dst": out(), "x": Tile(X)}
    with pytest.raises(IllegalOperand, match="engine: expected vector or gpsimd before gen3"):
        execute(
            lambda dst, x: isa.tensor_copy(dst, x, engine=isa.engine.scalar),
            options=SimOptions(target="trn1"),
            **tiles,
        )


def test_range_select_does_not_exist_before_gen3() -> None:
    with pytest.raises(IllegalOperand, match="range_select: expected gen3"):
        execute(in_range, options=SimOptions(target="trn1"), dst=out(), x=Tile(X), **BOUNDS)


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
