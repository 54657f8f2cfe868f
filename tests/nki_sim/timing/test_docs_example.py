"""The documentation page does what it says, tried as a reader would: copied into a file and run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "nki_sim.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("reader")
    (folder / "example.py").write_text("".join(blocks("python")), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


def test_the_examples_print_what_the_page_shows(output: tuple[str, Path]) -> None:
    assert output[0] == "".join(blocks("text"))


def test_the_example_draws_the_picture(output: tuple[str, Path]) -> None:
    assert (output[1] / "exp.png").read_bytes().startswith(b"\x89PNG")
