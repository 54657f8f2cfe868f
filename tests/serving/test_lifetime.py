"""A server's processes end and leave nothing behind; none of it needs vLLM."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from neuron_moe.serving.lifetime import ask_to_end, end_server, running

STUBBORN = Path(__file__).with_name("stubborn.py")
DEADLINE_S = 60  # where others use the machine
pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory is elsewhere")


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _found(note: Path) -> dict[str, Any]:
    """Return what a stubborn server tells when it runs; all of it is there."""
    _wait(note.exists)
    found: dict[str, Any] = json.loads(note.read_text())
    assert all(Path(each).exists() for each in found["left"])
    assert all(psutil.pid_exists(pid) for pid in found["processes"])
    return found


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _assert_all_is_gone(found: dict[str, Any]) -> None:
    _wait(lambda: all(map(_has_ended, found["processes"])))
    _wait(lambda: not any(Path(each).exists() for each in found["left"]))


def test_a_server_that_does_not_listen_is_killed_with_its_children_and_shared_memory(
    tmp_path: Path,
) -> None:
    note = tmp_path / "note"
    with running([sys.executable, str(STUBBORN), "serve", str(note)], {}) as process:
        found = _found(note)
        end_server(process, patience_s=0.2)
        assert process.returncode == -9
    _assert_all_is_gone(found)


def test_a_server_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "note"
    process = subprocess.Popen([sys.executable, str(STUBBORN), "parent", str(note)])
    found = _found(note)
    process.kill()
    process.wait()
    _assert_all_is_gone(found)


def test_asking_alone_kills_nothing(tmp_path: Path) -> None:
    note = tmp_path / "note"
    with running([sys.executable, str(STUBBORN), "serve", str(note)], {}) as process:
        found = _found(note)
        ask_to_end(process, patience_s=0.2)
        assert process.poll() is None
        assert not any(map(_has_ended, found["processes"]))
        end_server(process, patience_s=0.0)
