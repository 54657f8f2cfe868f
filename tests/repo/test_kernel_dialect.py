"""Every kernel file keeps to the Python subset that the compiler reads."""

from pathlib import Path

import pytest

from nki_sim.linter import main

FOLDER = Path(__file__).parents[2] / "nki_kernels"
FILES = sorted(path.name for path in FOLDER.glob("*.py"))


def test_there_are_kernels() -> None:
    assert "router_topk.py" in FILES


@pytest.mark.parametrize("name", FILES)
def test_kernel_file_keeps_to_the_dialect(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--dialect", "house", str(FOLDER / name)])
    assert status == 0, capsys.readouterr().out


def test_the_dialect_test_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "kernel.py"
    bad.write_text("import nki\n\n\n@nki.jit\ndef kernel(x):\n    return [y for y in x]\n")
    assert main(["--dialect", "house", str(bad)]) == 1
