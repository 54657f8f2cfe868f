"""Run tests in a copy of the tree, in a fork of a process that has imported what takes long.

No module of the tree is imported there before the fork: tests see the copy's files.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
from pathlib import Path

SLOWER, START_S = 3, 30  # a change may make tests so much slower before they count as stuck
HEAVY = ["numpy", "ml_dtypes", "torch", "transformers", "safetensors.torch"]
OURS = ("tests", "neuron_moe", "nki_kernels", "nki_sim", "nki", "neuronxcc")
_server = multiprocessing.get_context("forkserver")


def fails(tests: dict[str, float], tree: Path) -> bool:
    """Run tests, given with their seconds, in a copy of the tree.

    Say whether one failed, or they did not end in time.
    """
    _server.set_forkserver_preload(HEAVY)
    process = _server.Process(target=_run, args=(list(tests), str(tree)))
    process.start()
    process.join(SLOWER * sum(tests.values()) + START_S)
    is_stuck = process.is_alive()
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):  # ranks that the tests left behind, too
            os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return is_stuck or process.exitcode != 0


def _run(tests: list[str], tree: str) -> None:
    """Become a process that runs tests in a copy of the tree, and nothing else."""
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
    import pytest

    os._exit(pytest.main(["-x", "--tb=no", "-W", "ignore:Module already imported", *tests]))
