"""Parameter counts and memory per rank, against published totals and counts by hand."""

import pytest
import torch

from neuron_moe.configs import load_config
from neuron_moe.models.dbrx import DbrxConfig
from neuron_moe.models.dbrx import Model as Dbrx
from neuron_moe.models.deepseek_v3 import DeepseekV3Config
from neuron_moe.models.deepseek_v3 import Model as DeepseekV3
from neuron_moe.models.gpt_oss import GptOssConfig, Model
from neuron_moe.models.loader import parse_config
from neuron_moe.models.qwen3_5_moe import Model as Qwen35Moe
from neuron_moe.models.qwen3_5_moe import Qwen35MoeConfig
from neuron_moe.models.sizes import (
    Spread,
    cache_bytes_per_token,
    count_active_parameters,
    count_parameters,
    rank_bytes,
    state_bytes,
)
from tests.models.families import FAMILIES

# Model card, arXiv 2508.10925, table 1: parameters, active ones without the embedding; and bytes of
# the published safetensors, where the router counts here in float32.
PUBLISHED = {"gpt_oss_20b": (20.91e9, 3.61e9, 13.76e9), "gpt_oss_120b": (116.83e9, 5.13e9, 65.25e9)}


def build(name: str) -> tuple[Model, GptOssConfig]:
    config = GptOssConfig.from_hf(load_config(name))
    with torch.device("meta"):
        return Model(config), config


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_mxfp4_bytes_are_the_published_ones(name: str) -> None:
    model, config = build(name)
    total = sum(parameter.numel() for parameter in model.parameters())
    size = sum(rank_bytes(model, config, Spread(), "mxfp4").values())
    found = total, count_active_parameters(model), size
    assert found == pytest.approx(PUBLISHED[name], rel=1e-3)


def test_groups_count_every_parameter_once() -> None:
    model, config = build("gpt_oss_20b")
    total = sum(parameter.numel() for parameter in model.parameters())
    assert sum(count_parameters(model).values()) == total
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(rank_bytes(model, config, Spread(), "bf16").values()) == nbytes


def test_a_rank_holds_its_part_of_each_axis() -> None:
    model, config = build("gpt_oss_20b")
    held = rank_bytes(model, config, Spread(tp=16, ep=4), "bf16")
    experts, hidden, inner, layers = 32 // 4, 2880, 2880 // 16, 24
    assert held["routed experts"] == layers * 2 * experts * (
        hidden * 2 * inner + 2 * inner + inner * hidden + hidden
    )
    # 64 query heads over 16 ranks; 8 key/value heads, each on two ranks; the output bias whole.
    columns = 64 * (64 // 16 + 2)
    assert held["attention"] == layers * 2 * (
        hidden * columns + columns + 64 * 4 * hidden + hidden + 64 // 16
    )
    assert held["vocabulary"] == 2 * 2 * (201088 // 16) * hidden
    assert held["router"] == layers * 4 * (32 * hidden + 32)
    assert held["norms"] == 2 * (2 * layers + 1) * hidden


def test_parts_of_all_ranks_make_up_the_experts() -> None:
    model, config = build("gpt_oss_20b")
    whole = rank_bytes(model, config, Spread(), "bf16")["routed experts"]
    part = rank_bytes(model, config, Spread(tp=4, ep=8), "bf16")["routed experts"]
    down_bias = 24 * 32 * 2880 * 2  # repeated on every tensor-parallel rank
    assert part * 32 == whole + 3 * down_bias


def test_cache_of_a_token_shrinks_until_each_rank_has_one_head() -> None:
    model = build("gpt_oss_20b")[0]
    sizes = [cache_bytes_per_token(model, Spread(tp=tp), 2) for tp in (1, 2, 8, 64)]
    one_head = 2 * 24 * 64 * 2
    assert sizes == [8 * one_head, 4 * one_head, one_head, one_head]


def test_latents_are_kept_whole_on_every_rank() -> None:
    config = DeepseekV3Config.from_hf(load_config("deepseek_v3"))
    with torch.device("meta"):
        model = DeepseekV3(config)
    sizes = [cache_bytes_per_token(model, Spread(tp=tp), 2) for tp in (1, 8, 128)]
    assert sizes == [61 * (512 + 64) * 2] * 3
    held = rank_bytes(model, config, Spread(tp=16), "bf16")["attention"]
    cut = (1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168) // 16
    assert held == 61 * 2 * (7168 * 1536 + 7168 * 576 + cut)


def test_keys_and_values_of_one_matrix_are_repeated_too() -> None:
    config = DbrxConfig.from_hf(load_config("dbrx"))
    with torch.device("meta"):
        model = Dbrx(config)
    held = rank_bytes(model, config, Spread(tp=16), "bf16")["attention"]
    assert held == 40 * 2 * 6144 * (3 * 128 + 2 * 128 + 6144 // 16)  # 3 of 48 heads, 1 of 8


def test_a_recurrent_layer_keeps_a_state_of_each_sequence_and_nothing_of_a_token() -> None:
    config = Qwen35MoeConfig.from_hf(load_config("qwen3_5_35b_a3b"))
    with torch.device("meta"):
        model = Qwen35Moe(config)
    assert cache_bytes_per_token(model, Spread(tp=2), 2) == 10 * 2 * 256 * 2
    channels, memory = 2 * 16 * 128 + 32 * 128, 32 * 128 * 128
    assert state_bytes(model, Spread(tp=2), 2) == 30 * (3 * channels * 2 + memory * 4) // 2
    assert state_bytes(build("gpt_oss_20b")[0], Spread(), 2) == 0
    file, config = parse_config(FAMILIES["nemotron_h-nano"].config(), "nemotron")
    with torch.device("meta"):
        other = file.Model(config)
    whole, half = (state_bytes(other, Spread(tp=ranks), 2) for ranks in (1, 2))
    assert 0 < whole == 2 * half


BAD = {
    "zero": ({"tp": 0}, "tp=0"),
    "heads": ({"tp": 3}, "tp=3: must divide num_attention_heads=64"),
    "experts": ({"ep": 5}, "ep=5: must divide num_experts=32"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_spread_that_does_not_divide_is_refused(case: str) -> None:
    sizes, message = BAD[case]
    model, config = build("gpt_oss_20b")
    with pytest.raises(ValueError, match=message):
        rank_bytes(model, config, Spread(**sizes), "bf16")
