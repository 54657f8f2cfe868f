"""What the simulator says of published times, as rows, a table by family, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from neuron_moe.tools.console import format_table

NEAR = 0.3
LATER = "timed with a later library than the public one"
COLOURS = {"fitted": "#2a6fb0", "held_out": "#c8501e"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published time beside the estimate and its range, in microseconds.

    `doubt` says why the time may not be one of this kernel; such rows count apart.
    """

    kernel: str
    family: str
    source: str
    chip_us: float
    low_us: float
    estimate_us: float
    high_us: float
    half: str
    doubt: str = ""

    @property
    def error(self) -> float:
        """The size of the error as a share of the published time."""
        return abs(self.estimate_us / self.chip_us - 1.0)

    @property
    def is_inside(self) -> bool:
        """Whether the published time is in the range."""
        return self.low_us <= self.chip_us <= self.high_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Rows together: medians and shares."""

    name: str
    points: int
    median_error: float
    near_share: float
    inside_share: float
    median_spread: float
    median_ratio: float


def summarise(name: str, rows: Sequence[Row]) -> Summary:
    """Return the statistics of some rows, of which there is at least one."""
    return Summary(
        name=name,
        points=len(rows),
        median_error=statistics.median(row.error for row in rows),
        near_share=sum(row.error <= NEAR for row in rows) / len(rows),
        inside_share=sum(row.is_inside for row in rows) / len(rows),
        median_spread=statistics.median(row.high_us / row.low_us for row in rows),
        median_ratio=statistics.median(row.estimate_us / row.chip_us for row in rows),
    )


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """Return the statistics of every family and half, then of doubtful rows, which no half has."""
    found: list[Summary] = []
    for half in COLOURS:
        sure = [row for row in rows if row.half == half and not row.doubt]
        families = {row.family: [r for r in sure if r.family == row.family] for row in sure}
        found.extend(summarise(f"{half}: {name}", some) for name, some in families.items())
        if sure:
            found.append(summarise(f"{half}: all", sure))
    doubtful = [row for row in rows if row.doubt]
    later = [row for row in doubtful if row.doubt == LATER]
    families = {row.family: [r for r in later if r.family == row.family] for row in later}
    found.extend(summarise(f"later library: {name}", some) for name, some in families.items())
    others = [row for row in doubtful if row.doubt != LATER]
    if others:
        found.append(summarise("other doubtful times", others))
    return found


def table(rows: Sequence[Row]) -> str:
    """Return the table of families."""
    head = ["family", "points", "median error", "within 30 %", "inside", "high/low", "est./chip"]
    lines = [head]
    for one in summaries(rows):
        shares = (one.median_error, one.near_share, one.inside_share)
        ends = (f"{one.median_spread:.2f}", f"{one.median_ratio:.3f}")
        lines.append([one.name, str(one.points), *(f"{share:.1%}" for share in shares), *ends])
    return format_table(lines)


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Draw estimates with their ranges over published times, both halves, without doubtful ones."""
    sure = [row for row in rows if not row.doubt]
    if not sure:
        raise ValueError("no row has a time that is surely its own. Run more kernels.")
    figure = Figure(figsize=(6.4, 6.0), dpi=100, layout="constrained")
    axes = figure.subplots()
    for half, colour in COLOURS.items():
        some = [row for row in sure if row.half == half]
        if not some:
            continue
        below = [row.estimate_us - row.low_us for row in some]
        above = [row.high_us - row.estimate_us for row in some]
        axes.errorbar(
            [row.chip_us for row in some],
            [row.estimate_us for row in some],
            (below, above),
            fmt="o",
            ms=2.5,
            lw=0.5,
            c=colour,
            alpha=0.75,
            label=f"{half.replace('_', ' ')} ({len(some)})",
        )
    ends = (min(r.chip_us for r in sure), max(r.chip_us for r in sure))
    axes.plot(ends, ends, c="#111111", lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="published, us", ylabel="simulated, us")
    axes.legend(fontsize=8)
    figure.savefig(path)
    return path
