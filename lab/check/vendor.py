"""neuron-moe check vendor: the vendor's kernels on the simulator, each against its own reference.

    neuron-moe check vendor --library CHECKOUT --cases cases.json

Kernels and references come from the user's checkout; nothing of it is part of this project. A
case passes if every element of every output is within atol + rtol * max|expected| of the
reference. Times are simulated.
"""

import argparse
import contextlib
import gc
import io
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lab.check.case_file import add_case_options, outcome_file, read_cases
from lab.check.outcomes import Outcome, OutcomeFile, print_table, run_in_turn, tell
from lab.check.vendor_cases.adapters import build_job
from lab.check.vendor_cases.case import Case, Job, Limits, Skipped, difference
from lab.check.vendor_cases.known_faults import explain
from lab.check.vendor_cases.launch import Launched, launch
from lab.check.vendor_cases.library import LIBRARY_VARIABLE, VendorLibrary
from neuron_moe.tools.parsers import Parser
from nki_sim.vendor_library import FORGIVABLE


def main(argv: list[str] | None = None) -> int:
    """Run the cases of a file; return 0, or 1 if a case failed that is not explained by a fault
    of the library.
    """
    options = _parse(argv)
    cases = read_cases(options.cases, options.status, options.match)
    library = VendorLibrary(options.library)
    limits, file = Limits(macs=options.max_gmacs * 1e9), outcome_file(options)
    outcomes = run_cases(cases, library, options.max_seconds, limits, options.jobs, file)
    print_table(outcomes, "vendor's kernels on nki_sim")
    return (
        1
        if any(o.outcome == "failed" and not o.reason.startswith("library") for o in outcomes)
        else 0
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("check vendor", __doc__)
    default = os.environ.get(LIBRARY_VARIABLE)
    parser.add_argument(
        "--library",
        type=Path,
        default=default and Path(default),
        help=f"checkout of the library ({LIBRARY_VARIABLE})",
    )
    add_case_options(parser, status="active", max_gmacs=25.0)
    options = parser.parse_args(argv)
    if options.library is None:
        raise ValueError(
            f"--library: missing. Give the checkout of the library, or set {LIBRARY_VARIABLE}."
        )
    return options


def run_cases(
    cases: Sequence[Case],
    library: VendorLibrary,
    max_seconds: float = math.inf,
    limits: Limits | None = None,
    jobs: int = 1,
    file: OutcomeFile | None = None,
) -> list[Outcome]:
    """Run cases with a progress bar; return outcomes in the order of the cases."""
    return run_in_turn(
        cases,
        lambda case: run_case(case, library, limits or Limits()),
        max_seconds,
        jobs=jobs,
        file=file,
    )


def run_case(case: Case, library: VendorLibrary, limits: Limits) -> Outcome:
    """Run one case. Never raises for a kernel, reference or adapter that fails: the reason says
    what happened.
    """
    # The library's kernels print what they allocate.
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            outcome = _run_job(case, build_job(case, library, limits))
        except Skipped as reason:
            outcome = Outcome.of(case, "skipped", str(reason))
        except Exception as error:  # noqa: BLE001  one broken case must not end the run
            outcome = Outcome.of(case, "failed", f"inputs: {_tell(error)}")
    gc.collect()
    return outcome


def _run_job(case: Case, job: Job) -> Outcome:
    faults: dict[type[Exception], str] = {}
    try:
        run = _launch_forgiving(job, case.platform, faults)
    except AssertionError as refusal:
        if job.refusal:
            return Outcome.of(case, "passed", f"refused as it must be: {job.refusal}")
        return Outcome.of(case, "skipped", f"the kernel refuses the case: {_tell(refusal)}")
    except Exception as error:  # noqa: BLE001
        if job.refusal:
            return Outcome.of(case, "passed", f"refused as it must be: {job.refusal}")
        return Outcome.of(case, "failed", explain(case, job, _tell(error)))
    time_us = run.simulated_us
    if job.refusal:
        return Outcome.of(case, "failed", f"ran, but must be refused: {job.refusal}", time_us)
    try:
        expected = job.reference()
    except Exception as error:  # noqa: BLE001
        return Outcome.of(case, "failed", f"reference: {_tell(error)}", time_us)
    why = _disagreement(case, job, run.outputs, expected, list(faults.values()))
    if why:
        return Outcome.of(case, "failed", why, time_us)
    notes = [job.note, *(f"agrees in spite of {text}" for text in faults.values())]
    return Outcome.of(case, "passed", "; ".join(filter(None, notes)), time_us)


def _disagreement(
    case: Case,
    job: Job,
    outputs: Sequence[np.ndarray],
    expected: dict[str, np.ndarray],
    faults: Sequence[str],
) -> str:
    """Return why outputs differ from the reference's, or ""."""
    names = list(job.outputs or expected)
    if len(outputs) != len(names):
        return f"{len(outputs)} outputs, expected {', '.join(names)}"
    actual = dict(zip(names, outputs, strict=True))
    if job.split is not None:
        actual = job.split(actual)
    for name, got in actual.items():
        want = expected[name]
        if name in job.select:
            got, want = job.select[name](got), job.select[name](want)
        why = difference(got, want, case.rtol, case.atol)
        if why:
            return explain(case, job, "; ".join([f"{name}: {why}", *faults]))
    return ""


def _launch_forgiving(job: Job, platform: str, faults: dict[type[Exception], str]) -> Launched:
    """Run a job; after a forgivable fault run it again without that check, and keep the fault.

    Such a kernel may still agree where the hardware or the compiler is kind.
    """
    while True:
        try:
            return launch(job, platform, forgiven=faults)
        except FORGIVABLE as fault:
            if type(fault) in faults:
                raise
            faults[type(fault)] = _tell(fault)


def _tell(error: BaseException) -> str:
    """Return one line about an exception, with the innermost line of the library."""
    return re.sub(r"\S*nkilib_src/nkilib/", "", tell(error, ("nkilib",)))
