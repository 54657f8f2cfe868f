"""Published times lie in the two corners of the clock, or outside for a reason that is stated.

The long ones run with -m slow; all need a checkout of the vendor's library.
"""

import json
import os
from pathlib import Path

import pytest

from lab.bench.anchors.models import (
    ANCHORS,
    DEEPSEEK,
    QWEN35,
    Anchor,
    Outcome,
    judge,
    main,
    mean_error,
    measure,
    table,
)
from neuron_moe.tools.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.cli import main as run_command

LIBRARY = os.environ.get("NKI_LIBRARY_PATH", "")
NEEDS_LIBRARY = pytest.mark.skipif(
    not LIBRARY, reason="NKI_LIBRARY_PATH names no checkout of nki-library"
)
ABOVE = 1.02  # what is not counted may lift a published time over both corners


def parameters() -> list[object]:
    marks = {True: [pytest.mark.slow, NEEDS_LIBRARY], False: [NEEDS_LIBRARY]}
    return [
        pytest.param(
            anchor, marks=marks["TTFT" in anchor.name or "32768" in anchor.name], id=anchor.name
        )
        for anchor in ANCHORS
    ]


@pytest.mark.parametrize("anchor", parameters())
def test_a_published_time_lies_inside_or_just_above_the_corners(anchor: Anchor) -> None:
    outcome = measure(anchor, VendorLibrary(Path(LIBRARY)))
    assert outcome.vendor_us <= 1.02 * outcome.in_order_us
    assert outcome.lies != "below"
    assert outcome.published_us <= ABOVE * outcome.in_order_us or outcome.limit == "at most"
    assert 0.0 < outcome.rest_us < 0.25 * anchor.published_us
    if outcome.reuse == "early":  # with tiles further apart the norms would be far too fast
        assert outcome.other_us < 0.85 * anchor.published_us


@NEEDS_LIBRARY
def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_command(["bench", "anchors", "--library", LIBRARY, "--only", "160 x 16384", "--json"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "quantising norm 160 x 16384" in printed
    last = json.loads(printed.splitlines()[-1])
    assert [row["published_us"] for row in last["rows"]] == [86.0]


def test_the_command_needs_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NKI_LIBRARY_PATH", raising=False)
    with pytest.raises(ValueError, match="--library: name a checkout"):
        main([])


def test_there_are_enough_independent_anchors() -> None:
    assert len(ANCHORS) >= 6
    assert len({anchor.name for anchor in ANCHORS}) == len(ANCHORS)
    assert len({anchor.source.split("(")[0].split(",")[0] for anchor in ANCHORS}) >= 3
    assert all(anchor.source and anchor.published_us > 0.0 for anchor in ANCHORS)
    assert all(anchor.reason for anchor in ANCHORS)


@pytest.mark.parametrize(
    ("limit", "vendor", "in_order", "expected"),
    [
        ("total", 80.0, 120.0, ("inside", "vendor")),
        ("total", 110.0, 120.0, ("below", "vendor")),
        ("total", 60.0, 90.0, ("above", "in-order")),
        ("between", 60.0, 130.0, ("inside", "in-order")),
        ("between", 60.0, 90.0, ("above", "in-order")),
        ("at most", 60.0, 130.0, ("inside", "in-order")),
        ("at most", 110.0, 130.0, ("below", "vendor")),
    ],
)
def test_where_a_time_lies(
    limit: str, vendor: float, in_order: float, expected: tuple[str, str]
) -> None:
    lies, better, error = judge(limit, 100.0, vendor, in_order)
    assert (lies, better) == expected
    assert error == pytest.approx((vendor if better == "vendor" else in_order) / 100.0 - 1.0)


def outcome(limit: str, error: float) -> Outcome:
    return Outcome(
        name="n",
        source="s",
        limit=limit,
        published_us=100.0,
        vendor_us=90.0,
        in_order_us=120.0,
        other_us=130.0,
        rest_us=5.0,
        reuse="late",
        lies="inside",
        better="vendor",
        error=error,
        reason="because",
    )


def test_bounds_do_not_count_for_the_mean_error() -> None:
    bounds = [outcome("at most", 0.9), outcome("between", 0.4)]
    assert mean_error([outcome("total", -0.1), *bounds]) == pytest.approx(0.1)
    assert mean_error([]) == 0.0


def test_fewer_tokens_than_experts_leave_the_routing_open() -> None:
    """Which experts have a block depends on the padding, unless every one of them has."""
    for anchor in ANCHORS:
        if "TTFT" in anchor.name:
            few = any(f"shard on I, {tokens} tokens" in anchor.name for tokens in (16, 64))
            assert (anchor.most is not None) == (anchor.limit == "between") == few


def test_the_table_names_the_sources_and_the_reasons() -> None:
    text = table([outcome("at most", 0.1)])
    assert "<= 0.100" in text
    assert "n: s; because" in text


def test_the_rest_of_a_layer_grows_with_tokens() -> None:
    for layers in (DEEPSEEK, QWEN35):
        assert 10.0 < layers.rest_us(1) < layers.rest_us(512)
