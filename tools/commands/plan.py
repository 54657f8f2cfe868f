"""neuron-moe plan: which layout of a model is fastest on a Trn2 machine, and why.

    neuron-moe plan --model gpt_oss_120b --instance trn2.48xlarge --target tpot

Says first which tp x ep x dp x sp serves the whole model best, with its time to the first token and
per token, and how many sequences fit; then which expert-parallel degree is the fastest for a MoE
layer, with both strategies, under uniform, Zipf and recorded routing, with and without EPLB.
--table prints all layouts and the coefficients with their sources. All is computed from them;
nothing was measured on a Trn2.

--model takes a config.json, the folder of a checkpoint, a shipped configuration, or sizes as
H=4096,I=1536,E=128,K=8,L=94.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from neuron_moe.models.routing_trace import recorded_load
from neuron_moe.models.whole_model import (
    TARGETS,
    Serving,
    ServingPlan,
    plan_model,
    plan_serving,
)
from neuron_moe.parallel.topology import INSTANCES, instance
from neuron_moe.planner.coefficients import COEFFICIENTS, Machine, use_measured
from neuron_moe.planner.search import (
    PHASES,
    WORTH_A_HYBRID,
    Entry,
    LayoutCosts,
    config_of,
    cost_layouts,
    explain,
    layout_memory,
    phase_memory,
    synthetic_routings,
    to_dict,
    write_config,
)
from neuron_moe.planner.sizes import WEIGHT_BYTES
from neuron_moe.tools.commands import place
from neuron_moe.tools.commands.plan_page import (
    coefficient_rows,
    layout_rows,
    plan_page,
    serving_rows,
)
from neuron_moe.tools.commands.plan_pictures import draw_plan
from neuron_moe.tools.console import format_bytes, format_table, print_json_line
from neuron_moe.tools.models import MODEL_HELP, read_model
from neuron_moe.tools.pages import add_report_option, write_page
from neuron_moe.tools.parsers import Parser
from nki_sim.hardware_file import use_hardware

_MOST_TOKENS = 1 << 20  # of a step; routings are drawn token by token
LINK_FACTORS = (0.25, 4.0)
_SIZE_NAMES = {
    "H": "hidden_size",
    "I": "moe_intermediate_size",
    "E": "num_experts",
    "K": "num_experts_per_tok",
    "L": "num_hidden_layers",
}


def main(argv: list[str] | None = None) -> int:
    """Plan, print, draw; return the exit status."""
    if argv and "--place" in argv:
        return place.main([word for word in argv if word != "--place"])
    args = _parser().parse_args(argv)
    if args.hardware is not None:
        use_measured(use_hardware(args.hardware), f"chip calibrate, {args.hardware}")
    torch.set_num_threads(1)  # many small operations: threads would only wait for one another
    machine = Machine.build(instance(args.instance), args.nodes, args.lnc)
    asked = {"prefill": args.prefill_tokens, "decode": args.decode_tokens}
    for phase, count in asked.items():
        if count is not None and not 1 <= count <= _MOST_TOKENS:
            raise ValueError(
                f"--{phase}-tokens={count}: must be at least 1 and at most {_MOST_TOKENS}."
            )
    planned = plan_model(args.model, read_sizes(args.model), args.weights)
    model = planned.sizes
    serving = Serving.of(planned, args.prefill_tokens, args.decode_tokens, args.context)
    tokens = {"prefill": serving.prompt, "decode": args.decode_tokens}
    load, source = recorded_load(args.trace)
    routings = synthetic_routings(model, max(tokens.values()), load)
    decisive = "recorded" if load is not None else "zipf"
    costs = cost_layouts(model, machine, routings, tokens, decisive)
    sensitivity = {
        factor: cost_layouts(
            model,
            machine.with_faster_links(factor),
            {decisive: routings[decisive]},
            tokens,
            decisive,
            costs.placements,
        )
        for factor in LINK_FACTORS
    }
    served = plan_serving(planned, machine, routings[decisive][1], serving, args.target)
    _print_serving(served, with_tables=args.table)
    _print_plan(costs, sensitivity, source, with_tables=args.table)
    if args.picture is not None:
        draw_plan(costs, args.picture)
        print(f"\npicture: {args.picture}")
    if args.report is not None:
        page = plan_page(costs, served.layouts, args.target, source)
        print(f"report: {write_page(page, args.report)}")
    if args.json:
        layouts = [each.to_dict() for each in served.layouts]
        answer = {"target": args.target, "layouts": layouts, "not_served": served.rejected}
        print_json_line("plan", **_report(costs, sensitivity, source), **answer)
    return 0


def _print_serving(served: ServingPlan, *, with_tables: bool) -> None:
    """Say which layout serves the whole model best; the answer first."""
    print("Whole model, in replicas where they pay: attention, cache and all layers count")
    print(served)
    if with_tables and served.layouts:
        print(f"\n{format_table(serving_rows(served.layouts))}")
        for layout, reason in served.rejected.items():
            print(f"not {layout}: {reason}")
    print()


def read_sizes(name: str) -> dict[str, Any]:
    """Return configuration keys from a name, a path, or sizes.

    Raises:
        FileNotFoundError: there is nothing of that name.
        ValueError: sizes that cannot be read.
    """
    if "=" in name:
        return _sizes_of(name)
    return read_model(name)[0]


def _sizes_of(text: str) -> dict[str, Any]:
    pairs = dict(part.partition("=")[::2] for part in text.split(","))
    if pairs.keys() != _SIZE_NAMES.keys() or not all(v.isdigit() for v in pairs.values()):
        raise ValueError(
            f"--model={text}: must be a name, a path, or five whole numbers such as"
            " H=4096,I=1536,E=128,K=8,L=94."
        )
    sizes: dict[str, Any] = {_SIZE_NAMES[key]: int(value) for key, value in pairs.items()}
    # Only experts are known; attention and vocabulary then count for nothing in memory.
    return {
        **sizes,
        "vocab_size": 0,
        "num_attention_heads": 1,
        "num_key_value_heads": 0,
        "head_dim": 0,
        "n_shared_experts": 0,
    }


def _print_plan(
    costs: LayoutCosts,
    sensitivity: dict[float, LayoutCosts],
    source: str,
    *,
    with_tables: bool,
) -> None:
    model, machine = costs.model, costs.machine
    print(f"MoE layers alone, one copy over all {machine.ranks} ranks: nothing else counts")
    print(
        f"{model.name}: {model.num_experts} experts of {model.hidden_size} x"
        f" {model.intermediate_size}, top {model.top_k}, {model.num_moe_layers} MoE layers,"
        f" experts in {model.weight_format}\n{machine.instance.name} x {machine.nodes},"
        f" LNC{machine.lnc}: {machine.ranks} ranks of {format_bytes(machine.hbm_bytes)}\n"
        f"recorded routing: {source}\n"
    )
    for phase in PHASES:
        print(f"{phase}, {costs.tokens[phase]} tokens: us a layer on the busiest rank  [computed]")
        if with_tables:
            print(f"{format_table(layout_rows(costs, phase))}\n")
        best = costs.ranking(phase)[0]
        print(f"  best under {costs.decisive} routing: {best.layout}: {best.cost.total_us:.0f} us")
        for line in explain(costs, phase):
            print(f"    {line}")
        static = costs.best_replicated(phase)
        if static.layout != best.layout:
            print(
                f"    without all-to-all, which the Neuron SDK only announces: {static.layout}:"
                f" {static.cost.total_us:.0f} us"
            )
        for factor, other in sensitivity.items():
            print(f"    with links {factor:g} x as fast: {other.ranking(phase)[0].layout}")
        print()
    _print_choice(costs)
    if not with_tables:
        print("--table shows every layout, and the coefficients with their sources")
        return
    for layout, reason in costs.rejected.items():
        print(f"not {layout}: {reason}")
    print("\ncoefficients")
    print(format_table(coefficient_rows(), numbers_from=9))


def _print_choice(costs: LayoutCosts) -> None:
    single = costs.best_single()
    best = {phase: costs.ranking(phase)[0] for phase in PHASES}
    memory, is_shared = phase_memory(costs, best["prefill"].layout, best["decode"].layout)
    room = costs.machine.hbm_bytes
    print(f"both phases in one ParallelConfig: EP {single['prefill'].layout.ep}")
    for phase, entry in single.items():
        slower = entry.cost.total_us / best[phase].cost.total_us
        print(f"  {phase}: {entry.layout}: {entry.cost.total_us:.0f} us, {slower:.2f} x the best")
    print(f"  {write_config(config_of(single['prefill'].layout, single['decode'].layout))}")
    held = layout_memory(costs, single["prefill"].layout)
    print(f"  weights: {format_bytes(held)} of {format_bytes(room)} a rank")
    gain = max(single[phase].cost.total_us / best[phase].cost.total_us for phase in PHASES)
    if gain >= WORTH_A_HYBRID:
        kept = "shared" if is_shared else "kept twice"
        fits = memory + COEFFICIENTS["reserve_bytes"].value <= room
        print(
            f"the best of each phase (hybrid): up to {gain:.2f} x faster; experts {kept},"
            f" {format_bytes(memory)} a rank: {'fits' if fits else 'does not fit'}\n"
            f"  {write_config(config_of(best['prefill'].layout, best['decode'].layout))}"
        )
    print()


def _report(
    costs: LayoutCosts, sensitivity: dict[float, LayoutCosts], source: str
) -> dict[str, Any]:
    single = costs.best_single()
    best = {phase: costs.ranking(phase)[0] for phase in PHASES}
    return {
        "kind": "computed",
        "model": asdict(costs.model),
        "chip": costs.machine.instance.chip.name,
        "instance": costs.machine.instance.name,
        "nodes": costs.machine.nodes,
        "lnc": costs.machine.lnc,
        "ranks": costs.machine.ranks,
        "tokens": dict(costs.tokens),
        "recorded_routing": source,
        "decisive_routing": costs.decisive,
        "best": {phase: _with_reasons(costs, phase, entry) for phase, entry in best.items()},
        "best_by_routing": {
            phase: {
                routing: to_dict(costs.ranking(phase, routing)[0])
                for routing in dict.fromkeys(entry.routing for entry in costs.entries)
            }
            for phase in PHASES
        },
        "best_without_all_to_all": {
            phase: to_dict(costs.best_replicated(phase)) for phase in PHASES
        },
        "best_single_cut": {phase: to_dict(entry) for phase, entry in single.items()},
        "parallel_config": config_of(single["prefill"].layout, single["decode"].layout).to_dict(),
        "best_under_links": {
            f"{factor:g}": {phase: to_dict(other.ranking(phase)[0]) for phase in PHASES}
            for factor, other in sensitivity.items()
        },
        "layer_layouts": [to_dict(entry) for entry in costs.entries],
        "rejected": costs.rejected,
        "memory": {
            "hbm_bytes_per_rank": costs.machine.hbm_bytes,
            "weight_bytes_per_rank": {
                f"ep={ep} extra_experts={extra}": round(count)
                for (ep, extra), count in costs.memory_bytes.items()
            },
        },
        "placement": _placement_report(costs),
        "coefficients": {name: asdict(value) for name, value in COEFFICIENTS.items()},
    }


def _with_reasons(costs: LayoutCosts, phase: str, entry: Entry) -> dict[str, object]:
    return {**to_dict(entry), "layout": str(entry.layout), "reasons": explain(costs, phase)}


def _placement_report(costs: LayoutCosts) -> list[dict[str, object]]:
    """Say what EPLB does to the busiest rank in prefill."""
    rows: list[dict[str, object]] = []
    for (routing, ep), placement in costs.placements.items():
        by_flag = {
            e.layout.is_balanced: e.cost.busiest_over_mean
            for e in costs.ranking("prefill", routing)
            if e.layout.ep == ep
        }
        rows.append(
            {
                "routing": routing,
                "ep": ep,
                "extra_experts": placement.num_physical - placement.num_experts,
                "extra_share": placement.extra_share,
                "busiest_over_mean_before": by_flag[False],
                "busiest_over_mean_after": by_flag[True],
            }
        )
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = Parser("plan", __doc__)
    parser.add_argument("--model", required=True, help=MODEL_HELP)
    parser.add_argument("--instance", default="trn2.48xlarge", help=", ".join(INSTANCES))
    parser.more.add_argument(
        "--nodes", type=int, default=1, help="nodes of an UltraServer (default: 1)"
    )
    parser.more.add_argument(
        "--lnc", type=int, default=2, help="physical cores a rank (default: 2)"
    )
    parser.add_argument(
        "--prefill-tokens",
        type=int,
        help="default: 8192, or the model's most",
    )
    parser.add_argument("--decode-tokens", type=int, default=64, help="default: 64")
    parser.more.add_argument(
        "--context", type=int, help="positions of a sequence (default: 1024 more)"
    )
    parser.add_argument("--target", choices=TARGETS, default=TARGETS[0], help="to rank layouts by")
    parser.add_argument("--table", action="store_true", help="print all layouts and coefficients")
    parser.more.add_argument(
        "--trace", type=Path, help="recorded routing (.npz of neuron-moe routing)"
    )
    parser.more.add_argument(
        "--weights", choices=list(WEIGHT_BYTES), help="default: as the checkpoint"
    )
    parser.more.add_argument(
        "--hardware", type=Path, metavar="FILE", help="compute with what `chip calibrate` measured"
    )
    parser.more.add_argument(
        "--picture", type=Path, help="PNG to write: times and bytes against EP"
    )
    parser.more.add_argument(
        "--place", action="store_true", help="experts on ranks instead: --place --help"
    )
    add_report_option(parser)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser
