"""Who runs the kernels of a check: the simulator, or whoever was put in its place.

The cases under `kernel_cases` draw inputs, call `launch` for each of their kernels and judge what
comes back. `launching_with` puts a chip, or anything else, behind that call for a while.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import nki_sim


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What a launch gave.

    Attributes:
        outputs: as the kernel returns them, arrays.
        us: how long it took, in microseconds.
    """

    outputs: Any
    us: float


class Launcher(Protocol):
    """Runs a kernel."""

    def __call__(self, kernel: Any, *arguments: Any, lnc: int, **options: Any) -> Launched:
        """Run a kernel on `lnc` cores with arguments by position and by name."""


def simulate(kernel: Any, *arguments: Any, lnc: int, **options: Any) -> Launched:
    """Run a kernel on the simulator; `options` of the simulation go by that name."""
    given = options.pop("options", nki_sim.SimOptions())
    target = dataclasses.replace(given, target=given.target or chip())
    run = nki_sim.run(kernel, *arguments, lnc=lnc, options=target, **options)
    show(run)
    return Launched(outputs=run.outputs, us=run.timeline.total_us)


_LAUNCHER: ContextVar[Launcher] = ContextVar("launcher", default=simulate)


_CHIP: ContextVar[str] = ContextVar("chip", default="trn2")


_WATCHER: ContextVar[Callable[[nki_sim.Run], None] | None] = ContextVar("watcher", default=None)


def show(run: nki_sim.Run) -> None:
    """Let whoever watches see a run of the simulator."""
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher(run)


@contextmanager
def watching(watcher: Callable[[nki_sim.Run], None]) -> Iterator[None]:
    """Let a function see each run of the simulator while the context lasts."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def chip() -> str:
    """Return the chip that this check is about."""
    return _CHIP.get()


@contextmanager
def checking_for(name: str) -> Iterator[None]:
    """Let a check be about a chip while the context lasts."""
    token = _CHIP.set(name)
    try:
        yield
    finally:
        _CHIP.reset(token)


def launch(kernel: Any, *arguments: Any, lnc: int, **options: Any) -> Launched:
    """Run a kernel where this check runs its kernels."""
    return _LAUNCHER.get()(kernel, *arguments, lnc=lnc, **options)


@contextmanager
def launching_with(launcher: Launcher) -> Iterator[None]:
    """Let a launcher run the kernels while the context lasts."""
    token = _LAUNCHER.set(launcher)
    try:
        yield
    finally:
        _LAUNCHER.reset(token)
