"""The operators and activation functions of the engines as functions of float32 arrays.

Sources: aws-neuron-sdk, nki/api/nki.api.shared.rst (operator and activation tables). The guide
names the activation functions without formulas; the usual definitions are used, with
``gelu_apprx_sigmoid(x) = x * sigmoid(1.702 x)`` assumed. The engines evaluate piecewise
polynomials, whose error is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_Floats = NDArray[Any]  # float32
Kind = Literal["arithmetic", "comparison", "logical", "bitvec", "bypass"]


@dataclass(frozen=True, slots=True)
class AluOp:
    """One operator of the Vector, Scalar and GpSimd engines.

    `apply` takes float32 arrays (unsigned integer arrays for bit-vector operators), two of them or
    one. `reduce_identity` is None where the operator cannot reduce.
    """

    name: str
    kind: Kind
    arity: int
    apply: Callable[..., Array]
    reduce_identity: float | None = None
    gpsimd_only: bool = False
    minimum_generation: int = 2

    @property
    def is_bitvec(self) -> bool:
        """Whether operands are taken as bit patterns."""
        return self.kind == "bitvec"

    def into(self, out: Array | None, *operands: Array) -> Array:
        """Apply to float32 operands; in `out`, if that is given and the operator can."""
        if out is None or not isinstance(self.apply, np.ufunc):
            return self.apply(*operands)
        return np.asarray(self.apply(*operands, out=out))


def _abs_max(x: Array, y: Array) -> Array:
    return np.where(np.abs(x) > np.abs(y), x, y)


def _abs_min(x: Array, y: Array) -> Array:
    return np.where(np.abs(x) < np.abs(y), x, y)


def _flag(compare: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def flags(x: Array, y: Array) -> Array:
        return compare(x, y).astype(np.float32)

    return flags


def _shift(by: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def shifted(x: Array, y: Array) -> Array:
        bits = x.dtype.itemsize * 8
        return np.asarray(np.where(y < bits, by(x, np.minimum(y, bits - 1)), 0), x.dtype)

    return shifted


def _rsqrt(x: Array) -> Array:
    return np.asarray(np.float32(1) / np.sqrt(x))


def _reciprocal(x: Array) -> Array:
    return np.asarray(np.float32(1) / x)


def _relu(x: Array) -> Array:
    return np.maximum(x, np.float32(0))


def _identity(x: Array) -> Array:
    return x


_INFINITY: Final = float("inf")
_ALL_ONES: Final = -1.0  # the identity of bitwise_and, as a bit pattern
_ALU_LIST = (
    AluOp("add", "arithmetic", 2, np.add, 0.0),
    AluOp("subtract", "arithmetic", 2, np.subtract, 0.0),
    AluOp("multiply", "arithmetic", 2, np.multiply, 1.0),
    AluOp("maximum", "arithmetic", 2, np.maximum, -_INFINITY),
    AluOp("minimum", "arithmetic", 2, np.minimum, _INFINITY),
    AluOp("abs_max", "arithmetic", 2, _abs_max, 0.0),
    AluOp("abs_min", "arithmetic", 2, _abs_min, _INFINITY, minimum_generation=4),
    AluOp("power", "arithmetic", 2, np.power, gpsimd_only=True),
    AluOp("equal", "comparison", 2, _flag(np.equal)),
    AluOp("not_equal", "comparison", 2, _flag(np.not_equal)),
    AluOp("greater_equal", "comparison", 2, _flag(np.greater_equal)),
    AluOp("greater", "comparison", 2, _flag(np.greater)),
    AluOp("less_equal", "comparison", 2, _flag(np.less_equal)),
    AluOp("less", "comparison", 2, _flag(np.less)),
    AluOp("logical_and", "logical", 2, _flag(np.logical_and), 1.0),
    AluOp("logical_or", "logical", 2, _flag(np.logical_or), 0.0),
    AluOp("logical_xor", "logical", 2, _flag(np.logical_xor), 0.0),
    AluOp("abs", "arithmetic", 1, np.abs),
    AluOp("square", "arithmetic", 1, np.square),
    AluOp("relu", "arithmetic", 1, _relu),
    AluOp("rsqrt", "arithmetic", 1, _rsqrt, gpsimd_only=True),
    AluOp("reciprocal", "arithmetic", 1, _reciprocal),
    AluOp("bypass", "bypass", 1, _identity),
    AluOp("invert", "bitvec", 1, np.invert),
    AluOp("bitwise_and", "bitvec", 2, np.bitwise_and, _ALL_ONES),
    AluOp("bitwise_or", "bitvec", 2, np.bitwise_or, 0.0),
    AluOp("bitwise_xor", "bitvec", 2, np.bitwise_xor, 0.0),
    AluOp("left_shift", "bitvec", 2, _shift(np.left_shift)),
    AluOp("right_shift", "bitvec", 2, _shift(np.right_shift)),
)
# The reduction texts of the guide say nl.max and nl.min where others say nl.maximum and nl.minimum.
ALU_OPS: Final[dict[str, AluOp]] = {op.name: op for op in _ALU_LIST}
REDUCE_ALIASES: Final = {"max": "maximum", "min": "minimum", "sum": "add", "mult": "multiply"}


def reduce_last(op: AluOp, values: Array) -> Array:
    """Reduce the last axis of an array; the order of the additions is NumPy's (pairwise).

    NumPy keeps to it along the axis that is densest in memory only.
    """
    if isinstance(op.apply, np.ufunc):
        return np.asarray(op.apply.reduce(np.ascontiguousarray(values), axis=-1))
    if op.kind == "logical":
        nonzero = np.count_nonzero(values, axis=-1)
        flags = {"logical_and": nonzero == values.shape[-1], "logical_or": nonzero > 0}
        return np.asarray(flags.get(op.name, nonzero % 2), np.float32)
    result = values[..., 0]
    for column in range(1, values.shape[-1]):
        result = op.apply(result, values[..., column])
    return result


# Activation functions


_ERF_STEPS_PER_UNIT: Final = 64
_ERF_LIMIT: Final = 6  # erf(6) rounds to 1 in float64
_ERF_GRID: Final = np.arange(
    -_ERF_LIMIT, _ERF_LIMIT + 2 / _ERF_STEPS_PER_UNIT, 1 / _ERF_STEPS_PER_UNIT
)
_ERF_VALUES: Final = np.array([math.erf(x) for x in _ERF_GRID])
_ERF_SLOPES: Final = 2 / math.sqrt(math.pi) * np.exp(-(_ERF_GRID**2)) / _ERF_STEPS_PER_UNIT


def erf(x: _Floats) -> _Floats:
    """The error function, by cubic Hermite interpolation of a table (absolute error below 1e-9)."""
    position = (
        np.clip(x, -_ERF_LIMIT, _ERF_LIMIT).astype(np.float64) + _ERF_LIMIT
    ) * _ERF_STEPS_PER_UNIT
    cell = np.nan_to_num(position).astype(np.int64)
    t = position - cell
    left, right = _ERF_VALUES[cell], _ERF_VALUES[cell + 1]
    slope_left, slope_right = _ERF_SLOPES[cell], _ERF_SLOPES[cell + 1]
    rise = right - left
    cubic = t * (
        slope_left
        + t * (3 * rise - 2 * slope_left - slope_right + t * (slope_left + slope_right - 2 * rise))
    )
    return np.asarray(left + cubic, np.float32)


def sigmoid(x: _Floats) -> _Floats:
    """1 / (1 + exp(-x)); exp may overflow to infinity, which gives the right limit 0."""
    return np.asarray(np.float32(1) / (np.float32(1) + np.exp(-x)))


def _normal_cdf(x: _Floats) -> _Floats:
    return np.float32(0.5) * (np.float32(1) + erf(x * np.float32(math.sqrt(0.5))))


def _gelu(x: _Floats) -> _Floats:
    return x * _normal_cdf(x)


def _gelu_dx(x: _Floats) -> _Floats:
    density = np.exp(np.float32(-0.5) * x * x) * np.float32(1 / math.sqrt(2 * math.pi))
    return np.asarray(_normal_cdf(x) + x * density)


def _gelu_apprx_tanh(x: _Floats) -> _Floats:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.asarray(np.float32(0.5) * x * (np.float32(1) + np.tanh(inner)))


def _gelu_apprx_sigmoid(x: _Floats) -> _Floats:
    return x * sigmoid(np.float32(1.702) * x)


def _gelu_apprx_sigmoid_dx(x: _Floats) -> _Floats:
    s = sigmoid(np.float32(1.702) * x)
    return s + np.float32(1.702) * x * s * (np.float32(1) - s)


def _silu(x: _Floats) -> _Floats:
    return x * sigmoid(x)


def _silu_dx(x: _Floats) -> _Floats:
    s = sigmoid(x)
    return np.asarray(s * (np.float32(1) + x * (np.float32(1) - s)))


def _softplus(x: _Floats) -> _Floats:
    result: _Floats = np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x)))
    return result


def _mish(x: _Floats) -> _Floats:
    return x * np.tanh(_softplus(x))


def _erf_dx(x: _Floats) -> _Floats:
    return np.asarray(np.float32(2 / math.sqrt(math.pi)) * np.exp(-x * x))


@dataclass(frozen=True, slots=True)
class Activation:
    """One function of the Scalar engine; outside `low`..`high` the hardware result is not defined.

    `on_magnitude` applies the range to the absolute value. Zero and infinities pass: they have
    exact limits.
    """

    name: str
    apply: Callable[[_Floats], _Floats]
    low: float = -_INFINITY
    high: float = _INFINITY
    on_magnitude: bool = False

    @property
    def is_bounded(self) -> bool:
        """Whether some inputs are outside."""
        return self.low > -_INFINITY or self.high < _INFINITY

    def into(self, out: Array | None, values: _Floats) -> _Floats:
        """Apply to float32 values; in `out`, if that is given and the function can."""
        if out is None or not isinstance(self.apply, np.ufunc):
            return self.apply(values)
        return np.asarray(self.apply(values, out=out))


_ACTIVATION_LIST = (
    Activation("copy", _identity),
    Activation("square", np.square),
    Activation("sigmoid", sigmoid),
    Activation("relu", _relu),
    Activation("gelu", _gelu),
    Activation("gelu_dx", _gelu_dx),
    Activation("gelu_apprx_tanh", _gelu_apprx_tanh),
    Activation("gelu_apprx_sigmoid", _gelu_apprx_sigmoid),
    Activation("gelu_apprx_sigmoid_dx", _gelu_apprx_sigmoid_dx),
    Activation("silu", _silu),
    Activation("silu_dx", _silu_dx),
    Activation("tanh", np.tanh),
    Activation("softplus", _softplus),
    Activation("mish", _mish),
    Activation("erf", erf),
    Activation("erf_dx", _erf_dx),
    Activation("exp", np.exp),
    Activation("log", np.log, 2.0**-64, 2.0**64),
    Activation("sin", np.sin, -math.pi, math.pi),
    Activation("arctan", np.arctan, -math.pi / 2, math.pi / 2),
    Activation("sqrt", np.sqrt, 2.0**-116, 2.0**118),
    Activation("rsqrt", _rsqrt, 2.0**-87, 2.0**97),
    Activation("reciprocal", _reciprocal, 2.0**-42, 2.0**42, on_magnitude=True),
    Activation("sign", np.sign),
    Activation("abs", np.abs),
)
ACTIVATIONS: Final[dict[str, Activation]] = {
    function.name: function for function in _ACTIVATION_LIST
}
PARAMETRIC_ACTIVATION: Final = "prelu"


def prelu(x: _Floats, slope: float | _Floats) -> _Floats:
    """The parametric rectifier: x where positive, slope * x elsewhere."""
    return np.where(x > 0, x, x * np.asarray(slope, np.float32))
