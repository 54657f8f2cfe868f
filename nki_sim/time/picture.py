"""A timeline as a picture of the engine lanes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from nki_sim.time.intervals import Drawable, Interval, core_name

_MAX_SEPARATE_BOXES: Final = 120
_COLORS: Final = {
    "tensor": "#3b6fb6",
    "vector": "#d9822b",
    "scalar": "#8a5fb0",
    "gpsimd": "#b04a5a",
    "sync": "#7a7a7a",
    "dma": "#3f9b6d",
    "exchange": "#c2a83e",
}


def save_picture(
    timeline: Drawable, path: str | Path, title: str, start_ns: float = 0.0, end_ns: float = 0.0
) -> Path:
    """Draw the lanes of every core over time into a PNG file.

    Where a lane holds many boxes, those less than a pixel apart are joined, so that the picture of
    a long run stays a small file.

    Raises:
        ValueError: the window is empty.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    end_ns = end_ns or timeline.total_ns
    if not start_ns < end_ns:
        raise ValueError(
            f"start_ns={start_ns}: must lie before end_ns={end_ns}. "
            f"Choose a window inside the run of {timeline.total_ns:.0f} ns."
        )
    lanes: dict[tuple[int, int, str], list[Interval]] = {}
    for box in timeline.intervals():
        if box.end_ns > start_ns and box.start_ns < end_ns:
            lanes.setdefault((box.rank, box.core, box.lane), []).append(box)
    order = sorted(lanes, key=lambda lane: (lane[0], lane[1], list(_COLORS).index(lane[2])))
    figure = Figure(figsize=(14, 1.2 + 0.45 * max(1, len(order))), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width_ns = (end_ns - start_ns) / 3000
    for row, lane in enumerate(order):
        few = len(lanes[lane]) <= _MAX_SEPARATE_BOXES
        pieces = _separate(lanes[lane]) if few else _joined(lanes[lane], width_ns)
        bars = [(begin / 1e3, (end - begin) / 1e3) for begin, end in pieces]
        axes.broken_barh(
            bars,
            (row - 0.38, 0.76),
            facecolors=_COLORS[lane[2]],
            edgecolors="white",
            linewidth=0.4 if few and _are_wide(pieces, 4 * width_ns) else 0.0,
        )
    many = len(timeline.result.graph.cores) > 1
    labels = [f"{core_name(lane[:2])} {lane[2]}" if many else lane[2] for lane in order]
    axes.set_yticks(range(len(order)), labels)
    axes.invert_yaxis()
    axes.set_xlim(start_ns / 1e3, end_ns / 1e3)
    axes.set_xlabel("time, us (simulated)")
    axes.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    target = Path(path)
    figure.savefig(target, format="png")
    return target


def _are_wide(pieces: Sequence[tuple[float, float]], least_ns: float) -> bool:
    """Tell whether every stretch is wide enough to have an edge drawn around it."""
    return all(end - begin >= least_ns for begin, end in pieces)


def _separate(boxes: Sequence[Interval]) -> list[tuple[float, float]]:
    """Return one stretch per box."""
    return [(box.start_ns, box.end_ns) for box in boxes]


def _joined(boxes: Sequence[Interval], width_ns: float) -> list[tuple[float, float]]:
    """Return disjoint stretches, with the gaps closed that are narrower than `width_ns`."""
    starts = np.array([box.start_ns for box in boxes])
    ends = np.array([box.end_ns for box in boxes])
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    breaks = np.flatnonzero(starts[1:] > reach[:-1] + width_ns)
    begins = starts[np.concatenate([[0], breaks + 1])]
    finishes = reach[np.concatenate([breaks, [len(reach) - 1]])]
    return list(zip(begins.tolist(), finishes.tolist(), strict=True))
