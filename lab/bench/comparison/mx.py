"""MX kernels of a simulated trn3, ours beside the vendor's, over a file of their cases.

Both sides run with values and are held against their references, as `neuron-moe check` does; a case
counts where both agree and none had to take fewer tokens. Each run is timed in both corners.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import nki_sim
from lab.check import kernels, vendor
from lab.check.case_file import read_cases
from lab.check.launcher import checking_for, watching
from lab.check.outcomes import Outcome
from lab.check.vendor_cases.case import Case, Limits
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.console import format_table, print_json_line
from neuron_moe.tools.parsers import PRINTED, Parser
from neuron_moe.tools.timing.sources import write_result
from neuron_moe.tools.timing.timelines import corner_timelines

CHIP = "trn3"
CHIPS = ("trn2", CHIP)
MAX_MACS = 60e9  # of a case, so that few take fewer tokens
_FEWER_TOKENS = re.compile(r"\bT \d+ -> \d+")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case in one corner of the clock.

    Attributes:
        id, kernel, variant: as in the file.
        corner: of the clock.
        ours_us, vendor_us: simulated; None where a side was not run, or its result is not right.
        speedup: vendor's over ours, where both are of the same tokens.
        note: what differs from the case as listed, and why a time is missing.
    """

    id: str
    kernel: str
    variant: str
    corner: str
    ours_us: float | None
    vendor_us: float | None
    speedup: float | None
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
    run = partial(compare_case, library=options.library, corners=tuple(options.corner))
    for done in _each(run, cases, options.jobs):
        rows += done
        for row in done:
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
        print_json_line("bench mx", **{name: result[name] for name in ("chip", "by_corner")})
    return 0


def compare_case(case: Case, library: Path | None, corners: Sequence[str]) -> list[Row]:
    """Run both sides of a case; return its rows."""
    limits = Limits(macs=MAX_MACS)
    with checking_for(CHIP):
        ours, ours_runs = _timed(lambda: kernels.run_case(case, limits), corners)
    theirs, vendor_runs = None, list[dict[str, float]]()
    if library is not None:
        vendors = VendorLibrary(library)
        theirs, vendor_runs = _timed(lambda: vendor.run_case(case, vendors, limits), corners)
    rows = []
    for corner in corners:
        ours_us = _right_us(ours, sum(run[corner] for run in ours_runs))
        vendor_us = _right_us(theirs, vendor_runs[-1][corner] if vendor_runs else 0.0)
        reasons = [f"ours: {ours.reason}" if ours.reason else ""]
        reasons.append(f"vendor: {theirs.reason}" if theirs is not None and theirs.reason else "")
        note = "; ".join(filter(None, reasons))
        speedup = None
        if ours_us and vendor_us and not _FEWER_TOKENS.search(note):
            speedup = vendor_us / ours_us
        rows.append(
            Row(
                id=case.id,
                kernel=case.kernel,
                variant=case.variant,
                corner=corner,
                ours_us=ours_us,
                vendor_us=vendor_us,
                speedup=speedup,
                note=note,
            )
        )
    return rows


def _timed(
    check: Callable[[], Outcome], corners: Sequence[str]
) -> tuple[Outcome, list[dict[str, float]]]:
    """Return the outcome of a check, and the times of its launches by corner."""
    times: list[dict[str, float]] = []

    def watch(run: nki_sim.Run) -> None:
        found = corner_timelines(run, corners)
        times.append({corner: timeline.total_us for corner, timeline in found})

    with watching(watch):
        outcome = check()
    return outcome, times


def _right_us(outcome: Outcome | None, us: float) -> float | None:
    """Return a time if what ran is right."""
    is_right = outcome is not None and outcome.outcome == "passed"
    return round(us, 3) if is_right and us > 0 else None


def _each(
    run: Callable[[Case], list[Row]], cases: Sequence[Case], jobs: int
) -> Iterator[list[Row]]:
    """Yield the rows of each case, in some processes."""
    if jobs == 1:
        yield from map(run, cases)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, cases)


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the result as a file keeps it: rows, ratios by corner, and what times rest on."""
    by_corner = {}
    for corner in dict.fromkeys(row.corner for row in rows):
        ratios = [row.speedup for row in rows if row.corner == corner and row.speedup is not None]
        by_corner[corner] = {
            "cases": sum(row.corner == corner for row in rows),
            "ours_right": sum(row.corner == corner and row.ours_us is not None for row in rows),
            "vendor_right": sum(row.corner == corner and row.vendor_us is not None for row in rows),
            "compared": len(ratios),
            "geometric_mean": _mean(ratios),
            "least": min(ratios, default=None),
        }
    return {
        "chip": CHIP,
        "times": "simulated",
        "by_corner": by_corner,
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


def _mean(ratios: Iterable[float]) -> float | None:
    logs = [math.log(ratio) for ratio in ratios]
    return round(math.exp(statistics.fmean(logs)), 3) if logs else None


def _table(rows: Sequence[Row]) -> str:
    head = ["case", "kernel", "variant", "corner", "ours us", "vendor us", "speed-up"]
    lines = [head]
    for row in rows:
        times = [_text(row.ours_us), _text(row.vendor_us), _text(row.speedup)]
        lines.append([row.id, row.kernel, row.variant, row.corner, *times])
    return format_table(lines, numbers_from=4)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _line(row: Row) -> str:
    times = f"ours {_text(row.ours_us)} us, vendor {_text(row.vendor_us)} us"
    return f"{row.id} {row.corner}: {times}, {_text(row.speedup)}; {row.note}"
