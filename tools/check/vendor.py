"""neuron-moe check vendor: the vendor's kernels on the simulator, each against its own reference.

Kernels and references come from the user's checkout; nothing of it is part of this project. A
case passes if every element of every output is within atol + rtol * max|expected| of the
reference. Times are simulated.
"""

import argparse
import contextlib
import dataclasses
import gc
import io
import json
import math
import os
import re
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from neuron_moe.tools.check.vendor_cases import build_job
from neuron_moe.tools.check.vendor_cases.case import Case, Job, Limits, Skipped, difference
from neuron_moe.tools.check.vendor_cases.known_faults import explain
from neuron_moe.tools.check.vendor_cases.launch import FORGIVABLE, Launched, launch
from neuron_moe.tools.check.vendor_cases.library import LIBRARY_VARIABLE, VendorLibrary


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of one case; the JSON output is a list of these."""

    id: str
    kernel: str
    variant: str
    outcome: str
    reason: str
    simulated_us: float | None


def main(argv: list[str] | None = None) -> int:
    """Run the cases of a file; return 0, or 1 if a case failed that is not explained by a fault
    of the library.
    """
    options = _parse(argv)
    cases = read_cases(options.cases, options.status, options.match)
    library = VendorLibrary(options.library)
    outcomes = run_cases(cases, library, options.max_seconds, Limits(macs=options.max_gmacs * 1e9))
    print_table(outcomes)
    write_outcomes(options.json, outcomes)
    return (
        1
        if any(o.outcome == "failed" and not o.reason.startswith("library") for o in outcomes)
        else 0
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="neuron-moe check vendor", description=__doc__.split("\n")[0]
    )
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


def add_case_options(
    parser: argparse.ArgumentParser, *, status: str, max_gmacs: float, is_file_required: bool = True
) -> None:
    """Add the options every check of a case file has, with the defaults of this one."""
    parser.add_argument(
        "--cases",
        type=Path,
        required=is_file_required,
        help="JSON file: an object with a list `cases`",
    )
    parser.add_argument(
        "--status", default=status, help=f"run cases of this status, or `any` (default: {status})"
    )
    parser.add_argument(
        "--match",
        default="",
        help="run only cases whose id, kernel/variant or platform contains this",
    )
    parser.add_argument(
        "--max-seconds", type=float, default=math.inf, help="start no case after this wall time"
    )
    parser.add_argument(
        "--max-gmacs",
        type=float,
        default=max_gmacs,
        help="reduce T above these billion MACs per case",
    )
    parser.add_argument("--json", type=Path, help="write the outcome of every case to this file")


def write_outcomes(path: Path | None, outcomes: Sequence[Outcome]) -> None:
    """Write the JSON list of outcomes, if there is a path."""
    if path is not None:
        rows = [dataclasses.asdict(outcome) for outcome in outcomes]
        path.write_text(json.dumps(rows, indent=1) + "\n")


def read_cases(path: Path, status: str = "active", match: str = "") -> list[Case]:
    """Read the cases of a file that have a status and contain a text.

    Raises:
        ValueError: the file is not JSON, or has no list of cases.
    """
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--cases {path}: not JSON ({error}). Give a case file.") from None
    entries = content.get("cases") if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise ValueError(
            f"--cases {path}: has no list `cases`. Give an object with `cases`, or a list."
        )
    wanted = [
        entry for entry in entries if status == "any" or entry.get("status", "active") == status
    ]
    cases = [Case.from_json(entry) for entry in wanted]
    return [
        case for case in cases if match in f"{case.id} {case.kernel}/{case.variant} {case.platform}"
    ]


def in_turn(cases: Sequence[Case]) -> Iterator[Case]:
    """Yield cases of all kernels in turn, small ones first, so that a run that is cut short has
    seen everything.
    """
    groups: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.kernel, case.variant].append(case)
    queues = [sorted(group, key=_size, reverse=True) for group in groups.values()]
    while queues:
        for queue in queues:
            yield queue.pop()
        queues = [queue for queue in queues if queue]


def _size(case: Case) -> float:
    """Return a rough measure of a case's work: the product of its sizes."""
    sizes = [
        value
        for value in case.params.values()
        if isinstance(value, int) and not isinstance(value, bool)
    ]
    return math.prod(max(float(value), 1.0) for value in sizes)


