"""README and docs show what the committed results say, in tables that are generated from them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from neuron_moe.tools.timing.condensed import condense
from tests.repo.published import tables, written
from tests.repo.published.results import RESULTS, result, rows
from tests.repo.source import ROOT

WRITTEN = list(written())
KINDS = ("measured", "simulated", "computed")


def test_every_table_stands_on_one_page() -> None:
    assert sorted(name for _, name, _ in WRITTEN) == sorted(tables())


@pytest.mark.parametrize(("name", "text"), [(name, text) for _, name, text in WRITTEN])
def test_a_table_is_that_of_the_results(name: str, text: str) -> None:
    assert text == tables()[name], "make tables writes it anew"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_are_condensed(path: Path) -> None:
    assert path.read_text() == condense(json.loads(path.read_text())), "make tables condenses them"


def test_results_stay_small() -> None:
    assert sum(path.stat().st_size for path in RESULTS.iterdir()) < 500_000


def test_every_mark_is_closed() -> None:
    for page in {page for page, _, _ in WRITTEN}:
        text = page.read_text()
        marks = re.findall(r"<!-- ([\w-]+) -->", text)
        assert marks[1::2] == ["end"] * (len(marks) // 2), page.name
        assert "end" not in marks[::2], page.name


def test_what_was_measured_says_where_and_by_which_command() -> None:
    for row in rows("measured"):
        assert row["kind"] in KINDS, row
        assert row["machine"], row
        assert row["command"].startswith(("neuron-moe ", "pytest ")), row


def test_the_picture_in_readme_has_the_times_of_the_results() -> None:
    """It is of a step of GPT-OSS-20B, of either side's launch alone."""
    (row,) = rows(
        "decode_trn2",
        kernel="decode_block",
        model="gpt-oss-20b",
        B=16,
        routing="uniform",
        format="bf16",
        layout="plain",
    )
    picture = (ROOT / "docs" / "pictures" / "lanes.svg").read_text()
    drawn = re.findall(r'font-weight="600"[^>]*>([\d,]+) µs<', picture)
    own_us = result("decode_trn2")["overhead"]["us"]
    times = [row[side]["us"] - own_us for side in ("ours", "theirs")]
    assert drawn == [f"{us:.0f}" for us in times], "python -m lab.bench.decode.lanes draws it anew"


@pytest.mark.parametrize("name", ["prefill_trn2", "decode_trn2"])
def test_a_result_has_both_layouts_and_ranges(name: str) -> None:
    """Every row that has both sides has a ratio in its range, taken under one assumption."""
    found: list[dict[str, Any]] = result(name)["rows"]
    layouts = [row["layout"] for row in found]
    assert layouts.count("plain") == layouts.count("packed") > 0
    for row in found:
        ours, theirs, ratio = row["ours"], row["theirs"], row["ratio"]
        assert ours["low_us"] <= ours["us"] <= ours["high_us"]
        if theirs is not None:
            ends = [theirs[end] / ours[end] for end in ("low_us", "us", "high_us")]
            assert ratio["likely"] == pytest.approx(ends[1], rel=1e-5)
            assert ratio["low"] == pytest.approx(min(ends), rel=1e-5)


@pytest.mark.parametrize(("name", "count"), [("prefill", 126), ("decode", 560)])
def test_a_result_has_all_cases(name: str, count: int) -> None:
    assert len(rows(f"{name}_trn2")) == count


def test_the_planner_expects_about_what_is_simulated() -> None:
    """Of the experts of a rank of expert parallelism, both forms."""
    found = [row["planned_us"] / row["time"]["us"] for row in rows("ep_trn2")]
    assert sum(abs(ratio - 1.0) <= 0.15 for ratio in found) >= 0.9 * len(found) == 0.9 * 32
    assert max(abs(ratio - 1.0) for ratio in found) < 0.17
