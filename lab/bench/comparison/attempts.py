"""The vendor's attempts at a case, and what follows beside our time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neuron_moe.tools.timing.timelines import program, time_of
from nki_sim.time.estimate import Estimate, Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What became of one of the vendor's variants or modes.

    Attributes:
        name: of the variant or mode.
        bound_us: no run of it can take less (computed).
        us: simulated time, the likely one, None if it did not run; what a program takes beside its
            launches is not in it.
        low_us, high_us: its range, of those only that were the fastest when they ran.
        why: why it did not run, "" if it did.
    """

    name: str
    bound_us: float
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    why: str = ""

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Attempt:
        """Return an attempt of a result file; what older files hold besides is dropped."""
        return cls(**{name: entry[name] for name in cls.__slots__ if name in entry})

    def timed(self, timeline: Any, most_us: float) -> Attempt:
        """Return the attempt with its time, and with a range unless another one is faster.

        Args:
            timeline: of its run.
            most_us: what the fastest so far takes.
        """
        if timeline.total_us > most_us:
            return replace(self, us=timeline.total_us)
        return self.taking(time_of(timeline))

    def taking(self, time: Estimate) -> Attempt:
        """Return the attempt with a time."""
        return replace(self, us=time.us, low_us=time.low_us, high_us=time.high_us)

    @property
    def time(self) -> Estimate | None:
        """Its time with the range, None if one of them is not known."""
        if self.us is None or self.low_us is None or self.high_us is None:
            return None
        return Estimate(low_us=self.low_us, us=self.us, high_us=self.high_us)


def fastest(attempts: Sequence[Attempt]) -> Attempt | None:
    """Return the attempt that likely takes the least time, None if none ran."""
    ran = [attempt for attempt in attempts if attempt.us is not None]
    return min(ran, key=lambda attempt: attempt.us or 0.0, default=None)


def against(ours: Estimate | None, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return the fields of a row that follow from our time and the vendor's attempts.

    `theirs`, the time of the fastest attempt as a program, None if none ran; `vendor_plan`, its
    name, or why none did; `ratio`, theirs over ours.
    """
    best = fastest(attempts)
    if best is None or best.time is None:
        why = "; ".join(f"{attempt.name}: {attempt.why}" for attempt in attempts)
        return {"theirs": None, "vendor_plan": why, "ratio": None}
    theirs = program([best.time])
    return {
        "theirs": theirs,
        "vendor_plan": best.name,
        "ratio": theirs.over(ours) if ours is not None else None,
    }


def read_time(entry: Mapping[str, float] | None) -> Estimate | None:
    """Return a time of a result file."""
    return None if entry is None else Estimate(**entry)


def read_ratio(entry: Mapping[str, float] | None) -> Ratio | None:
    """Return a ratio of a result file."""
    return None if entry is None else Ratio(**entry)
