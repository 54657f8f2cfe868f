"""neuron-moe bench prefill: simulated time of a MoE layer's prefill, beside the vendor's kernels.

Ours is one launch: the blockwise kernel, a barrier, the weighted sum over a token's experts (left
out with one expert per token), by the plan of our cost model. The vendor's kernels run on the same
simulated chip, from the user's checkout, with the token blocks ready as for ours; the fastest of
their variants and block sizes counts, row by row. The roofline is computed. The result file is
written after every row, so that `--resume` can go on where a run was stopped, and keeps the
vendor's times for when only our kernels have changed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import nki_sim
from neuron_moe.tools.bench.comparison.layers import MODELS, Model, choose_experts
from neuron_moe.tools.bench.comparison.options import (
    add_comparison_options,
    check_comparison_options,
)
from neuron_moe.tools.bench.comparison.sources import Sources, write_result
from neuron_moe.tools.bench.comparison.timelines import bottleneck, varied_us
from neuron_moe.tools.bench.prefill.cases import ROUTINGS, TOKENS, roofline_us
from neuron_moe.tools.bench.prefill.ours import OPTIONS, launch_ours
from neuron_moe.tools.bench.prefill.results import (
    Row,
    case_of,
    check_case,
    compared,
    read,
    summarise,
    without_ours,
)
from neuron_moe.tools.bench.prefill.vendor import KERNEL_NAMES, attempt_all
from neuron_moe.tools.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.console import format_table, print_json_line

OUR_SOURCES = ("prefill/*.py", "combine/*.py", "common/*.py")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0."""
    options = _parse(argv)
    chip = nki_sim.hardware.find("trn2")
    sources = Sources.now(chip, options.library, OUR_SOURCES)
    rows = _earlier_rows(options, sources)
    library = VendorLibrary(options.library) if options.library else None
    for model, tokens, routing in _cases(options):
        started = time.monotonic()
        earlier = rows.get((model.name, tokens, routing))
        row = measure(model, tokens, routing, library, sources, options, earlier)
        rows[row.key] = row
        gc.collect()
        print(_line(row, time.monotonic() - started), file=sys.stderr, flush=True)
        if options.json is not None:
            write_result(options.json, summarise(_sorted(rows), sources))
    wanted = _sorted(rows) if options.resume else [rows[key] for key in _keys(options)]
    result = summarise(wanted, sources)
    print(_table(wanted))
    for miss in result["misses"]:
        print(f"misses {miss['target']}: {miss['row']}: {miss['value']:.2f} ({miss['bottleneck']})")
    if "sensitivity" in result:
        print(_survivors(result["sensitivity"]))
    if options.json is not None:
        write_result(options.json, result)
    print_json_line("bench prefill", **result)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="neuron-moe bench prefill", description=__doc__.split("\n")[0]
    )
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument(
        "--vendor-kernels",
        nargs="+",
        choices=KERNEL_NAMES,
        default=KERNEL_NAMES,
        help="of the vendor's kernels run only these; the others can follow with --resume",
    )
    add_comparison_options(parser)
    options = parser.parse_args(argv)
    if any(tokens < 1 for tokens in options.tokens):
        raise ValueError(f"--tokens {options.tokens}: must be positive.")
    check_comparison_options(options)
    return options


def _cases(options: argparse.Namespace) -> Iterator[tuple[Model, int, str]]:
    """Yield the cases, those of few tokens first."""
    for tokens in sorted(set(options.tokens)):
        for routing in options.routings:
            for model in MODELS:
                if model.name in options.models:
                    yield model, tokens, routing


def _keys(options: argparse.Namespace) -> list[tuple[str, int, str]]:
    keys = [(model.name, tokens, routing) for model, tokens, routing in _cases(options)]
    return sorted(keys, key=_place)


def _place(key: tuple[str, int, str]) -> tuple[int, int, int]:
    """Return where a row stands in the table."""
    names = [model.name for model in MODELS]
    return names.index(key[0]), key[1], ROUTINGS.index(key[2])


def _sorted(rows: dict[tuple[str, int, str], Row]) -> list[Row]:
    return [rows[key] for key in sorted(rows, key=_place)]


