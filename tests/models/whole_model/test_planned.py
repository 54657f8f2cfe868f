"""Models as they are planned: sizes counted in their layers, and where their positions end."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from neuron_moe.configs import load_config
from neuron_moe.models.loader import parse_config
from neuron_moe.models.sizes import Spread, cache_bytes_per_token, state_bytes
from neuron_moe.models.whole_model import (
    PlannedModel,
    Serving,
    StepWork,
    dense_times,
    layer_kinds,
    plan_model,
    plan_serving,
)
from neuron_moe.parallel.topology import instance
from neuron_moe.planner.coefficients import Machine
from neuron_moe.planner.sizes import ModelSizes
from neuron_moe.tools import cli
from neuron_moe.train.balance import uniform_trace
from tests.models.families import FAMILIES, WHOLE, names

MACHINE = Machine.build(instance("trn2.3xlarge"))


def planned(name: str, **changes: Any) -> PlannedModel:
    values = FAMILIES[name].config(**changes)
    if values["model_type"] in WHOLE:
        values = {**WHOLE[values["model_type"]], "text_config": values}
    return plan_model(name, json.loads(AutoConfig.for_model(**values).to_json_string()))


def total(sizes: ModelSizes) -> int:
    """Return all parameters, as the planner sees them."""
    inner = sizes.num_experts * sizes.expert_hidden_size * sizes.intermediate_size
    shared = sizes.hidden_size * sizes.shared_size
    return sizes.num_matrices * (inner + shared) * sizes.num_moe_layers + sizes.dense_parameters


@pytest.mark.parametrize(
    "name",
    [each for each in names(slow=(), is_long=True) if each.values != ("longcat_flash",)],
)
def test_every_family_is_planned_by_what_its_layers_hold(name: str) -> None:
    found = planned(name)
    assert found.problem == ""
    assert found.model is not None
    held = sum(parameter.numel() for parameter in found.model.parameters())
    assert total(found.sizes) == pytest.approx(held, rel=0.02)  # biases and gates of experts
    serving = Serving(prompt=64, context=96, batch=8, expert_format="bf16")
    routing = uniform_trace(64, found.sizes.num_experts, found.sizes.top_k)
    plan = plan_serving(found, MACHINE, routing, serving)
    best = plan.layouts[0]
    assert min(best.ttft_ms, best.tpot_ms, best.max_batch) > 0
    assert best.tp * best.ep * best.dp == MACHINE.ranks


@pytest.mark.parametrize(
    ("name", "states", "kept"),
    [
        # Convolution and memory of two layers: 8 heads of 16 x 16; keys and values of one layer.
        ("granitemoehybrid", 2 * (3 * (128 + 32) * 2 + 8 * 16 * 16 * 4), 2 * 2 * 16 * 2),
        # 4 heads of 16 x 16, of queries, keys and values; the latent and its rotated key.
        ("kimi_linear", 2 * (3 * 3 * 64 * 2 + 4 * 16 * 16 * 4), (40 + 8) * 2),
        ("bailing_hybrid", 2 * (3 * 3 * 64 * 2 + 4 * 16 * 16 * 4), (40 + 8) * 2),
    ],
)
def test_states_and_latents_count(name: str, states: int, kept: int) -> None:
    model = planned(name).model
    assert model is not None
    assert state_bytes(model, Spread(), 2) == states
    assert cache_bytes_per_token(model, Spread(), 2) == kept


def test_layers_of_one_part_have_that_part_alone() -> None:
    found = planned("nemotron_h")
    assert found.model is not None
    names = {kind.name: kind.count for kind in layer_kinds(found.model)}
    assert names == {"recurrent": 2, "routed and shared experts": 2, "full attention": 1}
    work = StepWork(phase="decode", sequences=1, new_tokens=1, context=8)
    times = dense_times(found.model, found.config, Spread(), MACHINE, work)
    parts = {(part.kind, part.name) for part in times.parts}
    assert ("recurrent", "attention") in parts
    assert not any(name.startswith("attention") for kind, name in parts if "experts" in kind)
    assert found.sizes.num_matrices == 2  # no gate


def test_an_mlp_beside_the_experts_takes_its_time() -> None:
    found = planned("gemma4_text")
    assert found.model is not None
    work = StepWork(phase="decode", sequences=1, new_tokens=1, context=8)
    times = dense_times(found.model, found.config, Spread(), MACHINE, work)
    assert sum(part.count for part in times.parts if part.name == "dense layer") == 3


def test_experts_that_the_planner_cannot_tell_apart_are_named() -> None:
    with pytest.raises(ValueError, match="4 experts of each layer give back what they are given"):
        planned("longcat_flash")
    unknown = plan_model("sizes", {**load_config("mixtral_8x7b"), "model_type": "other"})
    assert unknown.model is None
    assert "model_type='other'" in unknown.problem
    assert unknown.longest is None
    assert Serving.of(unknown, None, 1, None).prompt == 8192


@pytest.mark.parametrize(
    ("prompt", "context", "found"),
    [
        (None, None, (256, 512)),
        (100, None, (100, 512)),
        (None, 400, (200, 400)),
        (512, None, (512, 512)),
        (20, 30, (20, 30)),
    ],
)
def test_what_nobody_gave_ends_where_the_model_ends(
    prompt: int | None, context: int | None, found: tuple[int, int]
) -> None:
    serving = Serving.of(planned("qwen3_moe"), prompt, 4, context)
    assert (serving.prompt, serving.context) == found
    assert ("max_position_embeddings=512" in serving.note) == (found[1] == 512)


def test_a_longer_prompt_or_context_is_refused_and_says_why() -> None:
    model = planned("glm_moe_dsa", index_topk=128)
    with pytest.raises(ValueError, match=r"prompt=129: must be at most .*=128 of glm.*index_topk"):
        Serving.of(model, 129, 1, None)
    with pytest.raises(ValueError, match="context=600: must be at most"):
        Serving.of(planned("qwen3_moe"), 10, 1, 600)


def test_the_command_says_where_the_model_ends(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "--model", "mixtral_8x7b", "--instance", "trn2.3xlarge"]
    assert cli.main([*args, "--prefill-tokens", "32769"]) == 2
    assert "prompt=32769: must be at most max_position_embeddings=32768" in capsys.readouterr().err


# Total parameters as published, in billions; without layers that predict further tokens.
PUBLISHED = {
    "gpt_oss_20b": 20.9,
    "gpt_oss_120b": 116.8,
    "mixtral_8x7b": 46.7,
    "qwen3_30b_a3b": 30.5,
    "qwen3_235b_a22b": 235.1,
    "deepseek_v3": 671.0,
    "glm_4_5_air": 106.9,
    "kimi_k2": 1026.4,
    "minimax_m2": 228.7,
    "ernie_4_5_21b_a3b": 21.8,
    "dbrx": 131.6,
    "llama4_scout": 107.8,
    "llama4_maverick": 400.7,
    "qwen3_5_35b_a3b": 34.66,
    "qwen3_5_397b_a17b": 396.3,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_models(name: str) -> None:
    sizes = plan_model(name, load_config(name)).sizes
    assert total(sizes) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)
    _, config = parse_config(load_config(name), name)
    keys = ModelSizes.from_config(name, load_config(name))
    assert keys.num_moe_layers == sizes.num_moe_layers
    assert keys.shared_size == sizes.shared_size
    assert keys.weight_format == sizes.weight_format
    assert config.num_hidden_layers == keys.num_layers
    assert torch.tensor(total(keys)).isclose(torch.tensor(total(sizes)), rtol=0.03)
