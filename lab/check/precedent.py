"""neuron-moe check precedent: which uses of instructions no public kernel shows.

    neuron-moe check precedent --json OUT
    neuron-moe check precedent --kernel my.py:exp --args x=128x4096:bfloat16
    neuron-moe check precedent --library LIB --cases C --list L --write FILE

Runs kernels on the simulator, ours or one of yours, and compares what they use with a table
recorded of public kernels. What it lists is not illegal: nobody showed that it compiles. The
third form records the table anew, of cases and of the library's own tests. Nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from lab.check.case_file import read_cases
from lab.check.kernel_cases.decode_models import decode_model_cases
from lab.check.kernel_cases.models import LAYERS, model_cases
from lab.check.kernels import NO_LIMITS, sample
from lab.check.kernels import run_case as run_ours
from lab.check.vendor import run_case
from lab.check.vendor_cases.case import Limits
from lab.check.vendor_cases.library import LIBRARY_VARIABLE, VendorLibrary
from lab.chip.cases import SMALL
from neuron_moe.backends.nki import features
from neuron_moe.backends.nki.times import TIMES_ONLY, plan_runs, routed_choices
from neuron_moe.configs import config_names
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.plan import Step
from neuron_moe.spec import Tuning
from neuron_moe.tools.models import read_model
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.timing.layers import MODELS, Model, choose_experts
from neuron_moe.tools.timing.plans import experts_parts, in_stages, launches_of, plan_of
from nki_sim import vendor_tests
from nki_sim.own_kernel import load_kernel, read_arguments, simulate
from nki_sim.precedent import TABLE, Missing, Place, Recorder, Table, Use, recording

CHIP: Final = "trn2"
_TUNING: Final = Tuning()
# Tokens of the steps of the published tables.
_TOKENS: Final = {"decode": (1, 4, 16, 64, 128), "prefill": (128, 1024, 8192)}
# Of `--quick`: model, ranks that split an expert, phase, tokens.
_QUICK: Final = (
    ("gpt_oss_120b", 8, "decode", 16),
    ("gpt_oss_120b", 8, "prefill", 1024),
    ("qwen3_30b_a3b", 8, "decode", 16),
    ("qwen3_30b_a3b", 8, "prefill", 1024),
    ("llama4_scout", 16, "decode", 4),
    ("mixtral_8x7b", 8, "decode", 4),
    ("deepseek_v3", 16, "decode", 16),
)
_MACS: Final = 5e9  # of a case of the open matrix, as `check kernels` has it
_SPLITS: Final = ((8, 1), (1, 8))  # ranks that split an expert, and those that share experts
_STEPS: Final = (("decode", 16), ("prefill", 512))  # of every published model
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
    table = Table.read(options.table)
    if options.kernel is None:
        tuning = Tuning(features=options.features)
        recorder = _in_processes(our_runs(tuning, is_quick=options.quick), options.jobs)
    else:
        with recording() as recorder:
            _run_own(options.kernel, options.args, options.lnc)
    report = table.counts(recorder)
    _print(report["uses"], report["sources"], table.without(recorder))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("check precedent", __doc__)
    parser.add_argument("--kernel", metavar="FILE.py:NAME", help="a kernel of yours; default: ours")
    parser.add_args_option()
    parser.more.add_argument("--lnc", type=int, choices=(1, 2), help="cores of its launch")
    parser.add_features_option("what plans of our kernels may use")
    parser.add_argument("--quick", action="store_true", help="ours: a few layers, one minute")
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


def our_runs(
    tuning: Tuning = _TUNING, *, is_quick: bool = False
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names of runs of our kernels with plans of a tuning, and what runs each: layers of all
    published models, cases of `chip check` and of the open matrix, experts of published tables.
    """
    layers: Iterable[tuple[str, int, int, str, int]] = (
        (model, *split, *step) for model in config_names() for split in _SPLITS for step in _STEPS
    )
    if is_quick:
        layers = ((model, tp, 1, phase, tokens) for model, tp, phase, tokens in _QUICK)
    for model, tp, ep, phase, tokens in layers:
        for in_one in (True, False):
            form = "one launch" if in_one else "stages"
            name = f"{model} TP{tp} EP{ep}, {phase} of {tokens}, {form}"
            yield name, partial(_run_layer, model, tp, ep, phase, tokens, in_one, tuning)
    matrix = (
        [] if is_quick else [*model_cases(list(LAYERS), _MACS), *decode_model_cases(list(LAYERS))]
    )
    for case in (*SMALL, *sample(matrix)):
        asked = {**case_params(tuning), **case.params}
        yield case.id, partial(run_ours, replace(case, params=asked), NO_LIMITS)
    if is_quick:
        return
    for experts, phase in itertools.product(MODELS, _TOKENS):
        fp8 = "e5m2" if experts.name.startswith("gpt-oss") else "e4m3"
        formats = ("bf16", fp8) if phase == "decode" else ("bf16",)
        for tokens, weights, layout in itertools.product(
            _TOKENS[phase], formats, ("plain", "packed")
        ):
            name = f"experts of {experts.name} TP{experts.tp}, {phase} of {tokens}, {weights}"
            run = partial(_run_experts, experts, Step(phase, tokens), weights, layout, tuning)
            yield f"{name} {layout}", run


