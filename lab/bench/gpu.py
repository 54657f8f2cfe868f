"""neuron-moe bench gpu: the experts of one layer on this GPU, beside those of other people.

    neuron-moe bench gpu

From (hidden states, choices, affinities) to the output, sort and combine included; the backward
pass gives the gradients of hidden states, affinities and both weights. Times are medians between
CUDA events around replays of a CUDA graph, with the L2 cache overwritten before each. Memory is
beside inputs, weights and, after the forward pass, the output.

`grouped_mm` is the plain pipeline of torch operations: argsort, gather, `torch._grouped_mm`,
SwiGLU, `torch._grouped_mm`, back and sum. The ceiling is cuBLAS: the same products, dense. Peers of
other people run where they are installed (see gpu_peers.py); those that wait for the device cannot
be captured and are timed with the host's calls, queued without waits. Decode stands beside two
floors, in a second table: the chosen experts' weights at a copy's speed, and read by a kernel that
does nothing else (see gpu_decode.py).
"""

import argparse
import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.bench.gpu_clock import captured, clock
from lab.bench.gpu_decode import HEADER, SETS, DecodeTimes, decode_times
from lab.bench.gpu_peers import (
    PEERS,
    Bound,
    Inputs,
    Ours,
    Peer,
    Shape,
    Weights,
    is_installed,
)
from neuron_moe.errors import check_choice
from neuron_moe.tools.console import format_table, progress_bar, tell_json
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.pictures import draw_save_percent

GIB = 1 << 30
SHAPES = {
    "a": Shape(2048, 1024, 128, 8),
    "b": Shape(2048, 768, 128, 8),
    "c": Shape(2880, 2880, 128, 4),
    "d": Shape(7168, 2048, 64, 8),
}
ROUTINGS = ("balanced", "random", "skewed")
Row = dict[str, Any]


class Point(NamedTuple):
    """What a row is of."""

    shape: str
    tokens: int
    routing: str


class Decoded(NamedTuple):
    """Times of decode at a point."""

    point: Point
    times: DecodeTimes


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; return the exit status."""
    args = _parse(argv)
    rows: list[Row] = []
    decoded: list[Decoded] = []
    total = len(args.shapes) * (len(args.tokens) * len(args.routings) + 1)
    with progress_bar("points") as advance:
        for number, found in enumerate(_measure_all(args), 1):
            rows += found
            advance(number, total)
        for number, name in enumerate(args.shapes, total - len(args.shapes) + 1):
            decoded += _measure_decode(name, args)
            advance(number, total)
    rows += [row for each in decoded for row in _decode_rows(each)]
    print(format_table([[*rows[0]], *([*map(_text, row.values())] for row in rows)]))
    if decoded:
        lines = [[point.shape, str(point.tokens), *times.columns()] for point, times in decoded]
        print(format_table([[*HEADER], *lines]))
    if args.picture is not None:
        title = f"{rows[0]['device']}, T = {args.tokens[0]}, {args.routings[0]}, measured"
        draw_save_percent(rows, args.picture, title=title)
    records = [{**point._asdict(), **times.record()} for point, times in decoded]
    results = {"torch": torch.__version__, "rows": rows, "decode": records}
    tell_json(args.json, "bench gpu", kind="measured", **results)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("bench gpu", __doc__)
    parser.add_json_option()
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="default: all")
    parser.add_argument("--tokens", nargs="*", type=int, default=[16384])
    parser.add_argument("--routings", nargs="+", default=["random"], help="/".join(ROUTINGS))
    parser.add_argument("--decode", nargs="*", type=int, default=[1, 8, 64, 256], help="T, graphs")
    parser.add_argument("--save-percents", nargs="*", type=int, default=[0, 100])
    parser.add_argument(
        "--peers", nargs="*", help=f"of {', '.join(PEERS)}; default: those that are installed"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--picture", type=Path, help="PNG of time and memory by save_percent")
    args = parser.parse_args(argv)
    for name in args.shapes:
        check_choice("--shapes", name, SHAPES)
    for name in args.routings:
        check_choice("--routings", name, ROUTINGS)
    for name in args.peers or ():
        check_choice("--peers", name, PEERS)
    if args.picture is not None and not args.tokens:
        parser.error("--picture draws times of training: give --tokens a number")
    if not (args.tokens or args.decode):
        parser.error("nothing to measure: give --tokens or --decode a number")
    if not torch.cuda.is_available():
        parser.error("no CUDA device: run this on a machine with an NVIDIA GPU")
    if args.peers is None:
        args.peers = [name for name in PEERS if is_installed(name)]
    return args


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _measure_all(args: argparse.Namespace) -> Iterator[list[Row]]:
    """Measure point after point, all peers at each in turn: what drifts, drifts for all alike."""
    for tokens, routing, name in itertools.product(args.tokens, args.routings, args.shapes):
        yield _measure_point(Point(name, tokens, routing), args)


def _measure_point(point: Point, args: argparse.Namespace) -> list[Row]:
    shape, rows = SHAPES[point.shape], []
    weights = make_weights(shape)
    for peer, make in make_peers(args.save_percents, args.peers).items():
        with _reported(peer, point):
            rows.append(measure_peer(point, peer, make(shape, weights), args.repeats))
        torch.cuda.empty_cache()
    return [*rows, _row(point, "dense", _dense(shape, point.tokens, args.repeats))]


def make_peers(
    save_percents: Iterable[int], peers: Iterable[str]
) -> dict[str, Callable[[Shape, Weights], Peer]]:
    """Return what makes ours, one for each percentage, and these peers, by their names in rows."""
    ours = {
        f"ours, save_percent={each}": partial(Ours, save_percent=each) for each in save_percents
    }
    return {**ours, **{name: PEERS[name] for name in peers}}


def measure_peer(point: Point, peer: str, experts: Peer, repeats: int) -> Row:
    """Return a row; of a peer that no graph could capture, its name says that it was queued."""
    inputs = make_inputs(SHAPES[point.shape], point.tokens, point.routing)
    found = _measure(experts, inputs, repeats)
    return _row(point, f"{peer}, queued" if experts.waits else peer, found)


@contextmanager
def _reported(peer: str, point: Point) -> Iterator[None]:
    """Go on without a peer that fails; say why."""
    try:
        yield
    except Exception as error:  # other people's code may raise anything
        if PEERS.get(peer, Ours).needs is None:
            raise
        print(f"{peer}, {point}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)


def _measure_decode(name: str, args: argparse.Namespace) -> Iterator[Decoded]:
    shape = SHAPES[name]
    sets = [Ours(shape, make_weights(shape), None) for _ in range(SETS if args.decode else 0)]
    for tokens in args.decode:
        inputs = make_inputs(shape, tokens, "random")
        for times in decode_times(sets, inputs, args.repeats):
            yield Decoded(Point(name, tokens, "random"), times)


def _decode_rows(decoded: Decoded) -> list[Row]:
    point, times = decoded
    graph = "graph" if times.layers == 1 else f"one of {times.layers} in a graph"
    found = {
        "weights at copy speed": times.copy,
        f"weights read alone, {graph}": times.read,
        f"ours, {graph}": times.ours,
    }
    return [_row(point, peer, {"fwd_ms": each.median}) for peer, each in found.items()]


def _row(point: Point, peer: str, found: dict[str, float]) -> Row:
    numbers = ("fwd_ms", "fwd_bwd_ms", "saved_gib", "peak_gib")
    return {
        "shape": point.shape,
        "T": point.tokens,
        "routing": point.routing,
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


def make_weights(shape: Shape) -> Weights:
    """Return random weights, of a size that keeps the output's."""
    E, H, I = shape.num_experts, shape.hidden_size, shape.intermediate_size  # noqa: E741
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(*size: int) -> Tensor:
        drawn = torch.randn(*size, dtype=torch.bfloat16, device="cuda", generator=generator)
        return drawn.mul_(size[1] ** -0.5)

    return Weights(draw(E, H, 2 * I), draw(E, I, H))


