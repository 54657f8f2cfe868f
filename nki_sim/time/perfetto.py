"""A timeline in the Chrome trace format, which ui.perfetto.dev and chrome://tracing open.

The format: a JSON object with a list `traceEvents`; an event of phase "X" has a start `ts` and a
duration `dur` in microseconds, a process `pid` (here a core) and a thread `tid` (here an engine, or
a DMA lane); events of phase "M" name them. Transfers overlap, so they spread over as many lanes as
run at once.
"""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any, Final

from nki_sim.time.intervals import Drawable

_THREADS: Final = ("tensor", "vector", "scalar", "gpsimd", "sync", "exchange")
_FIRST_DMA_THREAD: Final = 100


def chrome_events(timeline: Drawable) -> list[dict[str, Any]]:
    """Return the events of a timeline as plain dictionaries."""
    events: list[dict[str, Any]] = []
    boxes = sorted(timeline.intervals(), key=lambda box: box.start_ns)
    process = {core: number for number, core in enumerate(timeline.result.graph.cores)}
    threads: dict[tuple[int, int], str] = {}
    lanes: dict[int, _Lanes] = {}
    for box in boxes:
        pid = process[box.rank, box.core]
        if box.lane == "dma":
            number = lanes.setdefault(pid, _Lanes()).take(box.start_ns, box.end_ns)
            tid, name = _FIRST_DMA_THREAD + number, f"dma {number}"
        else:
            tid, name = _THREADS.index(box.lane), box.lane
        threads[pid, tid] = name
        events.append(
            {
                "name": box.op,
                "cat": box.lane,
                "ph": "X",
                "ts": box.start_ns / 1e3,
                "dur": max(0.0, box.end_ns - box.start_ns) / 1e3,
                "pid": pid,
                "tid": tid,
                "args": {"source": f"{box.file}:{box.line}", "instruction": box.instruction},
            }
        )
    named: list[dict[str, Any]] = []
    for (rank, core), pid in process.items():
        label = {"name": f"rank {rank} core {core} ({timeline.chip.name}, simulated)"}
        named.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": label})
    for (pid, tid), name in sorted(threads.items()):
        label = {"name": name}
        named.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": label})
    return named + events


def save_perfetto(timeline: Drawable, path: str | Path) -> Path:
    """Write the trace file."""
    target = Path(path)
    document = {"traceEvents": chrome_events(timeline), "displayTimeUnit": "ns"}
    target.write_text(json.dumps(document), encoding="utf-8")
    return target


class _Lanes:
    """Hands out the lowest lane that is free; starts must not go back."""

    __slots__ = ("_busy", "_count", "_free")

    def __init__(self) -> None:
        self._busy: list[tuple[float, int]] = []
        self._free: list[int] = []
        self._count = 0

    def take(self, start: float, end: float) -> int:
        """Return a lane for an interval."""
        while self._busy and self._busy[0][0] <= start:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if self._free:
            lane = heapq.heappop(self._free)
        else:
            lane, self._count = self._count, self._count + 1
        heapq.heappush(self._busy, (end, lane))
        return lane
