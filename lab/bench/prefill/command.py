"""neuron-moe bench prefill: simulated time of a MoE layer's prefill, beside the vendor's kernels.

    neuron-moe bench prefill --models gpt_oss_20b --tokens 1024

Ours is what the product launches: up to 128 tokens the decode kernel, which reads each expert
once; then one launch that lists the tokens of blocks, computes them and adds up a token's experts.
The vendor's kernels run on the same simulated chip, from the user's checkout: those that list
tokens, then the fastest of its prefill kernels and block sizes, row by row, or up to 128 tokens its
decode kernel. A second figure has the lists given, for both sides. Ours runs with plain and with
packed weights. A time is the likely one, a ratio has the range of what is not known
(nki_sim/time/estimate.py); each side is one program. The roofline is computed, of the experts' own
work.
The result file is written after every run, so that `--resume` can go on where one was stopped, and
keeps the vendor's times for when only our kernels have changed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

import nki_sim
from lab.bench.comparison.figures import figure_lines
from lab.bench.comparison.mx import CHIP, add_chip_options, compare_mx
from lab.bench.comparison.options import (
    LAYOUTS,
    add_comparison_options,
    check_comparison_options,
)
from lab.bench.prefill.cases import ROUTINGS, TOKENS
from lab.bench.prefill.results import Key, Row, read, summarise, without_ours
from lab.bench.prefill.vendor import KERNEL_NAMES
from lab.bench.prefill.work import Case
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.console import format_table, print_json_line
from neuron_moe.tools.models import model_among
from neuron_moe.tools.parsers import PRINTED, Parser
from neuron_moe.tools.timing import runs
from neuron_moe.tools.timing.layers import MODELS
from neuron_moe.tools.timing.pool import Pace, Task, Work, run_works
from neuron_moe.tools.timing.sources import Sources, Writer, write_result
from nki_sim.time.estimate import Estimate

MX_KERNELS = ("moe_cte",)  # the vendor's names of cases
OUR_SOURCES = ("**/*.py",)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0."""
    options = _parse(argv)
    if options.chip == CHIP:
        return compare_mx(options, MX_KERNELS)
    chip = nki_sim.hardware.find("trn2")
    sources = Sources.now(chip, options.library, OUR_SOURCES)
    earlier = _earlier_rows(options, sources)
    rows = dict(earlier) if options.resume else {}
    cases = _cases(options, sources, earlier)
    rows |= {row.key: row for case in cases for row in case.rows()}
    writer = Writer(options.json, lambda: summarise(_sorted(rows), sources))

    def on_taken(work: Work, task: Task, pace: Pace, seconds: float) -> None:
        rows.update({row.key: row for case in cases for row in case.rows()})
        print(_line(work, task, pace, seconds), file=sys.stderr, flush=True)
        writer.write()

    try:
        is_complete = run_works(cases, on_taken, options.jobs, options.minutes)
    finally:
        writer.write(at_once=True)
    for case in cases:
        case.compare()  # with why the last variants were left out
    rows.update({row.key: row for case in cases for row in case.rows()})
    result = summarise(_sorted(rows), sources)
    print(_table(_sorted(rows)))
    for miss in result["misses"]:
        print(
            f"misses {miss['target']}: {miss['row']}, {miss['layout']}:"
            f" {miss['value']:.2f} ({miss['bottleneck']})"
        )
    print(figure_lines(result["by_layout"]))
    print(f"with lists given:\n{figure_lines(result['by_layout_given'])}")
    if not is_complete:
        print("stopped before all was run: the same command with --resume goes on")
    if options.json == PRINTED:
        print_json_line("bench prefill", complete=is_complete, **result)
    write_result(options.json, result)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("bench prefill", __doc__)
    names = [model.name for model in MODELS]
    parser.add_argument(
        "--models", nargs="+", type=model_among(names), choices=names, default=names
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.more.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.more.add_argument(
        "--vendor-kernels",
        nargs="+",
        choices=KERNEL_NAMES,
        default=KERNEL_NAMES,
        help="of the vendor's kernels run only these; the others can follow with --resume",
    )
    add_comparison_options(parser)
    add_chip_options(parser)
    options = parser.parse_args(argv)
    if any(tokens < 1 for tokens in options.tokens):
        raise ValueError(f"--tokens {options.tokens}: must be positive.")
    check_comparison_options(options)
    return options


def _cases(options: argparse.Namespace, sources: Sources, earlier: Mapping[Key, Row]) -> list[Case]:
    """Return the cases, the cheap ones first."""
    library = VendorLibrary(options.library) if options.library else None
    cases = [
        Case(model, tokens, routing, library, sources, options, earlier)
        for tokens in sorted(set(options.tokens))
        for routing in options.routings
        for model in MODELS
        if model.name in options.models
    ]
    for case in cases:
        case.compare()
    return sorted(cases, key=lambda case: case.size)


def _place(key: Key) -> tuple[int, ...]:
    """Return where a row stands in the table."""
    model, tokens, routing, layout = key
    names = [entry.name for entry in MODELS]
    return names.index(model), tokens, ROUTINGS.index(routing), LAYOUTS.index(layout)


def _sorted(rows: Mapping[Key, Row]) -> list[Row]:
    return [rows[key] for key in sorted(rows, key=_place)]


def _earlier_rows(options: argparse.Namespace, sources: Sources) -> dict[Key, Row]:
    """Return the rows of an earlier run that this one continues or takes the vendor's side of."""
    if options.vendor_from is not None:
        rows = read(options.vendor_from, sources, "--vendor-from")
        return {row.key: without_ours(row) for row in rows}
    if options.resume and options.json.exists():
        return {row.key: row for row in read(options.json, sources, "--resume")}
    return {}


def _line(work: Work, task: Task, pace: Pace, seconds: float) -> str:
    """Say what a task found and how far the run is."""
    rows = work.rows() if isinstance(work, Case) else ()
    cells = [f"{row.layout} {_us(row.ours)} / {_us(row.theirs)}" for row in rows]
    found = f": ours / vendor us: {', '.join(cells)}" if cells else ""
    return f"{work.name}, {task.name} [{seconds:.1f} s]{found}; {pace.text()}"


def _table(rows: list[Row]) -> str:
    head = ["model", "T", "routing", "layout"]
    head += ["roofline us", "ours us", "share", "vendor us", "speed-up", "lists given"]
    head += ["deployed us"]
    lines = [head]
    lines += [
        [
            f"{row.model} TP{row.tp}",
            str(row.T),
            row.routing,
            row.layout,
            f"{row.roofline_us:,.0f}",
            _us(row.ours),
            _text(row.roofline_share, ".0%"),
            _us(row.theirs),
            str(row.ratio or "-"),
            _given(row),
            _text(row.deployed_us, ",.0f"),
        ]
        for row in rows
    ]
    return f"trn2, one layer on one rank; ours and vendor {runs.kind()}, roofline computed\n" + (
        format_table(lines, numbers_from=4)
    )


def _given(row: Row) -> str:
    """Return both times with lists given, and their ratio."""
    if row.given_ratio is None:
        return "-"
    return f"{_us(row.ours_given)} {_us(row.theirs_given)} {row.given_ratio}"


def _us(time: Estimate | None) -> str:
    return "-" if time is None else f"{time.us:,.0f}"


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
