"""neuron-moe bench cpu: one MoE layer on this CPU, ours beside that of transformers.

    neuron-moe bench cpu --models qwen3_30b_a3b --tokens 1 512

Both layers have the same sizes and random weights of the same distribution; both run in this
process, in turns, so that load from outside hits them alike. Two ratios: to the layer as
transformers builds it (eager experts), and to the fastest of its implementations in each case. Ours
multiplies with the experts in the forms that were measured to be the fastest on this machine.
"""

import functools
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lab.bench.averages import half_quartile_range
from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.backends.form_times import processor
from neuron_moe.errors import check_choice, check_positive_int
from neuron_moe.tools.console import format_table, progress_bar, tell_json
from neuron_moe.tools.models import model_among
from neuron_moe.tools.parsers import Parser
from neuron_moe.weights.product_forms import MEASURED

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
MOST_COPIED_BYTES = 1 << 30


@dataclass(frozen=True)
class Shape:
    """One MoE layer: E experts, K of them per token, hidden and intermediate size."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    is_gpt_oss: bool


SHAPES = {
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, True),
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768, False),
}


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; return the exit status."""
    parser = Parser("bench cpu", __doc__)
    parser.add_json_option()
    parser.add_argument(
        "--models", nargs="+", type=model_among(SHAPES), default=list(SHAPES), help="default: all"
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), help="fp32 bf16")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 512])
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each layer and case")
    parser.add_argument("--product-form", default=MEASURED, help="of ours (default: measured)")
    args = parser.parse_args(argv)
    for model in args.models:
        check_choice("--models", model, SHAPES)
    for dtype in args.dtypes:
        check_choice("--dtypes", dtype, DTYPES)
    for tokens in args.tokens:
        check_positive_int("--tokens", tokens)
    check_positive_int("--repeats", args.repeats)
    rows = []
    total = len(args.models) * len(args.dtypes) * len(args.tokens)
    with progress_bar("measuring") as progress:
        for model in args.models:
            for dtype in args.dtypes:
                for row in measure(model, dtype, args.tokens, args.repeats, args.product_form):
                    rows.append(row)
                    progress(len(rows), total)
    _print_table(rows)
    summary = {}
    for key, peer in (("ratio", "its layer as built"), ("ratio_to_fastest", "its fastest form")):
        values = [row[key] for row in rows]
        summary[f"median_{key}"] = statistics.median(values)
        summary[f"least_{key}"] = min(values)
        print(
            f"against {peer}: median {statistics.median(values):.2f}, least {min(values):.2f}"
            "  [measured]"
        )
    tell_json(
        args.json,
        "bench cpu",
        kind="measured",
        machine=platform.machine(),
        processor=processor(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        repeats=args.repeats,
        **summary,
        rows=rows,
    )
    return 0


@torch.no_grad()
def measure(
    model: str, dtype: str, tokens: list[int], repeats: int, form: str = MEASURED
) -> list[dict[str, Any]]:
    """Time our layer and the peer's at each number of tokens.

    Args:
        model: key of SHAPES.
        dtype: key of DTYPES.
        tokens: values of T, as one sequence.
        repeats: timed runs of each.
        form: how ours multiplies with the experts.

    Returns:
        One record per T: milliseconds (median and spread), the peer's implementation, ratio.
    """
    shape = SHAPES[model]
    peer, ours = _make_layers(shape, DTYPES[dtype], form)
    rows = []
    for count in tokens:
        hidden_BSH = torch.randn(1, count, shape.hidden_size).to(DTYPES[dtype])
        calls: dict[str, Callable[[], object]] = {"ours": functools.partial(ours, hidden_BSH)}
        for name in implementations(shape, DTYPES[dtype], count):
            calls[name] = functools.partial(_call_peer, peer, name, hidden_BSH)
        times = _time_in_turns(calls, repeats)
        best = min(
            (name for name in times if name != "ours"),
            key=lambda name: statistics.median(times[name]),
        )
        ours_ms = statistics.median(times["ours"])
        rows.append(
            {
                "model": model,
                "dtype": dtype,
                "tokens": count,
                "form": ours.expert_mlps.weights().product_form(count),
                "ours_ms": ours_ms,
                "ours_spread_ms": half_quartile_range(times["ours"]),
                "eager_ms": statistics.median(times["eager"]),
                "eager_spread_ms": half_quartile_range(times["eager"]),
                "ratio": statistics.median(times["eager"]) / ours_ms,
                "fastest": f"transformers {best}",
                "fastest_ms": statistics.median(times[best]),
                "fastest_spread_ms": half_quartile_range(times[best]),
                "ratio_to_fastest": statistics.median(times[best]) / ours_ms,
            }
        )
    return rows


def implementations(shape: Shape, dtype: torch.dtype, tokens: int) -> list[str]:
    """Return transformers' implementations that are worth a measurement.

    batched_mm copies an expert's matrices for each choice of each token; beyond a GiB it is
    the slowest by far, and ends by filling the memory.
    """
    expert_bytes = 2 * shape.hidden_size * shape.intermediate_size * dtype.itemsize
    copied = tokens * shape.top_k * expert_bytes
    return [name for name in IMPLEMENTATIONS if name != "batched_mm" or copied < MOST_COPIED_BYTES]


def _call_peer(layer: nn.Module, implementation: str, hidden_BSH: torch.Tensor) -> object:
    for module in layer.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._experts_implementation = implementation
    return layer(hidden_BSH)


def _time_in_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return milliseconds of each call, taken in turns after one warm-up each."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def _make_layers(shape: Shape, dtype: torch.dtype, form: str) -> tuple[nn.Module, MoE]:
    with torch.device("meta"):
        peer = _peer_layer(shape)
        ours = _our_layer(shape, dtype)
    peer = peer.to(dtype).to_empty(device="cpu").eval()
    ours = ours.to_empty(device="cpu").eval()
    for parameter in [*peer.parameters(), *ours.parameters()]:
        parameter.uniform_(-0.02, 0.02)
    router = peer.router if shape.is_gpt_oss else peer.gate
    assert isinstance(router, nn.Module)
    ours.router.linear_router.weight.copy_(router.get_parameter("weight"))
    ours.expert_mlps.settle_forms(form)
    return peer, ours


def _peer_layer(shape: Shape) -> nn.Module:
    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "num_experts_per_tok": shape.top_k,
    }
    if shape.is_gpt_oss:
        from transformers import GptOssConfig
        from transformers.models.gpt_oss import modeling_gpt_oss

        gpt_oss = GptOssConfig(
            intermediate_size=shape.intermediate_size, num_local_experts=shape.num_experts, **sizes
        )
        make_layer: Callable[[Any], Any] = modeling_gpt_oss.GptOssMLP
        return _with_config(make_layer(gpt_oss), gpt_oss)
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    qwen = Qwen3MoeConfig(
        moe_intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        norm_topk_prob=True,
        **sizes,
    )
    make_layer = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock
    return _with_config(make_layer(qwen), qwen)


def _with_config(layer: Any, config: object) -> nn.Module:
    """Make sure the experts have the configuration that names their implementation."""
    layer.experts.config = config
    typed: nn.Module = layer
    return typed


def _our_layer(shape: Shape, dtype: torch.dtype) -> MoE:
    sizes = (shape.num_experts, shape.hidden_size, shape.intermediate_size, shape.top_k)
    if shape.is_gpt_oss:
        config = RoutedExpertsMLPOpsConfig(
            *sizes,
            "sigmoid",
            True,
            bias=True,
            glu_type="swiglu",
            hidden_act_scaling_factor=1.702,
            hidden_act_bias=1.0,
            gate_clamp_upper_limit=7.0,
            up_clamp_upper_limit=7.0,
            up_clamp_lower_limit=-7.0,
        )
    else:
        config = RoutedExpertsMLPOpsConfig(*sizes, "silu", True, normalize_top_k_affinities=True)
    router = RouterTopK(
        shape.num_experts,
        shape.top_k,
        shape.hidden_size,
        bias=shape.is_gpt_oss,
        apply_act_fn_over_topk=shape.is_gpt_oss,
    )
    return MoE(router, ExpertMLPsV2(config, dtype=dtype))


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = [
        ["layer", "dtype", "T", "ours ms", "form", "eager ms", "ratio", "fastest ms", "", "ratio"]
    ]
    table += [
        [
            row["model"],
            row["dtype"],
            str(row["tokens"]),
            f"{row['ours_ms']:.1f} ± {row['ours_spread_ms']:.1f}",
            row["form"],
            f"{row['eager_ms']:.1f} ± {row['eager_spread_ms']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['fastest_ms']:.1f} ± {row['fastest_spread_ms']:.1f}",
            row["fastest"].removeprefix("transformers "),
            f"{row['ratio_to_fastest']:.2f}",
        ]
        for row in rows
    ]
    print(f"median ± half the quartile range, {processor()}, {torch.get_num_threads()} threads")
    print(format_table(table, numbers_from=2))
