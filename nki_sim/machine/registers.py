"""Registers of the sequencers.

A register holds one 32-bit value that the compiler does not know. Using one where Python needs a
number (`if`, `range`, `int`) raises; the exceptions are the loop forms of the language. Inside a
loop the counter is frozen: writing it raises, as since NKI 0.4.
"""

from __future__ import annotations

from typing import Any

from nki_sim.errors import LanguageError, UninitializedRead
from nki_sim.machine.ambient import current, running

_LOW, _HIGH = -(1 << 31), (1 << 32) - 1


class VirtualRegister:
    """A 32-bit register.

    Args:
        state: the value, or None while it has none.
        frozen: whether the kernel may not write it (loop counters).

    Attributes:
        birth: its number among the tensors and registers of its core.
    """

    __slots__ = ("__weakref__", "birth", "frozen", "state")

    def __init__(self, state: Any = None, frozen: bool = False) -> None:
        self.state = state
        self.frozen = frozen
        core = running()
        self.birth = -1 if core is None else core.count_birth()

    def read(self) -> int:
        """Return the value as a signed 32-bit number."""
        if self.state is None:
            raise UninitializedRead("register", "a value loaded before it is used", "none")
        value = int(self.state)
        return value - (1 << 32) if value >= (1 << 31) else value

    def write(self, value: Any) -> None:
        """Set the value.

        Raises:
            LanguageError: the register is the counter of a dynamic loop.
        """
        if self.frozen:
            raise LanguageError(
                "register", "a register that is not a loop counter", "a loop counter"
            )
        if value is not None and not _LOW <= int(value) <= _HIGH:
            raise LanguageError("register", "a 32-bit value", str(value))
        self.state = value

    def __bool__(self) -> bool:
        return current().while_condition(self)

    def _refuse(self, *_: Any) -> Any:
        raise LanguageError(
            "register",
            "a number known at compile time",
            "a register",
            "Registers may bound dynamic loops and be offsets of tensors only",
        )

    __int__ = __index__ = __float__ = __len__ = __iter__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __floordiv__ = __mod__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Say that it is not None; comparing the value, as `in` does too, raises."""
        return False if other is None else bool(self._refuse())

    def __ne__(self, other: object) -> bool:
        """Undo `==`."""
        return not self == other

    def __repr__(self) -> str:
        return f"VirtualRegister({self.state!r})"


class DynamicSlice:
    """`nl.ds` with a register as its start."""

    __slots__ = ("size", "start")

    def __init__(self, start: VirtualRegister, size: int) -> None:
        self.start = start
        self.size = size
