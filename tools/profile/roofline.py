"""Where launches stand under the roofline of their chip: in words and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from neuron_moe.tools.timing.useful_work import UsefulWork
from nki_sim.time.timeline import Timeline

_COLORS: Final = ("#2a6fb0", "#c8501e", "#3a8f3a", "#6f4fb0")


def roofline_point(run: Timeline) -> dict[str, Any]:
    """Return work, traffic, what was reached of the peaks, and what holds the run up.

    The peak of compute is that of the types multiplied, on all cores; 0 without a matmul.
    """
    peak = run.flops / run.compute_bound_ns if run.flops else 0.0
    lanes = [
        (ns / run.total_ns, lane)
        for core in range(run.num_cores)
        for lane, ns in run.engine_busy_ns(core).items()
    ]
    share, lane = max(lanes, default=(0.0, ""))
    return {
        "flops": run.flops,
        "hbm_bytes": run.hbm_bytes,
        "flops_per_byte": run.flops / run.hbm_bytes if run.hbm_bytes else None,
        "tflops_per_s": run.flops / run.total_ns / 1e3 if run.total_ns else 0.0,
        "peak_tflops_per_s": peak / 1e3,
        "hbm_gb_per_s": run.hbm_bytes_per_s / 1e9,
        "peak_hbm_gb_per_s": run.hbm_bytes / run.memory_bound_ns if run.memory_bound_ns else 0.0,
        "roofline_us": run.roofline_ns / 1e3,
        "share": run.roofline_share,
        "bound": "compute" if run.compute_bound_ns > run.memory_bound_ns else "memory",
        "busiest": {"lane": lane, "share": share},
    }


def roofline_text(point: Mapping[str, Any]) -> str:
    """Return a point in words."""
    intensity = point["flops_per_byte"]
    text = "no matmul"
    if point["flops"]:
        text = "nothing moved" if intensity is None else f"{intensity:,.1f} FLOP per byte of HBM"
        text += f", {point['tflops_per_s']:,.2f} of {point['peak_tflops_per_s']:,.1f} TFLOP/s"
    return (
        f"roofline: {text};\n"
        f"  {point['hbm_gb_per_s']:,.1f} of {point['peak_hbm_gb_per_s']:,.1f} GB/s;"
        f" {point['roofline_us']:,.2f} us at best ({point['bound']} bound), {point['share']:.1%}"
        " reached;\n"
        f"  busiest: {point['busiest']['lane']}, {point['busiest']['share']:.0%} of the time"
    )


def useful_record(work: UsefulWork, runs: Sequence[Timeline]) -> dict[str, Any]:
    """Return the layer's own work, the least time and the share of the time it takes, and what its
    launches issue beyond it.
    """
    roofline_us = work.roofline_us(runs[0].num_cores)
    return {
        "flops": work.flops,
        "hbm_bytes": work.hbm_bytes,
        "roofline_us": roofline_us,
        "share": roofline_us / sum(run.total_us for run in runs),
        "overhead": {
            "flops": sum(run.flops for run in runs) - work.flops,
            "hbm_bytes": sum(run.hbm_bytes for run in runs) - work.hbm_bytes,
        },
    }


def useful_rows(useful: Mapping[str, Any]) -> list[list[str]]:
    """Return a layer's own work and the overhead, a heading first."""
    rows = [["", "GFLOP", "MB of HBM", "us at best", "of the time"]]
    found = zip(
        ("the layer's own work", "overhead: issued beyond it"),
        (useful, useful["overhead"]),
        ((f"{useful['roofline_us']:,.2f}", f"{useful['share']:.0%}"), ("", "")),
        strict=True,
    )
    return rows + [
        [name, f"{work['flops'] / 1e9:,.2f}", f"{work['hbm_bytes'] / 1e6:,.1f}", *times]
        for name, work, times in found
    ]


def roofline_figure(points: Mapping[str, Mapping[str, Any]], title: str) -> Figure | None:
    """Draw launches under their roofs; None without a matmul, which has no point there.

    Args:
        points: by name of the launch.
        title: says what was run.
    """
    shown = {name: point for name, point in points.items() if point["flops"] and point["hbm_bytes"]}
    if not shown:
        return None
    figure = Figure(figsize=(7.0, 4.6), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    places = [point["flops_per_byte"] for point in shown.values()]
    intensity = np.geomspace(min(0.1, min(places) / 3), max(10_000.0, max(places) * 3), 200)
    for color, (name, point) in zip(_COLORS, shown.items(), strict=False):
        roof = np.minimum(point["peak_tflops_per_s"], intensity * point["peak_hbm_gb_per_s"] / 1e3)
        axes.plot(intensity, roof, color=color, linewidth=1.2, alpha=0.6)
        axes.plot(
            point["flops_per_byte"],
            point["tflops_per_s"],
            "o",
            color=color,
            label=f"{name}: {point['share']:.0%} of its roof",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("floating-point operations per byte of HBM")
    axes.set_ylabel("TFLOP/s (simulated)")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.legend(fontsize=8, loc="lower right")
    axes.set_title(title, fontsize=10, loc="left")
    return figure
