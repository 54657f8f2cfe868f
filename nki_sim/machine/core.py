"""The simulated machine: cores, what they share, and the one way an instruction takes effect.

`Core` is what a kernel runs on; `current()` returns the ambient one. `Core.issue` is the only path
from an instruction to memory: it notes what is read, appends to the trace, executes, and notes what
was written. `Machine` owns the trace, the tensors in HBM and the findings of a launch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from nki_sim import trace as tr
from nki_sim.errors import LanguageError, NkiValidationError
from nki_sim.machine.allocator import Allocator
from nki_sim.machine.memory import CONSTANT, EXACT, SMALL_ELEMENTS, UNKNOWN
from nki_sim.machine.system import Machine
from nki_sim.machine.tensor import NkiTensor
from nki_sim.machine.undefined import read_undefined
from nki_sim.options import SimOptions

PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

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


class Core(Allocator):
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
        super().__init__()
        self.while_stack: list[Any] = []
        self.open_loops: list[Any] = []
        self.line = 0
        self.call: tuple[tuple[str, ...], tuple[Any, ...], dict[str, Any]] = ((), (), {})

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

    def operand_of_error(self, error: NkiValidationError) -> str:
        """Return the parameter that an error is about: "data1 (x)", or "src.vector_offset"."""
        label, about = error.operand, error.about
        for name, item in self._operands():
            if item is about or (about is None and item.label() == label):
                return f"{name} ({item.label()})" if item._is_named else name
            if about is not None and item._dynamic is not None and item._dynamic.index is about:
                return f"{name}.{item._dynamic.kind}_offset"
        return label

    def refuse_escaped(self, tensor: NkiTensor) -> None:
        """Raise LanguageError: the tensor belongs to the body of a dynamic loop that has ended."""
        created = self.machine.location(tensor._alloc.line)
        raise LanguageError(
            self.operand_of(tensor),
            "a tensor that exists outside of dynamic loops",
            f"one created in the body of a loop at {created}",
            "Create it before the loop",
        )

    def operand_of(self, tensor: NkiTensor) -> str:
        """Return the parameter through which the present instruction got a tensor, and its name."""
        for name, item in self._operands():
            if item._alloc is tensor._alloc:
                return f"{name} ({item.label()})" if item._is_named else name
        return tensor.label()

    def _operands(self) -> Iterator[tuple[str, NkiTensor]]:
        """Give the tensors of the present instruction with the names of their parameters."""
        names, args, kwargs = self.call
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if type(item) is NkiTensor:
                    yield name, item

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
            if alloc.loop_depth > self.loop_depth:
                self.refuse_escaped(tensor)
        for tensor in writes:
            alloc = tensor._alloc
            if alloc.loop_depth > self.loop_depth:
                self.refuse_escaped(tensor)
            if alloc.space == tr.SBUF and not alloc.counted:
                self.count_sbuf(alloc)
        if not self.full:
            known = self.plan_indices(writes, reads, meaning if op == "memset" else None)
        if undefined:
            read_undefined(self, op, undefined, writes, meaning if known else None)
        else:
            if known and meaning is not None:
                meaning()
            self.mark_written(writes, line)
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
                if count > SMALL_ELEMENTS:
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

    def mark_written(self, writes: Sequence[NkiTensor], line: int) -> None:
        """Note that views hold values now, and that placed tensors below them do not."""
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


def _is_whole(tensor: NkiTensor) -> bool:
    """Whether a view touches every byte of its allocation."""
    alloc = tensor._alloc
    box = tensor.geometry.box
    return box.dense and box[:4] == (0, alloc.rows, 0, alloc.pitch)


def build(options: SimOptions, lnc: int = 1, ranks: int = 1) -> Machine:
    """Return a machine with its cores.

    Args:
        options: how to simulate.
        lnc: physical cores per rank.
        ranks: ranks of the collective group.
    """
    machine = Machine(options, lnc, ranks)
    machine.cores = [Core(machine, rank, core) for rank in range(ranks) for core in range(lnc)]
    return machine
