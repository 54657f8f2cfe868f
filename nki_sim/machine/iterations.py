"""Whether every iteration of a dynamic loop issues the same instructions, as the compiler needs.

The compiler sees the body of a dynamic loop once. Python state that changes between iterations,
such as a flag for the first one or `slot = 1 - slot`, gives the simulator instructions that no
compiled body has. `Body` keeps what the first iteration issued; every later one is compared as it
runs.

An operand is known by what is known at compile time: a tensor by its allocation, its walk and the
register of its offset, a register by which one it is, never by its value. What the body itself
creates counts from the start of the iteration.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from nki_sim.dtypes import DType
from nki_sim.machine.memory import Allocation
from nki_sim.machine.registers import DynamicSlice, SequencerValue, VirtualRegister
from nki_sim.machine.tensor import NkiTensor

_PLAIN = (int, str, bool, type(None), Enum, DType)
_GROWS = frozenset({"append", "extend", "insert", "pop", "remove", "clear", "update", "reverse"})


class Issued(NamedTuple):
    """One instruction or allocation, as far as it is known at compile time."""

    op: str
    operands: tuple[tuple[str, Any], ...]


class Body:
    """What the first iteration of a loop issued, inner loops as bodies of their own.

    Attributes:
        line: source line id of the loop.
        births: tensors and registers that its core had made when the present iteration began.
        carried: the register a while_loop passes from iteration to iteration.
    """

    def __init__(self, line: int) -> None:
        self.line = line
        self.births = 0
        self.carried: VirtualRegister | None = None
        self._items: list[Issued | Body] = []
        self._is_complete = False
        self._position = 0

    def begin_iteration(self, births: int) -> None:
        """Note the start of an iteration."""
        self.births = births
        self._position = 0

    def end_iteration(self) -> Issued | Body | None:
        """Note the end of an iteration; return what it should have issued but did not."""
        if self._is_complete and self._position < len(self._items):
            return self._items[self._position]
        self._is_complete = True
        return None

    def is_seen(self) -> bool:
        """Say whether this loop and every loop in it had an iteration to its end."""
        inner = [item for item in self._items if isinstance(item, Body)]
        return self._is_complete and all(item.is_seen() for item in inner)

    def sets_register(self, level: int) -> bool:
        """Say whether it writes a register made outside of the loop that stands so deep."""
        for item in self._items:
            if isinstance(item, Body):
                if item.sets_register(level):
                    return True
            elif item.op.startswith("register") and item.operands:
                name = item.operands[0][1]
                if name == "carried register" or (
                    isinstance(name, tuple) and name[0] == "register" and name[1][0] < level
                ):
                    return True
        return False

    def inner(self, line: int) -> Body | None:
        """Return the body of a loop that begins in this iteration; None if the first has none."""
        if not self._is_complete:
            found = Body(line)
            self._items.append(found)
            return found
        expected = self._next()
        return expected if isinstance(expected, Body) and expected.line == line else None

    def differs(self, issued: Issued) -> str:
        """Take the next instruction of this iteration; say what the first had instead, or ''."""
        if not self._is_complete:
            self._items.append(issued)
            return ""
        expected = self._next()
        if expected == issued:
            return ""
        if not isinstance(expected, Issued) or expected.op != issued.op:
            return f"where the first one has {describe(expected)}"
        names = [
            name
            for (name, value), other in zip(issued.operands, expected.operands, strict=False)
            if (name, value) != other
        ]
        return f"with another {names[0] if names else 'number of operands'} than the first one"

    def _next(self) -> Issued | Body | None:
        position, self._position = self._position, self._position + 1
        return self._items[position] if position < len(self._items) else None


def describe(item: Issued | Body | None) -> str:
    """Name an item in a message."""
    if item is None:
        return "nothing more"
    return item.op if isinstance(item, Issued) else "an inner loop"


def sign(
    bodies: Sequence[Body], op: str, names: Iterable[str], args: Iterable[Any], kwargs: Any
) -> Issued:
    """Return an instruction as it is known at compile time inside the running loops."""
    operands = [(name, _signature(bodies, value)) for name, value in zip(names, args, strict=False)]
    operands += [
        (name, _signature(bodies, value)) for name, value in kwargs.items() if name != "name"
    ]
    return Issued(op, tuple(operands))


def _signature(bodies: Sequence[Body], value: Any) -> Any:
    kind = type(value)
    if kind is NkiTensor:
        return _tensor_signature(bodies, value)
    if isinstance(value, SequencerValue):
        if any(value is body.carried for body in bodies):
            return "carried register"
        return ("register", _born(bodies, value.birth))
    if kind is float:
        return value if value == value else "nan"
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list):
        return tuple([_signature(bodies, item) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _signature(bodies, item)) for key, item in value.items()])
    if isinstance(value, DynamicSlice):
        return (_signature(bodies, value.start), value.size)
    return kind.__name__


def _tensor_signature(bodies: Sequence[Body], value: NkiTensor) -> Any:
    dynamic = value._dynamic
    offset = None
    if dynamic is not None:
        offset = (_signature(bodies, dynamic.index), *dynamic[2:])
    alloc = value._alloc
    return (
        _born(bodies, alloc.birth) if alloc.birth >= 0 else _shared(alloc),
        value.shape,
        value.strides,
        value.offset if dynamic is None else None,
        value.dtype,
        offset,
    )


def _shared(alloc: Allocation) -> Any:
    """Tell a tensor that cores share; a constant is put in memory anew by every iteration."""
    return "constant" if alloc.name.startswith("constant:") else alloc.trace_id


def _born(bodies: Sequence[Body], birth: int) -> tuple[int, int]:
    """Return the innermost loop whose present iteration made something, and its number there."""
    for level in range(len(bodies) - 1, -1, -1):
        if birth >= bodies[level].births:
            return level, birth - bodies[level].births
    return -1, birth


@functools.cache
def changing_names(file: str, line: int) -> tuple[str, ...]:
    """Return the variables that the body of the loop at a line changes and reads before that."""
    source = "".join(linecache.getlines(file))
    if not source:
        return ()
    tree = ast.parse(source)
    body = _body_at(tree, line)
    first_read: dict[str, tuple[int, int]] = {}
    first_write: dict[str, tuple[int, int]] = {}
    changed: list[str] = []
    for statement in body:
        for node in ast.walk(statement):
            name, is_write = _use_of(node)
            if not name:
                continue
            at = (
                getattr(node, "lineno", 0),
                1 << 20 if is_write == "plain" else 0,
            )  # values are read first
            into = first_write if is_write else first_read
            into[name] = min(into.get(name, at), at)
            if is_write and name not in changed:
                changed.append(name)
            if is_write == "in place":
                first_read[name] = (0, 0)
    late = (1 << 30, 0)
    return tuple(n for n in changed if first_read.get(n, late) <= first_write[n])


def _use_of(node: ast.AST) -> tuple[str, str]:
    """Return the variable a node uses, and whether it writes it: '', 'plain' or 'in place'."""
    if isinstance(node, ast.AugAssign):
        return _root(node.target), "in place"
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return _root(node), "in place"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return (_root(node.func), "in place") if node.func.attr in _GROWS else ("", "")
    if isinstance(node, ast.Name):
        return node.id, "plain" if isinstance(node.ctx, ast.Store) else ""
    return "", ""


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _body_at(tree: ast.AST, line: int) -> list[ast.stmt]:
    """Return the statements of the loop at a line: a for, a while, or a body function's."""
    functions: dict[str, ast.FunctionDef] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.While) and node.lineno == line:
            return node.body
        if isinstance(node, ast.FunctionDef) and node.lineno < line:
            other = functions.get(node.name)
            if other is None or other.lineno < node.lineno:  # the last one before the loop
                functions[node.name] = node
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or line):
            for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if isinstance(value, ast.Name) and value.id in functions:
                    return functions[value.id].body
    return []
