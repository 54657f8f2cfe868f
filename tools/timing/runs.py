"""Who runs the kernels of a benchmark: the simulator, or a device that was put in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

import nki_sim


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A launch on a device: it has a time, and nothing to explain it.

    Attributes:
        total_us: of the launch, what every launch takes left out.
    """

    total_us: float

    @property
    def timeline(self) -> MeasuredRun:
        """Itself: a run's timeline has its time."""
        return self


class Runner(Protocol):
    """Runs a kernel with the arguments of `nki_sim.run`."""

    @property
    def kind(self) -> str:
        """What its times are: measured or simulated."""

    def __call__(self, kernel: Any, *arguments: Any, lnc: int, **options: Any) -> Any:
        """Return a run."""


_RUNNER: Final[ContextVar[Runner | None]] = ContextVar("runner", default=None)


def run(kernel: Any, *arguments: Any, lnc: int, **options: Any) -> nki_sim.Run:
    """Run a kernel where this benchmark runs its kernels; on a device it is a `MeasuredRun`."""
    runner = _RUNNER.get() or nki_sim.run
    found: nki_sim.Run = runner(kernel, *arguments, lnc=lnc, **options)
    return found


def kind() -> str:
    """Return what the times of this benchmark are."""
    runner = _RUNNER.get()
    return "simulated" if runner is None else runner.kind


def is_device() -> bool:
    """Say whether a device runs the kernels of this benchmark."""
    return _RUNNER.get() is not None


@contextmanager
def running_with(runner: Runner) -> Iterator[None]:
    """Let a device run the kernels while the context lasts."""
    token = _RUNNER.set(runner)
    try:
        yield
    finally:
        _RUNNER.reset(token)
