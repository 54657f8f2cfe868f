"""The planner's cost model agrees with the roofline it is made of, and its choices follow."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from neuron_moe.configs import load_config
from neuron_moe.parallel.topology import INSTANCES
from neuron_moe.planner.coefficients import COEFFICIENTS, Machine
from neuron_moe.planner.layer_cost import RoutedTokens, layer_cost, matmul_cycles
from neuron_moe.planner.search import (
    PHASES,
    cost_layouts,
    explain,
    phase_memory,
    synthetic_routings,
)
from neuron_moe.planner.sizes import ModelSizes

GPT_120B = ModelSizes.from_config("gpt_oss_120b", load_config("gpt_oss_120b"), "bf16")
QWEN = ModelSizes.from_config("qwen3_235b", load_config("qwen3_235b_a22b"))
DEEPSEEK = ModelSizes.from_config("deepseek_v3", load_config("deepseek_v3"))
TRN2 = Machine.build(INSTANCES["trn2.48xlarge"])


def even_trace(model: ModelSizes, tokens: int) -> Tensor:
    """Give every expert the same load; neighbours of a token's choices are on other ranks."""
    steps = model.num_experts // model.top_k
    first = torch.arange(tokens).unsqueeze(1) + steps * torch.arange(model.top_k)
    return (first % model.num_experts).int()


# Roofline for 8,192 tokens on 64 logical cores, bf16, even routing, in us: (EP, TE, HBM).
# HBM bytes: weights of all local experts, three passes over the routed rows, one over the output.
ROOFLINE = [
    (GPT_120B, 1, 286.0, 983.0),
    (GPT_120B, 4, 215.0, 398.0),
    (GPT_120B, 16, 212.0, 251.0),
    (GPT_120B, 64, 201.0, 215.0),
    (replace(DEEPSEEK, weight_format="bf16"), 1, 1187.0, 4536.0),
    (replace(DEEPSEEK, weight_format="bf16"), 64, 712.0, 709.0),
]


