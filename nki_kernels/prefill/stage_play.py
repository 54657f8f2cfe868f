"""Stages played on the engines of a core, by the rules of either corner of the clock."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from nki_kernels.common.chip import chip_in_force
from nki_kernels.prefill.stage_prices import QUEUES, TENSOR
from nki_sim.time.costs import DmaPrice, MatmulPrice
from nki_sim.time.engines import Array, DmaEngines, HbmStack


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


def play_stages(stages: Sequence[Stage], *, is_list: bool) -> list[float]:
    """Return when each trip ends, in ns.

    Args:
        stages: in the order of the source; trip 0 is what comes before the loop.
        is_list: queues take what is ready, and wait for one another at the end of a trip; else
            they keep the order and pass by themselves.
    """
    return _Play(stages, is_list).run()


class _Play:
    """One pass over the stages, in the order of time."""

    def __init__(self, stages: Sequence[Stage], is_list: bool) -> None:
        self._stages, self._is_list = stages, is_list
        self._waits, self._targets = _dependencies(stages)
        chip = chip_in_force()
        half = replace(chip, hbm_bytes_per_ns=chip.hbm_bytes_per_ns / 2)
        self._chip = chip
        self._array = Array(half, warms_up=True)
        self._dma = DmaEngines(half, HbmStack(half))
        self._free = [0.0] * QUEUES
        self._ready = [0.0] * len(stages)
        self._ends = [0.0] * (stages[-1].trip + 1)
        self._left = [0] * len(self._ends)
        self._next = [-1] * len(stages)  # on its queue
        self._heap: list[tuple[float, int]] = []
        self._trip = 0 if is_list else len(self._ends)

    def run(self) -> list[float]:
        """Play all; return when each trip ends."""
        last = [-1] * QUEUES
        for number, stage in enumerate(self._stages):
            self._left[stage.trip] += 1
            if not self._is_list and last[stage.queue] >= 0:
                self._next[last[stage.queue]] = number
                self._waits[number] += 1
            last[stage.queue] = number
        for number, stage in enumerate(self._stages):
            if not self._waits[number] and stage.trip <= self._trip:
                self._offer(number)
        while self._heap:
            now, number = heapq.heappop(self._heap)
            if now < self._free[self._stages[number].queue]:
                self._offer(number)
            else:
                self._take(now, number)
        return self._ends

    def _offer(self, number: int) -> None:
        free = self._free[self._stages[number].queue]
        heapq.heappush(self._heap, (max(self._ready[number], free), number))

    def _take(self, now: float, number: int) -> None:
        """Run a stage, and let those go on that waited for it."""
        stage = self._stages[number]
        seen = self._run(stage, now)
        free = self._free[stage.queue]
        self._ends[stage.trip] = max(
            self._ends[stage.trip], free if stage.transfer is not None else seen
        )
        for target, needs_result in self._targets[number]:
            at = (seen if needs_result else free) + self._chip.semaphore_ns
            self._ready[target] = max(self._ready[target], at)
            self._let_go(target)
        following = self._next[number]
        if following >= 0:
            if self._stages[following].trip != stage.trip:
                self._free[stage.queue] += self._chip.loop_trip_ns
            self._let_go(following)
        self._left[stage.trip] -= 1
        if self._is_list and not self._left[stage.trip]:
            self._start_next_trip()

    def _let_go(self, target: int) -> None:
        self._waits[target] -= 1
        if not self._waits[target] and self._stages[target].trip <= self._trip:
            self._offer(target)

    def _start_next_trip(self) -> None:
        edge = self._ends[self._trip] + self._chip.loop_trip_ns
        self._free = [max(free, edge) for free in self._free]
        self._trip += 1
        for number, stage in enumerate(self._stages):
            if stage.trip == self._trip and not self._waits[number]:
                self._offer(number)

    def _run(self, stage: Stage, now: float) -> float:
        """Return when the result of a stage is seen."""
        if stage.queue == TENSOR:
            price = MatmulPrice(0.0, stage.busy_ns, 0.0, 0.0, 0, ())
            _, self._free[TENSOR] = self._array.run(now, price, loads=False)
            return self._free[TENSOR] + self._chip.matmul_drain_ns
        self._free[stage.queue] = now + stage.busy_ns
        if stage.transfer is None:
            return now + stage.latency_ns
        first = now + self._chip.dma_first_byte_ns + stage.transfer.extra_ns
        _, end, _ = self._dma.run(0, first, stage.transfer.engine_ns, stage.transfer)
        return end + self._chip.dma_done_ns


def _dependencies(stages: Sequence[Stage]) -> tuple[list[int], list[list[tuple[int, bool]]]]:
    """Return how many stages each one waits for, and who waits for it: for its result, or its end.

    A reader waits for the last writer, a writer for the writer before and the readers since.
    """
    waits = [0] * len(stages)
    targets: list[list[tuple[int, bool]]] = [[] for _ in stages]
    writer: dict[object, int] = {}
    readers: dict[object, list[int]] = {}
    for number, stage in enumerate(stages):
        before: dict[int, bool] = {}
        for name in stage.reads:
            if name in writer:
                before[writer[name]] = True
            readers.setdefault(name, []).append(number)
        for name in stage.writes:
            for reader in readers.get(name, ()):
                before.setdefault(reader, stages[reader].transfer is not None)
            if name in writer:
                before[writer[name]] = True
            writer[name], readers[name] = number, []
        for other, needs_result in before.items():
            waits[number] += 1
            targets[other].append((number, needs_result))
    return waits, targets
