"""Run the tasks of many cases over processes, within a time, while one process keeps the results.

A case is a `Work`: it hands out its next task when asked and takes the result, on which the next
one may depend. Each task runs in a process forked for it, so that its memory is given back and a
task that is cut off harms no other. Only the process that called takes results and writes files.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch

LEEWAY = 1.3  # a task is started if so many times its expected seconds are left
_STANDARD_ERROR = 2  # the file descriptor


@dataclass(frozen=True, slots=True)
class Task:
    """Something to compute.

    Attributes:
        name: for messages.
        size: what it takes beside the others of a run, about seconds.
        compute: returns the result, which must be one that can be pickled.
    """

    name: str
    size: float
    compute: Callable[[], Any]


class Work(Protocol):
    """The tasks of one case."""

    @property
    def name(self) -> str:
        """The case in words."""

    @property
    def size(self) -> float:
        """At most so much is still to be started, in sizes of tasks."""

    def next_task(self) -> Task | None:
        """Hand out a task, each once; None if there is none, or none before others are taken."""

    def take(self, task: Task, result: Any) -> None:
        """Keep the result of a task."""


class TaskFailedError(RuntimeError):
    """Tasks failed, or their processes ended without a result; all others were run."""


@dataclass(slots=True)
class _Running:
    work: Work
    task: Task
    process: multiprocessing.process.BaseProcess
    since: float


@dataclass(slots=True)
class Pace:
    """How far a run is.

    Attributes:
        works: all of them.
        jobs: processes.
        done_size, done_seconds: of the tasks that ended, in all.
        running_size: of those at work.
    """

    works: Sequence[Work]
    jobs: int
    done_size: float = 0.0
    done_seconds: float = 0.0
    running_size: float = 0.0

    @property
    def seconds_per_size(self) -> float:
        """What the tasks so far took, 1 before the first."""
        return self.done_seconds / self.done_size if self.done_size else 1.0

    def text(self) -> str:
        """Return the share done and the time left at most, in words."""
        left = sum(work.size for work in self.works) + self.running_size
        share = self.done_size / (self.done_size + left) if self.done_size + left else 1.0
        seconds = left * self.seconds_per_size / self.jobs
        left_text = f"{seconds:.0f} s" if seconds < 60.0 else f"{seconds / 60:.1f} min"
        return f"{share:.0%} done, at most {left_text} left"


def run_works(
    works: Sequence[Work],
    on_taken: Callable[[Work, Task, Pace, float], None],
    jobs: int = 1,
    minutes: float | None = None,
) -> bool:
    """Run all tasks of the works, those of the first works first.

    Args:
        works: the cheap ones first.
        on_taken: called after each result with its work, its task, how far the run is, and the
            seconds that the task took.
        jobs: processes at a time. With one and no limit of time, tasks run in this process.
        minutes: after these no task is at work any more; what has not ended is not taken.

    Returns:
        Whether all tasks were run.

    Raises:
        TaskFailedError: tasks failed or lost two processes, in processes of their own; all others
            were run. A task in this process ends the run with its own error.
    """
    pace = Pace(works, jobs)
    if jobs == 1 and minutes is None:
        for work, task in _in_turn(works):
            started = time.monotonic()
            work.take(task, task.compute())
            _count(pace, task, time.monotonic() - started)
            on_taken(work, task, pace, time.monotonic() - started)
            gc.collect()
        return True
    return _Forked(pace, on_taken, None if minutes is None else 60 * minutes).run()


def run_phases(
    phases: Sequence[Callable[[], Sequence[Work]]],
    on_taken: Callable[[Work, Task, Pace, float], None],
    jobs: int = 1,
    minutes: float | None = None,
) -> bool:
    """Run works in phases, each made of what is known when the one before has ended.

    A phase that leaves tasks out for want of time does not keep shorter ones of the next from it.

    Args:
        phases: each returns its works.
        on_taken, jobs, minutes: as for `run_works`; the minutes are those of all phases.

    Returns:
        Whether all tasks of all phases were run.

    Raises:
        TaskFailedError: as for `run_works`, after all phases.
    """
    started, is_complete = time.monotonic(), True
    failed = list[str]()
    for phase in phases:
        left = None if minutes is None else minutes - (time.monotonic() - started) / 60
        if left is not None and left <= 0.0:
            is_complete = False
            break
        try:
            is_complete = run_works(phase(), on_taken, jobs, left) and is_complete
        except TaskFailedError as error:
            failed.append(str(error))
    if failed:
        raise TaskFailedError("; ".join(failed))
    return is_complete


def _in_turn(works: Sequence[Work]) -> Iterator[tuple[Work, Task]]:
    for work in works:
        while (task := work.next_task()) is not None:
            yield work, task


def _count(pace: Pace, task: Task, seconds: float) -> None:
    pace.done_size += task.size
    pace.done_seconds += seconds


@dataclass(slots=True)
class _Forked:
    """Tasks in processes of their own, until the limit of time."""

    pace: Pace
    on_taken: Callable[[Work, Task, Pace, float], None]
    limit_s: float | None
    running: dict[Connection, _Running] = field(default_factory=dict)
    refused: list[tuple[Work, Task]] = field(default_factory=list)
    again: list[tuple[Work, Task]] = field(default_factory=list)
    lost_once: set[int] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def run(self) -> bool:
        """Run everything that fits into the time; return whether that was all."""
        try:
            is_complete = self._run()
        finally:
            self._stop()
        if self.failed:
            raise TaskFailedError("; ".join(self.failed))
        return is_complete

    def _run(self) -> bool:
        while self._fill():
            ready = wait(list(self.running), self._left_s())
            if not ready:
                return False
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self._take(pipe)
        return not self.refused

    def _left_s(self) -> float | None:
        if self.limit_s is None:
            return None
        return max(0.0, self.limit_s - (time.monotonic() - self.started))

    def _fill(self) -> bool:
        """Start tasks while processes are free; return whether any is at work."""
        while len(self.running) < self.pace.jobs:
            picked = self._pick()
            if picked is None:
                break
            work, task = picked
            left_s = self._left_s()
            needs_s = LEEWAY * task.size * self.pace.seconds_per_size
            if left_s is not None and (left_s <= 0.0 or (self.pace.done_size and needs_s > left_s)):
                self.refused.append(picked)
                continue
            self._start(work, task)
        self.pace.running_size = sum(entry.task.size for entry in self.running.values())
        return bool(self.running)

    def _pick(self) -> tuple[Work, Task] | None:
        """Return a task of a work that has none running, or else of any; last, a lost one."""
        busy = [id(entry.work) for entry in self.running.values()]
        for work in sorted(self.pace.works, key=lambda work: busy.count(id(work))):
            task = work.next_task()
            if task is not None:
                return work, task
        return self.again.pop() if self.again else None

    def _start(self, work: Work, task: Task) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(task, theirs), daemon=True)
        process.start()
        theirs.close()
        self.running[ours] = _Running(work, task, process, time.monotonic())

    def _take(self, pipe: Connection) -> None:
        entry = self.running.pop(pipe)
        try:
            result, error = pipe.recv()
        except EOFError:
            self._note_loss(entry)
            return
        finally:
            pipe.close()
        entry.process.join()
        if error:
            self.failed.append(f"{entry.work.name}, {entry.task.name}: {error}")
            return
        seconds = time.monotonic() - entry.since
        entry.work.take(entry.task, result)
        _count(self.pace, entry.task, seconds)
        self.pace.running_size = sum(other.task.size for other in self.running.values())
        self.on_taken(entry.work, entry.task, self.pace, seconds)

    def _note_loss(self, entry: _Running) -> None:
        """Let a task whose process ended without a result run once more, and no more."""
        entry.process.join()
        if id(entry.task) not in self.lost_once:
            self.lost_once.add(id(entry.task))
            self.again.append((entry.work, entry.task))
            return
        self.failed.append(
            f"{entry.work.name}, {entry.task.name}: its process ended with status"
            f" {entry.process.exitcode} and no result, twice. Give it more memory, or use fewer"
            " --jobs."
        )

    def _stop(self) -> None:
        for pipe, entry in self.running.items():
            entry.process.kill()
            entry.process.join()
            pipe.close()


def _child(task: Task, pipe: Connection) -> None:
    """Send the result of a task and "", or None and what went wrong in words."""
    faulthandler.enable(_STANDARD_ERROR)  # whatever stands in for sys.stderr, as in a notebook
    torch.set_num_threads(1)  # others do not come along, which crashes whoever needs them
    gc.freeze()  # what was there before the fork is shared with the others as long as untouched
    gc.set_threshold(100_000)  # a tenth of the time of a long run goes to looking for circles
    try:
        answer = ForkingPickler.dumps((task.compute(), ""))
    except Exception as error:  # noqa: BLE001  sent to and raised by the one who waits
        answer = ForkingPickler.dumps((None, f"{type(error).__name__}: {error}"))
    pipe.send_bytes(answer)
    pipe.close()
