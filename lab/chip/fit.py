"""Coefficients from the times of probes: least squares in logarithms, with error bars.

The unknowns are the logarithms of factors on the coefficients as the simulator has them. A weak
assumption, a factor of about 2 either way, keeps what no probe shows where it is; its error bar
then is as wide as the assumption. Gauss-Newton steps are halved until they help. Times have kinks
(the larger of two bounds counts), so what is barely seen is also looked for along a line. A switch
is on if two probes of the same work, which only it tells apart, take different times.

What the drift leaves of the clock is common to all times: one more unknown, `CLOCK_ERROR` wide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lab.chip.coefficients import COEFFICIENTS, start_values
from lab.chip.model import ProbeModel
from lab.chip.probes.listing import SWITCH_PROBES
from lab.chip.series import Times

PRIOR: Final = 0.6  # standard deviation of a logarithm: a factor of 1.8
MODEL_ERROR: Final = 5e-4  # share of a time, beside its own error
CLOCK_ERROR: Final = 3e-3  # share of all times
SWITCH_ERROR: Final = 5.0  # standard errors between the times of two probes of a switch
BARS: Final = 3.3  # standard errors: 99.9 %
BARELY: Final = 0.10  # a coefficient whose bar is wider than this share is barely visible
VAGUE: Final = 0.02  # with a wider bar, kinks may matter
_STEP: Final = 0.02
_MOST_STEP: Final = 0.5
_ROUNDS: Final = 12
_CLOSE: Final = 1e-3
_LINE: Final = (-0.8, -0.5, -0.3, -0.15, -0.05, 0.05, 0.15, 0.3, 0.5, 0.8)
_FAR: Final = 0.3  # further steps along it

_SHARE, _RAMP = COEFFICIENTS.index("ramp_start_share"), COEFFICIENTS.index("ramp_ns")
_MOST_SHARE: Final = math.log(0.995 / start_values()["ramp_start_share"])
_STARTS: Final = (0.3, 0.45, 0.7)
_RAMPS: Final = (0.6, 1.6)
_ARRAY: Final = tuple(
    COEFFICIENTS.index(name)
    for name in (
        "ramp_start_share",
        "ramp_ns",
        "matmul_calibration_factor",
        "matmul_drain_ns",
        "stationary_load_speedup",
        "matmul_floor_cycles",
    )
)

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One coefficient: the best value, and the ends of its error bar."""

    estimate: float
    low: float
    high: float

    @property
    def is_barely_visible(self) -> bool:
        """Whether the probes leave it open by more than a tenth either way."""
        return max(self.high / self.estimate, self.estimate / max(self.low, 1e-12)) > 1.0 + BARELY


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the times of the probes say.

    Attributes:
        estimates: by coefficient.
        switches: the setting that explains the times best.
        misfit: [n] measured time over the one explained, less 1, of each probe.
        cost: sum of squared errors, in standard errors.
    """

    estimates: dict[str, Estimate]
    switches: dict[str, int]
    misfit: Vector
    cost: float


@dataclass(slots=True)
class _State:
    """Where the search is: factors, the times they give, and what these cost."""

    theta: Vector
    log_ns: Vector
    cost: float


class _Problem:
    """Least squares for one setting of the switches."""

    def __init__(self, model: ProbeModel, times: Times, switches: Mapping[str, int]) -> None:
        self._model, self._switches = model, switches
        self._start = start_values()
        self._target = np.log(times.ns)
        self._weight = 1.0 / np.hypot(times.error, MODEL_ERROR)
        self._width = np.append(np.full(len(COEFFICIENTS), PRIOR), CLOCK_ERROR)
        self._readers = [
            [k for k in range(len(model)) if name in model.reads[k]] for name in COEFFICIENTS
        ]

    def values(self, theta: Vector) -> dict[str, float]:
        """Return coefficients by the logarithms of their factors, the last that of the clock."""
        pairs = zip(COEFFICIENTS, theta[:-1], strict=True)
        return {name: self._start[name] * float(np.exp(by)) for name, by in pairs}

    def at(self, theta: Vector) -> _State:
        """Return what some factors give."""
        log_ns = np.log(self._model.ns(self.values(theta), self._switches)) + theta[-1]
        return _State(theta, log_ns, self._cost(theta, log_ns))

    def misfit(self, state: _State) -> Vector:
        """Return the measured time of each probe over the explained one, less 1."""
        return np.expm1(self._target - state.log_ns)

    def _cost(self, theta: Vector, log_ns: Vector) -> float:
        errors = (self._target - log_ns) * self._weight
        return float(errors @ errors + np.square(theta / self._width).sum())

    def along(self, state: _State, number: int, step: float) -> _State:
        """Return what one other factor gives."""
        theta, log_ns, which = state.theta.copy(), state.log_ns.copy(), self._readers[number]
        theta[number] += step
        log_ns[which] = (
            np.log(self._model.ns(self.values(theta), self._switches, which)) + theta[-1]
        )
        return _State(theta, log_ns, self._cost(theta, log_ns))

    def slopes(self, state: _State, only: Sequence[int] = ()) -> Vector:
        """Return [probes, coefficients and clock] derivatives of logarithms of times.

        Where only some are wanted, the others are 0.
        """
        columns = []
        for number in range(len(COEFFICIENTS)):
            if only and number not in only:
                columns.append(np.zeros(len(self._model)))
                continue
            after = self.along(state, number, _STEP)
            before = self.along(state, number, -_STEP)
            columns.append((after.log_ns - before.log_ns) / (2.0 * _STEP))
        return np.stack([*columns, np.ones(len(self._model))], axis=1)

    def curvature(self, slopes: Vector) -> Vector:
        """Return the inverse of the covariance of the factors."""
        weighted = slopes * self._weight[:, None]
        return np.asarray(weighted.T @ weighted + np.diag(self._width**-2.0))

    def descend(self, state: _State, only: Sequence[int] = ()) -> _State:
        """Take Gauss-Newton steps until they gain nothing; move some factors only, if given."""
        for _round in range(_ROUNDS):
            slopes = self.slopes(state, only)
            errors = (self._target - state.log_ns) * self._weight**2
            gradient = slopes.T @ errors - state.theta / self._width**2
            step = np.linalg.solve(self.curvature(slopes), gradient)
            step = np.clip(step, -_MOST_STEP, _MOST_STEP)
            if only:
                step[[k for k in range(len(step)) if k not in only]] = 0.0
            found = self._shorten(state, step)
            if found is None:
                break
            gained, state = state.cost - found.cost, found
            if gained < 0.1 or float(np.abs(step).max()) < _CLOSE:
                break
        return state

    def _shorten(self, state: _State, step: Vector) -> _State | None:
        """Return the first of ever shorter steps that helps, none beyond the full clock."""
        for halved in range(6):
            theta = state.theta + step * 0.5**halved
            theta[_SHARE] = min(theta[_SHARE], _MOST_SHARE)
            found = self.at(theta)
            if found.cost < state.cost:
                return found
        return None

    def look_around(self, state: _State, error: Vector) -> _State:
        """Move what is barely seen to where along a line the cost is least."""
        for number in np.flatnonzero(error[:-1] > VAGUE / BARS).tolist():
            tried = [self.along(state, number, step) for step in _LINE]
            state = min([state, *tried], key=lambda one: one.cost)
        return state

    def warm_up_elsewhere(self, state: _State) -> _State:
        """Try other warm-ups of the array: a slow one from high up looks much like a fast one."""
        best = state
        for start, ramp in itertools.product(_STARTS, _RAMPS):
            theta = state.theta.copy()
            theta[_SHARE] = math.log(start / self._start["ramp_start_share"])
            theta[_RAMP] = math.log(ramp)
            best = min(best, self.descend(self.at(theta), _ARRAY), key=lambda one: one.cost)
        return best

    def reach(self, state: _State, number: int, sign: float) -> float:
        """Return how far a factor can go one way until times or the assumption speak against it.

        0 if they do at the first step; then slopes tell. What other bounds hide can go far: the
        best value may be at the end of what is hidden, and the truth at the other one.
        """
        steps = [step for step in _LINE if step > 0.0]
        for step in itertools.chain(steps, itertools.count(steps[-1] + _FAR, _FAR)):
            if self.along(state, number, sign * step).cost > state.cost + BARS**2:
                return 0.0 if step == steps[0] else step
        raise AssertionError("a factor has no end")


def fit(model: ProbeModel, times: Times, names: Sequence[str]) -> Fit:
    """Find the coefficients that explain the times of all probes best.

    Args:
        model: times of the probes by coefficients.
        times: as they were measured.
        names: of the probes.
    """
    switches = find_switches(times, names)
    problem = _Problem(model, times, switches)
    state = problem.descend(problem.at(np.zeros(len(COEFFICIENTS) + 1)))
    state = problem.descend(problem.warm_up_elsewhere(state))
    state = problem.look_around(state, _errors(problem, state))
    state = problem.descend(state)
    return Fit(
        estimates=_estimates(problem, state),
        switches=switches,
        misfit=problem.misfit(state),
        cost=state.cost,
    )


def find_switches(times: Times, names: Sequence[str]) -> dict[str, int]:
    """Return which switches are on."""
    found = {}
    for switch, pair in SWITCH_PROBES.items():
        one, other = (list(names).index(name) for name in pair)
        apart = abs(float(np.log(times.ns[one] / times.ns[other])))
        error = float(np.hypot(times.error[one], times.error[other]))
        found[switch] = int(apart > SWITCH_ERROR * error)
    return found


def _errors(problem: _Problem, state: _State) -> Vector:
    covariance = np.linalg.inv(problem.curvature(problem.slopes(state)))
    return np.sqrt(np.diag(covariance))


def _estimates(problem: _Problem, state: _State) -> dict[str, Estimate]:
    """Return every coefficient with its error bar."""
    found, errors = {}, _errors(problem, state)
    values = problem.values(state.theta)
    for number, name in enumerate(COEFFICIENTS):
        # Near a kink the slopes say little, or of one side only.
        low = max(BARS * errors[number], problem.reach(state, number, -1.0))
        high = max(BARS * errors[number], problem.reach(state, number, 1.0))
        value = values[name]
        found[name] = Estimate(
            estimate=value, low=value * float(np.exp(-low)), high=value * float(np.exp(high))
        )
    return found
