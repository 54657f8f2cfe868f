"""neuron-moe check precedent: which uses of instructions in our kernels no public kernel shows.

    neuron-moe check precedent --resume uses.jsonl --json OUT
    neuron-moe check precedent --library LIB --cases C --list L --write FILE

Runs our kernels on the simulator and compares what they use with a table recorded of public
kernels. What it lists is not illegal: nobody showed that it compiles. The second form records the
table anew, of cases and of the library's own tests. Nothing is timed. A kernel of yours: `nki-sim
lint --precedent FILE.py:NAME`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from lab.check.case_file import read_cases
from lab.check.our_uses import CHIP, UsesFile, record_ours
from lab.check.vendor import run_case
from lab.check.vendor_cases.case import Limits
from lab.check.vendor_cases.library import LIBRARY_VARIABLE, VendorLibrary
from neuron_moe.backends.nki.times import TIMES_ONLY
from neuron_moe.spec import Tuning
from neuron_moe.tools.parsers import Parser
from nki_sim import vendor_tests
from nki_sim.own_kernel import load_kernel, read_arguments, simulate
from nki_sim.precedent import TABLE, Table, recording

# Kernels of the tutorials that are written for NKI 0.2 or later, and their arguments.
_TUTORIALS: Final = "src/nki_samples/tutorials/matrix_multiplication"
_PRODUCTS: Final = {
    "nki_matmul_basic_": ("128x64:bfloat16", "128x512:bfloat16"),
    "nki_matmul_tiled_": ("256x256:bfloat16", "256x1024:bfloat16"),
    "nki_matmul_hoist_load_": ("256x256:bfloat16", "256x1024:bfloat16"),
    "nki_matmul_block_free_dimension_": ("512x512:bfloat16", "512x2048:bfloat16"),
    "nki_matmul_fully_optimized_": ("1024x2048:bfloat16", "1024x1024:bfloat16"),
}


def main(argv: list[str] | None = None) -> int:
    """Compare, or record; return 0: a use without precedent is no fault."""
    options = _parse(argv)
    if options.write is not None:
        _record(options)
        return 0
    table, tuning = Table.read(options.table), Tuning(features=options.features)
    with tempfile.TemporaryDirectory() as folder:
        path = options.resume or Path(folder, "uses.jsonl")
        file = UsesFile(path, tuning, is_all=options.all)
        total = record_ours(file, options.jobs, is_quick=options.quick)
        recorder = file.recorder()
        failed = {line["run"]: line["failed"] for line in file.lines() if line.get("failed")}
    about = {"runs": total, "failed": failed, "launches": recorder.runs}
    report = table.counts(recorder) | about
    print(f"{total} runs, {len(failed)} failed; {recorder.runs} launches showed something new")
    print("\n".join(table.report(recorder)))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("check precedent", __doc__)
    parser.add_features_option("what plans of our kernels may use")
    parser.add_argument("--quick", action="store_true", help="a few layers, one minute")
    parser.add_argument("--all", action="store_true", help="also launches like earlier ones")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="keep launches here, and go on from it"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file")
    parser.more.add_argument(
        "--table", type=Path, default=TABLE, metavar="FILE", help="compare with this table"
    )
    default = os.environ.get(LIBRARY_VARIABLE)
    parser.add_argument(
        "--library",
        type=Path,
        default=default and Path(default),
        metavar="CHECKOUT",
        help=f"record: of the vendor's kernel library ({LIBRARY_VARIABLE})",
    )
    parser.add_argument("--cases", type=Path, metavar="FILE", help="record: as of `check vendor`")
    parser.more.add_argument(
        "--list", type=Path, metavar="FILE", help="record: as of `nki-sim vendor-tests`"
    )
    parser.add_argument(
        "--samples", type=Path, metavar="CHECKOUT", help="record: of the vendor's nki-samples, too"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="record: the table to write")
    options = parser.parse_args(argv)
    if options.write is not None and None in (options.library, options.cases, options.list):
        raise ValueError(
            f"--write {options.write}: what is to be recorded? Give --library CHECKOUT of the"
            " vendor's kernel library, --cases FILE and --list FILE."
        )
    return options


def vendor_runs(
    library: VendorLibrary, cases: Path, tests: Path
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names of runs of the vendor's kernels on this chip, and what runs each."""
    for case in read_cases(cases):
        if case.platform == CHIP:
            name = f"{case.kernel}/{case.variant} {case.id}"
            yield name, partial(run_case, case, library, Limits())
    words = ["--library", str(library.path), "--list", str(tests)]
    yield "the library's own tests", partial(vendor_tests.main, words)


def tutorial_runs(samples: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names of kernels of the vendor's tutorials, and what runs each."""
    file = samples / _TUTORIALS / "matrix_multiplication_nki_kernels.py"
    for name, words in _PRODUCTS.items():
        yield name, partial(_run_own, f"{file}:{name}", words)


def _run_own(place: str, words: Sequence[str], lnc: int | None = None) -> None:
    simulate(load_kernel(place), read_arguments(words), lnc, replace(TIMES_ONLY, target=CHIP))


def _each(runs: Iterator[tuple[str, Callable[[], Any]]]) -> None:
    """Run all, and name those that do not run: what they used until then is recorded."""
    for name, run in runs:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # the library's kernels print
                run()
        except Exception as error:  # noqa: BLE001  one kernel that fails must not end the run
            first = (str(error).strip().splitlines() or [""])[0]
            print(f"{name}: {type(error).__name__}: {first}", file=sys.stderr)


def _record(options: argparse.Namespace) -> None:
    table = Table()
    library = VendorLibrary(options.library)
    _add(table, "vendor", options.library, vendor_runs(library, options.cases, options.list))
    if options.samples is not None:
        _add(table, "tutorials", options.samples, tutorial_runs(options.samples))
    table.write(options.write)


def _add(
    table: Table, source: str, checkout: Path, runs: Iterator[tuple[str, Callable[[], Any]]]
) -> None:
    with recording() as recorder:
        _each(runs)
    kernels = {place.kernel for places in recorder.uses.values() for place in places}
    about = {"of": checkout.resolve().name, "version": _version(checkout), "runs": recorder.runs}
    table.add(source, recorder, **about, kernels=sorted(kernels))
    print(f"{source}: {recorder.runs} runs of {len(kernels)} kernels, {len(recorder.uses)} uses")


def _version(checkout: Path) -> str:
    """Return the commit of a checkout and its date; empty where git does not know it."""
    words = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
