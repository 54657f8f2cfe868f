"""Running cases one after the other, and reporting what became of them."""

import dataclasses
import json
import math
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from neuron_moe.tools.check.vendor_cases.case import Case


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
) -> list[Outcome]:
    """Run cases with a progress bar; return outcomes in the order of the cases.

    Args:
        cases: to run.
        run_case: runs one; must not raise.
        max_seconds: no case starts after this time.
        is_free: whether a case costs nothing, however little time there is.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    start, why = time.monotonic(), f"time budget of {max_seconds:g} s used up"
    done: dict[str, Outcome] = {}
    free = [case for case in cases if is_free(case)]
    text = TextColumn("{task.description}")
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for case in (*free, *in_turn([case for case in cases if not is_free(case)])):
            progress.update(task, description=f"{case.id} {case.kernel} {case.variant}")
            if time.monotonic() - start > max_seconds and not is_free(case):
                break
            try:
                done[case.id] = run_case(case)
            except KeyboardInterrupt:
                why = "interrupted"
                break
            progress.advance(task)
    return [done.get(case.id) or Outcome.of(case, "skipped", why) for case in cases]


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


def write_outcomes(path: Path | None, outcomes: Sequence[Outcome]) -> None:
    """Write the JSON list of outcomes, if there is a path."""
    if path is not None:
        rows = [dataclasses.asdict(outcome) for outcome in outcomes]
        path.write_text(json.dumps(rows, indent=1) + "\n")


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
    scaled = sum(o.outcome == "passed" and "->" in o.reason for o in outcomes)
    if scaled:
        console.print(f"{scaled} cases ran with fewer tokens than listed (see their reason).")
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
