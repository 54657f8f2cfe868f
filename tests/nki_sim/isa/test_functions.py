"""The engines' operators and functions agree with formulas written one element at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from nki_sim.isa import functions, mx_formats
from tests.nki_sim.language.test_math import BINARY as NUMPY_NAMES


def normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def normal_density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


ACTIVATION_FORMULAS: dict[str, Callable[[float], float]] = {
    "copy": lambda x: x,
    "square": lambda x: x**2,
    "sigmoid": logistic,
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * normal_cdf(x),
    "gelu_dx": lambda x: normal_cdf(x) + x * normal_density(x),
    "gelu_apprx_tanh": lambda x: x * logistic(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "gelu_apprx_sigmoid": lambda x: x * logistic(1.702 * x),
    "gelu_apprx_sigmoid_dx": lambda x: logistic(1.702 * x) * (1 + 1.702 * x * logistic(-1.702 * x)),
    "silu": lambda x: x * logistic(x),
    "silu_dx": lambda x: logistic(x) * (1 + x * logistic(-x)),
    "tanh": math.tanh,
    "softplus": lambda x: math.log(1 + math.exp(x)),
    "mish": lambda x: x * math.tanh(math.log(1 + math.exp(x))),
    "erf": math.erf,
    "erf_dx": lambda x: 2 / math.sqrt(math.pi) * math.exp(-x * x),
    "exp": math.exp,
    "log": math.log,
    "sin": math.sin,
    "arctan": math.atan,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: x**-0.5,
    "reciprocal": lambda x: 1 / x,
    "sign": lambda x: float((x > 0) - (x < 0)),
    "abs": abs,
}


def test_every_activation_function_has_a_formula() -> None:
    assert set(ACTIVATION_FORMULAS) == set(functions.ACTIVATIONS)


@pytest.mark.parametrize("name", ACTIVATION_FORMULAS)
def test_an_activation_agrees_with_its_formula(name: str) -> None:
    function = functions.ACTIVATIONS[name]
    low, high = max(function.low, -4.0), min(function.high, 4.0)
    x = np.random.default_rng(1).uniform(low, high, 400).astype(np.float32)
    if function.on_magnitude:
        x = np.sign(x) * np.maximum(np.abs(x), np.float32(1e-3))
    expected = np.array([ACTIVATION_FORMULAS[name](float(v)) for v in x])
    found = function.apply(x)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=5e-7)


def test_valid_ranges_are_those_of_the_guide() -> None:
    ranges = {
        name: (function.low, function.high)
        for name, function in functions.ACTIVATIONS.items()
        if function.high < math.inf
    }
    assert ranges == {
        "log": (2.0**-64, 2.0**64),
        "sqrt": (2.0**-116, 2.0**118),
        "rsqrt": (2.0**-87, 2.0**97),
        "reciprocal": (2.0**-42, 2.0**42),
        "sin": (-math.pi, math.pi),
        "arctan": (-math.pi / 2, math.pi / 2),
    }
    assert [n for n, f in functions.ACTIVATIONS.items() if f.on_magnitude] == ["reciprocal"]


def test_saturating_functions_reach_their_limits_without_nan() -> None:
    x = np.array([-200.0, 200.0], np.float32)
    with np.errstate(over="ignore"):
        assert functions.sigmoid(x).tolist() == [0.0, 1.0]
        assert functions.ACTIVATIONS["softplus"].apply(x).tolist() == [0.0, 200.0]
        assert functions.ACTIVATIONS["gelu"].apply(x).tolist() == [0.0, 200.0]


BINARY_FORMULAS: dict[str, Callable[[float, float], float]] = {
    **{name: getattr(np, name) for name in NUMPY_NAMES if name != "power"},
    "abs_max": lambda x, y: x if abs(x) > abs(y) else y,
    "abs_min": lambda x, y: x if abs(x) < abs(y) else y,
}


@pytest.mark.parametrize("name", BINARY_FORMULAS)
def test_an_operator_agrees_with_its_formula(name: str) -> None:
    values = np.random.default_rng(2).integers(-3, 4, (2, 200)).astype(np.float32) / 2
    expected = [BINARY_FORMULAS[name](float(x), float(y)) for x, y in values.T]
    assert functions.ALU_OPS[name].arity == 2
    found = functions.ALU_OPS[name].apply(*values)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


@pytest.mark.parametrize(
    "name", [n for n, op in functions.ALU_OPS.items() if op.reduce_identity is not None]
)
def test_a_reduction_is_the_operator_applied_along_the_row(name: str) -> None:
    op = functions.ALU_OPS[name]
    values = np.random.default_rng(3).integers(-3, 4, (7, 7))
    values[0], values[1] = 0, 1  # rows of zeros and of ones
    values[2], values[3] = np.eye(7)[4], 1 - np.eye(7)[4]  # of one 1, and of one 0
    values[4], values[5] = np.arange(7) < 2, np.arange(7) < 3
    rows = values.astype(np.uint8) if op.is_bitvec else values.astype(np.float32)
    expected = rows[:, 0] if op.kind != "logical" else (rows[:, 0] != 0).astype(np.float32)
    for column in range(1, 7):
        expected = op.apply(expected, rows[:, column])
    np.testing.assert_array_equal(functions.reduce_last(op, rows), expected)


UNARY_FORMULAS: dict[str, Callable[[float], float]] = {
    "abs": abs,
    "square": lambda x: x * x,
    "relu": lambda x: max(x, 0.0),
    "rsqrt": lambda x: x**-0.5,
    "reciprocal": lambda x: 1 / x,
    "bypass": lambda x: x,
}


@pytest.mark.parametrize("name", UNARY_FORMULAS)
def test_an_operator_of_one_operand_agrees_with_its_formula(name: str) -> None:
    low = 0.1 if name == "rsqrt" else -4.0
    values = np.random.default_rng(4).uniform(low, 4.0, 100).astype(np.float32)
    expected = [UNARY_FORMULAS[name](float(x)) for x in values]
    assert functions.ALU_OPS[name].arity == 1
    np.testing.assert_allclose(functions.ALU_OPS[name].apply(values), expected, rtol=1e-6)


def test_every_operator_has_a_formula() -> None:
    bits = {name: op.arity for name, op in functions.ALU_OPS.items() if op.is_bitvec}
    assert [name for name, arity in bits.items() if arity == 1] == ["invert"]
    assert set(functions.ALU_OPS) - set(bits) == {*BINARY_FORMULAS, *UNARY_FORMULAS, "power"}


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_shifts_are_logical_and_lose_bits_beyond_the_width(dtype: type) -> None:
    bits = np.dtype(dtype).itemsize * 8
    x = np.array([1, (1 << bits) - 1, 1 << (bits - 1)], dtype)
    for shift in (0, 1, bits - 1, bits, bits + 3):
        y = np.full(3, shift, dtype)
        left = [(int(v) << shift) % (1 << bits) for v in x]
        right = [int(v) >> shift for v in x]
        assert functions.ALU_OPS["left_shift"].apply(x, y).tolist() == left
        assert functions.ALU_OPS["right_shift"].apply(x, y).tolist() == right


@pytest.mark.parametrize(
    ("name", "dtype", "largest"),
    [
        ("float8_e4m3fn_x4", ml_dtypes.float8_e4m3fn, 448.0),
        ("float8_e5m2_x4", ml_dtypes.float8_e5m2, 57344.0),
    ],
)
def test_fp8_slots_are_bytes_little_endian_and_saturate(
    name: str, dtype: type, largest: float
) -> None:
    values = np.array([[1.0, -0.3, 1e9, -1e9]], np.float32)
    packed = mx_formats.pack_fp8(values, name)
    codes = np.array([1.0, -0.3, largest, -largest], np.float32).astype(dtype).view(np.uint8)
    assert packed.tolist() == [sum(int(code) << (8 * slot) for slot, code in enumerate(codes))]
    rounded = codes.view(dtype).astype(np.float32)
    assert mx_formats.unpack(packed[None], name)[0, :, 0].tolist() == rounded.tolist()


@pytest.mark.parametrize("name", ["float8_e4m3fn_x4", "float8_e5m2_x4", "float4_e2m1fn_x4"])
def test_dequantizing_puts_slots_inside_partitions(name: str) -> None:
    random = np.random.default_rng(9)
    kind = np.uint16 if name.startswith("float4") else np.uint32
    packed = random.integers(0, np.iinfo(kind).max, (16, 5)).astype(kind)
    scale_bytes = random.integers(100, 150, (2, 5)).astype(np.uint8)
    values = mx_formats.unpack(packed, name)
    found = mx_formats.dequantize(packed, scale_bytes, name).reshape(16, 4, 5)
    for partition in range(16):
        for column in range(5):
            factor = np.float32(2.0 ** (int(scale_bytes[partition // 8, column]) - 127))
            expected = values[partition, :, column] * factor
            np.testing.assert_array_equal(found[partition, :, column], expected)


@pytest.mark.parametrize("name", ["float8_e4m3fn_x4", "float8_e5m2_x4"])
def test_the_table_for_bfloat16_encodes_like_the_general_rule(name: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    every = bits.view(np.float32).reshape(-1, 4)
    with np.errstate(invalid="ignore"):
        largest = {"float8_e4m3fn_x4": 448.0, "float8_e5m2_x4": 57344.0}[name]
        clipped = np.clip(every, -largest, largest)
        codes = clipped.astype(mx_formats.FP8_OF_PACKED[name]).view(np.uint8)
    expected = np.ascontiguousarray(codes).view(np.uint32)[:, 0]
    np.testing.assert_array_equal(mx_formats.pack_fp8(every, name), expected)
