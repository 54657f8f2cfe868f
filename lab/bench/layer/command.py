"""neuron-moe bench layer: simulated time of a whole MoE layer on one rank, both phases.

    neuron-moe bench layer --models gpt_oss_20b --phases prefill --tokens 1024

The layer of the model's configuration, planned as `MoE` plans it, on one of 8 ranks that split each
expert (TP8) or the experts (EP8). layer us: all launches of the plan; experts us: experts and the
sum over a token's experts alone, as `bench prefill` times them; outside: the share of the layer
beyond them (norm, router, index, shared experts); apart us: the layer in several launches; parts
us: of a prefill, the launches of a rank that holds a part of the sequence (sequence parallelism),
which routes its own tokens alone, and what lies outside the experts then; vendor us: of a prefill,
the vendor's chain of kernels, its dense MLP for shared experts included
(lab/bench/layer/vendor.py), with --library; layers for which only its slowest kernel fits are
left out of means.

Times are likely ones (nki_sim/time/estimate.py), experts drawn
alike. What a launch itself takes is not published and not counted, which favours several launches.
Not in the times: what ranks exchange, and what several launches leave to the framework (in prefill
the norm and shared experts, in parts of a sequence the latter); `computes` of --json says what the
kernels of a plan do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import nki_sim
from lab.bench.averages import geometric_mean
from lab.bench.comparison.attempts import Attempt
from lab.bench.comparison.options import add_library_option
from lab.bench.layer.picture import draw_layers
from lab.bench.layer.work import SPLITS, VENDOR_FIELDS, Case, Key, Row
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.console import format_table, print_json_line
from neuron_moe.tools.models import model_among
from neuron_moe.tools.parsers import PRINTED, Parser
from neuron_moe.tools.timing.pool import Pace, Task, Work, run_phases
from neuron_moe.tools.timing.sources import (
    Sources,
    Writer,
    read_result,
    write_result,
)
from nki_sim.time.estimate import Estimate

MODELS = (
    "gpt_oss_120b",
    "gpt_oss_20b",
    "llama4_scout",
    "llama4_maverick",
    "qwen3_30b_a3b",
    "deepseek_v3",
    "mixtral_8x7b",
)
TOKENS = {"prefill": (128, 1024, 8192), "decode": (1, 16, 128)}
MOST_OUTSIDE = {8192: 0.08, 128: 0.15}  # targets of a prefill
OUR_SOURCES = ("**/*.py",)
CORNERS = ("likely",)  # of the clock


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0."""
    options = _parse(argv)
    sources = Sources.now(nki_sim.hardware.find("trn2"), options.library, OUR_SOURCES)
    rows = _earlier(options.json, sources) if options.resume and options.json.exists() else {}
    cases = _cases(options, rows)
    writer = Writer(options.json, lambda: summarise(_sorted(rows), sources))

    def on_taken(work: Work, task: Task, pace: Pace, seconds: float) -> None:
        assert isinstance(work, Case)
        print(_line(work, task, pace, seconds), file=sys.stderr, flush=True)
        rows.update({row.key: row for row in work.rows})
        writer.write()

    try:
        phases = [lambda: cases]
        if options.only != "ours":
            phases.append(lambda: _with_vendor(cases))
        is_complete = run_phases(phases, on_taken, options.jobs, options.minutes)
    finally:
        for case in cases:  # with what follows from the last variants that were left out
            rows.update({row.key: row for row in case.rows})
        writer.write(at_once=True)
    result = summarise(_sorted(rows), sources)
    print(_table(_sorted(rows)))
    for miss in result["misses"]:
        print(f"misses {miss['target']:.0%} outside: {miss['row']}: {miss['value']:.1%}")
    if not is_complete:
        print("stopped before all was run: the same command with --resume goes on")
    write_result(options.json, result)
    if options.picture is not None:
        print(f"picture: {draw_layers(_sorted(rows), options.picture)}")
    if options.json == PRINTED:
        print_json_line("bench layer", complete=is_complete, **result)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("bench layer", __doc__)
    parser.add_argument(
        "--models", nargs="+", type=model_among(MODELS), choices=MODELS, default=list(MODELS)
    )
    parser.add_argument("--splits", nargs="+", choices=list(SPLITS), default=list(SPLITS))
    parser.add_argument("--phases", nargs="+", choices=list(TOKENS), default=list(TOKENS))
    parser.add_argument(
        "--tokens", nargs="+", type=int, help="default: 128 1024 8192, in decode 1 16 128"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.more.add_argument(
        "--minutes", type=float, metavar="M", help="stop after so many minutes"
    )
    add_library_option(parser)
    parser.add_json_option()
    parser.add_argument("--resume", action="store_true", help="keep what the --json file has")
    parser.more.add_argument(
        "--only", choices=("ours",), help="simulate this side; keep of the other what --resume has"
    )
    parser.more.add_argument("--picture", type=Path, metavar="PNG", help="draw what lies outside")
    options = parser.parse_args(argv)
    if options.tokens is not None and min(options.tokens) < 1:
        raise ValueError(f"--tokens {options.tokens}: must be positive.")
    if options.resume and options.json in (None, PRINTED):
        raise ValueError("--resume: continues a result file. Name it with --json.")
    return options


def _cases(options: argparse.Namespace, known: dict[Key, Row]) -> list[Case]:
    """Return the cases, the cheap ones first."""
    library = VendorLibrary(options.library) if options.library else None
    cases = [
        Case(model, split, phase, tokens, CORNERS, library, known)
        for model in options.models
        for split in options.splits
        for phase in options.phases
        for tokens in sorted(set(options.tokens or TOKENS[phase]))
    ]
    return sorted(cases, key=lambda case: case.size)


def _with_vendor(cases: list[Case]) -> list[Case]:
    """Return the cases, whose vendor's tasks may run now that all of ours have."""
    for case in cases:
        case.take_vendor()
    return cases


def _earlier(path: Path, sources: Sources) -> dict[Key, Row]:
    """Return the rows of an earlier run that were simulated with what is here now.

    Where our kernels or the simulator are others, the vendor's times stay.
    """
    content = read_result(path, "--resume", ("rows", "sources"))
    made_with = Sources(**content["sources"])
    rows = [_row(entry) for entry in content["rows"]]
    if made_with != sources:
        same = ("coefficients", "library")
        if any(getattr(made_with, name) != getattr(sources, name) for name in same):
            return {}
        rows = [_without_ours(row, made_with, sources) for row in rows if row.vendor_variants]
    return {row.key: row for row in rows}


def _row(entry: dict[str, Any]) -> Row:
    """Return a row of a result file."""
    attempts = [Attempt.of(attempt) for attempt in entry["vendor_variants"]]
    index = {name: Estimate(**time) for name, time in entry["vendor_index"].items()}
    launches = tuple(entry["launches"])
    return Row(
        **{**entry, "launches": launches, "vendor_variants": attempts, "vendor_index": index}
    )


def _without_ours(row: Row, made_with: Sources, sources: Sources) -> Row:
    """Return the vendor's side of a row that was made with other sources."""
    by = row.vendor_by or made_with.simulator
    kept = {name: getattr(row, name) for name in VENDOR_FIELDS}
    return Row(
        model=row.model,
        split=row.split,
        phase=row.phase,
        T=row.T,
        corner=row.corner,
        **kept | {"vendor_by": "" if by == sources.simulator else by},
    )


def summarise(rows: Sequence[Row], sources: Sources) -> dict[str, Any]:
    """Return the whole result: what misses a target, then the rows."""
    misses = [
        {"row": f"{row.name}{how}", "target": MOST_OUTSIDE[row.T], "value": outside}
        for row in rows
        for how, outside in (("", row.outside), (", in parts", row.sequence_outside))
        if row.phase == "prefill" and (outside or 0.0) > MOST_OUTSIDE.get(row.T, 1.0)
    ]
    return {
        "chip": "trn2",
        "kind": "simulated",
        "rows_timed": sum(row.layer_us is not None for row in rows),
        "vendor_rows_by_another_simulator": sum(bool(row.vendor_by) for row in rows),
        "beside_vendor": _means(rows),
        "misses": misses,
        "sources": asdict(sources),
        "rows": [asdict(row) for row in rows],
    }


def _means(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the vendor's time over ours by corner and tokens; apart, where only its slowest kernel
    fits.
    """
    found = []
    for corner, tokens, is_apart in product(CORNERS, TOKENS["prefill"], (False, True)):
        ratios = [
            row.vendor_us / row.layer_us
            for row in rows
            if (row.corner, row.T, row.only_slowest_fits) == (corner, tokens, is_apart)
            and row.vendor_us
            and row.layer_us
        ]
        if ratios:
            found.append(
                {
                    "corner": corner,
                    "T": tokens,
                    "only_slowest_fits": is_apart,
                    "rows": len(ratios),
                    "geometric_mean": geometric_mean(ratios),
                    "least": min(ratios),
                    "largest": max(ratios),
                }
            )
    return found


def _sorted(rows: dict[Key, Row]) -> list[Row]:
    def place(row: Row) -> tuple[int, ...]:
        names = (MODELS, list(SPLITS), list(TOKENS), list(CORNERS))
        model, split, phase, tokens, corner = row.key
        where = [
            each.index(name)
            for each, name in zip(names, (model, split, phase, corner), strict=True)
        ]
        return (*where[:3], tokens, where[3])

    return sorted(rows.values(), key=place)


def _line(case: Case, task: Task, pace: Pace, seconds: float) -> str:
    """Say what a task gave and how far the run is."""
    cells = []
    for row in case.rows:
        why = row.why or row.vendor_why
        cells.append(
            f"{row.corner} {_us(row.layer_us)} / {_us(row.vendor_us)} us, {why}".rstrip(", ")
        )
    return f"{case.name}, {task.name} [{seconds:.1f} s]: {'; '.join(cells)}; {pace.text()}"


def _table(rows: Sequence[Row]) -> str:
    head = ["model", "split", "phase", "T", "corner", "launches"]
    head += ["layer us", "experts us", "outside", "apart us", "gain", "vendor us", "gain"]
    head += ["parts us", "outside"]
    lines = [head]
    for row in rows:
        times = [_us(row.layer_us), _us(row.experts_us)]
        shares = [_share(row.outside)]
        for other_us in (row.apart_us, row.vendor_us):
            shares += [_us(other_us), _gain(row.layer_us, other_us)]
        shares += [_us(row.sequence_us), _share(row.sequence_outside)]
        place = [row.model, row.split, row.phase, str(row.T), row.corner, str(len(row.launches))]
        lines.append([*place, *times, *shares])
    title = "trn2, one layer on one rank of 8, simulated; apart: in several launches\n"
    return title + format_table(lines, numbers_from=5)


def _gain(layer_us: float | None, other_us: float | None) -> str:
    return f"{other_us / layer_us:.2f}" if layer_us and other_us else "-"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
