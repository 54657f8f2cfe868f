"""What `neuron-moe serve` decides before vLLM starts; none of it needs vLLM."""

import importlib
import importlib.util
import json
import socket
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from neuron_moe.models.attention import Reach
from neuron_moe.models.loader import build_model
from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder
from neuron_moe.serving.environment import server_environment
from neuron_moe.serving.options import (
    ARCHITECTURE,
    OPTIONS_KEY,
    VLLM_FORM,
    ServingOptions,
    block_size_of,
    hf_overrides,
)
from neuron_moe.serving.plugin import CLASSES, register
from neuron_moe.serving.server import (
    INSTALL,
    ServerError,
    ServerSettings,
    check_alive,
    end_server,
    free_port,
    running,
    server_command,
)
from neuron_moe.tools import cli
from tests.serving.conftest import Folders

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def _settings(**changes: Any) -> ServerSettings:
    return ServerSettings(**({"folder": checkpoint_folder(TINY_NAME), "name": TINY_NAME} | changes))


def _flags(settings: ServerSettings) -> dict[str, str]:
    pairs = (flag.removeprefix("--").partition("=") for flag in settings.arguments())
    return {name: value for name, _, value in pairs}


def test_the_command_passes_on_what_vllm_must_know() -> None:
    flags = _flags(_settings(tp=2, ep=2, port=9, more=["--seed=3"]))
    assert flags["tensor-parallel-size"] == "4"
    assert flags["host"] == "127.0.0.1"
    assert flags["block-size"] == "128"
    assert flags["max-model-len"] == "4096"
    # Two heads of 64 numbers, keys and values, six layers, two bytes; eight sequences.
    assert flags["kv-cache-memory-bytes"] == str(2 * 64 * 2 * 6 * 2 * 4096 * 8)
    assert json.loads(flags["hf-overrides"]) == hf_overrides()
    assert hf_overrides()["architectures"] == [ARCHITECTURE]
    assert ServingOptions.read(json.loads(flags["additional-config"])) == ServingOptions()
    assert flags["seed"] == "3"


def test_vllm_is_started_by_its_module_for_its_own_command_fails() -> None:
    command = server_command(_settings())
    assert command[:5] == [sys.executable, "-W", "ignore", "-m", command[4]]
    assert command[4] == "vllm.entrypoints.openai.api_server"


def test_blocks_divide_the_chunks_of_attention(folder_of: Folders) -> None:
    assert block_size_of(build_model(folder_of("llama4-scout"))) == 64
    assert block_size_of(build_model(folder_of("glm4_moe"))) == 128
    tiny = build_model(folder_of("llama4-scout"))
    for attention in tiny.attentions:
        attention.reach = Reach(chunk=24)
    with pytest.raises(ValueError, match="attention_chunk_size=24"):
        block_size_of(tiny)


def test_recurrent_layers_are_refused_before_vllm_starts(folder_of: Folders) -> None:
    with pytest.raises(ValueError, match="no recurrent layers yet"):
        _settings(folder=folder_of("qwen3_5_moe")).arguments()


def test_vllms_kernel_is_refused_for_experts_it_cannot_compute(folder_of: Folders) -> None:
    options = ServingOptions(product_form=VLLM_FORM)
    assert _settings(folder=folder_of("qwen3_moe"), options=options).arguments()
    for settings in (
        _settings(options=options),
        _settings(
            folder=folder_of("qwen3_moe"), ep=2, options=replace(options, expert_parallel_size=2)
        ),
    ):
        with pytest.raises(
            ValueError, match=r"product_form='vllm': layers\.0.*SwiGLU without biases"
        ):
            settings.arguments()


def test_an_unknown_model_is_refused_before_vllm_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert cli.main(["serve", "--model", str(tmp_path), "--port", "0"]) == 2
    assert "model_type='bert'" in capsys.readouterr().err


