"""Layers that decoder models share.

Letters: H hidden, I intermediate.
"""

import torch
from torch import Tensor, nn

from neuron_moe.activations import ACTIVATIONS, activation_of
from neuron_moe.experts import RoutedExperts
from neuron_moe.moe import MoE
from neuron_moe.router import Router
from neuron_moe.shared_experts import SharedExperts
from neuron_moe.spec import ExpertFormula, ExpertSpec, RouterFormula, RouterSpec, SharedSpec


def unit_rms(hidden: Tensor, eps: float) -> Tensor:
    """Return `[..., H]` divided by the root mean square of each row, in float32."""
    wide = hidden.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """Divide by the root mean square and scale; float32 inside, output in the input's dtype."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.eps = eps

    def forward(self, hidden_USH: Tensor) -> Tensor:
        """Return the normalised hidden states `[..., H]`."""
        return (self.weight.float() * unit_rms(hidden_USH, self.eps)).to(hidden_USH.dtype)


class OffsetRMSNorm(RMSNorm):
    """The same with a scale of one plus the weight, as Qwen3.5 stores it."""

    def forward(self, hidden_USH: Tensor) -> Tensor:
        """Return the normalised hidden states `[..., H]`."""
        scale = 1.0 + self.weight.float()
        return (scale * unit_rms(hidden_USH, self.eps)).to(hidden_USH.dtype)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) without biases, of a dense layer; whole on every rank."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, hidden_act: str = "silu"
    ) -> None:
        super().__init__()
        self.activation = activation_of(hidden_act)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [..., H]; the product is computed in float32."""
        product = (
            ACTIVATIONS[self.activation](self.gate_proj(hidden).float())
            * self.up_proj(hidden).float()
        )
        out: Tensor = self.down_proj(product.to(hidden.dtype))
        return out


def build_router(num_experts: int, hidden_size: int, formula: RouterFormula) -> Router:
    """Return a router in float32."""
    return Router(RouterSpec(num_experts=num_experts, hidden_size=hidden_size, formula=formula))


def build_shared(
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    hidden_act: str = "silu",
    *,
    is_gated: bool = False,
) -> SharedExperts:
    """Return shared experts of `intermediate_size` columns in all; hidden_act as in config.json."""
    spec = SharedSpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        activation=activation_of(hidden_act),
        is_gated=is_gated,
    )
    return SharedExperts(spec, dtype=dtype)


def expert_spec(
    router: Router, intermediate_size: int, formula: ExpertFormula, *, scales_input: bool = False
) -> ExpertSpec:
    """Return what the experts behind a router are."""
    return ExpertSpec(
        num_experts=router.num_experts,
        top_k=router.top_k,
        hidden_size=router.hidden_size,
        intermediate_size=intermediate_size,
        formula=formula,
        scales_input=scales_input,
    )


def gated_moe(
    router: Router,
    intermediate_size: int,
    dtype: torch.dtype,
    backend: str,
    shared: SharedExperts | None = None,
    *,
    hidden_act: str = "silu",
    scales_input: bool = False,
) -> MoE:
    """Return a MoE whose experts are down(act(gate(x)) * up(x)) without biases.

    Args:
        router: says how many experts there are, how many a token gets, and H.
        intermediate_size: I of a routed expert.
        dtype: of the experts' weights.
        backend: that computes the routed experts.
        shared: experts beside the routed ones.
        hidden_act: act, as in config.json.
        scales_input: affinities scale an expert's input, not its output.
    """
    formula = ExpertFormula(activation_of(hidden_act))
    spec = expert_spec(router, intermediate_size, formula, scales_input=scales_input)
    return MoE(router, RoutedExperts(spec, dtype=dtype, backend=backend), shared)
