"""neuron-moe bench decode: simulated time of a MoE layer's decode, beside the vendor's kernels.

decode_moe stands beside the vendor's moe_tkg, decode_block (norm and router in front) beside
moe_block_tkg, each in the faster of its two modes, on the same simulated chip; the vendor's come
from the user's checkout. The HBM bound (weights of the touched experts, tokens in and out) is
computed. Both of our modes run, so that the cost model's choice can be held against the better.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import nki_sim
from neuron_moe.tools.bench.comparison.layers import MODELS
from neuron_moe.tools.bench.comparison.options import (
    add_comparison_options,
    check_comparison_options,
)
from neuron_moe.tools.bench.comparison.sources import Sources, write_result
from neuron_moe.tools.bench.comparison.timelines import bottleneck, varied_us
from neuron_moe.tools.bench.decode.cases import (
    BATCHES,
    FORMATS,
    KERNELS,
    ROUTINGS,
    DecodeCase,
    find_model,
    hbm_bound_us,
)
from neuron_moe.tools.bench.decode.ours import configure, launch_ours
from neuron_moe.tools.bench.decode.picture import PICTURE_BATCHES, PICTURE_MODELS, draw_switch
from neuron_moe.tools.bench.decode.results import (
    Book,
    Row,
    compared,
    key_of,
    read,
    row_of,
    summarise,
    with_gains,
)
from neuron_moe.tools.bench.decode.vendor import attempt_both
from neuron_moe.tools.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.console import format_table, print_json_line
from nki_kernels.decode import DecodeConfig
from nki_sim import SimOptions

OUR_SOURCES = ("decode/*.py", "common/*.py")
MODES = ("selective", "all")
# The block's router must choose real experts: its hidden states and weights keep their values.
OPTIONS = SimOptions(
    mode="indices", uninitialized="off", races="off", capacity="reorder", small_elements=1 << 22
)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0."""
    options = _parse(argv)
    sources = Sources.now(nki_sim.hardware.find("trn2"), options.library, OUR_SOURCES)
    book = _earlier(options, sources)
    library = VendorLibrary(options.library) if options.library else None
    cases = list(_cases(options))
    for case in cases:
        started = time.monotonic()
        row = measure(case, library, sources, options, book)
        book.rows[row.key] = row
        gc.collect()
        print(_line(row, time.monotonic() - started), file=sys.stderr, flush=True)
        if options.json is not None:
            write_result(options.json, summarise(with_gains(book.rows), book, sources))
    if options.picture is not None:
        _measure_switch(book, sources, options)
        draw_switch(book.switch, options.picture)
    asked = {key_of(case) for case in cases}
    rows = [row for row in with_gains(book.rows) if options.resume or row.key in asked]
    result = summarise(rows, book, sources)
    print(_table(rows))
    for miss in result["misses"]:
        print(f"misses {miss['target']}: {miss['row']}: {miss['value']:.2f} ({miss['bottleneck']})")
    if options.json is not None:
        write_result(options.json, result)
    told = {name: value for name, value in result.items() if name != "vendor"}
    print_json_line("bench decode", **told)  # what a file keeps for later runs is too long to print
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="neuron-moe bench decode", description=__doc__.split("\n")[0]
    )
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="*", choices=names, default=names)
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument(
        "--layout",
        choices=("packed", "ehi"),
        default="packed",
        help="our weights: packed at load time (default), or as the checkpoint's modules have them",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="PNG",
        help="draw both of our modes over B, the chosen one marked; --models without a name draws"
        " without the table",
    )
    parser.add_argument("--picture-models", nargs="+", choices=names, default=list(PICTURE_MODELS))
    add_comparison_options(parser)
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


