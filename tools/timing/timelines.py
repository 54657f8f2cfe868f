"""What a benchmark shows of a run: its time with a range, and its bottleneck."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from neuron_moe.tools.timing import runs
from neuron_moe.tools.timing.runs import MeasuredRun
from nki_sim.hardware import TRN2, Hardware
from nki_sim.time.estimate import NOTHING, Estimate, launch_cost, with_range
from nki_sim.time.timeline import Timeline


def time_of(timeline: Timeline | MeasuredRun) -> Estimate:
    """Return the time of a launch in a graph; a measured one has no range."""
    if isinstance(timeline, MeasuredRun):
        return exactly(timeline.total_us)
    return with_range(timeline)


def exactly(us: float) -> Estimate:
    """Return a time without a range."""
    return Estimate(low_us=us, us=us, high_us=us)


def program(launches: Iterable[Estimate], chip: Hardware = TRN2) -> Estimate:
    """Return the time of launches as one program: its start and end count once.

    That is how both sides of every comparison are counted, however many launches they take. In a
    compiled graph launches follow one another without a start from the host, so that to count one
    for each would favour whoever has fewer; to count none would favour whoever is faster.
    """
    return sum(launches, overhead(chip))


def overhead(chip: Hardware = TRN2) -> Estimate:
    """Return what a program on two cores takes beside its launches; a device's times lack it."""
    return NOTHING if runs.is_device() else launch_cost(chip)


def bottleneck(run: Timeline | MeasuredRun) -> str:
    """Return the busiest engine of a core, and the source line with most of the critical path."""
    if isinstance(run, MeasuredRun):
        return ""
    busy = [
        (ns, lane) for core in range(run.num_cores) for lane, ns in run.engine_busy_ns(core).items()
    ]
    longest_ns, lane = max(busy)
    worst = run.critical_path()[0]
    return (
        f"{lane} busy {longest_ns / run.total_ns:.0%}; on the critical path {worst.op} "
        f"{Path(worst.file).name}:{worst.line} {worst.share:.0%}"
    )
