"""neuron-moe bench ranks: a layer on all ranks, their sum inside its launch beside after it."""

import json

import pytest

from neuron_moe.tools import cli
from neuron_moe.tools.bench.layer.work import RANKS


def rows_of(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, object]]:
    args = ["bench", "ranks", "--models", "qwen3_30b_a3b", *options, "--json"]
    assert cli.main(args) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["kind"] == "simulated, collectives computed"
    rows: list[dict[str, object]] = report["rows"]
    return rows


@pytest.mark.parametrize("split", ["TP8", "EP8"])
def test_a_sum_on_chip_takes_what_the_collective_takes(
    capsys: pytest.CaptureFixture[str], split: str
) -> None:
    rows = rows_of(capsys, "--splits", split, "--phases", "decode", "--tokens", "4")
    assert [row["corner"] for row in rows] == ["vendor", "in-order"]
    for row in rows:
        after = row["launch_us"] + row["collective_us"]  # type: ignore[operator]
        assert row["inside_us"]["1"] == pytest.approx(after, abs=1.0)  # type: ignore[index]


@pytest.mark.long
def test_chunks_of_a_prefill_are_added_up_under_the_next_ones_sum(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--splits", "TP8", "--phases", "prefill", "--tokens", "2048")
    for row in rows_of(capsys, *options, "--chunks", "1", "4"):
        inside = row["inside_us"]
        assert inside["4"] < inside["1"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tokens", "0"), "must be positive"),
        (("--phases", "prefill", "--tokens", "40000"), "several launches"),
        (("--phases", "prefill", "--tokens", "300", "--chunks", "2"), "must divide the 1 tiles"),
        (
            ("--phases", "decode", "--tokens", "3", "--collective", "reduce_scatter"),
            f"{RANKS} ranks",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert cli.main(["bench", "ranks", "--models", "qwen3_30b_a3b", *options]) == 2
    assert message in capsys.readouterr().err
