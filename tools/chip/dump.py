"""The compiler's own dump of a program, read into the record of a run.

`--internal-print-after=lower_sync` makes neuronx-cc leave a JSON for each core: instructions of
each engine in their order, allocations with addresses, semaphores, queues of transfers (its form is
known from a public test of a kernel library alone). Order, addresses and who waits for whom are the
compiler's then, prices are ours: `schedule(dump.trace).total_us` stands beside our estimate.

What is not in a dump is not guessed: the body of a dynamic loop is read once; an engine or a kind
of memory that is not known is named.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nki_sim import trace as tr
from nki_sim.trace import (
    ComputeFacts,
    ControlFacts,
    DmaFacts,
    Facts,
    MatmulFacts,
    MemoryRange,
    Storage,
    Trace,
)

PATTERN: Final = "bir_debug.*after-lower_sync*.json"
_ENGINES: Final = {
    "PE": tr.TENSOR,
    "Activation": tr.SCALAR,
    "Act": tr.SCALAR,
    "DVE": tr.VECTOR,
    "Pool": tr.GPSIMD,
    "SP": tr.SYNC,
    "ALL": tr.ALL,
}
_SPACES: Final = {"SB": tr.SBUF, "PSUM": tr.PSUM, "DRAM": tr.HBM}
_BANK_BYTES: Final = 2048
_BYTES: Final = {"8": 1, "16": 2, "32": 4}
_BARRIER, _RESET = "AllEngineBarrier", "GroupResetSemaphores"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What a compiler made of a kernel, on all its cores.

    Attributes:
        trace: its instructions, in the compiler's order, at its addresses.
        queues: transfers by the name of their queue.
        semaphores: how many are waited for.
        waits: how often an instruction waits for one.
        sbuf_bytes: of a partition, up to the highest address in use.
        unknown: engines, memories and element types that this reader does not know, with counts.
    """

    trace: Trace
    queues: Mapping[str, int]
    semaphores: int
    waits: int
    sbuf_bytes: int
    unknown: Mapping[str, int]


def read_dump(folder: Path) -> Dump:
    """Read the dumps of all cores below a folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: an instruction waits for what nobody does, or a file is of another form.
    """
    paths = sorted(folder.rglob(PATTERN))
    if not paths:
        raise FileNotFoundError(f"{folder}: holds no {PATTERN}; the compiler left no dump.")
    reader = _Reader()
    for core, path in enumerate(paths):
        try:
            reader.read(json.loads(path.read_text()), core)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"{path}: is not of the form that is read here ({type(error).__name__}: {error})."
                " Report the version of neuronx-cc."
            ) from error
    return reader.found()


@dataclass
class _Core:
    """What is known of a core so far.

    Attributes:
        memories: storages by name.
        updates: of a semaphore, the value after each instruction that raises it.
        last: the last instruction of each queue.
        fence: the last barrier.
        passed: queues that stand behind it.
    """

    memories: dict[str, int] = field(default_factory=dict)
    updates: dict[Any, list[tuple[int, int, object]]] = field(default_factory=dict)
    last: dict[object, int] = field(default_factory=dict)
    fence: int | None = None
    passed: set[object] = field(default_factory=set)


