"""Times outside the experts: bytes and products by hand, and one home for collectives."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from neuron_moe.configs import config_names, load_config
from neuron_moe.models.loader import parse_config
from neuron_moe.models.sizes import Spread
from neuron_moe.models.whole_model import (
    DenseTimes,
    PartTime,
    StepWork,
    dense_times,
    layer_kinds,
)
from neuron_moe.parallel.topology import instance
from neuron_moe.planner.coefficients import COEFFICIENTS, Machine
from neuron_moe.planner.layer_cost import RoutedTokens, layer_cost
from neuron_moe.planner.sizes import ModelSizes

MACHINE = Machine.build(instance("trn2.48xlarge"))
SPREAD = Spread(tp=4, ep=16, dense_tp=64)
FAST = ("gpt_oss_20b", "ernie_4_5_21b_a3b", "qwen3_5_35b_a3b", "mixtral_8x7b")
PREFILL = StepWork(phase="prefill", sequences=1, new_tokens=8192, context=8192)
DECODE = StepWork(phase="decode", sequences=32, new_tokens=1, context=8192)


@functools.cache
def build(name: str) -> tuple[nn.Module, Any]:
    file, config = parse_config(load_config(name), name)
    with torch.device("meta"):
        return file.Model(config), config


def times(name: str, work: StepWork, spread: Spread = SPREAD) -> DenseTimes:
    return dense_times(*build(name), spread, MACHINE, work)


def find(found: DenseTimes, kind: str, name: str) -> PartTime:
    return next(part for part in found.parts if (part.kind, part.name) == (kind, name))


KINDS = {
    "gpt_oss_120b": {"window 128, experts": 18, "full attention, experts": 18},
    "deepseek_v3": {
        "full attention, dense": 3,
        "full attention, routed and shared experts": 58,
    },
    "llama4_maverick": {
        "chunk 8192, dense": 24,
        "chunk 8192, routed and shared experts": 12,
        "full attention, routed and shared experts": 12,
    },
}


@pytest.mark.parametrize("name", KINDS)
def test_layers_that_are_alike_are_one_kind(name: str) -> None:
    model, _ = build(name)
    kinds = layer_kinds(model)
    assert {kind.name: kind.count for kind in kinds} == KINDS[name]
    numbers = sorted(number for kind in kinds for number in kind.layers)
    assert numbers == list(range(len(model.layers)))


def test_decode_reads_the_cache_at_the_rate_of_the_memory() -> None:
    part = find(times("qwen3_235b_a22b", DECODE), "full attention, experts", "attention")
    cache_bytes = 32 * 8192 * 2 * 128 * 2  # one key and one value head of 128 numbers
    assert part.bound == "HBM"
    assert part.us == pytest.approx(cache_bytes / MACHINE.hbm_bytes_per_ns / 1e3)


def test_a_window_is_all_that_its_layers_read() -> None:
    found = times("gpt_oss_120b", DECODE)
    narrow = find(found, "window 128, experts", "attention")
    assert narrow.us < find(found, "full attention, experts", "attention").us / 20


def test_prefill_multiplies_at_the_peak_of_the_array() -> None:
    found = times("qwen3_235b_a22b", PREFILL, Spread(tp=4, ep=16, dense_tp=1))
    part = find(found, "full attention, experts", "attention projections")
    # Queries and output of 64 heads, keys and values of 4, of 128 numbers each.
    macs = 8192 * 4096 * (2 * 64 + 2 * 4) * 128
    assert part.bound == "tensor engine"
    assert part.us == pytest.approx(macs / 128**2 / 2.4 / 2 / 1e3, rel=1e-3)


def test_causal_attention_is_half_of_a_square() -> None:
    found = times("qwen3_235b_a22b", PREFILL, Spread(tp=4, ep=16, dense_tp=64))
    part = find(found, "full attention, experts", "attention")
    logits = 8192 * (8192 + 1) / 2  # of one head
    scalar_us = logits / 128 / 1.2 / 2 / 1e3
    assert part.us == pytest.approx(scalar_us, rel=0.05)


def test_latents_are_read_in_decode_and_keys_made_in_prefill() -> None:
    kind = "full attention, routed and shared experts"
    decode = find(times("deepseek_v3", DECODE), kind, "attention")
    read_us = 32 * 8192 * 576 * 2 / MACHINE.hbm_bytes_per_ns / 1e3
    tiles = 32 * 8192 / 128 * (5 + 4)  # of latents with positions, and without
    products_us = tiles * COEFFICIENTS["least_columns"].value / 2.4 / 2 / 1e3
    assert decode.us == pytest.approx(max(read_us, products_us))
    model, _ = build("deepseek_v3")
    attention = layer_kinds(model)[0].attention
    assert attention.core_sizes(1)[1:] == (1, 576, 512)
    assert attention.core_sizes(64)[1:] == (128, 192, 128)


@pytest.mark.parametrize("work", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_collectives_of_experts_are_the_planners(work: StepWork) -> None:
    name = "qwen3_235b_a22b"
    sizes = ModelSizes.from_config(name, load_config(name))
    chosen = torch.zeros(work.tokens, sizes.top_k, dtype=torch.int32)
    cost = layer_cost(
        sizes, MACHINE, 4, 16, "replicate", RoutedTokens(work.phase, chosen, sizes.num_experts)
    )
    found = [each for _, _, each in times(name, work).collectives]
    of_experts = [each for each in found if each.part in ("experts", "routing")]
    assert sum(each.us for each in of_experts) == pytest.approx(cost.collective_us)
    assert sum(each.wire_bytes for each in of_experts) == pytest.approx(cost.wire_bytes)


def test_one_rank_has_no_collectives() -> None:
    assert times("gpt_oss_20b", DECODE, Spread()).collectives == ()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in config_names()],
)
def test_every_shipped_model_has_times(name: str) -> None:
    model, config = build(name)
    for work in (PREFILL, DECODE):
        found = dense_times(model, config, Spread(tp=4, ep=4, dense_tp=16), MACHINE, work)
        assert all(part.us > 0 and part.instructions > 0 for part in found.parts), found
        assert found.us == pytest.approx(found.parts_us + found.collectives_us)


def test_a_step_must_see_its_own_tokens() -> None:
    with pytest.raises(ValueError, match="context=4: must hold the 8 new tokens"):
        StepWork(phase="prefill", sequences=1, new_tokens=8, context=4)
