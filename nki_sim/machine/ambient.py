"""The core that the running kernel is on, as the lowest files of the machine see it.

Registers and tensors are used without naming a core, so they request the ambient one here. What a
core is they need not know: `core.py` gives the same functions their full types.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from nki_sim.options import Version


class _Ambient(Protocol):
    """What a register or a tensor may ask of the core it is used on."""

    nki: Version
    watches_numbers: bool

    def while_condition(self, register: Any) -> bool:
        """Serve ``while register:``."""

    def count_birth(self) -> int:
        """Return the number of a new tensor or register."""

    def note(self, kind: str, text: str) -> None:
        """Keep a finding about the kernel's present line."""


_CORE: ContextVar[_Ambient | None] = ContextVar("nki_sim_core", default=None)

running = _CORE.get


def current() -> _Ambient:
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


@contextmanager
def on_core(core: _Ambient) -> Iterator[None]:
    """Let the body run on a core."""
    token = _CORE.set(core)
    try:
        yield
    finally:
        _CORE.reset(token)
