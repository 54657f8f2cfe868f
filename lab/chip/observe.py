"""Times of probes and of kernels that play no part, as a device gives them, and as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.check.launcher import Launched
from lab.chip.device import Device, Job
from lab.chip.held_out import held_out_jobs
from lab.chip.probes.listing import PROBES
from lab.chip.series import Times, measure
from neuron_moe.tools.console import progress_bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What was measured.

    Attributes:
        device: on what.
        kind: measured, or simulated by a stand-in.
        probes: ns of every probe, its standard error as a share.
        errors: of the probes.
        largest_drift: share by which the clock was off the start of the session.
        kernels: ns of the kernels that play no part, launch included; empty for a stand-in, which
            tells their true times.
    """

    device: str
    kind: str
    probes: list[float]
    errors: list[float]
    largest_drift: float
    kernels: list[float]

    def times(self) -> Times:
        """Return the times of the probes."""
        return Times(ns=np.array(self.probes), error=np.array(self.errors), drift=np.zeros(1))

    def write(self, path: Path) -> None:
        """Write it to a file."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_observed(path: Path) -> Observed:
    """Return what a file holds.

    Raises:
        ValueError: it is none, or of other probes.
    """
    try:
        found = Observed(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"--times {path}: not times of probes ({error}). Measure again.") from None
    if len(found.probes) != len(PROBES):
        raise ValueError(
            f"--times {path}: has {len(found.probes)} probes, there are {len(PROBES)}. Measure"
            " again."
        )
    return found


def probe_jobs() -> list[Job]:
    """Return all probes as launches."""
    return [
        Job(
            name=probe.name,
            kernel=probe.kernel,
            arguments=(*probe.tensors(), *probe.arguments),
            options={},
            cores=probe.cores,
        )
        for probe in PROBES
    ]


def observe(device: Device, rounds: int, with_kernels: bool) -> Observed:
    """Compile and time the probes on a device, then, if asked, the kernels that play no part."""
    times = _time(device, probe_jobs(), rounds, "probes")

    def on_device(kernel: Any, *arguments: Any, lnc: int, **options: Any) -> Launched:
        named = {name: value for name, value in options.items() if name != "options"}
        job = Job(name="", kernel=kernel, arguments=arguments, options=named, cores=lnc)
        return Launched(outputs=device.load(job).run(), us=0.0)

    kernels = []
    if with_kernels:
        kernels = _time(device, held_out_jobs(on_device), rounds, "kernels").ns.tolist()
    return Observed(
        device=device.name,
        kind=device.kind,
        probes=times.ns.tolist(),
        errors=times.error.tolist(),
        largest_drift=float(abs(times.drift).max()),
        kernels=kernels,
    )


def _time(device: Device, jobs: Sequence[Job], rounds: int, what: str) -> Times:
    """Compile kernels, then launch them in turn."""
    loaded = []
    with progress_bar(f"compiling {what}") as tell:
        for number, job in enumerate(jobs):
            loaded.append(device.load(job))
            tell(number + 1, len(jobs))
    with progress_bar(f"timing {what}") as tell:
        return measure(loaded, rounds, tell=tell)
