"""Holds the choice of tune, and what runs untuned, against all that the simulator can time.

    python -m lab.bench.tune_matrix --jobs 16 --minutes 4.5 --json matrix.json

Five models at three lengths of prompts, even routing. First each case is tuned as the command does
it; then every other point is simulated, with --factor those whose estimate is that close. A case
whose points were all simulated counts as exhaustive. Ends with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neuron_moe.configs import load_config
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.plan import Step
from neuron_moe.spec import Tuning
from neuron_moe.tools.console import format_table
from neuron_moe.tools.timing.pool import Pace, Task, Work, run_phases
from neuron_moe.tools.tune.command import points_to_simulate
from neuron_moe.tools.tune.problem import Point, Problem, draw_routing
from neuron_moe.tools.tune.work import DecodeWork, Kept, PrefillWork, few_tokens_work

MODELS = {
    "gpt_oss_120b": 8,
    "llama4_scout": 16,
    "qwen3_30b_a3b": 8,
    "deepseek_v3": 16,
    "mixtral_8x7b": 8,
}
TOKENS = (128, 1024, 8192)
BLOCK_SIZES = (32, 64, 128)
CHOSEN, UNTUNED, MINUTES = 1.02, 1.03, 10.0


def _tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _problem_of(case: tuple[str, int]) -> Problem:
    name, tokens = case
    layer = RankLayer(
        load_config(name), name, tp=MODELS[name], backend="nki", tuning=Tuning(num_cores=2)
    )
    spec = layer.parts(Step("prefill", tokens)).spec
    index_TK = draw_routing("balanced", None, tokens, spec.num_experts, spec.top_k)
    return Problem.of(layer, tokens, index_TK, "auto")


def points_of(case: tuple[str, int]) -> tuple[list[Point], list[Point], Point, Point, float]:
    """Return what tune simulates, all points, the untuned one, the default, and the seconds."""
    began = time.monotonic()
    problem = _problem_of(case)
    points = problem.points(BLOCK_SIZES)
    asked, untuned, default = points_to_simulate(problem, points, 6)
    return asked, points, untuned, default, time.monotonic() - began


def main() -> int:
    """Tune, simulate the rest, print; return 1 where a target is missed."""
    args = _parse()
    cases = [(name, tokens) for tokens in args.tokens for name in args.models]
    with multiprocessing.get_context("fork").Pool(min(args.jobs, len(cases))) as pool:
        planned = dict(zip(cases, pool.map(points_of, cases, chunksize=1), strict=True))
    _tell(f"planned; {sum(len(each[1]) for each in planned.values())} points in all")
    problems = {case: _problem_of(case) for case in cases}
    kept = Kept(args.cache)
    tuned = {case: PrefillWork(problems[case], planned[case][0], kept) for case in cases}
    few = {case: few_tokens_work(problems[case], kept) for case in cases}
    rest = {
        case: PrefillWork(problems[case], _others(planned[case], args.factor), kept)
        for case in cases
    }
    seconds = dict.fromkeys(cases, 0.0)
    owners = {id(work): case for case, work in tuned.items()}

    def on_taken(work: Work, task: Task, pace: Pace, took: float) -> None:
        if id(work) in owners:
            seconds[owners[id(work)]] += took
        _tell(f"{work.name}, {task.name} [{took:.1f} s]; {pace.text()}")

    first: list[Work] = [*tuned.values(), *(each for each in few.values() if each is not None)]
    phases: list[Callable[[], list[Work]]] = [lambda: first, lambda: list(rest.values())]
    run_phases(phases, on_taken, args.jobs, args.minutes)
    rows = [
        _row_of(case, planned[case], tuned[case], rest[case], seconds[case])
        for case in cases
        if tuned[case].times
    ]
    for row in rows:
        add_few_tokens(row, few[row["model"], row["tokens"]])
    _print_rows(rows)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))
    return 1 if _misses(rows) else 0


def _others(planned: Any, factor: float) -> list[Point]:
    asked, points, _, _, _ = planned
    seen = {repr((point.config, point.block_size)) for point in asked}
    most = factor * points[0].estimated_us
    return [
        point
        for point in points
        if point.estimated_us <= most and repr((point.config, point.block_size)) not in seen
    ]


def _row_of(
    case: tuple[str, int], planned: Any, tuned: PrefillWork, rest: PrefillWork, seconds: float
) -> dict[str, Any]:
    asked, _, untuned, default, planning = planned
    chosen_us = tuned.times[tuned.best()]
    times = [*tuned.times.values(), *rest.times.values()]
    best_us = min(times)
    left = sum(1 for _ in iter(rest.next_task, None))
    return {
        "model": case[0],
        "tokens": case[1],
        "chosen_us": chosen_us,
        "best_us": best_us,
        "untuned_us": tuned.times.get(untuned),
        "default_512_us": tuned.times.get(default),
        "simulated": len(times),
        "left_out": left + len(asked) - len(tuned.times),
        "planning_s": planning,
        "tune_s_on_two_cores": planning + seconds / 2,
    }


def add_few_tokens(row: dict[str, Any], few: DecodeWork | None) -> None:
    """Put the decode kernel into a row, where that runs untuned."""
    if few is None:
        return
    us = next(iter(few.times.values()), None)
    row |= {"untuned_us": us, "in_blocks_us": row["best_us"]}
    if us is not None:
        row |= {name: min(row[name], us) for name in ("best_us", "chosen_us")}


def _misses(rows: list[dict[str, Any]]) -> list[str]:
    found = []
    for row in rows:
        name = f"{row['model']} T={row['tokens']}"
        if row["chosen_us"] > CHOSEN * row["best_us"]:
            found.append(
                f"{name}: chosen {row['chosen_us'] / row['best_us'] - 1:.1%} from the best"
            )
        if row["untuned_us"] is None:
            found.append(f"{name}: what runs untuned was not simulated")
        elif row["untuned_us"] > UNTUNED * row["best_us"]:
            found.append(f"{name}: untuned {row['untuned_us'] / row['best_us'] - 1:.1%}")
        if row["default_512_us"] is not None and row["chosen_us"] > row["default_512_us"]:
            found.append(f"{name}: slower than a block of 512")
        if row["tune_s_on_two_cores"] > 60 * MINUTES:
            found.append(f"{name}: {row['tune_s_on_two_cores']:.0f} s to tune")
    return found


def _print_rows(rows: list[dict[str, Any]]) -> None:
    table = [
        [
            "model",
            "T",
            "chosen us",
            "best us",
            "chosen",
            "untuned",
            "512",
            "simulated",
            "left out",
            "tune s, 2 cores",
        ]
    ]
    for row in rows:
        shares = [
            row[key] and row[key] / row["best_us"]
            for key in ("chosen_us", "untuned_us", "default_512_us")
        ]
        table.append(
            [
                row["model"],
                str(row["tokens"]),
                f"{row['chosen_us']:.1f}",
                f"{row['best_us']:.1f}",
                *("-" if share is None else f"{share:.3f}" for share in shares),
                str(row["simulated"]),
                str(row["left_out"]),
                f"{row['tune_s_on_two_cores']:.0f}",
            ]
        )
    _tell(format_table(table))
    whole = sum(row["left_out"] == 0 for row in rows)
    good = sum(row["left_out"] == 0 and row["chosen_us"] <= CHOSEN * row["best_us"] for row in rows)
    _tell(f"{good} of {whole} exhaustive cases are within {CHOSEN - 1:.0%} of the best")
    _tell("\n".join(_misses(rows)))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--factor", type=float, default=math.inf)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
