"""vLLM's OpenAI-compatible server with our model in it: how it is started, whether it answers."""

import http.client
import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from typing import cast

import torch

from neuron_moe.errors import check_choice, check_positive_int
from neuron_moe.experts import RoutedExperts
from neuron_moe.models.compressed_attention import CompressedAttention
from neuron_moe.models.decoder import DecoderModel
from neuron_moe.models.delta_net import Recurrent, bytes_of
from neuron_moe.models.loader import build_model
from neuron_moe.parallel import parallel_state
from neuron_moe.serving.environment import server_environment
from neuron_moe.serving.options import (
    OPTIONS_KEY,
    PREFILL,
    ServingOptions,
    architecture_of,
    block_size_of,
    check_product_form,
    check_servable,
    hf_overrides,
    page_shapes,
)
from neuron_moe.serving.vllm_server import MODULE, REFUSED

INSTALL = "`make vllm` in neuron-moe's folder, and then .venv-vllm/bin/neuron-moe"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MOST_PORTS = 65535
SHUTDOWN_TIMEOUT_S = 20  # orchestrators kill thirty seconds after SIGTERM
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
        shutdown_timeout: seconds that answers in flight may take to their end after SIGTERM.
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
    shutdown_timeout: int = SHUTDOWN_TIMEOUT_S
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
        if self.shutdown_timeout < 0:
            raise ValueError(
                f"shutdown_timeout={self.shutdown_timeout}: must be 0 or more seconds."
            )
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
        """Return the arguments of vLLM's server, but for `more`.

        Raises:
            ValueError: the model cannot be split or served so.
        """
        layout = self.options.layout(self.num_ranks)
        with parallel_state.as_rank(layout, 0):
            built = build_model(self.folder, dtype=DTYPES[self.dtype], backend=self.options.backend)
        model = cast(DecoderModel, built)
        longest = self.max_model_len or min(4096, model.config.max_position_embeddings)
        check_servable(model, longest)
        for experts in model.modules():  # vLLM gives its ranks equal parts
            if isinstance(experts, RoutedExperts):
                layout.check_experts(experts.spec.num_experts, experts.spec.intermediate_size)
        check_product_form(model, self.options)
        cache_bytes = (self.cache_mib or 0) << 20 or 8 * _bytes_per_sequence(model, longest)
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
            "shutdown-timeout": self.shutdown_timeout,
        }
        flags = [f"--{name}={value}" for name, value in values.items()]
        architecture = architecture_of(model)
        return [*flags, *(self._flags_of_our_class(architecture) if self.uses_our_class else ())]

    def _flags_of_our_class(self, architecture: str) -> tuple[str, ...]:
        """Return what chooses our class; a graph captured around it would freeze the phase."""
        options = json.dumps({OPTIONS_KEY: asdict(self.options)})
        overrides = json.dumps(hf_overrides(architecture))
        return f"--hf-overrides={overrides}", f"--additional-config={options}", "--enforce-eager"


def _bytes_per_sequence(model: DecoderModel, longest: int) -> int:
    """Return what vLLM's pages of all layers hold of a sequence of `longest` tokens."""
    dtype, layers = model.embed_tokens.weight.dtype, model.attentions
    if isinstance(layers[0], CompressedAttention):  # one page for all layers; three as below
        return 3 * bytes_of(page_shapes(model, longest), dtype)
    sizes = [each.core_sizes(PREFILL) for each in layers if each.cache_shape]
    # Keys, and values as long.
    of_token = [2 * each.kv_heads * each.key_size * dtype.itemsize for each in sizes]
    states = [bytes_of(each.state_shapes, dtype) for each in layers if isinstance(each, Recurrent)]
    if not states:
        return int(longest * sum(of_token))
    # A page of keys and values is as large as one of states. Three of these for each layer: two
    # where prefixes are cached, one in reserve.
    block = block_size_of(model) * max(of_token)
    page = block * ceil(max(states) / block)
    pages = ceil(longest * max(of_token) / page) * len(sizes) + 3 * len(states)
    return int(pages * page)


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


def wait_until_ready(process: subprocess.Popen[bytes], host: str, port: int) -> None:
    """Return when a server answers.

    Raises:
        ServerError: it ended before.
        ValueError: it refused a switch.
    """
    while not is_healthy(host, port):
        check_alive(process)
        time.sleep(_POLL_S)


def check_alive(process: subprocess.Popen[bytes]) -> None:
    """Return if a server runs.

    Raises:
        ServerError: it has ended by itself.
        ValueError: it has refused a switch.
    """
    status = process.poll()
    if status == REFUSED:
        raise ValueError("vLLM was not started; the message above says why.")
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
    arguments = [*settings.arguments(), "--", *settings.more]
    return [sys.executable, "-W", "ignore", "-m", MODULE, *arguments]
