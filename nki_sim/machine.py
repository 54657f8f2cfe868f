"""The simulated machine: cores, what they share, and the one way an instruction takes effect.

`Core` is what a kernel runs on; `current()` returns the ambient one. `Core.issue` is the only path
from an instruction to memory: it notes what is read, appends to the trace, executes, and notes what
was written. `Machine` owns the trace, the tensors in HBM and the findings of a launch.
"""

from __future__ import annotations

import os
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nki_sim import trace as tr
from nki_sim.dtypes import DType
from nki_sim.errors import CapacityError, NkiValidationError, OverlapError, UninitializedRead
from nki_sim.memory import (
    CONSTANT,
    EXACT,
    UNKNOWN,
    Allocation,
    Coverage,
    MemoryRegion,
    Walk,
)
from nki_sim.options import SimOptions
from nki_sim.targets import Target, find_target
from nki_sim.tensor import NkiTensor

if TYPE_CHECKING:
    from nki_sim.races import SharedLog
    from nki_sim.scheduler import Scheduler

PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep
# In `indices` mode, float tensors above this many elements hold no values unless they come from
# integers.
CONSTANT_ELEMENTS = 128 * 128
POISON_FILLS = (0xC1, 0x41)

_CORE: ContextVar[Core | None] = ContextVar("nki_sim_core", default=None)


def current() -> Core:
    """Return the core that the running kernel is on.

    Raises:
        RuntimeError: no kernel is running.
    """
    core = _CORE.get()
    if core is None:
        raise RuntimeError(
            "no kernel is running: call the kernel through nki_sim.simulate(kernel)(...)."
        )
    return core


def running() -> Core | None:
    """Return the ambient core, or None outside kernels."""
    return _CORE.get()


class Finding(NamedTuple):
    """Something legal, or tolerated by the options, that is worth knowing.

    Attributes:
        kind: "uninitialized", "capacity", "race", "overlap", "accumulate", "oob", "deprecated", ...
        location: "file:line" of the kernel, empty if it belongs to the whole run.
        text: one sentence.
    """

    kind: str
    location: str
    text: str


class NkiInstruction:
    """Handle of an issued instruction.

    Args:
        handle: position in the trace.
        trace: the trace; filled in by the machine.
    """

    __slots__ = ("_trace", "handle")

    def __init__(self, handle: Any, trace: tr.Trace | None = None) -> None:
        self.handle = handle
        self._trace = trace

    def depends_on(self, *producers: NkiInstruction) -> NkiInstruction:
        """Make this instruction wait for others; returns itself."""
        if self._trace is not None:
            before = self._trace.after.get(self.handle, ())
            self._trace.after[self.handle] = (*before, *(p.handle for p in producers))
        return self


class Machine:
    """What the cores of one launch share.

    Args:
        options: how to simulate.
        lnc: physical cores per rank.
        ranks: ranks of the collective group.
    """

    def __init__(self, options: SimOptions, lnc: int = 1, ranks: int = 1) -> None:
        self.options = options
        self.target: Target = find_target(options.target)
        self.lnc = lnc
        self.num_ranks = ranks
        self.trace = tr.Trace()
        self.findings: dict[tuple[str, str], Finding] = {}
        self.full = options.mode == "full"
        self.shared: dict[tuple[int, Any], Allocation] = {}
        self.shared_logs: list[SharedLog] = []
        self.scheduler: Scheduler | None = None
        self.random = random.Random(options.seed)
        self.preempt = options.preempt if lnc * ranks > 1 else 0.0
        self.lines: dict[tuple[int, int], int] = {}
        self._codes: list[Any] = []
        self.dropped: dict[int, int] = {}
        self.cores = [Core(self, rank, core) for rank in range(ranks) for core in range(lnc)]

    def find(self, kind: str, location: str, text: str) -> None:
        """Keep a finding, once per kind and place."""
        self.findings.setdefault((kind, location), Finding(kind, location, text))

    def settle(self, policy: str, kind: str, error: NkiValidationError) -> None:
        """Raise, report or drop a fault as its policy says."""
        if policy == "error":
            raise error
        if policy == "report":
            self.find(kind, error.location, str(error))

    def line_of(self, frame: Any) -> int:
        """Return the trace's id of the source line that a frame is at."""
        code = frame.f_code
        key = (id(code), frame.f_lasti)
        found = self.lines.get(key)
        if found is None:
            self._codes.append(code)  # keeps the id from being reused
            found = self.lines[key] = self.trace.line_id(code.co_filename, frame.f_lineno)
        return found

    def location(self, line: int) -> str:
        """Return "file:line" for a line id."""
        file, number = self.trace.lines[line]
        return f"{file}:{number}"


