"""What a chip, or what stands for one, has to offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from nki_sim import SimOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A kernel with everything it is launched with.

    Attributes:
        name: for messages.
        kernel: a `nki.jit` function.
        arguments: its arguments by position; arrays are NumPy.
        options: its arguments by name.
        cores: physical cores of the launch.
        launches: of the kernel in one program; each further one takes what the one before returned
            as its first argument.
        simulation: how to simulate it where it is simulated; None: for its times alone.
    """

    name: str
    kernel: Any
    arguments: Sequence[Any]
    options: dict[str, Any]
    cores: int
    launches: int = 1
    simulation: SimOptions | None = None


class Untried(OSError):
    """This machine lacks something that is needed for asking, so that there is no answer."""


class Loaded(Protocol):
    """A kernel that was compiled and can be launched."""

    def run(self) -> Any:
        """Launch it once and return what it returned, arrays."""

    def time_ns(self) -> float:
        """Launch it once and return how long that took, the launch included."""


class Device(Protocol):
    """Something that runs kernels."""

    @property
    def name(self) -> str:
        """What it is."""

    @property
    def kind(self) -> Literal["measured", "simulated"]:
        """What its times are."""

    def load(self, job: Job) -> Loaded:
        """Compile a kernel; what goes wrong is raised with the compiler's message."""
