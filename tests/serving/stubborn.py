"""A server that does not listen: `python stubborn.py NOTE`, or as a child of `parent` below.

It ignores SIGTERM, has a child, and shares memory with it in both of vLLM's ways: by Python, and as
ranks do. Then it writes into NOTE what there is.
"""

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

from neuron_moe.serving.lifetime import METRICS_FOLDER, end_with_parent, running

LONG_S = 600


def serve(note: Path) -> None:
    """Be the server."""
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    python_segment = shared_memory.SharedMemory(create=True, size=mmap.PAGESIZE)
    rank_segment = Path(f"/dev/shm/vllm_dist_test{os.getpid()}-cpushm_0")
    rank_segment.write_bytes(bytes(mmap.PAGESIZE))
    child = subprocess.Popen(
        [sys.executable, __file__, "child", str(rank_segment)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    found = {
        "processes": [os.getpid(), child.pid],
        "left": [f"/dev/shm/{python_segment.name}", str(rank_segment), os.environ[METRICS_FOLDER]],
    }
    part = note.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(note)
    time.sleep(LONG_S)


def child(rank_segment: Path) -> None:
    """Have a segment of the server's ranks."""
    with rank_segment.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        sys.stdout.write("\n")
        sys.stdout.flush()
        time.sleep(LONG_S)


def parent(note: Path) -> None:
    """Start the server and wait."""
    with running([sys.executable, __file__, "serve", str(note)], {}):
        time.sleep(LONG_S)


if __name__ == "__main__":
    {"serve": serve, "child": child, "parent": parent}[sys.argv[1]](Path(sys.argv[2]))
