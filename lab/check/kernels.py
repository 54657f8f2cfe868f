"""neuron-moe check kernels: our kernels on the simulator, each against the formula in float64.

    neuron-moe check kernels --models gpt_oss_20b

A case passes if every element of its output is within atol + rtol * max|expected| of the formula
and the root mean square error is no larger than that of the torch path. Times are simulated.
"""

import argparse
import gc
import math
from collections.abc import Sequence

from lab.check.case_file import add_case_options, outcome_file, read_cases
from lab.check.kernel_cases.adapters import ADAPTERS, run
from lab.check.kernel_cases.decode_models import decode_model_cases
from lab.check.kernel_cases.models import LAYERS, model_cases
from lab.check.kernel_cases.splits import PHASES, drawn_cases
from lab.check.launcher import checking_for
from lab.check.outcomes import Outcome, OutcomeFile, print_table, run_in_turn, tell
from lab.check.vendor_cases.case import Case, Limits, Skipped
from neuron_moe.errors import closest
from neuron_moe.tools.models import model_among
from neuron_moe.tools.parsers import Parser

NO_LIMITS = Limits(macs=math.inf, input_bytes=math.inf)  # models' cases are made to fit
QUICK = 40  # cases of models that run without --all
PACKAGES = ("nki_kernels", "nki_sim", "kernel_cases")


def main(argv: list[str] | None = None) -> int:
    """Run the cases of a file, or of models; return 0, or 1 if one failed."""
    options = _parse(argv)
    limits, file = Limits(macs=options.max_gmacs * 1e9), outcome_file(options)
    if options.models is None:
        cases = read_cases(options.cases, options.status, options.match)
    else:
        known = []
        if options.splits:
            phases = PHASES if options.phase == "both" else (options.phase,)
            known = drawn_cases(options.models, phases, options.splits, options.seed, limits.macs)
        elif options.phase != "decode":
            known += model_cases(options.models, limits.macs)
        if options.phase != "prefill" and not options.splits:
            known += decode_model_cases(options.models)
        matched = [case for case in known if options.match in f"{case.id} {case.variant}"]
        cases = matched if options.all or options.splits else sample(matched)
        if len(cases) < len(matched):
            print(f"{len(cases)} of {len(matched)} cases, evenly taken; --all runs every one")
        limits = NO_LIMITS
    with checking_for(options.chip):
        outcomes = run_cases(cases, options.max_seconds, limits, options.jobs, file)
    print_table(outcomes, "our kernels on nki_sim")
    return 1 if any(outcome.outcome == "failed" for outcome in outcomes) else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("check kernels", __doc__)
    add_case_options(parser, status="any", max_gmacs=5.0, is_file_required=False)
    parser.add_argument(
        "--models",
        nargs="*",
        type=model_among(LAYERS),
        metavar="NAME",
        help="run every split and routing of these models; without names of all:"
        f" {', '.join(LAYERS)}",
    )
    parser.add_argument(
        "--all", action="store_true", help=f"every case of --models; default: {QUICK} of them"
    )
    parser.more.add_argument(
        "--splits",
        type=int,
        default=0,
        metavar="N",
        help="draw so many splits of --models over ranks, and steps, instead: each through the plan"
        " that a layer takes, with either core first",
    )
    parser.more.add_argument("--seed", type=int, default=0, help="of --splits (default: 0)")
    parser.add_argument(
        "--phase",
        choices=("prefill", "decode", "both"),
        default="both",
        help="whose kernels (default: both)",
    )
    parser.add_argument(
        "--chip",
        choices=("trn2", "trn3"),
        default="trn2",
        help="default: trn2; trn3 multiplies MX words as stored",
    )
    options = parser.parse_args(argv)
    unknown = [name for name in options.models or () if name not in LAYERS]
    if unknown:
        raise ValueError(f"--models {unknown[0]}: unknown. {closest(unknown[0], list(LAYERS))}")
    if options.splits < 0 or (options.splits and options.models is None):
        raise ValueError(
            f"--splits {options.splits}: a number of cases to draw of --models. Give both."
        )
    if (options.cases is None) == (options.models is None):
        raise ValueError("--cases, --models: give one of them: a file of cases, or models.")
    return options


def sample(cases: Sequence[Case]) -> list[Case]:
    """Return at most QUICK cases, as far apart as they can be."""
    count = min(QUICK, len(cases))
    return [cases[number * len(cases) // count] for number in range(count)]


def run_cases(
    cases: Sequence[Case],
    max_seconds: float = math.inf,
    limits: Limits | None = None,
    jobs: int = 1,
    file: OutcomeFile | None = None,
) -> list[Outcome]:
    """Run cases with a progress bar; return outcomes in the order of the cases.

    Those of other kernels are shown in any case: to skip them takes no time.
    """
    return run_in_turn(
        cases,
        lambda case: run_case(case, limits or Limits()),
        max_seconds,
        is_free=lambda case: case.kernel not in ADAPTERS,
        jobs=jobs,
        file=file,
    )


def run_case(case: Case, limits: Limits) -> Outcome:
    """Run one case. Never raises for a kernel or adapter that fails: the reason says what
    happened.
    """
    try:
        verdict = run(case, limits)
    except Skipped as reason:
        return Outcome.of(case, "skipped", str(reason))
    except Exception as error:  # noqa: BLE001  one broken case must not end the run
        return Outcome.of(case, "failed", tell(error, PACKAGES))
    finally:
        gc.collect()
    if verdict.failure:
        text = "; ".join(filter(None, (verdict.failure, verdict.note)))
        return Outcome.of(case, "failed", text, verdict.simulated_us)
    return Outcome.of(case, "passed", verdict.note, verdict.simulated_us)
