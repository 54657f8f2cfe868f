"""What tune tells: a table, JSON and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from neuron_moe.tools.bench.prefill.cases import roofline_us
from neuron_moe.tools.console import format_table
from neuron_moe.tools.tune.problem import Point
from neuron_moe.tools.tune.work import DecodeWork, PrefillWork, SureWork


def bucket_report(
    work: PrefillWork, untuned: Point, default: Point, sure: SureWork
) -> dict[str, Any]:
    """Return what was found for one length of prompts; times are simulated."""
    problem, best = work.problem, work.best()
    by_time = sorted(work.times, key=lambda point: work.times[point].us)
    return {
        "tokens": problem.tokens,
        "chosen": problem.tuned(best).to_dict(),
        "chosen_us": work.times[best].us,
        "default_512_us": _us(work, default),
        "untuned_us": _us(work, untuned),
        "untuned": problem.tuned(untuned).to_dict(),
        "roofline_us": roofline_us(problem.model, _local(problem)),
        "sure": [
            {
                "turned": turned, "instead": problem.tuned(rival).to_dict(), "ratio": ratio,
            }
            for rival, turned, ratio in sure.flips()
        ],
        "looked_at": len(sure.times_ns),
        "tried": [_tried(work, point) for point in by_time],
    }  # fmt: skip


def _us(work: PrefillWork, point: Point) -> float | None:
    found = work.times.get(point)
    return None if found is None else found.us


def _local(problem: Any) -> Any:
    """Return the choices of the rank's experts; tokens of none are left out."""
    index_TK = problem.index_TK
    return index_TK[(index_TK >= 0).all(1)] if (index_TK < 0).any() else index_TK


def _tried(work: PrefillWork, point: Point) -> dict[str, Any]:
    time = work.times[point]
    choice = work.problem.tuned(point).to_dict()
    del choice["tokens"]
    return {
        **choice,
        "us": time.us,
        **{f"{corner.replace('-', '_')}_us": us for corner, us in time.corners_us.items()},
        "estimated_us": point.estimated_us,
        "padding": padding_of(work, point.block_size),
    }


def padding_of(work: PrefillWork, block_size: int) -> float:
    """Return the padding of the blocks that hold tokens, over the tokens in them."""
    tokens_E = work.problem.tokens_E
    slots = int((-(-tokens_E // block_size)).sum()) * block_size
    return slots / max(1, int(tokens_E.sum())) - 1.0


def decode_report(work: DecodeWork) -> dict[str, Any]:
    """Return what was found for a decode step."""
    best = min(work.times, key=lambda mode: work.times[mode].us)
    return {
        "tokens": work.tokens,
        "mode": best,
        "us": {mode: time.us for mode, time in work.times.items()},
    }


def table(buckets: Sequence[dict[str, Any]], decode: Sequence[dict[str, Any]]) -> str:
    """Return what was found, for people."""
    head = ["tokens", "block", "plan", "weights", "us", "untuned", "block of 512", "roofline"]
    rows = [head]
    for bucket in buckets:
        chosen = bucket["chosen"]
        parts = chosen["loaded_parts"]
        rows.append(
            [
                str(bucket["tokens"]), str(chosen["block_size"]),
                f"{chosen['shard_plan']}, {chosen['loop_plan']}, visits of {chosen['visit']}",
                f"{chosen['weights']}, {parts[0]}+{parts[1]} x {chosen['weight_buffers']}",
                f"{bucket['chosen_us']:,.0f}", _text(bucket["untuned_us"]),
                _text(bucket["default_512_us"]), f"{bucket['roofline_us']:,.0f}",
            ]
        )  # fmt: skip
    lines = [format_table(rows, numbers_from=4)] if buckets else []
    lines += [_sure_in_words(bucket) for bucket in buckets]
    for step in decode:
        times = ", ".join(f"{mode} {us:,.0f} us" for mode, us in step["us"].items())
        lines.append(f"decode of {step['tokens']} tokens: {step['mode']} ({times})")
    return "\n".join(lines)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _sure_in_words(bucket: dict[str, Any]) -> str:
    tokens, flips = bucket["tokens"], bucket["sure"]
    if not bucket["looked_at"]:
        return f"{tokens} tokens: nothing else simulated comes close"
    if not flips:
        return f"{tokens} tokens: stays the choice with every coefficient halved or doubled"
    first = flips[0]
    instead = first["instead"]
    return (
        f"{tokens} tokens: with {first['turned']} a block of {instead['block_size']},"
        f" {instead['shard_plan']}, would take {first['ratio']:.2f} times as long;"
        f" {len(flips)} such changes"
    )


def draw(buckets: Sequence[dict[str, Any]], title: str, path: Path) -> Path:
    """Draw time and padding against the block size, a panel for each length of prompts.

    Args:
        buckets: of `bucket_report`.
        title: above all.
        path: PNG or SVG to write.
    """
    figure = Figure(figsize=(4.2 * len(buckets), 3.8), dpi=120, layout="constrained")
    figure.suptitle(f"{title}  [simulated; roofline and padding computed]", fontsize=10)
    for number, bucket in enumerate(buckets):
        axes = figure.add_subplot(1, len(buckets), number + 1)
        fastest: dict[int, dict[str, Any]] = {}
        for tried in bucket["tried"]:
            fastest.setdefault(tried["block_size"], tried)
        sizes = sorted(fastest)
        places = range(len(sizes))
        times = [fastest[size]["us"] for size in sizes]
        axes.plot(places, times, "o-", color="#2a6fb0", label="fastest simulated")
        axes.axhline(bucket["roofline_us"], color="#c0392b", linestyle="--", label="roofline")
        chosen = bucket["chosen"]["block_size"]
        axes.plot(
            sizes.index(chosen), bucket["chosen_us"], "*", color="#d68910", markersize=16,
            label=f"chosen: {chosen}",
        )  # fmt: skip
        axes.set_xticks(list(places), [str(size) for size in sizes])
        axes.set_ylim(bottom=0)
        axes.set_title(f"{bucket['tokens']} tokens", fontsize=9)
        axes.set_xlabel("block size")
        if number == 0:
            axes.set_ylabel("us")
        right = axes.twinx()
        padding = [100 * fastest[size]["padding"] for size in sizes]
        right.bar(places, padding, 0.5, color="#9a9a9a", alpha=0.3, label="padding of blocks")
        right.set_ylim(bottom=0)
        if number + 1 == len(buckets):
            right.set_ylabel("padding, %")
        axes.set_zorder(right.get_zorder() + 1)
        axes.patch.set_visible(False)
        axes.legend(fontsize=7, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
