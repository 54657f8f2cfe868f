"""neuron-moe check precedent: which uses of instructions no public kernel shows.

    neuron-moe check precedent --json OUT
    neuron-moe check precedent --kernel my.py:exp --args x=128x4096:bfloat16
    neuron-moe check precedent --library CHECKOUT --cases CASES --list LIST --write FILE

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from lab.check.case_file import read_cases
from lab.check.kernels import NO_LIMITS
from lab.check.kernels import run_case as run_ours
from lab.check.uses import TABLE, Missing, Table, recording
from lab.check.vendor import run_case
from lab.check.vendor_cases.case import Limits
from lab.check.vendor_cases.library import LIBRARY_VARIABLE, VendorLibrary
from lab.chip.cases import SMALL
from neuron_moe.backends.nki import features
from neuron_moe.backends.nki.times import TIMES_ONLY, plan_runs, routed_choices
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.spec import Tuning
from neuron_moe.tools.models import read_model
from neuron_moe.tools.parsers import Parser
from nki_sim.own_kernel import load_kernel, read_arguments, simulate

CHIP: Final = "trn2"
_TUNING: Final = Tuning()
_FUSED: Final = (True,)
_BOTH: Final = (True, False)  # one launch, and one for each stage
# Model, ranks that split an expert, phase, tokens, and whether in one launch: rows of the published
# tables and plans of `neuron-moe inspect --explain`, as many as run in some two minutes.
LAYERS: Final = (
    ("gpt_oss_120b", 8, "decode", 4, _BOTH),
    ("gpt_oss_120b", 8, "decode", 16, _BOTH),
    ("gpt_oss_120b", 8, "prefill", 1024, _BOTH),
    ("qwen3_30b_a3b", 8, "decode", 16, _BOTH),
    ("qwen3_30b_a3b", 8, "prefill", 1024, _BOTH),
    ("llama4_scout", 16, "decode", 4, _BOTH),
    ("llama4_scout", 16, "prefill", 512, _BOTH),
    ("mixtral_8x7b", 8, "decode", 4, _BOTH),
    ("mixtral_8x7b", 8, "prefill", 512, _FUSED),
    ("deepseek_v3", 16, "decode", 16, _FUSED),
)
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
    with recording() as recorder:
        if options.kernel is None:
            _each(our_runs(Tuning(features=options.features)))
        else:
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


def our_runs(tuning: Tuning = _TUNING) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names of runs of our kernels with plans of a tuning, and what runs each."""
    for model, tp, phase, tokens, forms in LAYERS:
        for in_one in forms:
            name = f"{model} TP{tp}, {phase} of {tokens}, {'one launch' if in_one else 'stages'}"
            yield name, partial(_run_layer, model, tp, phase, tokens, in_one, tuning)
    for case in SMALL:
        asked = {**case_params(tuning), **case.params}
        yield case.id, partial(run_ours, replace(case, params=asked), NO_LIMITS)


def case_params(tuning: Tuning) -> dict[str, str]:
    """Return how the kernels of a case are to go about it, as parameters of the case."""
    prefill, decode = features.prefill_request(tuning), features.decode_request(tuning)
    return {"trips": prefill.trips, "sums": decode.sums}


def _run_layer(model: str, tp: int, phase: str, tokens: int, in_one: bool, tuning: Tuning) -> None:
    raw_config, _ = read_model(model)
    layer = RankLayer(raw_config, model, tp=tp, backend="nki", tuning=tuning)
    plan = layer.plan(phase, tokens, in_one=in_one)
    options = replace(TIMES_ONLY, target=CHIP)
    for _ in plan_runs(plan, routed_choices(plan), options=options):
        pass  # who records has seen it


def vendor_runs(
    library: VendorLibrary, cases: Path, tests: Path
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names of runs of the vendor's kernels on this chip, and what runs each."""
    from nki_sim import vendor_tests  # pytest is no dependency

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


def _print(uses: int, shown: dict[str, int], missing: list[Missing]) -> None:
    """Print the uses without precedent, each with its first line and how many others it has."""
    known = ", ".join(f"{count} in {source}" for source, count in shown.items())
    print(f"{uses} uses, with a precedent: {known}")
    by_what = itertools.groupby(sorted(missing, key=lambda one: one.what), lambda one: one.what)
    for what, found in by_what:
        first, *others = found
        more = f" and {len(others)} more" if others else ""
        print(f"{Path(first.file).name}:{first.line}{more} ({first.kernel}): {what}")
