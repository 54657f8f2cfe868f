"""What NxD 0.18.0 gets wrong or leaves unchecked, a numbered test each that ours does not."""

from types import SimpleNamespace
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
    RouterConfig,
    RouterTopK,
    num_blocks,
)
from neuron_moe.nxd_compat import initialize_moe_module
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.config import ParallelConfig
from neuron_moe.sharded.sharding import shard_state_dict
from neuron_moe.weights.narrow import NarrowMatrices
from tests.neuron_moe.nki_cases import GPT_OSS
from tests.neuron_moe.parallel.conftest import run_ranks  # noqa: F401  a fixture

E, K, H, I = 8, 2, 32, 16  # noqa: E741  the axis letters
OAI = {name: value for name, value in GPT_OSS.items() if name != "bias"}


def config(**keys: Any) -> RoutedExpertsMLPOpsConfig:
    sizes = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I}
    return RoutedExpertsMLPOpsConfig(**{**sizes, "hidden_act": "silu", "glu_mlp": True, **keys})


def layer(experts: RoutedExpertsMLPOpsConfig | None = None, **keys: Any) -> MoE:
    """Return a layer with weights of a fixed seed."""
    torch.manual_seed(0)
    experts = experts or config()
    mlps = ExpertMLPsV2(experts, BlockwiseMatmulConfig.from_kwargs(block_size=16))
    built = MoE(RouterTopK(E, experts.top_k, H), mlps, **keys).eval()
    for name, parameter in built.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return built


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, H, generator=torch.Generator().manual_seed(1))


def test_01_the_selection_bias_exists() -> None:
    router = GroupLimitedRouter(E, K, H, n_group=4, topk_group=2)
    assert router.e_score_correction_bias.shape == (E,)
    assert router(tokens(1, 5)).expert_index_TK.shape == (5, K)


def test_02_the_selection_bias_is_added_in_float32() -> None:
    router = GroupLimitedRouter(E, 1, H, n_group=1, topk_group=1, dtype=torch.bfloat16)
    router = router.bfloat16()
    with torch.no_grad():
        router.linear_router.weight.zero_()  # every score is 0.5
        router.e_score_correction_bias[3] = 2.0**-12  # lost beside 0.5 in bfloat16
    assert router.e_score_correction_bias.dtype == torch.float32
    assert router(tokens(1, 5).bfloat16()).expert_index_TK.flatten().tolist() == [3] * 5


def test_03_no_expert_outside_the_groups_is_chosen() -> None:
    router = GroupLimitedRouter(E, 2, H, n_group=4, topk_group=1)
    with torch.no_grad():
        router.linear_router.weight.zero_()
        router.e_score_correction_bias.fill_(-2.0)  # negative everywhere
        router.e_score_correction_bias[4:6] = torch.tensor([-1.0, -1.5])
    chosen = router(tokens(1, 5)).expert_index_TK
    assert sorted({int(expert) for expert in chosen.flatten()}) == [4, 5]


def test_04_the_offset_of_up_needs_no_bias() -> None:
    plain, offset = config(**{**OAI, "hidden_act_bias": 0.0}), config(**OAI)
    x = tokens(1, 48)
    with torch.no_grad():
        difference = (layer(offset)(x)[0] - layer(plain)(x)[0]).abs().max()
        with_zeros = layer(config(**OAI, bias=True))
        for name, parameter in with_zeros.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
        assert difference > 0.01
        torch.testing.assert_close(with_zeros(x)[0], layer(offset)(x)[0])


def test_05_building_layers_leaves_the_limits_alone() -> None:
    shared = config(**OAI, bias=True)
    first, second = layer(shared), layer(shared)
    assert (shared.up_clamp_upper_limit, shared.up_clamp_lower_limit) == (7.0, -7.0)
    with torch.no_grad():
        x = 50 * tokens(1, 48)
        torch.testing.assert_close(first(x)[0], second(x)[0], rtol=0, atol=0)


def test_06_the_preshard_hook_changes_no_number() -> None:
    built = layer(config(**OAI, bias=True))
    state = dict(built.state_dict())
    before = {name: value.clone() for name, value in state.items()}
    built.expert_mlps.preshard_hook(state, "expert_mlps.weight")
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in before)


def test_07_a_tiny_affinity_keeps_its_expert() -> None:
    experts = layer(config(normalize_top_k_affinities=True)).expert_mlps
    experts.enable_load_counters()
    index = torch.tensor([[0, 1]])
    with torch.no_grad():
        experts(tokens(1), torch.tensor([[1.0, 1e-45]]), index, 48)
    assert experts.expert_load_E.tolist()[:2] == [1, 1]


