"""neuron-moe tune: the fastest block size and plan of a MoE layer, as a file that models load.

    neuron-moe tune --model qwen3_30b_a3b --tp 8 --buckets 1024 --out tuned.yaml

For each bucket (tokens of a prompt): the cost model ranks block sizes, shard and loop plans, work
tiles and parts of weights; the simulator times the best few, what runs untuned, and a block of 512;
the least likely time is chosen. Results are kept: after Ctrl-C the same command goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from neuron_moe.backends.compiled_products import cache_folder
from neuron_moe.errors import check_positive_int
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.models.routing_trace import RoutingTrace
from neuron_moe.plan import Step
from neuron_moe.spec import DEFAULT_LNC_SIZE, Tuning
from neuron_moe.tools.models import MODEL_HELP, read_model
from neuron_moe.tools.pages import add_report_option, write_page
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.timing.pool import Pace, Task, Work, run_works
from neuron_moe.tools.timing.sources import write_result
from neuron_moe.tools.tune.page import tune_page
from neuron_moe.tools.tune.picture import draw
from neuron_moe.tools.tune.problem import (
    ROUTINGS,
    WEIGHTS,
    Point,
    Problem,
    check_block_sizes,
    decode_plans,
    draw_routing,
)
from neuron_moe.tools.tune.results import bucket_report, decode_report, table
from neuron_moe.tools.tune.work import (
    DecodeWork,
    Kept,
    PrefillWork,
    SureWork,
    few_tokens_work,
)
from neuron_moe.tuned import TunedDecode, TunedModel, TunedPlans, TunedPrefill

_BUCKETS = (128, 1024, 8192)


class _Tuner:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        raw_config, _ = read_model(Path(args.model))
        tuning = Tuning(num_cores=args.lnc, features=args.features)
        self._layer = RankLayer(
            raw_config, args.model, tp=args.tp, ep=args.ep, backend="nki", tuning=tuning
        )
        self._spec = self._layer.parts(Step("prefill", 1)).spec
        self._trace = None if args.trace is None else RoutingTrace.load(args.trace)
        self._kept = Kept(args.cache)
        self._ends: dict[PrefillWork, tuple[Point, Point]] = {}
        self._sure: dict[PrefillWork, SureWork] = {}
        self._few: dict[PrefillWork, DecodeWork | None] = {}
        self._decode: list[DecodeWork] = []

    def prepare(self) -> None:
        """List what is to be simulated."""
        for tokens in sorted(set(self._args.buckets)):
            problem = Problem.of(self._layer, tokens, self._routing(tokens), self._args.weights)
            points = problem.points(self._args.block_sizes)
            asked, untuned, default = points_to_simulate(problem, points, self._args.simulate)
            work = PrefillWork(problem, asked, self._kept)
            self._ends[work] = untuned, default
            self._sure[work] = SureWork(work, self._kept)
            self._few[work] = few_tokens_work(problem, self._kept)
        for tokens in sorted(set(self._args.decode)):
            plans = decode_plans(self._layer, tokens)
            self._decode.append(DecodeWork(plans, self._routing(tokens), self._kept))

    def _routing(self, tokens: int) -> Any:
        """Return the choices among this rank's experts; a decode kernel tells others apart."""
        spec, ep = self._spec, self._args.ep
        index_TK = draw_routing(
            self._args.routing, self._trace, tokens, spec.num_experts, spec.top_k
        )
        return np.where(index_TK < spec.num_experts // ep, index_TK, -1).astype(np.int32)

    def run(self) -> None:
        """Simulate, and then see how sure the choices are."""
        few = [each for each in self._few.values() if each is not None]
        works: list[Work] = [*self._decode, *few, *self._ends]
        run_works(works, self._on_taken, self._args.jobs)
        if not self._args.quick:
            print("chosen; now how sure that is (--quick leaves this out)", file=sys.stderr)
            run_works(list(self._sure.values()), self._on_taken, self._args.jobs)

    def _on_taken(self, work: Work, task: Task, pace: Pace, seconds: float) -> None:
        text = f"{work.name}, {task.name} [{seconds:.1f} s]; {pace.text()}"
        print(text, file=sys.stderr, flush=True)

    def report(self) -> dict[str, Any]:
        """Return what was found so far."""
        return {
            "kind": "simulated",
            "model": self._args.model,
            "tp": self._args.tp,
            "ep": self._args.ep,
            "lnc": self._args.lnc,
            "routing": str(self._args.trace or self._args.routing),
            "buckets": [
                bucket_report(work, ends, self._sure[work], self._few[work])
                for work, ends in self._ends.items()
                if work.times
            ],
            "decode": [decode_report(work) for work in self._decode if len(work.times) == 2],
        }

    def write(self, report: dict[str, Any]) -> None:
        """Print and write what was found."""
        args = self._args
        where = f"{args.model}, TP {args.tp} x EP {args.ep}, LNC {args.lnc}, trn2"
        print(f"{where}: one layer on one rank, {report['routing']} routing  [simulated]")
        print(table(report["buckets"], report["decode"]))
        if args.out is not None:
            plans = TunedPlans(
                prefill=tuple(
                    TunedPrefill.read(each["chosen"])
                    for each in report["buckets"]
                    if "mode" not in each["chosen"]  # which runs without a file
                ),
                decode=tuple(
                    TunedDecode(tokens=each["tokens"], mode=each["mode"])
                    for each in report["decode"]
                ),
            )
            found = TunedModel(model=args.model, tp=args.tp, ep=args.ep, lnc=args.lnc, plans=plans)
            found.write(
                args.out, f"neuron-moe tune: {where}\n{report['routing']} routing, simulated"
            )
            print(f"plans: {args.out}")
        if args.picture is not None and report["buckets"]:
            print(f"picture: {draw(report['buckets'], where, args.picture)}")
        if args.report is not None:
            print(f"report: {write_page(tune_page(report, where), args.report)}")
        write_result(args.json, report)


def main(argv: list[str] | None = None) -> int:
    """Tune; return the exit status."""
    args = _parse(argv)
    tuner = _Tuner(args)
    tuner.prepare()
    try:
        tuner.run()
    except KeyboardInterrupt:
        tuner.write(tuner.report())
        raise
    tuner.write(tuner.report())
    return 0


def points_to_simulate(
    problem: Problem, points: Sequence[Point], count: int
) -> tuple[list[Point], Point, Point]:
    """Return the points that are simulated, and which of them run untuned and by default.

    Args:
        problem: what is tuned.
        points: by estimate, the fastest first.
        count: so many of the fastest; the best of each block size are simulated too.
    """
    untuned, default = problem.untuned(), problem.default()
    asked = [*points[:count], *_best_of_each_size(points), untuned, default]
    alike = {repr(point.config) + str(point.block_size): point for point in asked}
    untuned, default = (
        alike[repr(point.config) + str(point.block_size)] for point in (untuned, default)
    )
    return list(alike.values()), untuned, default


def _best_of_each_size(points: Sequence[Point]) -> list[Point]:
    """Return the best point of each block size, for the picture."""
    best: dict[int, Point] = {}
    for point in points:
        best.setdefault(point.block_size, point)
    return list(best.values())


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("tune", __doc__)
    parser.add_argument("--model", required=True, help=MODEL_HELP)
    parser.add_argument("--tp", type=int, default=1, help="ranks that split an expert")
    parser.more.add_argument("--ep", type=int, default=1, help="ranks that split the experts")
    parser.more.add_argument(
        "--lnc", type=int, default=DEFAULT_LNC_SIZE, help="cores a rank, 1 or 2"
    )
    parser.add_features_option()
    parser.add_argument("--buckets", type=int, nargs="+", default=list(_BUCKETS), metavar="T")
    parser.add_argument(
        "--decode",
        type=int,
        nargs="*",
        default=[],
        metavar="T",
        help="decode steps whose mode is tuned, of up to 256 tokens",
    )
    parser.more.add_argument(
        "--block-sizes", type=int, nargs="+", default=[32, 64, 128], metavar="B"
    )
    parser.more.add_argument(
        "--weights", choices=WEIGHTS, default="auto", help="in HBM; default: auto"
    )
    parser.add_argument("--routing", default="balanced", help=", ".join(ROUTINGS))
    parser.more.add_argument(
        "--trace", type=Path, help="recorded routing (.npz of neuron-moe routing)"
    )
    parser.more.add_argument("--simulate", type=int, default=6, help="points a bucket (default: 6)")
    parser.add_argument("--quick", action="store_true", help="do not ask how sure the choice is")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.more.add_argument(
        "--cache", type=Path, default=cache_folder() / "tune", help="folder of results"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.yaml", help="plans, for a model to load")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything that was found")
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    add_report_option(parser)
    args = parser.parse_args(argv)
    for tokens in (*args.buckets, *args.decode):
        check_positive_int("--buckets and --decode", tokens)
    check_positive_int("--simulate", args.simulate)
    check_positive_int("--jobs", args.jobs)
    check_block_sizes(args.block_sizes)
    return args
