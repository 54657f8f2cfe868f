"""Play a trace on a chip: when every instruction starts, ends, and what it waited for.

A discrete-event simulation in time order. A queue hands out its instructions in program order; the
head starts when its producers are done and its engine is free. Data movements are triggered in
order, then share 16 DMA engines and, with the other core of the pair, the HBM stack. Costs come
from costs.py, waits from dependencies.py.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from nki_sim import trace as tr
from nki_sim.hardware import Hardware
from nki_sim.time.costs import (
    ComputePrice,
    DmaPrice,
    MatmulPrice,
    MeetingPrice,
    price_compute,
    price_control,
    price_dma,
    price_matmul,
    price_meeting,
)
from nki_sim.time.dependencies import DONE, Graph, build, pair_ids
from nki_sim.time.engines import Array, DmaEngines, HbmStack
from nki_sim.trace import Trace

Price = ComputePrice | MatmulPrice | DmaPrice | MeetingPrice

# Resources of a core: the five engines by their trace numbers, then descriptor generators.
_DGE_SYNC: Final = 5
_DGE_SCALAR: Final = 6
_DGE_AUTO: Final = 7
_NUM_RESOURCES: Final = 8
_NAMED_QUEUES: Final = frozenset({"hwdge-sync", "hwdge-scalar"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineOptions:
    """How a trace is timed.

    Attributes:
        dma_rule: "runs" prices a transfer by its runs and bytes (several queues at work),
            "single_queue" by the latency of each descriptor, "auto" decides per core: a single
            queue if the kernel gives all transfers to the hardware generator of one engine.
        clock_ramp: whether the tensor engine has to warm up.
        reuse: "late" places tensors without an address round and round, so that loads run as far
            ahead as memory allows; "early" gives each the lowest free place, so that a new tile
            waits for the last users of the one before.
    """

    dma_rule: Literal["auto", "runs", "single_queue"] = "auto"
    clock_ramp: bool = True
    reuse: Literal["late", "early"] = "late"


@dataclass(slots=True)
class Schedule:
    """The times of every node of a graph, in ns.

    `start` is when a node takes its engine (a transfer: when it is triggered), `busy_end` when the
    engine is free again, `visible` when others may use the result. `data_start` and `data_end`
    bound the bytes of a transfer on the wire. `path_start` and `cause` lead back along what
    determined the time: a node holds the critical path from `path_start` on, before that its cause
    does (-1: nothing, it could start at once).
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


