"""neuron-moe compile: from a model and a deployment to a program for the chip, as far as one gets.

    neuron-moe compile --config gpt_oss_120b --out plan
    neuron-moe compile --model DIR --config trn2.48xlarge --out build

Says whether the model fits, what each step takes and why; cuts the weights for the ranks where DIR
has any; writes plan.json, index.html and manifest.json. Where the Neuron SDK is installed NxDI then
compiles and loads it with our layer inside. A second run computes only what has changed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from neuron_moe import __version__
from neuron_moe.models.conversion import ConversionOptions, convert
from neuron_moe.models.deployment import DoesNotFit
from neuron_moe.tools.compile import nxdi
from neuron_moe.tools.compile.page import plan_page
from neuron_moe.tools.compile.request import Request, find_request
from neuron_moe.tools.compile.steps import MOST_INSTRUCTIONS, BucketPlan, plan_buckets
from neuron_moe.tools.compile.store import (
    digest,
    digest_file,
    digest_sources,
    read_json,
    write_json,
)
from neuron_moe.tools.console import format_bytes, format_table, print_json_line, progress_bar
from neuron_moe.tools.models import add_download_option
from neuron_moe.tools.pages import add_report_option, write_page
from neuron_moe.tools.parsers import Parser

SDK_IS_MISSING = 3
_EXITS = (
    "exit status: 0 compiled, or planned with --plan-only, 1 failed, 2 wrong call, or it does not"
    " fit (the smallest change that does is named), 3 all is done but what needs the Neuron SDK or"
    " weights, which is listed, 130 interrupted"
)
_WEIGHTS, _MANIFEST = "weights", "manifest.json"
_OWN_FILES = ("plan.json", "index.html", "neuron_config.json")


def main(argv: list[str] | None = None) -> int:
    """Compile; return the exit status."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(1)  # shapes only: threads would wait for one another
    try:
        request = find_request(args.model, args.config, args.set, download=args.download)
    except DoesNotFit as error:
        if args.json:
            memory = error.memory.to_dict()
            print_json_line("compile", fits=False, why=str(error), memory_bytes=memory)
        raise
    report = compile_request(request, args.out)
    _print_report(report, args.out)
    if args.report is not None:
        print(f"report: {write_page(plan_page(report), args.report)}")
    status = SDK_IS_MISSING
    if not report["missing"] and not args.plan_only:
        assert request.folder is not None
        model_type = str(request.raw_config["model_type"])
        for line in nxdi.hand_over(request.deployment, model_type, request.folder, args.out):
            print(line)
        status = 0
    if args.json:
        print_json_line("compile", **{key: report[key] for key in report if key != "version"})
    if report["missing"]:
        print(
            "neuron-moe compile: everything is done but what needs: "
            + "; ".join(report["missing"]),
            file=sys.stderr,
        )
    return 0 if args.plan_only else status


def compile_request(request: Request, out: Path) -> dict[str, Any]:
    """Do everything that needs no SDK; return the report that plan.json holds.

    Args:
        request: what is compiled.
        out: folder to write.
    """
    out.mkdir(parents=True, exist_ok=True)
    before = read_json(out / _MANIFEST) or {}
    inputs = _inputs(request, before)
    with progress_bar("simulating kernels") as progress:
        buckets, reused = plan_buckets(request, out / "kernels", inputs["sources"], progress)
    weights = _cut_weights(request, out, inputs, before)
    report = _report(request, buckets, reused, weights)
    write_json(out / "neuron_config.json", nxdi.neuron_settings(request.deployment))
    write_json(out / "plan.json", report)
    write_page(plan_page(report), out / "index.html")
    write_json(out / _MANIFEST, {"inputs": inputs, "outputs": _outputs(out, before)})
    return report


def _inputs(request: Request, before: dict[str, Any]) -> dict[str, Any]:
    """Return content hashes of all that a compilation depends on."""
    deployment = json.dumps(_settings(request), sort_keys=True)
    known = before.get("inputs", {}).get("weights", {})
    files = [] if request.folder is None else sorted(request.folder.glob("*.safetensors"))
    return {
        "config.json": digest(json.dumps(request.raw_config, sort_keys=True)),
        "deployment": digest(deployment),
        "sources": digest_sources(),
        "weights": _digest_files(files, known),
    }


def _digest_files(files: list[Path], known: dict[str, Any]) -> dict[str, Any]:
    with progress_bar("reading for the manifest", unit="bytes") as progress:
        return {file.name: digest_file(file, known.get(file.name), progress) for file in files}


def _outputs(out: Path, before: dict[str, Any]) -> dict[str, Any]:
    """Return content hashes of what was written."""
    known = before.get("outputs", {})
    files = [out / name for name in _OWN_FILES]
    files += sorted(file for file in (out / _WEIGHTS).glob("*") if file.is_file())
    with progress_bar("reading for the manifest", unit="bytes") as progress:
        return {
            (name := file.relative_to(out).as_posix()): digest_file(file, known.get(name), progress)
            for file in files
        }


