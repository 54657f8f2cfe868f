"""From the SDK to a time on a chip, against a stub of the SDK: each step, each failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nki_kernels.provided  # noqa: F401  answers to `import nki`
from lab.chip import neuron, worker
from lab.chip.check import _START
from lab.chip.device import Job
from tests.rows import thinned

STUB = Path(__file__).parent / "sdk_stub"
ROOT = Path(__file__).parents[3]
CASE = "small/index"


def run(tmp_path: Path, *command: str, fails: str = "") -> tuple[subprocess.CompletedProcess, Any]:
    """Run Python where the stub is installed; return the process and what the stub was asked."""
    log = tmp_path / "log"
    log.touch()
    environment = {
        **os.environ,
        "PYTHONPATH": f"{STUB}{os.pathsep}{ROOT}",
        "SDK_STUB_LOG": str(log),
        "SDK_STUB_FAILS": fails,
        "NKI_ARTIFACTS_DIR": str(tmp_path / "artifacts"),
    }
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=tmp_path, text=True, capture_output=True
    )
    return done, [json.loads(line) for line in log.read_text().splitlines()]


def row_of(tmp_path: Path, fails: str = "") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a case of the check on the stub; return its row, and what the stub was asked."""
    path = tmp_path / "row.json"
    start = _START.format(force=False)
    done, notes = run(tmp_path, "-c", start, CASE, "neuron", str(path), fails=fails)
    assert path.is_file(), done.stdout + done.stderr
    return json.loads(path.read_text()), notes


def test_a_kernel_is_compiled_once_then_loaded_and_timed_by_the_device(tmp_path: Path) -> None:
    row, notes = row_of(tmp_path)
    assert (row["compiled"], row["right"], row["why"]) == (True, True, "")
    assert 5.0 < row["us"] < 100.0
    mine = [one for one in notes if one.get("kernel") == "index_blocks"]
    assert [one["step"] for one in mine[:3]] == ["compile", "execute", "load"]
    assert {one["step"] for one in mine[3:]} == {"benchmark"}
    assert {one["mode"] for one in mine[3:]} == {"device"}
    assert (mine[0]["lnc"], mine[0]["variable"]) == (2, "2")
    assert [one["name"] for one in notes if one["step"] == "copy"] == ["index_TK"]
    # Two kernels: the case's and the empty one, whose time is that of a launch.
    assert [one["kernel"] for one in notes if one["step"] == "compile"] == [
        "index_blocks",
        "nothing",
    ]


class Lazy:
    """A kernel that notes its launches; `[cores]` gives itself."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def __getitem__(self, cores: int) -> Lazy:
        self._notes.append(f"LNC {cores}")
        return self

    def __call__(self, x: Any) -> Any:
        self._notes.append("launch")
        return x + 1


def test_two_launches_are_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    model = types.ModuleType("torch_xla.core.xla_model")
    model.xla_device = lambda: "cpu"  # type: ignore[attr-defined]
    model.mark_step = lambda: notes.append("end of graph")  # type: ignore[attr-defined]
    core = types.ModuleType("torch_xla.core")
    core.xla_model = model  # type: ignore[attr-defined]
    for name, module in (("torch_xla", types.ModuleType("torch_xla")), ("torch_xla.core", core)):
        monkeypatch.setitem(sys.modules, name, module)
    x = np.zeros((2, 3), np.float32)
    job = Job(name="", kernel=Lazy(notes), arguments=(x,), options={}, cores=2, launches=2)
    assert (neuron._in_one_graph(job) == 2).all()
    assert notes == ["LNC 2", "launch"] * 2 + ["end of graph"]
    assert (x == 0).all()


def test_without_torch_xla_two_launches_have_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chip:
        name, kind = "neuron", "measured"
        load = staticmethod(neuron._in_one_graph)

    monkeypatch.setitem(sys.modules, "torch_xla", None)
    monkeypatch.setattr(worker, "find_device", lambda against: Chip())
    feature = "two launches in a program"
    row = worker._run(feature, "neuron", "", worker.Stage(tmp_path / "row.stage"))
    assert (row["compiled"], row["right"]) == (None, None)
    assert row["why"].startswith(f"not tried: {feature}: ")
    assert row["why"].endswith("needs torch and torch_xla.")


@pytest.mark.long
@pytest.mark.parametrize(("feature", "cores"), [("skipped rows", 2), ("launches on one core", 1)])
def test_a_probe_runs_on_the_cores_it_is_for(feature: str, cores: int, tmp_path: Path) -> None:
    path = tmp_path / "row.json"
    _, notes = run(tmp_path, "-c", _START.format(force=False), feature, "neuron", str(path))
    assert json.loads(path.read_text())["right"]
    (compiled,) = [one for one in notes if one["step"] == "compile"]
    assert (compiled["lnc"], compiled["variable"]) == (cores, str(cores))


FAILURES = {
    "compile": (False, "does not compile: compiling index_blocks: RuntimeError: NCC_STUB001"),
    "execute": (False, "does not compile: compiling index_blocks: RuntimeError: NCC_STUB001"),
    "keep": (False, "does not compile: compiling index_blocks: RuntimeError: NKI_ARTIFACTS_DIR="),
    "load": (False, "does not compile: compiling index_blocks: RuntimeError: NCC_STUB001"),
    "copy": (False, "does not compile: compiling index_blocks: RuntimeError: NCC_STUB001"),
    "benchmark": (True, "fails while timing index_blocks: RuntimeError: NCC_STUB001"),
}


@pytest.mark.long
@pytest.mark.parametrize("step", thinned(FAILURES, 3, pytest.mark.slow))
def test_a_step_that_fails_is_one_sentence(step: str, tmp_path: Path) -> None:
    compiled, words = FAILURES[step]
    row, _ = row_of(tmp_path, step)
    assert (row["compiled"], row["right"], row["us"]) == (compiled, False, None)
    assert row["why"].startswith(words), row["why"]


@pytest.mark.slow
def test_a_calibration_runs_whole_where_the_sdk_is(tmp_path: Path) -> None:
    result = tmp_path / "measured.json"
    arguments = ["chip", "calibrate", "--rounds", "20", "--json", str(result)]
    done, notes = run(tmp_path, "-m", "neuron_moe.tools.cli", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(result.read_text())
    assert (found["kind"], found["device"]) == ("measured", "neuron")
    steps = [one["step"] for one in notes]
    assert steps.count("load") == steps.count("compile")
    for one in found["held_out"]:
        assert one["predicted_us"] == pytest.approx(one["true_us"], rel=0.05)
    launch = found["coefficients"]["launch_ns"]
    assert launch["low"] <= 9000.0 <= launch["high"]
