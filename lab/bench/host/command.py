"""neuron-moe bench host: time of the host in one layer call, kernel launches stubbed out.

    neuron-moe bench host --before CHECKOUT

A layer on backend nki runs in a process of its own whose launches return at once what the simulator
gave the first time, so that what remains is the host's: planning, preparing operands, launching.
With --before, a second process runs the same calls on another checkout, in turns with this one.
Counted too are the switches of source file inside the package on the way of a call.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.bench.averages import half_quartile_range
from lab.bench.host.worker import ROOT, Worker
from neuron_moe.errors import check_positive_int
from neuron_moe.tools.console import format_table, tell_json
from neuron_moe.tools.parsers import Parser

CASES = ("prefill", "prefill 8-bit", "fused prefill", "fused decode", "decode")
TARGETS_MS = {"prefill": 0.2, "decode": 0.2, "fused decode": 0.05}
TARGET_FILES = 10
ROUNDS = 40  # turns of the two checkouts: load from outside hits them alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One case on one checkout.

    Attributes:
        host_ms: median of a call, without the launches.
        spread_ms: half the distance between the quartiles.
        least_ms: of the quickest call.
        stub_ms: median time of a call inside the stub, not in `host_ms`.
        launches: kernels launched by a call.
        switches: calls that enter another source file of the package, of one layer call.
        files: source files of the package that one layer call enters.
    """

    host_ms: float
    spread_ms: float
    least_ms: float
    stub_ms: float
    launches: int
    switches: int
    files: int


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table and one JSON line; return 0."""
    options = _parse(argv)
    check_positive_int("--repeats", options.repeats)
    checkouts = [ROOT] if options.before is None else [ROOT, options.before]
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(checkout)) for checkout in checkouts]
        rows = {case: measure(workers, case, options.repeats) for case in options.cases}
        walks = {case: workers[0].walk(case) for case in options.cases} if options.walk else {}
    for case, walk in walks.items():
        print(f"{case}: {len(walk)} switches of file")
        print("\n".join(f"  {a} -> {b}: {function}" for a, b, function in walk))
    print(_table(rows))
    missed = list(misses({case: sides[0] for case, sides in rows.items()}))
    for miss in missed:
        print(f"misses {miss['target']} of {miss['limit']:g}: {miss['case']}: {miss['value']:.3g}")
    tell_json(
        options.json,
        "bench host",
        kind="measured",
        repeats=options.repeats,
        before=options.before and str(options.before),
        misses=missed,
        rows=[_as_row(case, sides) for case, sides in rows.items()],
    )
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("bench host", __doc__)
    parser.add_json_option()
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="default: all")
    parser.add_argument("--repeats", type=int, default=200, help="calls of each case (default 200)")
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="measure this checkout of the repository too, in turns, e.g. an older worktree",
    )
    parser.add_argument("--walk", action="store_true", help="print every switch of source file")
    options = parser.parse_args(argv)
    check_positive_int("--repeats", options.repeats)
    return options


def measure(workers: Sequence[Worker], case: str, repeats: int) -> list[Side]:
    """Time a case on each checkout, in turns; return what was found, in their order."""
    answers: list[list[dict[str, Any]]] = [[] for _ in workers]
    for count in _shares(repeats):
        for worker, found in zip(workers, answers, strict=True):
            found.append(worker.measure(case, count))
    return [_side(found, worker.walk(case)) for worker, found in zip(workers, answers, strict=True)]


def _shares(repeats: int) -> Iterator[int]:
    """Yield how many calls are made in each round."""
    rounds = min(ROUNDS, repeats)
    for index in range(rounds):
        yield repeats // rounds + (index < repeats % rounds)


def _side(found: Sequence[dict[str, Any]], walk: Sequence[Sequence[str]]) -> Side:
    times_ms = [ms for answer in found for ms in answer["times_ms"]]
    return Side(
        host_ms=statistics.median(times_ms),
        spread_ms=half_quartile_range(times_ms),
        least_ms=min(times_ms),
        stub_ms=statistics.median(ms for answer in found for ms in answer["stub_ms"]),
        launches=found[-1]["launches"],
        switches=len(walk),
        files=len({file for switch in walk for file in switch[:2]}),
    )


def misses(found: dict[str, Side]) -> Iterator[dict[str, Any]]:
    """Yield the targets that a case misses."""
    for case, limit_ms in TARGETS_MS.items():
        side = found.get(case)
        if side is None:
            continue
        for target, value, limit in (
            ("host_ms", side.host_ms, limit_ms),
            ("files", side.files, TARGET_FILES),
        ):
            if value > limit:
                yield {"case": case, "target": target, "value": value, "limit": limit}


def _as_row(case: str, sides: Sequence[Side]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case, **asdict(sides[0])}
    if len(sides) > 1:
        row["before"] = asdict(sides[1])
        row["ratio"] = sides[1].host_ms / sides[0].host_ms
    return row


def _table(rows: dict[str, list[Side]]) -> str:
    head = ["layer call", "launches", "switches", "files", "stub ms", "host ms", "least"]
    if any(len(sides) > 1 for sides in rows.values()):
        head += ["before: switches", "host ms", "least", "ratio"]
    lines = [head]
    for case, (ours, *others) in rows.items():
        cells = [case, str(ours.launches), str(ours.switches), str(ours.files)]
        cells += [f"{ours.stub_ms:.3f}", *_times(ours)]
        for other in others:
            cells += [str(other.switches), *_times(other), f"{other.host_ms / ours.host_ms:.2f}"]
        lines.append(cells)
    return (
        "median ± half the quartile range of processor time, without the stub's  [measured]\n"
        + format_table(lines)
    )


def _times(side: Side) -> tuple[str, str]:
    return f"{side.host_ms:.3f} ± {side.spread_ms:.3f}", f"{side.least_ms:.3f}"
