"""Our side of a prefill: the launches of the product's plan, and those with the lists given.

The plan is the layer's, from the sizes and the number of tokens alone: the same for every routing.
A few tokens go through the decode kernel, which needs no lists. More go through one launch, which
makes the lists of its blocks itself; with lists given counts what the launches of the same experts
take that come behind `index_blocks` where each stage is a launch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neuron_moe.plan import Plan, Step
from neuron_moe.tools.timing.layers import Model
from neuron_moe.tools.timing.plans import experts_parts, in_stages, launches_of, plan_of
from neuron_moe.tools.timing.timelines import bottleneck, program, time_of
from nki_sim.time.estimate import Estimate

LISTS = "index_blocks"  # the launch that makes them


@dataclass(frozen=True, slots=True, kw_only=True)
class OurTime:
    """Our side of a row; the fields are the row's."""

    ours: Estimate
    ours_given: Estimate
    ours_plan: str
    bottleneck: str


def prefill_plan(model: Model, num_tokens: int, layout: str) -> Plan:
    """Return the plan of the experts of a layer.

    Args:
        model: the layer.
        num_tokens: T.
        layout: of the weights, plain or packed.
    """
    step = Step("prefill", num_tokens)
    return plan_of(experts_parts(model, step, layout=layout), step)


def words_of(plan: Plan) -> str:
    """Return what runs, in words."""
    note = plan.notes()[0].removeprefix("plan: ").split(";")[0]
    blocks = plan.chosen().get("block_size")
    return f"{plan.decision.kernel}, {note}" + (f", blocks of {blocks}" if blocks else "")


def time_ours(plan: Plan, index_TK: Any) -> OurTime:
    """Simulate the launches of a plan; return their time.

    Args:
        plan: of `prefill_plan`.
        index_TK: [T, K] choices.
    """
    whole, held_up = _times(plan, index_TK)
    apart = whole if plan.chosen().get("mode") else _times(in_stages(plan), index_TK)[0]
    return OurTime(
        ours=program(whole.values()),
        ours_given=program(time for name, time in apart.items() if name != LISTS),
        ours_plan=words_of(plan),
        bottleneck=held_up,
    )


def _times(plan: Plan, index_TK: Any) -> tuple[dict[str, Estimate], str]:
    """Return the time of each launch of a plan by name, and what holds up the longest."""
    times, held_up = dict[str, Estimate](), ""
    for name, run in launches_of(plan, index_TK):
        found = time_of(run.timeline)
        if found.us > max((time.us for time in times.values()), default=0.0):
            held_up = bottleneck(run.timeline)
        times[name] = found
    return times, held_up
