"""neuron-moe bench gpu: the experts of one layer on this GPU, beside torch's grouped products.

    neuron-moe bench gpu

From (hidden states, choices, affinities) to the output, sort and combine included; the backward
pass gives the gradients of hidden states, affinities and both weights. Times are medians between
CUDA events around replays of a CUDA graph, with the L2 cache overwritten before each. Memory is
beside inputs, weights and, after the forward pass, the output.

`grouped_mm` is the plain pipeline of torch operations: argsort, gather, `torch._grouped_mm`,
SwiGLU, `torch._grouped_mm`, back and sum. The ceiling is cuBLAS: the same products, dense.
"""

import argparse
import gc
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from neuron_moe import ExpertMLPsV2, RoutedExpertsMLPOpsConfig
from neuron_moe.backends.chosen_experts import grouped_mm
from neuron_moe.errors import check_choice
from neuron_moe.plan import Step
from neuron_moe.tools.console import format_table, progress_bar, tell_json
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.pictures import draw_save_percent

GIB = 1 << 30
_FLUSHED_BYTES = 256 << 20


class Shape(NamedTuple):
    """One layer's experts."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int


SHAPES = {
    "a": Shape(2048, 1024, 128, 8),
    "b": Shape(2048, 768, 128, 8),
    "c": Shape(2880, 2880, 128, 4),
    "d": Shape(7168, 2048, 64, 8),
}
ROUTINGS = ("balanced", "random", "skewed")
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns [T, H] of hidden states, affinities and choices."""


