"""Play queues that need not keep the order of the source: a list schedule inside a window.

Each queue issues the oldest instruction that is ready among the next W, counted from the oldest
that has not been issued. A step of a dynamic loop is issued when it is the oldest, and nothing
behind it before it; a meeting of cores is issued when it is the oldest, though what is behind it
may go first: two cores then meet in the same order, so that nobody waits in a circle.

How much worse than in order can that be? With costs that do not depend on what ran before, an
instruction starts at latest when its producers are done, everything older in its queue has been
issued, and one younger instruction, which took the engine just before it became ready, has left it.
So along any chain of waits each instruction adds at most the longest occupancy among the W - 1
behind it: the greed of the window, 0 for W = 1. Where costs do depend on history (clock of the
array, stationary tiles, tables, shared DMA engines), some engine is at work or some latency of a
chain is running at any time, so that the time stays below that of the chain plus the work of all
engines.
"""

from __future__ import annotations

import heapq
from typing import Final

from nki_sim import trace as tr
from nki_sim.hardware import Hardware
from nki_sim.time.costs import MeetingPrice
from nki_sim.time.playback import DGE_AUTO, DGE_SCALAR, DGE_SYNC, CoreState, Player, Schedule
from nki_sim.time.prepare import Prepared, TimelineOptions

_NONE: Final = -1
_EITHER: Final = -2
_FREE: Final = 0
_LOOP: Final = 1
_MEETING: Final = 2


def play(
    prepared: Prepared, chip: Hardware, options: TimelineOptions, nodes: int | None = None
) -> Schedule:
    """Time every instruction.

    Args:
        prepared: of `prepare` with the same order of the model.
        chip: its speeds.
        options: how to time.
        nodes: stop after so many, those that start first; the times of the others stay 0.

    Raises:
        ValueError: some instructions can never start, because a partner of a meeting is missing or
            the waits form a circle.
    """
    player = ListPlayer if options.model.order == "list" else Player
    return player(prepared, chip, options).play(nodes)


