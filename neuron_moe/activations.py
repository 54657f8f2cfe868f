"""Activations of expert MLPs: gate and up projections in, the input of the down projection out."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from neuron_moe.config import GLUType, RoutedExpertsMLPOpsConfig

ACT2FN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class ActivationSpec:
    """The non-linear part of an expert, computed in float32.

    Clamp first, then:  GLU  act(scale * gate) * (up + bias);  SWIGLU  gate * act(scale * gate) *
        (up + bias);
    without GLU  act(scale * up).
    """

    hidden_act: str
    is_glu: bool = True
    glu_type: GLUType = GLUType.GLU
    scale: float = 1.0
    bias: float = 0.0
    gate_lower: float | None = None
    gate_upper: float | None = None
    up_lower: float | None = None
    up_upper: float | None = None

    @classmethod
    def from_config(cls, config: RoutedExpertsMLPOpsConfig) -> "ActivationSpec":
        """Read the activation out of an expert configuration."""
        return cls(
            hidden_act=config.hidden_act,
            is_glu=config.glu_mlp,
            glu_type=GLUType.validate(config.glu_type),
            scale=config.hidden_act_scaling_factor,
            bias=config.hidden_act_bias,
            gate_lower=config.gate_clamp_lower_limit,
            gate_upper=config.gate_clamp_upper_limit,
            up_lower=config.up_clamp_lower_limit,
            up_upper=config.up_clamp_upper_limit,
        )

    @property
    def num_projections(self) -> int:
        """2 with a gate, else 1: the first expert matrix is H x (num_projections * I)."""
        return 2 if self.is_glu else 1

    def __call__(self, projected: Tensor) -> Tensor:
        """Apply to [.., 2I] (gate first) or [.., I]; return [.., I] in the same dtype."""
        dtype = projected.dtype
        projected = projected.float()
        act = ACT2FN[self.hidden_act]
        if not self.is_glu:
            up = _clamp(projected, self.up_lower, self.up_upper)
            return act(_scale(up, self.scale)).to(dtype)
        gate, up = projected.chunk(2, dim=-1)
        gate = _clamp(gate, self.gate_lower, self.gate_upper)
        up = _clamp(up, self.up_lower, self.up_upper)
        activated = act(_scale(gate, self.scale))
        if self.glu_type is GLUType.SWIGLU:
            activated = gate * activated
        if self.bias:
            up = up + self.bias
        return (activated * up).to(dtype)


def _scale(value: Tensor, factor: float) -> Tensor:
    return value if factor == 1.0 else value * factor


def _clamp(value: Tensor, lower: float | None, upper: float | None) -> Tensor:
    return value if lower is None and upper is None else value.clamp(lower, upper)
