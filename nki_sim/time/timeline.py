"""How long a traced kernel takes on a chip, and why.

`schedule(trace, chip)` plays the trace; the `Timeline` it returns answers the usual questions:
total time, how busy each engine was, how far from the roofline, which source lines the time hangs
on. All numbers are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nki_sim import trace as tr
from nki_sim.hardware import TRN2, Hardware
from nki_sim.time.costs import DmaPrice, MatmulPrice
from nki_sim.time.intervals import Interval, core_name
from nki_sim.time.lines import LineTable, LineTime
from nki_sim.time.perfetto import save_perfetto
from nki_sim.time.picture import save_picture
from nki_sim.time.playback import Schedule
from nki_sim.time.prepare import Prepared, Price, TimelineOptions, prepare
from nki_sim.time.reorder import play
from nki_sim.trace import Trace

LANES: Final = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma")
_MAX_PATH_LINES: Final = 8


class PathStep(NamedTuple):
    """One source line's part of the critical path."""

    file: str
    line: int
    op: str
    ns: float
    share: float
    instructions: int


def schedule(
    trace: Trace, chip: Hardware = TRN2, options: TimelineOptions | None = None
) -> Timeline:
    """Time every instruction of a trace.

    Args:
        trace: the record of a run.
        chip: the chip it is to run on.
        options: how to price transfers, warm up, place tensors, and what to assume of order.

    Raises:
        ValueError: the instructions wait for each other in a circle, or a partner of a barrier is
            missing.
    """
    options = options or TimelineOptions()
    prepared = prepare(trace, chip, options)
    return Timeline(trace, chip, options, prepared, play(prepared, chip, options))


