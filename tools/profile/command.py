"""neuron-moe profile: where the time of a kernel or a layer goes, by source line.

    neuron-moe profile --kernel my.py:exp --args x=128x4096:bfloat16 --out lanes
    neuron-moe profile --model qwen3_30b_a3b --tp 8 --phase decode --tokens 16

Runs on the simulator: times are simulated. Prints the totals, the roofline
point, and the lines that hold up the whole, with their source. --out writes for
each launch NAME.png (the engines over time, coloured by source line) and
NAME.perfetto.json (for ui.perfetto.dev), and roofline.png for all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from neuron_moe.backends.nki.times import TIMES_ONLY, plan_runs, routed_choices
from neuron_moe.errors import check_positive_int
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.paths import PHASES
from neuron_moe.spec import DEFAULT_LNC_SIZE, Tuning
from neuron_moe.tools.console import format_table
from neuron_moe.tools.models import read_model
from neuron_moe.tools.pages import add_report_option, write_page
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.profile.page import Launch, launch_rows, profile_page
from neuron_moe.tools.profile.roofline import (
    roofline_figure,
    roofline_point,
    roofline_text,
    useful_record,
    useful_rows,
)
from neuron_moe.tools.profile.what_if import (
    changed_chip,
    sensitivity,
    sensitivity_rows,
    what_if,
    what_if_text,
)
from neuron_moe.tools.timing.sources import write_result
from neuron_moe.tools.timing.useful_work import UsefulWork, layer_work
from nki_sim.hardware import find
from nki_sim.hardware_file import use_hardware
from nki_sim.own_kernel import TIMES_ONLY as OWN_TIMES
from nki_sim.own_kernel import load_kernel, read_arguments, simulate
from nki_sim.time.estimate import with_range


def main(argv: list[str] | None = None) -> int:
    """Profile; return the exit status."""
    args = _parse(argv)
    if args.hardware is not None:
        use_hardware(args.hardware)
    changed_chip(find(args.target), args.set)  # a wrong name is refused before anything runs
    beside = dict[str, Any]()
    if args.kernel is None:
        launches, work = _layer(args)
        beside["useful"] = useful_record(work, [launch.run for launch in launches])
    else:
        launches = list(_own(args))
    chosen = _choose(launches, args.launch)
    if len(launches) > 1:
        print(f"{format_table(launch_rows(launches))}\n")
    if "useful" in beside:
        print(f"{format_table(useful_rows(beside['useful']))}\n")
    beside |= _tell(chosen, args)
    if args.out is not None:
        _write(launches, args.out)
    if args.report is not None:
        what = args.kernel or f"{args.model}, {args.phase} of {args.tokens} tokens, TP {args.tp}"
        print(f"report: {write_page(profile_page(what, launches, beside), args.report)}")
    if args.json is not None:
        records = [_record(launch) for launch in launches]
        write_result(args.json, {"kind": "simulated", "launches": records, **beside})
    return 0


def _own(args: argparse.Namespace) -> Iterator[Launch]:
    """Simulate a kernel of a user."""
    kernel = load_kernel(args.kernel)
    options = replace(OWN_TIMES, target=args.target)
    run = simulate(kernel, read_arguments(args.args), args.lnc, options)
    yield Launch(args.kernel.rpartition(":")[2], run.timeline)


def _layer(args: argparse.Namespace) -> tuple[list[Launch], UsefulWork]:
    """Simulate the launches of one layer of a model on one rank; return them, and its own work."""
    raw_config, _ = read_model(args.model)
    tuning = Tuning(num_cores=args.lnc or DEFAULT_LNC_SIZE, features=args.features)
    layer = RankLayer(raw_config, args.model, tp=args.tp, ep=args.ep, backend="nki", tuning=tuning)
    plan = layer.plan(args.phase, args.tokens)
    chosen_TK = routed_choices(plan)
    begun, launches = time.monotonic(), list[Launch]()
    for name, run in plan_runs(plan, chosen_TK, options=replace(TIMES_ONLY, callers=True)):
        launches.append(Launch(name, run.timeline))
        print(f"simulated {name} [{time.monotonic() - begun:.1f} s]", file=sys.stderr, flush=True)
        begun = time.monotonic()
    # In several launches shared experts are the framework's.
    parts = plan.parts if plan.is_fused else replace(plan.parts, shared=None)
    return launches, layer_work(parts, chosen_TK)


def _choose(launches: list[Launch], name: str | None) -> Launch:
    """Return the launch to tell of: the one named, or the longest."""
    if name is None:
        return max(launches, key=lambda launch: launch.run.total_ns)
    for launch in launches:
        if launch.name == name:
            return launch
    names = ", ".join(launch.name for launch in launches)
    raise ValueError(f"--launch {name}: must be one of {names}.")


def _tell(launch: Launch, args: argparse.Namespace) -> dict[str, Any]:
    """Print what is to be known of a launch; return what was asked beside its times."""
    run, beside = launch.run, dict[str, Any](launch=launch.name)
    print(f"{launch.name} on {run.totals()}")
    estimate = with_range(run)
    beside["estimate"] = asdict(estimate)
    print(f"in a graph: {estimate}")
    print(roofline_text(roofline_point(run)))
    print(f"\n{run.line_times()}")
    if args.sensitivity:
        beside["sensitivity"] = sensitivity(run)
        print(f"\n{format_table(sensitivity_rows(beside['sensitivity']))}")
    if args.set:
        other = what_if(run, args.set)
        beside["what_if"] = {"set": args.set, "us": other.total_us}
        beside["what_if_text"] = what_if_text(run, other)
        print(f"\n{beside['what_if_text']}")
    return beside


def _write(launches: list[Launch], folder: Path) -> None:
    """Write pictures and traces; say where."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for one in launches:
        written.append(one.run.save_picture(folder / f"{one.name}.png"))
        written.append(one.run.save_perfetto(folder / f"{one.name}.perfetto.json"))
    points = {one.name: roofline_point(one.run) for one in launches}
    chip = launches[0].run.chip.name
    figure = roofline_figure(points, f"{chip}: launches under the roofline")
    if figure is not None:
        written.append(folder / "roofline.png")
        figure.savefig(written[-1])
    print("\nwritten:", *written, sep="\n  ")


