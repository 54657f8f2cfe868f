"""The native form of vllm-neuron in a stand-in of its runner, against our own `generate`."""

import inspect
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from neuron_moe.models.loader import load_model, parse_config, read_config
from neuron_moe.models.shipped import TINY_NAME
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.config import ParallelConfig
from neuron_moe.serving.neuron_model import (
    NeuronMoeNativeForCausalLM,
    NeuronMoeNativeHybridForCausalLM,
)
from neuron_moe.serving.neuron_weights import parameter_loaders
from neuron_moe.serving.options import NATIVE_ARCHITECTURE, NATIVE_HYBRID_ARCHITECTURE
from neuron_moe.sharded.sharding import sharding_of
from tests.serving import stand_ins
from tests.serving.conftest import Folders, own_tokens
from tests.serving.stand_in_runner import BLOCK, RecompiledError, Runner

PROMPTS = [list(range(3, 8)), list(range(10, 63)), list(range(40, 70))]
SMALL = "qwen3_moe"
SLIDING = "qwen3_moe-sliding-dense-layers"
RECORD = json.loads(Path(__file__).with_name("vllm_neuron.json").read_text())
Parameters = list[list[Any]]


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.stand_in(monkeypatch)


def _hf_config(folder: Path, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(name_or_path=str(folder), dtype=torch.float32, **more)


def _parameters(function: Callable[..., Any]) -> Parameters:
    """Return the names and defaults of a callable as the record has them."""
    return [
        [each.name] if each.default is each.empty else [each.name, each.default]
        for each in inspect.signature(function).parameters.values()
        if each.name != "self" and each.kind is not each.VAR_KEYWORD
    ]


@pytest.mark.parametrize("name", RECORD["model"])
def test_methods_have_the_recorded_signature(name: str) -> None:
    method = getattr(NeuronMoeNativeForCausalLM, name)
    assert _parameters(method) == RECORD["model"][name]


@pytest.mark.parametrize("name", RECORD["plugin"])
def test_stand_ins_have_the_recorded_signature(name: str) -> None:
    owner: Any = stand_ins
    for part in name.split("."):
        owner = getattr(owner, part)
    assert _parameters(owner) == RECORD["plugin"][name]


@pytest.mark.parametrize("segment", [None, 24], ids=["whole", "segments"])
@pytest.mark.parametrize("name", [SLIDING, "llama4-scout", "glm4_moe", "qwen3_5_moe"])
def test_tokens_equal_our_own(name: str, segment: int | None, folder_of: Folders) -> None:
    folder = folder_of(name)
    runner = Runner(folder, torch.float32, trims=True, segment=segment)
    assert runner.generate(PROMPTS, 6) == own_tokens(folder, PROMPTS, 6)


def test_mxfp4_and_sinks_go_through_the_loaders_and_tokens_are_sampled_on_the_device(
    folder_of: Folders,
) -> None:
    folder = folder_of(TINY_NAME)
    runner = Runner(folder, torch.float32, trims=True, samples=True)
    assert runner.generate(PROMPTS, 6) == own_tokens(folder, PROMPTS, 6)


@pytest.mark.long
def test_one_static_graph_serves_each_bucket(folder_of: Folders) -> None:
    folder = folder_of(SLIDING)
    runner = Runner(folder, torch.float32, captures=True, trims=True)
    runner.warm_up()
    assert runner.graphs == 4
    assert runner.generate(PROMPTS, 6) == own_tokens(folder, PROMPTS, 6)
    assert runner.graphs == 4


def test_the_stand_in_refuses_to_recompile() -> None:
    runner = Runner.__new__(Runner)
    runner.is_warm = True
    with pytest.raises(RecompiledError):
        runner.compile_graph(None, None)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=["tp2", "ep2"])
def test_loaders_give_a_rank_its_part(ranks: tuple[int, int], folder_of: Folders) -> None:
    folder = folder_of(TINY_NAME)
    whole = dict(load_model(folder, dtype=torch.float32).named_parameters())
    model_file, config = parse_config(read_config(folder), folder)
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    with parallel_state.as_rank(ParallelConfig(tp=ranks[0], ep=ranks[1]), 1):
        with torch.device("meta"):
            model = model_file.Model(config, dtype=torch.float32)
        sharding = sharding_of(model)
        loaders = parameter_loaders(model, model_file.weight_map(config), folder)
        assert loaders.keys() == whole.keys()
        for name, loader in loaders.items():
            part = loader.transform([stored[key] for key in loader.keys], 1)
            kept = [torch.tensor(list(each)) for each in sharding(name, tuple(whole[name].shape))]
            expected = whole[name].detach()
            for axis, indices in enumerate(kept):
                expected = expected.index_select(axis, indices)
            assert torch.equal(part, expected), name


