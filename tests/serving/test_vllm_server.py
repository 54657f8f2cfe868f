"""`neuron-moe serve` as a user runs it: tokens, bad requests, its end; `make test-vllm`."""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder
from neuron_moe.serving.client import RequestError, Server, complete, completion_body, post
from neuron_moe.serving.environment import server_environment
from neuron_moe.serving.lifetime import running as running_server
from neuron_moe.serving.options import hf_overrides
from neuron_moe.serving.server import free_port, wait_until_ready
from tests.serving.conftest import MAX_TOKENS, Folders, asked
from tests.serving.servers import END_S, HOST, OF_EACH_GROUP, ServeCommand, metrics, total
from tests.serving.soak import soak

pytestmark = pytest.mark.vllm
LONG_ANSWER = 3000  # tokens; takes much longer than a test
TINY = checkpoint_folder(TINY_NAME)
CHUNKED = ("--", "--max-num-batched-tokens=64")
CLIENTS = 8
DRAINED = 200  # tokens of an answer that is begun, and ended after SIGTERM
DRAIN_S = 300  # where others use the machine
PATIENCE_S = 120
PERIOD_S = 1.0  # of telling load
LAYERS, TOP_K = 6, 4  # of the shipped model

Serve = Callable[..., ServeCommand]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Return what starts a server; the one before goes on if it is the same."""
    servers: list[ServeCommand] = []

    def start(folder: Path, *more: str) -> ServeCommand:
        if servers and servers[-1].is_alive and servers[-1].arguments == (folder, *more):
            return servers[-1]
        end()
        servers.append(ServeCommand(folder, *more))
        servers[-1].wait_until_ready()
        return servers[-1]

    def end() -> None:
        while servers:
            servers.pop().end()

    yield start
    end()


@pytest.fixture
def running(serve: Serve) -> ServeCommand:
    """Return the server of the shipped model, on one rank, with a switch of each group."""
    return serve(TINY, "--shutdown-timeout", str(DRAIN_S), "--", *OF_EACH_GROUP.values())


def assert_tokens_are_our_own(running: ServeCommand, folder: Path) -> None:
    """Request all prompts twice, eight at once; the second time prefixes are in the cache."""
    prompts, expected = asked(folder)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            answers = pool.map(lambda prompt: complete(running.at, prompt, MAX_TOKENS), prompts)
            assert [answer.token_ids for answer in answers] == expected


def test_tokens_over_http_equal_our_own(running: ServeCommand) -> None:
    assert_tokens_are_our_own(running, TINY)


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
    change: dict[str, Any] | None, status: int, running: ServeCommand
) -> None:
    body = b"{no json"
    if change is not None:
        values = json.loads(completion_body(running.at, [5, 6], 4, stream=False))
        body = json.dumps(values | change).encode()
    found, answer = post(running.at, "/v1/completions", body)
    assert found == status
    assert "error" in json.loads(answer)
    prompts, expected = asked(TINY)
    assert complete(running.at, prompts[0], MAX_TOKENS).token_ids == expected[0]


def test_a_client_that_leaves_disturbs_nobody(running: ServeCommand) -> None:
    prompts, expected = asked(TINY)
    for _ in range(4):
        connection = http.client.HTTPConnection(running.at.host, running.at.port, timeout=60)
        connection.request(
            "POST",
            "/v1/completions",
            completion_body(running.at, prompts[1], LONG_ANSWER),
            {"Content-Type": "application/json"},
        )
        connection.getresponse().readline()
        connection.close()
    assert complete(running.at, prompts[0], MAX_TOKENS).token_ids == expected[0]
    _wait(lambda: total(metrics(running.at), "vllm:num_requests_running") == 0)  # four gave up


def test_expert_load_and_paths_stand_beside_vllms_metrics(running: ServeCommand) -> None:
    prompts, _ = asked(TINY)
    before = _settled_counts(running)
    for prompt in prompts[:2]:
        complete(running.at, prompt, MAX_TOKENS)
    after = _settled_counts(running)
    # Each token that vLLM computed went to four experts in each of six layers.
    new = after.expert_tokens - before.expert_tokens
    assert new == LAYERS * TOP_K * (after.computed - before.computed)
    assert new >= LAYERS * TOP_K * 2 * MAX_TOKENS
    found = metrics(running.at)
    layers = {_labels(each)["layer"] for each in found["neuron_moe_expert_tokens_total"]}
    assert layers == {str(layer) for layer in range(LAYERS)}
    steps = [_labels(each) for each in found["neuron_moe_steps_total"]]
    assert {each["phase"] for each in steps} == {"prefill", "decode"}
    assert all(each["path"] and each["kernel"] for each in steps)


class Counts(NamedTuple):
    expert_tokens: float  # by our own counters
    computed: float  # tokens that went through the model, by vLLM's


def _settled_counts(running: ServeCommand) -> Counts:
    """Return the counters of an idle server when they stand still; load is shown once a second."""
    looks: list[Counts] = []

    def look() -> bool:
        found = metrics(running.at)
        asked_for = total(found, "vllm:prompt_tokens_total")
        cached = total(found, "vllm:prefix_cache_hits_total")
        made = total(found, "vllm:generation_tokens_total")
        answers = total(found, "vllm:request_success_total")  # none computes with its last token
        computed = asked_for - cached + made - answers
        looks.append(Counts(total(found, "neuron_moe_expert_tokens_total"), computed))
        time.sleep(1.5 * PERIOD_S)
        return len(looks) > 1 and looks[-1] == looks[-2]

    _wait(look)
    return looks[-1]


def _labels(written: str) -> dict[str, str]:
    return {
        name: value.strip('"')
        for name, value in (each.split("=") for each in written.split(",") if each)
    }


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("clients", [8, 32])
def test_five_minutes_of_clients(clients: int, running: ServeCommand) -> None:
    prompts, expected = asked(TINY)
    result = soak(running.at, running.process.pid, prompts, expected, clients=clients, seconds=300)
    assert not result.problems
    assert result.answers > clients
    half = len(result.memory_mib) // 2
    assert max(result.memory_mib[half:]) < 1.02 * max(result.memory_mib[:half])


def test_none_of_its_processes_is_bound_to_a_core(running: ServeCommand) -> None:
    everywhere = psutil.Process().cpu_affinity()
    assert {tuple(each.cpu_affinity()) for each in running.processes()} == {tuple(everywhere)}


@pytest.mark.long
def test_vllms_own_benchmark_measures_it(running: ServeCommand, tmp_path: Path) -> None:
    at = running.at
    command = [str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--model", str(TINY)]
    command += ["--served-model-name", at.model, "--host", at.host, "--port", str(at.port)]
    command += ["--dataset-name", "random", "--num-prompts", "2"]
    command += ["--random-input-len", "8", "--random-output-len", "4", "--save-result"]
    command += ["--result-dir", str(tmp_path), "--result-filename", "result.json"]
    variables = os.environ | server_environment(1)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (2, 8)


def test_terminated_it_answers_to_the_end_what_it_has_begun(running: ServeCommand) -> None:
    ends = _signal_under_load(running, signal.SIGTERM, tokens=DRAINED, patience_s=DRAIN_S)
    assert ends == [DRAINED] * CLIENTS
    assert running.process.wait() == 0


def _signal_under_load(
    running: ServeCommand, *numbers: signal.Signals, tokens: int, patience_s: float
) -> list[int | str]:
    """Signal a server that streams long answers, and return what became of each: tokens or error.

    All of it is over when patience is, and none leaves shared memory or its port behind.
    """

    def ask(prompt: list[int]) -> int | str:
        try:
            return len(complete(running.at, prompt, tokens).token_ids)
        except (OSError, RequestError, http.client.HTTPException, ValueError) as error:
            return str(error)

    def begun() -> float:
        return total(metrics(running.at), "vllm:prompt_tokens_total")

    before, prompts = begun(), [[client + 5, 6, 7] for client in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        ends = [pool.submit(ask, prompt) for prompt in prompts]
        _wait(lambda: begun() == before + sum(map(len, prompts)))
        processes, shared = running.processes(), running.shared()
        assert shared
        for number in numbers:
            running.process.send_signal(number)
            time.sleep(1.0)
        _, alive = psutil.wait_procs(processes, patience_s)
        assert not alive
    _wait(lambda: not any(file.exists() for file in shared))
    assert free_port(running.at.host, running.at.port) == running.at.port
    return [each.result() for each in ends]


@pytest.mark.long
@pytest.mark.parametrize("numbers", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)])
def test_interrupted_or_terminated_twice_it_ends_in_ten_seconds(
    numbers: tuple[signal.Signals, ...], running: ServeCommand
) -> None:
    ends = _signal_under_load(running, *numbers, tokens=LONG_ANSWER, patience_s=END_S)
    assert LONG_ANSWER not in ends
    assert running.process.wait() == 0


@pytest.mark.long
def test_vllm_serve_serves_our_class_by_its_name() -> None:
    port = free_port(HOST, 0)
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(TINY)]
    command += ["--host", HOST, "--port", str(port), "--served-model-name", TINY_NAME]
    command += ["--dtype", "float32", "--max-model-len", "512"]
    command += ["--kv-cache-memory-bytes", str(64 << 20)]
    command += ["--hf-overrides", json.dumps(hf_overrides())]
    prompts, expected = asked(TINY)
    with running_server(command, server_environment(1)) as process:
        wait_until_ready(process, HOST, port)
        answer = complete(Server(HOST, port, TINY_NAME), prompts[0], MAX_TOKENS)
    assert answer.token_ids == expected[0]


@pytest.fixture(scope="module")
def with_tokenizer(
    folder_of: Folders, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return a family's checkpoint beside a tokenizer, which a server wants."""

    @cache
    def make(name: str) -> Path:
        if name == TINY_NAME:
            return TINY
        folder = tmp_path_factory.mktemp(name)
        shutil.copytree(folder_of(name), folder, dirs_exist_ok=True)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / file, folder)
        return folder

    return make


def test_two_ranks_serve_the_same_tokens_and_end_when_the_command_is_killed(
    serve: Serve, with_tokenizer: Callable[[str], Path]
) -> None:
    folder = with_tokenizer("glm4_moe")
    running = serve(folder, "--ep", "2", *CHUNKED)
    assert_tokens_are_our_own(running, folder)
    ends = _signal_under_load(running, signal.SIGKILL, tokens=LONG_ANSWER, patience_s=END_S)
    assert LONG_ANSWER not in ends


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(), ("--tp", "2"), ("--ep", "2")], ids=["tp1", "tp2", "ep2"])
@pytest.mark.parametrize("name", [TINY_NAME, "qwen3_moe", "glm4_moe", "llama4-scout"])
def test_every_family_serves_the_tokens_of_our_own(
    name: str, ranks: tuple[str, ...], serve: Serve, with_tokenizer: Callable[[str], Path]
) -> None:
    folder = with_tokenizer(name)
    assert_tokens_are_our_own(serve(folder, *ranks, *CHUNKED), folder)
