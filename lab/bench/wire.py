"""neuron-moe bench wire: bytes on the wire of one MoE layer, measured on gloo, beside the formulas.

    neuron-moe bench wire --ranks 8 --picture wire.png

Runs a layer with the hidden size, experts and choices of GPT-OSS-120B (and a narrow intermediate
axis, which no byte depends on) over processes of this machine, for every expert-parallel degree:
sequence-parallel replicate-and-reduce, the same with logits gathered as a naive router does,
all-to-all, and the all-reduce of replicated tokens. Counted are the bytes that collectives send to
a rank; read are those that its TCP sockets received.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor

from lab.bench.wire_counter import count_wire, socket_bytes
from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.parallel import ParallelConfig, parallel_state
from neuron_moe.parallel.config import divisors
from neuron_moe.planner.wire import FORMULAS, WireSizes
from neuron_moe.tools.console import format_table, tell_json
from neuron_moe.tools.parsers import Parser

HIDDEN, EXPERTS, TOP_K = 2880, 128, 4  # GPT-OSS-120B
_WIDTH = 16  # of an expert's slice
_COLOURS = {
    "all-reduce": "#9a9a9a",
    "naive gather": "#c8501e",
    "replicate": "#2a6fb0",
    "all-to-all": "#3a8f3a",
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One degree and one way, mean of the ranks."""

    ep: int
    way: str
    counted_bytes: float
    socket_bytes: float
    formula_bytes: float


def main(argv: list[str] | None = None) -> int:
    """Measure, print, draw; return the exit status."""
    args = _parser().parse_args(argv)
    if args.ranks < 2 or args.tokens % args.ranks or EXPERTS % args.ranks:
        raise ValueError(
            f"--ranks={args.ranks}, --tokens={args.tokens}: ranks must be at least 2 and divide the"
            f" tokens and {EXPERTS} experts. Use 2, 4 or 8 ranks."
        )
    results = measure(args.ranks, args.tokens)
    rows = [("EP x TP", "way", "counted MiB", "formula MiB", "sockets MiB")]
    rows += [
        (
            f"{r.ep} x {args.ranks // r.ep}",
            r.way,
            f"{r.counted_bytes / 2**20:.3f}",
            f"{r.formula_bytes / 2**20:.3f}",
            f"{r.socket_bytes / 2**20:.3f}",
        )
        for r in results
    ]
    print(f"{args.ranks} gloo ranks, {args.tokens} tokens, bf16: into a rank, mean of ranks\n")
    print(format_table(rows, numbers_from=2))
    print(
        "\ncounted and sockets [measured], formula [computed]. gloo's reduce-scatter is an"
        " all-reduce inside:\nit carries twice what it needs, which the sockets show."
    )
    if args.picture is not None:
        draw_wire(results, args.ranks, args.tokens, args.picture)
        print(f"\npicture: {args.picture}")
    tell_json(
        args.json,
        "bench wire",
        kind="measured",
        ranks=args.ranks,
        tokens=args.tokens,
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        top_k=TOP_K,
        rows=[_plain(r) for r in results],
    )
    return 0


