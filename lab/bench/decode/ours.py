"""Our side of a decode step: the launch of the product's plan, floating point without values."""

from __future__ import annotations

from typing import Any

import torch

import nki_sim
from lab.bench.decode.cases import ROUTERS, DecodeCase
from lab.bench.decode.router_inputs import RouterInputs
from neuron_moe.backends.nki.decode import MODES as KERNEL_MODES
from neuron_moe.plan import Plan, Step
from neuron_moe.tools.timing.plans import experts_parts, launches_of, plan_of
from neuron_moe.weights.laid_out import from_numpy
from nki_sim import SimOptions

PATHS = {mode: path for path, mode in KERNEL_MODES.items()}  # of the product, by kernel's mode


def decode_plan(case: DecodeCase, mode: str = "auto", layout: str = "packed") -> Plan:
    """Return the plan of a case: of its experts alone, or of norm, router and experts.

    Args:
        case: what to compute.
        mode: selective, all, or auto for what the cost model takes.
        layout: of the weights, packed or plain.
    """
    step = Step("decode", case.B)
    parts = experts_parts(
        case.model,
        step,
        layout=layout,
        mode=PATHS.get(mode, mode),
        weight_format=case.weight_format.removeprefix("float8_").replace("bfloat16", "bf16"),
        router=ROUTERS[case.model.name] if case.kernel == "decode_block" else None,
    )
    return plan_of(parts, step)


def config_of(plan: Plan) -> Any:
    """Return what the experts of a plan are compiled for."""
    config = getattr(plan, "config")  # noqa: B009  of either plan of a decode step
    return getattr(config, "moe", config)


def launch_ours(case: DecodeCase, plan: Plan, options: SimOptions) -> nki_sim.Run:
    """Run the launch of a plan.

    Args:
        case: what to compute.
        plan: of `decode_plan`.
        options: of the simulator.
    """
    routed = None
    if plan.is_fused:
        front = RouterInputs.of(case, case.model.H)
        weight_EH, hidden_TH = (
            from_numpy(each, torch.bfloat16) for each in (front.weight_EH, front.hidden_TH)
        )
        routed = weight_EH, hidden_TH
    ((_, run),) = launches_of(plan, case.expert_index(), options, routed)
    return run