def measure(
    case: DecodeCase,
    library: VendorLibrary | None,
    sources: Sources,
    options: argparse.Namespace,
    book: Book,
) -> Row:
    """Simulate one case with our kernel and, with a library, the vendor's.

    What the book has and still holds is not run again.
    """
    touched = len(np.unique(case.expert_index()))
    row = row_of(case, touched)
    earlier = book.rows.get(row.key)
    made_with = (sources.kernels, options.layout)
    is_current = earlier is not None and (earlier.kernels, earlier.layout) == made_with
    if earlier is not None and is_current and (earlier.ours_varied or not options.sensitivity):
        row = earlier
    if options.only != "vendor" and row.ours_us is None:
        row = _with_ours(row, case, sources, options)
    if options.only != "ours" and library is not None:
        known = {attempt.name: attempt for attempt in book.known_vendor(case)}
        attempts = attempt_both(
            library, case, OPTIONS, with_varied=options.sensitivity, known=known
        )
        book.keep_vendor(case, attempts)
    return compared(row, book.known_vendor(case))


def _with_ours(row: Row, case: DecodeCase, sources: Sources, options: argparse.Namespace) -> Row:
    run, config = launch_ours(case, OPTIONS, layout=options.layout)
    timeline = run.timeline
    return replace(
        row,
        ours_us=timeline.total_us,
        ours_mode=config.mode,
        ours_plan=config.reason,
        ours_modes=_both_modes(case, config, timeline.total_us),
        layout=options.layout,
        bottleneck=bottleneck(timeline),
        ours_varied=varied_us(timeline) if options.sensitivity else {},
        kernels=sources.kernels,
    )


def _both_modes(case: DecodeCase, config: DecodeConfig, chosen_us: float) -> dict[str, float]:
    """Return our time by mode; one that cannot be the faster is left out."""
    times = {config.mode: chosen_us}
    other = MODES[1 - MODES.index(config.mode)]
    if other == "selective" or hbm_bound_us(case, case.model.E) < chosen_us:
        run, _ = launch_ours(case, OPTIONS, other, config.weights.layout)
        times[other] = run.timeline.total_us
    return times


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
            point = known.get((name, B)) or switch_point(case, sources, options.layout)
            book.switch.append(point)
            if options.json is not None:
                write_result(options.json, summarise(with_gains(book.rows), book, sources))


def switch_point(case: DecodeCase, sources: Sources, layout: str) -> dict[str, Any]:
    """Simulate both modes of a case; return times, the choice and what it loses."""
    times = {}
    for mode in MODES:
        run, _ = launch_ours(case, OPTIONS, mode, layout)
        times[mode] = run.timeline.total_us
        gc.collect()
    config = configure(case, layout=layout)
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


def _line(row: Row, seconds: float) -> str:
    ours = "-" if row.ours_us is None else f"{row.ours_us:.1f} us ({row.ours_mode})"
    vendor = "-" if row.vendor_us is None else f"{row.vendor_us:.1f} us"
    return (
        f"{row.name}: ours {ours}, vendor {vendor} ({row.vendor_plan}), "
        f"bound {row.hbm_bound_us:.1f} us [{seconds:.0f} s]"
    )


def _table(rows: Sequence[Row]) -> str:
    head = [
        "kernel", "model", "B", "routing", "format", "bound us", "ours us", "mode", "share",
        "vendor us", "speed-up", "fp8 gain",
    ]  # fmt: skip
    lines = [head, *(_cells(row) for row in rows)]
    return "trn2, one layer on one rank; ours and vendor simulated, HBM bound computed\n" + (
        format_table(lines, numbers_from=5)
    )


def _cells(row: Row) -> list[str]:
    return [
        row.kernel, f"{row.model} TP{row.tp}", str(row.B), row.routing, row.format,
        f"{row.hbm_bound_us:,.1f}", _text(row.ours_us, ",.1f"), row.ours_mode,
        _text(row.bound_share, ".0%"), _text(row.vendor_us, ",.1f"),
        _text(row.speedup, ".2f"), _text(row.fp8_gain, ".2f"),
    ]  # fmt: skip


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
