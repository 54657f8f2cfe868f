"""Where `--model` looks."""

from pathlib import Path

import pytest

from neuron_moe.models import shipped


def test_a_folder_wins_over_the_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(shipped.TINY_NAME).mkdir()
    assert shipped.checkpoint_folder(shipped.TINY_NAME) == Path(shipped.TINY_NAME)


def test_the_shipped_checkpoint_goes_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shipped, "shipped_checkpoint", lambda: tmp_path / "there")
    assert shipped.checkpoint_folder(shipped.TINY_NAME) == tmp_path / "there"
    with pytest.raises(FileNotFoundError, match=r"model=elsewhere.*tiny_gpt_oss, which is ship"):
        shipped.checkpoint_folder("elsewhere")


def test_without_a_shipped_checkpoint_its_name_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shipped, "shipped_checkpoint", lambda: None)
    with pytest.raises(FileNotFoundError, match="model=tiny_gpt_oss: there is no such folder"):
        shipped.checkpoint_folder(shipped.TINY_NAME)
