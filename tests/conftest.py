"""Fixed seeds for every test; nothing here changes what a test asserts."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ranks import cuda_devices

os.environ.setdefault(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
)  # to ask must not start CUDA: ranks fork
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # it counts when triton is imported, which torch may do

HAS_GPU = cuda_devices() > 0
ALONE = "NEURON_MOE_TEST_ALONE"
RANKS_ALONE = "NEURON_MOE_TEST_RANKS_ALONE"  # requests it without a GPU, too


# Kernels on the simulator beside float64 and torch; more carry the mark `numeric` themselves.
NUMERIC = (
    "tests/nki_kernels/combine/",
    "tests/nki_kernels/route/",
    "tests/nki_kernels/decode/test_router.py",
    "tests/neuron_moe/test_nki_backend.py",
    "tests/golden/test_layers.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests whose bits rest on how numbers are added."""
    for item in items:
        if item.nodeid.startswith(NUMERIC):
            item.add_marker(pytest.mark.numeric)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Where there is a GPU, run a test that forks ranks in a process of its own.

    A backward pass of an earlier test starts CUDA and autograd's threads: no fork takes them along.
    A torch that is built for CUDA starts the threads although its GPUs are hidden. Without one a
    test with the mark `alone` requests it: what another library starts is not ours to know.
    """
    is_marked = pyfuncitem.get_closest_marker("alone") is not None
    is_asked = is_marked or HAS_GPU or RANKS_ALONE in os.environ
    if not is_asked or ALONE in os.environ or "run_ranks" not in pyfuncitem.fixturenames:
        return None
    run_alone(pyfuncitem.nodeid, pyfuncitem.config.rootpath)
    return True


def run_alone(node: str, folder: Path) -> None:
    """Run one test in a process of its own; fail as it fails."""
    plugins = ["-p", "no:xdist", "-p", "no:benchmark"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-m", "", node],
        cwd=folder,
        env={**os.environ, ALONE: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(done.stdout, pytrace=False)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  libraries under test may use the legacy generator
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what commands measure out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
