"""Products, divisibility and topology are checked before any work, with a way out."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from neuron_moe import (
    ExpertMLPsV2,
    MoE,
    RoutedExpertsMLPOpsConfig,
    RouterTopK,
    SharedExperts,
)
from neuron_moe.dispatch.ranks import TokenSpread
from neuron_moe.dispatch.replicate import gather_choices
from neuron_moe.dispatch.shuffle import build_shuffle
from neuron_moe.parallel import ParallelConfig, parallel_state
from neuron_moe.parallel.collectives import SingleRank
from neuron_moe.parallel.groups import ExpertGroups, Offline, expert_ranks
from neuron_moe.parallel.topology import INSTANCES, instance
from neuron_moe.plan import phase_of

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "tp zero": (lambda: ParallelConfig(tp=0), "tp=0: must be a positive int"),
    "ep no int": (lambda: ParallelConfig(ep=2.0), "ep=2.0: must be a positive int"),  # type: ignore[arg-type]
    "moe product": (
        lambda: ParallelConfig(tp=8, moe_tp=2, moe_ep=2),
        r"moe_tp=2, moe_ep=2: the product 4 must be tp \* ep = 8. Use 1 x 8, 2 x 4, 4 x 2 or 8 x 1",
    ),
    "decode product": (
        lambda: ParallelConfig(tp=8, decode_moe_tp=3, decode_moe_ep=1),
        "the product 3 must divide",
    ),
    "attention dp": (lambda: ParallelConfig(tp=8, dp=3), "dp=3: must divide.*Use 1, 2, 4 or 8"),
    "sp and dp": (lambda: ParallelConfig(tp=8, sp=True, dp=2), "both say which tokens"),
    "strategy": (
        lambda: ParallelConfig(strategy="all2all"),
        "strategy='all2all': must be one of replicate, all_to_all. Did you mean 'all_to_all'",
    ),
    "sp no bool": (lambda: ParallelConfig(sp=1), "sp=1: must be True or False"),  # type: ignore[arg-type]
    "unknown degree": (
        lambda: ParallelConfig.from_neuron_config(tp_degree=8, moe_ep_degre=8),
        "unknown key 'moe_ep_degre'. Did you mean 'moe_ep_degree'",
    ),
    "world": (
        lambda: ParallelConfig(tp=4, ep=16).check_world(8),
        "need 64 ranks, the product, but the world has 8. Start 64 processes, or use TP x EP of"
        " 1 x 8, 2 x 4, 4 x 2 or 8 x 1",
    ),
    "experts": (
        lambda: ParallelConfig(ep=8).check_experts(12, 64),
        r"moe_ep=8 \(prefill\): must divide num_experts=12. Use 1, 2 or 4",
    ),
    "intermediate": (
        lambda: ParallelConfig(tp=64).check_experts(64, 96),
        "must divide intermediate_size=96. Use 1, 2, 4, 8, 16 or 32, or pad",
    ),
    "3xlarge holds 4": (
        lambda: ParallelConfig(tp=8).check_topology("trn2.3xlarge"),
        "need 8 ranks, trn2.3xlarge at LNC2 has 4 logical cores. Use 1, 2 or 4 ranks",
    ),
    "48xlarge, 24 ranks": (
        lambda: ParallelConfig(tp=24).check_topology("trn2.48xlarge"),
        "24 ranks must divide the 64 logical cores",
    ),
    "instance": (lambda: instance("trn2.4xlarge"), "Did you mean 'trn2.48xlarge'|trn2.3xlarge"),
    "lnc": (
        lambda: ParallelConfig(tp=4).check_topology("trn2.3xlarge", lnc=4),
        "lnc=4: must be 1 or 2",
    ),
    "pipeline": (
        lambda: parallel_state.initialize_model_parallel(1, 2),
        "pipeline_model_parallel_size=2: must be 1",
    ),
    "offline rank": (
        lambda: parallel_state.as_rank(ParallelConfig(tp=2), 2).__enter__(),
        r"rank=2: must be in \[0, 2\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_settings_are_refused_with_a_way_out(case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        build()


def test_nxd_names_mean_the_same() -> None:
    config = ParallelConfig.from_neuron_config(
        tp_degree=64,
        attention_dp_degree=8,
        hybrid_sharding_config={
            "moe_cte_tp_degree": 2,
            "moe_cte_ep_degree": 32,
            "moe_tkg_tp_degree": 64,
            "moe_tkg_ep_degree": 1,
        },
    )
    assert (config.prefill.tp, config.prefill.ep) == (2, 32)
    assert (config.decode.tp, config.decode.ep) == (64, 1)
    assert config.is_hybrid
    assert config.dp == 8


@pytest.mark.parametrize(
    ("name", "lnc", "ranks"),
    [
        ("trn2.3xlarge", 2, 4),
        ("trn2.3xlarge", 1, 8),
        ("trn2.48xlarge", 2, 64),
        ("trn2.48xlarge", 1, 128),
    ],
)
def test_every_power_of_two_fits_the_instance(name: str, lnc: int, ranks: int) -> None:
    assert INSTANCES[name].logical_cores(lnc) == ranks
    for tp in (1, 2, 4, 8, 16, 32, 64, 128):
        if ranks % tp == 0:
            ParallelConfig(tp=tp, ep=ranks // tp).check_topology(name, lnc)


def test_topology_gives_advice() -> None:
    mixed = ParallelConfig(tp=4, ep=16).check_topology("trn2.48xlarge")
    assert any("one reduction over all 64 ranks" in advice for advice in mixed)
    assert any(
        "LNC1" in advice for advice in ParallelConfig(tp=8).check_topology("trn2.3xlarge", 1)
    )
    assert ParallelConfig(ep=64).check_topology("trn2.48xlarge") == []


def test_tensor_parallel_neighbours_are_contiguous() -> None:
    config = ParallelConfig(tp=4, ep=2)
    assert expert_ranks(config, config.prefill).tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    replicas = ParallelConfig(tp=2, ep=1, replicas=2)
    assert expert_ranks(replicas, replicas.prefill).tolist() == [[[0, 1]], [[2, 3]]]


def experts_config(experts: int = 128) -> RoutedExpertsMLPOpsConfig:
    return RoutedExpertsMLPOpsConfig(experts, 64, 96, 8, "silu", True)


def test_the_guides_sizes_give_each_of_64_ranks_its_shard() -> None:
    with parallel_state.as_rank(ParallelConfig(tp=4, ep=16), rank=37):
        layer = MoE(
            RouterTopK(128, 8, 64, sequence_parallel_enabled=True),
            ExpertMLPsV2(experts_config(), sequence_parallel_enabled=True),
            SharedExperts(64, 96, 1, "silu"),
            sequence_parallel_enabled=True,
        )
        assert parallel_state.get_tensor_model_parallel_rank() == 1
        assert parallel_state.get_expert_model_parallel_rank() == 9
        assert parallel_state.get_tensor_model_parallel_size() == 4
        assert parallel_state.get_expert_model_parallel_size() == 16
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert shapes["expert_mlps.mlp_op.gate_up_proj.weight"] == (8, 64, 48)
    assert shapes["expert_mlps.mlp_op.down_proj.weight"] == (8, 24, 64)
    assert shapes["shared_experts.gate_proj.weight"] == (24, 64)
    assert shapes["router.linear_router.weight"] == (128, 64)
    assert layer.expert_mlps.local_experts() == tuple(range(72, 80))
    assert not parallel_state.model_parallel_is_initialized()


def test_one_rank_needs_no_processes_and_no_second_call() -> None:
    groups = parallel_state.initialize_model_parallel()
    try:
        assert groups.config.world_size == 1
        assert parallel_state.get_world_group() is None
        with pytest.raises(RuntimeError, match="already called"):
            parallel_state.initialize_model_parallel()
    finally:
        parallel_state.destroy_model_parallel()
    parallel_state.destroy_model_parallel()


def test_hybrid_phases_share_one_copy_where_one_is_a_run_of_the_other() -> None:
    cases = (
        (ParallelConfig(tp=2, ep=4), 1, 32),
        (ParallelConfig(tp=2, ep=4, decode_moe_tp=2, decode_moe_ep=2), 1, 64),
        (ParallelConfig(tp=1, ep=8, decode_moe_tp=8, decode_moe_ep=1), 2, 16),
        (ParallelConfig(tp=1, ep=8, dp=4, decode_moe_tp=1, decode_moe_ep=2), 2, 16),
    )
    for (config, copies, stored), rank in itertools.product(cases, range(8)):
        with parallel_state.as_rank(config, rank):
            experts = ExpertMLPsV2(experts_config())
        names = {name.split(".")[0] for name, _ in experts.named_parameters()}
        assert len(names) == copies, config
        assert experts.mlp_op.down_proj.weight.shape[0] == stored
        stored_at = experts.mlp_op.down_proj.weight.data_ptr()
        whole = experts.mlp_op.down_proj.weight.nbytes
        if copies == 1:
            for phase in ("prefill", "decode"):
                at = experts.weights(phase).down_proj_EIH.data_ptr()
                assert stored_at <= at < stored_at + whole


def test_a_layer_without_the_group_to_sum_over_is_refused() -> None:
    tp, ep = Offline("tensor", 0, 2), Offline("expert", 0, 2)
    with pytest.raises(ValueError, match="the group of all 4 must be given"):
        ExpertGroups.of(tp, ep)
    experts = ExpertMLPsV2(
        experts_config(),
        tensor_model_parallel_group=tp,  # type: ignore[arg-type]
        expert_model_parallel_group=ep,  # type: ignore[arg-type]
    )
    with pytest.raises(ValueError, match="needs the group of all 4 to sum over"):
        MoE(RouterTopK(128, 8, 64), experts)
    with pytest.raises(ValueError, match="has 3 ranks, must have the 4"):
        MoE(
            RouterTopK(128, 8, 64),
            experts,
            tensor_model_parallel_group=Offline("model", 0, 3),  # type: ignore[arg-type]
        )


def test_shared_experts_over_more_ranks_than_are_summed_are_refused() -> None:
    config = ParallelConfig(tp=4, ep=2, decode_moe_tp=2, decode_moe_ep=1)
    with (
        parallel_state.as_rank(config, 0),
        pytest.raises(ValueError, match="shared experts split over 4 ranks: must divide the 2"),
    ):
        MoE(
            RouterTopK(128, 8, 64),
            ExpertMLPsV2(experts_config()),
            SharedExperts(64, 96, 1, "silu"),
        )


def test_shuffling_needs_groups_of_its_size() -> None:
    with pytest.raises(ValueError, match=r"none were built\. Call parallel_state.initialize_token"):
        MoE(RouterTopK(128, 8, 64), ExpertMLPsV2(experts_config()), token_shuffle_group_size=2)


def test_sequences_of_one_token_are_decoded() -> None:
    assert [phase_of(*sizes) for sizes in ((4, 4), (8, 4), (1, 1), (0, 0))] == [
        "decode",
        "prefill",
        "decode",
        "prefill",
    ]


def test_tokens_are_parts_of_sequences_only_where_that_is_said() -> None:
    here = SingleRank()
    spreads = TokenSpread(here, here), TokenSpread.sequence(here)
    assert [spread.is_sequence for spread in spreads] == [False, True]


def test_each_rank_shuffles_by_the_seed_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SingleRank()
    group.rank, group.size = 1, 2
    monkeypatch.setattr(parallel_state, "get_token_shuffle_group", lambda: group)
    seeds = []
    for seed in (None, 0, 5):
        shuffle = build_shuffle(2, seed)
        assert shuffle is not None
        seeds.append(shuffle.generator.initial_seed())
    assert seeds[1:] == [seeds[0], seeds[0] + 5]
    group.rank = 0
    assert build_shuffle(2, 5).generator.initial_seed() == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_gradient", [False, True])
def test_choices_travel_as_they_are(dtype: torch.dtype, has_gradient: bool) -> None:
    index_TK = torch.tensor([[0, 3], [2, 1], [-1, 5]], dtype=torch.int32)
    affinities_TK = torch.tensor([[0.5, 0.25], [1.0, -2.0], [0.0, 0.75]], dtype=dtype)
    affinities_TK.requires_grad_(has_gradient)
    index, affinities = gather_choices(SingleRank("tokens"), index_TK, affinities_TK, (3,))
    assert torch.equal(index, index_TK)
    assert torch.equal(affinities, affinities_TK)
    assert affinities.requires_grad == has_gradient
