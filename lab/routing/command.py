"""neuron-moe routing: which experts a text chooses, and what follows for block size and EPLB.

    neuron-moe routing --model tiny_gpt_oss --report routing.html
    neuron-moe routing --model DIR --texts mine.txt --out traces
    neuron-moe routing --trace traces/code.npz  # what was recorded before

Runs texts through a model in prefill. Says how uneven the experts are loaded, which are chosen
together and how clear the choices are, by layer and domain. Writes a trace (.npz) a domain, and
all.npz, which tune, plan and place read with --trace.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lab.routing.analysis import estimate_block_sizes, padding_rows
from lab.routing.findings import Findings
from lab.routing.picture import draw_domains
from lab.routing.texts import HELD_OUT_FILE, cut_sequences, read_texts
from neuron_moe.errors import check_positive_int
from neuron_moe.models.expert_load import moe_layers
from neuron_moe.models.loader import load_model, read_config
from neuron_moe.models.routing_trace import RoutingTrace, record_routing
from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder
from neuron_moe.models.text import TextCodec
from neuron_moe.moe import MoE
from neuron_moe.tools.console import fitting_threads, print_json_line, progress_bar
from neuron_moe.tools.pages import add_report_option, write_page
from neuron_moe.tools.parsers import Parser


def main(argv: list[str] | None = None) -> int:
    """Record, write and report; return 0."""
    args = _parser().parse_args(argv)
    for name in ("tokens", "longest", "prefill_tokens", "ranks"):
        check_positive_int(f"--{name.replace('_', '-')}", getattr(args, name))
    found = _read(args) if args.trace else _record(args)
    print(found.screen())
    if args.out is not None:
        _write(found, args.out)
    elif len(found.traces) > 1 or not args.trace:
        print("\n--out DIR writes all.npz")
    if args.report is not None:
        print(f"report: {write_page(found.page(), args.report)}")
    if args.json:
        out = None if args.out is None else str(args.out)
        print_json_line("routing", **found.to_dict(), out=out)
    return 0


def _record(args: argparse.Namespace) -> Findings:
    """Run the texts through the model."""
    folder = checkpoint_folder(args.model)
    texts: dict[str, list[str]] = {}
    for path in args.texts or [folder / HELD_OUT_FILE]:
        texts |= read_texts(path)
    codec, model = TextCodec(folder), load_model(folder)
    traces = {}
    with fitting_threads(folder), progress_bar("recording") as progress:
        for number, (domain, domain_texts) in enumerate(texts.items()):
            progress(number, len(texts))
            sequences = cut_sequences(domain_texts, codec, args.tokens, args.longest)
            traces[domain] = record_routing(model, sequences)
    return _findings(args, folder.name, traces, moe_layers(model)[0], read_config(folder))


def _read(args: argparse.Namespace) -> Findings:
    """Read traces that were recorded before."""
    traces = {path.stem: RoutingTrace.load(path) for path in args.trace}
    return _findings(args, ", ".join(traces), traces)


def _findings(
    args: argparse.Namespace,
    name: str,
    traces: dict[str, RoutingTrace],
    moe: MoE | None = None,
    raw_config: dict[str, Any] | None = None,
) -> Findings:
    first = next(iter(traces.values()))
    tokens = min(args.prefill_tokens, *(trace.num_tokens for trace in traces.values()))
    padding, kernel_us = {}, {}
    if moe is not None and raw_config is not None:
        padding = {domain: padding_rows(moe, trace, tokens) for domain, trace in traces.items()}
        joined = RoutingTrace.joined(list(traces.values()))
        kernel_us = estimate_block_sizes(raw_config, joined, tokens)
    ranks = args.ranks if first.num_experts % args.ranks == 0 else 0
    file = args.trace[0] if args.trace and len(args.trace) == 1 else Path("all.npz")
    if args.out is not None:
        file = args.out / "all.npz"
    return Findings(name, traces, padding, kernel_us, tokens, ranks, str(file))


def _write(found: Findings, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for domain, trace in found.traces.items():
        trace.save(folder / f"{domain}.npz")
    found.all.save(folder / "all.npz")
    picture = draw_domains(
        found.traces, folder / "load.png", title=f"{found.name}: tokens per expert"
    )
    print(f"\ntraces: {folder}/all.npz and {len(found.traces)} by domain; picture: {picture}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser("routing", __doc__)
    parser.add_argument("--model", default=TINY_NAME, help="checkpoint folder, or tiny_gpt_oss")
    parser.add_argument(
        "--texts",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="text, or .jsonl with domain and text a line; default: the"
        " checkpoint's held-out texts",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        nargs="+",
        metavar="FILE.npz",
        help="look at recorded traces instead of running a model",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write traces and load.png there")
    parser.add_argument("--tokens", type=int, default=4096, help="most tokens a domain")
    parser.add_argument("--longest", type=int, default=1024, help="most tokens a sequence")
    parser.add_argument("--prefill-tokens", type=int, default=1024, help="for the block size")
    parser.add_argument("--ranks", type=int, default=8, help="expert-parallel ranks for EPLB")
    add_report_option(parser)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser
