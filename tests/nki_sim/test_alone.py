"""The simulator without torch and the rest of the project: its command line, and its fixture."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_sim import SimOptions
from nki_sim.__main__ import main

KERNELS = """\
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def double(x, factor=2.0):
    tile = nl.ndarray(x.shape, x.dtype)
    nisa.dma_copy(tile, x)
    nisa.tensor_scalar(tile, tile, nl.multiply, factor)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, tile)
    return out


@nki.jit
def careless(x):
    tile = nl.ndarray(x.shape, x.dtype)
    if tile[0, 0]:
        nisa.dma_copy(tile, x)
    return x
"""


PACKAGE = Path(nki_sim.__file__).parent


def test_what_the_readme_of_the_package_shows_runs(tmp_path: Path) -> None:
    shown = tmp_path / "readme.py"
    code = (PACKAGE / "README.md").read_text().split("```python\n")[1].split("```")[0]
    shown.write_text(code)
    done = subprocess.run([sys.executable, shown], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{2.0 * 128 * 512}\n[]\ntrn2, simulated\n")


def test_the_package_names_each_of_its_folders() -> None:
    content = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
    found = [path.parent for path in PACKAGE.rglob("__init__.py")]
    folders = [each for each in found if PACKAGE / "build" not in each.parents]  # pip left it
    names = {".".join(["nki_sim", *path.relative_to(PACKAGE).parts]) for path in folders}
    assert set(content["tool"]["setuptools"]["packages"]) == names
    plugins = content["project"]["entry-points"]["pytest11"]
    assert plugins == {"nki_sim.pytest_plugin": "nki_sim.pytest_plugin"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    np.save(tmp_path / "x.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    return path


def test_importing_it_brings_neither_torch_nor_the_rest_of_the_project() -> None:
    code = (
        "import sys, json, nki_sim, nki_sim.__main__, nki_sim.pytest_plugin, nki_sim.testing\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(found.stdout))
    assert "nki_sim" in loaded
    assert not loaded & {"torch", "neuron_moe", "nki_kernels", "transformers", "matplotlib", "jax"}


def test_run_prints_and_keeps_what_a_kernel_returns(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = file.with_name("out.npz")
    words = [f"{file}:double", str(file.with_name("x.npy")), "factor=3.0", "--save", str(saved)]
    assert main(["run", *words]) == 0
    assert "output [2, 3] float32\n[[ 0.  3.  6.]" in capsys.readouterr().out
    assert np.array_equal(np.load(saved)["output"], 3 * np.arange(6).reshape(2, 3))


def test_run_tells_of_findings(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", f"{file}:double", "4x4:float32", "factor=1e300"]) == 0
    assert f"{file}:10: finding overflow: " in capsys.readouterr().out


def test_run_ends_with_the_line_that_breaks_a_rule(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", f"{file}:careless", "4x4:float32"]) == 1
    said, error = capsys.readouterr()
    assert said.startswith(f"{file}:19:8: error NKI038")
    assert f"{file}:19: " in error
    assert "expected a condition known at compile time" in error


def test_lint_names_the_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(file)]) == 1
    assert capsys.readouterr().out.startswith(f"{file}:19:8: error NKI038")


def test_profile_prints_the_time(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = file.with_name("trace.json")
    words = [f"{file}:double", "128x512:float32", "--target", "trn3", "--perfetto", str(trace)]
    assert main(["profile", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("trn3, simulated\n  total time")
    assert "kernels.py:9  dma_copy" in out
    assert json.loads(trace.read_text())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["run", "FILE:doubel"], "no kernel 'doubel'. Did you mean double?"),
        (["run", "FILE:double"], "missing a required argument: 'x'"),
        (["profile", "none.py:double"], "no such file. Give FILE.py:NAME"),
    ],
)
def test_a_wrong_command_says_what_to_write(
    words: list[str], text: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("FILE", str(file)) for word in words]) == 1
    assert text in capsys.readouterr().err


TEST = """\
import numpy as np
from kernels import double, careless

X = np.ones((4, 4), np.float32)

def test_right(nki_run):
    assert (nki_run(double, X).outputs == 2).all()

def test_finding(nki_run):
    nki_run(double, X * 3e38)

def test_allowed(nki_run):
    nki_run(double, X * 3e38, allow={"overflow"})

def test_wrong(nki_run):
    nki_run(careless, X)
"""


def test_the_fixture_runs_kernels_and_fails_on_findings(file: Path) -> None:
    file.with_name("test_kernels.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "nki_sim.pytest_plugin"]
    found = subprocess.run(
        [*command, "--rootdir", ".", "-p", "no:cacheprovider"],
        cwd=file.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 failed, 2 passed" in found.stdout
    assert "overflow: 16 of 16 values become infinite in float32" in found.stdout
    assert "condition known at compile time" in found.stdout


pytest_plugins = ["nki_sim.pytest_plugin"]


def test_the_fixture_takes_options(nki_run: Callable[..., Any], file: Path) -> None:
    def kernel(x: Any) -> Any:
        return x

    run = nki_run(kernel, np.ones((2, 2), np.float32), options=SimOptions(mode="indices"), lnc=2)
    assert run.options.mode == "indices"
    assert len(run.machine.cores) == 2