def test_08_contributions_of_a_token_are_summed_in_float32() -> None:
    experts = layer(config(top_k=8)).expert_mlps.bfloat16()
    hidden, index = tokens(64).bfloat16(), torch.arange(8).repeat(64, 1)
    affinities = torch.rand(64, 8)
    with torch.no_grad():
        each = experts.mlp_op(hidden.expand(E, -1, -1)).float()
        exact = torch.einsum("eth,te->th", each, affinities)
        rounded = torch.zeros(64, H, dtype=torch.bfloat16)
        for expert in range(E):
            rounded += (each[expert] * affinities[:, expert, None]).bfloat16()
        found = experts(hidden, affinities, index, 64)
    ours, theirs = ((x.float() - exact).pow(2).mean().sqrt() for x in (found, rounded))
    assert ours < 0.6 * theirs


def test_10_blocks_are_counted_by_local_experts() -> None:
    # 256 tokens with 8 choices, of which at most 4 fall to the 4 experts of a rank.
    assert num_blocks(256, 8, 4, 128) == num_blocks(256, 4, 4, 128) <= 4 * 2


def test_11_the_mapping_switch_is_read() -> None:
    tuning = BlockwiseMatmulConfig.from_kwargs(optimized_block_to_token_mapping=False)
    assert tuning.optimized_block_to_token_mapping is False
    shown = MoE(RouterTopK(E, K, H), ExpertMLPsV2(config(), tuning)).explain("prefill", 600)
    assert "optimized_block_to_token_mapping=False" in str(shown)


def test_12_the_published_scout_configuration_takes_kernels() -> None:
    scout = {"use_block_parallel": True, "block_sharding_strategy": "HI_LO", "block_size": 256}
    experts = ExpertMLPsV2(
        config(top_k=1, hidden_size=128, intermediate_size=128),
        BlockwiseMatmulConfig.from_kwargs(**scout),
        dtype=torch.bfloat16,
        backend="nki",
    )
    assert experts.choose_path("prefill", 1024).kernel == "nki.prefill_layer"


def test_13_quantised_experts_are_not_decoded_to_load() -> None:
    linear = ExpertMLPsV2(config(), dtype=torch.bfloat16).mlp_op.down_proj
    codes = torch.randint(0, 100, linear.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    linear.load_state_dict({"weight": codes, "scale": torch.rand(E, 1, H)})
    assert isinstance(linear.packed, NarrowMatrices)
    assert linear.packed.codes_Ekn.dtype == torch.float8_e4m3fn
    assert linear.weight.untyped_storage().nbytes() == linear.weight.element_size()


def neuron_config(**changes: Any) -> SimpleNamespace:
    """Return what NxDI's MoENeuronConfig holds by default, as far as a layer is concerned."""
    keys: dict[str, Any] = {
        "tp_degree": 1,
        "moe_tp_degree": 1,
        "moe_ep_degree": 1,
        "torch_dtype": torch.float32,
        "router_config": RouterConfig(),
        "blockwise_matmul_config": BlockwiseMatmulConfig.default(),
        "glu_mlp": True,
        "glu_type": "glu",
        "hidden_act_scaling_factor": 1.0,
        "hidden_act_bias": 0.0,
        "normalize_top_k_affinities": True,
        "capacity_factor": None,
    }
    keys.update(
        dict.fromkeys(
            (
                "hybrid_sharding_config",
                "rpl_reduce_dtype",
                "is_prefill_stage",
                *(f"{kind}_clamp_{side}_limit" for kind in ("gate", "up") for side in SIDES),
                *(f"{name}_nki_kernel_enabled" for name in KERNELS),
            )
        )
    )
    keys.update(dict.fromkeys(OFF, False))
    return SimpleNamespace(**{**keys, **changes})


SIDES = ("upper", "lower")
KERNELS = ("moe_fused", "router_topk", "expert_mlp", "shared_mlp")
OFF = (
    "sequence_parallel_enabled",
    "is_hidden_dim_shuffled",
    "is_intermediate_dim_shuffled",
    "use_index_calc_kernel",
    "early_expert_affinity_modulation",
    "return_expert_index",
    "return_router_logits",
    "fused_shared_experts",
    "shared_experts_sequence_parallel_enabled",
    "transpose_shared_experts_weights",
    "quantized",
    "is_mxfp4_compute",
)


def inference_config(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        num_local_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        intermediate_size=I,
        hidden_act="silu",
        n_shared_experts=0,
        neuron_config=neuron_config(**changes),
    )


@pytest.mark.parametrize("degrees", [(2, 2), (1, 2), (8, 1), (4, 4)])
def test_14_degrees_that_do_not_fit_are_refused(degrees: tuple[int, int]) -> None:
    tp, ep = degrees
    wrong = inference_config(tp_degree=64, moe_tp_degree=tp, moe_ep_degree=ep)
    with pytest.raises(ValueError, match=f"moe_tp_degree={tp}, moe_ep_degree={ep}: .*64"):
        initialize_moe_module(wrong)


def test_14_nxdis_defaults_are_taken() -> None:
    assert not initialize_moe_module(inference_config(tp_degree=64)).training


def test_15_the_preshard_hook_can_run_twice() -> None:
    hybrid = ParallelConfig(tp=4, moe_tp=4, moe_ep=1, decode_moe_tp=1, decode_moe_ep=4)
    whole = layer(config(**OAI, bias=True)).state_dict()
    with parallel_state.as_rank(hybrid, 1):
        built = layer(config(**OAI, bias=True))
    state: dict[str, Any] = dict(whole)
    built.expert_mlps.preshard_hook(state, "expert_mlps.weight")
    once = dict(state)
    built.expert_mlps.preshard_hook(state, "expert_mlps.weight")
    assert all(torch.equal(state[name], once[name]) for name in once)
    copies = [name for name in once if "mlp_op_tkg" in name]
    assert len(copies) == 4
    for name in copies:
        assert torch.equal(once[name], whole[name.replace("mlp_op_tkg", "mlp_op")])


def test_16_decode_has_its_own_experts_under_hybrid_sharding() -> None:
    hybrid = ParallelConfig(tp=4, moe_tp=4, moe_ep=1, decode_moe_tp=1, decode_moe_ep=4)
    with parallel_state.as_rank(hybrid, 3):
        experts = ExpertMLPsV2(config())
    assert experts.parts("decode").first_expert == 6
    assert experts.parts("prefill").first_expert == 0


def test_18_misspelt_keys_are_told_or_refused() -> None:
    tuning = BlockwiseMatmulConfig.from_kwargs(skip_dma_tokens=True, block_size=64)
    experts = ExpertMLPsV2(config(), tuning)
    shown = str(MoE(RouterTopK(E, K, H), experts).explain("prefill", 300))
    assert (
        "skip_dma_tokens=True: unknown, ignored as by NxD. Did you mean 'skip_dma_token'?" in shown
    )
    with pytest.raises(ValueError, match="Did you mean 'router_act_fn'"):
        RouterConfig.from_kwargs(router_act_func="softmax", tp_degree=64)


def split_and_whole(**keys: Any) -> tuple[MoE, MoE]:
    """Return a layer whose experts are split over these ranks, and the whole of it."""
    whole = layer(config(top_k=4))
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, watch=False)
    split = layer(config(top_k=4), **keys)
    split.load_state_dict(shard_state_dict(split, whole.state_dict()))
    return split, whole


