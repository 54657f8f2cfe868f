"""Run tests in a copy of the tree, in a fork of a process that has imported what takes long.

No module of the tree is imported there before the fork: tests see the copy's files.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SLOWER, START_S = 3, 30  # a change may make tests so much slower before they count as stuck
HEAVY = ["numpy", "ml_dtypes", "torch", "transformers", "safetensors.torch"]
OURS = ("tests", "neuron_moe", "nki_kernels", "nki_sim", "nki", "neuronxcc")
QUIET = ("-W", "ignore:Module already imported")  # of what the fork inherits
# A process that has started CUDA cannot fork ranks; what Triton reads counts at its import.
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
_BEGUN = ".begun"  # where a run of tests writes down which it has begun
_server = multiprocessing.get_context("forkserver")


class OutOfTimeError(Exception):
    """No time is left for mutants."""


class Outcome(NamedTuple):
    """What became of tests.

    Attributes:
        passed: whether all passed, in time.
        begun: those that began, in order: if not all passed, the last one did not.
        is_stuck: whether they did not end in time.
    """

    passed: bool
    begun: list[str]
    is_stuck: bool


def run_tests(tests: dict[str, float], tree: Path, deadline: float) -> Outcome:
    """Run tests, given with their seconds, in a copy of the tree, up to the first that fails.

    Raises OutOfTimeError where they are still running at the deadline of the monotonic clock.
    """
    (tree / _BEGUN).write_text("")
    limit_s, left_s = SLOWER * sum(tests.values()) + START_S, deadline - time.monotonic()
    status = in_fork(_run, (list(tests), str(tree)), max(0.0, min(limit_s, left_s)))
    if status is None and left_s < limit_s:
        raise OutOfTimeError
    return Outcome(status == 0, (tree / _BEGUN).read_text().splitlines(), status is None)


def in_fork(work: Callable[..., None], arguments: tuple[object, ...], limit_s: float) -> int | None:
    """Call a function that ends its process; return the status, None if it did not end in time."""
    os.environ |= WITHOUT_GPU  # of the server, which starts at the first call
    _server.set_forkserver_preload(HEAVY)
    process = _server.Process(target=work, args=arguments)
    process.start()
    process.join(limit_s)
    is_stuck = process.is_alive()
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):  # ranks that the tests left behind, too
            os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return None if is_stuck else process.exitcode


def settle_in(tree: str) -> None:
    """Make this process one that runs tests of a copy of the tree, and is silent."""
    os.setsid()
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": tree, "OPENBLAS_NUM_THREADS": "1"}
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    sys.path[:] = [tree, *sys.path]
    sys.dont_write_bytecode = True
    silence = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(silence, number)


class _Begun:
    """A pytest plugin: write down each test that begins."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        with self.file.open("a") as file:
            file.write(nodeid + "\n")


def _run(tests: list[str], tree: str) -> None:
    settle_in(tree)
    import pytest
    import torch

    if torch.version.cuda is not None:  # a backward pass of another test would spoil their forks
        os.environ["NEURON_MOE_TEST_RANKS_ALONE"] = "1"
    options = ["-x", "--tb=no", *QUIET, "-m", ""]
    os._exit(pytest.main([*options, *tests], plugins=[_Begun(Path(tree) / _BEGUN)]))
