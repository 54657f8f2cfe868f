"""The vendor's attempts at a case, and who is the faster one beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What became of one of the vendor's variants or modes.

    Attributes:
        name: of the variant or mode.
        bound_us: no run of it can take less (computed).
        us: simulated time, None if it did not run.
        why: why it did not run, "" if it did.
        varied: times with one coefficient changed, by `timelines`' names; only changes that move
            it.
    """

    name: str
    bound_us: float
    us: float | None = None
    why: str = ""
    varied: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What follows from both sides' times; None where a side did not run.

    Attributes:
        vendor_us: of the fastest attempt.
        vendor_plan: its name, or why none ran.
        vendor_varied: the vendor's least time under each change of a coefficient.
        speedup: vendor_us over our time.
        turned_by: the changes under which the faster side is no longer the faster one.
        survives: whether there is no such change.
    """

    vendor_us: float | None
    vendor_plan: str
    vendor_varied: dict[str, float]
    speedup: float | None
    turned_by: list[str]
    survives: bool | None


def compare(
    ours_us: float | None, ours_varied: Mapping[str, float], attempts: Sequence[Attempt]
) -> Comparison:
    """Hold our time, and those under changes of coefficients, against the vendor's attempts."""
    ran = [a for a in attempts if a.us is not None]
    best = min(ran, key=lambda a: a.us or 0.0, default=None)
    failures = "; ".join(f"{a.name}: {a.why}" for a in attempts)
    vendor_us = best.us if best else None
    varied = least_us((a.us, a.varied) for a in ran if a.varied and a.us)
    turned, survives = list[str](), None
    if vendor_us and ours_us and varied and ours_varied:
        turned = turned_by(ours_us, ours_varied, vendor_us, varied)
        survives = not turned
    return Comparison(
        vendor_us=vendor_us,
        vendor_plan=best.name if best else failures,
        vendor_varied=varied,
        speedup=vendor_us / ours_us if vendor_us and ours_us else None,
        turned_by=turned,
        survives=survives,
    )


def least_us(times: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Return the least time of several runs under every change that moves one of them.

    Args:
        times: of each run its time as it is, and those under changes.
    """
    runs = list(times)
    changes = sorted({change for _, varied in runs for change in varied})
    return {change: min(varied.get(change, us) for us, varied in runs) for change in changes}


def turned_by(
    ours_us: float, ours: Mapping[str, float], vendor_us: float, vendor: Mapping[str, float]
) -> list[str]:
    """Return the changes under which the faster of two is no longer the faster one."""
    is_ours = ours_us < vendor_us
    return [
        change
        for change in sorted({*ours, *vendor})
        if (ours.get(change, ours_us) < vendor.get(change, vendor_us)) != is_ours
    ]
