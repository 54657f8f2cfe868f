"""The time of a run as one number and a range.

The number is the time in the order of the source: the vendor measures its library with the
compiler's scheduling off, and published times of whole models are nearer to it than to a list
schedule. What is not known makes the range: coefficients (`Provenance.quick` and `slow`); whether
the back edge of a dynamic loop lets queues pass, stops the engines, or drains all transfers; and,
below, a compiler that reorders.

None of this depends on who wrote a kernel, so two times are compared under one assumption after the
other: low with low, likely with likely, high with high (`Estimate.over`).

Launches of a compiled graph follow one another without a start of their own. A kernel that is
called on its own, or a whole graph, is a program: what comes before and after it counts once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from nki_sim.hardware import TRN2, Hardware
from nki_sim.time.prepare import TimelineOptions
from nki_sim.time.reorder import play
from nki_sim.time.schedule_model import LIKELY, ScheduleModel
from nki_sim.time.timeline import Timeline, schedule
from nki_sim.trace import Trace

Order = Literal["source", "compiler"]
_QUICK: Final = ScheduleModel(loop_edge="free", sendrecv="pipelined")
_REORDERED: Final = replace(_QUICK, order="list")
_SLOW: Final = ScheduleModel(loop_edge="drain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as long something takes: likely, and the least and the largest it may be."""

    low: float
    likely: float
    high: float

    def __str__(self) -> str:
        return f"{self.likely:.2f}x ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Microseconds: the likely time, and the ends of what it may be."""

    low_us: float
    us: float
    high_us: float

    def __str__(self) -> str:
        return f"{self.us:,.1f} us ({self.low_us:,.1f} to {self.high_us:,.1f})"

    def __add__(self, other: Estimate) -> Estimate:
        """Return the time of one after the other, each end under one assumption."""
        return Estimate(
            low_us=self.low_us + other.low_us,
            us=self.us + other.us,
            high_us=self.high_us + other.high_us,
        )

    def over(self, other: Estimate) -> Ratio:
        """Return this time in units of another, each end under one assumption."""
        likely = self.us / other.us
        ends = (self.low_us / other.low_us, likely, self.high_us / other.high_us)
        return Ratio(low=min(ends), likely=likely, high=max(ends))


NOTHING: Final = Estimate(low_us=0.0, us=0.0, high_us=0.0)


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
    likely = replace(options or TimelineOptions(), model=LIKELY)
    timeline = schedule(trace, chip, likely)
    found = with_range(timeline, order=order)
    return found + launch_cost(chip, timeline.num_cores) if is_alone else found


def with_range(timeline: Timeline, *, order: Order = "compiler") -> Estimate:
    """Return the time of a kernel in a graph whose likely timeline is known.

    Args:
        timeline: of `schedule` with the model `LIKELY`.
        order: as of `estimate`.
    """
    chip, prepared, us = timeline.chip, timeline.prepared, timeline.total_us

    def replayed_us(model: ScheduleModel, on: Hardware) -> float:
        options = replace(timeline.options, model=model)
        if model.order == "list":  # another graph: instructions may change places
            return schedule(timeline.trace, on, options).total_us
        return play(prepared, on, options).total_ns / 1e3

    quick_us = replayed_us(_QUICK if order == "source" else _REORDERED, chip.at("quick"))
    slow_us = replayed_us(_SLOW, chip.at("slow"))
    return Estimate(low_us=min(quick_us, us), us=us, high_us=max(slow_us, us))


def launch_cost(chip: Hardware = TRN2, cores: int = 2) -> Estimate:
    """Return what a program takes before and after its kernels."""
    low, likely, high = (
        on.launch_cost_ns(cores) / 1e3 for on in (chip.at("quick"), chip, chip.at("slow"))
    )
    return Estimate(low_us=low, us=likely, high_us=high)
