"""Dynamic loops: `nl.fori_loop` and `nl.while_loop`, and of NKI 0.6 `nl.dynamic_range`.

The body runs once per iteration on the current values, as the hardware would; `machine/program.py`
notes begin, iterations and end, and serves ``while register:`` of NKI 0.6. An iteration that issues
other instructions than the first, because Python state changed, is refused: the compiler sees the
body once. A loop left by break or return is found when the kernel ends; continue only by the
linter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from nki_sim.dtypes import int64
from nki_sim.errors import LanguageError
from nki_sim.machine import (
    Core,
    NkiScalar,
    NkiTensor,
    SequencerValue,
    VirtualRegister,
    current,
)
from nki_sim.machine.program import Loop
from nki_sim.machine.tensor import read_index


def _bound(value: Any) -> int:
    """Return a loop bound: an int, a register, a scalar, or a one-element tensor loaded."""
    if isinstance(value, NkiScalar) and value.dtype == int64:
        raise LanguageError("bound", "32 bits", "an int64 scalar", "Load it from an int32 tile")
    if isinstance(value, (SequencerValue, NkiTensor)):
        return read_index(value)
    return int(value)


def dynamic_range(start: Any, stop: Any = None, step: Any = 1) -> Iterator[VirtualRegister]:
    """Loop over a register whose bounds are known only at run time.

    Args:
        start: first value, or the number of iterations where `stop` is left out; int or register.
        stop: end, int or register.
        step: positive int.
    """
    core = current()
    line = core.here()
    if core.nki != "0.6":
        raise LanguageError(
            "loop",
            "nl.fori_loop(lower, upper, body)",
            "nl.dynamic_range, which NKI 0.7 has no more",
            'Use a body function, or SimOptions(nki="0.6"), NKI_COMPILER_FRONTEND=custom',
            instruction="dynamic_range",
            location=core.location(),
        )
    text = "nl.dynamic_range is deprecated. Use nl.fori_loop."
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    first, last = (0, _bound(start)) if stop is None else (_bound(start), _bound(stop))
    by = _step(step)
    return _counted(core, line, first, last, by)


def _step(step: Any) -> int:
    if isinstance(step, SequencerValue) and current().nki != "0.6":
        raise LanguageError("step", "an int known at compile time", repr(step))
    by = _bound(step)
    if by < 1:
        raise LanguageError("step", "a positive number", str(by))
    return by


def _counted(core: Core, line: int, first: int, last: int, by: int) -> Iterator[VirtualRegister]:
    loop = Loop(core, line)
    for value in range(first, last, by):
        loop.iteration()
        yield VirtualRegister(value, frozen=True)
    loop.end()


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any], Any], step: int = 1) -> None:
    """Run `body_fun(i)` for i from `lower` below `upper`.

    Args:
        lower, upper: int, register or scalar, of 32 bits.
        body_fun: takes the counter: a register in NKI 0.6 and where a bound is one, else a scalar;
            writing it has no effect. Returns nothing.
        step: positive int.
    """
    core = current()
    is_register = core.nki == "0.6" or any(isinstance(b, VirtualRegister) for b in (lower, upper))
    counter = VirtualRegister if is_register else NkiScalar
    loop = Loop(core, core.here())
    for value in range(_bound(lower), _bound(upper), _step(step)):
        loop.iteration()
        if body_fun(counter(value)) is not None:
            raise LanguageError("body_fun", "a body that returns nothing", "a returned value")
        if loop.is_enough():
            loop.forget()
            break
    loop.end()


def while_loop(init: VirtualRegister, body_fun: Callable[[Any], Any]) -> None:
    """Run `body_fun(register)`, which returns the next register, until the register is 0."""
    core = current()
    if not isinstance(init, VirtualRegister):
        raise LanguageError(
            "init", "a register", repr(init), "Load the condition with nisa.register_alloc"
        )
    loop = Loop(core, core.here())
    register = init
    while (value := register.read()) != 0:
        loop.check_progress(value)
        loop.iteration()
        loop.body.carried = register
        register = body_fun(register)
        if not isinstance(register, VirtualRegister):
            raise LanguageError("body_fun", "a body that returns a register", repr(register))
    loop.end()
