"""The combinations of coefficients that hurt and help a comparison most.

`Knobs(ours).spread(Knobs(theirs))` turns the groups of `nki_sim.time.sensitivity` together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lab.bench.comparison.critical_path import CriticalPath
from nki_sim.time.reorder import play
from nki_sim.time.sensitivity import WINDOW, choices_of, with_factors, with_factors_ns
from nki_sim.time.timeline import Timeline

TRIED_NODES: Final = 6_000
"""Of a run, on which a knob is tried of which the critical path does not tell."""

ROUNDS: Final = 4
LONG_NODES, LONG_ROUNDS = 20_000, 2
"""How often the paths of two runs are asked what moves their ratio furthest; and of long runs."""

_TRIED: Final = (WINDOW, "stationary_reuse_skips_load")
_LEAST_GAIN: Final = 1e-3
_LEAST_PROMISE: Final = 0.01  # of the ratio: for less no run is played again


@dataclass(frozen=True, slots=True)
class Extreme:
    """The combination of factors that moves the ratio of two runs furthest, as far as was found.

    `factors` holds what each knob is multiplied with, those left alone excluded; 0 marks a flipped
    switch. A more extreme combination may exist. Times in ns, played with these factors.
    """

    ours_ns: float
    theirs_ns: float
    factors: dict[str, float]

    @property
    def ratio(self) -> float:
        """Their time over ours."""
        return self.theirs_ns / self.ours_ns

    def text(self) -> str:
        """Return ratio, times and factors as one line."""
        return (
            f"{self.ratio:.2f}x ({self.theirs_ns / 1e3:,.0f} over {self.ours_ns / 1e3:,.0f} us)"
            f" with {in_words(self.factors) or 'nothing changed'} (simulated)"
        )


class Spread(NamedTuple):
    """What their time over ours is at least and at most, as far as was found."""

    low: Extreme
    high: Extreme


def in_words(factors: Mapping[str, float]) -> str:
    """Return knobs and factors as text."""
    return ", ".join(f"{knob} x{by:g}" if by else f"{knob} flipped" for knob, by in factors.items())


class Knobs:
    """A run whose knobs can be turned: a group of `GROUPS`, a switch, or the compiler's window.

    Several runs are launches one after the other, whose times add up. What a knob does is read off
    the critical path, but for those that act by the order in which things happen:
    these are tried on the nodes that start first.

    Args:
        runs: as they are, on one chip.
        factors: what a knob may be multiplied with, beside 1.
        nodes: so many are played for each knob that has to be tried.
    """

    def __init__(
        self, *runs: Timeline, factors: Sequence[float] = (0.5, 2.0), nodes: int = TRIED_NODES
    ) -> None:
        self.runs = runs
        self.choices = {knob: by for run in runs for knob, by in choices_of(run, factors).items()}
        self._paths = {
            frozenset[tuple[str, float]](): tuple(
                CriticalPath.of(run.prepared, run.result, run.chip) for run in runs
            )
        }
        self._tried = [self._try(run, nodes) for run in runs]

    def paths(self, factors: Mapping[str, float]) -> tuple[CriticalPath, ...]:
        """Return the critical path of each run with some knobs turned, played once."""
        key = frozenset(factors.items())
        if key not in self._paths:
            found = []
            for run in self.runs:
                chip, options = with_factors(run, factors)
                result = play(run.prepared, chip, options)
                found.append(CriticalPath.of(run.prepared, result, chip))
            self._paths[key] = tuple(found)
        return self._paths[key]

    def total_ns(self, factors: Mapping[str, float]) -> float:
        """Return the total time with some knobs turned, played."""
        return sum(path.total_ns for path in self.paths(factors))

    def estimated_ns(self, at: Mapping[str, float], knob: str, factor: float) -> float:
        """Return the total time with one more knob turned, by the paths with those before.

        Args:
            at: knobs and factors that were played.
            knob: one of `choices`.
            factor: what it is multiplied with instead; 1 leaves it alone.
        """
        if knob in _TRIED:
            return sum(
                path.total_ns
                * tried.get((knob, factor), 1.0)
                / tried.get((knob, at.get(knob, 1.0)), 1.0)
                for path, tried in zip(self.paths(at), self._tried, strict=True)
            )
        turned = _turned(at, knob, factor)
        return sum(
            path.total_on_ns(with_factors(run, turned)[0])
            for path, run in zip(self.paths(at), self.runs, strict=True)
        )

    def spread(self, theirs: Knobs) -> Spread:
        """Return the least and the largest ratio of their time over ours that is found.

        All knobs are turned to where the paths say that the ratio moves furthest; both runs are
        played, and their new paths asked again, until these promise little, `ROUNDS` times at most.
        """
        return Spread(self._extreme(theirs, -1.0), self._extreme(theirs, 1.0))

    def _try(self, run: Timeline, nodes: int) -> dict[tuple[str, float], float]:
        """Return what knobs that no path tells of do to the time of the first nodes, as factors."""
        asked = {(knob, by): {knob: by} for knob in _TRIED for by in self.choices.get(knob, ())}
        if not asked:
            return {}
        base_ns = with_factors_ns(run, {}, nodes)
        times = {key: with_factors_ns(run, factors, nodes) for key, factors in asked.items()}
        return {key: time / base_ns for key, time in times.items()} if base_ns else {}

    def _extreme(self, theirs: Knobs, sign: float) -> Extreme:
        """Follow the paths of both runs to a small or a large ratio."""
        found = [Extreme(self.total_ns({}), theirs.total_ns({}), {})]
        nodes = max(len(run.result.start) for run in (*self.runs, *theirs.runs))
        for _ in range(ROUNDS if nodes < LONG_NODES else LONG_ROUNDS):
            factors, promise = self._furthest(theirs, found[-1], sign)
            if promise < _LEAST_PROMISE * found[-1].ratio or factors in [f.factors for f in found]:
                break
            found.append(Extreme(self.total_ns(factors), theirs.total_ns(factors), factors))
        return max(found, key=lambda one: sign * one.ratio)

    def _furthest(self, theirs: Knobs, at: Extreme, sign: float) -> tuple[dict[str, float], float]:
        """Return every knob where it moves the ratio furthest by the paths of both runs.

        The second value is by how much they move it alone, summed.
        """
        factors, promise = dict(at.factors), 0.0
        for knob, choices in (self.choices | theirs.choices).items():
            moved = {
                factor: sign
                * theirs.estimated_ns(at.factors, knob, factor)
                / self.estimated_ns(at.factors, knob, factor)
                for factor in (1.0, *choices)
            }
            best = max(moved, key=moved.__getitem__)
            gain = moved[best] - moved[at.factors.get(knob, 1.0)]
            if gain > _LEAST_GAIN * at.ratio:
                factors, promise = _turned(factors, knob, best), promise + gain
        return factors, promise


def _turned(factors: Mapping[str, float], knob: str, factor: float) -> dict[str, float]:
    """Return factors with that of one knob changed; 1 leaves it alone."""
    others = {name: by for name, by in factors.items() if name != knob}
    return others if factor == 1.0 else {**others, knob: factor}
