"""A timeline as a picture of the engine lanes, coloured by the source lines that it hangs on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from nki_sim.time.intervals import Drawable, Interval, core_name
from nki_sim.time.lines import LineTable, LineTime

_MAX_SEPARATE_BOXES: Final = 120
_LANES: Final = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma", "exchange")
_LINE_COLORS: Final = (
    "#c8501e",
    "#2a6fb0",
    "#3a8f3a",
    "#6f4fb0",
    "#d9a441",
    "#4fb0b0",
    "#c06090",
)
_OTHER: Final = "#cccccc"
_LEGEND_COLUMNS: Final = 185
_PIXELS: Final = 1500  # across; what is closer is joined
_HEIGHT: Final = 0.76  # of a lane, whose neighbour is 1 away

Group = tuple[str, int, str, int]
"""File, line, operation and callers: the boxes of one colour."""


def save_picture(
    timeline: Drawable, path: str | Path, title: str, start_ns: float = 0.0, end_ns: float = 0.0
) -> Path:
    """Draw the lanes of every core over time into a PNG file; see `lanes_figure`.

    Raises:
        ValueError: the window is empty.
    """
    figure = lanes_figure(timeline, title, start_ns, end_ns)
    target = Path(path)
    figure.savefig(target, format="png")
    return target


def lanes_figure(timeline: Drawable, title: str, start_ns: float = 0.0, end_ns: float = 0.0) -> Any:
    """Draw the lanes of every core over time; return matplotlib's Figure.

    The lines that hold up the whole longest have colours, and stand below with their source.
    Where a lane holds many boxes, those less than a pixel apart are joined, so that the picture of
    a long run stays a small file. Transfers overlap: on `dma` each colour has a track of its own.

    Raises:
        ValueError: the window is empty.
    """
    from matplotlib.figure import Figure

    end_ns = end_ns or timeline.total_ns
    if not start_ns < end_ns:
        raise ValueError(
            f"start_ns={start_ns}: must be before end_ns={end_ns}. "
            f"Choose a window inside the run of {timeline.total_ns:.0f} ns."
        )
    hot = timeline.line_times()[: len(_LINE_COLORS)]
    lanes = _lanes(timeline.intervals(), start_ns, end_ns)
    inches = 1.2 + 0.45 * max(1, len(lanes)) + 0.2 * (len(hot) + 1)
    figure = Figure(figsize=(14, inches), dpi=120)
    axes = figure.add_subplot()
    colors = dict(zip(map(_group_of, hot), _LINE_COLORS, strict=False))
    for row, boxes in enumerate(lanes.values()):
        _draw_lane(axes, row, boxes, colors, (end_ns - start_ns) / _PIXELS)
    many = len(timeline.result.graph.cores) > 1
    labels = [f"{core_name(lane[:2])} {lane[2]}" if many else lane[2] for lane in lanes]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(start_ns / 1e3, end_ns / 1e3)
    axes.set_xlabel("time, us (simulated)")
    axes.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _add_legend(figure, hot, timeline.total_ns)
    figure.tight_layout(rect=(0.0, 0.2 * (len(hot) + 1) / inches, 1.0, 1.0))
    return figure


def _lanes(
    boxes: Iterable[Interval], start_ns: float, end_ns: float
) -> dict[tuple[int, int, str], list[Interval]]:
    """Return the boxes inside a window by rank, core and lane, in the order of the picture."""
    lanes: dict[tuple[int, int, str], list[Interval]] = {}
    for box in boxes:
        if box.end_ns > start_ns and box.start_ns < end_ns:
            lanes.setdefault((box.rank, box.core, box.lane), []).append(box)
    order = sorted(lanes, key=lambda lane: (lane[0], lane[1], _LANES.index(lane[2])))
    return {lane: lanes[lane] for lane in order}


def _draw_lane(
    axes: Any, row: int, boxes: Sequence[Interval], colors: dict[Group, str], width_ns: float
) -> None:
    """Draw the boxes of a lane, those of the lines without a colour of their own first."""
    by_color: dict[str, list[Interval]] = {}
    for box in boxes:
        by_color.setdefault(colors.get(_group_of(box), _OTHER), []).append(box)
    order = [color for color in (_OTHER, *colors.values()) if color in by_color]
    has_tracks = boxes[0].lane == "dma"
    height = _HEIGHT / len(order) if has_tracks else _HEIGHT
    for number, color in enumerate(order):
        few = len(boxes) <= _MAX_SEPARATE_BOXES
        chosen = by_color[color]
        pieces = _separate(chosen) if few else _joined(chosen, width_ns)
        axes.broken_barh(
            [(begin / 1e3, (end - begin) / 1e3) for begin, end in pieces],
            (row - _HEIGHT / 2 + (number * height if has_tracks else 0.0), height),
            facecolors=color,
            edgecolors="white",
            linewidth=0.4 if few and _are_wide(pieces, 4 * width_ns) else 0.0,
        )


def _add_legend(figure: Any, hot: LineTable, total_ns: float) -> None:
    """Write the lines with a colour below the lanes: by how much they hold up the whole."""
    from matplotlib.patches import Patch

    width = max((len(line.place) for line in hot), default=0)
    names = [_in_words(line, total_ns, width) for line in hot]
    patches = [Patch(color=color) for color in _LINE_COLORS[: len(names)]]
    figure.legend(
        [*patches, Patch(color=_OTHER)],
        [*names, "other lines"],
        loc="lower left",
        prop={"family": "monospace", "size": 8},
        frameon=False,
        borderaxespad=0.2,
        labelspacing=0.35,
    )


def _in_words(line: LineTime, total_ns: float, width: int) -> str:
    share = line.path_ns / total_ns if total_ns else 0.0
    text = f"{share:>4.0%} of the time  {line.place:<{width}}  {line.source or line.op}"
    if line.callers:
        text = f"{text[: _LEGEND_COLUMNS - len(line.origin) - 2]}  {line.origin}"
    # A dollar sign would begin a formula.
    return text[:_LEGEND_COLUMNS].replace("$", r"\$")


def _group_of(one: Interval | LineTime) -> Group:
    callers = one.callers if isinstance(one, Interval) else one.callers_id
    return one.file, one.line, one.op, callers


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
