"""What is simulated for a length of prompts or a decode step; results are kept by content."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import nki_sim
from neuron_moe.backends.nki.decode import DecodePlan
from neuron_moe.plan import Plan, Step
from neuron_moe.tools.compile.store import read_json, write_text
from neuron_moe.tools.timing.plans import experts_alone, launches_of, plan_of
from neuron_moe.tools.timing.pool import Task
from neuron_moe.tools.timing.sources import Sources, digest
from neuron_moe.tools.tune.problem import Ints, Point, Problem
from nki_sim.time.sensitivity import alone_ns

OUR_SOURCES = ("**/*.py",)
CLOSE_RIVAL = 1.15  # how much slower a point is that may win under other coefficients
MOST_RIVALS = 2
_TIE = 0.005  # of a time: what differs by less is as good
_SECONDS_PER_TILE = 0.012  # of a simulation; measured, x86, shared


class Kept:
    """Results by the content of what they hang on: kernels, coefficients, simulator, the point.

    Args:
        folder: a file for each result; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        sources = Sources.now(nki_sim.hardware.find("trn2"), None, OUR_SOURCES)
        self._sources = sources.coefficients + sources.simulator + sources.kernels

    def read(self, name: str) -> Any:
        """Return a result; None if there is none."""
        path = self._path(name)
        return None if path is None else read_json(path)

    def write(self, name: str, result: Any) -> None:
        """Keep a result, in one step."""
        path = self._path(name)
        if path is not None:
            write_text(path, json.dumps(result))

    def _path(self, name: str) -> Path | None:
        return (
            None if self._folder is None else self._folder / f"{digest(self._sources, name)}.json"
        )


class PrefillWork:
    """The points of one length of prompts.

    Args:
        problem: what is tuned.
        points: to simulate: the best by estimate, what runs untuned, and NxD's default.
        kept: results of earlier runs.

    Attributes:
        times: simulated microseconds, the likely ones, by point.
    """

    def __init__(self, problem: Problem, points: Sequence[Point], kept: Kept) -> None:
        self.problem, self._kept = problem, kept
        self.name = f"prefill of {problem.tokens} tokens"
        self.times: dict[Point, float] = {}
        self._waiting: list[tuple[Task, Point]] = []
        self._tasks: dict[int, Point] = {}
        for point in points:
            found = kept.read(self._name_of(point))
            if found is not None:
                self.times[point] = found
                continue
            task = Task(
                f"block {point.block_size}",
                self._seconds(point),
                partial(_simulate, problem, point),
            )
            self._waiting.append((task, point))

    def _name_of(self, point: Point) -> str:
        choices = digest(self.problem.index_TK.tobytes())
        return repr((point.config, point.block_size, self.problem.index_TK.shape, choices))

    def _seconds(self, point: Point) -> float:
        tiles = int((-(-self.problem.tokens_E // point.config.tile_rows)).sum())
        loop = point.config.loop
        work = point.config.h_axis.count * point.config.i_axis.count * loop.in_parts / 16
        return 0.5 + _SECONDS_PER_TILE * tiles * (3 + work)

    @property
    def size(self) -> float:
        """The seconds of what still waits, about."""
        return sum(task.size for task, _ in self._waiting)

    def next_task(self) -> Task | None:
        """Hand out the next simulation."""
        if not self._waiting:
            return None
        task, point = self._waiting.pop(0)
        self._tasks[id(task)] = point
        return task

    def take(self, task: Task, result: float) -> None:
        """Keep a time."""
        point = self._tasks.pop(id(task))
        self._kept.write(self._name_of(point), result)
        self.times[point] = result

    def best(self) -> Point:
        """Return the fastest point of those simulated."""
        return min(self.times, key=self.times.__getitem__)

    def rivals(self) -> list[Point]:
        """Return the close points with another block size or shard plan than the best."""
        best = self.best()
        found = dict[tuple[int, str], Point]()
        for point in sorted(self.times, key=self.times.__getitem__):
            place = point.block_size, point.request.shard_plan
            is_close = self.times[point] <= CLOSE_RIVAL * self.times[best]
            if is_close and place != (best.block_size, best.request.shard_plan):
                found.setdefault(place, point)
        return list(found.values())[:MOST_RIVALS]


@dataclass(slots=True)
class SureWork:
    """How sure a choice is: the chosen point and its rivals with coefficients halved and doubled.

    Attributes:
        of: whose choice.
        kept: results of earlier runs.
        times_ns: of each point, by what was scaled and by what factor; "" is as it is.
    """

    of: PrefillWork
    kept: Kept
    times_ns: dict[Point, dict[str, float]] = field(default_factory=dict)
    _handed: list[Point] = field(default_factory=list)
    _tasks: dict[int, Point] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The case in words."""
        return self.of.name

    def _points(self) -> list[Point]:
        rivals = self.of.rivals()
        return [self.of.best(), *rivals] if rivals else []

    @property
    def size(self) -> float:
        """The seconds of what still waits, about."""
        waiting = [point for point in self._points() if point not in self._handed]
        return sum(3 * self.of._seconds(point) for point in waiting)

    def next_task(self) -> Task | None:
        """Hand out the next point."""
        for point in self._points():
            if point in self._handed:
                continue
            self._handed.append(point)
            found = self.kept.read("sure " + self.of._name_of(point))
            if found is not None:
                self.times_ns[point] = found
                continue
            work = partial(_turn, self.of.problem, point)
            task = Task(f"how sure: block {point.block_size}", 3 * self.of._seconds(point), work)
            self._tasks[id(task)] = point
            return task
        return None

    def take(self, task: Task, result: dict[str, float]) -> None:
        """Keep the times of a point."""
        point = self._tasks.pop(id(task))
        self.kept.write("sure " + self.of._name_of(point), result)
        self.times_ns[point] = result

    def flips(self) -> list[tuple[Point, str, float]]:
        """Return the rivals that win by more than a tie when something is scaled, and their time
        over the choice's.
        """
        best = self.of.best()
        own = self.times_ns.get(best, {})
        found = []
        for rival, theirs in self.times_ns.items():
            if rival is best:
                continue
            for scaled in sorted((own.keys() | theirs.keys()) - {""}):
                ratio = theirs.get(scaled, theirs[""]) / own.get(scaled, own[""])
                if ratio < 1.0 - _TIE:
                    found.append((rival, scaled, ratio))
        return sorted(found, key=lambda flip: flip[2])


def _simulate(problem: Problem, point: Point) -> float:
    return _likely_us(problem.plan(point), problem.index_TK)


def _likely_us(plan: Plan, index_TK: Ints) -> float:
    return float(sum(run.timeline.total_us for _, run in launches_of(plan, index_TK)))


def _turn(problem: Problem, point: Point) -> dict[str, float]:
    """Return the time of a point as it is, and with every coefficient that can move it scaled."""
    launches = []
    for _, run in launches_of(problem.plan(point), problem.index_TK):
        scaled = alone_ns(run.timeline)
        named = {f"{knob} x{factor:g}": ns for (knob, factor), ns in scaled.items() if factor}
        launches.append({"": run.timeline.total_ns, **named})
    names = dict.fromkeys(name for each in launches for name in each)
    return {name: sum(each.get(name, each[""]) for each in launches) for name in names}


class DecodeWork:
    """Both modes of a decode step.

    Args:
        plans: of the experts, by mode.
        index_TK: choices of the step's tokens.
        kept: results of earlier runs.
    """

    def __init__(self, plans: Mapping[str, DecodePlan], index_TK: Ints, kept: Kept) -> None:
        self._plans, self._index_TK, self._kept = plans, index_TK, kept
        self.tokens = len(index_TK)
        self.name = f"decode of {self.tokens} tokens"
        self.times: dict[str, float] = {}
        self._waiting = list(plans)
        for mode in plans:
            found = kept.read(self._name_of(mode))
            if found is not None:
                self.times[mode] = found
                self._waiting.remove(mode)

    def _name_of(self, mode: str) -> str:
        return repr(
            (self._plans[mode].config, self._index_TK.shape, digest(self._index_TK.tobytes()))
        )

    @property
    def size(self) -> float:
        """The seconds of what still waits, about."""
        return 5.0 * len(self._waiting)

    def next_task(self) -> Task | None:
        """Hand out a mode."""
        if not self._waiting:
            return None
        mode = self._waiting.pop(0)
        return Task(mode, 5.0, partial(_likely_us, self._plans[mode], self._index_TK))

    def take(self, task: Task, result: float) -> None:
        """Keep a time."""
        self._kept.write(self._name_of(task.name), result)
        self.times[task.name] = result


def few_tokens_work(problem: Problem, kept: Kept) -> DecodeWork | None:
    """Return the decode kernel on a prompt so short that it runs untuned; None for others."""
    plan = plan_of(experts_alone(problem.parts[-1]), Step("prefill", problem.tokens))
    if not isinstance(plan, DecodePlan):
        return None
    return DecodeWork({plan.decision.path: plan}, problem.index_TK, kept)
