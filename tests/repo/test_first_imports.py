"""Every module can be the first of ours that a process imports."""

import json
import os
import subprocess
import sys

import pytest

from tests.repo import source

OPTIONAL = ("vllm", "prometheus_client", "torchtitan")  # of an environment of its own
# Stand behind `nki_kernels.provided`, which every room of kernels imports, or the vendor's package.
BEHIND_NKI = ("nki_kernels.common.", "lab.chip.neuron")
HEAVY = "numpy, ml_dtypes, torch, matplotlib.pyplot"  # of others, imported once for all
# Each import in a process of its own, forked from one that has imported the packages' faces, which
# Python imports before any module inside.
CODE = f"""
import json, os, sys, importlib
import {HEAVY}
import neuron_moe, nki_kernels, nki_sim
wrong = {{}}
for name in json.load(sys.stdin):
    read, write = os.pipe()
    if not os.fork():
        try:
            importlib.import_module(name)
        except BaseException as error:
            os.write(write, f"{{type(error).__name__}}: {{error}}"[:300].encode())
        os._exit(0)
    os.close(write)
    os.wait()
    if found := os.read(read, 300).decode():
        wrong[name] = found
    os.close(read)
json.dump(wrong, sys.stdout)
"""


def _names(*packages: str) -> list[str]:
    inside = ("models", "serving", "tools")
    return [
        f"neuron_moe.{module.name}" if package in inside else module.name
        for package in packages
        for module in source.modules(package)
        if not module.name.endswith("__main__")
    ]


def _failures(names: list[str]) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found: dict[str, str] = json.loads(done.stdout)
    missing = [f"ModuleNotFoundError: No module named '{name}" for name in OPTIONAL]
    without_nki = "ModuleNotFoundError: No module named 'nki'"
    return {
        name: why
        for name, why in found.items()
        if not why.startswith(tuple(missing))
        and not (name.startswith(BEHIND_NKI) and why == without_nki)
    }


@pytest.mark.parametrize(
    "every", [pytest.param(20, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("package", source.PACKAGES)
def test_every_module_can_be_imported_first(package: str, every: int) -> None:
    assert not _failures(_names(package)[::every])


@pytest.mark.long
def test_a_circle_of_imports_would_be_seen() -> None:
    assert "No module named" in _failures(["neuron_moe.nowhere"])["neuron_moe.nowhere"]
