"""The picture of both decode modes over the tokens of a step, the chosen one marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

PICTURE_MODELS = ("gpt-oss-120b", "llama4-scout", "qwen3-30b", "mixtral-8x7b")
PICTURE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SELECTIVE, ALL, CHOSEN = "#2a6fb0", "#c8501e", "#111111"


def draw_switch(points: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw the times of both modes against B, a panel for each model.

    Args:
        points: model, tp, B, selective_us, all_us, chosen, loss, experts.
        path: PNG to write.
    """
    names = list(dict.fromkeys(point["model"] for point in points))
    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(5.6 * columns, 3.7 * rows + 0.5), dpi=120, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat[len(names) :]:
        axes.set_visible(False)
    for name, axes in zip(names, panels.flat, strict=False):
        _draw_model(axes, [point for point in points if point["model"] == name])
    worst = max(point["loss"] for point in points)
    figure.suptitle(
        f"decode_moe, one layer on one rank, bf16, uniform routing [simulated]: the chosen mode is"
        f" at most {worst:.1%} from the better",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _draw_model(axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    batches = [point["B"] for point in points]
    chosen = [point[f"{point['chosen']}_us"] for point in points]
    axes.plot(batches, chosen, "o", color=CHOSEN, markersize=9, fillstyle="none", label="chosen")
    for mode, colour, marker, label in (
        ("selective", SELECTIVE, "o", "touched experts only"),
        ("all", ALL, "s", "all experts"),
    ):
        times = [point[f"{mode}_us"] for point in points]
        axes.plot(batches, times, "-", marker=marker, color=colour, markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(B) for B in batches])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of a step (B)")
    axes.set_ylabel("us")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    first = points[0]
    touched = ", ".join(str(point["touched"]) for point in points)
    experts = f"{first['experts']} experts, touched at each B: {touched}"
    axes.set_title(
        f"{first['model']} TP{first['tp']}: {experts}",
        fontsize=8.5,
        loc="left",
    )
    axes.legend(fontsize=8, loc="lower right")
