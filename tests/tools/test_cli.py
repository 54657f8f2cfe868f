"""neuron-moe as a user calls it: exit status and where messages go."""

from pathlib import Path

import pytest

from neuron_moe.tools import cli


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generat"], "Did you mean 'generate'"),
        (["bench", "gpu"], "no target 'gpu'"),
        (["bench", "cpu", "--tokens", "0"], "--tokens=0"),
        (["inspect", "--model", "gpt_oss_20b", "--tp", "3"], "tp=3"),
        (["generate", "--model", "nowhere", "--prompt", "a"], "model=nowhere"),
    ],
    ids=["command", "target", "tokens", "tp", "folder"],
)
def test_a_wrong_call_ends_with_two_and_a_message(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(args) == 2
    assert words in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("a file")
    assert cli.main(["demo", "--out", str(tmp_path / "taken")]) == 2
    assert "taken" in capsys.readouterr().err
