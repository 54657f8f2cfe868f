"""neuron-moe bench TARGET: one module of `lab/bench` each; all take --report and --json."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

from neuron_moe.tools.menu import Menu
from neuron_moe.tools.parsers import PRINTED

MENU = Menu(
    "neuron-moe bench",
    "target",
    {
        "all": (
            "lab.bench.everything",
            "ceiling, cpu, sim, host, prefill, decode; what moved since",
        ),
        "cpu": (
            "lab.bench.cpu",
            "one MoE layer on this CPU beside that of transformers (measured)",
        ),
        "generate": (
            "lab.bench.generate",
            "a checkpoint on this CPU, ours beside transformers' generate (measured)",
        ),
        "gpu": ("lab.bench.gpu", "experts of one layer on an NVIDIA GPU beside torch's (measured)"),
        "host": ("lab.bench.host", "host time of one layer call, launches stubbed out (measured)"),
        "load": (
            "lab.bench.load",
            "memory and bytes read while a rank's weights stream (measured)",
        ),
        "sim": ("lab.bench.sim", "overhead of the simulator per instruction (measured)"),
        "serve": ("lab.bench.serve", "our class in vLLM beside vLLM's own, over HTTP (measured)"),
        "wire": ("lab.bench.wire", "bytes on the wire of one MoE layer over ranks (measured)"),
        "prefill": (
            "lab.bench.prefill",
            "MoE prefill kernels beside the vendor's and the roofline (simulated)",
        ),
        "decode": (
            "lab.bench.decode",
            "MoE decode kernels beside the vendor's and the HBM bound (simulated)",
        ),
        "layer": (
            "lab.bench.layer",
            "a whole MoE layer in deployed layouts beside the vendor's and its bound (simulated)",
        ),
        "ranks": (
            "lab.bench.ranks",
            "a MoE layer on all ranks, their sum inside the launch or after it (simulated)",
        ),
        "ep": (
            "lab.bench.ep",
            "experts of a prefill on a rank of expert parallelism beside their bound (simulated)",
        ),
        "anchors": (
            "lab.bench.anchors",
            "strangers' chip times beside the estimates of the clock (simulated)",
        ),
    },
)


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark; with --report, write what it printed as a page."""
    args = sys.argv[1:] if argv is None else argv
    option = argparse.ArgumentParser(add_help=False)
    option.add_argument("--report", type=Path)
    option.add_argument("--json", nargs="?", type=Path, const=PRINTED)
    asked = option.parse_known_args(args)[0]
    if asked.report is None:
        return MENU.main(args)
    from lab.bench.printed import Tee, page_of_text
    from neuron_moe.tools.pages import write_page

    tee = Tee(sys.stdout, keeps_json=asked.json is None)
    with contextlib.redirect_stdout(tee):
        status = MENU.main(args if asked.json is not None else [*args, "--json"])
    text = tee.text
    if asked.json not in (None, PRINTED):
        text += json.dumps(json.loads(asked.json.read_text()))
    page = page_of_text(f"neuron-moe bench {args[0]}", text)
    print(f"report: {write_page(page, asked.report)}")
    return status
