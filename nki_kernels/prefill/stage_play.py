"""Stages played on the engines of a launch, by the rules of either corner of the clock.

All cores do the same stages. They share the HBM stack: what one leaves, the other takes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from nki_kernels.common.chip import chip_in_force
from nki_kernels.prefill.stage_prices import GPSIMD, QUEUES, TENSOR, VECTOR, Work
from nki_sim.time.costs import DmaPrice, MatmulPrice
from nki_sim.time.engines import Array, DmaEngines, HbmStack

_APART_NS: Final = (
    1_000.0  # a core begins after the one before: in step they would all wait at once
)


class Stage(NamedTuple):
    """Work of one queue, which takes no other for `busy_ns`; its result is there after
    `latency_ns`, or when the transfer ends that it triggers.
    """

    queue: int
    busy_ns: float
    latency_ns: float
    reads: list[object]
    writes: list[object]
    transfer: DmaPrice | None
    trip: int


class StageList:
    """Stages in the order of the source; what is added belongs to `trip`."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.trip = 0

    def add(self, queue: int, ns: float, reads: list[object], writes: list[object]) -> None:
        """Add work whose result is there when its queue is free again."""
        self.stages.append(Stage(queue, ns, ns, reads, writes, None, self.trip))

    def compute(
        self, work: Work, reads: list[object], writes: list[object], queue: int = VECTOR
    ) -> None:
        """Add work of the Vector engine, or of another that goes on before the result is there."""
        self.stages.append(
            Stage(queue, work.busy_ns, work.latency_ns, reads, writes, None, self.trip)
        )

    def move(self, queue: int, price: DmaPrice, reads: list[object], writes: list[object]) -> None:
        """Add a transfer."""
        ns = price.generator_ns
        self.stages.append(Stage(queue, ns, ns, reads, writes, price, self.trip))


def play_stages(stages: Sequence[Stage], *, num_cores: int, is_list: bool) -> list[float]:
    """Return when each trip ends on the last core, in ns.

    Args:
        stages: of each core, in the order of the source; trip 0 is what comes before the loop.
        num_cores: that share the HBM stack.
        is_list: queues take what is ready, and wait for one another at the end of a trip; else
            they keep the order and pass by themselves.
    """
    return _Play(stages, num_cores, is_list).run()


@dataclass(slots=True)
class _Core:
    """What a core is doing.

    Attributes:
        array, dma: its engines.
        free: when each queue takes the next stage.
        ready: when each stage may start, by those that ended.
        waits: how many each stage still waits for.
        ends: of trips, so far.
        left: stages of each trip that have not started.
        trip: the last one that may start.
    """

    array: Array
    dma: DmaEngines
    free: list[float]
    ready: list[float]
    waits: list[int]
    ends: list[float]
    left: list[int]
    trip: int


