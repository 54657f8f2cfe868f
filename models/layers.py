"""Layers that decoder models share.

Letters: H hidden, I intermediate.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.activations import activate_parts, activation_of
from neuron_moe.experts import RoutedExperts
from neuron_moe.latent import Latent
from neuron_moe.moe import MoE
from neuron_moe.router import Router
from neuron_moe.shared_experts import SharedExperts
from neuron_moe.spec import ExpertFormula, ExpertSpec, RouterFormula, RouterSpec, SharedSpec, limits


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
    """down(inner(gate(x), up(x))) without biases, of a dense layer; whole on every rank.

    Args:
        hidden_size: H.
        intermediate_size: I.
        dtype: of the weights.
        hidden_act: as in config.json, if the formula is act(gate) * up.
        formula: any other, with a gate or without one.
        is_fused: gate and up are one matrix.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        hidden_act: str = "silu",
        formula: ExpertFormula | None = None,
        *,
        is_fused: bool = False,
    ) -> None:
        super().__init__()
        self.formula = formula or gated(hidden_act)
        names = ("gate_proj", "up_proj") if self.formula.has_gate else ("up_proj",)
        self.first_names = ("gate_up_proj",) if is_fused else names
        for name in self.first_names:
            width = intermediate_size * (2 if is_fused else 1)
            self.add_module(name, nn.Linear(hidden_size, width, bias=False, dtype=dtype))
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [..., H]; the activation is computed in float32."""
        parts = [getattr(self, name)(hidden).float() for name in self.first_names]
        parts = [*parts[0].chunk(2, -1)] if self.first_names == ("gate_up_proj",) else parts
        out: Tensor = self.down_proj(activate_parts(parts, self.formula).to(hidden.dtype))
        return out


def gated(hidden_act: str) -> ExpertFormula:
    """Return the formula act(gate) * up of an activation as config.json names it."""
    return ExpertFormula(activation_of(hidden_act))


def clamped_silu(limit: float, *, is_before: bool = False) -> ExpertFormula:
    """Return min(silu(gate), limit) * up, up within `limit` of 0; a limit of 0 clamps nothing.

    Args:
        limit: not below 0.
        is_before: silu(min(gate, limit)) stands in place of min(silu(gate), limit).
    """
    if not limit:
        return gated("silu")
    highest = limit if is_before else limit_before_silu(limit)
    return ExpertFormula(gate_limits=limits(None, highest), up_limits=limits(-limit, limit))


def router_spec(
    num_experts: int, hidden_size: int, *, num_identity: int = 0, **fields: Any
) -> RouterSpec:
    """Return a router of so many experts; `fields` are of `RouterFormula`, `top_k` among them.

    Raises:
        ValueError: no such choice is possible.
    """
    return RouterSpec(
        num_experts=num_experts,
        hidden_size=hidden_size,
        formula=RouterFormula(**fields),
        num_identity=num_identity,
    )


def build_router(num_experts: int, hidden_size: int, formula: RouterFormula) -> Router:
    """Return a router in float32."""
    return Router(RouterSpec(num_experts=num_experts, hidden_size=hidden_size, formula=formula))


def biased_spec(num_experts: int, hidden_size: int, **fields: Any) -> RouterSpec:
    """Return a router as DeepSeek-V3 introduced it, for the families that took it over.

    Scores are sigmoids, a bias helps to choose K, and weights of these are divided by their sum.

    Args:
        num_experts: to choose among.
        hidden_size: H.
        fields: of `RouterFormula`, `top_k` among them, in place of these; and `num_identity`.

    Raises:
        ValueError: no such choice is possible.
    """
    usual: dict[str, Any] = {"act_fn": "sigmoid", "has_selection_bias": True, "renormalize": True}
    return router_spec(num_experts, hidden_size, **usual | fields)


def build_shared(
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    hidden_act: str = "silu",
    formula: ExpertFormula | None = None,
    *,
    is_gated: bool = False,
    is_fused: bool = False,
) -> SharedExperts:
    """Return shared experts of `intermediate_size` columns in all.

    Their formula is `formula`, else act(gate) * up with hidden_act as in config.json.
    """
    spec = SharedSpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        formula=formula or gated(hidden_act),
        is_gated=is_gated,
        is_fused=is_fused,
    )
    return SharedExperts(spec, dtype=dtype)


def expert_spec(
    router: Router,
    intermediate_size: int,
    formula: ExpertFormula,
    *,
    scales_input: bool = False,
    latent: Latent | None = None,
) -> ExpertSpec:
    """Return what the experts behind a router are, inside latents if there are any."""
    return ExpertSpec(
        num_experts=router.num_experts,
        top_k=router.top_k,
        hidden_size=router.hidden_size if latent is None else latent.spec.latent_size,
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
    formula: ExpertFormula | None = None,
    latent: Latent | None = None,
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
        formula: what an expert computes, if not this.
        latent: projections around the experts, or None.
    """
    formula = formula or gated(hidden_act)
    spec = expert_spec(router, intermediate_size, formula, scales_input=scales_input, latent=latent)
    experts = RoutedExperts(spec, dtype=dtype, backend=backend)
    return MoE(router, experts, shared, latent=latent)


def limit_before_silu(limit: float) -> float:
    """Return the clamp of a gate that clamps silu of it from above: silu of it is `limit` > 0."""
    gate = limit
    for _ in range(100):  # silu(x) = x / (1 + exp(-x)), so that x = limit (1 + exp(-x))
        share = 1 + math.exp(-gate)
        gate -= (gate / share - limit) / ((1 + gate * (1 - 1 / share)) / share)
    return gate
