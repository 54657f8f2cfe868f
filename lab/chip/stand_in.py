"""A chip that nobody knows: the simulator, with coefficients drawn at random and kept to itself.

Every coefficient that the probes are to show is multiplied by a factor between 0.5 and 2, each
switch is drawn, each time has a noise of 3 %, and the clock by which it is taken drifts by up to a
few per cent over a session. Where the clock has no drift, at the start, is where the truth is
meant.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

import nki_sim
from lab.chip.coefficients import LAUNCH, chip_with, start_values
from lab.chip.device import Job
from nki_sim import SimOptions
from nki_sim.errors import UnknownValue
from nki_sim.hardware import SWITCHES
from nki_sim.time.timeline import Timeline, schedule

NOISE: Final = 0.03
MOST_SLOPE_PER_S: Final = 0.005
MOST_SWING: Final = 0.04
PREFIX: Final = "sim:"
TIMES_ONLY: Final = SimOptions(
    mode="indices", uninitialized="off", races="off", capacity="reorder", accumulate="off"
)


def timed(job: Job) -> Timeline:
    """Return the timeline of a job with the simulator's own coefficients.

    Values are computed only where the instructions depend on them: a router in the same launch.
    """
    options = job.simulation or TIMES_ONLY
    try:
        return _timeline(job, options)
    except UnknownValue:
        return _timeline(job, dataclasses.replace(options, mode="full"))


def _timeline(job: Job, options: SimOptions) -> Timeline:
    run = nki_sim.run(job.kernel, *job.arguments, lnc=job.cores, options=options, **job.options)
    found: Timeline = run.timeline
    return found


class StandIn:
    """A simulated chip with hidden coefficients.

    Args:
        seed: of the draw; the same seed is the same chip.
    """

    kind: Literal["measured", "simulated"] = "simulated"

    def __init__(self, seed: int) -> None:
        self.name = f"{PREFIX}{seed}"
        self._random = np.random.default_rng(seed)
        factors = 2.0 ** self._random.uniform(-1.0, 1.0, len(start_values()))
        pairs = zip(start_values().items(), factors, strict=True)
        self._values = {name: value * float(factor) for (name, value), factor in pairs}
        self._switches = {name: int(self._random.integers(2)) for name in SWITCHES}
        self._chip = chip_with(self._values, self._switches)
        self._slope_per_s = float(self._random.uniform(-MOST_SLOPE_PER_S, MOST_SLOPE_PER_S))
        self._swing = float(self._random.uniform(-MOST_SWING, MOST_SWING))
        self._swing_s = float(self._random.uniform(2.0, 5.0))
        self._now_s = 0.0

    @property
    def truth(self) -> dict[str, float]:
        """The hidden coefficients, for after the probes are done."""
        return {**self._values, **{name: float(value) for name, value in self._switches.items()}}

    def load(self, job: Job) -> SimulatedKernel:
        """Record a kernel's instructions; they are timed with the hidden coefficients."""
        return SimulatedKernel(self, job)

    def true_ns(self, timeline: Timeline) -> float:
        """Return how long a kernel takes on this chip, without launch, noise and drift."""
        return schedule(timeline.trace, self._chip, timeline.options).total_ns

    def observe(self, ns: float) -> float:
        """Return a time as this chip's clock and noise have it, and let it pass."""
        took = self._values[LAUNCH] + ns
        self._now_s += (took + 20_000.0) / 1e9
        drift = self._slope_per_s * self._now_s
        drift += self._swing * math.sin(self._now_s / self._swing_s)
        return float(took * (1.0 + drift) * (1.0 + NOISE * self._random.standard_normal()))


@dataclass(slots=True)
class SimulatedKernel:
    """A kernel on a chip that is simulated."""

    chip: StandIn
    job: Job
    _ns: float | None = None

    def run(self) -> Any:
        """Simulate it with all checks."""
        job = self.job
        arguments = tuple(job.arguments)
        for _launch in range(job.launches):
            found = nki_sim.run(job.kernel, *arguments, lnc=job.cores, **job.options).outputs
            arguments = (found, *arguments[1:])
        return found

    def time_ns(self) -> float:
        """Return the time of a launch."""
        if self._ns is None:
            self._ns = self.chip.true_ns(timed(self.job))
        return self.chip.observe(self._ns)
