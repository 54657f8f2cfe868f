"""neuron-moe inspect: architecture, sizes, router and memory per rank of a checkpoint.

    neuron-moe inspect --model gpt_oss_120b --tp 8 --ep 4

Weights are not read: shapes come from config.json, and from the headers of the files where there
are any. A rank is a logical core of Trn2 (two physical cores).
"""

import argparse
import dataclasses
import json
from typing import Any

import torch
from torch import nn

from neuron_moe.checkpoint import Checkpoint, match_parameters, unique_parameters
from neuron_moe.explain import explain_path
from neuron_moe.models.expert_load import moe_layers
from neuron_moe.models.loader import parse_config
from neuron_moe.models.sizes import (
    GROUPS,
    Spread,
    cache_bytes_per_token,
    count_active_parameters,
    count_parameters,
    rank_bytes,
    state_bytes,
)
from neuron_moe.paths import choose_path
from neuron_moe.spec import DEFAULT_BLOCK_SIZE, DEFAULT_LNC_SIZE, RouterSpec
from neuron_moe.tools.commands import explain
from neuron_moe.tools.console import format_bytes, format_table, print_json_line
from neuron_moe.tools.models import MODEL_HELP, add_checkpoint_option, read_model
from neuron_moe.tools.parsers import Parser
from nki_sim.hardware import TRN2

PATH_EXAMPLES = (
    ("decode", 1),
    ("decode", 16),
    ("decode", 64),
    ("prefill", 128),
    ("prefill", 1024),
    ("prefill", 8192),
)


def main(argv: list[str] | None = None) -> int:
    """Inspect, print; return the exit status."""
    if argv and "--explain" in argv:
        return explain.main([word for word in argv if word != "--explain"])
    args = _parser().parse_args(argv)
    raw_config, checkpoint = read_model(args.model, download=args.download)
    model_file, config = parse_config(raw_config, f"config.json of {args.model}")
    with torch.device("meta"):
        model: nn.Module = model_file.Model(config)
    expert_format = "bf16"
    if (raw_config.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        expert_format = "mxfp4"
    num_tensors = None
    if checkpoint is not None:
        # Matching names and shapes is what strict loading does first; a gap raises here already.
        match_parameters(checkpoint, model_file.weight_map(config), unique_parameters(model))
        num_tensors = len(checkpoint.tensors)
    spread = Spread(tp=args.tp, ep=args.ep)
    report: dict[str, Any] = {
        "model": str(args.model),
        "model_type": raw_config["model_type"],
        "architecture": _plain(config),
        "router": describe_router(moe_layers(model)[0].router.spec),
        "num_moe_layers": len(moe_layers(model)),
        "parameters": {
            "total": sum(count_parameters(model).values()),
            "active": count_active_parameters(model),
            "groups": count_parameters(model),
        },
        "stored": _stored(model, config, checkpoint, expert_format, num_tensors),
        "memory_per_rank": _memory(model, config, spread, expert_format),
        "paths": [_path_row(model, spread, phase, tokens) for phase, tokens in PATH_EXAMPLES],
    }
    _print_report(report)
    if args.json:
        print_json_line("inspect", **report)
    return 0


def describe_router(spec: RouterSpec) -> str:
    """Return one line that says how experts are chosen and weighed."""
    formula = spec.formula
    scores = f"{formula.act_fn} over "
    scores += "the chosen" if formula.act_over_topk else "all experts"
    parts = [f"top {spec.top_k} of {spec.num_experts}", scores]
    if formula.n_group > 1:
        parts.append(f"within {formula.topk_group} of {formula.n_group} groups")
    if formula.has_bias:
        parts.append("linear layer with bias")
    if formula.has_selection_bias:
        parts.append("selection bias")
    if formula.renormalize:
        parts.append("weights divided by their sum")
    if formula.routed_scaling_factor != 1:
        parts.append(f"times {formula.routed_scaling_factor:g}")
    return ", ".join([*parts, "float32"])


def _stored(
    model: nn.Module,
    config: Any,
    checkpoint: Checkpoint | None,
    expert_format: str,
    num_tensors: int | None,
) -> dict[str, Any]:
    """Say how large the files are: from their headers, or from shapes where there are none."""
    if checkpoint is not None:
        size = sum(info.nbytes for info in checkpoint.tensors.values())
        kind = "measured"
    else:
        size, kind = sum(rank_bytes(model, config, Spread(), expert_format).values()), "computed"
    return {
        "expert_format": expert_format,
        "bytes": size,
        "kind": kind,
        "num_tensors": num_tensors,
    }


def _memory(model: nn.Module, config: Any, spread: Spread, expert_format: str) -> dict[str, Any]:
    formats = list(dict.fromkeys([expert_format, "bf16"]))
    groups = {name: rank_bytes(model, config, spread, name) for name in formats}
    return {
        "kind": "computed",
        "tp": spread.tp,
        "ep": spread.ep,
        "ranks": spread.tp * spread.ep,
        "weight_bytes": {name: sum(parts.values()) for name, parts in groups.items()},
        "weight_bytes_by_group": groups,
        "kv_cache_bytes_per_token": cache_bytes_per_token(model, spread, element_size=2),
        "state_bytes_per_sequence": state_bytes(model, spread, element_size=2),
        "hbm_bytes": TRN2.hbm_bytes_per_core * DEFAULT_LNC_SIZE,
    }


def _path_row(model: nn.Module, spread: Spread, phase: str, tokens: int) -> dict[str, Any]:
    """Say which path one rank of an expert-parallel group takes; T tokens reach every rank."""
    experts = moe_layers(model)[0].expert_mlps
    spec, block_size = experts.spec, experts.tuning.block_size or DEFAULT_BLOCK_SIZE
    decision = choose_path(
        phase,
        tokens,
        spec.top_k,
        spec.num_experts,
        num_local_experts=spec.num_experts // spread.ep,
        block_size=block_size,
    )
    explanation = explain_path(decision)
    return {
        "phase": phase,
        "tokens": tokens,
        "path": explanation.path,
        "block_size": block_size,
        "num_blocks": explanation.num_blocks,
        "padding_expected": explanation.padding.expected,
        "reasons": list(decision.reasons),
    }


def _print_report(report: dict[str, Any]) -> None:
    parameters, stored = report["parameters"], report["stored"]
    print(f"{report['model']}: {report['model_type']}, {report['num_moe_layers']} MoE layers\n")
    facts = report["architecture"].items()
    print(format_table([(name, _short(value)) for name, value in facts], numbers_from=2))
    print(f"\nrouter      {report['router']}")
    print(
        f"parameters  {parameters['total'] / 1e9:.4g} billion, {parameters['active'] / 1e9:.4g}"
        " billion met by a token  [computed]"
    )
    print(
        f"stored      {format_bytes(stored['bytes'])}, experts in {stored['expert_format']}"
        f"  [{stored['kind']}]{'' if stored['num_tensors'] else ', no files of weights are here'}"
    )
    if stored["num_tensors"] is not None:
        print(f"tensors     {stored['num_tensors']}, all names and shapes as they must be")
    memory = report["memory_per_rank"]
    formats = list(memory["weight_bytes"])
    print(f"\nmemory per rank, TP {memory['tp']} x EP {memory['ep']}  [computed]")
    rows = [["", *(f"experts in {name}" for name in formats)]]
    for group in GROUPS:
        sizes = [memory["weight_bytes_by_group"][name][group] for name in formats]
        if any(sizes):
            rows.append([group, *map(format_bytes, sizes)])
    rows.append(["all weights", *(format_bytes(memory["weight_bytes"][n]) for n in formats)])
    shares = [f"{memory['weight_bytes'][n] / memory['hbm_bytes']:.1%}" for n in formats]
    rows.append([f"of the {format_bytes(memory['hbm_bytes'])} of a Trn2 logical core", *shares])
    print(format_table(rows))
    print(f"KV cache    {format_bytes(memory['kv_cache_bytes_per_token'])} a token, in bf16")
    if memory["state_bytes_per_sequence"]:
        print(f"state       {format_bytes(memory['state_bytes_per_sequence'])} a sequence")
    print("\nwhich path an MoE layer of one rank takes on the torch back end  [computed]")
    table = [["phase", "tokens", "path", "blocks", "expected padding"]]
    for row in report["paths"]:
        in_blocks = row["path"] == "blockwise"
        blocks = f"{row['num_blocks']} of {row['block_size']}" if in_blocks else "-"
        padding = f"{row['padding_expected']:.1%}" if in_blocks else "-"
        table.append([row["phase"], str(row["tokens"]), row["path"], blocks, padding])
    print(format_table(table))
    print("\n--explain --tokens T --phase prefill|decode says what the kernels (nki) do")


def _plain(config: Any) -> dict[str, Any]:
    """Return a configuration as values that JSON knows."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return values


def _short(value: Any) -> str:
    """Return a value on one line; a long list as counts of what it holds."""
    if isinstance(value, list) and len(value) > 4:
        counts = {item: value.count(item) for item in dict.fromkeys(value)}
        return ", ".join(f"{count} x {item}" for item, count in counts.items())
    if isinstance(value, dict):
        return ", ".join(f"{name}={item}" for name, item in value.items() if item is not None)
    return str(value)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("inspect", __doc__)
    add_checkpoint_option(parser, MODEL_HELP)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default: 1)")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel groups (default: 1)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument(
        "--explain", action="store_true", help="how a step runs instead: --explain --help"
    )
    return parser
