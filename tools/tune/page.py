"""What tune found, as a page."""

from __future__ import annotations

from typing import Any

from neuron_moe.tools.pages import Details, Items, Page, Row, Section, Table
from neuron_moe.tools.tune.picture import picture_of_bucket
from neuron_moe.tools.tune.results import choice_rows, plan_cells, sure_in_words


def tune_page(report: dict[str, Any], where: str) -> Page:
    """Return the page of a report of `neuron-moe tune`.

    Args:
        report: what `--json` writes.
        where: model and ranks in words.
    """
    buckets, decode = report["buckets"], report["decode"]
    sections = []
    if buckets:
        sections += [
            Section(
                "The choice", [Table(choice_rows(buckets), 4, "times in microseconds a layer")]
            ),
            Section("Against the block size", [Row([picture_of_bucket(each) for each in buckets])]),
            Section("How sure it is", [Items([sure_in_words(each) for each in buckets])]),
            Section("All that was simulated", [_tried(each) for each in buckets]),
        ]
    if decode:
        head = ("tokens of a step", "mode", "selective us", "all_experts us")
        rows = [
            (str(step["tokens"]), step["mode"], *(f"{us:,.1f}" for us in step["us"].values()))
            for step in decode
        ]
        sections.append(Section("Decode", [Table([head, *rows], 2)]))
    remarks = (
        f"one layer on one rank, {report['routing']} routing",
        "us: simulated on nki_sim, the likely time",
        "roofline, padding and estimate: computed",
    )
    return Page(f"Tuned: {where}", _answer(report), sections, remarks)


def _answer(report: dict[str, Any]) -> str:
    sentences = [
        f"{each['tokens']:,} tokens: {_choice(each['chosen'])},"
        f" {each['chosen_us']:,.0f} us a layer; {_against(each)}."
        for each in report["buckets"]
    ]
    sentences += [f"Decode of {step['tokens']}: {step['mode']}." for step in report["decode"]]
    return "\n".join(sentences)


def _choice(chosen: dict[str, Any]) -> str:
    return chosen["mode"] if "mode" in chosen else f"blocks of {chosen['block_size']}"


def _against(bucket: dict[str, Any]) -> str:
    sentences = []
    for name, key in (("untuned", "untuned_us"), ("a block of 512", "default_512_us")):
        if bucket[key] is not None:
            sentences.append(f"{name} takes {bucket[key] / bucket['chosen_us']:.2f} times as long")
    return ", ".join(sentences)


def _tried(bucket: dict[str, Any]) -> Details:
    head = ("block", "plan", "weights", "us", "estimate", "padding")
    rows = [
        (
            *plan_cells(each),
            f"{each['us']:,.1f}",
            f"{each['estimated_us']:,.1f}",
            f"{each['padding']:.0%}",
        )
        for each in bucket["tried"]
    ]
    return Details(f"{bucket['tokens']} tokens: {len(rows)} plans", [Table([head, *rows], 3)])
