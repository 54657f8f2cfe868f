"""What a benchmark tells of a simulated run: its times in the corners, and its bottleneck."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import nki_sim
from neuron_moe.tools.timing.runs import MeasuredRun
from nki_sim.time.prepare import TimelineOptions
from nki_sim.time.schedule_model import find_corner
from nki_sim.time.timeline import Timeline, schedule


def corner_timelines(run: Any, corners: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Time a simulated run in each of some corners, one after the other: a timeline is large.

    A measured run has its time, whatever the corner.
    """
    if isinstance(run, MeasuredRun):
        yield from ((corner, run) for corner in corners)
        return
    chip = nki_sim.hardware.find(run.machine.target.name)
    for corner in corners:
        yield corner, schedule(run.trace, chip, TimelineOptions(model=find_corner(corner)))


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