def _cut_weights(
    request: Request, out: Path, inputs: dict[str, Any], before: dict[str, Any]
) -> dict[str, Any]:
    """Write the files of all ranks, unless they are there and nothing changed."""
    if not inputs["weights"]:
        return {"files": 0, "reused": False}
    folder, deployment = out / _WEIGHTS, request.deployment
    was = before.get("inputs", {})
    wanted = [name for name in before.get("outputs", {}) if name.startswith(f"{_WEIGHTS}/")]
    keys = ("config.json", "deployment", "weights")
    is_same = bool(wanted) and all(was.get(key) == inputs[key] for key in keys)
    if is_same and all((out / name).is_file() for name in wanted):
        return {"files": len(wanted), "reused": True}
    if wanted and folder.is_dir():
        shutil.rmtree(folder)
    options = ConversionOptions(to=deployment.quantization, tp=deployment.tp, ep=deployment.ep)
    assert request.folder is not None
    with progress_bar("cutting weights for ranks", unit="bytes") as progress:
        result = convert(request.folder, folder, options, progress=progress)
    return {"files": len(result.files), "reused": False}


def _settings(request: Request) -> dict[str, Any]:
    settings = asdict(request.deployment)
    del settings["config_json"]
    return settings


def _report(
    request: Request, buckets: list[BucketPlan], reused: int, weights: dict[str, Any]
) -> dict[str, Any]:
    deployment = request.deployment
    memory = deployment.memory()
    return {
        "version": __version__,
        "model": deployment.model,
        "instance": deployment.instance,
        "fits": memory.fits,
        "ranks": deployment.spread.ranks,
        "deployment": _settings(request),
        "buckets": [bucket.to_dict() for bucket in buckets],
        "memory_bytes": memory.to_dict(),
        "missing": nxdi.find_missing(request.folder),
        "weights": weights,
        "reused_simulations": reused,
        "remarks": _remarks(request, buckets),
    }


def _remarks(request: Request, buckets: list[BucketPlan]) -> list[str]:
    """Return what a reader should know before spending money."""
    deployment, found = request.deployment, []
    found += deployment.parallel.check_topology(deployment.instance, deployment.lnc)
    largest = max(buckets, key=lambda bucket: bucket.instructions)
    if largest.instructions > MOST_INSTRUCTIONS:
        found.append(
            f"{largest.work.phase} of {largest.work.tokens} tokens: {largest.instructions:,}"
            f" instructions; compilers were reported to fail from {MOST_INSTRUCTIONS:,} on"
        )
    if deployment.quantization != "bf16":
        found.append(
            "NxDI keeps routed experts in bfloat16; the plan's format is that of our own rank files"
        )
        try:
            nxdi.check_fits(deployment)
        except DoesNotFit as error:
            found.append(f"so handing over to NxDI would be refused: {error}")
    return found


def _print_report(report: dict[str, Any], out: Path) -> None:
    memory, deployment = report["memory_bytes"], report["deployment"]
    print(
        f"{report['model']} on {report['instance']}, {report['ranks']} ranks: experts TP"
        f" {deployment['tp']} x EP {deployment['ep']} in {deployment['quantization']}, the rest TP"
        f" {report['ranks']}\nfits: a rank needs {format_bytes(memory['needed'])} of"
        f" {format_bytes(memory['hbm'])}  [computed]\n"
    )
    names = [
        name for name in ("weights", "kv_cache", "state", "scratch", "reserve") if memory[name]
    ]
    rows = [(name.replace("_", " "), format_bytes(memory[name])) for name in names]
    print(format_table([("", "bytes a rank"), *rows]))
    header = ("step", "tokens", "context", "ms", "kernels", "rest", "instructions")
    print("\n" + format_table([header, *map(_step_row, report["buckets"])]))
    print("kernels [simulated], rest [computed], instructions [estimated]\n")
    for remark in report["remarks"]:
        print(f"note: {remark}")
    if report["weights"]["files"]:
        how = "kept from before" if report["weights"]["reused"] else "written"
        print(f"{out / _WEIGHTS}: {report['weights']['files']} files, {how}")
    if report["reused_simulations"]:
        print(f"{report['reused_simulations']} simulations kept from before")
    print(f"{out / 'index.html'}: the plan on one page; plan.json: all numbers")


def _step_row(bucket: dict[str, Any]) -> tuple[str, ...]:
    times = (f"{bucket[name] / 1e3:.2f}" for name in ("us", "us_simulated", "us_computed"))
    sizes = str(bucket["tokens"]), str(bucket["context"])
    return (bucket["phase"], *sizes, *times, f"{bucket['instructions']:,}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser("compile", __doc__, exits=_EXITS)
    parser.add_argument(
        "--model", help="folder or hub id of a checkpoint, or name of a configuration"
    )
    add_download_option(parser)
    parser.add_argument(
        "--config", help="machine, model, both (gpt-oss-120b@trn2.3xlarge), or a JSON file"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a setting: lnc, tp, ep, sp, quantization, batch, max_length, buckets",
    )
    add_report_option(parser)
    parser.add_argument("--plan-only", action="store_true", help="stop before the hand-over")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser
