"""neuron-moe bench ranks: a layer on all ranks, their sum inside its launch beside after it."""

import json

import pytest

from lab.bench.ranks import RANKS
from neuron_moe.tools import cli


def rows_of(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, object]]:
    args = ["bench", "ranks", "--models", "qwen3_30b_a3b", *options, "--json"]
    assert cli.main(args) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["kind"] == "simulated, collectives computed"
    rows: list[dict[str, object]] = report["rows"]
    return rows


@pytest.mark.parametrize("split", [pytest.param("TP8", marks=pytest.mark.long), "EP8"])
def test_a_sum_on_chip_takes_what_the_collective_takes_at_any_rate(
    capsys: pytest.CaptureFixture[str], split: str
) -> None:
    options = ("--splits", split, "--phases", "decode", "--tokens", "1")
    rows = rows_of(capsys, *options, "--link-rates", "1", "100")
    assert [row["link_rate"] for row in rows] == [1, 100]
    assert rows[0]["collective_us"] > rows[1]["collective_us"]  # type: ignore[operator]
    for row in rows:
        after = row["launch"]["us"] + row["collective_us"]  # type: ignore[index]
        assert row["inside"]["1"]["us"] == pytest.approx(after, abs=1.0)  # type: ignore[index]


@pytest.mark.slow
def test_portions_of_a_prefill_are_added_up_under_the_next_ones_sum(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--splits", "TP8", "--phases", "prefill", "--tokens", "1024")
    for row in rows_of(capsys, *options, "--portions", "1", "2"):
        inside = row["inside"]
        assert inside["2"]["us"] < inside["1"]["us"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tokens", "0"), "--tokens [0]: must be positive"),
        (("--link-rates", "128", "0"), "--link-rates [128.0, 0.0]: must be positive"),
        pytest.param(
            ("--phases", "prefill", "--tokens", "40000"), "several launches", marks=pytest.mark.long
        ),
        pytest.param(
            ("--phases", "prefill", "--tokens", "300", "--portions", "2"),
            "must divide the 1 tiles",
            marks=pytest.mark.long,
        ),
        (
            ("--phases", "decode", "--tokens", "3", "--collectives", "reduce_scatter"),
            f"{RANKS} ranks",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert cli.main(["bench", "ranks", "--models", "qwen3_30b_a3b", *options]) == 2
    assert message in capsys.readouterr().err
