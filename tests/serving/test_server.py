"""What `neuron-moe serve` decides before vLLM starts; none of it needs vLLM."""

import importlib
import importlib.util
import json
import socket
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neuron_moe import nxd_compat
from neuron_moe.models.attention import Reach
from neuron_moe.models.loader import build_model, find_model_file, model_types
from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder
from neuron_moe.serving import vllm_server
from neuron_moe.serving.environment import server_environment
from neuron_moe.serving.lifetime import running
from neuron_moe.serving.options import (
    ARCHITECTURE,
    HYBRID_ARCHITECTURE,
    OPTIONS_KEY,
    VLLM_FORM,
    ServingOptions,
    architecture_of,
    block_size_of,
    hf_overrides,
)
from neuron_moe.serving.plugin import CLASSES, NXDI_VARIABLE, OwnSettings, register
from neuron_moe.serving.server import (
    INSTALL,
    ServerError,
    ServerSettings,
    check_alive,
    free_port,
    server_command,
)
from neuron_moe.serving.vllm_server import REFUSED
from neuron_moe.tools import cli
from tests.models.families import FAMILIES
from tests.serving.conftest import FIRST, OTHERS, RECURRENT, Folders

CONFIG = "vllm.model_executor.models.config"
OWN_CONFIGS = "neuron_moe.serving.own_configs"


def _settings(**changes: Any) -> ServerSettings:
    return ServerSettings(**({"folder": checkpoint_folder(TINY_NAME), "name": TINY_NAME} | changes))


def _flags(settings: ServerSettings) -> dict[str, str]:
    pairs = (flag.removeprefix("--").partition("=") for flag in settings.arguments())
    return {name: value for name, _, value in pairs}


def test_the_command_passes_on_what_vllm_must_know() -> None:
    flags = _flags(_settings(tp=2, ep=2, port=9, shutdown_timeout=7))
    assert flags["tensor-parallel-size"] == "4"
    assert flags["host"] == "127.0.0.1"
    assert flags["block-size"] == "128"
    assert flags["max-model-len"] == "4096"
    # Two heads of 64 numbers, keys and values, six layers, two bytes; eight sequences.
    assert flags["kv-cache-memory-bytes"] == str(2 * 64 * 2 * 6 * 2 * 4096 * 8)
    assert json.loads(flags["hf-overrides"]) == hf_overrides()
    assert hf_overrides()["architectures"] == [ARCHITECTURE]
    assert ServingOptions.read(json.loads(flags["additional-config"])) == ServingOptions()
    assert flags["shutdown-timeout"] == "7"


def test_what_the_user_gives_for_vllm_stands_behind_our_own() -> None:
    command = server_command(_settings(more=["--seed=3"]))
    assert command[:5] == [sys.executable, "-W", "ignore", "-m", vllm_server.__name__]
    assert command[-2:] == ["--", "--seed=3"]


def test_blocks_divide_the_chunks_of_attention(folder_of: Folders) -> None:
    assert block_size_of(build_model(folder_of("llama4-scout"))) == 64
    assert block_size_of(build_model(folder_of("glm4_moe"))) == 128
    tiny = build_model(folder_of("llama4-scout"))
    for attention in tiny.attentions:
        attention.reach = Reach(chunk=24)
    with pytest.raises(ValueError, match="attention_chunk_size=24"):
        block_size_of(tiny)


def test_recurrent_layers_get_a_class_and_a_cache_of_their_own(folder_of: Folders) -> None:
    flags = _flags(_settings(folder=folder_of("qwen3_5_moe"), max_model_len=64))
    assert json.loads(flags["hf-overrides"]) == hf_overrides(HYBRID_ARCHITECTURE)
    # Pages of 128 tokens, 2 heads of 32 keys and values in bf16: one for the layer that attends,
    # three for each of those that keep states of fewer bytes.
    assert int(flags["kv-cache-memory-bytes"]) == 8 * (1 + 3 * 3) * 128 * 2 * 2 * 32 * 2