def test_registering_twice_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, str] = {}
    registry = SimpleNamespace(
        get_supported_archs=lambda: known.keys(),
        register_model=lambda name, place: known.__setitem__(name, place + known.get(name, "")),
    )
    module = types.ModuleType("vllm")
    module.ModelRegistry = registry  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    register()
    register()
    assert known == CLASSES
    for place in known.values():
        name, _, of_class = place.partition(":")
        if "vllm_model" not in name:  # imports vLLM
            assert hasattr(importlib.import_module(name), of_class)


@pytest.mark.parametrize(
    ("ranks", "splits_experts", "expert_ranks", "expected"),
    [(1, False, None, (1, 1)), (4, False, None, (4, 1)), (4, True, None, (1, 4)),
     (4, False, 2, (2, 2)), (4, True, 2, (2, 2))],
)  # fmt: skip
def test_ranks_split_experts_as_asked(
    ranks: int, splits_experts: bool, expert_ranks: int | None, expected: tuple[int, int]
) -> None:
    options = ServingOptions(expert_parallel_size=expert_ranks)
    layout = options.layout(ranks, splits_experts=splits_experts)
    assert (layout.tp, layout.ep) == expected


def test_expert_ranks_must_divide_all() -> None:
    with pytest.raises(ValueError, match="expert_parallel_size=3: must divide the 4 ranks"):
        ServingOptions(expert_parallel_size=3).layout(4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backnd": "nki"}, "Did you mean 'backend'"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"expert_parallel_size": 0}, "expert_parallel_size=0"),
        ({"product_form": "fast"}, "product_form='fast'"),
        ("nki", "must be an object"),
    ],
)
def test_a_wrong_option_is_named(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServingOptions.read({OPTIONS_KEY: given})


def test_every_rank_gets_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 4, 5})
    assert "VLLM_CPU_OMP_THREADS_BIND" not in server_environment(1)
    assert server_environment(2, 2)["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|4,5"
    with pytest.raises(ValueError, match="must be at most the 4 cores"):
        server_environment(3, 2)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--tp", "0"], "tp=0"),
        (["--tp", "3"], "intermediate_size"),
        (["--ep", "5"], "num_experts=32"),
        (["--port", "70000"], "port=70000"),
        (["--max-model-len", "0"], "max_model_len=0"),
        (["--cache-mib", "-1"], "cache_mib=-1"),
        (["--threads", "0"], "threads=0"),
        (["--product-form", "fast"], "product_form='fast'"),
        (["--model", "nowhere"], "model=nowhere"),
        (["--host", "203.0.113.1"], "cannot listen there"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_call_ends_with_two_and_a_message(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--model", TINY_NAME, "--port", "0", *args]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--clients", "--repeats", "--prompt-tokens", "--threads"])
def test_a_wrong_size_of_the_benchmark_is_named(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", option, "0"]) == 2
    assert f"{option}=0" in capsys.readouterr().err


def test_vllms_own_class_is_asked_for_without_our_overrides() -> None:
    flags = _settings(uses_our_class=False).arguments()
    assert not any(flag.startswith(("--hf-overrides", "--additional-config")) for flag in flags)
    assert "--enforce-eager" not in flags


@pytest.mark.skipif(HAS_VLLM, reason="vllm is installed")
def test_without_vllm_the_command_that_installs_it_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["serve", "--model", TINY_NAME, "--port", "0"]) == 2
    assert INSTALL in capsys.readouterr().err


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port={port}: cannot listen there"):
            free_port("127.0.0.1", port)


def test_a_server_that_ends_by_itself_is_told() -> None:
    with running([sys.executable, "-c", "raise SystemExit(3)"], {}) as process:
        process.wait()
        with pytest.raises(ServerError, match="status 3"):
            check_alive(process)


def test_a_server_that_does_not_listen_is_killed_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "children"
    stubborn = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
    deadline = time.monotonic() + 30
    while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    end_server(process, patience_s=0.2)
    assert process.returncode == -9
    child = int(note.read_text())
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
