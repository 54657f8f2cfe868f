"""Where the program of one core is: source line, dynamic loops, operands of the instruction.

Each dynamic loop writes loop_begin, one loop_iteration per iteration, and loop_end to the trace,
and the number of iterations to the core's flow, which must agree between cores. A loop left by
break or return is found when the kernel ends, or a ``while`` around it goes on.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from nki_sim import trace as tr
from nki_sim.errors import LanguageError, NkiValidationError
from nki_sim.machine.iterations import Body, changing_names, describe, sign
from nki_sim.machine.memory import Coverage
from nki_sim.machine.registers import VirtualRegister
from nki_sim.machine.system import PACKAGE_DIR, System
from nki_sim.machine.tensor import NkiTensor

_STUCK_ITERATIONS: Final = 10_000
_PLAIN: Final = (int, float, str, bool, type(None))
_BEGIN: Final = tr.ControlFacts("loop_begin")
_ITERATION: Final = tr.ControlFacts("loop_iteration")
_END: Final = tr.ControlFacts("loop_end")


class Loop:
    """One running dynamic loop of a core.

    Args:
        program: the core.
        line: its source line id.
        key: what tells a ``while register:`` from others; None for the other forms.

    Attributes:
        body: what its first iteration issued.
        iterations: how many began.
    """

    __slots__ = ("_begin", "_program", "_state", "_stuck", "body", "iterations", "key", "line")

    def __init__(self, program: Program, line: int, key: Any = None) -> None:
        if program.no_reorder:
            raise LanguageError(
                "loop", "no dynamic loop inside nl.no_reorder", "one", location=program.location()
            )
        self._program = program
        self.line = line
        self.key = key
        self.iterations = 0
        self._state: dict[str, Any] = {}
        self._stuck = (0, 0)
        self.body = program.body_of(line)
        self._begin = len(program.trace)
        self._mark("loop_begin", _BEGIN)
        program.loop_depth += 1
        program.open_loops.append(self)

    def _mark(self, op: str, facts: tr.ControlFacts) -> None:
        at = self._program
        at.trace.emit(op, tr.ALL, facts, (), (), self.line, at.id, at.rank, at.loop_depth)

    def iteration(self) -> None:
        """Note the start of an iteration."""
        self._end_iteration()
        self.iterations += 1
        self.body.begin_iteration(self._program.births)
        self._mark("loop_iteration", _ITERATION)

    def check_progress(self, value: int) -> None:
        """Refuse a loop whose condition has held the same value for very many iterations.

        Raises:
            LanguageError: it has.
        """
        last, times = self._stuck
        self._stuck = (value, times + 1 if value == last else 0)
        if times > _STUCK_ITERATIONS:
            raise LanguageError(
                "register",
                "a condition that the body changes",
                f"{value} for {times} iterations",
                "Load or move the next value into the register on every iteration",
                instruction="while",
                location=self._program.machine.location(self.line),
            )

    def is_enough(self) -> bool:
        """Say whether the options leave out the iterations that are still to come."""
        at = self._program
        most = at.options.most_iterations
        if at.full or not most or self.iterations < most or not self.body.is_seen():
            return False
        return not self.body.sets_register(at.open_loops.index(self))

    def forget(self) -> None:
        """Take what the loop wrote for unwritten, as iterations that are left out write it, too."""
        at = self._program
        rows = at.trace.columns()[self._begin :]
        operands, first = at.trace.operand_ids()
        written: set[int] = set()
        for number in np.flatnonzero((rows[:, tr.CORE] == at.id) & (rows[:, tr.RANK] == at.rank)):
            place = self._begin + int(number)
            ids = operands[first[place] + rows[number, tr.NUM_READS] : first[place + 1]]
            written.update(at.trace.ranges[k].storage for k in ids.tolist())
        for storage in written:
            alloc = at.machine.allocations.get(storage)
            if alloc is not None and alloc.known:
                unit = alloc.dtype.itemsize
                alloc.defined = Coverage(alloc.rows, alloc.pitch, unit)

    def end(self) -> None:
        """Note the end of the loop."""
        self._end_iteration()
        program = self._program
        program.loop_depth -= 1
        program.open_loops.pop()
        self._mark("loop_end", _END)
        program.flow.append(("loop", program.machine.location(self.line), self.iterations))

    def _end_iteration(self) -> None:
        if not self.iterations:
            return
        missing = self.body.end_iteration()
        if missing is not None:
            self._program.refuse_iteration(
                self, f"an iteration {self.iterations} without {describe(missing)}"
            )
        state = self._program.python_state(self.line)
        if self.iterations > 1 and state != self._state:
            name = next(name for name in state if state[name] != self._state.get(name))
            self._program.refuse_iteration(
                self,
                f"{name}={state[name]} after iteration {self.iterations},"
                f" not {self._state.get(name)}",
            )
        self._state = state


class Program:
    """Where the program of one core is.

    Attributes:
        machine, trace, options, target, nki: shared by all cores.
        full: whether floating-point arithmetic is carried out.
        watches_numbers: whether to look for what overflows, and the like, now.
        rank, id: rank in the collective group, core within the rank.
        index: position among all cores of the launch.
        clock: vector clock over all cores; its own entry counts its meetings.
        grid: cores by axis of the launch; empty for a kernel launched without brackets.
        loop_depth: dynamic loops around the present instruction.
        no_reorder: `nl.no_reorder` blocks around it.
        births: tensors and registers made so far.
        flow: the dynamic loops and meetings so far, to compare between cores.
        line: source line id of the last instruction or allocation.
        call: the present instruction: names of its parameters, arguments, keyword arguments.
    """

    def __init__(self, machine: System, rank: int, core: int) -> None:
        self.machine = machine
        self.trace = machine.trace
        self.options = machine.options
        self.target = machine.target
        self.nki = machine.nki
        self.full = machine.full
        self.watches_numbers = machine.watches_numbers
        self.rank = rank
        self.id = core
        self.index = rank * machine.lnc + core
        self.clock = [0] * (machine.lnc * machine.num_ranks)
        self.clock[self.index] = 1
        self.grid: tuple[int, ...] = ()
        self.loop_depth = 0
        self.no_reorder = 0
        self.prepared: Any = None  # the half of a collective that waits for its trigger
        self.births = 0
        self.flow: list[tuple[Any, ...]] = []
        self.open_loops: list[Loop] = []
        self._while_loops: list[Loop] = []
        self.line = 0
        self.call: tuple[tuple[str, ...], tuple[Any, ...], dict[str, Any]] = ((), (), {})
        self.dynamic_operands = 0

    # Source lines.

    def here(self) -> int:
        """Return the line id of the nearest caller outside this package."""
        return self.machine.line_of(kernel_frame())

    def location(self) -> str:
        """Return "file:line" of the kernel now."""
        return self.machine.location(self.here())

    def note(self, kind: str, text: str) -> None:
        """Keep a finding about the kernel's present line."""
        self.machine.find(kind, self.location(), text)

    def locate(self, error: NkiValidationError, instruction: str) -> None:
        """Add instruction and kernel line to an error that does not have them yet."""
        if not error.instruction:
            error.instruction = instruction
        if not error.location:
            error.location = self.location()

    # Dynamic loops.

    def while_condition(self, register: VirtualRegister) -> bool:
        """Serve ``while register:`` of NKI 0.6; any other test of a register raises."""
        frame = kernel_frame()
        lines = _while_lines(frame.f_code.co_filename)
        if self.nki != "0.6" or (lines is not None and frame.f_lineno not in lines):
            register.refuse_condition()
        key = (id(frame), frame.f_lineno)
        stack = self._while_loops
        if stack and stack[-1].key != key and any(loop.key == key for loop in stack):
            self._refuse_left(stack[-1])
        if not stack or stack[-1].key != key:
            stack.append(Loop(self, self.machine.line_of(frame), key))
        if (value := register.read()) != 0:
            stack[-1].check_progress(value)
            stack[-1].iteration()
            return True
        stack.pop().end()
        return False

    def count_birth(self) -> int:
        """Return the number of a new tensor or register."""
        self.births += 1
        return self.births - 1

    def body_of(self, line: int) -> Body:
        """Return the body of a loop that begins at a line."""
        if not self.open_loops:
            return Body(line)
        outer = self.open_loops[-1]
        found = outer.body.inner(line)
        if found is None:
            self.refuse_iteration(outer, f"an iteration {outer.iterations} with another inner loop")
        assert found is not None
        return found

    def same_as_first_iteration(
        self, op: str, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Compare an instruction in the body of a dynamic loop with that of the first iteration.

        Raises:
            LanguageError: it is another one, which a body compiled once cannot give.
        """
        issued = sign([each.body for each in self.open_loops], op, names, args, kwargs)
        if how := self.open_loops[-1].body.differs(issued):
            later = [loop for loop in self.open_loops if loop.iterations > 1]
            self.refuse_iteration(
                later[-1], f"an iteration {later[-1].iterations} whose {op} comes {how}"
            )

    def python_state(self, line: int) -> dict[str, Any]:
        """Return the plain values of the variables that the body of the loop at a line changes."""
        file, number = self.machine.location(line).rsplit(":", 1)
        names = changing_names(file, int(number))
        if not names:
            return {}
        frame: Any = sys._getframe()
        while frame.f_code.co_filename != file and frame.f_back is not None:
            frame = frame.f_back
        seen = frame.f_locals
        values = {name: seen[name] for name in names if name in seen}
        return {name: _plain(value) for name, value in values.items()}

    def refuse_iteration(self, loop: Loop, what: str) -> None:
        """Raise LanguageError: an iteration of a dynamic loop is not like its first one."""
        names: tuple[str, ...] = ()
        for each in (loop, *reversed(self.open_loops)):
            file, line = self.machine.location(each.line).rsplit(":", 1)
            names = names or changing_names(file, int(line))
        listed = ", ".join(f"`{name}`" for name in names[:3])
        raise LanguageError(
            listed or "body",
            "the same instructions on every iteration, as the body is compiled once",
            what,
            "Keep what changes between iterations in a register or a tensor, not in Python",
            location=self.location(),
        )

    def check_all_ended(self) -> None:
        """Refuse a kernel that left a dynamic loop by break or return, or a collective half done.

        Raises:
            LanguageError: it did.
        """
        for loop in self.open_loops:
            self._refuse_left(loop)
        if self.prepared is not None:
            kind = self.prepared.kind
            raise LanguageError(f"{kind}_prepare", f"one {kind}_trigger after it", "none")

    def _refuse_left(self, loop: Loop) -> None:
        raise LanguageError(
            "body",
            "a loop that ends by its bound or condition",
            "break or return",
            instruction="dynamic loop",
            location=self.machine.location(loop.line),
        )

    # Operands of the present instruction, for messages.

    def operand_of_error(self, error: NkiValidationError) -> str:
        """Return the parameter that an error is about: "data1 (x)", or "src.vector_offset"."""
        label, about = error.operand, error.about
        for name, item in self._operands():
            if item is about or (about is None and item.label() == label):
                return f"{name} ({item.label()})" if item._is_named else name
            if about is not None and item._dynamic is not None and item._dynamic.index is about:
                return f"{name}.{item._dynamic.kind}_offset"
        return label

    def operand_of(self, tensor: NkiTensor) -> str:
        """Return the parameter through which the present instruction got a tensor, and its name."""
        for name, item in self._operands():
            if item._alloc is tensor._alloc:
                return f"{name} ({item.label()})" if item._is_named else name
        return tensor.label()

    def refuse_escaped(self, tensor: NkiTensor) -> None:
        """Raise LanguageError: the tensor belongs to the body of a dynamic loop that has ended."""
        created = self.machine.location(tensor._alloc.line)
        raise LanguageError(
            self.operand_of(tensor),
            "a tensor that exists outside of dynamic loops",
            f"one created in the body of a loop at {created}",
            "Create it before the loop",
        )

    def _operands(self) -> Iterator[tuple[str, NkiTensor]]:
        """Give the tensors of the present instruction with the names of their parameters."""
        names, args, kwargs = self.call
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if type(item) is NkiTensor:
                    yield name, item


def kernel_frame() -> Any:
    """Return the frame of the nearest caller outside this package."""
    frame: Any = sys._getframe(2)  # this function and the one that asks are inside
    while frame.f_code.co_filename.startswith(PACKAGE_DIR) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _plain(value: Any) -> Any:
    """Return what can be compared of a Python value: itself, or the length of a container."""
    if isinstance(value, _PLAIN):
        return value
    return f"{len(value)} items" if isinstance(value, list | tuple | dict) else None


@functools.cache
def _while_lines(file: str) -> frozenset[int] | None:
    """Return the lines on which the condition of a while statement stands; None without source."""
    source = "".join(linecache.getlines(file))
    if not source:
        return None
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.While):
            lines.update(range(node.lineno, (node.test.end_lineno or node.lineno) + 1))
    return frozenset(lines)
