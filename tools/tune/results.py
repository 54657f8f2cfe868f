"""What tune shows, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuron_moe.tools.console import format_table
from neuron_moe.tools.tune.problem import Point
from neuron_moe.tools.tune.work import DecodeWork, PrefillWork, SureWork


def bucket_report(
    work: PrefillWork, ends: tuple[Point, Point], sure: SureWork, few: DecodeWork | None
) -> dict[str, Any]:
    """Return what was found for one length of prompts; times are simulated.

    Args:
        work: the plans in blocks.
        ends: what runs untuned, and NxD's default.
        sure: how sure the choice is.
        few: the decode kernel, where that runs untuned.
    """
    problem, best, (untuned, default) = work.problem, work.best(), ends
    in_blocks, us = problem.tuned(best).to_dict(), work.times[best]
    chosen, chosen_us = in_blocks, us
    runs, runs_us = problem.tuned(untuned).to_dict(), work.times.get(untuned)
    if few is not None and few.times:
        ((mode, runs_us),) = few.times.items()
        runs = {"tokens": problem.tokens, "mode": mode}
        if runs_us < us:
            chosen, chosen_us = runs, runs_us
    by_time = sorted(work.times, key=work.times.__getitem__)
    return {
        "tokens": problem.tokens,
        "chosen": chosen,
        "chosen_us": chosen_us,
        "in_blocks": in_blocks,
        "in_blocks_us": us,
        "default_512_us": work.times.get(default),
        "untuned_us": runs_us,
        "untuned": runs,
        "roofline_us": problem.work().roofline_us(problem.parts[0].tuning.num_cores),
        "sure": [
            {
                "turned": scaled,
                "instead": problem.tuned(rival).to_dict(),
                "ratio": ratio,
            }
            for rival, scaled, ratio in sure.flips()
        ],
        "looked_at": len(sure.times_ns),
        "tried": [_tried(work, point) for point in by_time],
    }


def _tried(work: PrefillWork, point: Point) -> dict[str, Any]:
    choice = work.problem.tuned(point).to_dict()
    del choice["tokens"]
    return {
        **choice,
        "us": work.times[point],
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
    best = min(work.times, key=work.times.__getitem__)
    return {"tokens": work.tokens, "mode": best, "us": dict(work.times)}


def table(buckets: Sequence[dict[str, Any]], decode: Sequence[dict[str, Any]]) -> str:
    """Return what was found, for people."""
    lines = [format_table(choice_rows(buckets), numbers_from=4)] if buckets else []
    lines += [sure_in_words(bucket) for bucket in buckets]
    for step in decode:
        times = ", ".join(f"{mode} {us:,.0f} us" for mode, us in step["us"].items())
        lines.append(f"decode of {step['tokens']} tokens: {step['mode']} ({times})")
    return "\n".join(lines)


def choice_rows(buckets: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the choice for each length of prompts, a heading first."""
    head = ["tokens", "block", "plan", "weights", "us", "untuned", "block of 512"]
    rows = [[*head, "roofline", "overhead"]]
    for bucket in buckets:
        chosen = bucket["chosen"]
        rows.append(
            [
                str(bucket["tokens"]),
                *plan_cells(chosen),
                f"{bucket['chosen_us']:,.0f}",
                _text(bucket["untuned_us"]),
                _text(bucket["default_512_us"]),
                f"{bucket['roofline_us']:,.0f}",
                f"{1.0 - bucket['roofline_us'] / bucket['chosen_us']:.0%}",
            ]
        )
    return rows


def plan_cells(plan: dict[str, Any]) -> list[str]:
    """Return block size, plan and weights of one point."""
    if "mode" in plan:
        return ["-", f"{plan['mode']}, not in blocks", "plain"]
    gate_up, down = plan["loaded_parts"]
    return [
        str(plan["block_size"]),
        f"{plan['shard_plan']}, {plan['loop_plan']}, work tiles of {plan['work_tile']}",
        f"{plan['weights']}, {gate_up}x{plan['hidden_parts']}+{down} x {plan['weight_buffers']}",
    ]


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def sure_in_words(bucket: dict[str, Any]) -> str:
    """Say which change of the clock's coefficients would change the choice."""
    tokens, flips = bucket["tokens"], bucket["sure"]
    if not bucket["looked_at"]:
        return f"{tokens} tokens: nothing else simulated comes close"
    if not flips:
        return f"{tokens} tokens: none beats it by 0.5% with any coefficient halved or doubled"
    first = flips[0]
    instead = first["instead"]
    more = f"; {len(flips)} changes of coefficients make another one faster" if flips[1:] else ""
    return (
        f"{tokens} tokens: with {first['turned']} blocks of {instead['block_size']} sharded"
        f" {instead['shard_plan']!r} would be {1 - first['ratio']:.1%} faster{more}"
    )
