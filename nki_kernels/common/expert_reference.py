"""What an expert makes of its projections, as a formula; NumPy, in the precision of its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_kernels.common.formula import LEAKY_SLOPE, ExpertFormula, bounds_of

Array = NDArray[Any]


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0))))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: np.asarray(x * _sigmoid(x)),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.square(np.maximum(x, 0)),
    "leaky_relu": lambda x: np.where(x < 0, LEAKY_SLOPE * x, x),
}


def _softcap(x: Array, cap: float) -> Array:
    return np.asarray(cap * np.tanh(x / cap)) if cap else x


def inner(formula: ExpertFormula, projected: Array) -> Array:
    """Return what the down projection multiplies with, [.., I].

    Args:
        formula: of the expert.
        projected: biased projections, [.., 2I] gate first, or [.., I] without a gate.
    """
    act = ACTIVATIONS[formula.activation]
    if not formula.has_gate:
        return act(formula.scale * np.clip(projected, *bounds_of(formula.up_limits)))
    gate, up = np.split(projected, 2, axis=-1)
    gate = np.clip(gate, *bounds_of(formula.gate_limits))
    activated = act(formula.scale * gate)
    if formula.gates_itself:
        activated = _softcap(gate, formula.gate_softcap) * activated
    up = _softcap(np.clip(up, *bounds_of(formula.up_limits)), formula.up_softcap)
    return np.asarray(activated * (up + formula.up_offset))
