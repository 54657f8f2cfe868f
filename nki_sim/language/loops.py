"""Dynamic loops: `nl.dynamic_range`, `while register`, `nl.fori_loop`, `nl.while_loop`.

Each loop writes loop_begin, one loop_trip per trip, and loop_end to the trace, and its trip count
to the core's flow, which must agree between cores. The body runs once per trip on the current
values, as the hardware would.

A loop left by break or return is found when the kernel ends; continue only by the linter.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from nki_sim import trace as tr
from nki_sim.errors import LanguageError
from nki_sim.machine.core import PACKAGE_DIR, Core, current
from nki_sim.machine.registers import VirtualRegister
from nki_sim.machine.tensor import NkiTensor, read_index

_BEGIN = tr.ControlFacts("loop_begin")
_TRIP = tr.ControlFacts("loop_trip")
_END = tr.ControlFacts("loop_end")


class _Loop:
    """One running dynamic loop of a core."""

    __slots__ = ("core", "key", "line", "trips")

    def __init__(self, core: Core, line: int, key: Any = None) -> None:
        if core.no_reorder:
            raise LanguageError(
                "loop", "no dynamic loop inside nl.no_reorder", "one", location=core.location()
            )
        self.core = core
        self.line = line
        self.key = key
        self.trips = 0
        self._mark("loop_begin", _BEGIN)
        core.loop_depth += 1
        core.open_loops.append(self)

    def _mark(self, op: str, facts: tr.ControlFacts) -> None:
        core = self.core
        core.trace.emit(op, tr.ALL, facts, (), (), self.line, core.id, core.rank, core.loop_depth)

    def trip(self) -> None:
        """Note the start of a trip."""
        self.trips += 1
        self._mark("loop_trip", _TRIP)

    def end(self) -> None:
        """Note the end of the loop."""
        core = self.core
        core.loop_depth -= 1
        core.open_loops.pop()
        self._mark("loop_end", _END)
        core.flow.append(("loop", core.machine.location(self.line), self.trips))


def check_loops_ended(core: Core) -> None:
    """Refuse a kernel that left a dynamic loop by break or return.

    Raises:
        LanguageError: it did.
    """
    for loop in core.open_loops:
        raise LanguageError(
            "body",
            "a loop that ends by its bound or condition",
            "break or return",
            instruction="dynamic loop",
            location=core.machine.location(loop.line),
        )


def bound(value: Any) -> int:
    """Return a loop bound: an int, a register, or a one-element tensor loaded into one."""
    if isinstance(value, (VirtualRegister, NkiTensor)):
        return read_index(value)
    return int(value)


def dynamic_range(start: Any, stop: Any = None, step: Any = 1) -> Iterator[VirtualRegister]:
    """Loop over a register whose bounds are known only at run time.

    Args:
        start: first value, or the number of trips where `stop` is left out; int or register.
        stop: end, int or register.
        step: positive int.
    """
    core = current()
    line = core.here(2)
    text = "nl.dynamic_range is deprecated. Use nl.fori_loop."
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    first, last = (0, bound(start)) if stop is None else (bound(start), bound(stop))
    by = _step(step)
    return _counted(core, line, first, last, by)


def _step(step: Any) -> int:
    by = bound(step)
    if by < 1:
        raise LanguageError("step", "a positive number", str(by))
    return by


def _counted(core: Core, line: int, first: int, last: int, by: int) -> Iterator[VirtualRegister]:
    loop = _Loop(core, line)
    for value in range(first, last, by):
        loop.trip()
        yield VirtualRegister(value, frozen=True)
    loop.end()


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any], Any], step: int = 1) -> None:
    """Run `body_fun(i)` for i from `lower` below `upper`.

    Args:
        lower, upper: int or register.
        body_fun: takes the counter as a register; returns nothing.
        step: positive int.
    """
    core = current()
    loop = _Loop(core, core.here(2))
    for value in range(bound(lower), bound(upper), _step(step)):
        loop.trip()
        if body_fun(VirtualRegister(value)) is not None:
            raise LanguageError("body_fun", "a body that returns nothing", "a returned value")
    loop.end()


def while_loop(init: VirtualRegister, body_fun: Callable[[Any], Any]) -> None:
    """Run `body_fun(register)`, which returns the next register, until the register is 0."""
    core = current()
    loop = _Loop(core, core.here(2))
    register = init
    while register.read() != 0:
        loop.trip()
        register = body_fun(register)
        if not isinstance(register, VirtualRegister):
            raise LanguageError("body_fun", "a body that returns a register", repr(register))
    loop.end()


def while_condition(register: VirtualRegister) -> bool:
    """Serve ``while register:``; any other test of a register raises."""
    core = current()
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename.startswith(PACKAGE_DIR):
        frame = frame.f_back
    line = frame.f_lineno
    lines = _while_lines(frame.f_code.co_filename)
    if lines is not None and line not in lines:
        raise LanguageError(
            "register",
            "a condition known at compile time",
            "a register",
            "Registers may bound dynamic loops only",
            location=core.location(),
        )
    key = (id(frame), line)
    stack = core.while_stack
    while stack and stack[-1].key != key and any(loop.key == key for loop in stack):
        stack.pop().end()
    if not stack or stack[-1].key != key:
        stack.append(_Loop(core, core.machine.line_of(frame), key))
    if register.read() != 0:
        stack[-1].trip()
        return True
    stack.pop().end()
    return False


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
