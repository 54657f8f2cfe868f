"""What `blockwise_moe` computes, as a formula over slots; NumPy, in the precision of its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0))))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: np.asarray(x * _sigmoid(x)),
    "swiglu_oai": lambda x: np.asarray(x * _sigmoid(1.702 * x)),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
}


def _activate(x: Array, activation: str, scale: float) -> Array:
    if activation == "swish":
        return np.asarray(x * _sigmoid(scale * x))
    return ACTIVATIONS[activation](scale * x)


def blockwise_moe_ref(
    hidden_SH: Array,
    expert_S: Array,
    gate_up_EH2I: Array,
    down_EIH: Array,
    *,
    activation: str = "silu",
    activation_scale: float = 1.0,
    has_gate: bool = True,
    gate_limits: tuple[float | None, float | None] = (None, None),
    up_limits: tuple[float | None, float | None] = (None, None),
    up_offset: float = 0.0,
    gate_up_bias_E2I: Array | None = None,
    down_bias_EH: Array | None = None,
) -> Array:
    """Return [S, H], row s of `hidden_SH` through expert `expert_S[s]`.

    Args:
        hidden_SH: [S, H] input of every slot.
        expert_S: [S] expert of every slot.
        gate_up_EH2I: [E, H, 2I] weights, gate columns first, scales applied; [E, H, I] without it.
        down_EIH: [E, I, H] weights, scales applied.
        activation: see `ACTIVATIONS`; or swish, x * sigmoid(scale x).
        activation_scale: the scale of swish; the others are act(scale x).
        has_gate: without it, the activation is that of the up projection.
        gate_limits, up_limits: (lower, upper) clamps, None meaning none.
        up_offset: added to the clamped up projection.
        gate_up_bias_E2I, down_bias_EH: biases, or None.
    """
    output_SH = np.zeros((len(hidden_SH), down_EIH.shape[2]), hidden_SH.dtype)
    for expert in np.unique(expert_S):
        rows = expert_S == expert
        projected = hidden_SH[rows] @ gate_up_EH2I[expert]
        if gate_up_bias_E2I is not None:
            projected = projected + gate_up_bias_E2I[expert]
        if has_gate:
            gate, up = np.split(projected, 2, axis=1)
            inner = _activate(np.clip(gate, *gate_limits), activation, activation_scale)
            inner = inner * (np.clip(up, *up_limits) + up_offset)
        else:
            inner = _activate(np.clip(projected, *up_limits), activation, activation_scale)
        output = inner @ down_EIH[expert]
        if down_bias_EH is not None:
            output = output + down_bias_EH[expert]
        output_SH[rows] = output
    return output_SH
