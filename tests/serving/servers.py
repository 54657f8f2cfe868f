"""`neuron-moe serve` as a user runs it, in a process of its own, for tests that share it."""

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from neuron_moe.serving.client import Server
from neuron_moe.serving.server import free_port

HOST = "127.0.0.1"
START_S = 600  # where others use the machine
END_S = 10
_POLL_S = 0.1
# One switch of each group that vLLM has, behind `--`, which our model takes.
OF_EACH_GROUP = {
    "options": "--enable-log-requests",
    "Frontend": "--enable-request-id-headers",
    "ModelConfig": "--max-logprobs=5",
    "LoadConfig": "--no-use-tqdm-on-load",
    "AttentionConfig": "--attention-backend=CPU_ATTN",
    "MambaConfig": "--no-enable-mamba-cache-stochastic-rounding",
    "StructuredOutputsConfig": "--reasoning-parser=",
    "ParallelConfig": "--distributed-executor-backend=mp",
    "CacheConfig": "--prefix-caching-hash-algo=sha256_cbor",
    "OffloadConfig": "--offload-backend=uva",
    "MultiModalConfig": '--limit-mm-per-prompt={"image": 0}',
    "LoRAConfig": "--max-lora-rank=8",
    "LoggingConfig": "--log-level=ERROR",
    "ObservabilityConfig": "--kv-cache-metrics",
    "SchedulerConfig": "--max-num-batched-tokens=64",
    "CompilationConfig": "--max-cudagraph-capture-size=8",
    "KernelConfig": "--no-enable-flashinfer-autotune",
    "VllmConfig": "--performance-mode=interactivity",
}
_METRIC = re.compile(r"^(\w[\w:]*)(?:\{(.*)\})? (\S+)$")


class ServeCommand:
    """The command, started; `at` is where it answers.

    Args:
        folder: of the checkpoint.
        more: arguments behind the usual ones.
    """

    def __init__(self, folder: Path, *more: str) -> None:
        port = free_port(HOST, 0)
        self.at = Server(HOST, port, folder.name)
        self.arguments = (folder, *more)
        self.lines: list[str] = []
        command = [sys.executable, "-m", "neuron_moe.tools.cli", "serve", "--model", str(folder)]
        command += ["--dtype", "float32", "--product-form", "plain", "--port", str(port)]
        self.process = subprocess.Popen(
            [*command, *more],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += iter(self.process.stdout.readline, "")

    def wait_until_ready(self) -> None:
        """Return when it has printed its line."""
        wanted = f"ready at http://{HOST}:{self.at.port}/v1, model {self.at.model}"
        deadline = time.monotonic() + START_S
        while not any(wanted in line for line in self.lines):
            assert self.is_alive, self.lines
            assert time.monotonic() < deadline, self.lines
            time.sleep(_POLL_S)

    def processes(self) -> list[psutil.Process]:
        """Return it and all that it has started."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def shared(self) -> set[Path]:
        """Return the files by which its processes share memory."""
        maps = "".join(Path(f"/proc/{each.pid}/maps").read_text() for each in self.processes())
        return {Path(each) for each in re.findall(r"/dev/shm/\S+(?=\n)", maps)}

    def end(self) -> None:
        """End it, if it has not."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(10 * END_S)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def metrics(at: Server) -> dict[str, dict[str, float]]:
    """Return the values of each metric by its labels, as they are written."""
    connection = http.client.HTTPConnection(at.host, at.port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if match := _METRIC.match(line):
            name, labels, value = match.groups()
            found.setdefault(name, {})[labels or ""] = float(value)
    return found


def total(found: dict[str, dict[str, float]], name: str) -> float:
    """Return the sum of a metric over its labels; 0 where it is not there yet."""
    return sum(found.get(name, {}).values())