def queue_and_price(op: str, engine: int, facts: tr.Facts, chip: Hardware) -> tuple[str, Price]:
    """Return the queue and the price of all instructions that share these facts."""
    if isinstance(facts, tr.MatmulFacts):
        return "tensor", price_matmul(facts, chip)
    if isinstance(facts, tr.DmaFacts):
        dma = price_dma(facts, chip)
        way = {"none": "static", "hwdge": f"hwdge-{facts.queue or 'any'}"}.get(dma.dge, dma.dge)
        direction = "store" if facts.dst_space == tr.HBM else "load"
        # A transfer whose address is computed waits for the computation; it must not hold up the
        # others.
        return f"{way}-{direction}{'-dynamic' if facts.registers else ''}", dma
    if isinstance(facts, tr.SyncFacts):
        own = engine < tr.DMA and facts.kind == "core_barrier"
        return tr.ENGINE_NAMES[engine] if own else "exchange", price_meeting(facts, chip)
    if isinstance(facts, tr.ControlFacts):
        is_loop = facts.kind.startswith("loop")
        name = tr.ENGINE_NAMES[engine if engine < tr.DMA else tr.SYNC]
        return "" if is_loop else name, price_control(facts, chip)
    return tr.ENGINE_NAMES[engine], price_compute(op, engine, facts, chip)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What of a trace does not depend on the speed of the chip, so that it can be played often.

    `pair` numbers the distinct (operation, engine, facts) of the instructions; `kinds` holds these,
    one per number.
    """

    graph: Graph
    pair: NDArray[np.int64]
    kinds: list[tuple[str, int, tr.Facts]]


def prepare(trace: Trace, chip: Hardware, options: TimelineOptions) -> Prepared:
    """Sort a trace into queues and find who waits for whom.

    Of the chip only the generation and the sizes of its memories matter here, of the options only
    the placement of tensors.
    """
    columns = trace.columns()
    pair, samples = pair_ids(columns)
    kinds = []
    for index in samples.tolist():
        row = columns[index]
        kinds.append((trace.ops[row[tr.OP]], int(row[tr.ENGINE]), trace.facts[row[tr.FACTS]]))
    names = [queue_and_price(*kind, chip)[0] for kind in kinds]
    return Prepared(build(trace, chip, names, options.reuse == "late"), pair, kinds)


def prices_of(prepared: Prepared, chip: Hardware) -> list[Price]:
    """Return the price of every kind of instruction."""
    return [queue_and_price(*kind, chip)[1] for kind in prepared.kinds]


def play(prepared: Prepared, chip: Hardware, options: TimelineOptions) -> Schedule:
    """Time every instruction.

    Raises:
        ValueError: some instructions can never start, because a partner of a meeting is missing or
            the waits form a circle.
    """
    return _Player(prepared, chip, options).play()


@dataclass(slots=True)
class _CoreState:
    """What the engines of one core are doing."""

    array: Array
    dma: DmaEngines
    single_queue: bool
    free: list[float] = field(default_factory=lambda: [0.0] * _NUM_RESOURCES)
    user: list[int] = field(default_factory=lambda: [-1] * _NUM_RESOURCES)
    table: str = ""
    table_loads: int = 0


class _Player:
    """The simulation; one instance per run."""

    def __init__(self, prepared: Prepared, chip: Hardware, options: TimelineOptions) -> None:
        graph, pairs = prepared.graph, prepared.pair
        prices = prices_of(prepared, chip)
        self._chip = chip
        self._graph = graph
        self._prices = prices
        count = len(graph.instruction)
        instruction = np.array(graph.instruction, dtype=np.int64)
        self._pair = pairs[instruction] if count else pairs
        self._start = [0.0] * count
        self._busy_end = [0.0] * count
        self._visible = [0.0] * count
        self._data_start = [0.0] * count
        self._data_end = [0.0] * count
        self._path_start = [0.0] * count
        self._cause = [-1] * count
        self._ready = [0.0] * count
        self._waits = list(graph.waits)
        self._position = [0] * len(graph.queues)
        self._queue_time = [0.0] * len(graph.queues)
        self._heap: list[tuple[float, int]] = []
        self._cores = self._make_cores(options)
        facts = [kind[2] for kind in prepared.kinds]
        self._meetings = _partners(prices, pairs, facts)
        self._arrived: dict[tuple[object, ...], list[tuple[float, int]]] = {}

    def _make_cores(self, options: TimelineOptions) -> list[_CoreState]:
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
                _CoreState(
                    array=Array(chip, options.clock_ramp),
                    dma=DmaEngines(chip, stacks.get(rank)),
                    single_queue=one if rule == "auto" else rule == "single_queue",
                )
            )
        return cores

    def play(self) -> Schedule:
        """Run until every node has its times."""
        graph = self._graph
        pair, queue_of = self._pair.tolist(), graph.queue
        core_of_queue = [queue.core for queue in graph.queues]
        names = [queue.name for queue in graph.queues]
        for head in graph.queues:
            if not graph.waits[head.nodes[0]]:
                heapq.heappush(self._heap, (0.0, head.nodes[0]))
        left = len(graph.instruction)
        while self._heap:
            now, node = heapq.heappop(self._heap)
            price = self._prices[pair[node]]
            queue = queue_of[node]
            core = self._cores[core_of_queue[queue]]
            if type(price) is MatmulPrice:
                self._matmul(now, node, price, core)
            elif type(price) is ComputePrice:
                if not self._compute(now, node, price, core, names[queue]):
                    continue
            elif type(price) is DmaPrice:
                if not self._dma(now, node, price, core, names[queue]):
                    continue
            elif type(price) is MeetingPrice:
                engine = tr.ENGINE_NAMES.index(names[queue]) if names[queue] != "exchange" else -1
                if engine < 0 or self._take(engine, now, node, core):
                    left -= self._meet(now, node, price)
                continue
            left -= 1
            self._release(node, queue)
        if left:
            self._explain_stall(left)
        return Schedule(
            graph=graph,
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
        )

    def _take(self, resource: int, now: float, node: int, core: _CoreState) -> bool:
        """Return whether an engine is free now; else try again when it is."""
        free = core.free[resource]
        if free <= now:
            return True
        self._cause[node] = core.user[resource]
        heapq.heappush(self._heap, (free, node))
        return False

    def _compute(
        self, now: float, node: int, price: ComputePrice, core: _CoreState, queue: str
    ) -> bool:
        """Run a Vector, Scalar, GpSimd or Sync instruction, or the step of a loop."""
        engine = tr.ENGINE_NAMES.index(queue) if queue in tr.ENGINE_NAMES else -1
        if engine >= 0:
            if not self._take(engine, now, node, core):
                return False
            if price.table and price.table != core.table:
                # The load needs no operand: it runs as soon as the engine is free.
                core.table = price.table
                core.table_loads += 1
                loaded = max(core.free[engine] + self._chip.table_load_ns, now)
                if loaded > now:
                    self._cause[node] = core.user[engine]
                    core.free[engine] = loaded
                    heapq.heappush(self._heap, (loaded, node))
                    return False
            core.free[engine] = now + price.occupancy_ns
            core.user[engine] = node
        else:
            self._queue_time[self._graph.queue[node]] = now + price.occupancy_ns
        self._set(node, now, now + price.occupancy_ns, now + price.latency_ns)
        return True

    def _matmul(self, now: float, node: int, price: MatmulPrice, core: _CoreState) -> None:
        """Run a matmul on the array."""
        held = bool(self._graph.keeps_stationary[node] and self._chip.stationary_reuse_skips_load)
        begin, end = core.array.run(now, price, loads=not held)
        self._set(node, begin, end, end + price.drain_ns)
        if begin > now:
            self._cause[node] = core.user[tr.TENSOR]
        core.user[tr.TENSOR] = node

    def _dma(self, now: float, node: int, price: DmaPrice, core: _CoreState, queue: str) -> bool:
        """Trigger a transfer and put its bytes on the DMA engines."""
        chip = self._chip
        resource = -1
        if price.dge == "swdge":
            resource = tr.GPSIMD
        elif price.dge == "auto":
            resource = _DGE_AUTO
        elif price.dge == "hwdge":
            resource = _DGE_SCALAR if queue.startswith("hwdge-scalar") else _DGE_SYNC
            if queue.startswith("hwdge-any") and core.free[_DGE_SCALAR] < core.free[_DGE_SYNC]:
                resource = _DGE_SCALAR
        if resource >= 0:
            if not self._take(resource, now, node, core):
                return False
            core.free[resource] = now + price.generator_ns
            core.user[resource] = node
        else:
            self._queue_time[self._graph.queue[node]] = now + price.generator_ns
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
        key, partners = self._meetings[int(self._pair[node])]
        arrived = self._arrived.setdefault(key, [])
        arrived.append((now, node))
        if len(arrived) < partners:
            return 0
        del self._arrived[key]
        last_arrival, last = arrived[-1]
        end = last_arrival + price.duration_ns
        for _, partner in arrived:
            # Waiting for the others keeps an engine from its queue but is not counted as work.
            self._set(partner, last_arrival, end, end)
            if partner != last:
                self._cause[partner] = last
            queue = self._graph.queue[partner]
            core = self._cores[self._graph.queues[queue].core]
            name = self._graph.queues[queue].name
            if name in tr.ENGINE_NAMES:
                engine = tr.ENGINE_NAMES.index(name)
                core.free[engine] = max(core.free[engine], end)
                core.user[engine] = partner
            self._queue_time[queue] = end
        for _, partner in arrived:
            self._release(partner, self._graph.queue[partner])
        return len(arrived)

    def _set(self, node: int, start: float, busy_end: float, visible: float) -> None:
        self._start[node] = start
        self._path_start[node] = start
        self._busy_end[node] = busy_end
        self._visible[node] = visible

    def _release(self, node: int, queue: int) -> None:
        """Tell the waiting nodes, and let the queue go on."""
        graph, ready, waits = self._graph, self._ready, self._waits
        queues, position, queue_time = graph.queues, self._position, self._queue_time
        visible = self._visible[node]
        done = visible
        if self._data_end[node] == 0.0:
            done = self._busy_end[node]
            visible_elsewhere = visible + self._chip.semaphore_ns
            done_elsewhere = done + self._chip.semaphore_ns
        else:
            visible_elsewhere = done_elsewhere = visible
        start = self._start[node]
        position[queue] += 1
        if queue_time[queue] < start:
            queue_time[queue] = start
        for edge in graph.targets[graph.first[node] : graph.first[node + 1]]:
            target = edge >> 1
            other = graph.queue[target]
            if other == queue:
                time = visible
            else:
                time = done_elsewhere if edge & 1 == DONE else visible_elsewhere
            if time > ready[target]:
                ready[target] = time
                self._cause[target] = node
            waits[target] -= 1
            if not waits[target]:
                nodes = queues[other].nodes
                if nodes[position[other]] == target and other != queue:
                    self._push(target, other)
        nodes = queues[queue].nodes
        if position[queue] < len(nodes):
            following = nodes[position[queue]]
            if not waits[following]:
                if queue_time[queue] > ready[following]:
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
