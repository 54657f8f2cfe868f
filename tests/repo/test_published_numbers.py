"""README and docs state of the simulated kernels what the committed results say."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.repo.source import ROOT

RESULTS = ROOT / "docs" / "results"
PREFILL: dict[str, Any] = json.loads((RESULTS / "prefill_trn2.json").read_text())
DECODE: dict[str, Any] = json.loads((RESULTS / "decode_trn2.json").read_text())
NAMES = {  # of the models in docs/decode.md
    "gpt-oss-120b": "GPT-OSS-120B, TP 8", "gpt-oss-20b": "GPT-OSS-20B, TP 8",
    "llama4-scout": "Llama 4 Scout, TP 16", "llama4-maverick": "Llama 4 Maverick, TP 64",
    "qwen3-30b": "Qwen3-30B-A3B, TP 8", "deepseek-v3": "DeepSeek-V3, TP 16",
    "mixtral-8x7b": "Mixtral 8x7B, TP 8",
}  # fmt: skip


def figures(result: dict[str, Any], corner: str, layout: str) -> dict[str, Any]:
    (found,) = (
        one for one in result["by_corner"] if (one["corner"], one["layout"]) == (corner, layout)
    )
    return dict(found)


def of_both(result: dict[str, Any]) -> Iterator[str]:
    """Yield what README says of either benchmark, in its words."""
    kind, order = (figures(result, corner, "plain") for corner in ("vendor", "in-order"))
    least = min(kind["least_speedup"], order["least_speedup"])
    largest = max(kind["largest_speedup"], order["largest_speedup"])
    yield (
        f"expected about {kind['geometric_mean_speedup']:.1f} x as fast, range {least:.2f} to"
        f" {largest:.1f}; geometric mean {kind['geometric_mean_speedup']:.2f} in"
    )
    yield f"({kind['rows_below_1'] or 'no'} cases below 1"
    yield f"{order['geometric_mean_speedup']:.2f} in order"
    kind, order = (figures(result, corner, "packed") for corner in ("vendor", "in-order"))
    yield (
        f"{kind['geometric_mean_speedup']:.2f} in the vendor's corner (least"
        f" {kind['least_speedup']:.2f}), {order['geometric_mean_speedup']:.2f} in order (least"
        f" {order['least_speedup']:.2f})"
    )
    yield from (of_range(result, corner) for corner in ("vendor", "in-order"))


def of_range(result: dict[str, Any], corner: str) -> str:
    """Return what README says of the coefficients at half to double."""
    plain, packed = (figures(result, corner, layout) for layout in ("plain", "packed"))
    parts = [
        f"{one['geometric_mean_low']:.2f} to {one['geometric_mean_high']:.2f} of"
        f" {one['geometric_mean_of_these']:.2f} (least {one['least_low']:.2f})"
        for one in (plain, packed)
    ]
    where = {"vendor": "vendor's corner", "in-order": "in order"}[corner]
    return f"{where}, {plain['rows_with_range']} cases: {parts[0]}, packed {parts[1]}"


def of_prefill() -> Iterator[str]:
    yield from of_both(PREFILL)
    kind, order = (figures(PREFILL, corner, "plain") for corner in ("vendor", "in-order"))
    yield f"where it is a kernel of the library ({kind['rows_deployed']} cases)"
    yield (
        f"{kind['geometric_mean_deployed']:.1f} x in the vendor's corner,"
        f" {order['geometric_mean_deployed']:.1f} x in order"
    )
    shares = [
        row["roofline_share"]
        for row in PREFILL["rows"]
        if (row["T"], row["layout"], row["corner"]) == (8192, "packed", "in-order")
    ]
    yield f"share of the roofline, {len(shares)} cases | {min(shares):.0%} ".replace("%", " %")


def of_decode() -> Iterator[str]:
    yield from of_both(DECODE)
    spans = []
    for kernel in ("decode_moe", "decode_block"):
        for corner in ("vendor", "in-order"):
            shares = [
                row["bound_share"]
                for row in DECODE["rows"]
                if (row["kernel"], row["corner"]) == (kernel, corner)
                and (row["format"], row["layout"]) == ("bf16", "packed")
                and row["B"] >= 16
            ]
            spans.append(f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %")
    yield (
        f"{spans[0]} in the vendor's corner, {spans[1]} in order; the fused layer {spans[2]},"
        f" {spans[3]}"
    )
    gains = {
        corner: [
            row["fp8_gain"]
            for row in DECODE["rows"]
            if (row["corner"], row["layout"], row["format"]) == (corner, "packed", "fp8")
            and row["is_weight_bound"]
        ]
        for corner in ("vendor", "in-order")
    }
    both = [gain for corner in gains for gain in gains[corner]]
    enough = [sum(gain >= 1.6 for gain in found) for found in gains.values()]
    yield (
        f"{len(both) // 2} cases | {min(both):.1f} to {max(both):.1f} x as fast; at least 1.6 x"
        f" in {enough[0]} of them (vendor's corner), {enough[1]} (in order)"
    )


def test_docs_say_of_prefill_what_the_results_say() -> None:
    means = {
        (one["corner"], one["layout"]): f"{one['geometric_mean_speedup']:.2f}"
        for one in PREFILL["by_corner"]
    }
    assert (
        f"{means['vendor', 'plain']} and {means['vendor', 'packed']} times as fast in the corner"
        f" that favours the vendor, {means['in-order', 'plain']} and"
        f" {means['in-order', 'packed']} times"
    ) in " ".join((ROOT / "docs" / "kernels.md").read_text().split())


@pytest.mark.parametrize("claim", [*of_prefill(), *of_decode()])
def test_readme_says_what_the_results_say(claim: str) -> None:
    assert claim in (ROOT / "README.md").read_text()


def cells(model: str) -> Iterator[str]:
    """Yield the cells of a model in the table of docs/decode.md."""
    rows = {
        (row["B"], row["format"]): row
        for row in DECODE["rows"]
        if (row["kernel"], row["model"], row["routing"]) == ("decode_moe", model, "uniform")
        and (row["corner"], row["layout"]) == ("in-order", "packed")
    }
    for B in (1, 16, 64, 128):
        for format in ("bf16", "fp8"):
            row = rows[B, format]
            us = f"{row['ours_us']:.1f}" if row["ours_us"] < 100 else f"{row['ours_us']:.0f}"
            yield f"{us} ({100 * row['bound_share']:.0f} %)"


@pytest.mark.parametrize("model", NAMES)
def test_the_table_of_decode_times_is_that_of_the_results(model: str) -> None:
    assert f"| {NAMES[model]} | {' | '.join(cells(model))} |" in (
        (ROOT / "docs" / "decode.md").read_text()
    )


def test_the_results_are_complete() -> None:
    """Every row has both sides, in both corners and layouts; a range holds its ratio."""
    for result, count in ((PREFILL, 252), (DECODE, 1120)):
        assert len(result["rows"]) == count
        assert {(row["corner"], row["layout"]) for row in result["rows"]} == {
            (corner, layout) for corner in ("vendor", "in-order") for layout in ("plain", "packed")
        }
        for row in result["rows"]:
            where = [row[name] for name in ("model", "corner", "layout")]
            assert None not in (row["ours_us"], row["vendor_us"], row["speedup_low"]), where
            assert row["speedup_low"] <= row["speedup"] + 1e-4, where
            assert row["speedup_high"] >= row["speedup"] - 1e-4, where


def test_the_decode_page_states_what_the_mx_result_says() -> None:
    result = json.loads((RESULTS / "mx_decode_trn3.json").read_text())
    kind, order = (result["by_corner"][corner] for corner in ("vendor", "in-order"))
    kinds = {name: len(fields) for name, fields in result["coefficients"].items()}
    page = " ".join((ROOT / "docs" / "decode.md").read_text().split())
    stated = (
        f"geometric mean {kind['geometric_mean']:.2f} times as fast in the vendor's corner and"
        f" {order['geometric_mean']:.2f} in order, over {kind['compared']} cases of"
        f" {kind['cases']}",
        f"least {min(kind['least'], order['least']):.2f}",
        f"{kinds['assumed']} of {sum(kinds.values())} coefficients are assumed",
    )
    assert [text for text in stated if text not in page] == []
