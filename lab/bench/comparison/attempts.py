"""The vendor's attempts at a case, and what follows beside our time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What became of one of the vendor's variants or modes.

    Attributes:
        name: of the variant or mode.
        bound_us: no run of it can take less (computed).
        us: simulated time, None if it did not run.
        why: why it did not run, "" if it did.
    """

    name: str
    bound_us: float
    us: float | None = None
    why: str = ""

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Attempt:
        """Return an attempt of a result file; what older files hold besides is dropped."""
        return cls(**{name: entry[name] for name in cls.__slots__})


def fastest(attempts: Sequence[Attempt]) -> Attempt | None:
    """Return the attempt that took the least time, None if none ran."""
    ran = [attempt for attempt in attempts if attempt.us is not None]
    return min(ran, key=lambda attempt: attempt.us or 0.0, default=None)


def against(ours_us: float | None, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return the fields of a row that follow from our time and the vendor's attempts.

    `vendor_us` of the fastest attempt, None if none ran; `vendor_plan`, its name, or why none did;
    `speedup`, vendor_us over our time.
    """
    best = fastest(attempts)
    if best is None or best.us is None:
        why = "; ".join(f"{attempt.name}: {attempt.why}" for attempt in attempts)
        return {"vendor_us": None, "vendor_plan": why, "speedup": None}
    speedup = best.us / ours_us if ours_us else None
    return {"vendor_us": best.us, "vendor_plan": best.name, "speedup": speedup}
