"""Checkpoints that vLLM serves, what our own `generate` answers, and runs of vLLM."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from neuron_moe.checkpoint import save_checkpoint, unique_parameters
from neuron_moe.models.generation import GenerationOptions, generate
from neuron_moe.models.loader import CONFIG_FILE, load_model, parse_config, read_config
from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder
from neuron_moe.serving.environment import server_environment
from tests.models.families import FAMILIES, write_checkpoint
from tests.models.test_vision_towers import model_with_tower, publish_kimi

# vLLM's attention on a CPU has few head sizes, and chunks must be whole blocks of its cache.
SIZES = {"head_dim": 32, "attention_chunk_size": 64, "max_position_embeddings": 4096}
OWN_SIZES = {
    # Their heads are what that divides.
    **{
        name: {"num_attention_heads": 2}
        for name in (
            *("dbrx", "olmoe", "qwen2_moe", "granitemoe", "granitemoeshared", "flex_olmo"),
            *("granitemoehybrid", "lfm2_moe"),
        )
    },
    "deepseek_v3": {"qk_nope_head_dim": 24},  # with the rotated part it is 32
    "deepseek_v32": {"qk_nope_head_dim": 24},
    "kimi_linear": {"qk_nope_head_dim": 24},
    "kimi_k3": {"qk_nope_head_dim": 24},
    "bailing_hybrid": {"qk_nope_head_dim": 24},
    "deepseek_v4": {"head_dim": 16},  # any: none of it is vLLM's attention
    "hy_v4": {"qk_nope_head_dim": 24},
    "glm_moe_dsa": {"qk_nope_head_dim": 24},
    "longcat_flash": {"head_dim": 8, "qk_nope_head_dim": 24},
    "glm4_moe_lite": {"qk_nope_head_dim": 24},
    "mistral4": {"qk_nope_head_dim": 24},
}
# Run inside vLLM, by themselves: the first in the short form of the tests, too.
FIRST = (TINY_NAME, "qwen3_moe", "deepseek_v3")
OTHERS = (
    "qwen3_moe-sliding-dense-layers",
    "glm4_moe",
    "deepseek_v3-kimi",
    "llama4-scout",
    "llama4-temperature",
    "mixtral",
    "minimax_m2",
    "ernie4_5_moe",
    "dbrx",
    "olmoe",
    "qwen2_moe",
    "solar_open",
    "hy_v3",
    "dots1",
    "exaone_moe",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm4_moe_lite",
    "hunyuan_v1_moe",
    "granitemoe",
    "granitemoeshared",
    "flex_olmo",
    "afmoe",
    "mistral4",
    "minimax_m3_vl_text",
    "longcat_flash",
    "laguna",
    "mimo_v2_flash",
    "gemma4_text",
    "hy_v4",
    "step3p5",
    "step3p5-biases",  # with a vision tower beside the text model
    "phimoe",
    "kimi_k25",
    "mistral3",
)
# With layers that keep a state of each sequence.
RECURRENT = (
    "qwen3_5_moe",
    "qwen3_next",
    "nemotron_h",
    "granitemoehybrid",
    "lfm2_moe",
    "kimi_linear",
    "kimi_k3",
    "bailing_hybrid",
    "deepseek_v4",
)
OFFLINE = Path(__file__).with_name("offline.py")
MAX_TOKENS = 12  # of an answer
LONGEST_S = 3600  # where others use the machine

Folders = Callable[[str], Path]
Tokens = list[list[int]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests inside vLLM where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm") is not None:
                item.add_marker(pytest.mark.skip("vllm is not installed"))


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return the checkpoint of a family, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name == TINY_NAME:
            return checkpoint_folder(name)
        if name in made:
            return made[name]
        made[name] = tmp_path_factory.mktemp("served")
        if name not in FAMILIES:  # published with a tower
            sizes = {"qk_nope_head_dim": 24, "max_position_embeddings": 4096}
            model_with_tower(name, **sizes).save_pretrained(made[name])
            if name == "kimi_k25":
                publish_kimi(made[name])
        else:
            sizes = {key: size for key, size in SIZES.items() if key in FAMILIES[name].config()}
            config = FAMILIES[name].config(**sizes | OWN_SIZES.get(name.partition("-")[0], {}))
            write = write_checkpoint if config["model_type"] in CONFIG_MAPPING else _write_own
            write(config, made[name], seed=len(name))
            if name == "step3p5":
                _publish(made[name])
        return made[name]

    return make


def _write_own(values: dict[str, Any], folder: Path, seed: int) -> None:
    """Write what `write_checkpoint` does, of a family that transformers has no class of here."""
    torch.manual_seed(seed)
    values = {"rms_norm_eps": 1e-6, **values}  # usual in transformers
    (folder / CONFIG_FILE).write_text(json.dumps(values))
    model_file, config = parse_config(values, folder)
    model = model_file.Model(config, dtype=torch.float32)
    parameters = unique_parameters(model)
    with torch.no_grad():
        for tensor in parameters.values():
            tensor.copy_(torch.randn_like(tensor) * 0.2 + (tensor if tensor.ndim == 1 else 0))
    variant = FAMILIES[values["model_type"]].variant
    save_checkpoint(parameters, model_file.weight_map(config), folder, variant=variant)


def _publish(folder: Path) -> None:
    """Make a checkpoint of Step-3.7 one of Step-3.5: of text alone, with lists by layer."""
    text = read_config(folder)["text_config"]
    kinds, ropes = text["layer_types"], text.pop("rope_parameters")
    own = "rope_theta", "partial_rotary_factor"
    sparse = [str(layer) for layer, kind in enumerate(text["mlp_layer_types"]) if kind == "sparse"]
    text |= {
        "rope_theta": [ropes[kind]["rope_theta"] for kind in kinds],
        "partial_rotary_factors": [ropes[kind].get(own[1], 1.0) for kind in kinds],
        "rope_scaling": {k: v for k, v in ropes["full_attention"].items() if k not in own},
        "yarn_only_types": ["full_attention"],
        "attention_other_setting": {"num_attention_heads": text["num_sliding_attention_heads"]},
        "moe_layers_enum": ",".join(sparse),
        "moe_num_experts": text.pop("n_routed_experts"),
        "moe_top_k": text.pop("num_experts_per_tok"),
        "num_attention_groups": text.pop("num_key_value_heads"),
    }
    for key in ("mlp_layer_types", "num_sliding_attention_heads", "per_layer_config"):
        del text[key]
    (folder / "config.json").write_text(json.dumps(text))
    tensors = load_file(folder / "model.safetensors")
    kept = {key: value.clone() for key, value in tensors.items() if not key.startswith("vi")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def prompts_of(folder: Path, alone: int = 20, sharing: int = 12) -> Tokens:
    """Return random prompts of 5 to 230 tokens, of which some begin with the same 150."""
    config = read_config(folder)
    vocab_size = config.get("text_config", config)["vocab_size"]
    draws = torch.Generator().manual_seed(3)

    def draw(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=draws))
        return torch.randint(3, vocab_size, (length,), generator=draws).tolist()

    prefix = draw(150, 151)
    return [draw(5, 231) for _ in range(alone)] + [prefix + draw(3, 61) for _ in range(sharing)]


@cache
def asked(folder: Path, alone: int = 20, sharing: int = 12) -> tuple[Tokens, Tokens]:
    """Return prompts and what our own `generate` answers to each."""
    prompts = prompts_of(folder, alone, sharing)
    return prompts, own_tokens(folder, prompts, MAX_TOKENS)


@torch.inference_mode()
def own_tokens(folder: Path, prompts: Tokens, max_tokens: int) -> Tokens:
    """Return the greedy tokens of our own `generate` in float32."""
    model: Any = load_model(folder, dtype=torch.float32)
    return generate(model, prompts, GenerationOptions(max_new_tokens=max_tokens)).token_ids


@pytest.fixture(scope="session")
def run_vllm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return what calls tests/serving/offline.py: requests to answers, in one process."""

    def run(requests: list[dict[str, Any]], *, ranks: int = 1, **variables: str) -> Any:
        folder = tmp_path_factory.mktemp("vllm")
        ask, answer = folder / "requests.json", folder / "answers.json"
        ask.write_text(json.dumps(requests))
        # The engine in the process itself starts several seconds sooner.
        environment = {**os.environ, **server_environment(ranks), **variables}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        command = [sys.executable, str(OFFLINE), str(ask), str(answer)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST_S
        )
        assert done.returncode == 0, done.stderr[-6000:]
        return json.loads(answer.read_text())

    return run
