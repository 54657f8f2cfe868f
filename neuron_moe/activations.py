"""Expert formulas in torch: gate and up projections in, the input of the down projection out."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from nki_kernels.common.formula import ExpertFormula, Limits, bounds_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}

_OTHER_NAMES = {"gelu_pytorch_tanh": "gelu_tanh"}  # in config.json: ours
HIDDEN_ACTIVATIONS = (
    *("gelu", "gelu_pytorch_tanh", "leaky_relu", "relu", "relu2", "sigmoid", "silu", "tanh"),
)


def activation_of(hidden_act: str) -> str:
    """Return our name of one of HIDDEN_ACTIVATIONS, which are named as in config.json."""
    return _OTHER_NAMES.get(hidden_act, hidden_act)


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or as it is in float64."""
    return x.to(sum_dtype(x))


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums over x are kept: float32, or float64."""
    return torch.promote_types(x.dtype, torch.float32)


def activate(projected: Tensor, formula: ExpertFormula, *, in_place: bool = False) -> Tensor:
    """Return what the down projection takes, computed in float32 or, of float64, in that.

    Args:
        projected: [.., 2I] (gate first), or [.., I] without a gate.
        formula: of the expert.
        in_place: may write over `projected`; needs no gradient. The same numbers in less memory.

    Returns:
        [.., I] in the same dtype.
    """
    wide = at_least_float32(projected)
    parts = wide.chunk(2, dim=-1) if formula.has_gate else (wide,)
    return activate_parts(parts, formula, in_place=in_place).to(projected.dtype)


def activate_parts(
    parts: Sequence[Tensor], formula: ExpertFormula, *, in_place: bool = False
) -> Tensor:
    """Return the same of gate and up, or of up alone without a gate, [.., I] each of float32 or
    float64, in their dtype.
    """
    act = ACTIVATIONS[formula.activation]
    if not formula.has_gate:
        return act(_scale(_clamp(parts[-1], formula.up_limits), formula.scale))
    gate, up = parts
    if in_place and not formula.gate_softcap and not formula.up_softcap:
        return _activate_in_place(gate, up, formula)
    gate = _clamp(gate, formula.gate_limits)
    up = _softcap(_clamp(up, formula.up_limits), formula.up_softcap)
    activated = act(_scale(gate, formula.scale))
    if formula.gates_itself:
        activated = _softcap(gate, formula.gate_softcap) * activated
    if formula.up_offset:
        up = up + formula.up_offset
    return activated * up


def _softcap(value: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(value / cap) if cap else value


def _activate_in_place(gate: Tensor, up: Tensor, formula: ExpertFormula) -> Tensor:
    """Return the same as above; one new tensor, of the size of the gate."""
    for value, limits in ((gate, formula.gate_limits), (up, formula.up_limits)):
        if limits.has_lower or limits.has_upper:
            value.clamp_(*bounds_of(limits))
    if formula.up_offset:
        up.add_(formula.up_offset)
    activated = ACTIVATIONS[formula.activation](_scale(gate, formula.scale))
    return activated.mul_(gate).mul_(up) if formula.gates_itself else activated.mul_(up)


def _scale(value: Tensor, factor: float) -> Tensor:
    return value if factor == 1.0 else value * factor


def _clamp(value: Tensor, clamps: Limits) -> Tensor:
    if not clamps.has_lower and not clamps.has_upper:
        return value
    return value.clamp(*bounds_of(clamps))
