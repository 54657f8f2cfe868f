"""The nki backend: a layer through the kernels, on the simulator, beside the torch backend."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from neuron_moe import (
    BlockwiseMatmulConfig,
    ExpertMLPsV2,
    GroupLimitedRouter,
    MoE,
    RoutedExpertsMLPOpsConfig,
    RouterTopK,
    build_block_mapping,
)
from neuron_moe.backends.nki import NkiBackend
from neuron_moe.backends.nki.launch import Launch, run
from neuron_moe.backends.nki.prefill import _broken_tokens, compile_for, rank
from neuron_moe.backends.torch_backend import TorchBackend
from neuron_moe.blocks import BlockMapping, num_blocks
from neuron_moe.models.layers import RMSNorm
from neuron_moe.nxd_compat.tuning import tuning_of
from neuron_moe.paths import choose_path
from neuron_moe.plan import Step
from neuron_moe.router import Router
from neuron_moe.spec import Tuning
from neuron_moe.weights import LocalRouting
from nki_kernels.index import BlockDims, index_blocks
from nki_kernels.layer import PrefillLayerConfig
from nki_kernels.prefill import PrefillConfig
from tests.kernels import PACKS_BFLOAT16
from tests.neuron_moe.nki_cases import (
    GPT_OSS,
    LLAMA4,
    SEPARATE,
    SILU,
    E,
    H,
    assert_as_right,
    build,
    plan_of,
    route,
    three_outputs,
    watch_launches,
)

T = 140  # more than the decode kernel takes of a prefill
# NxD's switches of the blockwise path, and the plan they mean here
BLOCKS = {"shard_plan": "block", "loop_plan": "dynamic"}
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "one-core": ({"logical_nc_config": 1}, {"num_cores": 1}),
    "skip-both": ({"skip_dma_token": True, "skip_dma_weight": True}, {}),
    "block-parallel": (
        {"use_block_parallel": True},
        {"shard_plan": "block", "loop_plan": "static", "in_halves": True},
    ),
    "block-dynamic-ping-pong": (
        {"use_shard_on_block_dynamic_while": True, "block_sharding_strategy": "PING_PONG"},
        BLOCKS,
    ),
    "intermediate-dynamic": (
        {"use_shard_on_intermediate_dynamic_while": True},
        {"shard_plan": "intermediate", "loop_plan": "dynamic"},
    ),
    "weights-stay": (
        {"use_shard_on_block_dynamic_while": True, "skip_dma_weight": True},
        {**BLOCKS, "in_halves": True, "skip_weights": True},
    ),
    "spare-rows": ({"always_augment_inputs_for_blockwise_matmul": True}, {"missing": "spare"}),
    "even-blocks": ({"pad_num_blocks_to_even": True}, {"pad_num_blocks_to_even": True}),
}


def prompt(tokens: int = T) -> Tensor:
    return torch.randn(1, tokens, H).bfloat16()


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_is_as_right_as_torch(plan: str) -> None:
    tuning, wanted = PLANS[plan]
    found = tuning_of(BlockwiseMatmulConfig.from_kwargs(**tuning), "nki")
    assert replace(found, remarks=()) == Tuning(**wanted)
    assert_as_right(*three_outputs(GPT_OSS, prompt(), tuning))


SCALED = {**GPT_OSS, "hidden_act_scaling_factor": 1.5}
NO_GATE = {"hidden_act": "relu", "glu_mlp": False, "bias": True, "up_clamp_upper_limit": 3.0}
OTHERS = [
    (SILU, 3),
    (LLAMA4, 1),
    (LLAMA4, 2),
    (SCALED, 2),
    (NO_GATE, 2),
    ({"hidden_act": "tanh"}, 2),
    ({"hidden_act": "gelu_pytorch_tanh"}, 2),
]


@pytest.mark.parametrize(("mlp", "top_k"), OTHERS)
def test_other_experts_are_as_right_as_torch(mlp: dict[str, Any], top_k: int) -> None:
    assert_as_right(*three_outputs(mlp, prompt(), {}, top_k))


def test_padding_tokens_get_zero() -> None:
    mask_1T = (torch.arange(T) % 3 != 0)[None]
    nki, bf16, exact = three_outputs(GPT_OSS, prompt(), {}, padding_mask=mask_1T)
    assert (nki[~mask_1T] == 0).all()
    assert_as_right(nki, bf16, exact)


def test_experts_of_other_ranks_are_skipped() -> None:
    weights = build("torch", GPT_OSS, {}, torch.bfloat16).expert_mlps.weights()
    index_TK = torch.rand(T, E).argsort(1)[:, :4].to(torch.int32)
    index_TK[torch.rand(T, 4) < 0.7] = -1
    index_TK[:5] = -1
    routing = LocalRouting(index_TK, torch.rand(T, 4) * (index_TK >= 0))
    hidden_TH = torch.randn(T, H).bfloat16()
    step = Step("prefill", T)
    with torch.no_grad():
        nki, wanted = (
            plan_of(backend, weights, step, top_k=4).experts(hidden_TH, routing).float()
            for backend in (NkiBackend(), TorchBackend())
        )
    assert (nki[:5] == 0).all()
    torch.testing.assert_close(nki, wanted, rtol=0.03, atol=0.03 * wanted.abs().max().item())


ROUTERS: dict[str, Router] = {
    "over-chosen": RouterTopK(E, 2, H, bias=True, apply_act_fn_over_topk=True),
    "qwen3": RouterTopK(E, 3, H, renormalize=True, dtype=torch.bfloat16),
    "llama4": RouterTopK(E, 1, H, act_fn="sigmoid"),
    "deepseek": GroupLimitedRouter(32, 4, H, 4, 2, renormalize=True, routed_scaling_factor=2.5),
    "deepseek-fill-0": GroupLimitedRouter(32, 4, H, 4, 2, out_of_group_fill=0.0),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_agree_with_torch(name: str) -> None:
    router = ROUTERS[name].eval()
    hidden_TH = torch.randn(T, H).bfloat16()
    with torch.no_grad():
        nki, wanted = route(router, hidden_TH), router(hidden_TH)
    torch.testing.assert_close(nki.router_logits_TE, wanted.router_logits_TE, rtol=1e-5, atol=1e-5)
    assert torch.equal(nki.expert_index_TK, wanted.expert_index_TK)
    torch.testing.assert_close(
        nki.expert_affinities_TK, wanted.expert_affinities_TK, rtol=1e-5, atol=1e-6
    )


def test_a_router_kept_in_float32_is_shortened_only_without_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = build("nki", SILU, {}, torch.bfloat16, router=lambda: RouterTopK(E, 2, H), **SEPARATE)
    router = layer.router.requires_grad_(False)
    router.linear_router.weight.add_(1e-3)
    launches = watch_launches(monkeypatch)
    hidden_TH = torch.randn(T, H).bfloat16()

    def launched() -> torch.dtype:
        plan = layer.plan(Step("prefill", T))
        got, wanted = plan.route(hidden_TH), router(hidden_TH)
        torch.testing.assert_close(got.router_logits_TE, wanted.router_logits_TE)
        dtype: torch.dtype = launches[-1][1]["router_weight_EH"].dtype
        return dtype

    assert launched() == torch.float32
    router.linear_router.weight.copy_(router.linear_router.weight.bfloat16())
    assert [launched(), launched()] == [torch.bfloat16, torch.bfloat16]
    router.linear_router.weight.add_(1e-3)
    assert launched() == torch.float32


def map_blocks(
    index_TK: Tensor, num_experts: int, block_size: int, *, pad_to_even: bool = False
) -> BlockMapping:
    """Place every pair in a slot of a block, by the kernel alone."""
    blocks = num_blocks(*index_TK.shape, num_experts, block_size, pad_to_even=pad_to_even)
    dims = BlockDims(num_experts, block_size, blocks)
    launch = Launch(index_blocks, 2, {"dims": dims}, {"index_TK": index_TK})
    token, pair, expert, valid, counts, _ = run(launch)
    return BlockMapping(token, pair, expert, valid.view(()), counts.to(torch.int64))


@pytest.mark.parametrize("pad_to_even", [False, True])
def test_block_mappings_are_equal_to_the_last_bit(pad_to_even: bool) -> None:
    index_TK = torch.rand(T, E).argsort(1)[:, :3].to(torch.int32)
    nki, wanted = (
        place(index_TK, E, 32, pad_to_even=pad_to_even)
        for place in (map_blocks, build_block_mapping)
    )
    for name, value in wanted._asdict().items():
        assert torch.equal(getattr(nki, name), value), name
        assert getattr(nki, name).dtype == value.dtype, name


def test_explain_names_kernel_and_plan_of_prefill() -> None:
    tuning = {"use_shard_on_block_dynamic_while": True}
    shown = build("nki", GPT_OSS, tuning, torch.bfloat16).explain("prefill", T)
    assert (shown.path, shown.decision.kernel) == ("blockwise", "nki.prefill_layer")
    assert "one kernel: router, index, routed experts, combine\n" in str(shown)
    assert "dynamic loop, block shards, work tiles of 1 row tiles" in str(shown)
    assert not any(
        "plan:" in note
        for note in build("torch", GPT_OSS, {}, torch.bfloat16).explain("prefill", T).notes
    )


def configs_of(layer: MoE, monkeypatch: pytest.MonkeyPatch) -> list[PrefillConfig]:
    """Return what the prefill kernel is compiled for when a layer runs."""
    launches = watch_launches(monkeypatch)
    with torch.no_grad():
        layer(torch.randn(1, T, H).bfloat16())
    values = [value for _, args in launches for value in args.values()]
    return [value.experts for value in values if isinstance(value, PrefillLayerConfig)]


def test_the_cost_model_chooses_what_nobody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build("nki", GPT_OSS, {"block_size": None}, torch.bfloat16)
    shown = layer.explain("prefill", T)
    best, *_ = rank(layer.expert_mlps.parts("prefill"), Step("prefill", T))
    of_that_size = rank(layer.expert_mlps.parts("prefill"), Step("prefill", T), best.block_size)
    plan = best.request.shard_plan
    other = next(each for each in of_that_size if each.request.shard_plan != plan)
    assert shown.block_size == best.block_size != 512
    assert f"{best.request.shard_plan} shards" in str(shown)
    assert "the cost model's choice" in str(shown)
    assert f", {other.request.shard_plan} {other.estimated_us:.0f} us [estimated]" in str(shown)
    (config,) = configs_of(layer, monkeypatch)
    assert config.tile_rows == min(128, best.block_size)
    assert (config.shard.splits_i, config.shard.splits_h) == (
        best.request.shard_plan == "intermediate",
        best.request.shard_plan == "hidden",
    )


@pytest.mark.parametrize("size", [32, 512])
def test_a_block_size_that_is_given_stays(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build("nki", GPT_OSS, {"block_size": size}, torch.bfloat16)
    shown = layer.explain("prefill", 900)
    assert shown.block_size == size
    free = build("nki", GPT_OSS, {"block_size": None}, torch.bfloat16)
    best = free.explain("prefill", 900).block_size
    is_better = any(note.startswith(f"block_size={best} would take") for note in shown.notes)
    assert is_better == (best != size)
    assert configs_of(layer, monkeypatch)[0].tile_rows == min(size, 128)
    assert BlockwiseMatmulConfig().leaves_block_size
    assert not BlockwiseMatmulConfig(block_size=512).leaves_block_size


@pytest.mark.parametrize(
    ("tokens", "path", "kernel"),
    [
        (1, "selective", "decode_moe"),
        (100, "all_experts", "decode_moe"),
        (128, "all_experts", "decode_moe"),
        (129, "blockwise", "blockwise_moe"),
        (1000, "blockwise", "blockwise_moe"),
    ],
)
def test_prefill_of_any_length_takes_the_kernels(tokens: int, path: str, kernel: str) -> None:
    decision = choose_path("prefill", tokens, 4, 128, backend="nki")
    assert (decision.path, decision.kernel) == (path, f"nki.{kernel}")
    assert choose_path("prefill", tokens, 4, 128).kernel.startswith("torch.")


@pytest.mark.parametrize("blocks", [{"block_size": 32}, {"use_shard_on_block_dynamic_while": True}])
def test_a_short_prefill_is_decoded_unless_blocks_are_asked_for(blocks: dict[str, Any]) -> None:
    free = {"block_size": None}
    shown = build("nki", GPT_OSS, free, torch.bfloat16).explain("prefill", 30)
    assert shown.decision.kernel == "nki.decode_layer"
    shown = build("nki", GPT_OSS, {**free, **blocks}, torch.bfloat16).explain("prefill", 30)
    assert shown.decision.kernel == "nki.prefill_layer"
    assert "blocks were requested" in str(shown)


@pytest.mark.parametrize("tokens", [1, 40, 128])
def test_a_short_prefill_is_as_right_as_torch(tokens: int) -> None:
    mask_1T = (torch.arange(tokens) % 5 != 1)[None]
    found = three_outputs(
        GPT_OSS, prompt(tokens), {"block_size": None}, padding_mask=mask_1T, phase="prefill"
    )
    assert_as_right(*found)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "torch": ({"use_torch_block_wise": True}, "use_torch_block_wise=True"),
    "autograd": ({"blockwise_nki_autograd_cls": object()}, "blockwise_nki_autograd_cls"),
    "two-axes": (
        {"use_block_parallel": True, "use_shard_on_intermediate_dynamic_while": True},
        "split either the blocks or the intermediate axis",
    ),
    "spare-and-skipped": (
        {"always_augment_inputs_for_blockwise_matmul": True, "skip_dma_weight": True},
        "always_augment_inputs_for_blockwise_matmul=True, skip_dma_weight=True",
    ),
    "one-core": (
        {"logical_nc_config": 1, "use_shard_on_block_dynamic_while": True},
        "logical_nc_config=1",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictory_tuning_raises_before_any_work(case: str) -> None:
    tuning, message = CONTRADICTIONS[case]
    config = BlockwiseMatmulConfig.from_kwargs(**tuning)
    with pytest.raises(ValueError, match=re.escape(message)):
        build("nki", SILU, tuning, torch.bfloat16)
    shown = build("torch", SILU, tuning, torch.bfloat16).explain("prefill", T)
    assert any(f"{name}={getattr(config, name)!r}" in str(shown) for name in tuning)


@pytest.mark.parametrize(
    "tuning",
    [
        {"block_sharding_strategy": "PING_PONG"},
        {"num_static_blocks": 4},
        {"optimized_block_to_token_mapping": False},
        {"parallelize_token_to_block_mapping": False},
    ],
    ids=lambda tuning: next(iter(tuning)),
)
def test_a_switch_without_use_here_is_told(tuning: dict[str, Any]) -> None:
    for backend in ("nki", "torch"):
        shown = build(backend, SILU, tuning, torch.bfloat16).explain("prefill", T)
        assert all(f"{name}={value!r}: " in str(shown) for name, value in tuning.items())


def test_what_kernels_cannot_do_is_refused() -> None:
    hidden_1TH = torch.randn(1, T, H)
    with torch.no_grad(), pytest.raises(ValueError, match=r"float32 must be bfloat16"):
        build("nki", GPT_OSS, {}, torch.float32)(hidden_1TH)
    with torch.no_grad(), pytest.raises(ValueError, match="block_size=48"):
        build("nki", SILU, {"block_size": 48}, torch.bfloat16)(hidden_1TH.bfloat16())


@PACKS_BFLOAT16
def test_weights_that_torch_packed_are_refused() -> None:
    packed = build("torch", SILU, {}, torch.bfloat16)
    packed.expert_mlps.pack_weights()
    packed.expert_mlps.backend = NkiBackend()
    with torch.no_grad(), pytest.raises(ValueError, match="packed weights"):
        packed(torch.randn(1, T, H).bfloat16())


def test_more_experts_than_an_index_has_are_refused_before_a_launch() -> None:
    config = RoutedExpertsMLPOpsConfig(1025, 64, 16, 1, "silu", True)
    experts = ExpertMLPsV2(config, dtype=torch.bfloat16, backend="nki").eval()
    with pytest.raises(ValueError, match="num_experts=1025: must be 1 to 1024"):
        compile_for(experts.plan(Step("prefill", 64)))


@pytest.mark.parametrize("options", [SEPARATE, {}], ids=["separate", "fused"])
@pytest.mark.parametrize("tokens", [2, 40])
def test_a_jittering_router_in_training_is_refused(tokens: int, options: dict[str, Any]) -> None:
    layer = build("nki", SILU, {}, torch.bfloat16, **options).train()
    layer.router.jitter_eps = 0.1
    with torch.no_grad(), pytest.raises(ValueError, match=r"jitter_eps=0\.1"):
        layer(torch.randn(1, tokens, H).bfloat16())


@pytest.mark.parametrize(("mlp", "top_k"), [(GPT_OSS, 2), (LLAMA4, 1), (LLAMA4, 2)])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_token_of_a_prompt_breaks_no_other(
    mlp: dict[str, Any], top_k: int, broken: float
) -> None:
    layer = build("nki", mlp, {}, torch.bfloat16, top_k, **SEPARATE)
    check_that_token_5_stays_alone(layer, torch.full((H,), broken))


@pytest.mark.parametrize(
    ("mlp", "options"),
    [(GPT_OSS, SEPARATE), (LLAMA4, SEPARATE), (SILU, {"return_router_logits": True})],
    ids=["gpt-oss", "llama4", "marked-by-the-router"],
)
def test_one_infinite_element_stays_in_its_token_though_affinities_are_finite(
    mlp: dict[str, Any], options: dict[str, Any]
) -> None:
    layer = build("nki", mlp, {}, torch.bfloat16, router=sigmoid_router, **options)
    token = torch.ones(H)
    token[7] = float("inf")
    check_that_token_5_stays_alone(layer, token)


def sigmoid_router() -> Router:
    return RouterTopK(E, 2, H, act_fn="sigmoid", dtype=torch.bfloat16)


def check_that_token_5_stays_alone(layer: MoE, token_H: torch.Tensor) -> None:
    hidden = torch.randn(1, 300, H).bfloat16()
    with torch.no_grad():
        expected = layer(hidden).output
        hidden[0, 5] = token_H.bfloat16()
        output = layer(hidden).output
    assert output[0, 5].isnan().all()
    others = [token for token in range(300) if token != 5]
    assert torch.equal(output[0, others], expected[0, others])


@pytest.mark.parametrize("other", [0.0, 3e38])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_look_at_the_sum_misses_no_token_and_takes_none_for_large_numbers(
    other: float, broken: float
) -> None:
    hidden_NH, affinities_NK = torch.full((300, H), other).bfloat16(), torch.rand(300, 2)
    found = _broken_tokens(hidden_NH, affinities_NK)
    assert found is None if other == 0.0 else not found.any()
    hidden_NH[5, 7], hidden_NH[6, 7], hidden_NH[7, :2] = (
        broken,
        -broken,
        torch.tensor([1e38, -1e38]),
    )
    affinities_NK[299, 1] = broken
    found = _broken_tokens(hidden_NH, affinities_NK)
    assert found is not None
    assert found.flatten().nonzero().flatten().tolist() == [5, 6, 299]


def test_infinite_rows_stay_alone_among_experts_on_their_own() -> None:
    weights = build("torch", SILU, {}, torch.bfloat16).expert_mlps.weights()
    index_TK = torch.rand(T, E).argsort(1)[:, :2].to(torch.int32)
    routing, hidden_TH = LocalRouting(index_TK, torch.rand(T, 2)), torch.randn(T, H).bfloat16()
    plan = plan_of(NkiBackend(), weights, Step("prefill", T), top_k=2)
    with torch.no_grad():
        before_TH = plan.experts(hidden_TH, routing)
        hidden_TH[3, 5], hidden_TH[90, 0] = torch.inf, torch.nan
        after_TH = plan.experts(hidden_TH, routing)
    is_broken_T = torch.isin(torch.arange(T), torch.tensor([3, 90]))
    assert torch.equal(after_TH.isnan().all(1), is_broken_T)
    assert torch.equal(after_TH[~is_broken_T], before_TH[~is_broken_T])


def test_a_norm_that_does_not_fit_beside_the_router_stays_outside() -> None:
    wide = 16384
    with torch.device("meta"):
        router = RouterTopK(64, 2, wide, dtype=torch.bfloat16)
        config = RoutedExpertsMLPOpsConfig(64, wide, 64, 2, "silu", True)
        experts = ExpertMLPsV2(config, dtype=torch.bfloat16, backend="nki")
        norm = RMSNorm(wide, 1e-5, torch.bfloat16)
        layer = MoE(router, experts, None, norm, return_router_logits=True)
    plan = layer.plan(Step("prefill", 256))
    assert not plan.has_norm
    assert "two kernels: router; index" in str(layer.explain("prefill", 256))
    assert layer.plan(Step("prefill", 64)).has_norm is False


def test_a_changed_epsilon_is_seen() -> None:
    layer = build("nki", SILU, {}, torch.bfloat16, norm=True)
    apart = build("nki", SILU, {}, torch.bfloat16, norm=True, return_router_logits=True)
    hidden = torch.randn(1, T, H).bfloat16()
    for each in (layer, apart):
        with torch.no_grad():
            before = each(hidden).output
            each.rmsnorm.eps = 1.0
            after = each(hidden).output
        assert (after.float() - before.float()).abs().max() > 0.1 * before.float().abs().max()


def test_a_layer_with_parts_of_sequences_on_one_rank_is_one_kernel() -> None:
    in_parts = {"sequence_parallel_enabled": True, "sequence_dimension": 1}
    layer = build("nki", SILU, {}, torch.bfloat16, norm=True, **in_parts)
    shown = str(layer.explain("prefill", T))
    assert "one kernel: rmsnorm, router, index, routed experts, combine\n" in shown
    assert "one kernel: rmsnorm" in str(layer.explain("decode", 3))


@pytest.mark.parametrize(("mlp", "is_clamped"), [(GPT_OSS, True), (SILU, False)])
def test_an_expert_that_overflows_is_told_and_seen_in_its_tile_only(
    mlp: dict[str, Any], is_clamped: bool
) -> None:
    layer = build("nki", mlp, {}, torch.bfloat16, **SEPARATE)
    shown = any("overflows bfloat16" in note for note in layer.explain("prefill", 300).notes)
    assert shown is not is_clamped
    hidden = torch.randn(1, 300, H).bfloat16()
    with torch.no_grad():
        expected = layer(hidden).output
        hidden[0, 5] = 1e25
        output = layer(hidden).output
    others = [token for token in range(300) if token != 5]
    is_same = (output == expected)[0, others].all(1)
    is_nan = output[0, others].isnan().any(1)
    assert (is_same | is_nan).all()
    assert is_nan.sum() <= 127 * (not is_clamped)
    assert output[0, 5].isfinite().all() == is_clamped


@pytest.mark.parametrize("tokens", [4, 150])
@pytest.mark.parametrize("options", [{}, SEPARATE], ids=["fused", "separate"])
@pytest.mark.parametrize("router", [None, sigmoid_router], ids=["softmax", "sigmoid"])
def test_a_token_without_numbers_chooses_different_experts(
    router: Any, options: dict[str, Any], tokens: int
) -> None:
    layer = build(
        "nki",
        SILU,
        {},
        torch.bfloat16,
        3 if router is None else 2,
        router=router,
        return_expert_index=True,
        **options,
    )
    layer.enable_load_counters()
    hidden = torch.randn(tokens, 1, H).bfloat16()
    hidden[2] = float("nan")
    with torch.no_grad():
        chosen = layer(hidden, phase="decode" if tokens < 9 else "prefill").expert_index
    assert chosen[2].tolist() == list(range(chosen.shape[1]))
    assert layer.expert_load is not None
    assert torch.equal(layer.expert_load, torch.bincount(chosen.flatten(), minlength=E))
