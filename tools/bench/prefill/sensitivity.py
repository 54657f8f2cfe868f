"""Which rows of the benchmark survive a change of a coefficient that nothing public states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuron_moe.tools.bench.averages import geometric_mean

LONG_SHARE = 0.7  # of the roofline, asked for with many tokens


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
            {
                "model": r.model,
                "T": r.T,
                "routing": r.routing,
                "corner": r.corner,
                "layout": r.layout,
                "by": r.turned_by,
            }
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
