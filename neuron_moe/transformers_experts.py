"""Experts of Hugging Face models, computed and trained by a backend of ours.

    from neuron_moe.transformers_experts import register_experts
    model.set_experts_implementation(register_experts(backend="cuda", save_percent=0))

Weights stay the model's own, in its layout; router, state dict and trainer see no difference.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from neuron_moe.activations import activate
from neuron_moe.backends import get_backend
from neuron_moe.blocks import NO_EXPERT
from neuron_moe.plan import LayerParts, Step
from neuron_moe.spec import ExpertSpec, Tuning
from neuron_moe.weights.expert_weights import ExpertWeights, LocalRouting
from nki_kernels.common.formula import EXPERT_ACTIVATIONS, ExpertFormula, limits

NAME = "neuron_moe"
_TOLERANCE = 1e-5  # of activations in float32, written in another order


class _Weights(NamedTuple):
    """Experts of a transformers module in our layout."""

    first_EHI: Tensor
    first_bias_EI: Tensor | None
    down_EIH: Tensor
    down_bias_EH: Tensor | None


def register_experts(
    backend: str = "torch", *, save_percent: int | None = None, name: str = NAME
) -> str:
    """Make a backend known to transformers 5 as an implementation of experts; return its name.

    Args:
        backend: name of the backend, with gradients.
        save_percent: what training keeps from forward to backward, see `neuron_moe.spec.Tuning`.
        name: what to call it; an implementation of that name is replaced.

    Raises:
        ValueError: a backend without gradients, or an unknown one.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    chosen, tuning = get_backend(backend), Tuning(save_percent=save_percent)
    if not chosen.has_gradient:
        raise ValueError(
            f"backend={backend!r}: has no gradient, and takes weights in its own layout. Load the"
            " model with neuron_moe.models.loader to run it there."
        )

    def forward(
        module: nn.Module, hidden_TH: Tensor, index_TK: Tensor, affinities_TK: Tensor
    ) -> Tensor:
        weights, formula = _weights_of(module), _formula_of(module)
        num_experts, H, _ = weights.first_EHI.shape
        spec = ExpertSpec(
            num_experts=num_experts,
            top_k=index_TK.shape[1],
            hidden_size=H,
            intermediate_size=weights.down_EIH.shape[1],
            formula=formula,
        )
        parts = LayerParts(
            spec=spec,
            weights=ExpertWeights(
                weights.first_EHI,
                weights.down_EIH,
                weights.first_bias_EI,
                weights.down_bias_EH,
                formula,
            ),
            tuning=tuning,
            num_experts=num_experts,
        )
        if not hidden_TH.shape[0]:
            return hidden_TH * affinities_TK.sum()
        plan = chosen.plan(parts, Step("prefill", hidden_TH.shape[0]))
        is_here = index_TK < num_experts  # transformers' mark of another rank's expert is beyond
        routing = LocalRouting(
            torch.where(is_here, index_TK, NO_EXPERT).to(torch.int32),
            torch.where(is_here, affinities_TK.float(), 0.0),
        )
        return plan.experts(hidden_TH, routing).to(hidden_TH.dtype)

    ALL_EXPERTS_FUNCTIONS.register(name, forward)
    return name


def _weights_of(module: Any) -> _Weights:
    """Return the weights as [E, in, out], gates before ups; views where the layout allows it."""
    if getattr(module, "has_post_expert_norm", False):  # transformers 5.17 does not know it
        raise ValueError(
            f"{type(module).__name__}: normalises each expert's output, which no backend here"
            " does. Use another experts_implementation for this model."
        )
    first_name = "gate_up_proj" if module.has_gate else "up_proj"
    first, down = getattr(module, first_name), module.down_proj
    if not module.is_transposed:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    bias = getattr(module, f"{first_name}_bias") if module.has_bias else None
    if module.has_gate and not module.is_concatenated:
        first = _gates_first(first)
        bias = None if bias is None else _gates_first(bias)
    return _Weights(first, bias, down, module.down_proj_bias if module.has_bias else None)


def _gates_first(interleaved: Tensor) -> Tensor:
    return torch.cat([interleaved[..., ::2], interleaved[..., 1::2]], dim=-1)


def _formula_of(module: Any) -> ExpertFormula:
    """Return the formula that computes what the module's own activation does, found by trying."""
    settings = (
        getattr(module, "alpha", None),
        getattr(module, "act_fn", None),
        *sorted(_bounds(module)),
    )
    before, found = module.__dict__.get("_neuron_moe_formula", ((), None))
    if before == settings and isinstance(found, ExpertFormula):
        return found
    # Near zero, and far beyond any clamp that models have; gates meet ups of all sizes and signs.
    far = torch.logspace(1.0, 4.0, 64)
    values = torch.cat([torch.linspace(-9.0, 9.0, 128), far, -far])
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    sample = values[order].view(1, -1)
    with torch.no_grad():
        expected = module._apply_gate(sample) if module.has_gate else module.act_fn(sample)
        is_mixed = module.has_gate and not module.is_concatenated
        ours = _gates_first(sample) if is_mixed else sample
        for formula in _candidates(module):
            if torch.allclose(activate(ours, formula), expected, _TOLERANCE, _TOLERANCE):
                module._neuron_moe_formula = settings, formula
                return formula
    raise ValueError(
        f"{type(module).__name__}: its activation is none of {', '.join(EXPERT_ACTIVATIONS)}, nor"
        " that of GPT-OSS. Use another experts_implementation for this model."
    )


def _candidates(module: Any) -> Iterator[ExpertFormula]:
    biases = {"has_gate_up_bias": module.has_bias, "has_down_bias": module.has_bias}
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if module.has_gate and alpha is not None and limit is not None:
        yield ExpertFormula(
            activation="sigmoid",
            scale=float(alpha),
            gates_itself=True,
            gate_limits=limits(None, float(limit)),
            up_limits=limits(-float(limit), float(limit)),
            up_offset=1.0,
            **biases,
        )
    for activation in EXPERT_ACTIVATIONS:
        yield ExpertFormula(activation=activation, has_gate=module.has_gate, **biases)
        for bound in _bounds(module) if module.has_gate else ():
            yield ExpertFormula(
                activation=activation,
                gate_limits=limits(None, bound),
                up_limits=limits(-bound, bound),
                **biases,
            )


def _bounds(module: Any) -> set[float]:
    """Return the numbers that a module or its configuration calls a limit."""
    owners = (module, getattr(module, "config", None))
    found = (getattr(owner, name, None) for owner in owners for name in ("limit", "swiglu_limit"))
    return {float(each) for each in found if isinstance(each, int | float) and each > 0}
