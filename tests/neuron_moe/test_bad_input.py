"""Wrong input is refused before any work, with the value, the rule and the way out."""

import math
from collections.abc import Callable

import pytest
import torch

from neuron_moe import (
    BlockwiseMatmulConfig,
    ExpertMLPsV2,
    GroupLimitedRouter,
    MoE,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
    RouterTopK,
    SharedExperts,
    build_block_mapping,
    choose_path,
    device,
    num_blocks,
)
from neuron_moe.choices import check_choices, check_mask_values, check_no_repeats
from neuron_moe.spec import check_capacity


def config(**changes: object) -> RoutedExpertsMLPOpsConfig:
    values = {
        "num_experts": 8,
        "hidden_size": 16,
        "intermediate_size": 12,
        "top_k": 2,
        "hidden_act": "silu",
        "glu_mlp": True,
    }
    return RoutedExpertsMLPOpsConfig(**{**values, **changes})


def moe(**changes: object) -> MoE:
    return MoE(RouterTopK(8, 2, 16), ExpertMLPsV2(config(**changes)))


def blockwise(**changes: object) -> BlockwiseMatmulConfig:
    return BlockwiseMatmulConfig.from_kwargs(**changes)


def load(name: str, weight: torch.Tensor) -> None:
    layer = MoE(RouterTopK(8, 2, 16), ExpertMLPsV2(config()), SharedExperts(16, 12, 1, "silu"))
    layer.load_state_dict({**layer.state_dict(), name: weight})


def run_with_gate_up(weight: torch.Tensor) -> None:
    layer = moe()
    layer.expert_mlps.mlp_op.gate_up_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer(torch.zeros(1, 3, 16))


EXPERTS = ExpertMLPsV2(config())
HIDDEN, AFFINITIES = torch.zeros(3, 16), torch.zeros(3, 2)
INDEX = torch.tensor([[0, 1]] * 3, dtype=torch.int32)

# what is wrong -> (call, parts of the message)
CASES: dict[str, tuple[Callable[[], object], list[str]]] = {
    "unknown blockwise key": (
        lambda: BlockwiseMatmulConfig(skip_dma_tokens=True),
        ["BlockwiseMatmulConfig", "'skip_dma_tokens'", "Did you mean 'skip_dma_token'"],
    ),
    "unknown expert key": (
        lambda: config(hiden_act="silu"),
        ["RoutedExpertsMLPOpsConfig", "'hiden_act'", "Did you mean 'hidden_act'"],
    ),
    "unknown key without a near one": (
        lambda: BlockwiseMatmulConfig(zzz=1),
        ["'zzz'", "Known: ", "block_size"],
    ),
    "unknown router key": (
        lambda: RouterConfig.from_kwargs(router_act="softmax"),
        ["'router_act'", "Did you mean 'router_act_fn'"],
    ),
    "block size zero": (lambda: blockwise(block_size=0), ["block_size=0", "positive int"]),
    "block size a float": (lambda: blockwise(block_size=128.0), ["block_size=128.0", "int"]),
    "block size a bool": (lambda: blockwise(block_size=True), ["block_size=True", "int"]),
    "two dynamic whiles": (
        lambda: blockwise(
            use_shard_on_intermediate_dynamic_while=True, use_shard_on_block_dynamic_while=True
        ),
        ["use_shard_on_block_dynamic_while=True", "Set one of them"],
    ),
    "unknown strategy": (
        lambda: blockwise(block_sharding_strategy="ping"),
        ["block_sharding_strategy='ping'", "'PING_PONG'"],
    ),
    "lnc 3": (lambda: blockwise(logical_nc_config=3), ["logical_nc_config=3", "1 or 2"]),
    "flag not a bool": (lambda: blockwise(skip_dma_token=1), ["skip_dma_token=1", "True or False"]),
    "top_k above num_experts": (
        lambda: config(top_k=9),
        ["top_k=9", "num_experts=8", "lower top_k"],
    ),
    "router top_k above num_experts": (
        lambda: RouterTopK(4, 5, 16),
        ["top_k=5", "num_experts=4"],
    ),
    "top_k zero": (lambda: config(top_k=0), ["top_k=0", "positive int"]),
    "num_experts a float": (lambda: config(num_experts=8.0), ["num_experts=8.0", "positive int"]),
    "unknown activation": (
        lambda: config(hidden_act="silo"),
        ["hidden_act='silo'", "Did you mean 'silu'"],
    ),
    "unknown router activation": (
        lambda: RouterTopK(8, 2, 16, act_fn="softmx"),
        ["act_fn='softmx'", "Did you mean 'softmax'"],
    ),
    "unknown glu type": (lambda: config(glu_type="reglu"), ["glu_type='reglu'", "'swiglu'"]),
    "swiglu without glu": (
        lambda: config(hidden_act="swiglu", glu_mlp=False),
        ["glu_mlp=False", "Set glu_mlp=True"],
    ),
    "normalise one affinity": (
        lambda: ExpertMLPsV2(config(top_k=1, normalize_top_k_affinities=True)),
        ["normalize_top_k_affinities=True", "top_k=1"],
    ),
    "negative capacity": (
        lambda: check_capacity(-1.0),
        ["capacity_factor=-1.0", "Use None"],
    ),
    "capacity not a number": (
        lambda: config(capacity_factor="full"),
        ["capacity_factor='full'", "finite number"],
    ),
    "clamp limits swapped": (
        lambda: config(up_clamp_lower_limit=2.0, up_clamp_upper_limit=1.0),
        ["up_clamp_lower_limit=2.0", "up_clamp_upper_limit=1.0", "Swap"],
    ),
    "groups that do not divide": (
        lambda: GroupLimitedRouter(10, 2, 16, n_group=4, topk_group=2),
        ["n_group=4", "num_experts=10"],
    ),
    "more groups chosen than there are": (
        lambda: GroupLimitedRouter(16, 2, 16, n_group=4, topk_group=5),
        ["topk_group=5", "n_group=4"],
    ),
    "top_k beyond the chosen groups": (
        lambda: GroupLimitedRouter(16, 8, 16, n_group=8, topk_group=2),
        ["top_k=8", "topk_group=2", "Raise topk_group"],
    ),
    "num_experts disagree": (
        lambda: MoE(RouterTopK(4, 2, 16), ExpertMLPsV2(config())),
        ["num_experts", "router has 4", "experts have 8"],
    ),
    "hidden sizes disagree": (
        lambda: MoE(RouterTopK(8, 2, 32), ExpertMLPsV2(config())),
        ["hidden_size", "router has 32", "experts have 16"],
    ),
    "shared hidden size disagrees": (
        lambda: MoE(RouterTopK(8, 2, 16), ExpertMLPsV2(config()), SharedExperts(32, 4, 1, "silu")),
        ["hidden_size", "shared experts have 32"],
    ),
    "hidden states of the wrong width": (
        lambda: moe()(torch.zeros(1, 3, 20)),
        ["(1, 3, 20)", "hidden_size=16", "Check what comes in"],
    ),
    "hidden states without a batch": (
        lambda: moe()(torch.zeros(3, 16)),
        ["(3, 16)", "[B, S, H]", "Add the batch axis"],
    ),
    "hidden states of another dtype": (
        lambda: moe()(torch.zeros(1, 3, 16, dtype=torch.bfloat16)),
        ["torch.bfloat16", "torch.float32", "Cast"],
    ),
    "padding mask of another length": (
        lambda: moe()(torch.zeros(1, 3, 16), torch.ones(1, 4)),
        ["padding_mask", "(1, 4)", "[B, S]", "(1, 3, 16)"],
    ),
    "a mask to be added": (
        lambda: moe()(torch.zeros(1, 2, 16), torch.tensor([[0.0, -math.inf]])),
        ["padding_mask: holds -inf", "nonzero for real tokens", "(mask == 0)"],
    ),
    "a mask of NaN": (
        lambda: EXPERTS(HIDDEN, AFFINITIES, INDEX, 3, torch.tensor([1.0, math.nan, 0.0])),
        ["padding_mask: holds nan"],
    ),
    "an expert chosen twice": (
        lambda: EXPERTS(HIDDEN, AFFINITIES, torch.tensor([[5, 1], [0, 0], [-1, -1]]), 3),
        ["expert_index", "token 1 chooses [0, 0]", "once at most"],
    ),
    "affinities of another width": (
        lambda: EXPERTS(HIDDEN, torch.zeros(3, 5), INDEX, 3),
        ["expert_affinities", "(3, 5)", "[3, 2]", "[3, 8]"],
    ),
    "index of another width": (
        lambda: EXPERTS(HIDDEN, AFFINITIES, INDEX[:, :1], 3),
        ["expert_index", "(3, 1)", "(3, 2)"],
    ),
    "unknown backend": (
        lambda: ExpertMLPsV2(config(), backend="trch"),
        ["backend='trch'", "Did you mean 'torch'"],
    ),
    "unknown phase": (
        lambda: choose_path("prefil", 4, 2, 8),
        ["phase='prefil'", "Did you mean 'prefill'"],
    ),
    "unknown compat": (
        lambda: choose_path("prefill", 4, 2, 8, compat="nxdi"),
        ["compat='nxdi'", "'nxd'"],
    ),
    "no tokens to plan for": (lambda: choose_path("decode", 0, 2, 8), ["tokens=0", "positive int"]),
    "more local than global experts": (
        lambda: choose_path("decode", 1, 2, 8, num_local_experts=16),
        ["num_local_experts=16", "num_experts=8"],
    ),
    "negative tokens": (lambda: num_blocks(-1, 2, 8, 16), ["num_tokens=-1", "positive int"]),
    "router dtype": (
        lambda: RouterConfig(dtype="float31"),
        ["dtype='float31'", "torch dtype"],
    ),
    "unknown router argument": (
        lambda: RouterTopK(8, 2, 16, act_func="softmax"),
        ["RouterTopK", "'act_func'", "Did you mean 'act_fn'"],
    ),
    "unknown experts argument": (
        lambda: ExpertMLPsV2(config(), blockwise_config=None),
        ["ExpertMLPsV2", "Did you mean 'blockwise_matmul_config'"],
    ),
    "unknown layer argument": (
        lambda: MoE(router=RouterTopK(8, 2, 16), expert_mlp=EXPERTS),
        ["MoE", "'expert_mlp'", "Did you mean 'expert_mlps'"],
    ),
    "experts from a dict": (
        lambda: ExpertMLPsV2({"num_experts": 8}),
        ["routed_experts_mlp_config", "RoutedExpertsMLPOpsConfig", "not dict"],
    ),
    "blockwise config from a dict": (
        lambda: ExpertMLPsV2(config(), {"block_size": 64}),
        ["blockwise_matmul_config", "BlockwiseMatmulConfig", "not dict"],
    ),
    "router and experts swapped": (
        lambda: MoE(EXPERTS, RouterTopK(8, 2, 16)),
        ["router", "Router", "not ExpertMLPsV2"],
    ),
    "weights of an integer dtype": (
        lambda: ExpertMLPsV2(config(), dtype=torch.int8),
        ["dtype=torch.int8", "float torch dtype"],
    ),
    "router flag not a bool": (
        lambda: RouterTopK(8, 2, 16, bias="no"),
        ["bias='no'", "True or False"],
    ),
    "router scaling not finite": (
        lambda: RouterTopK(8, 2, 16, routed_scaling_factor=float("nan")),
        ["routed_scaling_factor=nan", "finite number"],
    ),
    "more groups chosen than one": (
        lambda: GroupLimitedRouter(8, 2, 16, n_group=1, topk_group=3),
        ["topk_group=3", "n_group=1"],
    ),
    "spmd flag a string": (
        lambda: config(enable_spmd_rank="yes"),
        ["enable_spmd_rank='yes'", "True or False"],
    ),
    "actual size negative": (
        lambda: config(hidden_size_actual=-1),
        ["hidden_size_actual=-1", "positive int"],
    ),
    "sequence dimension two": (
        lambda: MoE(RouterTopK(8, 2, 16), EXPERTS, sequence_dimension=2),
        ["sequence_dimension=2", "[S, B, H]"],
    ),
    "compat of a layer": (
        lambda: ExpertMLPsV2(config(), compat="vllm"),
        ["compat='vllm'", "'nxd'"],
    ),
    "unknown strategy of a layer": (
        lambda: ExpertMLPsV2(config(), strategy="a2a"),
        ["strategy='a2a'", "all_to_all"],
    ),
    "no backend": (lambda: ExpertMLPsV2(config(), backend=None), ["backend=None", "'torch'"]),
    "padding mask transposed": (
        lambda: moe()(torch.zeros(2, 3, 16), torch.ones(3, 2)),
        ["padding_mask", "(3, 2)", "(2, 3, 16)", "transpose"],
    ),
    "padding mask a list": (
        lambda: moe()(torch.zeros(1, 3, 16), [[1, 1, 1]]),
        ["padding_mask", "Tensor", "not list"],
    ),
    "residual that would broadcast": (
        lambda: moe()(torch.zeros(2, 3, 16), residual=torch.zeros(1, 1, 16)),
        ["residual", "(1, 1, 16)", "(2, 3, 16)"],
    ),
    "hidden states not a tensor": (
        lambda: moe()([[[0.0] * 16]]),
        ["hidden_states", "Tensor", "not list"],
    ),
    "choices of other tokens": (
        lambda: EXPERTS(torch.zeros(4, 16), AFFINITIES, INDEX, 4),
        ["expert_index", "(3, 2)", "4 tokens"],
    ),
    "choices that are floats": (
        lambda: EXPERTS(HIDDEN, AFFINITIES, AFFINITIES, 3),
        ["expert_index", "float32", "integer"],
    ),
    "choice beyond the last expert": (
        lambda: EXPERTS(HIDDEN, AFFINITIES, torch.zeros_like(INDEX) + 8, 3),
        ["expert_index", "expert 8", "num_experts=8"],
    ),
    "sequence length zero": (
        lambda: EXPERTS(HIDDEN, AFFINITIES, INDEX, 0),
        ["seq_len=0", "positive int"],
    ),
    "capacity of a path": (
        lambda: choose_path("prefill", 4, 2, 8, capacity_factor=-1.0),
        ["capacity_factor=-1.0", "Use None"],
    ),
    "mapping of one axis": (
        lambda: build_block_mapping(torch.zeros(3).int(), 4, 2),
        ["expert_index", "[3]", "[T, K]"],
    ),
    "load of other experts": (
        lambda: moe().explain("prefill", 4, tokens_per_expert=[1, 2]),
        ["tokens_per_expert", "2 counts", "must be 8"],
    ),
    "expert weights transposed": (
        lambda: load("expert_mlps.mlp_op.down_proj.weight", torch.zeros(8, 16, 12)),
        ["expert_mlps.mlp_op.down_proj.weight", "[8, 16, 12]", "[8, 12, 16]", "order of axes"],
    ),
    "router weights of another width": (
        lambda: load("router.linear_router.weight", torch.zeros(8, 20)),
        ["router.linear_router.weight", "[8, 20]", "[8, 16]"],
    ),
    "shared weights transposed": (
        lambda: load("shared_experts.down_proj.weight", torch.zeros(12, 16)),
        ["shared_experts.down_proj.weight", "[12, 16]", "[16, 12]"],
    ),
    "expert weights as codes": (
        lambda: load("expert_mlps.mlp_op.down_proj.weight", torch.zeros(8, 12, 16).byte()),
        ["expert_mlps.mlp_op.down_proj.weight", "torch.uint8", "Decode"],
    ),
    "assigned weight of the wrong shape": (
        lambda: run_with_gate_up(torch.zeros(8, 24, 16)),
        ["gate_up_proj.weight", "[8, 24, 16]", "[8, 16, 24]"],
    ),
    "assigned weight of another dtype": (
        lambda: run_with_gate_up(torch.zeros(8, 16, 24).bfloat16()),
        ["gate_up_proj.weight", "torch.bfloat16", "torch.float32"],
    ),
    "explain an unknown phase": (
        lambda: moe().explain("decoding", 4),
        ["phase='decoding'", "Did you mean 'decode'"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_message_names_value_rule_and_way_out(name: str) -> None:
    call, parts = CASES[name]
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def test_weights_of_the_wrong_shape_stay_a_runtime_error_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match=r"down_proj\.weight"):
        load("expert_mlps.mlp_op.down_proj.weight", torch.zeros(8, 16, 12))


def test_return_bias_is_refused_as_in_nxd() -> None:
    with pytest.raises(NotImplementedError, match="return_bias=True"):
        ExpertMLPsV2(config(), return_bias=True)


def test_a_graph_that_is_captured_looks_at_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_captured", lambda: True)
    check_choices(torch.tensor([[9, 9]]), 1, 8)
    check_no_repeats(torch.tensor([[0, 0]]), None)
    check_mask_values(torch.tensor([-1.0]))
