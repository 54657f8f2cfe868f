"""neuron-moe check kernels: our kernels on the simulator, each against the formula in float64.

A case passes if every element of its output is within atol + rtol * max|expected| of the formula
and the root mean square error is no larger than that of the torch path. Times are simulated.
"""

import argparse
import gc
import math
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from neuron_moe.errors import closest
from neuron_moe.tools.check.kernel_cases import ADAPTERS, run
from neuron_moe.tools.check.kernel_cases.decode_models import decode_model_cases
from neuron_moe.tools.check.kernel_cases.models import LAYERS, model_cases
from neuron_moe.tools.check.vendor import (
    Outcome,
    add_case_options,
    in_turn,
    print_table,
    read_cases,
    write_outcomes,
)
from neuron_moe.tools.check.vendor_cases.case import Case, Limits, Skipped

NO_LIMITS = Limits(macs=math.inf, input_bytes=math.inf)  # models' cases are made to fit
PACKAGES = ("nki_kernels", "nki_sim", "kernel_cases")


def main(argv: list[str] | None = None) -> int:
    """Run the cases of a file, or of models; return 0, or 1 if one failed."""
    options = _parse(argv)
    limits = Limits(macs=options.max_gmacs * 1e9)
    if options.models is None:
        cases = read_cases(options.cases, options.status, options.match)
    else:
        known = []
        if options.phase != "decode":
            known += model_cases(options.models, limits.macs)
        if options.phase != "prefill":
            known += decode_model_cases(options.models)
        cases = [case for case in known if options.match in f"{case.id} {case.variant}"]
        limits = NO_LIMITS
    outcomes = run_cases(cases, options.max_seconds, limits)
    print_table(outcomes, "our kernels on nki_sim")
    write_outcomes(options.json, outcomes)
    return 1 if any(outcome.outcome == "failed" for outcome in outcomes) else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="neuron-moe check kernels", description=__doc__.split("\n")[0]
    )
    add_case_options(parser, status="any", max_gmacs=5.0, is_file_required=False)
    parser.add_argument(
        "--models",
        nargs="*",
        metavar="NAME",
        help="run every split and routing of these models instead of a file; without names of all:"
        f" {', '.join(LAYERS)}",
    )
    parser.add_argument(
        "--phase",
        choices=("prefill", "decode", "both"),
        default="both",
        help="which kernels of --models (default: both)",
    )
    options = parser.parse_args(argv)
    unknown = [name for name in options.models or () if name not in LAYERS]
    if unknown:
        raise ValueError(f"--models {unknown[0]}: unknown. {closest(unknown[0], list(LAYERS))}")
    if (options.cases is None) == (options.models is None):
        raise ValueError("--cases, --models: give one of them: a file of cases, or models.")
    return options


def run_cases(
    cases: Sequence[Case], max_seconds: float = math.inf, limits: Limits | None = None
) -> list[Outcome]:
    """Run cases with a progress bar; return outcomes in the order of the cases."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    start = time.monotonic()
    done: dict[str, Outcome] = {}
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        # Cases of other kernels cost nothing to skip, however little time there is.
        ours = [case for case in cases if case.kernel in ADAPTERS]
        for case in (*(c for c in cases if c.kernel not in ADAPTERS), *in_turn(ours)):
            progress.update(task, description=f"{case.id} {case.kernel} {case.variant}")
            if case.kernel in ADAPTERS and time.monotonic() - start > max_seconds:
                break
            done[case.id] = run_case(case, limits or Limits())
            progress.advance(task)
    why = f"time budget of {max_seconds:g} s used up"
    return [done.get(case.id) or _outcome(case, "skipped", why) for case in cases]


def run_case(case: Case, limits: Limits) -> Outcome:
    """Run one case. Never raises for a kernel or adapter that fails: the reason says what
    happened.
    """
    try:
        verdict = run(case, limits)
    except Skipped as reason:
        return _outcome(case, "skipped", str(reason))
    except Exception as error:  # noqa: BLE001  one broken case must not end the run
        return _outcome(case, "failed", _tell(error))
    finally:
        gc.collect()
    if verdict.failure:
        text = "; ".join(filter(None, (verdict.failure, verdict.note)))
        return _outcome(case, "failed", text, verdict.simulated_us)
    return _outcome(case, "passed", verdict.note, verdict.simulated_us)


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
    """Return one line about an exception: type, first line, and our innermost line."""
    text = (str(error).strip().splitlines() or [""])[0]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if any(package in frame.filename for package in PACKAGES)
    ]
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {text}{place}"
