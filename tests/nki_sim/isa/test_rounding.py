"""Every instruction that computes in float32 rounds once, at its destination.

Each is run with a float32 destination and with a narrow one; the narrow result has to be the wide
one rounded by the rule written out here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nki_sim import SimOptions, isa
from nki_sim.language import api as nl
from nki_sim.testing import Tile, execute

RANDOM = np.random.default_rng(0)
P, F = 32, 16
X = (RANDOM.normal(size=(P, F)) * 30).astype(np.float32)
Y = (RANDOM.normal(size=(P, F)) * 3).astype(np.float32)
V = RANDOM.normal(size=(P, 1)).astype(np.float32)
B = np.full((P, 1), 8, np.float32)
MASK = RANDOM.integers(0, 2, (P, F)).astype(np.uint8)
WIDE, COLUMN, EIGHT = (P, F), (P, 1), (P, 8)

# id: (instruction, shape of dst)
CALLS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "tensor_tensor": (lambda d, x, y: isa.tensor_tensor(d, x, y, nl.multiply), WIDE),
    "tensor_scalar": (lambda d, x, v: isa.tensor_scalar(d, x, nl.multiply, v), WIDE),
    "tensor_scalar-on-scalar-engine": (
        lambda d, x, v: isa.tensor_scalar(d, x, nl.multiply, v, engine=isa.engine.scalar),
        WIDE,
    ),
    "scalar_tensor_tensor": (
        lambda d, x, v, y: isa.scalar_tensor_tensor(d, x, nl.multiply, v, nl.add, y),
        WIDE,
    ),
    "tensor_reduce": (lambda d, x: isa.tensor_reduce(d, nl.add, x, 1), COLUMN),
    "reciprocal": (lambda d, x: isa.reciprocal(d, x), WIDE),
    "tensor_tensor_scan": (
        lambda d, x, y: isa.tensor_tensor_scan(d, x, y, 0.0, nl.maximum, nl.add),
        WIDE,
    ),
    "tensor_copy": (lambda d, x: isa.tensor_copy(d, x), WIDE),
    "tensor_copy-gpsimd": (lambda d, x: isa.tensor_copy(d, x, engine=isa.engine.gpsimd), WIDE),
    "select_reduce": (lambda d, m, x: isa.select_reduce(d, m, x, 0.3), WIDE),
    "range_select": (
        lambda d, x, b: isa.range_select(d, x, nl.less, nl.less, b, b),
        (P, 16),
    ),
    "tensor_scalar_reduce-dst": (
        lambda d, x: isa.tensor_scalar_reduce(d, x, nl.multiply, 0.7, nl.add),
        WIDE,
    ),
    "tensor_scalar_reduce-result": (
        lambda d, x, w: isa.tensor_scalar_reduce(w, x, nl.multiply, 0.7, nl.add, d),
        COLUMN,
    ),
    "tensor_scalar_cumulative": (
        lambda d, x: isa.tensor_scalar_cumulative(d, x, nl.multiply, nl.add, 0.7),
        WIDE,
    ),
    "exponential": (lambda d, y: isa.exponential(d, y, 1.0), WIDE),
    "max8": (lambda d, x: isa.max8(d, x), EIGHT),
    "nc_match_replace8": (
        lambda d, x, e: isa.nc_match_replace8(d, x, e, 0.3),
        WIDE,
    ),
    "bn_stats": (lambda d, x: isa.bn_stats(d, x), (P, 6)),
    "bn_aggr": (lambda d, s: isa.bn_aggr(d, s), (P, 2)),
    "activation": (lambda d, y: isa.activation(d, nl.silu, y, scale=1.3), WIDE),
    "activation-result": (lambda d, y, w: isa.activation_reduce(w, nl.exp, y, nl.add, d), COLUMN),
    "activate2": (
        lambda d, y: isa.activate2(d, nl.tanh, y, 1.3, 0.1, nl.multiply, nl.add),
        WIDE,
    ),
    "affine_select": (lambda d, x: isa.affine_select(d, [[1, F]], 0, x, 0.3), WIDE),
    "tensor_partition_reduce": (
        lambda d, x: isa.tensor_partition_reduce(d, nl.add, x),
        (1, F),
    ),
    "iota": (lambda d: isa.iota(d, [[1001, F]], 7, 13), WIDE),
    "rand2": (lambda d: isa.rand2(d, -3.0, 40.0), WIDE),
    "dma_copy": (lambda d, h: isa.dma_copy(d, h), WIDE),
    "dma_compute": (lambda d, h: isa.dma_compute(d, [h, h], nl.add), WIDE),
}
INPUTS: dict[str, Tile] = {
    "x": Tile(X),
    "y": Tile(Y),
    "v": Tile(V),
    "b": Tile(B),
    "m": Tile(MASK),
    "e": Tile(X[:, 8:]),
    "s": Tile(np.abs(X[:, :6]) + 1),
    "w": Tile(shape=WIDE),
    "h": Tile(X, space="hbm"),
}


def nearest_even(values: Any, bits: int, largest: float) -> Any:
    """Round float64 values to `bits` explicit mantissa bits, ties to even; infinity beyond."""
    _, exponent = np.frexp(values)
    step = np.ldexp(1.0, exponent - 1 - bits)
    rounded = np.rint(values / step) * step
    return np.where(np.abs(rounded) > largest, np.copysign(np.inf, values), rounded)


def saturated(values: Any, low: int, high: int) -> Any:
    return np.clip(np.rint(values), low, high)


RULES: dict[str, Callable[[Any], Any]] = {
    "bfloat16": lambda v: nearest_even(v, 7, 3.39e38),
    "float16": lambda v: nearest_even(v, 10, 65504.0),
    "float8_e5m2": lambda v: nearest_even(v, 2, 57344.0),
    "int8": lambda v: saturated(v, -128, 127),
    "uint16": lambda v: saturated(v, 0, 65535),
}


@pytest.mark.parametrize("dtype", RULES)
@pytest.mark.parametrize("case", CALLS)
def test_a_narrow_result_is_the_float32_result_rounded_once(case: str, dtype: str) -> None:
    call, shape = CALLS[case]
    names = call.__code__.co_varnames[1 : call.__code__.co_argcount]
    inputs = {name: INPUTS[name] for name in names}
    found = {}
    for kind in ("float32", dtype):
        tiles = {"d": Tile(shape=shape, dtype=kind), **inputs}
        found[kind] = execute(call, options=SimOptions(target="trn3"), **tiles)["d"]
    wide = found["float32"].astype(np.float64)
    expected = RULES[dtype](wide)
    narrow = found[dtype].astype(np.float64)
    # Subnormals have fewer bits.
    normal = (np.abs(wide) >= 2.0**-14) | (dtype not in ("float16", "float8_e5m2"))
    np.testing.assert_array_equal(narrow[normal], expected[normal])
