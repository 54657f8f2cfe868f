"""The picture of a layer's time: experts, what lies outside, and the layer in several launches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from lab.bench.layer.work import Row

EXPERTS, OUTSIDE, APART = "#2a6fb0", "#c8501e", "#111111"


def draw_layers(rows: Sequence[Row], path: Path) -> Path:
    """Draw each timed row of the vendor's corner, or of the only one, against its experts.

    Args:
        rows: of the benchmark.
        path: PNG to write.
    """
    timed = [row for row in rows if row.layer_us and row.experts_us and row.apart_us]
    corners = list(dict.fromkeys(row.corner for row in timed))
    shown = [row for row in timed if row.corner == corners[0]]
    figure = Figure(figsize=(8.0, 1.2 + 0.22 * len(shown)), dpi=120, layout="constrained")
    axes = figure.subplots()
    names = [row.name for row in shown]
    experts = [1.0] * len(shown)
    outside = [(row.layer_us or 0.0) / (row.experts_us or 1.0) - 1.0 for row in shown]
    apart = [(row.apart_us or 0.0) / (row.experts_us or 1.0) for row in shown]
    axes.barh(names, experts, color=EXPERTS, label="experts and combine")
    axes.barh(names, outside, left=experts, color=OUTSIDE, label="the layer's rest")
    axes.plot(apart, names, "|", color=APART, markersize=9, label="in several launches")
    axes.invert_yaxis()
    axes.set_xlabel("time over that of the experts alone")
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=8, loc="lower right")
    corner = f"{corners[0]} corner" if corners else "nothing timed"
    axes.set_title(f"one MoE layer on one rank of 8, {corner} [simulated]", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
