"""The plan of `neuron-moe compile` as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuron_moe.tools.console import format_bytes
from neuron_moe.tools.pages import Bar, Details, Items, Listing, Page, Section, Table, Text


def plan_page(report: dict[str, Any]) -> Page:
    """Return the page of a report of `neuron-moe compile`."""
    deployment, memory = report["deployment"], report["memory_bytes"]
    facts = (
        f"{report['ranks']} ranks, LNC {deployment['lnc']}: experts TP {deployment['tp']} x EP"
        f" {deployment['ep']} in {deployment['quantization']}, the rest TP {report['ranks']};"
        f" {deployment['batch']} sequences of up to {deployment['max_length']} tokens"
    )
    fits = (
        f"It fits: a rank needs {format_bytes(memory['needed'])} of {format_bytes(memory['hbm'])}."
    )
    buckets = report["buckets"]
    sections = [
        Section("", [Text(facts)]),
        Section("Memory of a rank [computed]", [_memory(memory)]),
        Section("Steps", [_steps(buckets), *map(_details, buckets)]),
    ]
    if report["missing"]:
        text = Text("Nothing was compiled for the chip.", "bad")
        sections.append(Section("Missing for the chip", [text, Items(report["missing"])]))
    remarks = (
        "simulated: our kernels on nki_sim, with its clock of the source order; routing drawn, all"
        " experts alike",
        "computed: by formula from the peaks of the chip and assumed rates of collectives; bounds"
        " from below",
        *report["remarks"],
    )
    return Page(f"{report['model']} on {report['instance']}", fits, sections, remarks)


def _memory(memory: dict[str, Any]) -> Bar:
    parts = {**memory["weights_by_group"], "KV cache": memory["kv_cache"]}
    parts |= {"states": memory["state"], "scratch": memory["scratch"]}
    parts["reserve [assumed]"] = memory["reserve"]
    shares = {name: size / memory["hbm"] for name, size in parts.items() if size}
    return Bar(
        [
            (f"{name}: {format_bytes(parts[name])}, {share:.1%}", share)
            for name, share in shares.items()
        ],
        "memory of a rank",
    )


def _steps(buckets: Sequence[dict[str, Any]]) -> Table:
    header = (
        "step",
        "ms",
        "kernels, simulated",
        "rest, computed",
        "millions of instructions, estimated",
    )
    rows = [
        (
            _name(bucket),
            f"{bucket['us'] / 1e3:.2f}",
            f"{bucket['us_simulated'] / 1e3:.2f}",
            f"{bucket['us_computed'] / 1e3:.2f}",
            f"{bucket['instructions'] / 1e6:.2f}",
        )
        for bucket in buckets
    ]
    return Table([header, *rows])


def _name(bucket: dict[str, Any]) -> str:
    if bucket["phase"] == "prefill":
        return f"context encoding, {bucket['tokens']} tokens"
    return f"token generation, {bucket['tokens']} sequences at {bucket['context']} tokens"


def _details(bucket: dict[str, Any]) -> Details:
    rows = [
        (each["kernel"], each["layers"], str(each["count"]), f"{each['us']:.1f}", each["kind"])
        for each in bucket["kernels"]
    ]
    rows += [
        (
            each["name"],
            each["layers"] or "-",
            str(each["count"]),
            f"{each['us']:.1f}",
            f"{each['kind']}, {each['bound']}",
        )
        for each in bucket["parts"]
    ]
    rows += [
        (
            f"{each['name']}, {each['part']}",
            each["layers"] or "-",
            str(each["count"]),
            f"{each['us']:.1f}",
            f"{each['kind']}, {format_bytes(each['total_bytes'])}",
        )
        for each in bucket["collectives"]
    ]
    header = ("what", "layers", "how often", "us each", "kind")
    why = [
        block for layers, text in bucket["why"].items() for block in (Text(layers), Listing(text))
    ]
    return Details(
        f"{_name(bucket)}: {bucket['us'] / 1e3:.2f} ms", [Table([header, *rows], 2), *why]
    )
