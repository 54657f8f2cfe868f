"""What pictures draw of a timeline: boxes on the lanes of cores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from nki_sim.hardware import Hardware
from nki_sim.time.lines import LineTable
from nki_sim.time.playback import Schedule


class Interval(NamedTuple):
    """One box of the picture: an instruction on a lane of a core; callers as of the trace."""

    rank: int
    core: int
    lane: str
    start_ns: float
    end_ns: float
    op: str
    file: str
    line: int
    instruction: int
    callers: int = 0


class Drawable(Protocol):
    """A timeline, as far as a picture of it goes."""

    chip: Hardware
    result: Schedule

    @property
    def total_ns(self) -> float:
        """From the first trigger to the last result."""

    def intervals(self) -> Iterator[Interval]:
        """Yield every instruction as a box on a lane, in order of the trace."""

    def line_times(self) -> LineTable:
        """Return what every source line costs, first those that hold up the whole."""


def core_name(core: tuple[int, int]) -> str:
    """Return how a core (rank, number) is called in tables and pictures."""
    rank, number = core
    return f"core {number}" if rank == 0 else f"rank {rank}.{number}"
