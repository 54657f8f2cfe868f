"""The page docs/first_kernel.md, step by step."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nki_sim
from nki_sim.__main__ import main

PAGE = (Path(__file__).parents[2] / "docs" / "first_kernel.md").read_text()
KERNEL, TEST = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


pytest_plugins = ["nki_sim.pytest_plugin"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_kernels.py").write_text(KERNEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def page_test(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return the test of the page, on the kernel that is in the folder now."""

    def run(nki_run: Any) -> None:
        monkeypatch.delitem(sys.modules, "my_kernels", raising=False)
        importlib.invalidate_caches()
        names: dict[str, Any] = {}
        exec(TEST, names)
        names["test_softmax"](nki_run)

    return run


def test_the_kernel_is_right_and_the_mistake_is_told(
    folder: Path, page_test: Callable[..., None], nki_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    page_test(nki_run)
    wrong = re.sub(r" +nisa\.tensor_reduce.*\n", "", KERNEL)
    (folder / "my_kernels.py").write_text(wrong)
    shown = r"my_kernels\.py:14: activation_reduce: bias"
    with pytest.raises(nki_sim.UninitializedRead, match=shown):
        page_test(nki_run)


def test_the_slowest_line_is_that_of_the_page_and_its_cure_halves_the_time(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times, slowest = [], []
    for command in re.findall(r"`nki-sim (profile [^`]*)`", PAGE):
        assert main(command.split()) == 0
        said = capsys.readouterr().out
        times.append(float(re.search(r"total time +([\d.]+) us", said)[1]))  # type: ignore[index]
        slowest.append(re.search(r"% +[\d.]+ us  my_kernels.py:(\d+) ", said)[1])  # type: ignore[index]
    assert slowest == ["11", "13"]
    assert times[1] < times[0] / 2
    assert times == [float(us) for us in re.findall(r"total time +([\d.]+) us", PAGE)]
    assert main(["lint", "my_kernels.py"]) == 0
