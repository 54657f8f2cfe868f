"""docs/profiling.md does what it says: kernels in a file, commands run, text printed."""

import re
import shlex
from pathlib import Path

import pytest

from neuron_moe.tools.cli import main

PAGE = (Path(__file__).parents[3] / "docs" / "profiling.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    (folder / "sums.py").write_text("\n\n".join(blocks("python")), encoding="utf-8")
    return folder


@pytest.mark.parametrize("number", [0, 1])
def test_the_commands_print_what_the_page_shows(
    number: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    command = shlex.split(blocks("sh")[number])
    assert main(command[1:]) == 0
    printed = capsys.readouterr().out
    assert number or printed == blocks("text")[0]
    assert "total time" in printed
    name = command[3].rpartition(":")[2]
    assert (folder / "pictures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert f"sums.py:{(11, 25)[number]}" in (
        folder / "pictures" / f"{name}.perfetto.json"
    ).read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_the_commands_of_a_layer_run(
    number: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    layer = [line for block in blocks("sh") for line in block.splitlines() if "--model" in line]
    assert main(shlex.split(layer[number])[1:]) == 0
    text = capsys.readouterr().out
    assert ("decode_layer", "prefill_layer")[number] + " on trn2, simulated" in text
    assert max(map(len, text.splitlines()[:-1])) <= 80
