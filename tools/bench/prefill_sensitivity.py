"""What of a benchmark's outcome hangs on coefficients that nothing public states.

Times are kept by change: `dma_register_ns x0.5`, `dma_register_ns x2`, `vector_overlaps_independent
flipped`, and `PLACEMENT`, tensors placed the other way. Only changes that move a run are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nki_sim.time.sensitivity import placed_otherwise_ns, varied_ns
from nki_sim.time.timeline import Timeline

LONG_SHARE = 0.7  # of the roofline, asked for with many tokens
PLACEMENT = "tensors placed the other way"


def varied_us(run: Timeline) -> dict[str, float]:
    """Return the microseconds of a run under every change that moves it."""
    times = {}
    for (name, factor), changed_ns in varied_ns(run).items():
        if changed_ns != run.total_ns:
            times[f"{name} x{factor:g}" if factor else f"{name} flipped"] = changed_ns / 1e3
    times[PLACEMENT] = placed_otherwise_ns(run) / 1e3
    return times


def least_us(times: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Return the least time of several runs under every change that moves one of them.

    Args:
        times: of each run its time as it is, and those under changes.
    """
    runs = list(times)
    changes = sorted({change for _, varied in runs for change in varied})
    return {change: min(varied.get(change, us) for us, varied in runs) for change in changes}


def turned_by(
    ours_us: float, ours: Mapping[str, float], vendor_us: float, vendor: Mapping[str, float]
) -> list[str]:
    """Return the changes under which the faster of two is no longer the faster one."""
    is_ours = ours_us < vendor_us
    return [
        change
        for change in sorted({*ours, *vendor})
        if (ours.get(change, ours_us) < vendor.get(change, vendor_us)) != is_ours
    ]


def report(rows: Sequence[Any], long: int) -> dict[str, Any]:
    """Return which rows survive, and the targets' figures under the change that hurts each most.

    Args:
        rows: rows of the benchmark with times under changes of both sides.
        long: tokens from which on the share of the roofline counts.
    """
    compared = [row for row in rows if row.survives is not None]
    changes = sorted({c for row in rows for c in (*row.ours_varied, *row.vendor_varied)})
    under = {change: _figures(rows, change, long) for change in changes}
    names = (
        "geometric_mean_speedup",
        "least_speedup",
        "rows_below_1",
        "long_rows_at_70_percent",
        "least_roofline_share_at_8192",
    )
    worst = {}
    for name in names:
        found = {c: figures[name] for c, figures in under.items() if figures[name] is not None}
        if found:
            pick = max if name == "rows_below_1" else min
            change = pick(found, key=found.__getitem__)
            worst[name] = {"change": change, "value": found[change]}
    return {
        "rows": len(compared),
        "survive": sum(row.survives for row in compared),
        "turned": [
            {"model": r.model, "T": r.T, "routing": r.routing, "by": r.turned_by}
            for r in compared
            if r.turned_by
        ],
        "worst": worst,
        "under": under,
    }


def _figures(rows: Sequence[Any], change: str, long: int) -> dict[str, Any]:
    speedups, shares = [], []
    for row in rows:
        if row.ours_us is None or not row.ours_varied:
            continue
        ours = row.ours_varied.get(change, row.ours_us)
        if row.vendor_us is not None and row.vendor_varied:
            speedups.append(row.vendor_varied.get(change, row.vendor_us) / ours)
        if long == row.T:
            shares.append(row.roofline_us / ours)
    return {
        "geometric_mean_speedup": geometric_mean(speedups),
        "least_speedup": min(speedups, default=None),
        "rows_below_1": sum(speedup < 1.0 for speedup in speedups) if speedups else None,
        "long_rows_at_70_percent": sum(s >= LONG_SHARE for s in shares) if shares else None,
        "least_roofline_share_at_8192": min(shares, default=None),
    }


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean, None of nothing."""
    if not values:
        return None
    return math.exp(sum(math.log(value) for value in values) / len(values))
