"""neuron-moe bench decode: simulated time of a MoE layer's decode, beside the vendor's kernels.

    neuron-moe bench decode --models gpt_oss_20b --batches 1 64

decode_moe stands beside the vendor's moe_tkg, decode_block (norm and router in front) beside
moe_block_tkg, each in the faster of its two modes, on the same simulated chip; the vendor's come
from the user's checkout. The HBM bound (weights of the touched experts, tokens in and out) is
computed. Both of our modes run, so that the cost model's choice can be held against the better.
Ours runs with plain and with packed weights; beside our fp8 the vendor's faster format counts. A
time is the likely one, a ratio has the range of what is not known (nki_sim/time/estimate.py); each
side is one program.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import nki_sim
from lab.bench.comparison.figures import figure_lines
from lab.bench.comparison.mx import CHIP, add_chip_options, compare_mx
from lab.bench.comparison.options import (
    add_comparison_options,
    check_comparison_options,
)
from lab.bench.decode.cases import (
    BATCHES,
    FORMATS,
    KERNELS,
    ROUTINGS,
    DecodeCase,
    find_model,
)
from lab.bench.decode.ours import config_of, decode_plan, launch_ours
from lab.bench.decode.picture import PICTURE_BATCHES, PICTURE_MODELS, draw_switch
from lab.bench.decode.results import (
    Book,
    Row,
    compared,
    read,
    summarise,
    with_gains,
)
from lab.bench.decode.vendor import VendorSide
from lab.bench.decode.work import MODES, OPTIONS, OurSide
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.console import format_table, print_json_line
from neuron_moe.tools.models import model_among
from neuron_moe.tools.parsers import PRINTED, Parser
from neuron_moe.tools.timing import runs
from neuron_moe.tools.timing.layers import MODELS
from neuron_moe.tools.timing.pool import Pace, Task, Work, run_works
from neuron_moe.tools.timing.sources import Sources, Writer, write_result
from nki_sim.time.estimate import Estimate

MX_KERNELS = ("moe_tkg", "moe_block_tkg")  # the vendor's names of cases
OUR_SOURCES = ("decode/*.py", "common/*.py")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0."""
    options = _parse(argv)
    if options.chip == CHIP:
        return compare_mx(options, MX_KERNELS)
    sources = Sources.now(nki_sim.hardware.find("trn2"), options.library, OUR_SOURCES)
    book = _earlier(options, sources)
    ours, theirs = _sides(options, sources, book)
    _compare(book, ours)
    writer = Writer(options.json, lambda: summarise(with_gains(book.rows), book, sources))

    def on_taken(side: Work, task: Task, pace: Pace, seconds: float) -> None:
        _keep(book, ours, [side])
        print(_line(book, side, task, pace, seconds), file=sys.stderr, flush=True)
        writer.write()

    sides: list[Work] = [*ours, *theirs]
    sides.sort(key=lambda side: side.size)
    try:
        is_complete = run_works(sides, on_taken, options.jobs, options.minutes)
    finally:
        writer.write(at_once=True)
    _keep(book, ours, theirs)  # with why the last modes were left out
    if options.picture is not None and is_complete:
        _measure_switch(book, sources, options)
        draw_switch(book.switch, options.picture)
    asked = {key for side in ours for key in side.rows}
    rows = [row for row in with_gains(book.rows) if options.resume or row.key in asked]
    result = summarise(rows, book, sources)
    print(_table(rows))
    for miss in result["misses"]:
        print(
            f"misses {miss['target']}: {miss['row']}, {miss['layout']}:"
            f" {miss['value']:.2f} ({miss['bottleneck']})"
        )
    print(figure_lines(result["by_layout"]))
    if not is_complete:
        print("stopped before all was run: the same command with --resume goes on")
    if options.json == PRINTED:
        # What a file keeps for later runs is too long to print.
        values = {name: value for name, value in result.items() if name != "vendor"}
        print_json_line("bench decode", complete=is_complete, **values)
    write_result(options.json, result)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("bench decode", __doc__)
    names = [model.name for model in MODELS]
    parser.add_argument(
        "--models", nargs="*", type=model_among(names), choices=names, default=names
    )
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.more.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.more.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.more.add_argument(
        "--picture",
        type=Path,
        metavar="PNG",
        help="draw both of our modes over B, the chosen one marked; --models without a name draws"
        " without the table",
    )
    parser.more.add_argument(
        "--picture-models", nargs="+", choices=names, default=list(PICTURE_MODELS)
    )
    add_comparison_options(parser)
    add_chip_options(parser)
    options = parser.parse_args(argv)
    if any(not 1 <= B <= 256 for B in options.batches):
        raise ValueError(f"--batches {options.batches}: must be 1 to 256.")
    check_comparison_options(options)
    return options


def _cases(options: argparse.Namespace) -> Iterator[DecodeCase]:
    """Yield the cases, those of few tokens first."""
    for B in sorted(set(options.batches)):
        for kernel in options.kernels:
            for model in MODELS:
                if model.name not in options.models:
                    continue
                for format in options.formats:
                    for routing in options.routings:
                        yield DecodeCase(
                            kernel=kernel, model=model, B=B, routing=routing, format=format
                        )


