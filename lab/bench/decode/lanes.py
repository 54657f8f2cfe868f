"""The picture in README: engines and memory during a decode step, ours above the vendor's.

    python -m lab.bench.decode.lanes --library nki-library

Simulates `decode_layer` and the faster mode of the vendor's `moe_block_tkg` on the same case, with
weights as in the checkpoint, and draws the likely course of both over one time axis; what a program
takes before and after its kernel is not in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.bench.comparison.options import add_library_option
from lab.bench.decode.cases import DecodeCase, find_model
from lab.bench.decode.ours import decode_plan, launch_ours
from lab.bench.decode.vendor import MODES, launch_vendor
from lab.bench.decode.work import OPTIONS
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.parsers import Parser
from nki_sim.time.costs import DmaPrice
from nki_sim.time.timeline import Timeline

CASE = DecodeCase(
    kernel="decode_block", model=find_model("gpt-oss-20b"), B=16, routing="uniform", format="bf16"
)
TITLE = "One decode step of a GPT-OSS-20B MoE layer: 16 tokens, one of 8 ranks (Trn2, simulated)"
NOTE = (
    "Memory: GB/s of both cores; the line is the most that HBM gives. Engines: core 0, time busy."
)
OUT = Path("docs/pictures/lanes.svg")
ENGINES = {
    "tensor": "#e8833a",
    "vector": "#3aa76d",
    "scalar": "#9a6dd7",
    "gpsimd": "#8a94a6",
}
MEMORY, INK, PALE, TRACK = "#3b82f6", "#1f2937", "#6b7280", "#f1f4f8"
WIDTH, LEFT, RIGHT, TOP = 960, 96, 92, 46  # pixels
LANE, GAP, MEMORY_LANE, PANEL_TITLE, BETWEEN, BOTTOM = 17, 5, 58, 28, 22, 58
STEP_US = 100
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True, slots=True)
class Panel:
    """One side of the picture.

    Attributes:
        name: what ran.
        timeline: its times.
    """

    name: str
    timeline: Timeline


def main(argv: list[str] | None = None) -> int:
    """Simulate both sides and write the picture; return 0."""
    options = _parse(argv)
    library = VendorLibrary(options.library)
    ours = launch_ours(CASE, decode_plan(CASE, layout="plain"), OPTIONS)
    theirs = [launch_vendor(library, CASE, mode, OPTIONS).timeline for mode in MODES]
    panels = [
        Panel("neuron-moe", ours.timeline),
        Panel("nki-library", min(theirs, key=lambda timeline: timeline.total_ns)),
    ]
    options.out.write_text(draw_lanes(panels, TITLE, NOTE))
    for panel in panels:
        print(f"{panel.name}: {panel.timeline.headline()}")
    return 0


def draw_lanes(panels: Sequence[Panel], title: str, note: str) -> str:
    """Return an SVG of the panels, one below the other over the same time axis.

    Args:
        panels: at least one; the longest sets the axis.
        title: one line above.
        note: one line below.
    """
    longest_us = max(panel.timeline.total_us for panel in panels)
    scale = (WIDTH - LEFT - RIGHT) / longest_us  # pixels a microsecond
    height = PANEL_TITLE + MEMORY_LANE + len(ENGINES) * (LANE + GAP)
    bottom = TOP + len(panels) * (height + BETWEEN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + BOTTOM}"'
        f' font-family="{FONT}" font-size="13" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{bottom + BOTTOM}" rx="10" fill="#ffffff"/>',
        _text(20, 28, title, size=16, weight=600),
        *_axis(longest_us, scale, bottom),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, TOP + number * (height + BETWEEN), scale)
    parts += [_text(20, bottom + BOTTOM - 12, note, color=PALE, size=12), "</svg>"]
    return "\n".join(parts) + "\n"


def _axis(longest_us: float, scale: float, bottom: float) -> Iterator[str]:
    """Yield the lines of time through all panels, and their labels."""
    for us in range(0, int(longest_us) + 1, STEP_US):
        x = LEFT + us * scale
        yield f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#e2e8f0"/>'
        yield _text(x, bottom + 17, f"{us} µs", color=PALE, size=12, anchor="middle")


def _panel(panel: Panel, top: float, scale: float) -> Iterator[str]:
    """Yield a panel: its title, the memory's rate, the engines, and where it ends."""
    line = panel.timeline
    yield _text(20, top + 19, panel.name, size=15, weight=600)
    end = LEFT + line.total_us * scale
    y = top + PANEL_TITLE
    yield from _memory(line, y, scale)
    y += MEMORY_LANE + GAP
    for lane, color in ENGINES.items():
        yield f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{LANE}" fill="{TRACK}"/>'
        boxes = "".join(
            f"M{LEFT + begin * scale:.1f} {y}h{max((until - begin) * scale, 0.4):.1f}v{LANE}H"
            f"{LEFT + begin * scale:.1f}z"
            for begin, until in busy_spans(line, lane, 0.5 / scale)
        )
        yield f'<path d="{boxes}" fill="{color}"/>'
        yield _text(LEFT - 10, y + 13, lane, anchor="end")
        share = line.busy_ns(lane) / line.total_ns
        yield _text(end + 9, y + 13, f"{100 * share:.0f} %", color=PALE)
        y += LANE + GAP
    yield f'<path d="M{end:.1f} {top + 8}V{y - GAP}" stroke="{INK}" stroke-width="1.5"/>'
    yield _text(end - 7, top + 20, f"{line.total_us:.0f} µs", size=15, weight=600, anchor="end")