def test_loaders_may_run_at_once(folder_of: Folders) -> None:
    folder = folder_of(SMALL)
    whole = dict(load_model(folder, dtype=torch.float32).named_parameters())
    model_file, config = parse_config(read_config(folder), folder)
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    with torch.device("meta"):
        model = model_file.Model(config, dtype=torch.float32)
    loaders = parameter_loaders(model, model_file.weight_map(config), folder)
    together = threading.Barrier(4, timeout=30)

    class Slice:
        """Hands its tensor out when three other loaders are as far."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __getitem__(self, where: Any) -> torch.Tensor:
            together.wait()
            return self.tensor[where]

    names = [name for name, loader in loaders.items() if len(loader.keys) == 1][:4]

    def load(name: str) -> torch.Tensor:
        return loaders[name].transform([Slice(stored[loaders[name].keys[0]])], 0)

    with ThreadPoolExecutor(4) as pool:
        for name, loaded in zip(names, pool.map(load, names), strict=True):
            assert torch.equal(loaded, whole[name]), name


@pytest.mark.parametrize(
    ("neuron_config", "words"),
    [
        ({"quantization": "int4"}, "quantization='int4'"),
        ({"attention_dp_size": 2}, "attention_dp_size=2"),
        ({"mlp_dp_size": 2}, "mlp_dp_size=2: must be 1"),
        ({"apply_prefill_dcp": True}, "apply_prefill_dcp=True"),
        ({"all2all_backend": "neuron"}, "all2all_backend='neuron'"),
        ({"fp8_packed_kv": True}, "fp8_packed_kv=True"),
    ],
)
def test_what_it_does_not_do_is_refused(
    neuron_config: dict[str, Any], words: str, folder_of: Folders
) -> None:
    with pytest.raises(ValueError, match=words):
        NeuronMoeNativeForCausalLM.from_configs(
            _hf_config(folder_of(SMALL)), SimpleNamespace(**neuron_config)
        )


def test_context_over_ranks_is_refused(folder_of: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.stand_in(monkeypatch, dcp_size=2)
    with pytest.raises(ValueError, match="decode_context_parallel_size=2"):
        NeuronMoeNativeForCausalLM.from_configs(_hf_config(folder_of(SMALL)), None)


def test_a_name_that_is_no_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="must be the folder of a checkpoint"):
        NeuronMoeNativeForCausalLM.from_configs(_hf_config(Path("org/model")), None)


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (NeuronMoeNativeForCausalLM, "deepseek_v3", "must keep keys and values of one size"),
        (NeuronMoeNativeForCausalLM, "qwen3_5_moe", f"Name {NATIVE_HYBRID_ARCHITECTURE} in"),
        (NeuronMoeNativeHybridForCausalLM, SMALL, f"Name {NATIVE_ARCHITECTURE} in"),
    ],
)
def test_layers_that_the_class_has_no_pages_for_are_refused(
    kind: type[NeuronMoeNativeForCausalLM], name: str, words: str, folder_of: Folders
) -> None:
    with pytest.raises(ValueError, match=words):
        kind.from_configs(_hf_config(folder_of(name)), None)


def test_a_plugin_without_pages_for_states_is_refused(
    folder_of: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["vllm_neuron.model.kv_cache"], "RecurrentLayerSpec")
    with pytest.raises(ValueError, match="no RecurrentLayerSpec"):
        Runner(folder_of("qwen3_5_moe"), torch.float32)


def test_an_option_of_ours_that_does_not_exist_is_refused(folder_of: Folders) -> None:
    config = _hf_config(folder_of(SMALL), neuron_moe={"backnd": "nki"})
    with pytest.raises(ValueError, match="Did you mean 'backend'"):
        NeuronMoeNativeForCausalLM.from_configs(config, None)


def test_pages_of_another_form_are_refused(folder_of: Folders) -> None:
    model = NeuronMoeNativeForCausalLM.from_configs(_hf_config(folder_of(SMALL)), None)
    with pytest.raises(ValueError, match=r"kv_caches\['layers.0.self_attn'\]: None"):
        model.bind_kv_cache({})
    packed = torch.zeros(3, 2, BLOCK // 2, 32, 2)
    with pytest.raises(ValueError, match="unpacked"):
        model.bind_kv_cache({"layers.0.self_attn": [packed, packed]})
    eight_bits = torch.zeros(3, 2, BLOCK, 32, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="leave --kv-cache-dtype out"):
        model.bind_kv_cache({"layers.0.self_attn": [eight_bits, eight_bits]})


def test_embeddings_and_speculation_are_refused(folder_of: Folders) -> None:
    runner = Runner(folder_of(SMALL), torch.float32)
    for name in ("inputs_embeds", "spec_decode_metadata"):
        with pytest.raises(ValueError, match=f"{name}: must be None"):
            runner.model(torch.zeros(1), torch.zeros(1), **{name: torch.zeros(1)})
