"""Who waits for whom: the graph that a schedule has to respect.

Every core has queues: one per engine, and for data movements one per way of triggering
them and direction, so that a store that waits for its data does not hold back the loads behind it
(the compiler orders them that way). Between queues an instruction waits for the last writers of
what it reads (RAW) and for the last writers and readers of what it overwrites (WAW, WAR), found by
region. Cores do not see each other's accesses: the hardware orders cores through barriers and
exchanges only.

Where queues are in order, that order implies the rest. A graph for queues that may reorder keeps
more: all readers instead of the last of each queue, and edges inside a queue, of which a `DONE`
edge requires the order of issue only. It cannot know what the record does not hold: accumulator
registers carried over several instructions, `nl.no_reorder`, and registers of other engines.

Building takes a few microseconds per instruction: regions are interned, storages that nobody writes
are left out, which regions overlap is found once for each, and in a memory of many regions one that
is overwritten as a whole is forgotten, so that the set to search stays small.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nki_sim import trace as tr
from nki_sim.hardware import Hardware
from nki_sim.time.placement import Ring
from nki_sim.time.regions import Rectangle, covers, rectangles
from nki_sim.trace import Trace

VISIBLE: Final = 0
DONE: Final = 1
"""What an edge waits for: the result being visible, or the operands having been read.

Inside a queue the latter is the case as soon as the source has been issued.
"""

_FEW: Final = 16  # regions of a memory below which NumPy does not pay
_MANY: Final = 1024  # above, overlaps are not kept for every region


@dataclass(slots=True)
class Queue:
    """One in-order stream of one core and the nodes it runs.

    Transfers take the rings of their way of triggering in turn, which share its name.
    """

    name: str
    core: int
    nodes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Graph:
    """Nodes, their queues, and the edges between them.

    Node i below the number of instructions is instruction i; further nodes repeat the steps of
    dynamic loops, which every queue of the core takes. `core` numbers (rank, core) pairs as in
    `cores`. Edges are stored by
    source: targets[first[i] : first[i + 1]] holds 2 * node + kind. `keeps_stationary` marks the
    matmuls whose stationary tile is the one their array part already holds. A graph for queues that
    reorder has instead the id of the contents of each node's stationary tile (-1: no matmul) and,
    by that id, the array part it is loaded into. `unplaced` counts the tensors for which there was
    no room.
    """

    cores: list[tuple[int, int]]
    queues: list[Queue]
    instruction: array[int]
    queue: array[int]
    waits: array[int]
    first: NDArray[np.int64]
    targets: array[int]
    keeps_stationary: bytearray
    unplaced: int = 0
    stationary: array[int] = field(default_factory=lambda: array("i"))
    stationary_parts: list[tuple[int, ...]] = field(default_factory=list)


def build(
    trace: Trace,
    chip: Hardware,
    queue_names: list[str],
    goes_round: bool = True,
    reorders: bool = False,
) -> Graph:
    """Build the graph of a trace.

    Args:
        trace: the record of a run.
        chip: the record of the chip, for the sizes of its memories.
        queue_names: for every id of `pair_ids`, the queue of its instructions; empty for the steps
            of dynamic loops, which all queues take.
        goes_round: whether new tensors on chip take the next place or the lowest (placement.py).
        reorders: whether the instructions of a queue may change places.
    """
    columns = trace.columns()
    operands, first = trace.operand_ids()
    pairs, _ = pair_ids(columns)
    core_keys = columns[:, tr.RANK].astype(np.int64) * 4096 + columns[:, tr.CORE]
    keys = np.unique(core_keys)
    regions = _Regions(trace, operands, columns)
    graph = Graph(
        cores=[(int(key) // 4096, int(key) % 4096) for key in keys],
        queues=[],
        instruction=array("i", range(len(trace))),
        queue=array("i", bytes(4 * len(trace))),
        waits=array("i", bytes(4 * len(trace))),
        first=np.zeros(1, dtype=np.int64),
        targets=array("i"),
        keeps_stationary=bytearray(len(trace)),
        stationary=array("i", [-1]) * len(trace) if reorders else array("i"),
    )
    edges = _Edges()
    for number, key in enumerate(keys):
        stream = np.flatnonzero(core_keys == key)
        kind = _Reordering if reorders else _Core
        builder = kind(trace, chip, graph, regions, edges, number, goes_round)
        builder.run(stream, pairs, queue_names, columns, operands, first)
    for node, after in trace.after.items():
        for producer in after:
            edges.add(producer, node, VISIBLE)
    edges.pack(graph)
    return graph


def pair_ids(columns: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number the distinct (operation, engine, facts) of a trace.

    Returns:
        The number of each instruction, and one instruction index per number.
    """
    key = columns[:, tr.FACTS].astype(np.int64)
    key = (key * 8 + columns[:, tr.ENGINE]) * 4096 + columns[:, tr.OP]
    _, index, inverse = np.unique(key, return_index=True, return_inverse=True)
    return inverse.astype(np.int64), index.astype(np.int64)