class Inputs(NamedTuple):
    """What a layer's experts get."""

    hidden_TH: Tensor
    affinities_TK: Tensor
    index_TK: Tensor


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; return the exit status."""
    parser = Parser("bench gpu", __doc__)
    parser.add_json_option()
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="default: all")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384])
    parser.add_argument("--routings", nargs="+", default=["random"], help="/".join(ROUTINGS))
    parser.add_argument("--decode", nargs="*", type=int, default=[1, 8, 64, 256], help="T, graphs")
    parser.add_argument("--save-percents", nargs="*", type=int, default=[0, 100])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--picture", type=Path, help="PNG of time and memory by save_percent")
    args = parser.parse_args(argv)
    for name in args.shapes:
        check_choice("--shapes", name, SHAPES)
    for name in args.routings:
        check_choice("--routings", name, ROUTINGS)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: run this on a machine with an NVIDIA GPU")
    rows: list[dict[str, Any]] = []
    with progress_bar("shapes") as advance:
        for number, name in enumerate(args.shapes, 1):
            rows += _measure_shape(name, args)
            advance(number, len(args.shapes))
    print(format_table([[*rows[0]], *([*map(_text, row.values())] for row in rows)]))
    if args.picture is not None:
        title = f"{rows[0]['device']}, T = {args.tokens[0]}, {args.routings[0]}, measured"
        draw_save_percent(rows, args.picture, title=title)
    tell_json(args.json, "bench gpu", kind="measured", torch=torch.__version__, rows=rows)
    return 0


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _measure_shape(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    shape, rows = SHAPES[name], []
    for tokens in args.tokens:
        for routing in args.routings:
            inputs = make_inputs(shape, tokens, routing)
            peers = {f"ours, save_percent={p}": _ours(shape, p) for p in args.save_percents}
            peers["grouped_mm"] = _grouped(next(iter(peers.values())))
            for peer, experts in peers.items():
                found = _measure(experts, inputs, args.repeats)
                rows.append(_row(name, tokens, routing, peer, found))
            rows.append(_row(name, tokens, routing, "dense", _dense(shape, tokens, args.repeats)))
            del peers, inputs
            torch.cuda.empty_cache()
    experts = _ours(shape, None)
    for tokens in args.decode:
        found = {"fwd_ms": _graph_ms(experts, make_inputs(shape, tokens, "random"), args.repeats)}
        rows.append(_row(name, tokens, "random", "ours, graph", found))
        floor = {"fwd_ms": _weight_floor_ms(experts, shape, tokens)}
        rows.append(_row(name, tokens, "random", "weights at copy speed", floor))
    return rows


def _row(
    shape: str, tokens: int, routing: str, peer: str, found: dict[str, float]
) -> dict[str, Any]:
    numbers = ("fwd_ms", "fwd_bwd_ms", "saved_gib", "peak_gib")
    return {
        "shape": shape,
        "T": tokens,
        "routing": routing,
        "peer": peer,
        **{number: found.get(number) for number in numbers},
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(tz=UTC).date().isoformat(),
    }


def make_inputs(shape: Shape, tokens: int, routing: str) -> Inputs:
    """Return random inputs: equal counts, uniform, or a quarter of the experts with 80 %."""
    generator = torch.Generator("cuda").manual_seed(0)
    size = (tokens, shape.num_experts)
    hidden_TH = torch.randn(tokens, shape.hidden_size, device="cuda", generator=generator)
    scores_TE = torch.rand(size, device="cuda", generator=generator)
    if routing == "skewed":
        share_E = torch.full((shape.num_experts,), 0.2 / (shape.num_experts * 3 / 4), device="cuda")
        share_E[: shape.num_experts // 4] = 0.8 / (shape.num_experts / 4)
        scores_TE = share_E.log() - (-scores_TE.log()).log()
    index_TK = scores_TE.topk(shape.top_k).indices
    if routing == "balanced":
        turns = torch.arange(tokens * shape.top_k, device="cuda") % shape.num_experts
        index_TK = turns.view(tokens, shape.top_k)
    affinities_TK = torch.rand(tokens, shape.top_k, device="cuda", generator=generator)
    affinities_TK = affinities_TK / affinities_TK.sum(1, keepdim=True)
    return Inputs(
        hidden_TH.bfloat16().requires_grad_(),
        affinities_TK.requires_grad_(),
        index_TK.to(torch.int32),
    )


def _ours(shape: Shape, save_percent: int | None) -> Experts:
    config = RoutedExpertsMLPOpsConfig(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        hidden_act="silu",
        glu_mlp=True,
    )
    torch.manual_seed(0)
    layer = ExpertMLPsV2(
        config, dtype=torch.bfloat16, device="cuda", backend="cuda", save_percent=save_percent
    )
    plan_of = layer.plan

    def experts(hidden_TH: Tensor, affinities_TK: Tensor, index_TK: Tensor) -> Tensor:
        step = Step("prefill", hidden_TH.shape[0])
        return layer.compute(plan_of(step), hidden_TH, index_TK, affinities_TK)

    experts.layer = layer  # type: ignore[attr-defined]
    return experts


def _grouped(ours: Experts) -> Experts:
    """Return the plain pipeline over the same weights."""
    weights = ours.layer.weights()  # type: ignore[attr-defined]
    first_EHI, down_EIH = weights.gate_up_proj_EHI, weights.down_proj_EIH

    def experts(hidden_TH: Tensor, affinities_TK: Tensor, index_TK: Tensor) -> Tensor:
        top_k = index_TK.shape[1]
        order_P = index_TK.flatten().argsort(stable=True)
        counts = torch.zeros(first_EHI.shape[0], dtype=torch.int32, device="cuda")
        ones_P = torch.ones_like(index_TK).flatten()
        ends_E = counts.scatter_add(0, index_TK.flatten().long(), ones_P).cumsum(0).int()
        gate_up = grouped_mm(hidden_TH[order_P // top_k], first_EHI, offs=ends_E)
        gate, up = gate_up.chunk(2, dim=-1)
        rows_PH = grouped_mm(functional.silu(gate) * up, down_EIH, offs=ends_E)
        home_PH = torch.empty_like(rows_PH).index_copy(0, order_P, rows_PH)
        return torch.bmm(
            affinities_TK.unsqueeze(1).to(rows_PH.dtype), home_PH.view(*index_TK.shape, -1)
        ).squeeze(1)

    experts.layer = ours.layer  # type: ignore[attr-defined]
    return experts


def _measure(experts: Experts, inputs: Inputs, repeats: int) -> dict[str, float]:
    weights = [*experts.layer.parameters()]  # type: ignore[attr-defined]
    wanted = [inputs.hidden_TH, inputs.affinities_TK, *weights]
    gradient = torch.randn_like(inputs.hidden_TH)

    def both() -> None:
        torch.autograd.grad(experts(*inputs), wanted, gradient)

    both()
    torch.cuda.synchronize()
    gc.collect()  # what earlier runs left must not be freed while this one is measured
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = experts(*inputs)
    saved = torch.cuda.memory_allocated() - before - output.nbytes
    found = torch.autograd.grad(output, wanted, gradient)
    peak = torch.cuda.max_memory_allocated() - before
    del output, found
    return {
        "fwd_ms": _median_ms(_captured(lambda: experts(*inputs)), repeats),
        "fwd_bwd_ms": _median_ms(_captured(both), repeats),
        "saved_gib": saved / GIB,
        "peak_gib": peak / GIB,
    }


def _median_ms(run: Callable[[], object], repeats: int) -> float:
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    events = []
    for _ in range(repeats + 2):  # without waiting, so that the device never waits for the host
        flushed.zero_()
        start, end = _event(), _event()
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in events[2:])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a run as a CUDA graph: the host's time does not count."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _graph_ms(experts: Experts, inputs: Inputs, repeats: int) -> float:
    with torch.no_grad():
        return _median_ms(_captured(lambda: experts(*inputs)), 2 * repeats)


def _weight_floor_ms(experts: Experts, shape: Shape, tokens: int) -> float:
    """Return the time to read the weights of the chosen experts once, at the speed of a copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_ms = _median_ms(lambda: target.copy_(source), 5)
    index_TK = make_inputs(shape, tokens, "random").index_TK
    chosen = len(set(index_TK.flatten().tolist()))
    each = sum(weight.nbytes for weight in experts.layer.parameters())  # type: ignore[attr-defined]
    return copy_ms * float(chosen * each / shape.num_experts / (2 * source.nbytes))


def _dense(shape: Shape, tokens: int, repeats: int) -> dict[str, float]:
    """Return the time of dense products with as many rows."""
    H, I, rows = shape.hidden_size, shape.intermediate_size, tokens * shape.top_k  # noqa: E741

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.bfloat16, device="cuda")

    wide, narrow, first, down = draw(rows, H), draw(rows, I), draw(H, 2 * I), draw(I, H)
    ms = _median_ms(lambda: wide @ first, repeats) + _median_ms(lambda: narrow @ down, repeats)
    return {"fwd_ms": ms}
