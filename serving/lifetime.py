"""The life of a server's processes: they end on request, and with the process that started them.

Nothing here imports torch: a server watches for the end of its parent before anything else.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # the variable by which a server's processes know it
PATIENCE_S = 6.0  # of vLLM's own end; then it is killed, so that all is over within ten seconds
_KILLED_S = 2.0
_POLL_S = 0.05
_TRACKER = b"multiprocessing.resource_tracker"


@contextmanager
def running(command: Sequence[str], variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server while the context lasts; end it, and every process it started, at its end.

    Its standard input is a pipe that ends with this process: `end_with_parent` watches it there.
    """
    with tempfile.TemporaryDirectory(
        prefix="neuron-moe-metrics-", ignore_cleanup_errors=True
    ) as metrics:
        environment = {**os.environ, **variables, METRICS_FOLDER: metrics}
        # A group of its own: Ctrl-C reaches us alone, and its children can be ended with it.
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            yield process
        finally:
            end_server(process)


def end_server(process: subprocess.Popen[bytes], patience_s: float = PATIENCE_S) -> None:
    """Ask a server to end, then kill what is left of its process group."""
    try:
        ask_to_end(process, patience_s)
    finally:
        end_group(process.pid)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def ask_to_end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Ask a server to end, and return when it has or when patience is over."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)


def end_group(group: int) -> None:
    """Kill the processes of a group, all but this one; none leaves shared memory behind.

    What Python shared, its resource tracker removes when the last user is gone. It is a process of
    the same group, so that it is given time to. What vLLM's ranks shared, nobody else removes.
    """
    shared: set[Path] = set()
    end = time.monotonic() + _KILLED_S
    while killed := [pid for pid, words in _members(group) if _TRACKER not in words]:
        for pid in killed:
            shared |= _shared_by_ranks(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            break  # the kernel holds one: nothing more can be done about it
        time.sleep(_POLL_S)
    for file in shared:
        file.unlink(missing_ok=True)
    if group == os.getpgrp():
        return  # the tracker waits for this process, too
    while _members(group) and time.monotonic() < end:
        time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> list[tuple[int, bytes]]:
    """Return number and command line of the other processes of a group that have not ended.

    Where there is no /proc that is none.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The name stands in parentheses and may hold anything; state, parent, group follow.
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            words = (folder / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue  # it has just ended
        if int(its_group) == group and state != "Z":
            found.append((int(folder.name), words))
    return [(pid, words) for pid, words in found if pid != os.getpid()]


def _shared_by_ranks(pid: int) -> set[Path]:
    """Return the segments by which vLLM's ranks exchange tensors, as a process has them."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {Path(found) for found in re.findall(r"/dev/shm/vllm_dist_\S+", maps)}


def end_with_parent() -> None:
    """From now on end this process and its group at once when standard input ends.

    For a process that `running` has started: its parent was killed, and nobody else would end it.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        end_group(os.getpgrp())
        shutil.rmtree(os.environ.get(METRICS_FOLDER, ""), ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
