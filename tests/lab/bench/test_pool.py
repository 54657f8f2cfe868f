"""Tasks run in processes, within a time; what depends on a result waits for it."""

from __future__ import annotations

import io
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from neuron_moe.tools.timing.pool import (
    Pace,
    Task,
    TaskFailedError,
    run_phases,
    run_works,
)


class Chain:
    """Tasks one after the other; each needs the result of the one before."""

    def __init__(
        self, name: str, length: int, seconds: float = 0.0, size_of_task: float = 1.0
    ) -> None:
        self.name, self.seconds, self.size_of_task = name, seconds, size_of_task
        self.left, self.results = length, list[int]()
        self.is_running = False

    @property
    def size(self) -> float:
        return self.left * self.size_of_task

    def next_task(self) -> Task | None:
        if self.is_running or not self.left:
            return None
        self.left, self.is_running = self.left - 1, True
        number = len(self.results)
        return Task(f"{self.name}{number}", self.size_of_task, lambda: self.compute(number))

    def compute(self, number: int) -> tuple[int, int]:
        time.sleep(self.seconds)
        return number, os.getpid()

    def take(self, task: Task, result: Any) -> None:
        self.is_running = False
        self.results.append(result[0])


class Meeting(Chain):
    """Ends once the others run, too."""

    def __init__(self, name: str, barrier: Any) -> None:
        super().__init__(name, 1)
        self.barrier = barrier

    def compute(self, number: int) -> tuple[int, int]:
        self.barrier.wait(timeout=60.0)
        return super().compute(number)


class Failing(Chain):
    def compute(self, number: int) -> tuple[int, int]:
        raise ValueError("too large")


class Dying(Chain):
    def compute(self, number: int) -> tuple[int, int]:
        os._exit(9)


def run(works: list[Chain], jobs: int, minutes: float | None = None) -> tuple[bool, list[str]]:
    shown = []

    def on_taken(work: Any, task: Task, pace: Pace, seconds: float) -> None:
        shown.append(f"{task.name} {pace.text()}")

    return run_works(works, on_taken, jobs, minutes), shown


def test_tasks_run_where_standard_error_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, whose stream has no file descriptor."""
    monkeypatch.setattr("sys.stderr", io.StringIO())
    chain = Chain("a", 1)
    assert run([chain], jobs=2)[0]
    assert chain.results == [0]


@pytest.mark.long
@pytest.mark.parametrize("jobs", [1, 3])
def test_all_tasks_run_and_each_work_in_order(jobs: int) -> None:
    works = [Chain("a", 2), Chain("b", 3), Chain("c", 0)]
    is_complete, shown = run(works, jobs)
    assert is_complete
    assert [work.results for work in works] == [[0, 1], [0, 1, 2], []]
    assert len(shown) == 5
    assert shown[-1].endswith("100% done, at most 0 s left")
    if jobs == 1:
        assert [line.split()[0] for line in shown] == ["a0", "a1", "b0", "b1", "b2"]


def test_tasks_run_at_the_same_time() -> None:
    barrier = multiprocessing.get_context("fork").Barrier(3)
    works: list[Chain] = [Meeting(name, barrier) for name in "abc"]
    assert run(works, 3)[0]
    assert [work.results for work in works] == [[0]] * 3


def test_nothing_runs_past_the_limit() -> None:
    works = [Chain("a", 2, 0.0), Chain("b", 1, 600.0), Chain("c", 5, 600.0)]
    is_complete, _ = run(works, 2, minutes=0.05)
    assert not is_complete
    assert works[0].results == [0, 1]
    assert works[1].results == []


def test_what_cannot_end_in_time_is_not_started() -> None:
    works = [Chain("a", 1, 0.2), Chain("b", 1, size_of_task=1000.0)]
    is_complete, shown = run(works, 1, minutes=0.25)  # 15 s: b is expected to take at least 200 s
    assert not is_complete
    assert len(shown) == 1


def test_a_phase_is_made_when_the_one_before_has_ended() -> None:
    first, found = Chain("a", 3), list[Chain]()

    def second() -> list[Chain]:
        found.append(Chain("b", len(first.results)))
        return found

    assert run_phases([lambda: [first], second], lambda *_: None, jobs=2)
    assert found[0].results == [0, 1, 2]


def test_a_phase_without_time_for_its_last_tasks_leaves_time_to_the_next() -> None:
    slow, quick = [Chain("a", 1, 2.0), Chain("b", 1, 0.0)], Chain("c", 1)
    phases = [lambda: slow, lambda: [quick]]
    assert not run_phases(phases, lambda *_: None, minutes=0.0625)  # 3.75 s
    assert [work.results for work in (*slow, quick)] == [[0], [], [0]]
    assert not run_phases([lambda: [Chain("d", 1)]], lambda *_: None, minutes=-1.0)


def test_an_error_of_a_task_is_raised() -> None:
    with pytest.raises(ValueError, match="too large"):
        run([Failing("a", 1)], 1)


def test_tasks_that_fail_are_named_and_the_others_run() -> None:
    other, following = Chain("b", 3), Chain("d", 2)
    phases = [lambda: [Failing("a", 1), other, Failing("c", 1)], lambda: [following]]
    with pytest.raises(TaskFailedError, match="a, a0: ValueError: too large; c, c0: ValueError"):
        run_phases(phases, lambda *_: None, jobs=2)
    assert [len(work.results) for work in (other, following)] == [3, 2]


def test_a_result_that_cannot_be_sent_is_an_error_of_its_task() -> None:
    class Unsendable(Chain):
        def compute(self, number: int) -> Any:
            return lambda: number

    with pytest.raises(TaskFailedError, match=r"a, a0: .*pickle"):
        run([Unsendable("a", 1)], 2)


def test_a_lost_process_is_named() -> None:
    with pytest.raises(TaskFailedError, match="a, a0: its process ended with status 9"):
        run([Dying("a", 1)], 2)


def test_a_task_that_loses_its_process_runs_once_more_and_spares_the_others(tmp_path: Path) -> None:
    class DyingOnce(Chain):
        def compute(self, number: int) -> tuple[int, int]:
            marker = tmp_path / self.name
            if not marker.exists():
                marker.touch()
                os._exit(9)
            return super().compute(number)

    once, other = DyingOnce("a", 2), Chain("b", 3)
    assert run([once, other], 2)
    assert [len(work.results) for work in (once, other)] == [2, 3]
    other = Chain("b", 3)
    with pytest.raises(TaskFailedError, match="a, a0"):
        run([Dying("a", 1), other], 2)
    assert len(other.results) == 3
