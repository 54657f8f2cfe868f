"""The simulated machine: cores, what they share, and the one way an instruction takes effect.

`Core` is what a kernel runs on; `current()` returns the ambient one. `Core.issue` is the only path
from an instruction to memory: it notes what is read, appends to the trace, executes, and notes what
was written. `Machine` is all cores of a launch with what they share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from nki_sim import trace as tr
from nki_sim.errors import OverlapError
from nki_sim.machine.allocator import Allocator
from nki_sim.machine.ambient import current as _current
from nki_sim.machine.ambient import running as _running
from nki_sim.machine.geometry import share_bytes
from nki_sim.machine.memory import CONSTANT, EXACT, SMALL_ELEMENTS, UNKNOWN, meet
from nki_sim.machine.numbers import watch_results
from nki_sim.machine.program import kernel_frame
from nki_sim.machine.system import System
from nki_sim.machine.tensor import NkiTensor
from nki_sim.machine.undefined import read_undefined
from nki_sim.options import SimOptions


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
    """One physical core: its program, its on-chip memory, and its instructions."""

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
        if self.dynamic_operands and isinstance(facts, tr.ComputeFacts):
            facts = facts._replace(is_dynamic=True)
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
            if alloc.unread:
                read = tensor.geometry.box
                for box in [box for box in alloc.unread if meet(box, read)]:
                    del alloc.unread[box]
            if writes and alloc is writes[0]._alloc:
                self._check_shift(tensor, writes[0])
        for tensor in writes:
            alloc = tensor._alloc
            if alloc.loop_depth > self.loop_depth:
                self.refuse_escaped(tensor)
            if alloc.space == tr.SBUF and not alloc.counted:
                self.count_sbuf(alloc)
            if alloc.is_input:
                self.keep_input(alloc)
        if not self.full:
            known = self.plan_indices(writes, reads, meaning if op == "memset" else None)
        if undefined:
            read_undefined(self, op, undefined, writes, meaning if known else None)
        else:
            if known and meaning is not None:
                meaning()
                if self.machine.float_flags.raised:
                    watch_results(self, writes, reads)
            self.mark_written(writes, line)
        return NkiInstruction(index, trace)

    def _check_shift(self, source: NkiTensor, result: NkiTensor) -> None:
        """Refuse an instruction that writes what it reads, but at other elements.

        Engines read ahead of what they write; how far is not documented.
        """
        a, b = source.geometry, result.geometry
        if a.walk == b.walk or a.elements != b.elements or a.elements == 1:
            return
        if a.start != b.start and share_bytes(a.walk, b.walk):
            error = OverlapError(
                self.operand_of(source),
                "the elements that the instruction writes, or none of them",
                "overlapping views of one tensor, shifted against each other",
                "Write to another tensor",
                location=self.machine.location(self.line),
            )
            self.machine.settle(self.options.overlap, "overlap", error)

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
        frame = kernel_frame()
        self.line = line = machine.line_of(frame)
        index = self.trace.emit(
            op, engine, facts, read_ids, write_ids, line, self.id, self.rank, self.loop_depth
        )
        if name:
            self.trace.names[index] = name
        if machine.options.callers:
            self.trace.note_callers(index, machine.callers_of(frame))
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
                is_whole_fill = fill is not None and _is_whole(tensor) and not alloc.has_data
                if is_whole_fill and count > SMALL_ELEMENTS:
                    alloc.pending = fill
                    alloc.known = CONSTANT
                    return UNKNOWN
                if count > max(SMALL_ELEMENTS, self.options.small_elements):
                    level = UNKNOWN
        for tensor in writes:
            alloc = tensor._alloc
            if level == UNKNOWN:
                alloc.known = UNKNOWN
            elif alloc.known or _is_whole(tensor):
                exact = alloc.known == EXACT or alloc.dtype.kind != "f"
                alloc.known = EXACT if exact else level
        return level


def _is_whole(tensor: NkiTensor) -> bool:
    """Whether a view touches every byte of its allocation."""
    alloc = tensor._alloc
    box = tensor.geometry.box
    return box.dense and box[:4] == (0, alloc.rows, 0, alloc.pitch)


class Machine(System):
    """All cores of one launch, and what they share.

    Args:
        options: how to simulate.
        lnc: physical cores per rank.
        ranks: ranks of the collective group.

    Attributes:
        cores: by rank, then by number.
    """

    def __init__(self, options: SimOptions, lnc: int = 1, ranks: int = 1) -> None:
        super().__init__(options, lnc, ranks)
        self.cores = [Core(self, rank, core) for rank in range(ranks) for core in range(lnc)]


current = cast(Callable[[], Core], _current)  # raises RuntimeError outside kernels
running = cast(Callable[[], Core | None], _running)  # None outside kernels