def run_cases(
    cases: Sequence[Case],
    library: VendorLibrary,
    max_seconds: float = math.inf,
    limits: Limits | None = None,
) -> list[Outcome]:
    """Run cases with a progress bar; return outcomes in the order of the cases."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    start = time.monotonic()
    done: dict[str, Outcome] = {}
    why = f"time budget of {max_seconds:g} s used up"
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for case in in_turn(cases):
            progress.update(task, description=f"{case.id} {case.kernel} {case.variant}")
            if time.monotonic() - start > max_seconds:
                break
            try:
                done[case.id] = run_case(case, library, limits or Limits())
            except KeyboardInterrupt:
                why = "interrupted"
                break
            progress.advance(task)
    return [done.get(case.id) or _outcome(case, "skipped", why) for case in cases]


def run_case(case: Case, library: VendorLibrary, limits: Limits) -> Outcome:
    """Run one case. Never raises for a kernel, reference or adapter that fails: the reason says
    what happened.
    """
    # The library's kernels print what they allocate.
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            outcome = _run_job(case, build_job(case, library, limits))
        except Skipped as reason:
            outcome = _outcome(case, "skipped", str(reason))
        except Exception as error:  # noqa: BLE001  one broken case must not end the run
            outcome = _outcome(case, "failed", f"inputs: {_tell(error)}")
    gc.collect()
    return outcome


def _run_job(case: Case, job: Job) -> Outcome:
    faults: dict[type[Exception], str] = {}
    try:
        run = _launch_forgiving(job, case.platform, faults)
    except AssertionError as refusal:
        if job.refusal:
            return _outcome(case, "passed", f"refused as it must be: {job.refusal}")
        return _outcome(case, "skipped", f"the kernel refuses the case: {_tell(refusal)}")
    except Exception as error:  # noqa: BLE001
        if job.refusal:
            return _outcome(case, "passed", f"refused as it must be: {job.refusal}")
        return _outcome(case, "failed", explain(case, job, _tell(error)))
    if job.refusal:
        return _outcome(
            case, "failed", f"ran, but must be refused: {job.refusal}", run.simulated_us
        )
    try:
        expected = job.reference()
    except Exception as error:  # noqa: BLE001
        return _outcome(case, "failed", f"reference: {_tell(error)}", run.simulated_us)
    names = list(job.outputs or expected)
    if len(run.outputs) != len(names):
        return _outcome(
            case,
            "failed",
            f"{len(run.outputs)} outputs, expected {', '.join(names)}",
            run.simulated_us,
        )
    actual: dict[str, np.ndarray] = dict(zip(names, run.outputs, strict=True))
    if job.split is not None:
        actual = job.split(actual)
    for name, got in actual.items():
        want = expected[name]
        if name in job.select:
            got, want = job.select[name](got), job.select[name](want)
        why = difference(got, want, case.rtol, case.atol)
        if why:
            text = "; ".join([f"{name}: {why}", *faults.values()])
            return _outcome(case, "failed", explain(case, job, text), run.simulated_us)
    notes = [job.note, *(f"agrees in spite of {text}" for text in faults.values())]
    return _outcome(case, "passed", "; ".join(filter(None, notes)), run.simulated_us)


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


def _outcome(case: Case, outcome: str, reason: str, simulated_us: float | None = None) -> Outcome:
    return Outcome(
        id=case.id,
        kernel=case.kernel,
        variant=case.variant,
        outcome=outcome,
        reason=reason,
        simulated_us=None if simulated_us is None else round(simulated_us, 3),
    )


def _tell(error: BaseException) -> str:
    """Return one line about an exception: type, first line, and the innermost line of the
    library.
    """
    text = re.sub(r"\S*nkilib_src/nkilib/", "", (str(error).strip().splitlines() or [""])[0])
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "nkilib" in frame.filename
    ]
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


def print_table(outcomes: Sequence[Outcome], title: str = "vendor's kernels on nki_sim") -> None:
    """Print one row per kernel and variant, then the reasons of failures with their number of
    cases.
    """
    from rich.console import Console
    from rich.table import Table

    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.kernel, outcome.variant].append(outcome)
    table = Table("kernel", "variant", title=title)
    for heading in ("cases", "passed", "failed", "skipped", "simulated us (median)"):
        table.add_column(heading, justify="right")
    for (kernel, variant), group in sorted(groups.items()):
        table.add_row(kernel, variant, *_row(group))
    table.add_section()
    table.add_row("all", "", *_row(list(outcomes)))
    console = Console()
    console.print(table)
    scaled = sum(o.outcome == "passed" and "->" in o.reason for o in outcomes)
    if scaled:
        console.print(f"{scaled} cases ran with fewer tokens than listed (see their reason).")
    for outcome in outcomes:
        if outcome.outcome == "failed":
            console.print(
                f"{outcome.id} {outcome.kernel} {outcome.variant}: {outcome.reason}",
                style="red",
                markup=False,
            )


def _row(group: Sequence[Outcome]) -> list[str]:
    count = {
        kind: sum(o.outcome == kind for o in group) for kind in ("passed", "failed", "skipped")
    }
    times = [o.simulated_us for o in group if o.simulated_us is not None]
    median = f"{statistics.median(times):,.1f}" if times else "-"
    return [
        str(len(group)),
        *(str(count[kind]) for kind in ("passed", "failed", "skipped")),
        median,
    ]