@pytest.mark.parametrize(
    ("model", "ep", "tensor_us", "hbm_us"),
    ROOFLINE,
    ids=[f"{model.name}-EP{ep}" for model, ep, *_ in ROOFLINE],
)
def test_experts_take_the_time_of_the_roofline(
    model: ModelSizes, ep: int, tensor_us: float, hbm_us: float
) -> None:
    work = RoutedTokens("prefill", even_trace(model, 8192), model.num_experts)
    cost = layer_cost(model, TRN2, 64 // ep, ep, "replicate", work)
    assert cost.busiest_over_mean == pytest.approx(1.0)
    # The roofline takes 725 bytes/ns, the chip's record 716; it expects tiles of random loads.
    assert cost.hbm_us == pytest.approx(hbm_us * 725 / 716, rel=0.01)
    assert cost.tensor_us == pytest.approx(tensor_us, rel=0.25)
    assert cost.tensor_us <= tensor_us * 1.01


def test_a_launch_takes_longer_than_its_products_and_less_with_the_rows_of_its_experts_alone() -> (
    None
):
    model = ModelSizes.from_config("qwen3_30b_a3b", load_config("qwen3_30b_a3b"), "bf16")
    work = RoutedTokens("prefill", even_trace(model, 8192), model.num_experts)
    every, own = (
        layer_cost(model, TRN2, 1, 64, form, work) for form in ("replicate", "all_to_all")
    )
    assert max(own.tensor_us, own.hbm_us) < own.experts_us < every.experts_us


def test_a_latent_s_projections_count_beside_experts_that_are_smaller() -> None:
    latent = replace(QWEN, latent_size=1024)
    work = RoutedTokens("prefill", even_trace(QWEN, 8192), QWEN.num_experts)
    plain, cost = (layer_cost(model, TRN2, 4, 16, "replicate", work) for model in (QWEN, latent))
    # 8,192 rows into the latent, 128 of this rank's own out of it, on two cores of 128 x 128.
    cycles = (8192 + 128) * (QWEN.hidden_size // 128) * (1024 // 128)
    clock = COEFFICIENTS["tensor_clock_ghz"].value
    assert cost.latent_us == pytest.approx(cycles / 2 / clock / 1e3, rel=0.01)
    assert plain.latent_us == 0.0
    assert cost.experts_us < plain.experts_us
    parts = (cost.router_us, cost.experts_us, cost.shared_us, cost.latent_us, cost.collective_us)
    assert cost.total_us == pytest.approx(sum(parts))


def test_matmul_cycles_take_the_better_operand_as_stationary() -> None:
    least = COEFFICIENTS["least_columns"].value  # what one row costs, too
    assert matmul_cycles(128, 128, 128) == 128
    assert matmul_cycles(1, 128, 128) == least
    assert matmul_cycles(8192, 128, 16) == 64 * least  # rows stationary, 16 columns as the least
    assert matmul_cycles(16, 256, 8192) == 2 * 64 * least


def test_collective_times_follow_their_coefficients() -> None:
    base, rate = (
        COEFFICIENTS[name].value for name in ("collective_base_ns", "collective_bytes_per_ns")
    )
    assert TRN2.gather_ns(1e6, 1) == 0.0
    assert TRN2.gather_ns(1e6, 64) == pytest.approx(base + 1e6 * 63 / 64 / rate)
    four = Machine.build(INSTANCES["trn2u.48xlarge"], nodes=4)
    assert four.ranks == 256
    assert four.gather_ns(1e6, 256) > four.gather_ns(1e6, 64) + 15_000
    assert TRN2.exchange_ns(1e6, 64) > TRN2.gather_ns(1e6, 64)
    assert TRN2.with_faster_links(2.0).gather_ns(1e6, 64) < TRN2.gather_ns(1e6, 64)


@pytest.fixture(scope="module")
def deepseek_costs():  # type: ignore[no-untyped-def]
    tokens = {"prefill": 4096, "decode": 64}
    return cost_layouts(DEEPSEEK, TRN2, synthetic_routings(DEEPSEEK, 4096), tokens, "zipf")


def test_the_best_layout_is_the_cheapest_of_those_that_fit(deepseek_costs) -> None:  # type: ignore[no-untyped-def]
    costs = deepseek_costs
    for phase in PHASES:
        ranking = costs.ranking(phase)
        assert ranking[0].cost.total_us == min(
            entry.cost.total_us
            for entry in costs.entries
            if (entry.phase, entry.routing) == (phase, "zipf")
        )
        assert explain(costs, phase)
        single = costs.best_single()[phase]
        assert single.cost.total_us >= ranking[0].cost.total_us
    assert {entry.layout.ep for entry in costs.entries} == {1, 2, 4, 8, 16, 32, 64}
    assert costs.best_replicated("prefill").layout.strategy == "replicate"


def test_eplb_brings_the_busiest_rank_near_the_mean(deepseek_costs) -> None:  # type: ignore[no-untyped-def]
    for entry in deepseek_costs.ranking("prefill"):
        if entry.layout.is_balanced and entry.layout.ep <= 32:
            assert entry.cost.busiest_over_mean < 1.15
    placement = deepseek_costs.placements["zipf", 32]
    assert placement.extra_share <= 0.125


def test_skew_makes_wide_expert_parallelism_slow_and_placement_repairs_it(deepseek_costs) -> None:  # type: ignore[no-untyped-def]
    def best(ep: int, is_balanced: bool) -> float:
        return min(
            entry.cost.total_us
            for entry in deepseek_costs.ranking("prefill")
            if (entry.layout.ep, entry.layout.is_balanced) == (ep, is_balanced)
        )

    assert best(32, False) > 1.5 * best(32, True)


def test_layouts_that_cannot_be_say_why() -> None:
    small = Machine.build(INSTANCES["trn2.3xlarge"])
    with pytest.raises(ValueError, match=r"no layout fits trn2\.3xlarge.*GiB a rank must fit"):
        cost_layouts(
            DEEPSEEK, small, synthetic_routings(DEEPSEEK, 64), {"prefill": 64, "decode": 1}, "zipf"
        )
    odd = replace(GPT_120B, num_experts=24, top_k=2, weight_format="fp8")
    costs = cost_layouts(
        odd, TRN2, synthetic_routings(odd, 64), {"prefill": 64, "decode": 1}, "zipf"
    )
    assert "must divide num_experts=24" in costs.rejected["EP 16 x TP 4"]


def test_sharing_between_phases_is_what_the_layer_does(deepseek_costs) -> None:  # type: ignore[no-untyped-def]
    layouts = {entry.layout.ep: entry.layout for entry in deepseek_costs.entries}
    once, shared = phase_memory(deepseek_costs, layouts[8], layouts[8])
    twice, kept = phase_memory(deepseek_costs, layouts[8], layouts[64])
    assert (shared, kept) == (True, False)
    assert twice > 1.8 * once


def test_an_expert_without_a_gate_is_two_matrices() -> None:
    two = replace(QWEN, num_matrices=2, shared_size=65536)
    three = replace(two, num_matrices=3)
    assert (two.expert_bytes / three.expert_bytes, two.shared_bytes / three.shared_bytes) == (
        pytest.approx(2 / 3),
        pytest.approx(2 / 3),
    )
    for phase, tokens in (("prefill", 8192), ("decode", 64)):
        work = RoutedTokens(phase, even_trace(QWEN, tokens), QWEN.num_experts)
        costs = [layer_cost(model, TRN2, 4, 16, "replicate", work) for model in (two, three)]
        assert costs[0].tensor_us < costs[1].tensor_us
        assert costs[0].hbm_us < costs[1].hbm_us
        assert costs[0].shared_us < costs[1].shared_us


def test_a_config_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold num_experts under one of the names"):
        ModelSizes.from_config("dense", {"hidden_size": 64, "intermediate_size": 128})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_lora_rank", {}),
        ("head_dim", {"a": 1}),
        ("num_attention_heads", 2.5),
        ("moe_intermediate_size", True),
        ("n_shared_experts", -1),
        ("vocab_size", 10**400),
        ("quantization_config", -1),
        ("first_k_dense_replace", "3"),
    ],
)
def test_a_size_that_is_no_whole_number_is_named(key: str, value: object) -> None:
    config = load_config("deepseek_v3") | {key: value}
    if key == "head_dim":
        config = load_config("qwen3_30b_a3b") | {key: value}
    with pytest.raises(ValueError, match=rf"config: {key}=.*: must be .*\. Correct"):
        ModelSizes.from_config("spoilt", config)


