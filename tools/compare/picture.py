"""The distances of `neuron-moe compare` as a picture."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from neuron_moe.tools.compare.divergence import Row
from neuron_moe.tools.pictures import save_figure

OURS, REFERENCE, ALLOWED_COLOUR = "#c8501e", "#2a6fb0", "#9a9a9a"


def draw_divergence(rows: Sequence[Row], path: Path, *, title: str) -> Path:
    """Draw, over the stages, distances of the whole run and of each stage alone, and flips.

    Args:
        rows: from `compare_layers`.
        path: PNG to write.
        title: says what was compared, and that the numbers are measured.
    """
    places = range(len(rows))
    figure = Figure(figsize=(max(7.0, 0.22 * len(rows) + 4), 6.4), dpi=120)
    whole, alone, flips = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2))
    _line(whole, places, [row.drift.rms for row in rows], OURS, "model, whole run")
    drift = [row.rounded_drift.rms for row in rows]
    _line(whole, places, drift, REFERENCE, "reference in bfloat16")
    _line(alone, places, [row.alone_rms for row in rows], OURS, "model, stage alone")
    allowed = [row.allowed_rms for row in rows]
    _line(alone, places, allowed, ALLOWED_COLOUR, "allowed")
    over = [place for place, row in enumerate(rows) if row.exceeds]
    alone.plot(over, [rows[place].alone_rms for place in over], "x", color="black", label="over")
    flips.bar(places, [row.flips.num_tokens for row in rows], color=OURS, label="model")
    flips.plot(
        places,
        [row.rounded_flips.num_tokens for row in rows],
        "_",
        color=REFERENCE,
        label="reference",
    )
    for axes, label in ((whole, "rms / exact"), (alone, "rms / exact"), (flips, "flips")):
        axes.set_ylabel(label)
        axes.set_axisbelow(True)
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.legend(fontsize=7, loc="upper left")
    step = max(1, len(rows) // 24)
    flips.set_xticks(places[::step], [row.name for row in rows][::step], rotation=60, fontsize=7)
    whole.set_title(title, fontsize=9, loc="left")
    return save_figure(figure, path, bbox_inches="tight")


def _line(axes: Axes, places: range, values: list[float], colour: str, label: str) -> None:
    shown = [value or math.nan for value in values]  # a logarithmic axis has no zero
    axes.semilogy(places, shown, "o-", ms=3, color=colour, label=label)