def _run_once(bound: Bound) -> None:
    if bound.wanted:
        output = bound.run()
        torch.autograd.grad(output, bound.wanted, torch.ones_like(output))
    else:
        with torch.no_grad():
            bound.run()


def _measure(experts: Peer, inputs: Inputs, repeats: int) -> dict[str, float]:
    bound = experts.bind(inputs)
    gradient = torch.randn_like(inputs.hidden_TH)

    def both() -> None:
        torch.autograd.grad(bound.run(), bound.wanted, gradient)

    _run_once(bound)
    torch.cuda.synchronize()
    if not bound.wanted:
        with torch.no_grad():
            return {"fwd_ms": _time(experts, bound.run, repeats)}
    gc.collect()  # what earlier runs left must not be freed while this one is measured
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = bound.run()
    saved = torch.cuda.memory_allocated() - before - output.nbytes
    found = torch.autograd.grad(output, bound.wanted, gradient)
    peak = torch.cuda.max_memory_allocated() - before
    del output, found
    return {
        "fwd_ms": _time(experts, bound.run, repeats),
        "fwd_bwd_ms": _time(experts, both, repeats),
        "saved_gib": saved / GIB,
        "peak_gib": peak / GIB,
    }


def _time(experts: Peer, run: Callable[[], object], repeats: int) -> float:
    """Time replays of a graph; of a peer that cannot be captured, its calls."""
    if not experts.waits:
        try:
            return clock(captured(run), repeats).median
        except RuntimeError:
            if experts.needs is None:
                raise
            torch.cuda.synchronize()
            experts.waits = True
    return clock(run, repeats).median


def _dense(shape: Shape, tokens: int, repeats: int) -> dict[str, float]:
    """Return the time of dense products with as many rows."""
    H, I, rows = shape.hidden_size, shape.intermediate_size, tokens * shape.top_k  # noqa: E741

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.bfloat16, device="cuda")

    wide, narrow, first, down = draw(rows, H), draw(rows, I), draw(H, 2 * I), draw(I, H)
    products = (lambda: wide @ first), (lambda: narrow @ down)
    return {"fwd_ms": sum(clock(each, repeats).median for each in products)}
