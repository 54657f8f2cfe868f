"""Memory of a rank against counts by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from neuron_moe.models.lfm2_moe import ShortConvolution
from neuron_moe.models.nemotron_h import Nothing
from neuron_moe.models.sizes import Spread, rank_bytes
from neuron_moe.models.whole_model import ServingLoad, rank_memory
from neuron_moe.models.whole_model.memory import scratch_bytes
from tests.models.whole_model.test_dense_time import MACHINE, SPREAD, build

LOAD = ServingLoad(batch=32, max_length=8192, prefill_tokens=8192)


def test_weights_are_those_of_sizes_and_the_cache_is_counted_by_hand() -> None:
    model, config = build("gpt_oss_120b")
    memory = rank_memory(model, config, SPREAD, "e5m2", LOAD, MACHINE)
    assert memory.weights == rank_bytes(model, config, SPREAD, "e5m2")
    # 36 layers, of 8 key/value heads one on each rank, 64 numbers each for keys and for values.
    assert memory.kv_cache == 36 * 2 * 64 * 2 * 32 * 8192
    assert memory.hbm == 24 << 30
    assert memory.needed == (
        sum(memory.weights.values()) + memory.kv_cache + memory.state + memory.scratch
    )
    assert memory.fits


def test_a_rank_that_needs_more_than_it_may_does_not_fit() -> None:
    model, config = build("gpt_oss_20b")
    memory = rank_memory(model, config, SPREAD, "e5m2", LOAD, MACHINE)
    assert replace(memory, hbm=memory.needed + memory.reserve).fits
    assert not replace(memory, hbm=memory.needed + memory.reserve - 1).fits


def test_scratch_holds_a_row_of_every_slot_that_a_routing_may_need() -> None:
    model, config = build("deepseek_v3")
    found = scratch_bytes(model, config, SPREAD, LOAD)
    slots = 527 * 128  # `num_blocks` of 8,192 tokens, 8 choices, 16 local experts
    assert found > 2 * slots * 7168 * 2
    assert found < 1.4 * 2 * slots * 7168 * 2
    shorter = replace(LOAD, prefill_tokens=1024)
    assert scratch_bytes(model, config, SPREAD, shorter) < found / 3


def test_states_of_recurrent_layers_count_by_sequence() -> None:
    model, config = build("qwen3_5_35b_a3b")
    whole = rank_memory(model, config, Spread(), "bf16", LOAD, MACHINE)
    half = rank_memory(model, config, Spread(), "bf16", replace(LOAD, batch=16), MACHINE)
    assert whole.state == 2 * half.state > 0


def test_a_short_convolution_makes_four_rows_and_a_layer_without_attention_none() -> None:
    config: Any = SimpleNamespace(hidden_size=64, conv_width=3, conv_bias=False, vocab_size=100)
    layers = nn.ModuleList([ShortConvolution(config, torch.bfloat16), Nothing()])
    load = ServingLoad(batch=1, max_length=32, prefill_tokens=16)
    stream, logits = 2 * 16 * 64 * 2, 100 * 4
    assert scratch_bytes(layers, config, Spread(), load) == stream + 16 * 4 * 64 * 2 + logits


def test_heads_that_do_not_divide_are_padded() -> None:
    model, config = build("llama4_scout")  # 40 query heads
    held = rank_bytes(model, config, SPREAD, "bf16")["attention"]
    heads = {"query": 1, "key": 1, "value": 1, "output": 1}
    assert held == 48 * sum(heads.values()) * 128 * 5120 * 2
    sixteen = Spread(tp=4, ep=4, dense_tp=16)
    held = rank_bytes(model, config, sixteen, "bf16")["attention"]
    assert held == 48 * (3 + 1 + 1 + 3) * 128 * 5120 * 2


@pytest.mark.parametrize("name", ["batch", "max_length", "prefill_tokens", "block_size"])
def test_a_load_is_of_positive_numbers(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        replace(LOAD, **{name: 0})