class Core:
    """One physical core: its program, its on-chip memory and its accumulators.

    Attributes:
        machine, trace, options: shared by all cores.
        rank, id: rank in the collective group, core within the rank.
        index: position among all cores of the launch.
        accumulators: accumulator registers by engine, for instructions with a reduce command.
        loop_depth: dynamic loops around the present instruction.
        flow: the dynamic loops and meetings so far, to compare between cores.
        clock: vector clock over all cores; its own entry counts its meetings.
    """

    def __init__(self, machine: Machine, rank: int, core: int) -> None:
        self.machine = machine
        self.trace = machine.trace
        self.options = machine.options
        self.target = machine.target
        self.full = machine.full
        self.rank = rank
        self.id = core
        self.index = rank * machine.lnc + core
        total = machine.lnc * machine.num_ranks
        self.clock = [0] * total
        self.clock[self.index] = 1
        self.grid_ndim = 0
        self.loop_depth = 0
        self.no_reorder = 0
        self.flow: list[tuple[Any, ...]] = []
        self.accumulators: dict[str, Any] = {}
        self.sbuf_bytes = 0
        self.sbuf_peak = 0
        self.placed: list[weakref.ref[Allocation]] = []
        self.shared_count: dict[str, int] = {}
        self.while_stack: list[Any] = []
        self.line = 0

    # Where the kernel is.

    def here(self, depth: int = 1) -> int:
        """Return the line id of the nearest caller outside this package."""
        frame: Any = sys._getframe(depth)
        while frame.f_code.co_filename.startswith(PACKAGE_DIR) and frame.f_back is not None:
            frame = frame.f_back
        return self.machine.line_of(frame)

    def location(self) -> str:
        """Return "file:line" of the kernel now."""
        return self.machine.location(self.here(2))

    # Memory.

    def allocate(
        self,
        shape: Sequence[int],
        dtype: DType,
        region: MemoryRegion,
        name: str = "",
        address: tuple[int, int] | None = None,
    ) -> NkiTensor:
        """Create a tensor in the memory of this core, or find the one the cores share.

        Raises:
            CapacityError: it can never fit, or its address is outside the memory.
        """
        sizes = tuple([int(size) for size in shape])
        if not sizes or min(sizes) < 1:
            raise CapacityError(
                "shape", "one or more axes of at least one element", f"{list(shape)}"
            )
        if region is MemoryRegion.shared_hbm:
            return self._allocate_shared(sizes, dtype, name)
        alloc = Allocation(self, region, sizes, dtype, name, address)
        space = alloc.space
        core = self.id
        partitions = 1
        size = alloc.size_bytes
        if space != tr.HBM:
            partitions = alloc.rows
            size = alloc.pitch
            self._check_fit(alloc)
            if address is not None:
                self._place(alloc)
        if space == tr.PSUM:
            alloc.accumulated = Coverage(alloc.rows, alloc.pitch, dtype.itemsize)
        alloc.line = self.line = self.here(2)
        alloc.trace_id = self.trace.add_storage(
            tr.Storage(space, core, self.rank, partitions, size, address, name)
        )
        return NkiTensor(sizes, dtype, alloc, region, name)

    def _allocate_shared(self, shape: tuple[int, ...], dtype: DType, name: str) -> NkiTensor:
        """All cores of a rank name one tensor by its name, else by the order of allocation."""
        count = self.shared_count.get(name, 0)
        self.shared_count[name] = count + 1
        key = (self.rank, (name, count))
        found = self.machine.shared.get(key)
        if found is None:
            found = Allocation(self, MemoryRegion.shared_hbm, shape, dtype, name)
            found.line = self.here(3)
            self._register_shared(found)
            self.machine.shared[key] = found
        elif found.shape != shape or found.dtype is not dtype:
            raise CapacityError(
                name or "shared tensor",
                f"the same shape and dtype on every core ({list(found.shape)}, {found.dtype})",
                f"{list(shape)}, {dtype}",
                "Every core must make the same shared_hbm allocations in the same order",
            )
        return NkiTensor(shape, dtype, found, MemoryRegion.shared_hbm, name)

    def _register_shared(self, alloc: Allocation) -> None:
        alloc.trace_id = self.trace.add_storage(
            tr.Storage(tr.HBM, -1, self.rank, 1, alloc.size_bytes, None, alloc.name)
        )
        if len(self.clock) > 1 and self.options.races != "off":
            from nki_sim.races import SharedLog

            alloc.shared_log = SharedLog(alloc)
            self.machine.shared_logs.append(alloc.shared_log)

    def bind_input(self, array: Any, dtype: DType, name: str) -> NkiTensor:
        """Wrap a contiguous NumPy array (or a shape-only `TensorSpec`) as a kernel input in HBM."""
        shape = tuple(array.shape) or (1,)
        key = (self.rank, ("input", name))
        alloc = self.machine.shared.get(key)
        if alloc is None:
            alloc = Allocation(self, MemoryRegion.shared_hbm, shape, dtype, name)
            alloc.defined.full = True
            if isinstance(array, np.ndarray) and (self.full or dtype.kind != "f"):
                alloc.adopt(array.reshape(-1).view(np.uint8))
            alloc.known = EXACT if alloc.has_data else UNKNOWN
            self._register_shared(alloc)
            self.machine.shared[key] = alloc
        return NkiTensor(shape, dtype, alloc, MemoryRegion.shared_hbm, name)

    def _check_fit(self, alloc: Allocation) -> None:
        """A tensor on chip must fit by itself and lie where its address says."""
        limit = self.target.sbuf_bytes if alloc.space == tr.SBUF else self.target.psum_bytes
        memory = alloc.region.name
        if alloc.rows > 128:
            raise CapacityError(
                alloc.name or "shape", f"at most 128 partitions in {memory}", f"{list(alloc.shape)}"
            )
        start_row, start = alloc.address or (0, 0)
        if alloc.pitch + start > limit or start < 0:
            self.machine.settle(self.options.capacity, "capacity", CapacityError(
                alloc.name or "tensor", f"at most {limit} bytes per partition of {memory}",
                f"{alloc.pitch} bytes" + (f" from byte {start}" if alloc.address else "")
                + f" for shape {list(alloc.shape)} of {alloc.dtype}", location=self.location(),
            ))  # fmt: skip
        if alloc.address is None:
            return
        if start_row < 0 or start_row + alloc.rows > 128:
            raise CapacityError(
                alloc.name or "address", "partitions inside 0..128", f"{start_row} + {alloc.rows}"
            )
        if alloc.space == tr.PSUM and start % self.target.psum_bank_bytes:
            raise CapacityError(
                alloc.name or "address",
                f"a PSUM address at the start of a bank of {self.target.psum_bank_bytes} bytes",
                f"byte {start}",
            )

    def _place(self, alloc: Allocation) -> None:
        """Find the tensors that lie on the same bytes as a newly placed one."""
        assert alloc.address is not None
        row, start = alloc.address
        alive = []
        for ref in self.placed:
            other = ref()
            if other is None:
                continue
            alive.append(ref)
            if other.space != alloc.space or other.address is None:
                continue
            other_row, other_start = other.address
            if (
                row < other_row + other.rows
                and other_row < row + alloc.rows
                and start < other_start + other.pitch
                and other_start < start + alloc.pitch
            ):
                alloc.aliases.append(ref)
                other.aliases.append(weakref.ref(alloc))
        alive.append(weakref.ref(alloc))
        self.placed = alive

    def count_sbuf(self, alloc: Allocation) -> None:
        """Count the bytes of a tensor from its first use until Python drops it."""
        alloc.counted = True
        alloc.core = self
        self.sbuf_bytes += alloc.pitch
        self.sbuf_peak = max(self.sbuf_peak, self.sbuf_bytes)

    def clobber(self, alloc: Allocation, tensor: NkiTensor) -> None:
        """Writing a placed tensor makes the same bytes of other placed tensors undefined."""
        assert alloc.address is not None
        box = tensor.geometry.box
        row, start = alloc.address
        for ref in alloc.aliases:
            other = ref()
            if other is None or other.address is None or other.defined.empty:
                continue
            row_shift = row - other.address[0]
            shift = start - other.address[1]
            r0 = max(0, box.row_start + row_shift)
            r1 = min(other.rows, box.row_end + row_shift)
            b0 = max(0, box.byte_start + shift)
            b1 = min(other.pitch, box.byte_end + shift)
            if r0 < r1 and b0 < b1:
                other.defined.remove_box(r0, r1, b0, b1)
                if other.accumulated is not None:
                    other.accumulated.remove_box(r0, r1, b0, b1)
                other.clobbered_by = (
                    f"{alloc.name or 'a tensor'} written at {self.machine.location(self.line)}"
                )

    # Meetings.

    def meet(self, key: Any, members: Sequence[int], value: Any, what: str) -> dict[int, Any]:
        """Wait for other cores and exchange values; see `Scheduler.meet`."""
        scheduler = self.machine.scheduler
        if scheduler is None or len(members) == 1:
            return {self.index: value}
        found: dict[int, Any] = scheduler.meet(self, key, members, value, what)
        return found

    # Instructions.

    def issue(
        self,
        op: str,
        engine: int,
        facts: tr.Facts,
        writes: Sequence[NkiTensor],
        reads: Sequence[NkiTensor],
        meaning: Callable[[], None] | None,
        name: str | None = None,
    ) -> NkiInstruction:
        """Make an instruction take effect.

        Args:
            op: its name in nki.isa.
            engine: TENSOR .. ALL of `trace.py`, after "unknown" was resolved.
            facts: what its price depends on.
            writes: static views it writes completely, destination first. A view written only in
                part must be listed in `reads` too.
            reads: static views it reads, in the order of the signature.
            meaning: does the arithmetic on the simulated memory; None for nothing to do. It must be
                repeatable: same memory and accumulators in, same out.
            name: the user's name for it.
        """
        trace = self.trace
        index = self.emit(
            op,
            engine,
            facts,
            tuple([tensor.range_id(trace) for tensor in reads]),
            tuple([tensor.range_id(trace) for tensor in writes]),
            name,
        )
        line = self.line
        undefined: list[NkiTensor] = []
        known = EXACT
        for tensor in reads:
            alloc = tensor._alloc
            if not alloc.defined.full:
                geometry = tensor.geometry
                if not alloc.defined.covers(geometry.box, geometry.walk):
                    undefined.append(tensor)
            if alloc.known < known:
                known = alloc.known
            if alloc.shared_log is not None:
                alloc.shared_log.read(self, tensor, line)
        for tensor in writes:
            alloc = tensor._alloc
            if alloc.space == tr.SBUF and not alloc.counted:
                self.count_sbuf(alloc)
        if not self.full:
            known = self.plan_indices(writes, reads, meaning if op == "memset" else None)
        if undefined:
            self._read_undefined(op, undefined, writes, meaning if known else None)
        else:
            if known and meaning is not None:
                meaning()
            self._mark_written(writes, line)
        return NkiInstruction(index, trace)

    def emit(
        self,
        op: str,
        engine: int,
        facts: tr.Facts,
        read_ids: tuple[int, ...],
        write_ids: tuple[int, ...],
        name: str | None = None,
    ) -> int:
        """Append an instruction to the trace and remember its source line; return its position."""
        machine = self.machine
        if machine.preempt and machine.scheduler is not None:
            machine.scheduler.maybe_preempt(self)
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename.startswith(PACKAGE_DIR) and frame.f_back is not None:
            frame = frame.f_back
        self.line = line = machine.line_of(frame)
        index = self.trace.emit(
            op, engine, facts, read_ids, write_ids, line, self.id, self.rank, self.loop_depth
        )
        if name:
            self.trace.names[index] = name
        return index

    def plan_indices(
        self,
        writes: Sequence[NkiTensor],
        reads: Sequence[NkiTensor],
        fill: Callable[[], None] | None = None,
    ) -> int:
        """In `indices` mode, note what is known of the destinations; return whether to execute.

        Args:
            writes, reads: the operands.
            fill: the meaning of a memset, which may be put off.
        """
        level = CONSTANT if fill is not None else EXACT
        if reads:
            levels = [tensor._alloc.known for tensor in reads]
            level = max(levels) if min(levels) else UNKNOWN
        for tensor in writes:
            alloc = tensor._alloc
            if level == CONSTANT and alloc.dtype.kind == "f":
                count = alloc.rows * alloc.pitch // alloc.dtype.itemsize
                if count > CONSTANT_ELEMENTS:
                    if fill is not None and _is_whole(tensor) and not alloc.has_data:
                        alloc.pending = fill
                        alloc.known = CONSTANT
                        return UNKNOWN
                    level = UNKNOWN
        for tensor in writes:
            alloc = tensor._alloc
            if level == UNKNOWN:
                alloc.known = UNKNOWN
            elif alloc.known or _is_whole(tensor):
                exact = alloc.known == EXACT or alloc.dtype.kind != "f"
                alloc.known = EXACT if exact else level
        return level

    def _mark_written(self, writes: Sequence[NkiTensor], line: int) -> None:
        for tensor in writes:
            alloc = tensor._alloc
            if not alloc.defined.full:
                geometry = tensor.geometry
                alloc.defined.add(geometry.box, geometry.walk)
            if alloc.poisoned is not None:
                alloc.poisoned.remove(tensor.geometry.walk)
            if alloc.aliases:
                self.clobber(alloc, tensor)
            if alloc.shared_log is not None:
                alloc.shared_log.write(self, tensor, line)

    def _read_undefined(
        self,
        op: str,
        undefined: list[NkiTensor],
        writes: Sequence[NkiTensor],
        meaning: Callable[[], None] | None,
    ) -> None:
        """Execute with several fillings of the unwritten elements; what differs stays undefined."""
        options = self.options
        location = self.machine.location(self.line)
        for tensor in undefined:
            missing = int((~tensor._alloc.defined.elements_of(tensor.geometry.walk)).sum())
            self.report_undefined(op, tensor, missing, location)
        if meaning is None or options.uninitialized == "off":
            if meaning is not None:
                meaning()
            self._mark_written(writes, self.line)
            return
        holes = []
        for tensor in undefined:
            walk = tensor.geometry.walk
            holes.append((tensor.array(), ~tensor._alloc.defined.elements_of(walk)))
        before = [tensor.array().copy() for tensor in writes]
        accumulators = {key: value.copy() for key, value in self.accumulators.items()}
        results = []
        for fill in (*POISON_FILLS, options.fill):
            for tensor, old in zip(writes, before, strict=True):
                tensor.array()[...] = old
            for array, hole in holes:
                pattern = np.full(array.dtype.itemsize, fill, np.uint8).view(array.dtype)[0]
                array[hole] = pattern
            self.accumulators = {key: value.copy() for key, value in accumulators.items()}
            meaning()
            results.append([_bits(tensor.array()) for tensor in writes])
        self._mark_written(writes, self.line)
        for position, tensor in enumerate(writes):
            first, second, last = (result[position] for result in results)
            differs = (first != last) | (second != last)
            if differs.any():
                self.poison(tensor._alloc, tensor.geometry.walk, differs, f"{op} at {location}")

    def poison(self, alloc: Allocation, walk: Walk, chosen: Any, origin: str) -> None:
        """Mark elements that were computed from unwritten memory."""
        alloc.defined.remove(walk, chosen)
        if alloc.poisoned is None:
            alloc.poisoned = Coverage(alloc.rows, alloc.pitch, alloc.dtype.itemsize)
        alloc.poisoned.add_where(walk, chosen)
        if origin not in alloc.poison:
            alloc.poison.append(origin)

    def report_undefined(self, op: str, tensor: NkiTensor, missing: int, location: str) -> None:
        """Raise or report the read of elements that nobody wrote."""
        options = self.options
        alloc = tensor._alloc
        if alloc.clobbered_by:
            self.machine.settle(
                options.overlap,
                "overlap",
                OverlapError(
                    tensor.label(),
                    "bytes that still belong to this tensor",
                    f"bytes overwritten by {alloc.clobbered_by}",
                    instruction=op,
                    location=location,
                ),
            )
        if options.uninitialized == "off":
            return
        origin = f"; computed from unwritten memory by {alloc.poison[0]}" if alloc.poison else ""
        error = UninitializedRead(
            tensor.label(),
            "elements that were written before they are read",
            f"{missing} of {tensor.size} elements unwritten{origin}",
            instruction=op,
            location=location,
        )
        if options.uninitialized == "read":
            raise error
        self.machine.find("uninitialized", location, str(error))


def _is_whole(tensor: NkiTensor) -> bool:
    """Whether a view touches every byte of its allocation."""
    alloc = tensor._alloc
    box = tensor.geometry.box
    return box.dense and box[:4] == (0, alloc.rows, 0, alloc.pitch)


def _bits(array: Any) -> Any:
    """Return a copy of an array as unsigned integers, so that NaN equals itself."""
    copied = np.ascontiguousarray(array)
    if copied is array:
        copied = array.copy()
    return copied.view(f"u{copied.dtype.itemsize}")


__all__ = ["Core", "Finding", "Machine", "NkiInstruction", "current", "running"]