class _Play:
    """One pass over the stages, in the order of time.

    Plans are chosen among hundreds of plays, so a stage costs few calls.
    """

    def __init__(self, stages: Sequence[Stage], num_cores: int, is_list: bool) -> None:
        self._stages, self._is_list = stages, is_list
        self._chip = chip = chip_in_force()
        waits, self._by_result, self._by_end = _dependencies(stages)
        self._next = [-1] * len(stages)  # on its queue
        trips = stages[-1].trip + 1
        last = [-1] * QUEUES
        self._of_trip: list[list[int]] = [[] for _ in range(trips)]
        # The queues that a stage takes: GpSimd too, if that makes a transfer's descriptors.
        self._queues = [
            (stage.queue, GPSIMD if _is_by_gpsimd(stage) else stage.queue) for stage in stages
        ]
        self._products = [
            MatmulPrice(0.0, stage.busy_ns, 0.0, 0.0, 0, ()) if stage.queue == TENSOR else None
            for stage in stages
        ]
        for number, stage in enumerate(stages):
            self._of_trip[stage.trip].append(number)
            if not is_list and last[stage.queue] >= 0:
                self._next[last[stage.queue]] = number
                waits[number] += 1
            last[stage.queue] = number
        stack = HbmStack(chip) if num_cores > 1 else None
        self._cores = [
            _Core(
                Array(chip, warms_up=True),
                DmaEngines(chip, stack),
                [core * _APART_NS] * QUEUES,
                [0.0] * len(stages),
                list(waits),
                [0.0] * trips,
                [*map(len, self._of_trip)],
                0 if is_list else trips,
            )
            for core in range(num_cores)
        ]
        self._heap: list[tuple[float, int, int]] = []

    def run(self) -> list[float]:
        """Play all; return when each trip ends."""
        heap, cores, queues = self._heap, self._cores, self._queues
        for core, state in enumerate(cores):
            for number, stage in enumerate(self._stages):
                if not state.waits[number] and stage.trip <= state.trip:
                    self._offer(core, number)
        while heap:
            now, number, core = heap[0]
            free, (own, other) = cores[core].free, queues[number]
            at = free[own] if free[own] > free[other] else free[other]
            if now < at:
                heapq.heapreplace(heap, (at, number, core))
            else:
                heapq.heappop(heap)
                self._take(now, core, number)
        return [float(max(ends)) for ends in zip(*(core.ends for core in cores), strict=True)]

    def _offer(self, core: int, number: int) -> None:
        """Let a stage start as soon as what it reads is there and its queues are free."""
        state, (own, other) = self._cores[core], self._queues[number]
        start, free = state.ready[number], state.free
        if free[own] > start:
            start = free[own]
        if free[other] > start:
            start = free[other]
        heapq.heappush(self._heap, (start, number, core))

    def _take(self, now: float, core: int, number: int) -> None:
        """Run a stage, and let those go on that waited for it."""
        stage, state, stages = self._stages[number], self._cores[core], self._stages
        seen = self._run(number, now, state)
        trip, waits, ready = stage.trip, state.waits, state.ready
        # A trip does not wait for transfers, once they are triggered.
        end = now if stage.transfer is not None else seen
        if end > state.ends[trip]:
            state.ends[trip] = end
        sees = self._chip.semaphore_ns
        for waiting, at in (
            (self._by_result[number], seen + sees),
            (self._by_end[number], state.free[stage.queue] + sees),
        ):
            for target in waiting:
                if at > ready[target]:
                    ready[target] = at
                waits[target] -= 1
                if not waits[target] and stages[target].trip <= state.trip:
                    self._offer(core, target)
        following = self._next[number]
        if following >= 0:
            if stages[following].trip != trip:
                state.free[stage.queue] += self._chip.loop_trip_ns
            waits[following] -= 1
            if not waits[following] and stages[following].trip <= state.trip:
                self._offer(core, following)
        state.left[trip] -= 1
        if self._is_list and not state.left[trip]:
            self._start_next_trip(core)

    def _start_next_trip(self, core: int) -> None:
        state = self._cores[core]
        edge = state.ends[state.trip] + self._chip.loop_trip_ns
        state.free = [max(free, edge) for free in state.free]
        state.trip += 1
        for number in self._of_trip[state.trip] if state.trip < len(self._of_trip) else ():
            if not state.waits[number]:
                self._offer(core, number)

    def _run(self, number: int, now: float, state: _Core) -> float:
        """Return when the result of a stage is seen."""
        stage, product = self._stages[number], self._products[number]
        if product is not None:
            _, state.free[TENSOR] = state.array.run(now, product, loads=False)
            return state.free[TENSOR] + self._chip.matmul_drain_ns
        for queue in self._queues[number]:
            state.free[queue] = now + stage.busy_ns
        transfer = stage.transfer
        if transfer is None:
            return now + stage.latency_ns
        first = now + self._chip.dma_first_byte_ns + transfer.extra_ns
        _, end, _ = state.dma.run(0, first, transfer.engine_ns, transfer)
        return end + self._chip.dma_done_ns


def _is_by_gpsimd(stage: Stage) -> bool:
    return stage.transfer is not None and stage.transfer.dge == "swdge"


def _dependencies(
    stages: Sequence[Stage],
) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Return how many stages each one waits for, who waits for its result, and who for its end.

    A reader waits for the last writer, a writer for the writer before and the readers since.
    """
    waits = [0] * len(stages)
    by_result: list[list[int]] = [[] for _ in stages]
    by_end: list[list[int]] = [[] for _ in stages]
    writer: dict[object, int] = {}
    readers: dict[object, list[int]] = {}
    for number, stage in enumerate(stages):
        results = {writer[name] for name in stage.reads if name in writer}
        before: set[int] = set()
        for name in stage.writes:
            before.update(readers.get(name, ()))
            if name in writer:
                results.add(writer[name])
            writer[name], readers[name] = number, []
        for name in stage.reads:
            readers.setdefault(name, []).append(number)
        ends = before - results
        waits[number] = len(results) + len(ends)
        for other in results:
            by_result[other].append(number)
        for other in ends:
            # Who reads by a transfer has read when that has ended.
            waiting = by_end if stages[other].transfer is None else by_result
            waiting[other].append(number)
    return waits, by_result, by_end