@dataclass
class Timeline:
    """The times of one run on one chip."""

    trace: Trace
    chip: Hardware
    options: TimelineOptions
    prepared: Prepared = field(repr=False)
    result: Schedule = field(repr=False)

    @cached_property
    def total_ns(self) -> float:
        """From the first trigger to the last result."""
        return self.result.total_ns

    @property
    def total_us(self) -> float:
        """Total time in microseconds."""
        return self.total_ns / 1e3

    @property
    def num_cores(self) -> int:
        """Physical cores that ran anything, all ranks together."""
        return len(self.result.graph.cores)

    @cached_property
    def _node_queue(self) -> NDArray[np.int64]:
        return np.array(self.result.graph.queue, dtype=np.int64)

    def busy_ns(self, lane: str, core: int = 0) -> float:
        """Return how long a lane of a core was at work.

        The tensor engine counts until its last result has drained, as profilers do; `dma` counts
        the time in which any DMA engine moved bytes; `gpsimd` includes building descriptors.

        Args:
            lane: one of LANES.
            core: position in `result.graph.cores`.
        """
        starts, ends = self._lane_times(lane, core)
        return _covered(starts, ends)

    def engine_busy_ns(self, core: int = 0) -> dict[str, float]:
        """Return the busy time of every lane of a core that did anything."""
        busy = {lane: self.busy_ns(lane, core) for lane in LANES}
        return {lane: time for lane, time in busy.items() if time > 0.0}

    def _lane_times(self, lane: str, core: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return starts and ends of everything on a lane."""
        result = self.result
        names = [queue.name if queue.core == core else "" for queue in result.graph.queues]
        if lane == "dma":
            ends = np.array(result.data_end)
            here = np.array([bool(name) for name in names], dtype=bool)
            nodes = np.flatnonzero((ends > 0.0) & here[self._node_queue])
            return np.array(result.data_start)[nodes], ends[nodes]
        own = np.array([name == lane for name in names], dtype=bool)
        chosen = own[self._node_queue]
        if lane == "gpsimd":
            generated = np.array([name.startswith("swdge") for name in names], dtype=bool)
            chosen |= generated[self._node_queue]
        nodes = np.flatnonzero(chosen)
        ends = np.array(result.visible if lane == "tensor" else result.busy_end)
        return np.array(result.start)[nodes], ends[nodes]

    @cached_property
    def _priced(self) -> list[tuple[Price, int]]:
        """Price and number of instructions of every kind."""
        counts = np.bincount(self.result.pair, minlength=len(self.result.prices)).tolist()
        return list(zip(self.result.prices, counts, strict=True))

    @cached_property
    def _useful_ns(self) -> float:
        """Time of all matmuls on full arrays at full clock, one after the other."""
        return sum(p.useful_ns * count for p, count in self._priced if isinstance(p, MatmulPrice))

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of all matmuls, transposes left out."""
        return sum(p.flops * count for p, count in self._priced if isinstance(p, MatmulPrice))

    @cached_property
    def pe_utilisation(self) -> float:
        """Share of all array cells and cycles of the run that did work."""
        return self._useful_ns / (self.total_ns * self.num_cores) if self.total_ns else 0.0

    @cached_property
    def hbm_bytes(self) -> int:
        """Bytes read from and written to HBM by all cores."""
        return sum(p.hbm_bytes * count for p, count in self._priced if isinstance(p, DmaPrice))

    @property
    def hbm_bytes_per_s(self) -> float:
        """Average HBM traffic of all cores over the total time."""
        return self.hbm_bytes / self.total_ns * 1e9 if self.total_ns else 0.0

    @cached_property
    def compute_bound_ns(self) -> float:
        """Time of the matmuls alone, on full arrays at full clock, spread over the cores."""
        return self._useful_ns / max(1, self.num_cores)

    @cached_property
    def memory_bound_ns(self) -> float:
        """Time of the HBM traffic alone at the peak of DMA engines and stacks."""
        cores = self.result.graph.cores
        stacks = len({rank for rank, _ in cores})
        peak = min(len(cores) * self.chip.dma_bytes_per_ns, stacks * self.chip.hbm_bytes_per_ns)
        return self.hbm_bytes / peak if cores else 0.0

    @property
    def roofline_ns(self) -> float:
        """The larger of the two bounds: no schedule of this trace's work can be faster."""
        return max(self.compute_bound_ns, self.memory_bound_ns)

    @property
    def roofline_share(self) -> float:
        """How close the run comes to the roofline of what it issues, useful or not, 0 to 1."""
        return self.roofline_ns / self.total_ns if self.total_ns else 0.0

    @cached_property
    def path_ns(self) -> dict[int, float]:
        """Nanoseconds that each instruction holds the critical path; they sum to the total time."""
        result = self.result
        held: dict[int, float] = {}
        if not result.visible:
            return held
        node = int(np.argmax(np.array(result.visible)))
        until = result.visible[node]
        while node >= 0:
            since = min(until, result.path_start[node])
            cause = result.cause[node]
            if cause < 0:
                since = 0.0
            index = result.graph.instruction[node]
            held[index] = held.get(index, 0.0) + until - since
            node, until = cause, since
        return held

    def critical_path(self) -> list[PathStep]:
        """Return the source lines of the critical path, the largest part first."""
        return _by_line(self.trace, self.path_ns, self.total_ns)

    def line_times(self) -> LineTable:
        """Return what every source line costs: first those that hold up the whole, then the busy.

        Printed it is a table with the source of each line.
        """
        columns = self.trace.columns().astype(np.int64)
        callers = self.trace.callers_of()
        key = (columns[:, tr.LINE] * 8 + columns[:, tr.ENGINE]) * 4096 + columns[:, tr.OP]
        key = key * len(self.trace.callers) + callers
        keys, line_of = np.unique(key, return_inverse=True)
        counts = np.bincount(line_of, minlength=len(keys)).tolist()
        held = np.zeros(len(keys))
        np.add.at(held, line_of[list(self.path_ns)], list(self.path_ns.values()))
        busy = np.zeros(len(keys))
        data_end = np.array(self.result.data_end)
        ends = np.maximum(np.array(self.result.busy_end), data_end)
        starts = np.where(data_end > 0.0, self.result.data_start, self.result.start)
        np.add.at(busy, line_of[list(self.result.graph.instruction)], ends - starts)
        lines = []
        for number, both in enumerate(keys.tolist()):
            one, called = divmod(both, len(self.trace.callers))
            file, line = self.trace.lines[one // 4096 // 8]
            op, lane = self.trace.ops[one % 4096], tr.ENGINE_NAMES[one // 4096 % 8]
            times = counts[number], float(busy[number]), float(held[number])
            lines.append(LineTime(file, line, op, lane, *times, self.trace.callers[called], called))
        lines.sort(key=lambda one: (-one.path_ns, -one.busy_ns))
        return LineTable(tuple(lines), self.total_ns)

    def intervals(self) -> Iterator[Interval]:
        """Yield every instruction as a box on a lane, in order of the trace.

        A transfer yields the time of its bytes on lane `dma`; the step of a dynamic loop one box
        per engine.
        """
        result, trace = self.result, self.trace
        columns = trace.columns()
        op_of, line_of = columns[:, tr.OP].tolist(), columns[:, tr.LINE].tolist()
        callers = trace.callers_of().tolist()
        for node, index in enumerate(result.graph.instruction):
            queue = result.graph.queues[result.graph.queue[node]]
            rank, core = result.graph.cores[queue.core]
            lane, start, end = queue.name, result.start[node], result.busy_end[node]
            if result.data_end[node] > 0.0:
                lane, start, end = "dma", result.data_start[node], result.data_end[node]
            elif lane not in LANES and lane != "exchange":
                continue
            file, line = trace.lines[line_of[index]]
            op = trace.ops[op_of[index]]
            yield Interval(rank, core, lane, start, end, op, file, line, index, callers[index])

    def summary(self) -> str:
        """Return a table of the totals, the engines and the critical path."""
        lines = [self.totals(), "  critical path"]
        for step in self.critical_path()[:_MAX_PATH_LINES]:
            where = f"{Path(step.file).name}:{step.line}"
            lines.append(f"    {step.share:>6.1%} {step.ns / 1e3:>12,.2f} us  {where}  {step.op}")
        return "\n".join(lines)

    def totals(self) -> str:
        """Return a table of the totals and the engines."""
        rows = [
            ("total time", f"{self.total_us:,.2f} us"),
            ("instructions", f"{len(self.trace):,} on {self.num_cores} core(s)"),
            ("PE utilisation", f"{self.pe_utilisation:.1%}"),
            ("HBM traffic", f"{self.hbm_bytes / 1e6:,.2f} MB"),
            ("HBM bandwidth", f"{self.hbm_bytes_per_s / 1e9:,.1f} GB/s"),
            ("compute bound", f"{self.compute_bound_ns / 1e3:,.2f} us"),
            ("memory bound", f"{self.memory_bound_ns / 1e3:,.2f} us"),
            ("roofline, as issued", f"{self.roofline_share:.1%}"),
        ]
        lines = [f"{self.chip.name}, simulated"]
        lines += [f"  {label:<20} {value:>22}" for label, value in rows]
        cores = self.result.graph.cores
        lines.append("  busy               " + "".join(f"{core_name(core):>12}" for core in cores))
        busy = [self.engine_busy_ns(number) for number in range(len(cores))]
        for lane in dict.fromkeys(lane for entry in busy for lane in entry):
            cells = [
                f"{entry.get(lane, 0.0) / self.total_ns:>12.1%}" if self.total_ns else ""
                for entry in busy
            ]
            lines.append(f"    {lane:<17}" + "".join(cells))
        return "\n".join(lines)

    def save_picture(self, path: str | Path, start_ns: float = 0.0, end_ns: float = 0.0) -> Path:
        """Draw the engine lanes as a PNG file; needs matplotlib.

        Args:
            path: the file to write.
            start_ns: left edge.
            end_ns: right edge; 0 means the end of the run.
        """
        return save_picture(self, path, self.headline(), start_ns, end_ns)

    def headline(self) -> str:
        """Return the run in one line: time, what was reached of the peaks."""
        return (
            f"{self.chip.name}: {self.total_us:,.1f} us, PE {self.pe_utilisation:.0%}, "
            f"HBM {self.hbm_bytes_per_s / 1e9:,.0f} GB/s, as issued {self.roofline_share:.0%} of"
            " the roofline"
        )

    def save_perfetto(self, path: str | Path) -> Path:
        """Write a trace file in the Chrome JSON format, for ui.perfetto.dev or chrome://tracing."""
        return save_perfetto(self, path)


def _covered(starts: NDArray[np.float64], ends: NDArray[np.float64]) -> float:
    """Return the length of the union of intervals."""
    if not len(starts):
        return 0.0
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    before = np.concatenate([starts[:1], reach[:-1]])
    return float(np.maximum(0.0, reach - np.maximum(starts, before)).sum())


def _by_line(trace: Trace, held: dict[int, float], total_ns: float) -> list[PathStep]:
    """Sum times of instructions by source line and operation."""
    columns = trace.columns()
    sums: dict[tuple[int, int], tuple[float, int]] = {}
    for index, time in held.items():
        key = (int(columns[index, tr.LINE]), int(columns[index, tr.OP]))
        before, count = sums.get(key, (0.0, 0))
        sums[key] = (before + time, count + 1)
    steps = []
    for (line_id, op), (time, count) in sums.items():
        file, line = trace.lines[line_id]
        share = time / total_ns if total_ns else 0.0
        steps.append(PathStep(file, line, trace.ops[op], time, share, count))
    return sorted(steps, key=lambda step: -step.ns)
