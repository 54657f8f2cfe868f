"""The parts of a chip whose speed depends on what they did before: array, DMA engines, HBM stack.

Each is a small state that is asked in time order when a piece of work starts and ends.
"""

from __future__ import annotations

import math
from typing import Final

from nki_sim.hardware import Hardware
from nki_sim.time.costs import DmaPrice, MatmulPrice

_CELLS: Final = 16
_SLICE_NS: Final = 1000.0


class Array:
    """The tensor engine: loads stationary tiles behind the stream and has to warm up.

    Its clock starts at a share of the full one, climbs to it over `ramp_ns` of work and sinks at
    the same pace while idle. Instructions on disjoint 32 x 32 parts run at once.
    """

    __slots__ = (
        "_cells",
        "_clock",
        "_end",
        "_floor",
        "_free",
        "_load_end",
        "_slope",
        "_stream_start",
        "_whole_end",
    )

    def __init__(self, chip: Hardware, warms_up: bool) -> None:
        self._floor = chip.ramp_start_share if warms_up else 1.0
        self._slope = (1.0 - self._floor) / chip.ramp_ns
        self._clock = self._floor
        self._end = 0.0
        self._load_end = 0.0
        self._stream_start = 0.0
        self._free = 0.0
        self._cells = [0.0] * _CELLS
        self._whole_end = 0.0

    def run(self, now: float, price: MatmulPrice, loads: bool) -> tuple[float, float]:
        """Run a matmul whose operands are there from `now` on; return when it starts and ends.

        Args:
            now: earliest start; must not go back from call to call.
            price: its work at full clock.
            loads: whether its stationary tile has to be loaded, which the running stream hides.
        """
        load_start = self._load_end
        if now > load_start:
            load_start = now
        if self._stream_start > load_start:
            load_start = self._stream_start
        loaded = load_start
        if loads:
            loaded += price.load_ns / self._clock_at(load_start)
            self._load_end = loaded
        free, cells = self._free, price.cells
        if cells:
            free = max(self._whole_end, max(self._cells[cell] for cell in cells))
            free = max(free, self._stream_start + price.issue_ns)
        stream = loaded if loaded > free else free
        end = self._stream(stream, price.stream_ns)
        if cells:
            for cell in cells:
                self._cells[cell] = end
        else:
            self._whole_end = end
        if end > self._free:
            self._free = end
        self._stream_start = stream
        return (stream if free >= loaded else max(load_start, free)), end

    def _clock_at(self, time: float) -> float:
        """Return the clock as a share of the full one."""
        if time <= self._end:
            return self._clock
        return max(self._floor, self._clock - self._slope * (time - self._end))

    def _stream(self, start: float, work_ns: float) -> float:
        """Return when the work is done, and move the clock."""
        clock, slope = self._clock_at(start), self._slope
        if clock == 1.0 and work_ns >= 0.0:
            end = start + work_ns
            if end > self._end:
                self._clock, self._end = clock, end
            return end
        climb = (1.0 - clock) / slope if slope else 0.0
        climbed = 0.5 * (clock + 1.0) * climb
        if work_ns >= climbed:
            duration, after = climb + work_ns - climbed, 1.0
        else:
            duration = (math.sqrt(clock * clock + 2.0 * slope * work_ns) - clock) / slope
            after = clock + slope * duration
        end = start + duration
        if end > self._end:
            self._clock, self._end = after, end
        return end


class HbmStack:
    """The bandwidth that the cores of a rank share, slice of time by slice of time."""

    __slots__ = ("_capacity", "_left")

    def __init__(self, chip: Hardware) -> None:
        self._capacity = chip.hbm_bytes_per_ns * _SLICE_NS
        self._left: dict[int, float] = {}

    def end(self, begin: float, end: float, hbm_bytes: int) -> float:
        """Take bandwidth for a transfer that would run from begin to end; return when it ends."""
        rate = hbm_bytes / max(end - begin, 1e-9)
        remaining, time, left = float(hbm_bytes), begin, self._left
        index = int(begin // _SLICE_NS)
        until = (index + 1) * _SLICE_NS
        wanted, full = rate * (until - begin), rate * _SLICE_NS
        while True:
            available = left.get(index, self._capacity)
            taken = wanted if wanted < available else available
            if remaining < taken:
                taken = remaining
            left[index] = available - taken
            remaining -= taken
            if remaining < 1.0:
                return max(end, min(until, time + taken / rate))
            time, wanted = until, full
            index, until = index + 1, until + _SLICE_NS


class DmaEngines:
    """The DMA engines of one core; a transfer takes those that are free first."""

    __slots__ = ("_all", "_even", "_free", "_stack", "_user")

    def __init__(self, chip: Hardware, stack: HbmStack | None) -> None:
        self._all = list(range(chip.dma_engines))
        self._free = [0.0] * chip.dma_engines
        self._user = [-1] * chip.dma_engines
        self._even = True
        self._stack = stack

    def run(
        self, node: int, first: float, each_ns: float, price: DmaPrice
    ) -> tuple[float, float, int]:
        """Move the bytes of a transfer.

        Args:
            node: who it is, for those that wait for it.
            first: earliest time of the first byte.
            each_ns: time on each engine.
            price: how many engines it takes and how many bytes of HBM.

        Returns:
            Time of the first and the last byte, and the transfer that held its engines longest.
        """
        if price.engines == len(self._free) and self._even:
            # All engines are equally free, which is the common case.
            held, bound = self._free[0], self._user[0]
            begin = held if held > first else first
            end = self._through(begin, begin + each_ns, price)
            self._free = [end] * price.engines
            self._user = [node] * price.engines
            return begin, end, bound
        free, user, chosen = self._free, self._user, self._all
        if price.engines < len(free):
            chosen = sorted(chosen, key=free.__getitem__)[: price.engines]
        held = max(free[engine] for engine in chosen)
        bound = next(user[engine] for engine in chosen if free[engine] == held)
        begin = max(first, min(free[engine] for engine in chosen))
        end = self._through(begin, max(first, held) + each_ns, price)
        late = end - (max(first, held) + each_ns)
        for engine in chosen:
            free[engine] = max(first, free[engine]) + each_ns + late
            user[engine] = node
        self._even = min(free) == max(free)
        return begin, end, bound

    def _through(self, begin: float, end: float, price: DmaPrice) -> float:
        """Return the end of a transfer after the HBM stack had its say."""
        if self._stack is None or not price.hbm_bytes:
            return end
        return self._stack.end(begin, end, price.hbm_bytes)