def _earlier_rows(options: argparse.Namespace, sources: Sources) -> dict[tuple[str, int, str], Row]:
    """Return the rows of an earlier run that this one continues or takes the vendor's side of."""
    if options.vendor_from is not None:
        rows = read(options.vendor_from, sources, "--vendor-from")
        asked = set(_keys(options))
        return {row.key: without_ours(row) for row in rows if row.key in asked}
    if options.resume and options.json.exists():
        return {row.key: row for row in read(options.json, sources, "--resume")}
    return {}


def measure(
    model: Model,
    tokens: int,
    routing: str,
    library: VendorLibrary | None,
    sources: Sources,
    options: argparse.Namespace,
    earlier: Row | None = None,
) -> Row:
    """Simulate one case with our kernels and, with a library, the vendor's.

    What the earlier row has and still holds is not run again.
    """
    expert_index_TK = choose_experts(routing, tokens, model.E, model.K)
    case = case_of(model, expert_index_TK)
    if earlier is not None:
        check_case(earlier, case, sources)
    row = earlier or Row(
        model=model.name, tp=model.tp, T=tokens, routing=routing, case=case,
        roofline_us=roofline_us(model, expert_index_TK),
    )  # fmt: skip
    is_current = row.kernels == sources.kernels and (row.ours_varied or not options.sensitivity)
    if options.only != "vendor" and not is_current:
        row = _with_ours(row, model, expert_index_TK, sources, options.sensitivity)
    if options.only != "ours" and library is not None:
        known = {attempt.name: attempt for attempt in row.vendor_variants}
        attempts = attempt_all(
            library, model, expert_index_TK, OPTIONS, chip=nki_sim.hardware.find("trn2"),
            with_varied=options.sensitivity, known=known, kernels=options.vendor_kernels,
        )  # fmt: skip
        if any(known.get(attempt.name) != attempt for attempt in attempts):
            row = replace(row, simulator=sources.simulator)
        row = replace(row, vendor_variants=attempts, library=sources.library)
    return compared(row)


def _with_ours(
    row: Row, model: Model, expert_index_TK: Any, sources: Sources, with_varied: bool
) -> Row:
    run, plan = launch_ours(model, expert_index_TK)
    return replace(
        row,
        ours_us=run.timeline.total_us,
        ours_plan=plan,
        bottleneck=bottleneck(run.timeline),
        ours_varied=varied_us(run.timeline) if with_varied else {},
        kernels=sources.kernels,
    )


def _line(row: Row, seconds: float) -> str:
    ours = "-" if row.ours_us is None else f"{row.ours_us:.0f}"
    vendor = "-" if row.vendor_us is None else f"{row.vendor_us:.0f}"
    return (
        f"{row.model} TP{row.tp} T={row.T} {row.routing}: ours {ours} us, vendor "
        f"{vendor} us ({row.vendor_plan}), roofline {row.roofline_us:.0f} us [{seconds:.0f} s]"
    )


def _survivors(found: dict[str, Any]) -> str:
    """Say which rows survive a change of a coefficient, and how the targets fare."""
    lines = [
        f"{found['survive']} of {found['rows']} comparisons survive halving and doubling every "
        "assumed coefficient, and tensors placed the other way (simulated)."
    ]
    lines.extend(
        f"  {row['model']} T={row['T']} {row['routing']}: {', '.join(row['by'])}"
        for row in found["turned"]
    )
    for name, entry in found["worst"].items():
        value = entry["value"]
        lines.append(f"  worst {name}: {value:.4g} with {entry['change']}")
    return "\n".join(lines)


def _table(rows: list[Row]) -> str:
    head = ["model", "T", "routing", "roofline us", "ours us", "share", "vendor us", "speed-up"]
    lines = [head]
    for row in rows:
        vendor = "-" if row.vendor_us is None else f"{row.vendor_us:,.0f}"
        ours = "-" if row.ours_us is None else f"{row.ours_us:,.0f}"
        share = "-" if row.roofline_share is None else f"{row.roofline_share:.0%}"
        speedup = "-" if row.speedup is None else f"{row.speedup:.2f}x"
        lines.append(
            [
                f"{row.model} TP{row.tp}",
                str(row.T),
                row.routing,
                f"{row.roofline_us:,.0f}",
                ours,
                share,
                vendor,
                speedup,
            ]
        )
    return "trn2, one layer on one rank; ours and vendor simulated, roofline computed\n" + (
        format_table(lines, numbers_from=3)
    )
