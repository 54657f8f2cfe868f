"""`neuron-moe serve` as a user runs it: tokens, bad requests, its end; `make test-vllm`."""

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder
from neuron_moe.serving.client import (
    RequestError,
    Server,
    complete,
    completion_body,
    post,
)
from neuron_moe.serving.server import free_port
from tests.serving.conftest import own_tokens, prompts_of
from tests.serving.soak import soak

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
MAX_TOKENS = 12
HOST = "127.0.0.1"
START_S = 600  # where others use the machine
END_S = 10


@dataclass
class Running:
    process: subprocess.Popen[str]
    at: Server


@contextlib.contextmanager
def started(*more: str) -> Iterator[Running]:
    """Start the command and wait for its line; kill what is left at the end."""
    port = free_port(HOST, 0)
    command = [sys.executable, "-m", "neuron_moe.tools.cli", "serve", "--model", TINY_NAME]
    command += ["--dtype", "float32", "--port", str(port), *more]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    try:
        assert process.stdout is not None
        deadline = time.monotonic() + START_S
        for line in process.stdout:
            if f"ready at http://{HOST}:{port}/v1" in line:
                break
            assert time.monotonic() < deadline
        assert process.poll() is None
        yield Running(process, Server(HOST, port, TINY_NAME))
    finally:
        process.terminate()
        process.wait(2 * END_S)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with started("--", "--max-num-batched-tokens=64") as found:
        yield found


@pytest.fixture(scope="module")
def asked() -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts and what our own `generate` answers."""
    folder = checkpoint_folder(TINY_NAME)
    prompts = prompts_of(folder)
    return prompts, own_tokens(folder, prompts, MAX_TOKENS)


def test_tokens_over_http_equal_our_own(running: Running, asked: Any) -> None:
    prompts, expected = asked
    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):  # the second pass finds prefixes in the cache
            answers = pool.map(lambda prompt: complete(running.at, prompt, MAX_TOKENS), prompts)
            assert [answer.token_ids for answer in answers] == expected


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "nobody"}, 404),
        ({"max_tokens": -4}, 400),
        ({"prompt": [5] * 5000}, 400),
        ({"prompt": []}, 400),
        ({"prompt": [10**6]}, 400),
        ({"temperature": "hot"}, 400),
        (None, 400),
    ],
    ids=["model", "max_tokens", "too_long", "empty", "vocabulary", "type", "json"],
)
def test_a_bad_request_is_refused_and_the_server_lives(
    change: dict[str, Any] | None, status: int, running: Running, asked: Any
) -> None:
    body = b"{no json"
    if change is not None:
        values = json.loads(completion_body(running.at, [5, 6], 4, stream=False))
        body = json.dumps(values | change).encode()
    found, answer = post(running.at, "/v1/completions", body)
    assert found == status
    assert "error" in json.loads(answer)
    prompts, expected = asked
    assert complete(running.at, prompts[0], MAX_TOKENS).token_ids == expected[0]


def test_a_client_that_leaves_disturbs_nobody(running: Running, asked: Any) -> None:
    prompts, expected = asked
    for _ in range(4):
        connection = http.client.HTTPConnection(HOST, running.at.port, timeout=60)
        connection.request(
            "POST",
            "/v1/completions",
            completion_body(running.at, prompts[1], 2000),
            {"Content-Type": "application/json"},
        )
        connection.getresponse().readline()
        connection.close()
    assert complete(running.at, prompts[0], MAX_TOKENS).token_ids == expected[0]
    deadline = time.monotonic() + 60
    while _metrics(running.at)["vllm:num_requests_running"] > 0:  # the four were given up
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_expert_load_and_paths_are_among_the_metrics(running: Running, asked: Any) -> None:
    prompts, _ = asked
    complete(running.at, prompts[0], MAX_TOKENS)
    time.sleep(2)  # load is told once a second
    before = _metrics(running.at)
    complete(running.at, prompts[0], MAX_TOKENS)
    time.sleep(2)
    after = _metrics(running.at)
    new = {name: after[name] - before[name] for name in after}
    # One token of prefill is fresh at least; each goes to four experts in each of six layers.
    assert new["neuron_moe_expert_tokens_total"] >= 4 * 6 * MAX_TOKENS
    assert new["neuron_moe_expert_tokens_total"] % (4 * 6) == 0
    assert new["neuron_moe_steps_total"] >= MAX_TOKENS


def _metrics(at: Server) -> dict[str, float]:
    """Return the sum of each metric over its labels."""
    connection = http.client.HTTPConnection(at.host, at.port, timeout=60)
    connection.request("GET", "/metrics")
    found: dict[str, float] = {}
    for line in connection.getresponse().read().decode().splitlines():
        if not line.startswith("#"):
            name, value = line.split("{")[0].split(" ")[0], line.rsplit(" ", 1)[1]
            found[name] = found.get(name, 0.0) + float(value)
    connection.close()
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "interrupt"])
def test_a_signal_under_load_ends_it_in_ten_seconds(number: signal.Signals, asked: Any) -> None:
    prompts, _ = asked

    def ask(prompt: list[int]) -> None:
        with contextlib.suppress(OSError, RequestError, http.client.HTTPException, ValueError):
            complete(found.at, prompt, 3000)

    with started() as found, ThreadPoolExecutor(16) as pool:
        for prompt in prompts[:16]:
            pool.submit(ask, prompt)
        time.sleep(3)
        begun = time.monotonic()
        found.process.send_signal(number)
        assert found.process.wait(2 * END_S) == 0
        assert time.monotonic() - begun < END_S
        with pytest.raises(OSError, match="refused"):
            complete(found.at, prompts[0], 1)


@pytest.mark.slow
@pytest.mark.parametrize("clients", [8, 32])
def test_five_minutes_of_clients(clients: int, running: Running, asked: Any) -> None:
    prompts, expected = asked
    result = soak(running.at, running.process.pid, prompts, expected, clients=clients, seconds=300)
    assert not result.problems
    assert result.answers > clients
    half = len(result.memory_mib) // 2
    assert max(result.memory_mib[half:]) < 1.02 * max(result.memory_mib[:half])
