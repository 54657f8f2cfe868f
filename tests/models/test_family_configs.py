"""config.json of every family but GPT-OSS: published sizes, published tensors, refusals."""

from typing import Any

import pytest
import torch

from neuron_moe.checkpoint import match_parameters
from neuron_moe.configs import load_config
from neuron_moe.models.loader import find_model_file
from neuron_moe.models.sizes import GROUPS, count_active_parameters, count_parameters
from tests.models import published
from tests.models.families import FAMILIES

# Total and activated parameters of the model cards, in billions as they round them.
SIZES = {
    "qwen3_30b_a3b": (30.5, 3.3),
    "qwen3_235b_a22b": (235, 22),
    "mixtral_8x7b": (46.7, 12.9),
}


def meta_model(name: str) -> Any:
    """Return the model of a shipped configuration, without memory."""
    values = load_config(name)
    file = find_model_file(values["model_type"])
    with torch.device("meta"):
        return file.Model(file.Config.from_hf(values))


@pytest.mark.parametrize("name", SIZES)
def test_shipped_configurations_have_the_published_size(name: str) -> None:
    model = meta_model(name)
    groups = count_parameters(model)
    assert tuple(groups) == GROUPS
    total, active = sum(groups.values()), count_active_parameters(model)
    embedding = model.embed_tokens.weight.numel()
    assert (total / 1e9, (active + embedding) / 1e9) == pytest.approx(SIZES[name], rel=0.02)


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "mixtral_8x7b"])
def test_every_published_tensor_is_read_and_every_parameter_filled(name: str) -> None:
    values, model = load_config(name), meta_model(name)
    header = getattr(published, values["model_type"])(values)
    checkpoint = published.as_checkpoint(header)
    weight_map = find_model_file(values["model_type"]).weight_map(model.config)
    work = match_parameters(checkpoint, weight_map, dict(model.state_dict()))
    assert len(work) == len(model.state_dict())
    assert published.count(checkpoint) == sum(p.numel() for p in model.parameters())


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3-unknown": ("qwen3_moe", {"moe_intermediate": 3}, "unknown key moe_intermediate=3"),
    "qwen3-missing": ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob is missing"),
    "qwen3-two-spellings": ("qwen3_moe", {"num_local_experts": 4}, "num_local_experts=4: must agr"),
    "qwen3-top-k": ("qwen3_moe", {"num_experts_per_tok": 9}, "top_k=9: must not exceed"),
    "qwen3-all-dense": ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "must leave a layer with"),
    "qwen3-no-list": ("qwen3_moe", {"mlp_only_layers": "1"}, "must be a whole number or a list"),
    "qwen3-step": ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    "qwen3-quantised": (
        "qwen3_moe",
        {"quantization_config": {"quant_method": "fp8"}},
        "must be absent. Take a checkpoint in a format that is read here",
    ),
    "mixtral-unknown": ("mixtral", {"num_experts": 8}, "unknown key num_experts=8"),
    "mixtral-no-window": ("mixtral", {"sliding_window": 0}, "sliding_window=0"),
    "mixtral-top-k": ("mixtral", {"num_experts_per_tok": 9}, "top_k=9: must not exceed"),
}


def test_a_head_takes_its_part_of_the_hidden_size_where_no_key_says_else() -> None:
    assert read("mixtral", {"head_dim": None}).head_dim == 16
    assert read("mixtral", {"head_dim": 32}).head_dim == 32


def read(name: str, changes: dict[str, Any]) -> Any:
    """Read a tiny config.json with some keys changed; None leaves one out."""
    values = {**FAMILIES[name].config(), "rope_theta": 1e4, "rms_norm_eps": 1e-6, **changes}
    kept = {key: value for key, value in values.items() if value is not None}
    return find_model_file(values["model_type"]).Config.from_hf(kept)


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_config_is_refused_by_key_and_value(case: str) -> None:
    name, changes, message = BAD[case]
    read(name, {})
    with pytest.raises(ValueError, match=message):
        read(name, changes)
