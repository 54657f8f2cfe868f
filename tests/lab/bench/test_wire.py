"""neuron-moe bench wire: counted, computed and carried bytes agree."""

import json
from pathlib import Path

import pytest

from neuron_moe.tools import cli


@pytest.mark.long
def test_counted_and_carried_bytes_are_those_of_the_formulas(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "wire.png"
    args = ["bench", "wire", "--ranks", "2", "--tokens", "256", "--picture", str(picture), "--json"]
    assert cli.main(args) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["kind"] == "measured"
    rows = {(row["ep"], row["way"]): row for row in report["rows"]}
    assert len(rows) == 2 * 4
    for (_, way), row in rows.items():
        sampling = (
            0.05 if way == "all-to-all" else 0.001
        )  # which ranks 256 tokens happen to work tile
        assert row["counted_bytes"] == pytest.approx(row["formula_bytes"], rel=sampling)
    even = rows[2, "all-reduce"]
    assert even["socket_bytes"] == pytest.approx(even["counted_bytes"], rel=0.02)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_ranks_that_do_not_divide_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "wire", "--ranks", "3"]) == 2
    assert "Use 2, 4 or 8 ranks" in capsys.readouterr().err
