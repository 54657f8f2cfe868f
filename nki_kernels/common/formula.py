"""What is computed, apart from how: the formulas of routers and of experts.

One frozen record each. Kernel configurations, NumPy references and the torch modules hold the very
same object, so a field that is added here reaches all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from nki_kernels.objects import NKIObject

ROUTER_ACTIVATIONS = ("softmax", "sigmoid", "sqrtsoftplus")
EXPERT_ACTIVATIONS = (
    *("silu", "gelu", "gelu_tanh", "relu", "relu2", "leaky_relu", "sigmoid", "tanh"),
)
LEAKY_SLOPE = 0.01  # of leaky_relu below zero


@dataclass(frozen=True)
class Limits(NKIObject):
    """Clamps of a projection; a missing one is switched off."""

    has_upper: bool = False
    upper: float = 0.0
    has_lower: bool = False
    lower: float = 0.0


def limits(lower: float | None, upper: float | None) -> Limits:
    """Return clamps, None meaning none."""
    return Limits(upper is not None, upper or 0.0, lower is not None, lower or 0.0)


def bounds_of(clamps: Limits) -> tuple[float | None, float | None]:
    """Return (lower, upper), None meaning none; the inverse of `limits`."""
    lower = clamps.lower if clamps.has_lower else None
    return lower, clamps.upper if clamps.has_upper else None


@dataclass(frozen=True)
class ExpertFormula(NKIObject):
    """What an expert makes of a row, apart from its weights.

    Gate and up projections are clamped first. With a gate the down projection's input is

        act(scale * gate) * (up + up_offset), or, gated by itself,
        cap(gate) * act(scale * gate) * (cap(up) + up_offset)

    and act(scale * up) without one, where cap(x) = softcap * tanh(x / softcap).

    Attributes:
        activation: act, one of EXPERT_ACTIVATIONS; gelu_tanh is the tanh approximation, relu2 the
            square of relu.
        scale: of the argument of act (1.702 for SwiGLU-OAI).
        has_gate: gate and up projections; else the only projection is up.
        gates_itself: SwiGLU, written with a sigmoid: act's result is multiplied with the gate.
        gate_limits: clamps of the gate.
        up_limits: clamps of the up projection.
        up_offset: added to up after its clamp (1 for SwiGLU-OAI).
        gate_softcap: of a gate that is gated by itself, but not of act's argument; 0 for none
            (SiTU has 4, and a sigmoid).
        up_softcap: of the up projection beside a gate; 0 for none (SiTU has 25).
        has_gate_up_bias: the first projections have biases.
        has_down_bias: the down projection has biases.
    """

    activation: str = "silu"
    scale: float = 1.0
    has_gate: bool = True
    gates_itself: bool = False
    gate_limits: Limits = Limits()
    up_limits: Limits = Limits()
    up_offset: float = 0.0
    gate_softcap: float = 0.0
    up_softcap: float = 0.0
    has_gate_up_bias: bool = False
    has_down_bias: bool = False


def num_projections(formula: ExpertFormula) -> int:
    """Return how many halves the first weights have: gate and up, or the only one."""
    return 2 if formula.has_gate else 1


def early_offset(formula: ExpertFormula) -> float:
    """Return the part of up_offset that may be added before the clamps, limits moved with it."""
    return 0.0 if formula.up_softcap else formula.up_offset


def why_no_expert(formula: ExpertFormula) -> str:
    """Say why a formula contradicts itself; '' if it does not."""
    if formula.gate_softcap < 0 or formula.up_softcap < 0:
        return (
            f"gate_softcap={formula.gate_softcap:g}, up_softcap={formula.up_softcap:g}: must not be"
            " negative. Use 0 for no cap."
        )
    if formula.gate_softcap and not (formula.has_gate and formula.gates_itself):
        return (
            f"gate_softcap={formula.gate_softcap:g}: caps a gate that is multiplied with its own"
            " activation. Set has_gate and gates_itself, or leave the cap 0."
        )
    if formula.up_softcap and not formula.has_gate:
        return (
            f"up_softcap={formula.up_softcap:g}, has_gate=False: caps the factor beside a gate."
            " Leave it 0."
        )
    return ""


@dataclass(frozen=True)
class RouterFormula(NKIObject):
    """How K experts are chosen and weighed, apart from the router's weights.

    Attributes:
        top_k: K.
        act_fn: one of ROUTER_ACTIVATIONS; sqrtsoftplus is sqrt(log(1 + exp(x))).
        act_over_topk: apply act_fn to the K chosen logits only (GPT-OSS).
        has_bias: the linear layer has a bias.
        has_selection_bias: a float32 bias is added to the scores for the choice, not for the
            affinities.
        n_group: number of equal expert groups (1: none).
        topk_group: groups a token may choose from, by the sum of their two best scores.
        out_of_group_fill: score of experts outside these groups: -inf (as transformers 5 fills) or
            0.0 (as NxD fills).
        renormalize: divide the K affinities by their sum + renormalize_eps.
        renormalize_eps: guards against a zero sum.
        routed_scaling_factor: multiplies the affinities, last.
    """

    top_k: int
    act_fn: str = "softmax"
    act_over_topk: bool = False
    has_bias: bool = False
    has_selection_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    out_of_group_fill: float = float("-inf")
    renormalize: bool = False
    renormalize_eps: float = 1e-20
    routed_scaling_factor: float = 1.0