def differences_of(*shapes: tuple[int, int]) -> list[float]:
    """Return how far split experts are from whole ones, for tokens of some shapes."""
    split, whole = split_and_whole()
    inputs = [tokens(*shape) for shape in shapes]
    with torch.no_grad():
        return [float((split(x)[0] - whole(x)[0]).abs().max()) for x in inputs]


def test_09_short_prompts_work_with_experts_split_over_ranks(run_ranks: Any) -> None:  # noqa: F811
    # fewer choices than a block has slots, and fewer than experts
    for found in run_ranks(2, lambda _: differences_of((1, 5), (1, 2), (2, 3))):
        assert max(found) < 1e-5


def test_17_few_tokens_decode_with_experts_split_over_ranks(run_ranks: Any) -> None:  # noqa: F811
    for found in run_ranks(2, lambda _: differences_of((1, 1), (3, 1))):
        assert max(found) < 1e-5


def test_19_parts_of_several_sequences_keep_their_order(run_ranks: Any) -> None:  # noqa: F811
    def compare(rank: int) -> float:
        keys = {"sequence_parallel_enabled": True, "sequence_dimension": 1}
        in_parts, whole = split_and_whole(**keys)
        x, part = tokens(2, 10), slice(5 * rank, 5 * rank + 5)
        with torch.no_grad():
            return float((in_parts(x[:, part])[0] - whole(x)[0][:, part]).abs().max())

    assert max(run_ranks(2, compare)) < 1e-5


def test_what_is_set_after_construction_is_computed() -> None:
    hidden = tokens(1, 40)
    set_later, built = layer(), layer(config(normalize_top_k_affinities=True, top_k=2))
    built.load_state_dict(set_later.state_dict())
    before = set_later(hidden).output
    set_later.expert_mlps.routed_experts_mlp_config.normalize_top_k_affinities = True
    set_later.expert_mlps.blockwise_matmul_config.block_size = 32
    set_later.return_expert_index = True
    found = set_later(hidden)
    torch.testing.assert_close(found.output, built(hidden).output)
    assert not torch.allclose(found.output, before)
    assert found.expert_index is not None
    assert set_later.expert_mlps.tuning.block_size == 32
    with pytest.raises(ValueError, match="hidden_act='what'"):
        set_later.expert_mlps.routed_experts_mlp_config.hidden_act = "what"
    set_later.expert_mlps.routed_experts_mlp_config.top_k = 1
    with pytest.raises(ValueError, match="top_k=1: the experts were built with 2"):
        set_later(hidden)
