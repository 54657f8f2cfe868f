"""neuron-moe chip calibrate: measure the coefficients of the simulator on a chip.

    neuron-moe chip calibrate --against sim:7 --json measured.json

Runs micro-kernels in turn for some thousand rounds, takes the drift of the clock out, and finds the
coefficients that explain all times; then times ten kernels of ours that played no part, beside what
the simulator says with the new coefficients, and says which of our conclusions flip. The result
file is what `--hardware` of other commands reads. With `--against sim:SEED` the chip is a simulator
whose coefficients are drawn at random and known to nobody until the end.

One process uses either the chip or the simulator, so on a chip the second half is a process of its
own, which reads the times that the first half wrote.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lab.chip.choices import flipped
from lab.chip.coefficients import LAUNCH, NOT_MEASURED, chip_with
from lab.chip.conclusions import hold_against
from lab.chip.devices import find_device
from lab.chip.duration import CHIP_ROUNDS, calibrate_sum
from lab.chip.fit import Fit, fit
from lab.chip.held_out import held_out_jobs
from lab.chip.model import ProbeModel
from lab.chip.observe import Observed, observe, probe_jobs, read_observed
from lab.chip.stand_in import StandIn, timed
from neuron_moe.tools.console import format_table
from neuron_moe.tools.parsers import Parser
from nki_sim.time.timeline import schedule

ROUNDS: Final = 2000
_SECOND_HALF: Final = (
    "import nki_sim; nki_sim.provide(force=True); "
    "from lab.chip.calibrate import main; raise SystemExit(main())"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a calibration found.

    Attributes:
        observed: the times it rests on.
        fit: coefficients.
        held_out: kernels, predicted and true microseconds, launch left out.
        truth: hidden coefficients of a stand-in, empty for a chip.
        conclusions: of ours, and whether they hold.
        choices: of plan, block size and mode that flip.
    """

    observed: Observed
    fit: Fit
    held_out: list[dict[str, Any]]
    truth: dict[str, float]
    conclusions: list[dict[str, Any]]
    choices: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Return the content of the result file."""
        return {
            "chip": "trn2",
            "device": self.observed.device,
            "kind": self.observed.kind,
            "coefficients": self._coefficients(),
            "not_measured": NOT_MEASURED,
            "held_out": self.held_out,
            "conclusions": self.conclusions,
            "choices_that_turn": self.choices,
            "probes": [
                {"probe": job.name, "measured_us": ns / 1e3, "misfit": float(off)}
                for job, ns, off in zip(
                    probe_jobs(), self.observed.probes, self.fit.misfit, strict=True
                )
            ],
            "largest_drift": self.observed.largest_drift,
        }

    def _coefficients(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {
            name: {
                "estimate": one.estimate,
                "low": one.low,
                "high": one.high,
                "barely_visible": one.is_barely_visible,
            }
            for name, one in self.fit.estimates.items()
        }
        for name, on in self.fit.switches.items():
            setting = {"estimate": on, "low": on, "high": on}
            found[name] = {**setting, "barely_visible": False}
        for name, value in self.truth.items():
            found[name]["truth"] = value
        return found


def main(argv: list[str] | None = None) -> int:
    """Calibrate; return 0."""
    options = _parse(argv)
    if options.times is not None:
        found = conclude(read_observed(options.times))
    else:
        device = find_device(options.against)
        if not isinstance(device, StandIn):
            times = options.json.with_suffix(".times.json")
            observe(device, options.rounds, with_kernels=True).write(times)
            print(f"{times}: measured", file=sys.stderr)
            half = ["--times", str(times), "--json", str(options.json)]
            return subprocess.run([sys.executable, "-c", _SECOND_HALF, *half]).returncode
        found = conclude(observe(device, options.rounds, with_kernels=False), device)
    content = found.as_json()
    options.json.write_text(json.dumps(content, indent=1) + "\n")
    print(_table(content))
    print(_held_out_table(content["held_out"]))
    print(_conclusions_table(content["conclusions"]))
    print(_choices_table(content["choices_that_turn"]))
    print(f"{options.json}: for --hardware of bench and plan")
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("chip calibrate", __doc__, exits=f"On a chip: {calibrate_sum()}.")
    parser.add_argument(
        "--against",
        metavar="sim:SEED",
        help="a simulated chip that nobody knows; default: the chip",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"launches of every kernel; default: {CHIP_ROUNDS} on a chip, {ROUNDS} on a stand-in",
    )
    parser.add_argument(
        "--json", type=Path, default=Path("hardware_measured.json"), help="the result file"
    )
    parser.add_argument("--times", type=Path, help="times measured before, instead of a device")
    options = parser.parse_args(argv)
    if options.rounds is None:
        options.rounds = CHIP_ROUNDS if options.against is None else ROUNDS
    if options.rounds < 20:
        raise ValueError(f"--rounds {options.rounds}: must be at least 20, for a median.")
    if options.times is not None and options.against is not None:
        raise ValueError("--times: contradicts --against. Give one of them.")
    return options


def conclude(
    observed: Observed, stand_in: StandIn | None = None, with_conclusions: bool = True
) -> Calibration:
    """Find the coefficients, and hold kernels and conclusions against them."""
    jobs = probe_jobs()
    model = ProbeModel([timed(job) for job in jobs])
    found = fit(model, observed.times(), [job.name for job in jobs])
    chip = chip_with({k: one.estimate for k, one in found.estimates.items()}, found.switches)
    kernels = held_out_jobs()
    timelines = [timed(job) for job in kernels]
    if stand_in is None:
        launch_ns = found.estimates[LAUNCH].estimate
        true_ns = [ns - launch_ns for ns in observed.kernels]
    else:
        true_ns = [stand_in.true_ns(timeline) for timeline in timelines]
    return Calibration(
        observed=observed,
        fit=found,
        held_out=[
            {
                "kernel": job.name,
                "predicted_us": schedule(timeline.trace, chip, timeline.options).total_us,
                "true_us": ns / 1e3,
            }
            for job, timeline, ns in zip(kernels, timelines, true_ns, strict=True)
        ],
        truth={} if stand_in is None else stand_in.truth,
        conclusions=hold_against(chip) if with_conclusions else [],
        choices=flipped(chip) if with_conclusions else [],
    )


def _table(content: dict[str, Any]) -> str:
    rows = [["coefficient", "estimate", "low", "high", "truth", "off", ""]]
    for name, one in content["coefficients"].items():
        truth = one.get("truth")
        rows.append(
            [
                name,
                *(f"{one[key]:.4g}" for key in ("estimate", "low", "high")),
                "-" if truth is None else f"{truth:.4g}",
                f"{one['estimate'] / truth - 1.0:+.1%}" if truth else "-",
                "barely visible" if one["barely_visible"] else "",
            ]
        )
    return f"{content['device']}, {content['kind']}\n{format_table(rows)}"


def _held_out_table(held_out: Sequence[dict[str, Any]]) -> str:
    rows = [["kernel not seen before", "predicted us", "true us", "off"]]
    for one in held_out:
        off = one["predicted_us"] / one["true_us"] - 1.0
        rows.append(
            [one["kernel"], f"{one['predicted_us']:.2f}", f"{one['true_us']:.2f}", f"{off:+.1%}"]
        )
    return format_table(rows)


def _conclusions_table(conclusions: Sequence[dict[str, Any]]) -> str:
    rows = [["conclusion of ours", "ratio as published", "ratio here", ""]]
    for one in conclusions:
        mark = "" if one["holds"] else "flips"
        rows.append([one["claim"], f"{one['ratio']:.2f}", f"{one['ratio_here']:.2f}", mark])
    return format_table(rows)


def _choices_table(choices: Sequence[dict[str, Any]]) -> str:
    if not choices:
        return "every plan, block size and decode mode would be chosen as it is"
    rows = [["chosen otherwise here", "with our coefficients", "here"]]
    return format_table([*rows, *([one["choice"], one["ours"], one["here"]] for one in choices)])