def measure(ranks: int, tokens: int) -> list[Measurement]:
    """Measure every degree and way on processes of this machine.

    Raises:
        RuntimeError: a process failed.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    queue: Any = context.SimpleQueue()
    arguments = [(rank, ranks, tokens, port, queue) for rank in range(ranks)]
    processes = [context.Process(target=_run_rank, args=args) for args in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        codes = [process.exitcode for process in processes]
        raise RuntimeError(f"bench wire: processes ended with {codes}. See the messages above.")
    found = [queue.get() for _ in processes]
    results = []
    for ep in divisors(ranks):
        sizes = WireSizes(
            tokens=tokens,
            hidden_size=HIDDEN,
            top_k=TOP_K,
            num_experts=EXPERTS,
            tp=ranks // ep,
            ep=ep,
        )
        for way, formula in FORMULAS.items():
            counted, carried = zip(*(one[ep, way] for one in found), strict=True)
            results.append(
                Measurement(ep, way, sum(counted) / ranks, sum(carried) / ranks, formula(sizes))
            )
    return results


def draw_wire(results: list[Measurement], ranks: int, tokens: int, path: Path) -> Path:
    """Draw measured points on computed lines, against EP.

    Args:
        results: from `measure`.
        ranks: processes.
        tokens: of all ranks.
        path: PNG to write.
    """
    figure = Figure(figsize=(7.0, 4.6), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for number, (way, colour) in enumerate(_COLOURS.items()):
        rows = [r for r in results if r.way == way]
        degrees = [r.ep for r in rows]
        formula = [r.formula_bytes / 2**20 for r in rows]
        counted = [r.counted_bytes / 2**20 for r in rows]
        # Ways with the same bytes are on each other: the first ones are drawn wider.
        width = len(_COLOURS) - number
        axes.plot(degrees, formula, "-", color=colour, linewidth=1.2 * width, alpha=0.8)
        axes.plot(
            degrees,
            counted,
            "o",
            color=colour,
            markersize=4 + 2.5 * width,
            markeredgecolor="#ffffff",
            label=way,
        )
    degrees = sorted({r.ep for r in results})
    axes.set_xscale("log", base=2)
    axes.set_xticks(degrees, [f"{ep} x {ranks // ep}" for ep in degrees])
    axes.set_xlabel("EP x TP")
    axes.set_ylabel("MiB into a rank: points measured, lines computed")
    axes.set_ylim(bottom=0)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.legend(fontsize=8, loc="lower left")
    title = f"One MoE layer (H {HIDDEN}, E {EXPERTS}, K {TOP_K}), {tokens} tokens, {ranks} ranks"
    axes.set_title(title, fontsize=10, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _run_rank(rank: int, ranks: int, tokens: int, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found: dict[tuple[int, str], tuple[int, int]] = {}
    with torch.inference_mode():
        for ep in divisors(ranks):
            for way in FORMULAS:
                found[ep, way] = _measure_one(rank, ranks, tokens, ep, way)
    queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _measure_one(rank: int, ranks: int, tokens: int, ep: int, way: str) -> tuple[int, int]:
    """Return counted bytes and socket bytes of one forward; metadata counts too."""
    config = ParallelConfig(
        tp=ranks // ep,
        ep=ep,
        sp=way != "all-reduce",
        strategy="all_to_all" if way == "all-to-all" else "replicate",
    )
    parallel_state.initialize_model_parallel(config=config, watch=False)
    layer = _build_layer(config)
    hidden_TH = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    hidden_TH = hidden_TH.to(torch.bfloat16)
    own_TH = hidden_TH.chunk(ranks)[rank] if config.sp else hidden_TH
    layer(own_TH.unsqueeze(0))  # the first forward compares settings between ranks
    tally = count_wire(layer)
    dist.barrier()
    before = socket_bytes()
    if way == "naive gather":
        _gather_naively(layer, own_TH)
    else:
        layer(own_TH.unsqueeze(0))
    dist.barrier()
    carried = socket_bytes() - before
    dist.barrier()  # nobody closes sockets while others read theirs
    parallel_state.destroy_model_parallel()
    return tally.total, carried


def _gather_naively(layer: MoE, own_TH: Tensor) -> None:
    """Communicate as a layer does whose router gathers logits."""
    gather = layer.groups["prefill"].model
    rows_TH = gather.all_gather(own_TH)
    gather.all_gather(layer.router(own_TH).router_logits_TE)
    gather.reduce_scatter(rows_TH)


def _build_layer(config: ParallelConfig) -> MoE:
    torch.manual_seed(0)
    experts = RoutedExpertsMLPOpsConfig(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=_WIDTH * config.tp,
        hidden_act="silu",
        glu_mlp=True,
    )
    return MoE(
        RouterTopK(EXPERTS, TOP_K, HIDDEN),
        ExpertMLPsV2(experts, dtype=torch.bfloat16),
        sequence_parallel_enabled=config.sp,
    )


def _plain(result: Measurement) -> dict[str, object]:
    return {
        "ep": result.ep,
        "way": result.way,
        "counted_bytes": result.counted_bytes,
        "socket_bytes": result.socket_bytes,
        "formula_bytes": result.formula_bytes,
    }


def _parser() -> argparse.ArgumentParser:
    parser = Parser("bench wire", __doc__)
    parser.add_argument("--ranks", type=int, default=8, help="processes (default: 8)")
    parser.add_argument("--tokens", type=int, default=1024, help="of all ranks (default: 1024)")
    parser.add_argument("--picture", type=Path, help="PNG to write")
    parser.add_json_option()
    return parser
