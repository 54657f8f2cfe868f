"""The figures of a benchmark beside the vendor's kernels, by layout of our weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from lab.bench.averages import geometric_mean
from lab.bench.comparison.deployed import AT_LEAST
from lab.bench.comparison.options import LAYOUTS
from neuron_moe.tools.timing import runs
from neuron_moe.tools.timing.timelines import overhead
from nki_sim.time.estimate import Estimate, Ratio


class ComparedRow(Protocol):
    """What a row of either benchmark has."""

    @property
    def layout(self) -> str:
        """The layout of our weights."""

    @property
    def ours(self) -> Estimate | None:
        """Our time."""

    @property
    def ratio(self) -> Ratio | None:
        """The vendor's time over ours."""

    @property
    def deployed_us(self) -> float | None:
        """What NxD's default takes."""

    @property
    def deployed_plan(self) -> str:
        """What that is."""


def by_layout(rows: Sequence[ComparedRow]) -> list[dict[str, Any]]:
    """Return the ratios of every layout that has any: likely ones, and the ends of their ranges."""
    found = []
    for layout in LAYOUTS:
        chosen = [row for row in rows if row.layout == layout]
        ratios = [row.ratio for row in chosen if row.ratio is not None]
        if ratios:
            likely, low = [one.likely for one in ratios], [one.low for one in ratios]
            found.append(
                {
                    "layout": layout,
                    "rows": len(ratios),
                    "geometric_mean": geometric_mean(likely),
                    "least": min(likely),
                    "largest": max(likely),
                    "geometric_mean_low": geometric_mean(low),
                    "least_low": min(low),
                    "largest_high": max(one.high for one in ratios),
                    "rows_below_1_at_low": sum(one < 1.0 for one in low),
                    **_deployed(chosen),
                }
            )
    return found


def _deployed(rows: Sequence[ComparedRow]) -> dict[str, Any]:
    """Return the mean of what NxD's default takes over our time, where it is simulated."""
    found = [
        row.deployed_us / row.ours.us
        for row in rows
        if row.deployed_us and row.ours and not row.deployed_plan.endswith(AT_LEAST)
    ]
    if not found:
        return {}
    return {"rows_deployed": len(found), "geometric_mean_deployed": geometric_mean(found)}


def share_of(bound_us: float, ours: Estimate | None) -> float | None:
    """Return which share of our time is its bound, what a program takes beside its launches apart.

    The likely time counts.
    """
    return None if ours is None else bound_us / (ours.us - overhead().us)


def figure_lines(found: Sequence[dict[str, Any]]) -> str:
    """Say the same in lines of text."""
    lines = []
    for one in found:
        lines.append(
            f"{one['layout']} weights: {one['geometric_mean']:.2f}x in the mean of"
            f" {one['rows']} rows, {one['least']:.2f}x to {one['largest']:.2f}x; at the unkind end"
            f" of each row's range {one['geometric_mean_low']:.2f}x, least {one['least_low']:.2f}x,"
            f" {one['rows_below_1_at_low']} below 1 ({runs.kind()})"
        )
        if "geometric_mean_deployed" in one:
            lines.append(
                f"  NxD's default takes {one['geometric_mean_deployed']:.2f}x our time in the mean"
                f" of the {one['rows_deployed']} rows where it is a kernel ({runs.kind()})"
            )
    return "\n".join(lines)