def test_layers_with_entries_share_a_page_of_each_sequence(folder_of: Folders) -> None:
    flags = _flags(_settings(folder=folder_of("deepseek_v4"), max_model_len=64))
    assert json.loads(flags["hf-overrides"]) == hf_overrides(HYBRID_ARCHITECTURE)
    latest = 7 * 16  # keys of a window of eight
    sparse = 17 * 16 + 7 * 4 * 16 + 17 * 8 + 7 * 4 * 8  # of each four: entries, values, weights
    heavy = 9 * 16 + 7 * 2 * 16  # of each eight
    # Three pages in bf16: two where prefixes are cached, one in reserve.
    assert int(flags["kv-cache-memory-bytes"]) == 8 * 3 * (3 * latest + sparse + heavy) * 2


def test_a_model_whose_layers_all_keep_states_is_refused(folder_of: Folders) -> None:
    model: Any = build_model(folder_of("granitemoehybrid"))
    for layer in model.attentions:
        layer.cache_shape = ()
    with pytest.raises(ValueError, match="all 3 keep a state of each sequence, one must attend"):
        architecture_of(model)


def test_every_family_runs_inside_vllm_in_the_tests() -> None:
    types = {name: family.model_type for name, family in FAMILIES.items()} | {TINY_NAME: "gpt_oss"}
    names = (*FIRST, *OTHERS, *RECURRENT)
    run = {find_model_file(types.get(name, name)).__name__ for name in names}
    every = {find_model_file(each).__name__ for each in model_types()}
    assert every == run


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
    settings: dict[str, type] = {}
    for name, value in (
        ("vllm", {"ModelRegistry": registry}),
        (CONFIG, {"MODELS_CONFIG_MAP": settings}),
        (OWN_CONFIGS, {"register_configs": lambda: None}),
    ):
        module = types.ModuleType(name)
        vars(module).update(value)
        monkeypatch.setitem(sys.modules, name, module)
    installed: list[str] = []
    monkeypatch.setattr(nxd_compat, "install", lambda *, backend: installed.append(backend))
    monkeypatch.setattr(nxd_compat, "is_installed", lambda: bool(installed))
    register()
    assert not installed
    monkeypatch.setenv(NXDI_VARIABLE, "nki")
    register()
    register()
    assert installed == ["nki"]
    assert known == CLASSES
    assert settings == dict.fromkeys((ARCHITECTURE, HYBRID_ARCHITECTURE), OwnSettings)
    for place in known.values():
        name, _, of_class = place.partition(":")
        if "vllm_model" not in name:  # imports vLLM
            assert hasattr(importlib.import_module(name), of_class)


@pytest.mark.parametrize(
    ("ranks", "splits_experts", "expert_ranks", "expected"),
    [
        (1, False, None, (1, 1)),
        (4, False, None, (4, 1)),
        (4, True, None, (1, 4)),
        (4, False, 2, (2, 2)),
        (4, True, 2, (2, 2)),
    ],
)
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


def test_a_key_spelt_otherwise_is_not_passed_by() -> None:
    with pytest.raises(ValueError, match="'neuron-moe' must be 'neuron_moe'"):
        ServingOptions.read({"neuron-moe": {"backend": "nki"}})
    assert ServingOptions.read({"neuron_config": {}}) == ServingOptions()


@pytest.mark.parametrize(("ranks", "threads"), [(1, 1), (1, 4), (2, 2)])
def test_each_rank_has_the_threads_asked_for_on_any_core(
    ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 4, 5})
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    variables = server_environment(ranks, threads)
    assert variables["OMP_NUM_THREADS"] == str(threads)
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "4-5")
    assert server_environment(ranks, threads)["VLLM_CPU_OMP_THREADS_BIND"] == "4-5"


@pytest.mark.parametrize(("ranks", "threads"), [(1, 5), (3, 2)])
def test_more_threads_than_cores_are_refused(
    ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 4, 5})
    with pytest.raises(ValueError, match=f"threads={threads}: must be at most the 4 cores"):
        server_environment(ranks, threads)


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
        (["--threads", "100000"], "threads=100000"),
        (["--shutdown-timeout", "-1"], "shutdown_timeout=-1"),
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


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
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


@pytest.mark.parametrize(("status", "error"), [(3, ServerError), (REFUSED, ValueError)])
def test_a_server_that_ends_by_itself_is_told(status: int, error: type[Exception]) -> None:
    with running([sys.executable, "-c", f"raise SystemExit({status})"], {}) as process:
        process.wait()
        with pytest.raises(error, match=r"messages? above say"):
            check_alive(process)
