"""neuron-moe bench layer: a whole MoE layer in the layouts people deploy, beside the vendor's.

    neuron-moe bench layer --models gpt_oss_20b --phases decode --tokens 1

The layer of a model's configuration in bfloat16, on the busiest rank of a trn2.48xlarge, tokens
choosing experts alike: norm, router, routed and shared experts. Layouts: TP 8; the best one by
`neuron-moe plan`, apart for prefill and decode; the one NxDI takes by default
(lab/bench/layer/layouts.py). Equal ones are one row.

ours: the layer as `MoE` plans it; theirs: the fastest chain of the vendor's kernels that runs
(lab/bench/layer/vendor.py), with --library. Each side is one program, whose start and end count
once. Times are one number and a range (nki_sim/time/estimate.py); that of a ratio has both sides
at the same end. bound: the larger of the work's flops at the peak and its bytes at the HBM rate;
share: the bound over ours. What ranks exchange is computed as the planner does, and in no other
number.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nki_sim
from lab.bench.averages import geometric_mean
from lab.bench.comparison.options import add_library_option
from lab.bench.layer.layouts import LAYOUTS, layouts_of
from lab.bench.layer.published import PUBLISHED
from lab.bench.layer.vendor import Chain
from lab.bench.layer.work import Case, Key, Row, blank_row
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.console import format_table, print_json_line
from neuron_moe.tools.models import model_among
from neuron_moe.tools.parsers import PRINTED, Parser
from neuron_moe.tools.timing.pool import Pace, Task, Work, run_works
from neuron_moe.tools.timing.sources import (
    Sources,
    Writer,
    read_result,
)

MODELS = (
    "gpt_oss_120b",
    "gpt_oss_20b",
    "llama4_scout",
    "llama4_maverick",
    "qwen3_30b_a3b",
    "deepseek_v3",
    "mixtral_8x7b",
)
TOKENS = {"prefill": (128, 1024, 8192), "decode": (1, 16, 64)}
OUR_SOURCES = ("**/*.py",)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0."""
    options = _parse(argv)
    sources = Sources.now(nki_sim.hardware.find("trn2"), options.library, OUR_SOURCES)
    rows = _earlier(options.json, sources) if options.resume and options.json.exists() else {}
    cases = _cases(options, rows)
    writer = Writer(options.json, lambda: summarise(_sorted(rows), sources))

    def on_taken(work: Work, task: Task, pace: Pace, seconds: float) -> None:
        assert isinstance(work, Case)
        print(_line(work.row, task, pace, seconds), file=sys.stderr, flush=True)
        rows[work.row.key] = work.row
        writer.write()

    try:
        is_complete = run_works(cases, on_taken, options.jobs, options.minutes)
    finally:
        for case in cases:  # with what follows from the last chains that were left out
            rows[case.row.key] = case.row
        writer.write(at_once=True)
    result = summarise(_sorted(rows), sources)
    print(_table(_sorted(rows)))
    if not is_complete:
        print("stopped before all was run: the same command with --resume goes on")
    if options.json == PRINTED:
        print_json_line("bench layer", complete=is_complete, **result)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("bench layer", __doc__)
    parser.add_argument(
        "--models", nargs="+", type=model_among(MODELS), choices=MODELS, default=list(MODELS)
    )
    parser.add_argument("--phases", nargs="+", choices=list(TOKENS), default=list(TOKENS))
    parser.add_argument(
        "--tokens", nargs="+", type=int, help="default: 128 1024 8192, in decode 1 16 64"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.more.add_argument(
        "--minutes", type=float, metavar="M", help="stop after so many minutes"
    )
    add_library_option(parser)
    parser.add_json_option()
    parser.add_argument("--resume", action="store_true", help="keep what the --json file has")
    options = parser.parse_args(argv)
    if options.tokens is not None and min(options.tokens) < 1:
        raise ValueError(f"--tokens {options.tokens}: must be positive.")
    if options.resume and options.json in (None, PRINTED):
        raise ValueError("--resume: continues a result file. Name it with --json.")
    return options


def _cases(options: argparse.Namespace, known: dict[Key, Row]) -> list[Case]:
    """Return the cases, the long ones first, so that none is left alone at the end."""
    library = VendorLibrary(options.library) if options.library else None
    blanks = {
        row.key: row
        for model in options.models
        for phase in options.phases
        for layout, split in layouts_of(model, phase)
        for tokens in sorted(set(options.tokens or TOKENS[phase]))
        for row in [blank_row(model, layout, split, phase, tokens)]
    }
    if options.models == list(MODELS) and "decode" in options.phases and options.tokens is None:
        for one in PUBLISHED:
            row = blank_row(one.model, "published", (one.tp, 1), "decode", 1)
            blanks.setdefault(row.key, row)
    cases = [Case(row, library, known) for row in blanks.values()]
    return sorted(cases, key=lambda case: -case.size)


def _earlier(path: Path, sources: Sources) -> dict[Key, Row]:
    """Return the rows of an earlier run, if it was made with what is here now."""
    content = read_result(path, "--resume", ("rows", "sources"))
    is_same = Sources(**content["sources"]) == sources
    return {row.key: row for row in map(_row, content["rows"])} if is_same else {}


def _row(entry: dict[str, Any]) -> Row:
    """Return a row of a result file."""
    chains = tuple(Chain(**chain) for chain in entry["chains"])
    return Row(**{**entry, "launches": tuple(entry["launches"]), "chains": chains})


def summarise(rows: Sequence[Row], sources: Sources) -> dict[str, Any]:
    """Return the whole result: means beside the vendor's, then the rows."""
    return {
        "chip": "trn2",
        "kind": "simulated; bound and collectives computed",
        "rows_timed": sum(row.ours_us is not None for row in rows),
        "beside_vendor": list(_means(rows)),
        "sources": asdict(sources),
        "rows": [asdict(row) for row in rows],
    }


def _means(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the vendor's time over ours by phase and tokens; apart, where only its slowest kernel
    fits.
    """
    found: dict[tuple[str, int, bool], list[tuple[float, float, float]]] = {}
    for row in rows:
        if (ratios := row.ratios) is not None:
            found.setdefault((row.phase, row.T, row.only_slowest_fits), []).append(ratios)
    for (phase, tokens, is_apart), layers in found.items():
        lows, likely, highs = zip(*layers, strict=True)
        yield {
            "phase": phase,
            "T": tokens,
            "only_slowest_fits": is_apart,
            "rows": len(layers),
            "mean_low": geometric_mean(lows),
            "mean": geometric_mean(likely),
            "mean_high": geometric_mean(highs),
            "least": min(likely),
            "largest": max(likely),
            "least_low": min(lows),
        }


def _sorted(rows: dict[Key, Row]) -> list[Row]:
    def place(row: Row) -> tuple[int, ...]:
        names = ([*MODELS, row.model], list(TOKENS), [*LAYOUTS, row.layout])
        values = (row.model, row.phase, row.layout.split(",")[0])
        layer = (each.index(value) for each, value in zip(names, values, strict=True))
        return (*layer, row.T)

    return sorted(rows.values(), key=place)


def _line(row: Row, task: Task, pace: Pace, seconds: float) -> str:
    """Say what a task gave and how far the run is."""
    why = row.why or row.vendor_why
    times = f"{_us(row.ours_us)} / {_us(row.vendor_us)} us"
    return (
        f"{row.name}, {task.name} [{seconds:.1f} s]: {times}{', ' * bool(why)}{why}; {pace.text()}"
    )


def _table(rows: Sequence[Row]) -> str:
    head = ["layer", "phase", "T", "layout", "ours us", "low", "high", "bound us", "by", "share"]
    lines = [[*head, "theirs us", "ratio", "low", "high", "exchange us"]]
    for row in rows:
        place = [row.model, row.phase, str(row.T), f"TP{row.tp} EP{row.ep}: {row.layout}"]
        times = [_us(us) for us in (row.ours_us, row.ours_low_us, row.ours_high_us, row.bound_us)]
        share = f"{row.bound_us / row.ours_us:.0%}" if row.ours_us and row.bound_us else "-"
        low, likely, high = (f"{each:.2f}" for each in row.ratios) if row.ratios else "---"
        beside = [_us(row.vendor_us), likely, low, high, _us(row.collective_us)]
        lines.append([*place, *times, row.bound or "-", share, *beside])
    title = "trn2.48xlarge, one layer on its busiest rank, simulated; bound and exchange computed\n"
    return title + format_table(lines, numbers_from=4)


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
