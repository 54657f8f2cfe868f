"""The plans that a layer of a benchmark has in the product, whose launches alone are timed.

Nothing of a launch is decided here: a layer is built on the meta device, its weights are as in the
checkpoint or as `pack_weights(for_decode=True, for_prefill=True)` leaves them, and the backend
plans it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import nki_sim
from neuron_moe.backends.nki.backend import NkiBackend
from neuron_moe.backends.nki.times import TIMES_ONLY, Routed, as_served, plan_runs
from neuron_moe.experts import RoutedExperts
from neuron_moe.models.layers import RMSNorm
from neuron_moe.moe import MoE
from neuron_moe.plan import LayerParts, Plan, Step
from neuron_moe.router import Router
from neuron_moe.spec import ExpertFormula, ExpertSpec, RouterFormula, RouterSpec, Tuning
from neuron_moe.tools.timing import runs
from neuron_moe.tools.timing.layers import Model
from nki_kernels.common.formula import limits
from nki_sim import SimOptions

NORM_EPS = 1e-6


def formula_of(model: Model) -> ExpertFormula:
    """Return the formula of a layer's experts."""
    options = {name: value for name, value in model.options.items() if name != "scaling"}
    if options.get("activation") == "swiglu_oai":
        options |= {"activation": "sigmoid", "gates_itself": True, "scale": 1.702}
    for name in ("gate_limits", "up_limits"):
        if name in options:
            options[name] = limits(*options[name])
    return ExpertFormula(**options)


def experts_parts(
    model: Model,
    step: Step,
    *,
    layout: str = "plain",
    weight_format: str = "bf16",
    mode: str = "auto",
    router: Mapping[str, Any] | None = None,
) -> LayerParts:
    """Return what the backend plans a step with.

    Args:
        model: the experts of a rank.
        step: phase and tokens.
        layout: of the weights: plain, or packed.
        weight_format: 'bf16', or 'e4m3' or 'e5m2' as they are served.
        mode: of decode: 'selective', 'all_experts', or 'auto' for what the backend takes.
        router: its formula, for a layer with norm and router; None for experts alone.
    """
    spec = ExpertSpec(
        num_experts=model.E,
        top_k=model.K,
        hidden_size=model.H,
        intermediate_size=model.I,
        formula=formula_of(model),
        scales_input=model.options.get("scaling") == "pre",
    )
    formula = RouterFormula(top_k=model.K, **(router or {}))
    router_spec = RouterSpec(num_experts=model.E, hidden_size=model.H, formula=formula)
    with torch.device("meta"):
        experts = RoutedExperts(spec, Tuning(decode_mode=mode), backend="nki", dtype=torch.bfloat16)
        norm = RMSNorm(model.H, NORM_EPS, dtype=torch.bfloat16)
        layer = MoE(Router(router_spec, dtype=torch.bfloat16), experts, rmsnorm=norm)
    as_served(layer.router, experts.mlp_op, weight_format)
    parts = experts.parts(step.phase) if router is None else layer.parts(step)
    return packed(parts) if layout == "packed" else parts


def packed(parts: LayerParts) -> LayerParts:
    """Return a layer with its weights laid out for both phases as well."""
    decode, prefill = (NkiBackend().lay_out(parts, phase) for phase in ("decode", "prefill"))
    weights = replace(parts.weights, decode_copy=decode, prefill_copy=prefill)
    return replace(parts, weights=weights)


def experts_alone(parts: LayerParts) -> LayerParts:
    """Return a layer without what is around its routed experts."""
    return replace(parts, router=None, norm=None, shared=None, why_apart="experts on their own")


def plan_of(parts: LayerParts, step: Step) -> Plan:
    """Return the plan of the product."""
    return NkiBackend().plan(parts, step)


def in_stages(plan: Plan) -> Plan:
    """Return the plan of the same step with a launch for each stage of the experts."""
    return NkiBackend().plan(replace(plan.parts, fuses_decode=False), plan.step)


def launches_of(
    plan: Plan,
    index_TK: NDArray[np.int32],
    options: SimOptions = TIMES_ONLY,
    routed: Routed | None = None,
) -> Iterator[tuple[str, nki_sim.Run]]:
    """Run the launches of a plan where this benchmark runs its kernels; see `plan_runs`.

    Args:
        plan: of the product.
        index_TK: [T, K] experts; an expert of -1 is another rank's.
        options: of the simulator.
        routed: what a launch that routes itself is given.
    """
    yield from plan_runs(plan, index_TK, options=options, routed=routed, run=runs.run)