def _record(launch: Launch) -> dict[str, Any]:
    """Return what the JSON file has of a launch."""
    run = launch.run
    return {
        "kernel": launch.name,
        "target": run.chip.name,
        "us": run.total_us,
        "instructions": len(run.trace),
        "roofline": roofline_point(run),
        "lines": [
            {**one._asdict(), "source": one.source, "share": one.path_ns / run.total_ns}
            for one in run.line_times()
        ],
    }


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("profile", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--kernel", metavar="FILE.py:NAME", help="a kernel of your own")
    what.add_argument("--model", metavar="M", help="a layer of a model, by name or path")
    parser.add_args_option()
    parser.add_argument("--phase", choices=PHASES, default="prefill", help="default: prefill")
    parser.add_argument("--tokens", type=int, metavar="T", help="of the layer's step")
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="ranks an expert is split on"
    )
    parser.more.add_argument(
        "--ep", type=int, default=1, metavar="N", help="ranks the experts are on"
    )
    parser.add_features_option("what the layer's plan may use")
    parser.more.add_argument("--launch", metavar="NAME", help="of a layer; default: the longest")
    parser.more.add_argument("--lnc", type=int, choices=(1, 2), help="cores of a launch")
    parser.more.add_argument("--target", default="trn2", metavar="CHIP", help="default: trn2")
    parser.more.add_argument("--hardware", type=Path, metavar="FILE", help="of chip calibrate")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="C=V", help="what if a coefficient were V, or xV"
    )
    parser.more.add_argument("--sensitivity", action="store_true", help="which coefficients matter")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="pictures and traces")
    add_report_option(parser)
    parser.more.add_argument("--json", type=Path, metavar="FILE", help="all of it, for programs")
    args = parser.parse_args(argv)
    if args.model is not None:
        if args.tokens is None:
            raise ValueError(f"--model {args.model}: say of how many tokens, with --tokens T.")
        for name in ("tokens", "tp", "ep"):
            check_positive_int(f"--{name}", getattr(args, name))
    if args.kernel is None and args.args:
        raise ValueError("--args: are of a kernel. Give --kernel FILE.py:NAME, too.")
    return args
