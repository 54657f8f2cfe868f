"""neuron-moe bench anchors: chip times that others published beside the simulator's estimates.

    neuron-moe bench anchors --library CHECKOUT --autotune CHECKOUT --json OUT

Runs every kernel of the checkouts (aws-neuron/nki-library, awslabs/nki-autotune) that has a
published Trainium 2 time beside its source and that the simulator takes. Kernels, inputs and times
are read from the checkouts. The families are dealt into those that the clock was fitted to and
those held out (lab/bench/anchors/points.py).
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from lab.bench.anchors.models import ANCHORS, measure
from lab.bench.anchors.points import Point, find_points, kept_trace
from lab.bench.anchors.report import Row, draw, summaries, table
from lab.check.vendor_cases.library import LIBRARY_VARIABLE, VendorLibrary
from neuron_moe.tools.console import tell_json
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.timing.sources import Writer
from nki_sim.time.estimate import estimate


def row_of(point: Point, traces: Path | None, seconds: float) -> Row:
    """Simulate a point and estimate its time."""
    trace = kept_trace(point, traces, seconds)
    found = estimate(trace, order=point.order)
    return Row(
        kernel=point.kernel,
        family=point.family,
        source=point.source,
        chip_us=point.chip_us,
        low_us=found.low_us,
        estimate_us=found.us,
        high_us=found.high_us,
        half=point.half,
        doubt=point.doubt,
    )


@cache
def _points(library: Path | None, autotune: Path | None) -> dict[str, Point]:
    """Return the points by name, the longest first: they share the processes best."""
    return {point.kernel: point for point in reversed(find_points(library, autotune))}


@dataclass(frozen=True)
class _Task:
    """What a process of its own needs to find and estimate a point by its name."""

    library: Path | None
    autotune: Path | None
    traces: Path | None
    seconds: float

    def __call__(self, name: str) -> Row | str:
        """Return the row, or why there is none."""
        try:
            return row_of(_points(self.library, self.autotune)[name], self.traces, self.seconds)
        except Exception as error:  # noqa: BLE001  whatever a stranger's kernel or test raises
            return f"{type(error).__name__}: {str(error)[:80]}"
        finally:
            gc.collect()


def main(argv: list[str] | None = None) -> int:
    """Print the table of families; return 0."""
    parser = Parser("bench anchors", __doc__)
    parser.add_json_option()
    default = os.environ.get(LIBRARY_VARIABLE)
    parser.add_argument("--library", type=Path, default=default and Path(default))
    parser.add_argument("--autotune", type=Path, help="a checkout of awslabs/nki-autotune")
    parser.add_argument("--only", nargs="+", help="points with one of these words in their name")
    parser.add_argument("--models", action="store_true", help="whole models, too: minutes each")
    parser.add_argument("--traces", type=Path, help="folder to keep traces in, for the next run")
    parser.add_argument("--seconds", type=float, default=60.0, help="per kernel (default: 60)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)"
    )
    parser.add_argument("--plot", type=Path, help="PNG or SVG to draw")
    options = parser.parse_args(argv)
    if options.library is None and options.autotune is None:
        raise ValueError(
            f"--library: name a checkout of nki-library, or set {LIBRARY_VARIABLE}; or --autotune."
        )
    rows: list[Row] = []
    missed: Counter[str] = Counter()
    checkouts = (options.library, options.autotune)
    names = [
        name
        for name in _points(*checkouts)
        if not options.only or any(word in name for word in options.only)
    ]
    task = _Task(*checkouts, options.traces, options.seconds)
    writer = Writer(options.json, lambda: _result(rows, missed))
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        runs = {pool.submit(task, name): name for name in names}
        for number, run in enumerate(as_completed(runs), start=1):
            name, found = runs[run], run.result()
            if isinstance(found, Row):
                rows.append(found)
                outcome = f"{found.estimate_us / found.chip_us:.2f}"
            else:
                outcome = found
                missed[f"{name.split()[0]}: {found.split(':')[0]}"] += 1
            sys.stderr.write(f"{number}/{len(names)} {outcome}  {name[:100]}\n")
            writer.write()
    rows.sort(key=lambda row: (row.family, row.chip_us, row.kernel))
    if options.models and options.library is not None:
        library = VendorLibrary(options.library)
        chosen = [a for a in ANCHORS if not options.only or any(w in a.name for w in options.only)]
        rows += [measure(anchor, library) for anchor in chosen]
    print("trn2, simulated; launch of a program of its own included")
    print(table(rows))
    for reason, count in missed.items():
        print(f"not run: {count} of {reason}")
    if options.plot is not None and rows:
        print(f"written: {draw(rows, options.plot)}")
    tell_json(options.json, "bench anchors", **_result(rows, missed))
    return 0


def _result(rows: Sequence[Row], missed: Mapping[str, int]) -> dict[str, Any]:
    """Return what goes into the file."""
    return {
        "chip": "trn2",
        "kind": "simulated",
        "summaries": [asdict(summary) for summary in summaries(rows)],
        "missed": dict(missed),
        "rows": [asdict(row) for row in rows],
    }
