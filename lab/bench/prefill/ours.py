"""Our side of a prefill: the launches of the product's plan, and those with the lists given.

The plan is the layer's, from the sizes and the number of tokens alone: the same for every routing.
A few tokens go through the decode kernel, which needs no lists. More go through one launch, which
makes the lists of its blocks itself; with lists given counts what the launches of the same experts
take that come behind `index_blocks` where each stage is a launch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neuron_moe.plan import Plan, Step
from neuron_moe.tools.timing.layers import Model
from neuron_moe.tools.timing.plans import experts_parts, in_stages, launches_of, plan_of
from neuron_moe.tools.timing.timelines import bottleneck, corner_timelines

LISTS = "index_blocks"  # the launch that makes them


@dataclass(frozen=True, slots=True, kw_only=True)
class OurTime:
    """Our side of a row; the fields are the row's."""

    ours_us: float
    ours_given_us: float
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


def time_ours(plan: Plan, index_TK: Any, corners: Sequence[str]) -> dict[str, OurTime]:
    """Simulate the launches of a plan; return their time by corner of the clock.

    Args:
        plan: of `prefill_plan`.
        index_TK: [T, K] choices.
        corners: of the clock.
    """
    whole = _times(plan, index_TK, corners)
    apart = whole if plan.chosen().get("mode") else _times(in_stages(plan), index_TK, corners)
    return {
        corner: OurTime(
            ours_us=sum(whole[corner].us.values()),
            ours_given_us=sum(us for name, us in apart[corner].us.items() if name != LISTS),
            ours_plan=words_of(plan),
            bottleneck=whole[corner].bottleneck,
        )
        for corner in corners
    }


@dataclass(slots=True)
class _Launches:
    """Microseconds of the launches of a plan by name, and what holds up the longest."""

    us: dict[str, float]
    bottleneck: str = ""


def _times(plan: Plan, index_TK: Any, corners: Sequence[str]) -> dict[str, _Launches]:
    found = {corner: _Launches({}) for corner in corners}
    for name, run in launches_of(plan, index_TK):
        for corner, timeline in corner_timelines(run, corners):
            launches = found[corner]
            if timeline.total_us > max(launches.us.values(), default=0.0):
                launches.bottleneck = bottleneck(timeline)
            launches.us[name] = timeline.total_us
    return found
