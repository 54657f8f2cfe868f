"""The time of a run as one number and a range.

What is not known of a chip has three parts. Coefficients have ranges (`Provenance.quick` and
`slow`). The back edge of a dynamic loop lets queues pass, stops the engines, or drains all
transfers. And a compiler that may reorder is somewhere between the order of the source and a list
schedule; where its scheduling is off, as in the vendor's own measurements of its library, the order
of the source is the order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from nki_sim.hardware import TRN2, Hardware
from nki_sim.time.prepare import TimelineOptions
from nki_sim.time.schedule_model import VENDOR, ScheduleModel
from nki_sim.time.timeline import schedule
from nki_sim.trace import Trace

Order = Literal["source", "compiler"]
_LIKELY: Final = ScheduleModel(loop_edge="engines")
_QUICK: Final = ScheduleModel(sendrecv="pipelined")
_SLOW: Final = ScheduleModel(loop_edge="drain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Microseconds: the likely time, and the ends of what it may be."""

    low_us: float
    us: float
    high_us: float

    def __str__(self) -> str:
        return f"{self.us:,.1f} us ({self.low_us:,.1f} to {self.high_us:,.1f})"


def estimate(
    trace: Trace,
    chip: Hardware = TRN2,
    options: TimelineOptions | None = None,
    *,
    order: Order = "compiler",
    is_alone: bool = True,
) -> Estimate:
    """Return how long a run takes on a chip.

    Args:
        trace: the record of the run.
        chip: the chip it is to run on.
        options: how to price transfers and place tensors; the model in it is replaced.
        order: "source" where the compiler's scheduling is off, else "compiler": then the likely
            time is the geometric mean of the order of the source and a list schedule.
        is_alone: whether the kernel is a program of its own, whose start and end count, too; a
            kernel in a graph adds neither.
    """
    options = options or TimelineOptions()

    def time_us(model: ScheduleModel, on: Hardware) -> float:
        timeline = schedule(trace, on, replace(options, model=model))
        launch_ns = on.launch_cost_ns(timeline.num_cores) if is_alone else 0.0
        return (timeline.total_ns + launch_ns) / 1e3

    us, slow_us = time_us(_LIKELY, chip), time_us(_SLOW, chip.at("slow"))
    if order == "source":
        quick_us = time_us(_QUICK, chip.at("quick"))
    else:
        us = math.sqrt(us * time_us(replace(VENDOR, vector_overlaps=None), chip))
        quick_us = time_us(replace(VENDOR, loop_edge="free"), chip.at("quick"))
    return Estimate(low_us=min(quick_us, us), us=us, high_us=max(slow_us, us))
