"""What goes wrong in a kernel, as exception classes that say where and why.

Each error names the kernel's file and line, the instruction, the operand, what was expected and
what was found. The decorator of instructions fills in the place (`isa/_instruction.py`), so a check
only says what it knows: ``raise IllegalOperand("data1", "at most 128 partitions", "160")``.
"""

from __future__ import annotations


class NkiValidationError(Exception):
    """A kernel broke a rule of the language, of the hardware or of memory.

    Args:
        operand: name of the parameter that is wrong, or what was looked at.
        expected: the rule.
        found: the value that breaks it.
        hint: a way out, one sentence; may be empty.
        instruction: name of the instruction; filled in by the wrapper if empty.
        location: "file:line" of the kernel; filled in by the wrapper if empty.

    Attributes:
        about: the tensor that the error is about if its name does not tell, as for unnamed ones.
    """

    about: object = None

    def __init__(
        self,
        operand: str,
        expected: str,
        found: str,
        hint: str = "",
        *,
        instruction: str = "",
        location: str = "",
    ) -> None:
        super().__init__(operand, expected, found)
        self.operand = operand
        self.expected = expected
        self.found = found
        self.hint = hint
        self.instruction = instruction
        self.location = location

    def __str__(self) -> str:
        where = f"{self.location}: " if self.location else ""
        what = f"{self.instruction}: " if self.instruction else ""
        hint = f". {self.hint}" if self.hint else ""
        return f"{where}{what}{self.operand}: expected {self.expected}; found {self.found}{hint}"


class IllegalOperand(NkiValidationError):
    """An operand has a shape, type, memory or value that the instruction does not take."""


class CapacityError(NkiValidationError):
    """A memory is full, or a tensor does not fit where it was placed."""


class UninitializedRead(NkiValidationError):
    """A value that nobody wrote reached an output or an address."""


class OverlapError(NkiValidationError):
    """A tensor was read after another tensor placed on the same bytes had overwritten it."""


class OutOfBounds(NkiValidationError):
    """An access leaves its tensor."""


class AccumulateError(NkiValidationError):
    """A matmul adds to PSUM that no matmul has written."""


class RaceError(NkiValidationError):
    """Two cores or ranks touch the same shared bytes, one of them writing, without an order."""


class DivergenceError(NkiValidationError):
    """The cores of a launch took different dynamic loops or met at different places."""


class DeadlockError(NkiValidationError):
    """Every core that is still running waits for another one."""


class LanguageError(NkiValidationError):
    """The kernel uses the language in a way that does not compile."""


class OldDialectError(LanguageError):
    """The kernel is written in a dialect of NKI that is gone; `expected` is the form of today."""


class UnknownValue(NkiValidationError):
    """An address or register depends on arithmetic that `indices` mode leaves out."""
