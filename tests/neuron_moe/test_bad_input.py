"""Wrong input is refused before any work, with the value, the rule and the way out."""

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
    choose_path,
    num_blocks,
)


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


def load_wrong_shape() -> None:
    state = moe().state_dict()
    state["expert_mlps.mlp_op.down_proj.weight"] = torch.zeros(8, 16, 12)
    moe().load_state_dict(state)


EXPERTS = ExpertMLPsV2(config())
HIDDEN, AFFINITIES, INDEX = torch.zeros(3, 16), torch.zeros(3, 2), torch.zeros(3, 2).int()

# what is wrong -> (call, parts of the message)
CASES: dict[str, tuple[Callable[[], object], list[str]]] = {
    "unknown blockwise key": (
        lambda: blockwise(skip_dma_tokens=True),
        ["BlockwiseMatmulConfig", "'skip_dma_tokens'", "Did you mean 'skip_dma_token'"],
    ),
    "unknown expert key": (
        lambda: config(hiden_act="silu"),
        ["RoutedExpertsMLPOpsConfig", "'hiden_act'", "Did you mean 'hidden_act'"],
    ),
    "unknown key without a near one": (
        lambda: blockwise(zzz=1),
        ["'zzz'", "Known: ", "block_size"],
    ),
    "unknown router key": (
        lambda: RouterConfig.from_kwargs(router_act="softmax"),
        ["'router_act'", "Did you mean 'router_act_fn'"],
    ),
    "block size zero": (lambda: blockwise(block_size=0), ["block_size=0", "positive int"]),
    "block size negative": (lambda: blockwise(block_size=-4), ["block_size=-4", "positive int"]),
    "block size a float": (lambda: blockwise(block_size=128.0), ["block_size=128.0", "int"]),
    "block size a string": (lambda: blockwise(block_size="256"), ["block_size='256'", "int"]),
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
        lambda: config(top_k=1, normalize_top_k_affinities=True),
        ["normalize_top_k_affinities=True", "top_k=1"],
    ),
    "negative capacity": (
        lambda: config(capacity_factor=-1.0),
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
        ["(3, 20)", "hidden_size=16"],
    ),
    "hidden states without a batch": (
        lambda: moe()(torch.zeros(3, 16)),
        ["(3, 16)", "[B, S, H]"],
    ),
    "hidden states of another dtype": (
        lambda: moe()(torch.zeros(1, 3, 16, dtype=torch.bfloat16)),
        ["torch.bfloat16", "torch.float32", "Cast"],
    ),
    "padding mask of another length": (
        lambda: moe()(torch.zeros(1, 3, 16), torch.ones(1, 4)),
        ["padding_mask", "(1, 4)", "3 tokens"],
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


def test_weights_of_the_wrong_shape_are_named_by_torch() -> None:
    with pytest.raises(RuntimeError, match=r"down_proj\.weight"):
        load_wrong_shape()


def test_return_bias_is_refused_as_in_nxd() -> None:
    with pytest.raises(NotImplementedError, match="return_bias=True"):
        ExpertMLPsV2(config(), return_bias=True)


def test_configurations_are_frozen() -> None:
    with pytest.raises(AttributeError):
        config().top_k = 3


def test_defaults_are_nxds() -> None:
    default = BlockwiseMatmulConfig.default()
    assert default == BlockwiseMatmulConfig.from_kwargs()
    assert (default.block_size, default.logical_nc_config) == (512, 2)
    assert (default.skip_dma_token, default.skip_dma_weight) == (False, False)
    assert config(hidden_act="swiglu").glu_type.value == "swiglu"
    assert config(hidden_act="swiglu").hidden_act == "sigmoid"
