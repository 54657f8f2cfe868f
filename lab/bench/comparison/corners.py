"""The figures of a benchmark by corner of the clock and layout of our weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from lab.bench.averages import geometric_mean
from lab.bench.comparison.deployed import AT_LEAST
from lab.bench.comparison.options import LAYOUTS
from neuron_moe.tools.timing import runs
from nki_sim.time.schedule_model import CORNERS


class CornerRow(Protocol):
    """What a row of either benchmark has."""

    @property
    def label(self) -> str:
        """Layer and size."""

    @property
    def corner(self) -> str:
        """What was assumed of order and loops."""

    @property
    def layout(self) -> str:
        """How our weights lie."""

    @property
    def ours_us(self) -> float | None:
        """Our time."""

    @property
    def speedup(self) -> float | None:
        """The vendor's time over ours."""

    @property
    def speedup_low(self) -> float | None:
        """The least speed-up within the range of the coefficients."""

    @property
    def speedup_high(self) -> float | None:
        """The largest one."""

    @property
    def low_with(self) -> str:
        """What gives the least one."""

    @property
    def deployed_us(self) -> float | None:
        """What NxD's default takes."""

    @property
    def deployed_plan(self) -> str:
        """What that is."""


def by_corner(rows: Sequence[CornerRow]) -> list[dict[str, Any]]:
    """Return the speed-ups of every corner and layout that has any."""
    found = []
    for corner in CORNERS:
        for layout in LAYOUTS:
            chosen = [row for row in rows if (row.corner, row.layout) == (corner, layout)]
            speedups = [row.speedup for row in chosen if row.speedup is not None]
            if speedups:
                found.append(
                    {
                        "corner": corner,
                        "layout": layout,
                        "rows": len(speedups),
                        "geometric_mean_speedup": geometric_mean(speedups),
                        "least_speedup": min(speedups),
                        "largest_speedup": max(speedups),
                        "rows_below_1": sum(speedup < 1.0 for speedup in speedups),
                        **_range(chosen),
                        **_deployed(chosen),
                    }
                )
    return found


def expectation(rows: Sequence[CornerRow]) -> str | None:
    """Say what to expect with weights as the checkpoint has them, and where we do not win.

    The mean of the vendor's corner; the ranges are those of single rows over both corners, as
    things are and with the coefficients that move them furthest.
    """
    plain = [row for row in rows if row.layout == "plain" and row.speedup is not None]
    kind = [row.speedup or 0.0 for row in plain if row.corner == "vendor"]
    mean = geometric_mean(kind)
    if mean is None:
        return None
    ratios = [row.speedup or 0.0 for row in plain]
    lows = [row for row in plain if row.speedup_low is not None]
    turned = ""
    if lows:
        least = min(lows, key=lambda row: row.speedup_low or 0.0)
        most = max(row.speedup_high or 0.0 for row in lows)
        of = "" if len(lows) == len(plain) else f" ({len(lows)} of {len(plain)} rows)"
        turned = (
            f"; coefficients at half to double{of}: {least.speedup_low:.2f}x ({least.label}) to"
            f" {most:.1f}x"
        )
    behind = Counter(row.label for row in plain if (row.speedup or 0.0) < 1.0)
    where = ", ".join(f"{label} ({count})" for label, count in behind.most_common()) or "none"
    return (
        f"expected about {mean:.1f}x, range {min(ratios):.2f}x to {max(ratios):.1f}x{turned};"
        f" rows below 1 of {len(plain)} in both corners: {where}"
    )


def _range(rows: Sequence[CornerRow]) -> dict[str, Any]:
    """Return how far the figures move with the coefficients, each row at its own extreme."""
    speedups = [row.speedup for row in rows if row.speedup is not None and row.speedup_low]
    lows = [row.speedup_low for row in rows if row.speedup_low is not None]
    highs = [row.speedup_high for row in rows if row.speedup_high is not None]
    if not lows:
        return {}
    below = Counter(row.label for row in rows if (row.speedup_low or 1.0) < 1.0)
    hurts = Counter(knob for row in rows for knob in row.low_with.split(", ") if knob)
    return {
        "rows_with_range": len(lows),
        "geometric_mean_of_these": geometric_mean(speedups),
        "geometric_mean_low": geometric_mean(lows),
        "geometric_mean_high": geometric_mean(highs),
        "least_low": min(lows),
        "rows_below_1_at_low": sum(low < 1.0 for low in lows),
        "below_1_at_low": dict(below.most_common()),
        "low_with": dict(hurts.most_common()),
    }


def _deployed(rows: Sequence[CornerRow]) -> dict[str, Any]:
    """Return the mean of what NxD's default takes over our time, where it is simulated."""
    found = [
        row.deployed_us / row.ours_us
        for row in rows
        if row.deployed_us and row.ours_us and not row.deployed_plan.endswith(AT_LEAST)
    ]
    if not found:
        return {}
    return {"rows_deployed": len(found), "geometric_mean_deployed": geometric_mean(found)}


def corner_lines(found: Sequence[dict[str, Any]]) -> str:
    """Say the same in lines of text."""
    lines = []
    for one in found:
        lines.append(
            f"{one['corner']} corner, {one['layout']} weights: {one['geometric_mean_speedup']:.2f}x"
            f" in the mean of {one['rows']} rows, {one['least_speedup']:.2f}x to"
            f" {one['largest_speedup']:.2f}x, {one['rows_below_1']} below 1 ({runs.kind()})"
        )
        if "least_low" in one:
            hurts = ", ".join(f"{knob} ({count})" for knob, count in one["low_with"].items())
            lines.append(
                f"  coefficients x0.5 to x2, each of {one['rows_with_range']} rows at its own"
                f" extreme: mean {one['geometric_mean_of_these']:.2f}x is"
                f" {one['geometric_mean_low']:.2f}x to"
                f" {one['geometric_mean_high']:.2f}x, least {one['least_low']:.2f}x,"
                f" {one['rows_below_1_at_low']} below 1; what hurts most, by rows: {hurts}"
            )
        if "geometric_mean_deployed" in one:
            lines.append(
                f"  NxD's default takes {one['geometric_mean_deployed']:.2f}x our time in the mean"
                f" of the {one['rows_deployed']} rows where it is a kernel ({runs.kind()})"
            )
    return "\n".join(lines)