def _earlier(options: argparse.Namespace, sources: Sources) -> Book:
    """Return what an earlier run found that this one continues or takes the vendor's times of."""
    if options.vendor_from is not None:
        book = read(options.vendor_from, sources, "--vendor-from")
        return Book(vendor=book.vendor, layers=book.layers, library=book.library)
    if options.resume and options.json.exists():
        return read(options.json, sources, "--resume")
    return Book()


def _sides(
    options: argparse.Namespace, sources: Sources, book: Book
) -> tuple[list[OurSide], list[VendorSide]]:
    """Return what is to be simulated of our kernels and of the vendor's."""
    library = VendorLibrary(options.library) if options.library else None
    ours, theirs = [], dict[tuple[str, ...], VendorSide]()
    for case in _cases(options):
        ours.append(
            OurSide(
                case,
                options.layout,
                sources,
                book.rows,
            )
        )
        if options.deployed:
            ours[-1].note_deployed()
        if options.only == "vendor":
            ours[-1].skip()
        key = (case.kernel, case.model.name, str(case.B), case.format)
        if options.only != "ours" and library is not None and key not in theirs:
            known = {attempt.name: attempt for attempt in book.known_vendor(case)}
            theirs[key] = VendorSide(library, case, known, OPTIONS)
    return ours, list(theirs.values())


def _keep(book: Book, ours: Sequence[OurSide], changed: Iterable[Work]) -> None:
    """Keep what some sides found, and compare the rows again."""
    for side in changed:
        if isinstance(side, VendorSide):
            book.keep_vendor(side.case, side.attempts())
    _compare(book, ours)


def _compare(book: Book, ours: Sequence[OurSide]) -> None:
    """Fill in what follows from both sides as far as they are known."""
    for side in ours:
        for key, row in side.rows.items():
            book.rows[key] = compared(row, book.rivals(side.case))


def _measure_switch(book: Book, sources: Sources, options: argparse.Namespace) -> None:
    """Simulate both modes of the picture's points that the book lacks."""
    known = {
        (point["model"], point["B"]): point
        for point in book.switch
        if point["kernels"] == sources.kernels
    }
    book.switch = []
    for name in options.picture_models:
        for B in PICTURE_BATCHES:
            case = DecodeCase(
                kernel="decode_moe", model=find_model(name), B=B, routing="uniform", format="bf16"
            )
            layout = "packed" if "packed" in options.layout else "plain"
            point = known.get((name, B)) or switch_point(case, sources, layout)
            book.switch.append(point)
            write_result(options.json, summarise(with_gains(book.rows), book, sources))


def switch_point(case: DecodeCase, sources: Sources, layout: str) -> dict[str, Any]:
    """Simulate both modes of a case; return times, the choice and what it loses."""
    times = {}
    for mode in MODES:
        run = launch_ours(case, decode_plan(case, mode, layout), OPTIONS)
        times[mode] = run.timeline.total_us
        gc.collect()
    config = config_of(decode_plan(case, layout=layout))
    return {
        "model": case.model.name,
        "tp": case.model.tp,
        "B": case.B,
        "selective_us": times["selective"],
        "all_us": times["all"],
        "chosen": config.mode,
        "loss": times[config.mode] / min(times.values()) - 1.0,
        "touched": len(np.unique(case.expert_index())),
        "experts": case.model.E,
        "kernels": sources.kernels,
    }


def _line(book: Book, side: Work, task: Task, pace: Pace, seconds: float) -> str:
    """Say what a task found and how far the run is."""
    cells = []
    if isinstance(side, OurSide):
        cells += [f"{book.rows[key].layout} {_us(book.rows[key].ours)}" for key in side.rows]
    elif isinstance(side, VendorSide):
        cells += [_text(a.us, ".1f") for a in side.attempts() if a.name == task.name]
    found = f": us: {', '.join(cells)}" if cells else ""
    return f"{side.name}, {task.name} [{seconds:.1f} s]{found}; {pace.text()}"


def _table(rows: Sequence[Row]) -> str:
    head = [
        "kernel",
        "model",
        "B",
        "routing",
        "format",
        "layout",
        "bound us",
        "ours us",
        "mode",
        "share",
        "vendor us",
        "speed-up",
        "fp8 gain",
        "deployed us",
    ]
    lines = [head, *(_cells(row) for row in rows)]
    return f"trn2, one layer on one rank; ours and vendor {runs.kind()}, HBM bound computed\n" + (
        format_table(lines, numbers_from=6)
    )


def _cells(row: Row) -> list[str]:
    return [
        row.kernel,
        f"{row.model} TP{row.tp}",
        str(row.B),
        row.routing,
        row.format,
        row.layout,
        f"{row.hbm_bound_us:,.1f}",
        _us(row.ours),
        row.ours_mode,
        _text(row.bound_share, ".0%"),
        _us(row.theirs),
        str(row.ratio or "-"),
        _text(row.fp8_gain, ".2f"),
        _text(row.deployed_us, ",.1f"),
    ]


def _us(time: Estimate | None) -> str:
    return "-" if time is None else f"{time.us:,.1f}"


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