class ListPlayer(Player):
    """The simulation with a window of instructions per queue."""

    def __init__(self, prepared: Prepared, chip: Hardware, options: TimelineOptions) -> None:
        super().__init__(prepared, chip, options)
        graph = self._graph
        count, queues = len(graph.instruction), graph.queues
        self._place = [0] * count
        for queue in queues:
            for place, node in enumerate(queue.nodes):
                self._place[node] = place
        kinds = bytes(
            _fence(kind[2], price) for kind, price in zip(prepared.kinds, self._prices, strict=True)
        )
        self._fence = bytes(kinds[pair] for pair in self._pair_of)
        self._stops = [
            [*(p for p, node in enumerate(q.nodes) if self._fence[node] == _LOOP), len(q.nodes)]
            for q in queues
        ]
        self._next_stop = [0] * len(queues)
        self._limit = [0] * len(queues)
        self._issued = bytearray(count)
        self._is_offered = bytearray(count)
        self._offered: list[list[int]] = [[] for _ in queues]
        self._blocked = bytearray(len(queues))
        self._wake_ns = [0.0] * len(queues)
        self._wake_node = [-1] * len(queues)
        self._last = [-1] * len(queues)
        self._resource = [_resource(name) for name in self._names]
        self._nodes = [queue.nodes for queue in queues]
        self._frees = [self._cores[queue.core].free for queue in queues]
        self._users = [self._cores[queue.core].user for queue in queues]
        self._contents: list[dict[tuple[int, ...], int]] = [{} for _ in self._cores]

    def _begin(self) -> None:
        for queue in range(len(self._graph.queues)):
            self._open(queue)

    def _step(self, now: float, node: int) -> int:
        """Note that a node is ready, and issue the oldest that is."""
        if self._issued[node]:
            return 0
        queue = self._queue_of[node]
        offered = self._offered[queue]
        if self._wake_node[queue] == node and self._wake_ns[queue] == now:
            self._wake_node[queue] = -1
        if offered or self._blocked[queue]:
            if not self._is_offered[node]:
                self._is_offered[node] = 1
                heapq.heappush(offered, self._place[node])
            if self._blocked[queue]:
                return 0
            chosen = self._nodes[queue][offered[0]]
            free = self._free_at(queue, chosen)
            if free > now:
                self._wake(queue, chosen, free)
                return 0
            heapq.heappop(offered)
        else:
            free = self._free_at(queue, node)
            if free > now:
                self._is_offered[node] = 1
                offered.append(self._place[node])
                self._wake(queue, node, free)
                return 0
            chosen = node
        self._issued[chosen] = self._blocked[queue] = 1
        if now > self._ready[chosen]:
            resource = self._resource[queue]
            user = self._users[queue][resource] if resource >= 0 else -1
            self._cause[chosen] = user if user >= 0 else self._last[queue]
        self._last[queue] = chosen
        return self._run(now, chosen, queue)

    def _free_at(self, queue: int, node: int) -> float:
        """Return when a queue can issue a node that is ready."""
        time, resource = self._queue_time[queue], self._resource[queue]
        if self._fence[node] == _LOOP:
            resource = self._engines[queue]
        if resource == _NONE:
            return time
        free = self._frees[queue]
        engine = min(free[DGE_SYNC], free[DGE_SCALAR]) if resource == _EITHER else free[resource]
        return engine if engine > time else time

    def _wake(self, queue: int, node: int, time: float) -> None:
        """Look at a queue again when it can issue its oldest node."""
        if self._wake_node[queue] != node or self._wake_ns[queue] != time:
            self._wake_node[queue], self._wake_ns[queue] = node, time
            heapq.heappush(self._heap, (time, node))

    def _is_held(self, node: int, core: CoreState) -> bool:
        number = self._graph.stationary[node]
        part = self._graph.stationary_parts[number]
        contents = self._contents[self._core_of[self._queue_of[node]]]
        is_held = contents.get(part) == number
        if not is_held:
            if part:
                contents.pop((), None)
            else:
                contents.clear()
            contents[part] = number
        return bool(is_held and self._chip.stationary_reuse_skips_load)

    def _release(self, node: int, queue: int, is_own: bool) -> None:
        if self._place[node] < self._limit[queue]:
            self._offer(node, queue)

    def _offer(self, node: int, queue: int) -> None:
        """Push a node without open waits that is inside the window."""
        if self._fence[node] != _MEETING or self._place[node] == self._position[queue]:
            self._push(node, queue)

    def _advance(self, node: int, queue: int) -> None:
        start = self._start[node]
        if self._queue_time[queue] < start:
            self._queue_time[queue] = start
        self._blocked[queue] = 0
        if self._place[node] == self._position[queue]:
            self._open(queue)
        offered = self._offered[queue]
        if offered:
            oldest = self._nodes[queue][offered[0]]
            self._wake(queue, oldest, self._free_at(queue, oldest))

    def _open(self, queue: int) -> None:
        """Move the window to the oldest node that has not been issued."""
        nodes, issued, waits = self._nodes[queue], self._issued, self._waits
        head, count = self._position[queue], len(nodes)
        while head < count and issued[nodes[head]]:
            head += 1
        self._position[queue] = head
        stops = self._stops[queue]
        while stops[self._next_stop[queue]] < head:
            self._next_stop[queue] += 1
        stop = stops[self._next_stop[queue]]
        limit = min(head + self._model.window, max(stop, head + 1), count)
        before = self._limit[queue]
        self._limit[queue] = limit
        for node in nodes[before:limit]:
            if not waits[node]:
                self._offer(node, queue)
        if (
            before > head < count
            and self._fence[nodes[head]] == _MEETING
            and not waits[nodes[head]]
        ):
            self._push(nodes[head], queue)


def _fence(facts: tr.Facts, price: object) -> int:
    """Return what may not pass an instruction."""
    if isinstance(facts, tr.ControlFacts) and facts.kind.startswith("loop"):
        return _LOOP
    return _MEETING if isinstance(price, MeetingPrice) else _FREE


def _resource(name: str) -> int:
    """Return what the instructions of a queue share with others, of a core's resources."""
    if name in tr.ENGINE_NAMES:
        engine = tr.ENGINE_NAMES.index(name)
        return _NONE if engine == tr.TENSOR else engine
    for start, resource in _GENERATORS.items():
        if name.startswith(start):
            return resource
    return _NONE


_GENERATORS: Final = {
    "swdge": tr.GPSIMD,
    "auto": DGE_AUTO,
    "hwdge-scalar": DGE_SCALAR,
    "hwdge-any": _EITHER,
    "hwdge": DGE_SYNC,
}
