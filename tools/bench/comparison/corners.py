"""The figures of a benchmark by corner of the clock and layout of our weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from neuron_moe.tools.bench.averages import geometric_mean
from neuron_moe.tools.bench.comparison.options import LAYOUTS
from nki_sim.time.schedule_model import CORNERS


class CornerRow(Protocol):
    """What a row of either benchmark has."""

    @property
    def corner(self) -> str:
        """What was assumed of order and loops."""

    @property
    def layout(self) -> str:
        """How our weights lie."""

    @property
    def speedup(self) -> float | None:
        """The vendor's time over ours."""


def by_corner(rows: Sequence[CornerRow]) -> list[dict[str, Any]]:
    """Return the speed-ups of every corner and layout that has any."""
    found = []
    for corner in CORNERS:
        for layout in LAYOUTS:
            speedups = [
                row.speedup
                for row in rows
                if (row.corner, row.layout) == (corner, layout) and row.speedup is not None
            ]
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
                    }
                )
    return found


def corner_lines(found: Sequence[dict[str, Any]]) -> str:
    """Say the same in lines of text."""
    return "\n".join(
        f"{one['corner']} corner, {one['layout']} weights: {one['geometric_mean_speedup']:.2f}x in"
        f" the mean of {one['rows']} rows, {one['least_speedup']:.2f}x to"
        f" {one['largest_speedup']:.2f}x, {one['rows_below_1']} below 1 (simulated)"
        for one in found
    )
