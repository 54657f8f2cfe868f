"""One row of `chip check` in a process of its own, so that it can take nothing else down.

Arguments are those of `main`; the row goes to a file, what the compiler says to the process's
output, which the command keeps. What it is at stands in a second file while it is at it.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import statistics
import sys
import traceback
from pathlib import Path
from typing import Any, Final

from lab.check.chip_cases import CASES
from lab.check.kernel_cases.adapters import run
from lab.check.launcher import Launched, launching_with
from lab.check.vendor_cases.case import Limits
from lab.chip.device import Device, Job, Loaded, Untried
from lab.chip.devices import find_device
from lab.chip.open_features.answers import ask
from lab.chip.open_features.listing import ALIVE, OPEN_FEATURES
from lab.chip.planted import Planted
from lab.chip.probes.dma import nothing
from neuron_moe.tools.chip.environment import LNC

REPEATS: Final = 21
SIMULATOR: Final = "simulator"
FEATURES: Final = {feature.name: feature for feature in (ALIVE, *OPEN_FEATURES)}


def main(argv: list[str] | None = None) -> int:
    """Run a case or the kernel of an open feature; write its row; return 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[*CASES, *FEATURES])
    parser.add_argument("device", help=f"neuron, {SIMULATOR}, or what --against takes")
    parser.add_argument("row", type=Path)
    parser.add_argument("--plant", default="")
    options = parser.parse_args(argv)
    stage = Stage(options.row.with_suffix(".stage"))
    row = _run(options.name, options.device, options.plant, stage)
    options.row.write_text(json.dumps(row))
    return 0


class Stage:
    """Says what a worker is at, for when it does not come back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.text = "starting"
        self.compiled = False

    def tell(self, text: str) -> None:
        """Note what comes next."""
        self.text = text
        self._path.write_text(text)


def _run(name: str, where: str, plant: str, stage: Stage) -> dict[str, Any]:
    """Return the row of a case or feature, whatever goes wrong; right is None if nobody asked."""
    limits = Limits(macs=math.inf, input_bytes=math.inf)
    row: dict[str, Any] = {"compiled": False, "right": False, "us": None, "why": ""}
    try:
        if where == SIMULATOR:
            row["us"] = run(CASES[name], limits).simulated_us
            return row | {"compiled": True, "right": True}
        device: Device = find_device(None if where == "neuron" else where)
        if plant:
            device = Planted(device, plant)
        if name in FEATURES:
            wrong = ask(FEATURES[name], _Staged(device, stage))
            why = f"wrong numbers: {wrong}" if wrong else ""
            return row | {"compiled": True, "right": not wrong, "why": why}
        with launching_with(_Launching(device, stage)):
            verdict = run(CASES[name], limits)
    except Untried as error:
        return row | {"compiled": None, "right": None, "why": f"not tried: {error}"}
    except Exception as error:  # noqa: BLE001  one case must not end the check
        traceback.print_exc(file=sys.stdout)
        return row | {"compiled": stage.compiled, "why": _tell(error, stage)}
    found = {"compiled": True, "right": not verdict.failure, "us": verdict.simulated_us}
    return row | found | {"why": f"wrong numbers: {verdict.failure}" if verdict.failure else ""}


def _tell(error: Exception, stage: Stage) -> str:
    """Return one sentence on what went wrong."""
    text = " ".join(str(error).split())[:400]
    if (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in text:
        return (
            f"full disk while {stage.text}: {text}. Free some space; the same command goes on from"
            " here."
        )
    if stage.text.startswith("compiling"):
        return f"does not compile: {stage.text}: {type(error).__name__}: {text}"
    return f"fails while {stage.text}: {type(error).__name__}: {text}"


class _Staged:
    """A device that tells what it is at."""

    def __init__(self, device: Device, stage: Stage) -> None:
        self._device, self._stage = device, stage
        self.name, self.kind = device.name, device.kind

    def load(self, job: Job) -> Loaded:
        """Compile a kernel; what comes next is its run."""
        self._stage.compiled = False
        self._stage.tell(f"compiling {job.name}")
        loaded = self._device.load(job)
        self._stage.compiled = True
        self._stage.tell(f"running {job.name}")
        return loaded


class _Launching:
    """Launches the kernels of a case on a device; their times are without the launch."""

    def __init__(self, device: Device, stage: Stage) -> None:
        self._device, self._stage = _Staged(device, stage), stage
        self._launch_ns: float | None = None

    def __call__(self, kernel: Any, *arguments: Any, lnc: int, **options: Any) -> Launched:
        named = {name: value for name, value in options.items() if name != "options"}
        name = getattr(kernel, "__name__", str(kernel))
        loaded = self._device.load(
            Job(name=name, kernel=kernel, arguments=arguments, options=named, cores=lnc)
        )
        outputs = loaded.run()
        self._stage.tell(f"timing {name}")
        ns = statistics.median(loaded.time_ns() for _repeat in range(REPEATS))
        return Launched(outputs=outputs, us=(ns - self._launch()) / 1e3)

    def _launch(self) -> float:
        """Return the time of a kernel that does nothing, once it is known."""
        if self._launch_ns is None:
            job = Job(name="nothing", kernel=nothing, arguments=(1,), options={}, cores=int(LNC))
            loaded = self._device.load(job)
            self._launch_ns = statistics.median(loaded.time_ns() for _repeat in range(REPEATS))
        return self._launch_ns


if __name__ == "__main__":
    raise SystemExit(main())
