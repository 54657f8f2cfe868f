"""neuron-moe plan --place: place experts on ranks by recorded load (EPLB), hot ones twice.

    neuron-moe plan --place --trace all.npz --ranks 8 --output placement.json

Places the experts of each layer by the first half of a trace (see neuron-moe routing) and reports
how evenly the second half then loads the ranks, before and after. The file holds NxD's
`expert_distribution` for each layer; `neuron_moe.parallel.placement.load_placements` reads it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from neuron_moe.errors import check_positive_int
from neuron_moe.models.routing_trace import RoutingTrace
from neuron_moe.parallel.placement import ExpertPlacement, place_experts, save_placements
from neuron_moe.tools.console import format_table, print_json_line
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.pictures import save_figure
from neuron_moe.train.balance import BalanceStats, expert_load, rank_rows


@dataclass(frozen=True, slots=True)
class LayerResult:
    """One layer: its placement, and the balance of the ranks on later tokens."""

    placement: ExpertPlacement
    before: BalanceStats
    after: BalanceStats


def main(argv: list[str] | None = None) -> int:
    """Place, print, write; return the exit status."""
    args = _parser().parse_args(argv)
    trace = RoutingTrace.load(args.trace)
    if trace.num_tokens < 2:
        raise ValueError(
            f"trace={args.trace}: has {trace.num_tokens} tokens, must have at least 2."
            " Record a longer text."
        )
    check_positive_int("--ranks", args.ranks)
    most = trace.num_experts * (args.ranks - 1)
    if not 0 <= args.extra_experts <= most:
        raise ValueError(
            f"--extra-experts={args.extra_experts}: must be at least 0 and at most {most}, every"
            f" one of {trace.num_experts} experts on every one of {args.ranks} ranks."
        )
    results = place_layers(trace, args.ranks, args.extra_experts)
    _print_results(results, args)
    if args.output is None:
        print("\nnothing was written: --output FILE.json keeps the placement")
    else:
        save_placements(args.output, [result.placement for result in results])
        print(f"\nplacement: {args.output}")
    if args.picture is not None:
        draw_balance(results, args.picture)
        print(f"picture: {args.picture}")
    if args.json:
        print_json_line("place", **_report(results, args))
    return 0


def place_layers(trace: RoutingTrace, num_ranks: int, extra_experts: int) -> list[LayerResult]:
    """Place the experts of each layer by the first half of a trace, judge on the second.

    Args:
        trace: choices of every layer.
        num_ranks: expert-parallel ranks.
        extra_experts: replicas, on all ranks together.
    """
    half = trace.num_tokens // 2
    experts = trace.num_experts
    results = []
    for index_TK in torch.from_numpy(trace.expert_index_LTK.astype(np.int32)):
        known, later = index_TK[:half], index_TK[half:]
        load_E = expert_load(known, experts)
        placement = place_experts(load_E, num_ranks, extra_experts=extra_experts)
        runs = ExpertPlacement.contiguous(experts, num_ranks)
        results.append(
            LayerResult(
                placement,
                BalanceStats.of(rank_rows(later, runs)),
                BalanceStats.of(rank_rows(later, placement)),
            )
        )
    return results


def draw_balance(results: list[LayerResult], path: Path) -> Path:
    """Draw the busiest rank of each layer over the mean, before and after.

    Args:
        results: by layer.
        path: PNG to write.
    """
    layers = np.arange(len(results))
    figure = Figure(figsize=(max(6.0, 0.5 * len(results) + 3), 3.6), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for shift, name, colour in ((-0.2, "before", "#9a9a9a"), (0.2, "after", "#2a6fb0")):
        heights = [getattr(result, name).busiest_over_mean for result in results]
        axes.bar(layers + shift, heights, 0.38, color=colour, label=name)
    axes.axhline(1.0, color="#333333", linewidth=0.8)
    axes.set_xticks(layers)
    axes.set_xlabel("MoE layer")
    axes.set_ylabel("busiest rank / mean")
    placement = results[0].placement
    axes.set_title(
        f"{placement.num_ranks} ranks, {placement.num_physical - placement.num_experts} replicas:"
        " second half of the trace [measured]",
        fontsize=10,
        loc="left",
    )
    axes.legend(fontsize=8)
    return save_figure(figure, path)


def _print_results(results: list[LayerResult], args: argparse.Namespace) -> None:
    placement = results[0].placement
    print(
        f"{args.trace}: {placement.num_experts} experts on {args.ranks} ranks,"
        f" {placement.num_per_rank} each, {args.extra_experts} replicas"
        f" ({placement.extra_share:.1%} extra)\n"
    )
    rows = [("layer", "busiest / mean before", "after", "variation before", "after")]
    for layer, result in enumerate(results):
        rows.append(
            (
                str(layer),
                f"{result.before.busiest_over_mean:.3f}",
                f"{result.after.busiest_over_mean:.3f}",
                f"{result.before.coefficient_of_variation:.3f}",
                f"{result.after.coefficient_of_variation:.3f}",
            )
        )
    print(format_table(rows))
    print("\nplaced by the first half of the trace, measured on the second  [measured]")


def _report(results: list[LayerResult], args: argparse.Namespace) -> dict[str, Any]:
    return {
        "kind": "measured",
        "trace": str(args.trace),
        "ranks": args.ranks,
        "extra_experts": args.extra_experts,
        "extra_share": results[0].placement.extra_share,
        "output": None if args.output is None else str(args.output),
        "layers": [
            {"before": result.before.to_dict(), "after": result.after.to_dict()}
            for result in results
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = Parser("plan --place", __doc__)
    parser.add_argument("--trace", type=Path, required=True, help="routing trace (.npz)")
    parser.add_argument("--ranks", type=int, required=True, help="expert-parallel ranks")
    parser.add_argument("--extra-experts", type=int, default=0, help="replicas (default: 0)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="write the placement there"
    )
    parser.add_argument("--picture", type=Path, help="PNG to write: balance before and after")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser
