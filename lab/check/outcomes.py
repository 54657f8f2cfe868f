"""Running cases one after the other, and reporting what became of them."""

import dataclasses
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from lab.check.vendor_cases.case import Case

_LINE_EVERY_S = 30.0
_KEEP_EVERY_S = 5.0


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of one case; the JSON output is a list of these."""

    id: str
    kernel: str
    variant: str
    outcome: str
    reason: str
    simulated_us: float | None

    @classmethod
    def of(
        cls, case: Case, outcome: str, reason: str, simulated_us: float | None = None
    ) -> "Outcome":
        """Return the result of a case: passed, failed or skipped, why, and its simulated time."""
        return cls(
            id=case.id,
            kernel=case.kernel,
            variant=case.variant,
            outcome=outcome,
            reason=reason,
            simulated_us=None if simulated_us is None else round(simulated_us, 3),
        )


def run_in_turn(
    cases: Sequence[Case],
    run_case: Callable[[Case], Outcome],
    max_seconds: float = math.inf,
    is_free: Callable[[Case], bool] = lambda case: False,
    jobs: int = 1,
    file: "OutcomeFile | None" = None,
) -> list[Outcome]:
    """Run cases and say how much time is left; return outcomes in the order of the cases.

    Args:
        cases: to run.
        run_case: runs one; must not raise.
        max_seconds: no case starts after this time.
        is_free: whether a case costs nothing, however little time there is.
        jobs: processes; with one, cases run in this process.
        file: holds outcomes of cases that need not run, and gets all of them, now and then too, so
            that a run that is killed has kept what it found.
    """
    file = file or OutcomeFile()
    start, why = time.monotonic(), f"time budget of {max_seconds:g} s used up"
    ids, kept = {case.id for case in cases}, time.monotonic()
    done = {outcome.id: outcome for outcome in file.known if outcome.id in ids}
    left = [case for case in cases if case.id not in done]
    free = [case for case in left if is_free(case)]
    waiting = iter((*free, *in_turn([case for case in left if not is_free(case)])))

    def in_time() -> Iterator[Case]:
        for case in waiting:
            if time.monotonic() - start > max_seconds and not is_free(case):
                return
            yield case

    with _tell_progress(len(left)) as tell_done:
        try:
            for case, outcome in _run_each(in_time(), run_case, jobs):
                done[case.id] = outcome
                tell_done(f"{case.id} {case.kernel} {case.variant}")
                if time.monotonic() - kept > _KEEP_EVERY_S:
                    file.write(list(done.values()))
                    kept = time.monotonic()
        except KeyboardInterrupt:
            why = "interrupted"
    outcomes = [done.get(case.id) or Outcome.of(case, "skipped", why) for case in cases]
    file.write(outcomes)
    return outcomes


def _run_each(
    cases: Iterator[Case], run_case: Callable[[Case], Outcome], jobs: int
) -> Iterator[tuple[Case, Outcome]]:
    """Yield cases with their outcomes as they end, at most `jobs` at work."""
    if jobs == 1:
        for case in cases:
            yield case, run_case(case)
        return
    context = multiprocessing.get_context("fork")
    running: dict[Connection, tuple[Case, BaseProcess]] = {}
    try:
        while True:
            for case in itertools.islice(cases, jobs - len(running)):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_send, args=(theirs, run_case, case), daemon=True)
                process.start()
                theirs.close()
                running[ours] = case, process
            if not running:
                return
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                ended, its_process = running.pop(pipe)
                yield ended, _receive(pipe, ended, its_process)
    finally:
        for _, left in running.values():
            left.kill()


def _send(pipe: Connection, run_case: Callable[[Case], Outcome], case: Case) -> None:
    torch.set_num_threads(1)  # threads of OpenMP do not come along with a fork
    pipe.send(run_case(case))


def _receive(pipe: Connection, case: Case, process: BaseProcess) -> Outcome:
    try:
        found: Outcome = pipe.recv()
    except EOFError:
        process.join()
        return Outcome.of(case, "failed", f"its process ended with status {process.exitcode}")
    process.join()
    return found


@contextmanager
def _tell_progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar with the time left on a terminal, elsewhere a line every half minute."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console, start, last = Console(file=sys.stderr), time.monotonic(), time.monotonic()
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    count = 0
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=total)

        def tell_done(name: str) -> None:
            nonlocal count, last
            count += 1
            progress.update(task, advance=1, description=name)
            now = time.monotonic()
            if not console.is_terminal and now - last > _LINE_EVERY_S:
                left = (now - start) / count * (total - count) / 60
                print(f"{count} of {total} cases, about {left:.1f} min left", file=sys.stderr)
                last = now

        yield tell_done


def in_turn(cases: Sequence[Case]) -> Iterator[Case]:
    """Yield cases of all kernels in turn, small ones first, so that a run that is cut short has
    seen everything.
    """
    groups: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.kernel, case.variant].append(case)
    queues = [sorted(group, key=_size, reverse=True) for group in groups.values()]
    while queues:
        for queue in queues:
            yield queue.pop()
        queues = [queue for queue in queues if queue]


def _size(case: Case) -> float:
    """Return a rough measure of a case's work: the product of its sizes."""
    sizes = [
        value
        for value in case.params.values()
        if isinstance(value, int) and not isinstance(value, bool)
    ]
    return math.prod(max(float(value), 1.0) for value in sizes)


def tell(error: BaseException, packages: Sequence[str]) -> str:
    """Return one line about an exception: type, first line, and the innermost line in packages."""
    text = (str(error).strip().splitlines() or [""])[0]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if any(package in frame.filename for package in packages)
    ]
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeFile:
    """Where outcomes are kept.

    Attributes:
        path: the JSON list; None keeps nothing.
        known: outcomes of an earlier run, of cases that passed or failed.
    """

    path: Path | None = None
    known: tuple[Outcome, ...] = ()

    @classmethod
    def resumed(cls, path: Path | None) -> "OutcomeFile":
        """Return the file of an earlier run with what it knows, nothing if it is not there yet.

        Raises:
            ValueError: there is no path, or the file is no list of outcomes.
        """
        if path is None:
            raise ValueError("--resume: goes on from the file of --json, which is missing.")
        if not path.exists():
            return cls(path=path)
        try:
            outcomes = [Outcome(**row) for row in json.loads(path.read_text())]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"--resume: {path} is no list of outcomes ({error}). Name another file by --json."
            ) from None
        ran = tuple(outcome for outcome in outcomes if outcome.outcome != "skipped")
        return cls(path=path, known=ran)

    def write(self, outcomes: Sequence[Outcome]) -> None:
        """Write all outcomes; a reader never sees half a list."""
        if self.path is None:
            return
        rows = [dataclasses.asdict(outcome) for outcome in outcomes]
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text(json.dumps(rows, indent=1) + "\n")
        part.replace(self.path)


def print_table(outcomes: Sequence[Outcome], title: str) -> None:
    """Print one row per kernel and variant, then the reasons of failures with their number of
    cases.
    """
    from rich.console import Console
    from rich.table import Table

    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.kernel, outcome.variant].append(outcome)
    table = Table("kernel", "variant", title=title)
    for heading in ("cases", "passed", "failed", "skipped", "simulated us (median)"):
        table.add_column(heading, justify="right")
    for (kernel, variant), group in sorted(groups.items()):
        table.add_row(kernel, variant, *_row(group))
    table.add_section()
    table.add_row("all", "", *_row(list(outcomes)))
    console = Console()
    console.print(table)
    changed = sum(o.outcome == "passed" and "->" in o.reason for o in outcomes)
    if changed:
        console.print(
            f"{changed} cases ran in another type or size than listed (--json: see their reason)."
        )
    for outcome in outcomes:
        if outcome.outcome == "failed":
            console.print(
                f"{outcome.id} {outcome.kernel} {outcome.variant}: {outcome.reason}",
                style="red",
                markup=False,
            )


def _row(group: Sequence[Outcome]) -> list[str]:
    count = {
        kind: sum(o.outcome == kind for o in group) for kind in ("passed", "failed", "skipped")
    }
    times = [o.simulated_us for o in group if o.simulated_us is not None]
    median = f"{statistics.median(times):,.1f}" if times else "-"
    return [
        str(len(group)),
        *(str(count[kind]) for kind in ("passed", "failed", "skipped")),
        median,
    ]
