"""MX kernels of a simulated trn3, ours beside the vendor's, over a file of their cases.

Both sides run with values and are held against their references, as `neuron-moe check` does; a case
counts where both agree and none had to take fewer tokens. Each side is one program.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import nki_sim
from lab.bench.averages import geometric_mean
from lab.check import kernels, vendor
from lab.check.case_file import read_cases
from lab.check.launcher import checking_for, watching
from lab.check.outcomes import Outcome
from lab.check.vendor_cases.case import Case, Limits
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.console import format_table, print_json_line
from neuron_moe.tools.parsers import PRINTED, Parser
from neuron_moe.tools.timing.sources import write_result
from neuron_moe.tools.timing.timelines import program, time_of
from nki_sim.time.estimate import Estimate, Ratio

CHIP = "trn3"
CHIPS = ("trn2", CHIP)
MAX_MACS = 60e9  # of a case, so that few take fewer tokens
_FEWER_TOKENS = re.compile(r"\bT \d+ -> \d+")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case.

    Attributes:
        id, kernel, variant: as in the file.
        ours, theirs: simulated; None where a side was not run, or its result is not right.
        ratio: theirs over ours, where both are of the same tokens.
        note: what differs from the case as listed, and why a time is missing.
    """

    id: str
    kernel: str
    variant: str
    ours: Estimate | None
    theirs: Estimate | None
    ratio: Ratio | None
    note: str


def add_chip_options(parser: Parser) -> None:
    """Add what chooses the chip, and the cases of a trn3."""
    parser.more.add_argument(
        "--chip",
        choices=CHIPS,
        default="trn2",
        help="trn3 compares the MX kernels over --cases instead of the models (default: trn2)",
    )
    parser.more.add_argument(
        "--cases", type=Path, help="with --chip trn3: JSON file of cases, as for `check kernels`"
    )
    parser.more.add_argument(
        "--match", default="", help="with --chip trn3: cases that contain this"
    )


def compare_mx(options: argparse.Namespace, names: Sequence[str]) -> int:
    """Run the comparison and print it; return 0.

    Args:
        options: of `add_chip_options` and `add_comparison_options`.
        names: of kernels whose cases count.

    Raises:
        ValueError: there is no file of cases.
    """
    if options.cases is None:
        raise ValueError("--chip trn3: compares over a file of cases. Give it with --cases.")
    found = read_cases(options.cases, match=options.match)
    cases = [case for case in found if case.kernel in names and case.platform == CHIP]
    rows: list[Row] = []
    run = partial(compare_case, library=options.library)
    for row in _each(run, cases, options.jobs):
        rows.append(row)
        print(_line(row), file=sys.stderr, flush=True)
        write_result(options.json, summarise(rows))
    result = summarise(rows)
    print(f"{CHIP}, simulated, both held against their references\n" + _table(rows))
    counts = {kind: len(fields) for kind, fields in result["coefficients"].items()}
    print(
        f"{CHIP} has no published times: {counts['assumed']} of its coefficients are assumed,"
        f" {counts['documented']} documented; nki_sim/hardware.py names their sources"
    )
    if options.json == PRINTED:
        print_json_line("bench mx", **{name: result[name] for name in ("chip", "figures")})
    return 0


def compare_case(case: Case, library: Path | None) -> Row:
    """Run both sides of a case."""
    limits = Limits(macs=MAX_MACS)
    with checking_for(CHIP):
        ours, our_launches = _timed(lambda: kernels.run_case(case, limits))
        theirs, their_launches = None, list[Estimate]()
        if library is not None:
            vendors = VendorLibrary(library)
            theirs, their_launches = _timed(lambda: vendor.run_case(case, vendors, limits))
    our_time = _right_time(ours, our_launches)
    their_time = _right_time(theirs, their_launches[-1:])
    reasons = [f"ours: {ours.reason}" if ours.reason else ""]
    reasons.append(f"vendor: {theirs.reason}" if theirs is not None and theirs.reason else "")
    note = "; ".join(filter(None, reasons))
    ratio = None
    if our_time and their_time and not _FEWER_TOKENS.search(note):
        ratio = their_time.over(our_time)
    return Row(
        id=case.id,
        kernel=case.kernel,
        variant=case.variant,
        ours=our_time,
        theirs=their_time,
        ratio=ratio,
        note=note,
    )


def _timed(check: Callable[[], Outcome]) -> tuple[Outcome, list[Estimate]]:
    """Return the outcome of a check, and the times of its launches."""
    times: list[Estimate] = []
    with watching(lambda run: times.append(time_of(run.timeline))):
        outcome = check()
    return outcome, times


def _right_time(outcome: Outcome | None, launches: Sequence[Estimate]) -> Estimate | None:
    """Return the time of what ran as a program, if it is right."""
    is_right = outcome is not None and outcome.outcome == "passed"
    return program(launches, nki_sim.hardware.find(CHIP)) if is_right and launches else None


def _each(run: Callable[[Case], Row], cases: Sequence[Case], jobs: int) -> Iterator[Row]:
    """Yield the row of each case, in some processes."""
    if jobs == 1:
        yield from map(run, cases)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, cases)


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the result as a file keeps it: rows, figures, and what times rest on."""
    ratios = [row.ratio for row in rows if row.ratio is not None]
    return {
        "chip": CHIP,
        "times": "simulated",
        "figures": {
            "cases": len(rows),
            "ours_right": sum(row.ours is not None for row in rows),
            "vendor_right": sum(row.theirs is not None for row in rows),
            "compared": len(ratios),
            "geometric_mean": geometric_mean([one.likely for one in ratios]),
            "geometric_mean_low": geometric_mean([one.low for one in ratios]),
            "least_low": min((one.low for one in ratios), default=None),
        },
        "coefficients": coefficients(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def coefficients() -> dict[str, list[str]]:
    """Return the fields of the chip by kind of source."""
    chip = nki_sim.hardware.find(CHIP)
    kinds: dict[str, list[str]] = {"documented": [], "measured": [], "assumed": []}
    for field in dataclasses.fields(chip):
        if field.name != "name":
            kinds[chip.provenance(field.name).kind].append(field.name)
    return kinds


def _table(rows: Sequence[Row]) -> str:
    lines = [["case", "kernel", "variant", "ours us", "vendor us", "times as fast"]]
    for row in rows:
        times = [_us(row.ours), _us(row.theirs), str(row.ratio or "-")]
        lines.append([row.id, row.kernel, row.variant, *times])
    return format_table(lines, numbers_from=3)


def _us(time: Estimate | None) -> str:
    return "-" if time is None else f"{time.us:,.2f}"


def _line(row: Row) -> str:
    times = f"ours {_us(row.ours)} us, vendor {_us(row.theirs)} us"
    return f"{row.id}: {times}, {row.ratio or '-'}; {row.note}"
