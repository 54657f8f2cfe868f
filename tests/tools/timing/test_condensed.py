"""Condensed results: what comes back is what was put in, but for digits and printed columns."""

import json
from pathlib import Path
from typing import Any

import pytest

from neuron_moe.tools.timing.condensed import LONG, PRINTED_ONLY, condense, expand
from neuron_moe.tools.timing.sources import read_result

ATTEMPT = {"name": "selective", "us": 12.5, "why": ""}
FAILED = {"name": "all_experts", "us": None, "why": "needs 13 us at least"}
RECORDS = [
    {
        "model": "gpt-oss-20b",
        "T": 128 * number,
        "ours_us": number + 0.25,
        "parts": {"router": number % 2},
        "attempts": [ATTEMPT, FAILED][: number % 3],
    }
    for number in range(LONG)
]


def condensed(value: dict[str, Any]) -> dict[str, Any]:
    """Return a result as it is read back."""
    return expand(json.loads(condense(value)))


@pytest.mark.parametrize("rows", [RECORDS, RECORDS[:2], [], [1, 2]])
def test_every_value_comes_back(rows: list[Any]) -> None:
    result = {"kind": "simulated", "rows": rows, "by_layout": {"plain": 1.5}}
    assert condensed(result) == result


def test_condensing_again_changes_nothing() -> None:
    text = condense({"rows": RECORDS})
    assert condense(json.loads(text)) == text


def test_each_row_is_a_line_and_each_name_stands_once() -> None:
    text = condense({"rows": RECORDS})
    assert text.count("gpt-oss-20b") == text.count("needs 13 us at least") == 1
    assert sum(line.startswith("[") for line in text.splitlines()) == LONG


def test_floats_keep_seven_digits() -> None:
    rows = [{"us": 1509.49849 + number} for number in range(LONG)]
    assert condensed({"rows": rows})["rows"][0] == {"us": 1509.498}


def test_what_is_only_printed_is_left_out() -> None:
    rows = [record | dict.fromkeys(PRINTED_ONLY, "dma busy") for record in RECORDS]
    assert condensed({"rows": rows}) == {"rows": RECORDS}


def test_a_benchmark_reads_a_condensed_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(condense({"rows": RECORDS, "sources": {}}))
    assert read_result(path, "--resume", ("rows", "sources"))["rows"] == RECORDS
