"""How far the ratio of a row may move: both sides under turned knobs of the clock.

Assumed and measured coefficients are halved and doubled, in the groups that would be wrong together
(nki_sim/time/sensitivity.py): each alone, then all that move the ratio one way. The vendor's side
is the variant that is fastest with the coefficients as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import nki_sim
from lab.bench.comparison.knobs import Knobs, in_words
from neuron_moe.tools.timing.pool import Task
from neuron_moe.tools.timing.timelines import corner_timelines
from nki_sim.errors import NkiValidationError
from nki_sim.time.timeline import Timeline

Launch = Callable[[], Iterable[nki_sim.Run]]
DIGITS = 4
PLAYS = 2.0  # seconds of a task over those of simulating its sides


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupRange:
    """What the vendor's time over ours is at least and at most; the fields are a row's.

    `low_with` and `high_with` say with what: "DMA runs x2, Vector x0.5".
    """

    speedup_low: float | None = None
    speedup_high: float | None = None
    low_with: str = ""
    high_with: str = ""


UNKNOWN = {name: getattr(SpeedupRange(), name) for name in SpeedupRange.__slots__}
"""The fields before anything ran."""


def kept_range(before: Any, ours_us: float | None) -> dict[str, Any]:
    """Return the fields of a row's range: as before where our time has not moved, else none.

    Args:
        before: the row as it was, None if there was none.
        ours_us: our time now.
    """
    if before is None or before.ours_us != ours_us:
        return UNKNOWN
    return {name: getattr(before, name) for name in SpeedupRange.__slots__}


@dataclass(frozen=True, slots=True)
class Side:
    """Ours or the vendor's: launches one after the other, which the name stands for."""

    name: Any
    launch: Launch = field(compare=False)


@dataclass(frozen=True, slots=True)
class Pairing:
    """Both sides of some rows in one corner of the clock.

    Attributes:
        corner: its name.
        ours: each with the keys of the rows it stands for.
        theirs: the vendor's.
    """

    corner: str
    ours: Sequence[tuple[Sequence[Hashable], Side]]
    theirs: Side


class SpreadWork:
    """One task: the ranges of some rows. Each side is simulated once, and timed in its corners.

    Args:
        name: the case in words.
        size: the seconds of it, about.
        pairings: one per corner.
        keep: takes the ranges that were found, by key.
    """

    def __init__(
        self,
        name: str,
        size: float,
        pairings: Sequence[Pairing],
        keep: Callable[[Mapping[Any, SpeedupRange]], None],
    ) -> None:
        self.name, self._size, self._pairings, self._keep = name, size, pairings, keep
        self._waits = bool(pairings)

    @property
    def size(self) -> float:
        """The seconds of what still waits, about."""
        return self._size if self._waits else 0.0

    @classmethod
    def of(
        cls,
        name: str,
        pairings: Sequence[Pairing],
        seconds: Callable[[Side], float],
        keep: Callable[[Mapping[Any, SpeedupRange]], None],
    ) -> Iterator[SpreadWork]:
        """Yield a task for all corners in which the vendor's side is the same.

        Args:
            name: the case in words.
            pairings: one per corner.
            seconds: what simulating a side takes, about.
            keep: takes the ranges that were found.
        """
        for theirs in dict.fromkeys(pairing.theirs for pairing in pairings):
            chosen = [pairing for pairing in pairings if pairing.theirs == theirs]
            sides = {theirs, *(side for pairing in chosen for _, side in pairing.ours)}
            yield cls(name, PLAYS * sum(map(seconds, sides)), chosen, keep)

    def next_task(self) -> Task | None:
        """Hand out the one task."""
        if not self._waits:
            return None
        self._waits = False
        return Task("sensitivity", self._size, self._compute)

    def take(self, task: Task, result: Mapping[Any, SpeedupRange]) -> None:
        """Hand on the ranges of the rows."""
        self._keep(result)

    def _compute(self) -> dict[Hashable, SpeedupRange]:
        try:
            timelines = self._timelines()
        except NkiValidationError:
            return {}  # an earlier simulator took the vendor's kernel, this one does not: no range
        found = dict[Hashable, SpeedupRange]()
        for pairing in self._pairings:
            theirs = Knobs(*timelines.pop((pairing.corner, pairing.theirs)))
            for keys, side in pairing.ours:
                ours = Knobs(*timelines.pop((pairing.corner, side)))
                found |= dict.fromkeys(keys, speedup_range(ours, theirs))
        return found

    def _timelines(self) -> dict[tuple[str, Side], list[Timeline]]:
        """Simulate every side; return the timelines of its launches by corner and side."""
        corners = dict[Side, list[str]]()
        for pairing in self._pairings:
            for side in (pairing.theirs, *(side for _, side in pairing.ours)):
                corners.setdefault(side, []).append(pairing.corner)
        found = dict[tuple[str, Side], list[Timeline]]()
        for side, asked in corners.items():
            for run in side.launch():
                for corner, timeline in corner_timelines(run, asked):
                    found.setdefault((corner, side), []).append(timeline)
        return found


def range_in_words(speedup: float, low: float | None, high: float | None) -> str:
    """Return a ratio with its range, where that is known."""
    return f"{speedup:.2f}x" if low is None else f"{speedup:.2f}x ({low:.2f} to {high:.2f})"


def speedup_range(ours: Knobs, theirs: Knobs) -> SpeedupRange:
    """Return the range of a row's speed-up."""
    low, high = ours.spread(theirs)
    return SpeedupRange(
        speedup_low=round(low.ratio, DIGITS),
        speedup_high=round(high.ratio, DIGITS),
        low_with=in_words(low.factors),
        high_with=in_words(high.factors),
    )
