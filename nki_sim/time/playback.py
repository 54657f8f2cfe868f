"""Play a trace on a chip: when every instruction starts, ends, and what it waited for.

A discrete-event simulation in time order. A queue hands out its instructions in program order; the
head starts when its producers are done and its engine is free. Data movements are triggered in
order, then share 16 DMA engines and, with the other core of the pair, the HBM stack. Costs come
from costs.py, waits from dependencies.py; what is assumed of loops and exchanges from
schedule_model.py. reorder.py plays queues that are not in order.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nki_sim import trace as tr
from nki_sim.hardware import Hardware
from nki_sim.time.costs import ComputePrice, DmaPrice, MatmulPrice, MeetingPrice
from nki_sim.time.dependencies import DONE, Graph
from nki_sim.time.engines import Array, DmaEngines, HbmStack
from nki_sim.time.prepare import Prepared, Price, TimelineOptions, prices_of

# Resources of a core: the five engines by their trace numbers, then descriptor generators.
DGE_SYNC: Final = 5
DGE_SCALAR: Final = 6
DGE_AUTO: Final = 7
_NUM_RESOURCES: Final = 8
_NAMED_QUEUES: Final = frozenset({"hwdge-sync", "hwdge-scalar"})


@dataclass(slots=True)
class Schedule:
    """The times of every node of a graph, in ns.

    `start` is when a node takes its engine (a transfer: when it is triggered), `busy_end` when the
    engine is free again, `visible` when others may use the result. `data_start` and `data_end`
    bound the bytes of a transfer on the wire. `path_start` and `cause` lead back along what
    determined the time: a node holds the critical path from `path_start` on, before that its cause
    does (-1: nothing, it could start at once). `total_ns` is when the last result is visible; where
    not all nodes were played, when the last of them started.
    """

    graph: Graph
    prices: list[Price]
    pair: NDArray[np.int64]
    start: list[float]
    busy_end: list[float]
    visible: list[float]
    data_start: list[float]
    data_end: list[float]
    path_start: list[float]
    cause: list[int]
    table_loads: list[int]
    total_ns: float


@dataclass(frozen=True, slots=True)
class EdgePrice:
    """The iteration of a dynamic loop where all queues of the core wait for each other."""

    duration_ns: float


@dataclass(slots=True)
class CoreState:
    """What the engines of one core are doing."""

    array: Array
    dma: DmaEngines
    single_queue: bool
    free: list[float] = field(default_factory=lambda: [0.0] * _NUM_RESOURCES)
    user: list[int] = field(default_factory=lambda: [-1] * _NUM_RESOURCES)
    table: str = ""
    table_loads: int = 0


class Player:
    """The simulation with queues in order; one instance per run."""

    def __init__(self, prepared: Prepared, chip: Hardware, options: TimelineOptions) -> None:
        graph, pairs = prepared.graph, prepared.pair
        prices = prices_of(prepared, chip)
        self._chip = chip
        self._graph = graph
        self._prices = prices
        self._model = options.model
        self._steps = _steps(prices, prepared, options)
        count = len(graph.instruction)
        instruction = np.array(graph.instruction, dtype=np.int64)
        self._pair = pairs[instruction] if count else pairs
        self._pair_of: list[int] = self._pair.tolist()
        self._start = [0.0] * count
        self._busy_end = [0.0] * count
        self._visible = [0.0] * count
        self._data_start = [0.0] * count
        self._data_end = [0.0] * count
        self._path_start = [0.0] * count
        self._cause = [-1] * count
        self._ready = [0.0] * count
        self._waits = list(graph.waits)
        self._queue_of = list(graph.queue)
        self._first: list[int] = graph.first.tolist()
        self._targets = graph.targets
        self._position = [0] * len(graph.queues)
        self._queue_time = [0.0] * len(graph.queues)
        self._latest = [0.0] * len(graph.queues)
        self._core_of = [queue.core for queue in graph.queues]
        self._names = [queue.name for queue in graph.queues]
        self._engines = [
            tr.ENGINE_NAMES.index(n) if n in tr.ENGINE_NAMES else -1 for n in self._names
        ]
        self._heap: list[tuple[float, int]] = []
        self._cores = self._make_cores(options)
        facts = [kind[2] for kind in prepared.kinds]
        self._meetings = _partners(prices, pairs, facts)
        self._arrived: dict[tuple[object, ...], list[tuple[float, int]]] = {}
        self._link_free = [0.0] * len(graph.queues)

    def _make_cores(self, options: TimelineOptions) -> list[CoreState]:
        """Set up the cores; those of a rank share one HBM stack."""
        graph, chip = self._graph, self._chip
        ranks = [rank for rank, _ in graph.cores]
        stacks = {rank: HbmStack(chip) for rank in ranks if ranks.count(rank) > 1}
        ways: list[set[str]] = [set() for _ in graph.cores]
        for queue in graph.queues:
            way = queue.name.split("-load")[0].split("-store")[0]
            if way not in (*tr.ENGINE_NAMES, "exchange"):
                ways[queue.core].add(way)
        cores = []
        for number, rank in enumerate(ranks):
            one = len(ways[number]) == 1 and bool(ways[number] & _NAMED_QUEUES)
            rule = options.dma_rule
            cores.append(
                CoreState(
                    array=Array(chip, options.clock_ramp),
                    dma=DmaEngines(chip, stacks.get(rank)),
                    single_queue=one if rule == "auto" else rule == "single_queue",
                )
            )
        return cores

    def play(self, nodes: int | None = None) -> Schedule:
        """Run until every node has its times, or so many of them, the first to start.

        Raises:
            ValueError: some instructions can never start, because a partner of a meeting is missing
                or the waits form a circle.
        """
        self._begin()
        heap, step, left = self._heap, self._step, len(self._graph.instruction)
        until = 0 if nodes is None else max(0, left - nodes)
        reached = 0.0
        while heap and left > until:
            reached, node = heapq.heappop(heap)
            left -= step(reached, node)
        if left > until:
            self._explain_stall(left)
        return Schedule(
            graph=self._graph,
            prices=self._prices,
            pair=self._pair,
            start=self._start,
            busy_end=self._busy_end,
            visible=self._visible,
            data_start=self._data_start,
            data_end=self._data_end,
            path_start=self._path_start,
            cause=self._cause,
            table_loads=[core.table_loads for core in self._cores],
            total_ns=reached if left else max(self._visible, default=0.0),
        )

    def _begin(self) -> None:
        """Push what can start at once."""
        for queue in self._graph.queues:
            if queue.nodes and not self._waits[queue.nodes[0]]:
                heapq.heappush(self._heap, (0.0, queue.nodes[0]))

    def _step(self, now: float, node: int) -> int:
        """Start a node, or put it off; return how many nodes have their times by that."""
        return self._run(now, node, self._queue_of[node])

    def _run(self, now: float, node: int, queue: int) -> int:
        """Start a node of a queue, or put it off; return how many nodes that completed."""
        price = self._steps[self._pair_of[node]]
        core = self._cores[self._core_of[queue]]
        if type(price) is MatmulPrice:
            self._matmul(now, node, price, core)
        elif type(price) is ComputePrice:
            if not self._compute(now, node, price, core, queue):
                return 0
        elif type(price) is DmaPrice:
            if not self._dma(now, node, price, core, queue):
                return 0
        elif type(price) is EdgePrice:
            return self._loop_edge(now, node, price, core, queue)
        elif type(price) is MeetingPrice:
            engine = self._engines[queue]
            if engine < 0 or self._take(engine, now, node, core):
                return self._meet(now, node, price)
            return 0
        self._notify(node, queue)
        self._advance(node, queue)
        return 1

    def _take(self, resource: int, now: float, node: int, core: CoreState) -> bool:
        """Return whether an engine is free now; else try again when it is."""
        free = core.free[resource]
        if free <= now:
            return True
        self._cause[node] = core.user[resource]
        heapq.heappush(self._heap, (free, node))
        return False

    def _compute(
        self, now: float, node: int, price: ComputePrice, core: CoreState, queue: int
    ) -> bool:
        """Run a Vector, Scalar, GpSimd or Sync instruction, or the step of a loop."""
        engine = self._engines[queue]
        if engine >= 0:
            if not self._take(engine, now, node, core):
                return False
            if price.table and price.table != core.table:
                # The load needs no operand: it runs as soon as the engine is free.
                core.table = price.table
                core.table_loads += 1
                loaded = core.free[engine] + self._chip.table_load_ns
                if loaded > now:
                    now = loaded
                    self._cause[node] = core.user[engine]
            core.free[engine] = now + price.occupancy_ns
            core.user[engine] = node
        else:
            self._queue_time[queue] = now + price.occupancy_ns
        self._set(node, now, now + price.occupancy_ns, now + price.latency_ns)
        return True

    def _matmul(self, now: float, node: int, price: MatmulPrice, core: CoreState) -> None:
        """Run a matmul on the array."""
        begin, end = core.array.run(now, price, not self._is_held(node, core))
        self._start[node] = self._path_start[node] = begin
        self._busy_end[node] = end
        self._visible[node] = end + price.drain_ns
        if begin > now:
            self._cause[node] = core.user[tr.TENSOR]
        core.user[tr.TENSOR] = node

    def _is_held(self, node: int, core: CoreState) -> bool:
        """Tell whether the array already holds the stationary tile of a matmul."""
        return bool(self._graph.keeps_stationary[node] and self._chip.stationary_reuse_skips_load)

    def _dma(self, now: float, node: int, price: DmaPrice, core: CoreState, queue: int) -> bool:
        """Trigger a transfer and put its bytes on the DMA engines."""
        chip = self._chip
        resource, name = -1, self._names[queue]
        if price.dge == "swdge":
            resource = tr.GPSIMD
        elif price.dge == "auto":
            resource = DGE_AUTO
        elif price.dge == "hwdge":
            resource = DGE_SCALAR if name.startswith("hwdge-scalar") else DGE_SYNC
            if name.startswith("hwdge-any") and core.free[DGE_SCALAR] < core.free[DGE_SYNC]:
                resource = DGE_SCALAR
        if resource >= 0:
            if not self._take(resource, now, node, core):
                return False
            core.free[resource] = now + price.generator_ns
            core.user[resource] = node
        else:
            self._queue_time[queue] = now + price.generator_ns
        first = now + chip.dma_first_byte_ns + price.extra_ns
        each = price.single_queue_ns if core.single_queue else price.engine_ns
        begin, end, bound = core.dma.run(node, first, each, price)
        self._data_start[node] = begin
        self._data_end[node] = end
        self._set(node, now, now + price.generator_ns, end + chip.dma_done_ns)
        if bound >= 0 and begin > first:
            self._cause[node] = bound
            self._path_start[node] = begin
        return True

    def _meet(self, now: float, node: int, price: MeetingPrice) -> int:
        """Wait for the partners; return how many nodes the arrival completed."""
        key, partners = self._meetings[self._pair_of[node]]
        arrived = self._arrived.setdefault(key, [])
        arrived.append((now, node))
        pipelined = self._model.sendrecv == "pipelined" and price.transfer_ns is not None
        if pipelined:  # the queue goes on; whoever needs the data waits
            self._start[node] = now
            self._advance(node, self._queue_of[node])
        if len(arrived) < partners:
            return 0
        del self._arrived[key]
        last_arrival, last = arrived[-1]
        begin = last_arrival
        if pipelined:
            begin = self._take_link(begin, price, [partner for _, partner in arrived])
        end = begin + price.duration_ns
        for _, partner in arrived:
            # Waiting for the others keeps an engine from its queue but is not counted as work.
            self._set(partner, begin, end, end)
            if partner != last:
                self._cause[partner] = last
            if not pipelined:
                self._hold(partner, end)
        for _, partner in arrived:
            queue = self._queue_of[partner]
            self._notify(partner, queue)
            if not pipelined:
                self._advance(partner, queue)
        return len(arrived)

    def _take_link(self, now: float, price: MeetingPrice, nodes: list[int]) -> float:
        """Return when the bytes of an exchange can go, and keep the way busy while they do."""
        queues = [self._queue_of[node] for node in nodes]
        begin = max(now, *(self._link_free[queue] for queue in queues))
        for queue in queues:
            self._link_free[queue] = begin + (price.transfer_ns or 0.0)
        return begin

    def _hold(self, node: int, end: float) -> None:
        """Keep the queue of a node, and its engine if it has one, until a meeting ends."""
        queue = self._queue_of[node]
        engine = self._engines[queue]
        if engine >= 0:
            core = self._cores[self._core_of[queue]]
            core.free[engine] = max(core.free[engine], end)
            core.user[engine] = node
        self._queue_time[queue] = end

    def _loop_edge(
        self, now: float, node: int, price: EdgePrice, core: CoreState, queue: int
    ) -> int:
        """Wait at a loop's edge for the other queues of the core."""
        engine = self._engines[queue]
        if engine >= 0:
            now = max(now, self._latest[queue], core.free[engine])
        elif self._model.loop_edge == "drain":
            now = max(now, self._latest[queue])
        number = self._core_of[queue]
        key = ("edge", self._graph.instruction[node])
        arrived = self._arrived.setdefault(key, [])
        arrived.append((now, node))
        if len(arrived) < self._core_of.count(number):
            return 0
        del self._arrived[key]
        latest, last = max(arrived)
        end = latest + price.duration_ns
        for _, partner in arrived:
            self._set(partner, latest, end, end)
            if partner != last:
                self._cause[partner] = last
            self._hold(partner, end)
        for _, partner in arrived:
            self._notify(partner, self._queue_of[partner])
            self._advance(partner, self._queue_of[partner])
        return len(arrived)

    def _set(self, node: int, start: float, busy_end: float, visible: float) -> None:
        self._start[node] = start
        self._path_start[node] = start
        self._busy_end[node] = busy_end
        self._visible[node] = visible

    def _notify(self, node: int, queue: int) -> None:
        """Tell the nodes that wait for this one."""
        ready, waits, queue_of = self._ready, self._waits, self._queue_of
        visible, visible_elsewhere, done_elsewhere = self._seen(node)
        if visible > self._latest[queue]:
            self._latest[queue] = visible
        for edge in self._targets[self._first[node] : self._first[node + 1]]:
            target = edge >> 1
            other = queue_of[target]
            if other == queue:
                time = 0.0 if edge & 1 == DONE else visible
            else:
                time = done_elsewhere if edge & 1 == DONE else visible_elsewhere
            if time > ready[target]:
                ready[target] = time
                self._cause[target] = node
            waits[target] -= 1
            if not waits[target]:
                self._release(target, other, other == queue)

    def _release(self, node: int, queue: int, is_own: bool) -> None:
        """Push a node that waits no more, if it is the next of another queue than the last's."""
        if not is_own and self._graph.queues[queue].nodes[self._position[queue]] == node:
            self._push(node, queue)

    def _seen(self, node: int) -> tuple[float, float, float]:
        """Return when its own queue sees the result, when others do, and when it has read."""
        visible = self._visible[node]
        if self._data_end[node] != 0.0:
            return visible, visible, visible
        semaphore = self._chip.semaphore_ns
        return visible, visible + semaphore, self._busy_end[node] + semaphore

    def _advance(self, node: int, queue: int) -> None:
        """Let the queue of a node that has started go on."""
        start, position = self._start[node], self._position
        position[queue] += 1
        if self._queue_time[queue] < start:
            self._queue_time[queue] = start
        nodes = self._graph.queues[queue].nodes
        if position[queue] < len(nodes):
            following = nodes[position[queue]]
            if not self._waits[following]:
                if self._queue_time[queue] > self._ready[following]:
                    self._cause[following] = node
                self._push(following, queue)

    def _push(self, node: int, queue: int) -> None:
        heapq.heappush(self._heap, (max(self._ready[node], self._queue_time[queue]), node))

    def _explain_stall(self, left: int) -> None:
        waiting = ", ".join(str(key) for key in self._arrived) or "no meeting"
        raise ValueError(
            f"{left} instructions wait in a circle (waiting at: {waiting}). Let the partners meet "
            "in the same order, and remove explicit dependencies on later instructions."
        )


