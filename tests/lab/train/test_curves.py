"""Scripts that fine-tune the shipped tiny model beside transformers' experts."""

import json
from pathlib import Path

import pytest

from lab.train import curves, trainer

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # of two libraries


def test_every_way_has_the_same_losses_in_file_and_picture(tmp_path: Path) -> None:
    out, picture = tmp_path / "curves.json", tmp_path / "curves.png"
    assert curves.main(["--steps", "2", "--out", str(out), "--picture", str(picture)]) == 0
    losses = json.loads(out.read_text())["losses"]
    assert losses.keys() == curves.WAYS.keys()
    for found in losses.values():
        assert found == pytest.approx(losses["transformers"], abs=1e-5)
    assert picture.stat().st_size > 10_000


def test_the_trainer_prints_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for more in ([], ["--own-experts"]):
        assert trainer.main(["--steps", "2", "--batch", "1", *more]) == 0
        (line,) = (
            line for line in capsys.readouterr().out.splitlines() if line.startswith("losses")
        )
        found.append([float(each) for each in line.split()[1:]])
    assert len(found[0]) == 2
    assert found[0] == pytest.approx(found[1], abs=1e-5)