def case_params(tuning: Tuning) -> dict[str, str]:
    """Return how the kernels of a case are to go about it, as parameters of the case."""
    prefill, decode = features.prefill_request(tuning), features.decode_request(tuning)
    return {"trips": prefill.trips, "sums": decode.sums}


def _run_layer(
    model: str, tp: int, ep: int, phase: str, tokens: int, in_one: bool, tuning: Tuning
) -> None:
    raw_config, _ = read_model(model)
    layer = RankLayer(raw_config, model, tp=tp, ep=ep, backend="nki", tuning=tuning)
    plan = layer.plan(phase, tokens, in_one=in_one)
    options = replace(TIMES_ONLY, target=CHIP)
    for _ in plan_runs(plan, routed_choices(plan), options=options):
        pass  # who records has seen it


def _run_experts(model: Model, step: Step, weights: str, layout: str, tuning: Tuning) -> None:
    """Run the experts of a published row, in one launch and in stages."""
    parts = experts_parts(model, step, layout=layout, weight_format=weights)
    tuning = replace(parts.tuning, features=tuning.features)
    plan = plan_of(replace(parts, tuning=tuning), step)
    index_TK = choose_experts("skewed", step.tokens, model.E, model.K)
    for each in (plan, in_stages(plan)) if plan.chosen().get("block_size") else (plan,):
        for _ in launches_of(each, index_TK, replace(TIMES_ONLY, target=CHIP)):
            pass


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


def _in_processes(runs: Iterator[tuple[str, Callable[[], Any]]], jobs: int) -> Recorder:
    """Run all in so many processes; return what all of them used."""
    together = Recorder()
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for uses, count in pool.map(_recorded, runs):
            together.runs += count
            for use, places in uses.items():
                for place, levels in places.items():
                    known = together.uses[use]
                    known[place] = max(levels, known.get(place, 0))
    return together


def _recorded(run: tuple[str, Callable[[], Any]]) -> tuple[dict[Use, dict[Place, int]], int]:
    with recording() as recorder:
        _each(iter([run]))
    return dict(recorder.uses), recorder.runs


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


def _print(uses: int, shown: dict[str, int], missing: list[Missing]) -> None:
    """Print the uses without precedent, each with its first line and how many others it has."""
    known = ", ".join(f"{count} in {source}" for source, count in shown.items())
    print(f"{uses} uses, with a precedent: {known}")
    by_what = itertools.groupby(sorted(missing, key=lambda one: one.what), lambda one: one.what)
    for what, found in by_what:
        first, *others = found
        more = f" and {len(others)} more" if others else ""
        print(f"{Path(first.file).name}:{first.line}{more} ({first.kernel}): {what}")
