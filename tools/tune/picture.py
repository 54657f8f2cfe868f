"""Time and padding against the block size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from neuron_moe.tools.pages import Picture, picture_of
from neuron_moe.tools.pictures import save_figure

TIME, CHOSEN, ROOFLINE, PADDING = "#2a6fb0", "#c8501e", "#333333", "#9a9a9a"


def draw(buckets: Sequence[dict[str, Any]], title: str, path: Path) -> Path:
    """Draw a column for each length of prompts.

    Args:
        buckets: of `bucket_report`.
        title: above all.
        path: PNG or SVG to write.
    """
    figure = Figure(figsize=(4.2 * len(buckets), 4.6), dpi=120, layout="constrained")
    figure.suptitle(f"{title}  [simulated; roofline and padding computed]", fontsize=10)
    panels = figure.subplots(2, len(buckets), squeeze=False, sharex="col", height_ratios=[3, 1])
    for bucket, (above, below) in zip(buckets, panels.T, strict=True):
        above.set_title(f"{bucket['tokens']} tokens", fontsize=9)
        _draw_bucket(above, below, bucket)
    return save_figure(figure, path)


def picture_of_bucket(bucket: dict[str, Any]) -> Picture:
    """Return the picture of one length of prompts, for a page."""
    figure = Figure(figsize=(4.4, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    _draw_bucket(above, below, bucket)
    caption = f"{bucket['tokens']} tokens: times simulated, roofline and padding computed"
    return picture_of(figure, caption)


def _draw_bucket(above: Axes, below: Axes, bucket: dict[str, Any]) -> None:
    fastest: dict[int, dict[str, Any]] = {}
    for tried in bucket["tried"]:
        fastest.setdefault(tried["block_size"], tried)
    sizes = sorted(fastest)
    places = list(range(len(sizes)))
    times = [fastest[size]["us"] for size in sizes]
    above.plot(places, times, "o-", color=TIME, label="fastest simulated")
    above.axhline(bucket["roofline_us"], color=ROOFLINE, linestyle="--", label="roofline")
    chosen = sizes.index(bucket["in_blocks"]["block_size"])
    above.plot(
        chosen,
        bucket["in_blocks_us"],
        "o",
        color=CHOSEN,
        markersize=13,
        fillstyle="none",
        markeredgewidth=2,
        label=f"chosen: {sizes[chosen]}",
    )
    above.set_ylim(0, 1.3 * max(times))
    above.set_ylabel("us")
    above.legend(fontsize=8, loc="upper center", ncols=3, columnspacing=1.0, handlelength=1.5)
    above.grid(True, axis="y", color="#dddddd", linewidth=0.6)
    below.bar(places, [100 * fastest[size]["padding"] for size in sizes], 0.5, color=PADDING)
    below.set_xticks(places, [str(size) for size in sizes])
    below.set_xlabel("block size")
    below.set_ylabel("padding, %")