class _Edges:
    """Edges as they are found, one integer each: source, target, kind from high to low bits."""

    __slots__ = ("append", "packed")

    def __init__(self) -> None:
        self.packed = array("q")
        self.append = self.packed.append

    def add(self, source: int, target: int, kind: int) -> None:
        self.append(source << 32 | target << 1 | kind)

    def pack(self, graph: Graph) -> None:
        """Sort by source into the graph, dropping repetitions, and count the waits of each node."""
        count = len(graph.instruction)
        packed = np.sort(np.frombuffer(self.packed, dtype=np.int64))
        # Sorting is several times as fast as np.unique, which hashes.
        packed = packed[np.concatenate(([True], packed[1:] != packed[:-1]))[: len(packed)]]
        source, target = packed >> 32, (packed & 0xFFFFFFFF).astype(np.int32)
        graph.first = np.searchsorted(source, np.arange(count + 1))
        graph.targets = array("i", target.tobytes())
        waits = np.bincount(target >> 1, minlength=count).astype(np.int32)
        graph.waits = array("i", waits.tobytes())


class _Regions:
    """The distinct rectangles of a trace, and where to look for overlap."""

    __slots__ = (
        "_corners",
        "big",
        "dense",
        "members",
        "memory",
        "of_range",
        "overlaps",
        "rectangle",
        "storage",
        "written",
    )

    def __init__(self, trace: Trace, operands: NDArray[np.int32], columns: NDArray[np.int32]):
        memories, shapes = rectangles(trace)
        known: dict[tuple[int, Rectangle, bool], int] = {}
        self.of_range: list[int] = []
        self.memory: list[int] = []
        self.rectangle: list[Rectangle] = []
        self.storage: list[int] = []
        self.dense: list[bool] = []
        for memory, shape, item in zip(memories, shapes, trace.ranges, strict=True):
            on_chip = trace.storages[item.storage].space != tr.HBM
            dense = not (item.rows or (on_chip and item.dims))
            key = (memory, shape, dense)
            region = known.get(key)
            if region is None:
                region = known[key] = len(self.memory)
                self.memory.append(memory)
                self.rectangle.append(shape)
                self.storage.append(item.storage)
                self.dense.append(dense)
            self.of_range.append(region)
        self.written = self._written(trace, operands, columns)
        self.members: dict[int, list[int]] = {}
        for region, memory in enumerate(self.memory):
            if memory in self.written:
                self.members.setdefault(memory, []).append(region)
        self.overlaps: list[list[int] | None] = [None] * len(self.memory)
        self._corners: dict[int, NDArray[np.int64]] = {}
        self.big = self._buckets()

    def find_overlaps(self, region: int) -> list[int]:
        """Return all regions that overlap one, itself included, and keep the answer."""
        memory = self.memory[region]
        members = self.members[memory]
        if len(members) <= _FEW:
            shape_of = self.rectangle
            line0, line1, byte0, byte1 = shape_of[region]
            near = self.overlaps[region] = []
            for member in members:
                shape = shape_of[member]
                if shape[2] < byte1 and byte0 < shape[3] and shape[0] < line1 and line0 < shape[1]:
                    near.append(member)
            return near
        corners = self._corners.get(memory)
        if corners is None:
            shapes = [self.rectangle[member] for member in members]
            corners = self._corners[memory] = np.array(shapes, dtype=np.int64).T
        line0, line1, byte0, byte1 = self.rectangle[region]
        lines = (corners[0] < line1) & (line0 < corners[1])
        meets = np.flatnonzero(lines & (corners[2] < byte1) & (byte0 < corners[3]))
        found = self.overlaps[region] = [members[place] for place in meets.tolist()]
        return found

    def _written(
        self, trace: Trace, operands: NDArray[np.int32], columns: NDArray[np.int32]
    ) -> set[int]:
        """Return the memories that any instruction writes; the others order nothing."""
        counts = columns[:, tr.NUM_READS : tr.NUM_WRITES + 1].reshape(-1)
        is_write = np.repeat(np.tile([False, True], len(columns)), counts)
        return {self.memory[self.of_range[i]] for i in np.unique(operands[is_write]).tolist()}

    def _buckets(self) -> dict[int, tuple[int, int, int]]:
        """Return (axis, origin, step) for the memories with many regions."""
        big = {}
        for memory, members in self.members.items():
            if len(members) <= _MANY:
                continue
            shapes = [self.rectangle[member] for member in members]
            axis = max((0, 2), key=lambda side: len({shape[side] for shape in shapes}))
            low = min(shape[axis] for shape in shapes)
            high = max(shape[axis + 1] for shape in shapes)
            big[memory] = (axis, low, max(1, (high - low) // min(1024, len(shapes))))
        return big


class _Core:
    """Finds the edges of one core's stream.

    Of the readers of a region the last of each queue is known, and order inside a queue is implied.
    """

    _keeps_all = False

    def __init__(
        self,
        trace: Trace,
        chip: Hardware,
        graph: Graph,
        regions: _Regions,
        edges: _Edges,
        number: int,
        goes_round: bool,
    ) -> None:
        self._goes_round = goes_round
        self._trace = trace
        self._chip = chip
        self._graph = graph
        self._regions = regions
        self._edges = edges
        self._number = number
        self._own_queues: list[int] = []
        self._tensor_queue = -1
        self._overlaps = regions.overlaps
        self._append = edges.append
        self._writer: dict[int, int] = {}
        self._readers: dict[int, dict[int, int]] = {}
        self._active: dict[tuple[int, int], set[int]] = {}
        self._users: dict[int, dict[int, int]] = {}
        self._births: dict[int, list[int]] = {}
        self._keys: dict[int, list[tuple[int, int]]] = {}
        self._stationary: dict[tuple[int, ...], tuple[int, int]] = {}
        self._register_load = -1
        self._overwritten: set[int] = set()

    def run(
        self,
        stream: NDArray[np.int64],
        pairs: NDArray[np.int64],
        queue_names: list[str],
        columns: NDArray[np.int32],
        operands: NDArray[np.int32],
        first: NDArray[np.int64],
    ) -> None:
        """Walk the stream in program order."""
        graph, trace, chip = self._graph, self._trace, self._chip
        turns: dict[str, itertools.cycle[int]] = {}
        for name in dict.fromkeys(queue_names[pair] for pair in np.unique(pairs[stream]).tolist()):
            if name:
                count = chip.dma_rings if name.endswith(("-load", "-store")) else 1
                own = range(len(graph.queues), len(graph.queues) + count)
                graph.queues.extend(Queue(name, self._number) for _ in own)
                self._own_queues.extend(own)
                turns[name] = itertools.cycle(own)
                if name == "tensor":
                    self._tensor_queue = own[0]
        ring, on_chip = self._lifetimes(stream, columns, operands, first)
        of_range, memory_of = self._regions.of_range, self._regions.memory
        written, unborn, read, write = self._regions.written, set(on_chip), self._read, self._write
        facts_of = columns[:, tr.FACTS].tolist()
        reads_of = columns[:, tr.NUM_READS].tolist()
        pair_of, begin_of, operand = pairs.tolist(), first.tolist(), operands.tolist()
        for index in stream.tolist():
            name = queue_names[pair_of[index]]
            facts = trace.facts[facts_of[index]]
            if not name:
                self._loop_step(index, facts)
                continue
            queue = next(turns[name])
            graph.queue[index] = queue
            graph.queues[queue].nodes.append(index)
            begin, end = begin_of[index], begin_of[index + 1]
            middle = begin + reads_of[index]
            version = -1
            for position in range(begin, end):
                region = of_range[operand[position]]
                memory = memory_of[region]
                if memory in unborn:
                    unborn.discard(memory)
                    self._birth(memory, index, ring, on_chip[memory])
                if memory not in written:
                    continue
                if position < middle:
                    writer = read(index, queue, region, memory)
                    if position == begin:
                        version = writer
                else:
                    write(index, queue, region, memory)
            if queue == self._tensor_queue and middle > begin:
                self._load_stationary(index, of_range[operand[begin]], version, facts)
            elif isinstance(facts, tr.ControlFacts):
                self._use_register(index, queue)
                if facts.kind == "register_load":
                    self._register_load = index

    def _lifetimes(
        self,
        stream: NDArray[np.int64],
        columns: NDArray[np.int32],
        operands: NDArray[np.int32],
        first: NDArray[np.int64],
    ) -> tuple[dict[int, Ring], dict[int, int]]:
        """Return the rings of this core and the last access of each tensor they have to hold."""
        trace, chip = self._trace, self._chip
        counts = (first[stream + 1] - first[stream]).astype(np.int64)
        at = np.repeat(first[stream], counts) + _ramp(counts)
        storage_of = np.array([item.storage for item in trace.ranges], dtype=np.int64)
        touched = storage_of[operands[at]]
        last = np.full(len(trace.storages), -1, dtype=np.int64)
        np.maximum.at(last, touched, np.repeat(stream, counts))
        on_chip = {}
        reserved = {tr.SBUF: 0, tr.PSUM: 0}
        for storage in np.unique(touched).tolist():
            record = trace.storages[storage]
            if record.space == tr.HBM:
                continue
            if record.address is None:
                on_chip[storage] = int(last[storage])
            else:
                top = record.address[1] + record.size_bytes
                reserved[record.space] = max(reserved[record.space], top)
        bank = chip.psum_bank_bytes
        psum = chip.psum_banks * bank - -(-reserved[tr.PSUM] // bank) * bank
        sbuf = chip.sbuf_usable_bytes_per_partition - reserved[tr.SBUF]
        rings = {
            tr.SBUF: Ring(max(0, sbuf), 1, self._goes_round),
            tr.PSUM: Ring(max(0, psum), bank, self._goes_round),
        }
        return rings, on_chip

    def _birth(self, storage: int, index: int, rings: dict[int, Ring], last_use: int) -> None:
        """Place a tensor at its first access; note whose last accesses it has to wait for."""
        record = self._trace.storages[storage]
        previous = rings[record.space].place(storage, record.size_bytes, index, last_use)
        waits: list[int] = []
        if previous is None:
            self._graph.unplaced += 1
        else:
            for owner in previous:
                waits.extend(self._users_of(owner))
        self._births[storage] = waits

    def _users_of(self, memory: int) -> Iterable[int]:
        """Return the accesses that whoever takes over the bytes of a dead tensor waits for."""
        return self._users.get(memory, {}).values()

    def _use_register(self, index: int, queue: int) -> None:
        """Note an instruction of an engine that sets or reads a register."""

    def _buckets_of(self, region: int, memory: int) -> list[tuple[int, int]]:
        """Return the keys under which a region is found."""
        known = self._keys.get(region)
        if known is None:
            axis, origin, step = self._regions.big[memory]
            shape = self._regions.rectangle[region]
            low = (shape[axis] - origin) // step
            high = (shape[axis + 1] - 1 - origin) // step
            known = [(memory, bucket) for bucket in range(low, high + 1)]
            self._keys[region] = known
        return known

    def _others(self, region: int, memory: int) -> list[int]:
        """Return the known regions that overlap, the region itself included, and make it known."""
        if memory not in self._regions.big:
            return self._regions.find_overlaps(region)
        keys = self._buckets_of(region, memory)
        active = self._active
        found = {region}
        rectangle = self._regions.rectangle
        line0, line1, byte0, byte1 = rectangle[region]
        for key in keys:
            members = active.get(key)
            if members is None:
                active[key] = {region}
                continue
            for other in members:
                shape = rectangle[other]
                if shape[2] < byte1 and byte0 < shape[3] and shape[0] < line1 and line0 < shape[1]:
                    found.add(other)
            members.add(region)
        return list(found)

    def _read(self, index: int, queue: int, region: int, memory: int) -> int:
        """Add the edges of a read; return the last instruction that wrote any of it, or -1."""
        writers, queue_of, keeps_all = self._writer, self._graph.queue, self._keeps_all
        accumulates = queue == self._tensor_queue
        latest = -1
        for other in self._overlaps[region] or self._others(region, memory):
            writer = writers.get(other, -1)
            if writer < 0:
                continue
            if writer > latest:
                latest = writer
            if writer == index:
                continue
            # Matmuls accumulate in order without waiting for each other.
            if not (accumulates and queue_of[writer] == queue):
                self._append(writer << 32 | index << 1)
            elif keeps_all:
                self._append(writer << 32 | index << 1 | DONE)
        readers = self._readers.get(region)
        reader = index if keeps_all else queue
        if readers is None or region in self._overwritten:
            self._overwritten.discard(region)
            self._readers[region] = {reader: index}
        else:
            readers[reader] = index
        self._use(memory, queue, index)
        return latest

    def _write(self, index: int, queue: int, region: int, memory: int) -> None:
        """Add the edges of a write and forget what it overwrote."""
        writers, readers, queue_of = self._writer, self._readers, self._graph.queue
        keeps_all, fresh = self._keeps_all, True
        for other in self._overlaps[region] or self._others(region, memory):
            writer = writers.get(other, -1)
            if writer >= 0:
                fresh = False
                if queue_of[writer] != queue:
                    self._append(writer << 32 | index << 1)
                elif keeps_all and writer != index:
                    self._append(writer << 32 | index << 1 | DONE)
            reading = readers.get(other)
            if reading:
                fresh = False
                for reader in reading.values():
                    if reader != index and (keeps_all or queue_of[reader] != queue):
                        self._append(reader << 32 | index << 1 | DONE)
            if other == region:
                if reading:
                    reading.clear()
            else:
                if keeps_all and reading:
                    self._overwritten.add(other)
                if self._regions.dense[region]:
                    self._forget(region, other, memory)
        if fresh:
            for user in self._births.get(memory, ()):
                if keeps_all or queue_of[user] != queue:
                    self._append(user << 32 | index << 1 | DONE)
        writers[region] = index
        self._use(memory, queue, index)

    def _use(self, memory: int, queue: int, index: int) -> None:
        """Note the last access of every queue to a tensor that has been placed."""
        users = self._users.get(memory)
        if users is None:
            self._users[memory] = {queue: index}
        else:
            users[queue] = index

    def _forget(self, region: int, other: int, memory: int) -> None:
        """Drop a region that a write to `region` covers."""
        rectangle = self._regions.rectangle
        if covers(rectangle[region], rectangle[other]):
            self._writer.pop(other, None)
            self._readers.pop(other, None)
            if memory in self._regions.big:
                for key in self._buckets_of(other, memory):
                    self._active[key].discard(other)

    def _load_stationary(self, index: int, region: int, version: int, facts: tr.Facts) -> None:
        """Note whether the array already holds this stationary tile."""
        tile = facts.tile if isinstance(facts, tr.MatmulFacts) else ()
        held = (region, version)
        if self._stationary.get(tile) == held:
            self._graph.keeps_stationary[index] = 1
        elif not tile:
            self._stationary.clear()
        else:
            self._stationary.pop((), None)
        self._stationary[tile] = held

    def _loop_step(self, index: int, facts: tr.Facts) -> None:
        """Give every queue of the core its own node for a step of a dynamic loop."""
        graph = self._graph
        own = True
        for queue in self._own_queues:
            node = index
            if not own:
                node = len(graph.instruction)
                graph.instruction.append(index)
                graph.queue.append(queue)
                graph.waits.append(0)
                if graph.stationary:
                    graph.stationary.append(-1)
            own = False
            graph.queue[node] = queue
            graph.queues[queue].nodes.append(node)
            if self._register_load >= 0:
                self._edges.add(self._register_load, node, VISIBLE)


class _Reordering(_Core):
    """Finds the edges of a core whose queues may issue out of order.

    The readers of a region are all kept, by themselves instead of by queue, until a write to the
    same region clears them. A write that only overlaps leaves them, but marks the region: whoever
    reads it next waits for that write, hence comes after them, and takes their place.
    """

    _keeps_all = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._register_users: dict[int, int] = {}
        self._contents: dict[tuple[tuple[int, ...], int, int], int] = {}

    def _use(self, memory: int, queue: int, index: int) -> None:
        """Note nothing: `_users_of` finds every reader and writer."""

    def _users_of(self, memory: int) -> Iterable[int]:
        """Return the readers of every region since its last write, and the writers of the rest."""
        found: set[int] = set()
        for region in self._regions.members.get(memory, ()):
            readers = self._readers.get(region)
            if readers:
                found.update(readers)
            elif region in self._writer:
                found.add(self._writer[region])
        return found

    def _use_register(self, index: int, queue: int) -> None:
        """Keep the users of registers of an engine in order."""
        before = self._register_users.get(queue, -1)
        if before >= 0:
            self._edges.add(before, index, DONE)
        self._register_users[queue] = index

    def _load_stationary(self, index: int, region: int, version: int, facts: tr.Facts) -> None:
        """Number the contents of the stationary tile; who holds what is known when it is played."""
        tile = facts.tile if isinstance(facts, tr.MatmulFacts) else ()
        key = (tile, region, version)
        number = self._contents.get(key)
        if number is None:
            number = self._contents[key] = len(self._graph.stationary_parts)
            self._graph.stationary_parts.append(tile)
        self._graph.stationary[index] = number


def _ramp(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0 .. count-1 for every count, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