def test_lnc1_halves_a_rank() -> None:
    single = Machine.build(INSTANCES["trn2.48xlarge"], lnc=1)
    assert (single.ranks, single.hbm_bytes) == (128, TRN2.hbm_bytes // 2)
    with pytest.raises(ValueError, match="lnc=3: must be 1 or 2"):
        Machine.build(INSTANCES["trn2.48xlarge"], lnc=3)
    with pytest.raises(ValueError, match="joins at most 1"):
        Machine.build(INSTANCES["trn2.48xlarge"], nodes=4)


def test_sizes_of_hunyuan_and_gemma_go_by_their_own_names() -> None:
    config = {**load_config("qwen3_30b_a3b"), "num_experts_per_tok": None}
    gemma = ModelSizes.from_config("gemma", {**config, "top_k_experts": 8})
    layers = {"moe_topk": [8] * 48, "num_shared_expert": [1] * 48}
    hunyuan = ModelSizes.from_config("hunyuan", {**config, **layers})
    assert (gemma.top_k, hunyuan.top_k) == (8, 8)
    assert (gemma.shared_size, hunyuan.shared_size) == (0, 768)
    with pytest.raises(ValueError, match="must be a whole number"):
        ModelSizes.from_config("odd", {**config, "moe_topk": [8, 4]})
    with pytest.raises(ValueError, match="zero_expert_num=2"):
        ModelSizes.from_config("longcat", {**config, "moe_topk": 8, "zero_expert_num": 2})