def _memory(line: Timeline, top: float, scale: float) -> Iterator[str]:
    """Yield the memory's lane: traffic over time below the most that HBM gives."""
    peak, end = line.chip.hbm_bytes_per_ns, LEFT + line.total_us * scale
    pixel_us = 1.5 / scale
    rates = memory_rates(line, pixel_us)
    heights = MEMORY_LANE * np.minimum(rates / peak, 1.0)
    x = np.minimum(LEFT + pixel_us * scale * np.arange(1, len(rates) + 1), end)
    steps = "".join(
        f"V{top + MEMORY_LANE - high:.1f}H{right:.1f}"
        for high, right in zip(heights, x, strict=True)
    )
    width = f"{end - LEFT:.1f}"
    yield (
        f'<rect x="{LEFT}" y="{top}" width="{width}" height="{MEMORY_LANE}" fill="{TRACK}"/>'
        f'<path d="M{LEFT} {top + MEMORY_LANE}{steps}V{top + MEMORY_LANE}z" fill="{MEMORY}"/>'
        f'<path d="M{LEFT} {top}H{end:.1f}" stroke="{MEMORY}" stroke-dasharray="4 3"/>'
    )
    yield _text(LEFT - 10, top + MEMORY_LANE / 2 + 5, "memory", anchor="end")
    gb_per_s = line.hbm_bytes_per_s / 1e9
    yield _text(end + 9, top + MEMORY_LANE / 2 + 5, f"{gb_per_s:.0f} GB/s", color=PALE)


def memory_rates(line: Timeline, bin_us: float) -> NDArray[np.float64]:
    """Return the HBM traffic of all cores in bytes per nanosecond, bin by bin.

    A transfer's bytes are spread evenly over the time in which it moves them.
    """
    result = line.result
    prices = [result.prices[pair] for pair in result.pair]
    moved = np.array([p.hbm_bytes if isinstance(p, DmaPrice) else 0 for p in prices], dtype=float)
    begin, end = np.array(result.data_start), np.array(result.data_end)
    chosen = moved > 0
    moved, begin, end = moved[chosen], begin[chosen], end[chosen]
    bin_ns = 1e3 * bin_us
    edges = np.arange(0.0, line.total_ns + bin_ns, bin_ns)
    done = np.zeros(len(edges))
    for each, since, until in zip(moved, begin, end, strict=True):
        done += each * np.clip((edges - since) / max(until - since, 1e-9), 0.0, 1.0)
    return np.diff(done) / bin_ns


def busy_spans(line: Timeline, lane: str, gap_us: float) -> list[tuple[float, float]]:
    """Return when a lane of core 0 is busy, in microseconds; gaps below `gap_us` are closed."""
    spans: list[tuple[float, float]] = []
    boxes = (box for box in line.intervals() if (box.core, box.lane) == (0, lane))
    for begin, end in sorted((box.start_ns / 1e3, box.end_ns / 1e3) for box in boxes):
        if spans and begin <= spans[-1][1] + gap_us:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((begin, end))
    return spans


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 13,
    weight: int = 400,
    color: str = INK,
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{color}"'
        f' text-anchor="{anchor}">{text}</text>'
    )


def _parse(argv: Iterable[str] | None) -> argparse.Namespace:
    parser = Parser("bench decode", __doc__)
    add_library_option(parser)
    parser.add_argument("--out", type=Path, default=OUT, metavar="SVG", help=f"default: {OUT}")
    options = parser.parse_args(None if argv is None else list(argv))
    if options.library is None:
        raise ValueError("--library: needed for the lower half of the picture.")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