class _Reader:
    def __init__(self) -> None:
        self.trace = Trace()
        self.queues: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.semaphores: set[tuple[int, Any]] = set()
        self.waits = 0
        self.sbuf_bytes = 0

    def found(self) -> Dump:
        return Dump(
            trace=self.trace,
            queues=dict(self.queues),
            semaphores=len(self.semaphores),
            waits=self.waits,
            sbuf_bytes=self.sbuf_bytes,
            unknown=dict(self.unknown),
        )

    def read(self, program: Mapping[str, Any], number: int) -> None:
        core = _Core()
        for function in program["functions"]:
            for allocation in function.get("allocations", ()):
                for place in allocation["memorylocations"]:
                    core.memories[place["name"]] = self._storage(place, number)
        for function in program["functions"]:
            for block in function["blocks"]:
                for instruction in block["instructions"]:
                    self._instruction(instruction, core, number)

    def _storage(self, place: Mapping[str, Any], core: int) -> int:
        space = _SPACES.get(place["type"], tr.HBM)
        if place["type"] not in _SPACES:
            self.unknown[f"memory {place['type']}"] += 1
        dims = [int(size) for size in place["dims"]]
        address, partitions, size = None, 1, math.prod(dims)
        if space != tr.HBM:
            first = int(place.get("addr", 0)) + int(place.get("bank") or 0) * _BANK_BYTES
            address = (int(place.get("base") or 0), first)
            partitions, size = dims[0], math.prod(dims[1:])
        if space == tr.SBUF and address is not None:
            self.sbuf_bytes = max(self.sbuf_bytes, address[1] + size)
        return self.trace.add_storage(
            Storage(space, core, 0, partitions, size, address, str(place["name"]))
        )

    def _instruction(self, given: Mapping[str, Any], core: _Core, number: int) -> None:
        opcode = str(given["opcode"])
        engine = _ENGINES.get(given["engine"], tr.SYNC)
        if given["engine"] not in _ENGINES:
            self.unknown[f"engine {given['engine']}"] += 1
        ins, outs = given.get("ins", ()), given.get("outs", ())
        facts = self._facts(given, engine, ins, outs, core)
        is_transfer = isinstance(facts, DmaFacts)
        queue = str(given.get("queue") or given["engine"]) if is_transfer else given["engine"]
        if is_transfer:
            self.queues[queue] += 1
            engine = tr.DMA
        is_barrier = opcode == _BARRIER
        index = self.trace.emit(
            re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", opcode).lower(),
            tr.SYNC if engine == tr.ALL else engine,
            facts,
            tuple(self._range(access, core) for access in ins if "memref" in access),
            tuple(self._range(access, core) for access in outs if "memref" in access),
            self.trace.line_id(str(given["name"]), 0),
            number,
        )
        after = {*core.last.values()} if is_barrier else self._awaited(given, core, number)
        if core.fence is not None and queue not in core.passed:
            after.add(core.fence)
        core.passed.add(queue)
        if is_barrier:
            core.fence, core.passed = index, set()
        if after:
            self.trace.after[index] = tuple(sorted(after))
        core.last[queue] = index
        if opcode == _RESET:
            core.updates.clear()
        for update in (given.get("sync_info") or {}).get("on_update", ()):
            raised = core.updates.setdefault(update["id"], [])
            value = (raised[-1][0] if raised else 0) + int(update["update_value"])
            raised.append((value, index, queue))

    def _awaited(self, given: Mapping[str, Any], core: _Core, number: int) -> set[int]:
        """Return whom an instruction waits for: of each queue the last that raises a semaphore up
        to the value.
        """
        found: set[int] = set()
        for wait in (given.get("sync_info") or {}).get("on_wait", ()):
            self.waits += 1
            self.semaphores.add((number, wait["id"]))
            wanted, last = int(wait["wait_value"]), dict[object, int]()
            for value, index, queue in core.updates.get(wait["id"], ()):
                last[queue] = index
                if value >= wanted:
                    break
            else:
                raise ValueError(
                    f"{given['name']}: waits for semaphore {wait['id']} to be {wanted}, to which"
                    " nothing before it raises it. Is the dump whole?"
                )
            found |= set(last.values())
        return found

    def _facts(
        self,
        given: Mapping[str, Any],
        engine: int,
        ins: Sequence[Mapping[str, Any]],
        outs: Sequence[Mapping[str, Any]],
        core: _Core,
    ) -> Facts:
        opcode = str(given["opcode"])
        tensors = [access for access in (*outs, *ins) if "memref" in access]
        if not tensors or (engine in (tr.ALL, tr.SYNC) and not opcode.startswith("DMA")):
            return ControlFacts("register_move")
        if opcode.startswith("DMA"):
            return self._transfer(given, ins[0], outs[0], core)
        if engine == tr.TENSOR and len(tensors) > 2:
            first, second = (access for access in ins[:2])
            return MatmulFacts(
                k=_partitions(first),
                m=_partitions(outs[0]),
                n=_columns(outs[0]),
                stationary_dtype=str(second["dtype"]),
                moving_dtype=str(first["dtype"]),
                dst_dtype=str(outs[0]["dtype"]),
            )
        return ComputeFacts(
            elements=max(map(_columns, tensors)),
            partitions=max(map(_partitions, tensors)),
            dtypes=tuple(str(access["dtype"]) for access in tensors),
            spaces=tuple(self._space(access, core) for access in tensors),
            contiguous=tuple(access["ap"][-1][0] == 1 for access in tensors),
        )

    def _transfer(
        self,
        given: Mapping[str, Any],
        source: Mapping[str, Any],
        target: Mapping[str, Any],
        core: _Core,
    ) -> DmaFacts:
        spaces = self._space(source, core), self._space(target, core)
        sizes = [self._size(access) * _elements(access) for access in (source, target)]
        runs = [
            _runs(access, space) for access, space in zip((source, target), spaces, strict=True)
        ]
        in_hbm = [space == tr.HBM for space in spaces]
        on_chip = [
            access for access, is_out in zip((source, target), in_hbm, strict=True) if not is_out
        ]
        return DmaFacts(
            moved_bytes=max(sizes),
            rows=max(map(_partitions, on_chip or (target,))),
            runs=max(runs),
            hbm_runs=max((r for r, is_out in zip(runs, in_hbm, strict=True) if is_out), default=0),
            src_space=spaces[0],
            dst_space=spaces[1],
            hbm_read_bytes=sizes[0] if in_hbm[0] else 0,
            hbm_write_bytes=sizes[1] if in_hbm[1] else 0,
            element_bytes=self._size(target),
            dge="hwdge",
            queue=str(given.get("queue") or given["engine"]),
        )

    def _space(self, access: Mapping[str, Any], core: _Core) -> int:
        return self.trace.storages[core.memories[access["memref"]]].space

    def _size(self, access: Mapping[str, Any]) -> int:
        """Return the bytes of an element."""
        bits = re.search(r"8|16|32", str(access["dtype"]))
        if bits is None:
            self.unknown[f"type {access['dtype']}"] += 1
        return _BYTES[bits[0]] if bits else 4

    def _range(self, access: Mapping[str, Any], core: _Core) -> int:
        """Return the bytes that an access covers, from its first to its last; its offset and steps
        count elements, and on chip the first step is that over partitions.
        """
        storage = core.memories[access["memref"]]
        place, size = self.trace.storages[storage], self._size(access)
        pattern = [(int(step), int(count)) for step, count in access["ap"]]
        partitions = 1
        if place.space != tr.HBM:
            partitions, pattern = pattern[0][1], pattern[1:]
        start = int(access.get("offset", 0)) * size
        end = start + (sum(step * (count - 1) for step, count in pattern) + 1) * size
        return self.trace.range_id(MemoryRange(storage, 0, partitions, start, end))


def _partitions(access: Mapping[str, Any]) -> int:
    return int(access["ap"][0][1])


def _elements(access: Mapping[str, Any]) -> int:
    return math.prod(int(count) for _, count in access["ap"])


def _columns(access: Mapping[str, Any]) -> int:
    return _elements(access) // _partitions(access)


def _runs(access: Mapping[str, Any], space: int) -> int:
    """Return how many pieces without a gap an access has; on chip each partition is one or more."""
    pattern = [(int(step), int(count)) for step, count in access["ap"]]
    rows, pattern = (pattern[0][1], pattern[1:]) if space != tr.HBM else (1, pattern)
    dense = 1
    while (pattern and pattern[-1][0] in (dense, 0)) or (pattern and pattern[-1][1] == 1):
        dense *= pattern.pop()[1]
    return rows * math.prod(count for _, count in pattern)