def _steps(
    prices: list[Price], prepared: Prepared, options: TimelineOptions
) -> list[Price | EdgePrice]:
    """Return the prices, with iterations of dynamic loops as meetings of queues where they are."""
    steps: list[Price | EdgePrice] = list(prices)
    if options.model.loop_edge != "free":
        for number, (_, _, facts) in enumerate(prepared.kinds):
            price = prices[number]
            is_iteration = isinstance(facts, tr.ControlFacts) and facts.kind == "loop_iteration"
            if is_iteration and isinstance(price, ComputePrice):
                steps[number] = EdgePrice(price.latency_ns)
    return steps


def _partners(
    prices: list[Price], pairs: NDArray[np.int64], facts: list[tr.Facts]
) -> dict[int, tuple[tuple[object, ...], int]]:
    """Return for every pair that is a meeting its key and how many records carry that key."""
    counts = np.bincount(pairs, minlength=len(prices)).tolist()
    total: dict[tuple[object, ...], int] = {}
    found = {}
    for pair, (price, fact) in enumerate(zip(prices, facts, strict=True)):
        if isinstance(price, MeetingPrice) and isinstance(fact, tr.SyncFacts):
            total[fact.key] = total.get(fact.key, 0) + counts[pair]
            found[pair] = (fact.key, fact.partners)
    for key, partners in found.values():
        if total[key] != partners:
            raise ValueError(
                f"meeting {key}: {total[key]} of {partners} partners take part. Let every core or "
                "rank that it names reach it exactly once."
            )
    return found
