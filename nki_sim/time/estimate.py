"""The time of a run as one number and a range.

The number is the time in the order of the source: the vendor measures its library with the
compiler's scheduling off, and published times of whole models are nearer to it than to a list
schedule. What is not known makes the range: coefficients (`Provenance.quick` and `slow`); whether
the back edge of a dynamic loop lets queues pass, stops the engines, or drains all transfers; and,
below, a compiler that reorders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from nki_sim.hardware import TRN2, Hardware
from nki_sim.time.prepare import TimelineOptions
from nki_sim.time.schedule_model import ScheduleModel
from nki_sim.time.timeline import schedule
from nki_sim.trace import Trace

Order = Literal["source", "compiler"]
_LIKELY: Final = ScheduleModel(loop_edge="engines")
_QUICK: Final = ScheduleModel(sendrecv="pipelined")
_REORDERED: Final = replace(_QUICK, order="list")
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
        order: "source" where the compiler's scheduling is off, else "compiler": the low end is then
            that of a list schedule.
        is_alone: whether the kernel is a program of its own, whose start and end count, too; a
            kernel in a graph adds neither.
    """
    options = options or TimelineOptions()

    def time_us(model: ScheduleModel, on: Hardware) -> float:
        timeline = schedule(trace, on, replace(options, model=model))
        launch_ns = on.launch_cost_ns(timeline.num_cores) if is_alone else 0.0
        return (timeline.total_ns + launch_ns) / 1e3

    us, slow_us = time_us(_LIKELY, chip), time_us(_SLOW, chip.at("slow"))
    quick_us = time_us(_QUICK if order == "source" else _REORDERED, chip.at("quick"))
    return Estimate(low_us=min(quick_us, us), us=us, high_us=max(slow_us, us))
