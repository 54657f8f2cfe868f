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


def test_a_file_of_a_checkpoint_is_told_from_its_folder(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.touch()
    with pytest.raises(FileNotFoundError, match=rf"is a file.* Pass the folder .*: {tmp_path}$"):
        shipped.checkpoint_folder(weights)


def test_a_configuration_without_weights_is_told_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="gpt_oss_120b the configuration is shipped"):
        shipped.checkpoint_folder("gpt-oss-120b")
