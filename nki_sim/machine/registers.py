"""Values of the sequencers: registers, and the scalars that NKI 0.7 adds to them.

Such a value is known to the device only. Using one where Python needs a number (`if`, `range`,
`int`) raises; the exception is the ``while register:`` of NKI 0.6. A register is written in place;
a scalar never changes, and arithmetic on it gives another one.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from nki_sim.dtypes import DType, int32, int64
from nki_sim.errors import LanguageError, UninitializedRead
from nki_sim.machine.ambient import current, running

_LOW, _HIGH = -(1 << 31), (1 << 32) - 1
_SCALAR_TYPES: Final = (int32, int64)


class SequencerValue:
    """A value that only the device knows.

    Args:
        state: the value, or None while it has none.

    Attributes:
        birth: its number among the tensors and values of its core.
    """

    __slots__ = ("__weakref__", "birth", "state")

    _what = "a register"
    _uses = "Registers may bound dynamic loops and be offsets of tensors only"

    def __init__(self, state: Any = None) -> None:
        self.state = state
        core = running()
        self.birth = -1 if core is None else core.count_birth()

    def read(self) -> int:
        """Return the value with its sign."""
        raise NotImplementedError

    def _refuse(self, *_: Any) -> Any:
        raise LanguageError("register", "a number known at compile time", self._what, self._uses)

    def refuse_condition(self) -> NoReturn:
        """Raise LanguageError: the value was taken as a condition of Python."""
        raise LanguageError(
            "register",
            "a condition known at compile time",
            self._what,
            "Python decides while the kernel is compiled. Use nl.while_loop, a bound of "
            "nl.fori_loop, or a mask made with nisa.tensor_scalar",
        )

    def __bool__(self) -> bool:
        return self.refuse_condition()

    __int__ = __index__ = __float__ = __len__ = __iter__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __mod__ = __rmod__ = __pow__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        """Say that it is not None; comparing the value, as `in` does too, raises."""
        return False if other is None else self._refuse()

    def __ne__(self, other: object) -> Any:
        """Say that it is not None; comparing the value raises."""
        return True if other is None else self._refuse()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.state!r})"


class VirtualRegister(SequencerValue):
    """A 32-bit register.

    Args:
        state: the value, or None while it has none.
        frozen: whether the kernel may not write it (loop counters).
    """

    __slots__ = ("frozen",)

    def __init__(self, state: Any = None, frozen: bool = False) -> None:
        super().__init__(state)
        self.frozen = frozen

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


class NkiScalar(SequencerValue):
    """An integer of 32 or 64 bits on the device, of `nisa.scalar_load` or `nl.fori_loop`.

    Sums, differences and products with scalars of its type and with ints wrap, as on the device.
    They cost nothing in the timeline: what the sequencers take for them is not published.

    Args:
        state: the value.
        dtype: int32 or int64.
        is_comparison: whether it is the outcome of a comparison, which nothing takes.
    """

    __slots__ = ("dtype", "is_comparison")

    _what = "an NkiScalar"
    _uses = "Scalars take +, - and *, may bound nl.fori_loop and be a scalar_offset"

    def __init__(self, state: Any, dtype: Any = None, is_comparison: bool = False) -> None:
        super().__init__(state)
        self.dtype: DType = int32 if dtype is None else dtype
        self.is_comparison = is_comparison
        if self.dtype not in _SCALAR_TYPES:
            raise LanguageError("dtype", "int32 or int64", str(self.dtype))

    def read(self) -> int:
        """Return the value.

        Raises:
            LanguageError: it is the outcome of a comparison.
        """
        if self.is_comparison:
            raise LanguageError(
                "scalar",
                "a scalar that was loaded or computed",
                "the outcome of a comparison, which no operation takes",
                "Make a mask with nisa.tensor_scalar instead",
            )
        return int(self.state)

    def _other(self, other: Any) -> int:
        if isinstance(other, NkiScalar) and other.dtype == self.dtype:
            return other.read()
        if isinstance(other, int):
            return int(other)
        found = str(other.dtype) if isinstance(other, NkiScalar) else repr(other)
        raise LanguageError("scalar", f"an int or an NkiScalar of {self.dtype}", found)

    def _wrap(self, value: int) -> NkiScalar:
        half = 1 << (8 * self.dtype.itemsize - 1)
        return NkiScalar((value + half) % (2 * half) - half, self.dtype)

    def __add__(self, other: Any) -> NkiScalar:
        return self._wrap(self.read() + self._other(other))

    def __sub__(self, other: Any) -> NkiScalar:
        return self._wrap(self.read() - self._other(other))

    def __rsub__(self, other: Any) -> NkiScalar:
        return self._wrap(self._other(other) - self.read())

    def __mul__(self, other: Any) -> NkiScalar:
        return self._wrap(self.read() * self._other(other))

    def __neg__(self) -> NkiScalar:
        return self._wrap(-self.read())

    __radd__ = __add__
    __rmul__ = __mul__

    def _compare(self, other: object) -> NkiScalar:
        self._other(other)
        if self.dtype == int64:
            raise LanguageError("scalar", "int32 in a comparison", "int64, which does not compile")
        return NkiScalar(None, int32, is_comparison=True)

    __lt__ = __le__ = __gt__ = __ge__ = _compare
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return False if other is None else self._compare(other)

    def __ne__(self, other: object) -> Any:
        return True if other is None else self._compare(other)


class DynamicSlice:
    """`nl.ds` with a register or scalar as its start."""

    __slots__ = ("size", "start")

    def __init__(self, start: SequencerValue, size: int) -> None:
        self.start = start
        self.size = size
