"""neuron-moe chip rehearse: calibrate against many simulated chips that nobody knows.

    neuron-moe chip rehearse --draws 2

Each draw is a `chip calibrate --against sim:SEED`. What is reported of a coefficient is the largest
error over the draws in which the probes show it, and how often they do not; of the kernels that
played no part, the largest error of the prediction.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from typing import Any

from lab.chip.calibrate import ROUNDS, conclude
from lab.chip.observe import observe
from lab.chip.stand_in import StandIn
from neuron_moe.tools.console import format_table, progress_bar, tell_json
from neuron_moe.tools.parsers import Parser
from nki_sim.hardware import SWITCHES

LIMIT, KERNEL_LIMIT = 0.10, 0.05  # of a coefficient that shows, and of a kernel's time


def main(argv: list[str] | None = None) -> int:
    """Rehearse; return 0, or 1 if a draw was not recovered."""
    options = _parse(argv)
    tasks = [(options.first + number, options.rounds) for number in range(options.draws)]
    found = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs) as pool, progress_bar("rehearsing") as tell:
        for number, draw in enumerate(pool.imap(_draw, tasks)):
            found.append(draw)
            tell(number + 1, len(tasks))
    content = summarise(found)
    print(_table(content))
    tell_json(options.json, "chip rehearse", **content)
    return 0 if content["wrong"] == [] else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("chip rehearse", __doc__)
    parser.add_argument("--draws", type=int, default=20, help="simulated chips")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="launches of every kernel")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time")
    parser.add_json_option()
    options = parser.parse_args(argv)
    for name in ("draws", "jobs"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be positive.")
    return options


def _draw(task: tuple[int, int]) -> dict[str, Any]:
    seed, rounds = task
    device = StandIn(seed)
    observed = observe(device, rounds, with_kernels=False)
    found = conclude(observed, device, with_conclusions=False).as_json()
    return {key: found[key] for key in ("device", "coefficients", "held_out", "largest_drift")}


def summarise(draws: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what many draws say of each coefficient and each kernel, and what is wrong."""
    coefficients: dict[str, dict[str, Any]] = {}
    wrong = []
    for draw in draws:
        for name, one in draw["coefficients"].items():
            entry = coefficients.setdefault(name, {"largest_error": 0.0, "barely_visible": 0})
            holds = one["low"] <= one["truth"] <= one["high"]
            error = abs(one["estimate"] / one["truth"] - 1.0) if one["truth"] else 0.0
            if one["barely_visible"]:
                entry["barely_visible"] += 1
                is_right = holds
            else:
                entry["largest_error"] = max(entry["largest_error"], error)
                is_right = error <= LIMIT and (name not in SWITCHES or holds)
            if not is_right:
                wrong.append(f"{draw['device']}: {name}")
    kernels: dict[str, float] = {}
    for draw in draws:
        for one in draw["held_out"]:
            error = abs(one["predicted_us"] / one["true_us"] - 1.0)
            kernels[one["kernel"]] = max(kernels.get(one["kernel"], 0.0), error)
            if error > KERNEL_LIMIT:
                wrong.append(f"{draw['device']}: {one['kernel']}")
    return {"coefficients": coefficients, "kernels": kernels, "wrong": wrong, "draws": list(draws)}


def _table(content: dict[str, Any]) -> str:
    draws = len(content["draws"])
    rows = [["coefficient", "largest error", "barely visible in"]]
    for name, one in content["coefficients"].items():
        rows.append([name, f"{one['largest_error']:.1%}", f"{one['barely_visible']} of {draws}"])
    rows.append(["kernel not seen before", "", ""])
    rows += [[name, f"{error:.1%}", ""] for name, error in content["kernels"].items()]
    wrong = "; ".join(content["wrong"]) or "none"
    return f"{format_table(rows)}\nnot recovered: {wrong} (simulated)"
