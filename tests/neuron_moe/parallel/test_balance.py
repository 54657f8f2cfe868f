"""Placement evens out skewed loads, replicas take turns, biases move against the load."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_moe import ExpertMLPsV2, GroupLimitedRouter, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.parallel import ParallelConfig, parallel_state
from neuron_moe.parallel.collectives import SingleRank
from neuron_moe.parallel.placement import (
    ExpertPlacement,
    load_placements,
    place_experts,
    save_placements,
)
from neuron_moe.router import route
from neuron_moe.train.balance import (
    BalanceStats,
    expert_load,
    gather_expert_load,
    rank_rows,
    skewed_trace,
    stretch_load,
    uniform_trace,
    update_selection_bias,
    zipf_trace,
)

# experts, choices, ranks, extra experts: at most 12.5 % extra experts
ZIPF_CASES = {
    "GPT-OSS-120B EP8": (128, 4, 8, 16),
    "GPT-OSS-120B EP16": (128, 4, 16, 16),
    "Qwen3-235B EP8": (128, 8, 8, 16),
    "Qwen3-235B EP16": (128, 8, 16, 16),
    "DeepSeek-V3 EP16": (256, 8, 16, 32),
    "DeepSeek-V3 EP32": (256, 8, 32, 32),
}


@pytest.mark.parametrize("case", ZIPF_CASES)
def test_zipf_load_is_placed_within_ten_percent_of_the_mean(case: str) -> None:
    experts, top_k, ranks, extra = ZIPF_CASES[case]
    trace = zipf_trace(40_000, experts, top_k, exponent=1.0, seed=5)
    known, later = trace[:20_000], trace[20_000:]
    placement = place_experts(expert_load(known, experts), ranks, extra_experts=extra)
    before = BalanceStats.of(rank_rows(later, ExpertPlacement.contiguous(experts, ranks)))
    after = BalanceStats.of(rank_rows(later, placement))
    assert placement.extra_share <= 0.125
    assert before.busiest_over_mean > 1.3
    assert after.busiest_over_mean < 1.10, (before, after)


def test_replicas_are_needed_where_one_expert_exceeds_a_rank() -> None:
    load = expert_load(zipf_trace(20_000, 128, 8, seed=5), 128)
    packed = BalanceStats.of(place_experts(load, 16).rank_load(load))
    replicated = BalanceStats.of(place_experts(load, 16, extra_experts=16).rank_load(load))
    assert packed.busiest_over_mean > 1.1 > replicated.busiest_over_mean


@settings(max_examples=60, deadline=None)
@given(
    loads=st.lists(st.integers(0, 1000), min_size=4, max_size=24),
    ranks=st.sampled_from([1, 2, 4]),
    replicas=st.integers(0, 2),
)
def test_every_placement_is_complete_and_no_worse_than_equal_runs(
    loads: list[int], ranks: int, replicas: int
) -> None:
    loads = loads[: len(loads) // ranks * ranks]
    load_E = torch.tensor(loads)
    placement = place_experts(load_E, ranks, extra_experts=replicas * ranks)
    assert set(placement.physical) == set(range(len(loads)))
    assert placement.num_physical == len(loads) + replicas * ranks
    assert float(placement.rank_load(load_E).sum()) == pytest.approx(float(load_E.sum()))
    runs = ExpertPlacement.contiguous(len(loads), ranks).rank_load(load_E)
    if replicas == 0:  # heaviest-first packing is at most 4/3 of the best one
        assert float(placement.rank_load(load_E).max()) <= 4 / 3 * float(runs.max()) + 1e-9


def test_replicas_take_turns_and_every_choice_keeps_its_expert() -> None:
    placement = ExpertPlacement((0, 1, 2, 3, 0, 1, 0, 2), 4, 4)
    index = torch.randint(-1, 4, (5000, 2), dtype=torch.int32)
    physical = placement.to_physical(index, first_token=17)
    experts = torch.tensor([*placement.physical, -1])[physical.long()]
    assert torch.equal(experts.int(), index)
    counts = torch.bincount(physical[index == 0].long(), minlength=8)[[0, 4, 6]].float()
    assert float(counts.max() / counts.mean()) < 1.1


def test_neighbours_and_strided_tokens_both_reach_all_replicas() -> None:
    placement = ExpertPlacement((0, 1, 0, 1), 2, 2)
    zeros = torch.zeros(64, 1, dtype=torch.int32)
    physical = placement.to_physical(zeros)[:, 0]
    for stride in (1, 2, 4):
        assert set(physical[::stride].tolist()) == {0, 2}


def test_turns_go_on_where_another_rank_has_the_tokens_before() -> None:
    placement = ExpertPlacement((0, 1, 2, 0, 1, 0), 2, 3)
    index = torch.randint(-1, 3, (90, 2))
    whole = placement.to_physical(index)
    parts = [placement.to_physical(index[:40]), placement.to_physical(index[40:], 40)]
    assert torch.equal(torch.cat(parts), whole)
    assert whole.dtype == index.dtype
    without = ExpertPlacement((2, 0, 1), 3, 3)
    physical = torch.tensor([-1, 1, 2, 0])  # of no expert, and of each
    assert torch.equal(without.to_physical(index), physical[index + 1])


def lightest(loads: list[int], num_ranks: int) -> int:
    """Return the load of the busiest rank of the best placement without replicas, by trying all."""
    size = len(loads) // num_ranks
    return min(
        max(sum(order[start : start + size]) for start in range(0, len(loads), size))
        for order in itertools.permutations(loads)
    )


# Heaviest first is not enough for the first four.
FEW = [
    ([12, 6, 13, 0, 16, 7], 2),
    ([20, 9, 3, 10, 16, 13], 2),
    ([16, 17, 6, 13, 1, 15], 2),
    ([8, 6, 5, 9, 4, 17], 2),
    ([9, 7, 5, 4, 2, 1], 3),
    ([4, 0, 0, 1], 1),
]


@pytest.mark.parametrize(("loads", "ranks"), FEW)
def test_few_experts_are_placed_as_well_as_can_be(loads: list[int], ranks: int) -> None:
    load_E = torch.tensor(loads)
    assert float(place_experts(load_E, ranks).rank_load(load_E).max()) == lightest(loads, ranks)


@pytest.mark.parametrize(
    ("physical", "ranks", "experts", "message"),
    [
        ((0, 1, 2), 2, 3, "must divide by num_ranks=2"),
        ((0, 1, 5, 2), 2, 3, r"5 must be an expert in \[0, 3\)"),
        ((0, 1, 3, 2), 2, 3, r"3 must be an expert in \[0, 3\)"),
        ((0, 1, 1, 0), 2, 3, "expert 2 must be among them"),
        ((0, 1), 0, 2, "num_ranks=0"),
        ((0, 1), 1, 0, "num_experts=0"),
    ],
    ids=["uneven", "unknown expert", "one too many", "expert nowhere", "no rank", "no expert"],
)
def test_a_wrong_placement_is_refused(
    physical: tuple[int, ...], ranks: int, experts: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(physical, ranks, experts)


def test_extra_experts_that_do_not_divide_are_refused_with_a_number_that_does() -> None:
    for experts, ranks, extra, wanted in ((128, 64, 16, 64), (5, 4, 2, 3), (5, 4, -1, 3)):
        with pytest.raises(ValueError, match=rf"Use extra_experts={wanted}\."):
            place_experts(torch.ones(experts), ranks, extra_experts=extra)
    with pytest.raises(ValueError, match="num_ranks=0"):
        place_experts(torch.ones(4), 0)
    with pytest.raises(ValueError, match=r"load_E: -1\.0 must not be negative"):
        place_experts(torch.tensor([2, -1]), 1)


def test_a_layer_refuses_a_placement_of_other_experts_or_ranks() -> None:
    config = RoutedExpertsMLPOpsConfig(8, 16, 16, 2, "silu", True)
    with pytest.raises(ValueError, match="places 4 experts, must place num_experts=8"):
        ExpertMLPsV2(config, placement=ExpertPlacement.contiguous(4, 2))
    with (
        parallel_state.as_rank(ParallelConfig(ep=4), 0),
        pytest.raises(ValueError, match="made for 2 expert-parallel ranks"),
    ):
        ExpertMLPsV2(config, placement=ExpertPlacement.contiguous(8, 2))


def test_expert_distribution_of_nxd_is_a_placement() -> None:
    distribution = [[0, 1, 2], [3, 2, 0]]
    config = RoutedExpertsMLPOpsConfig(4, 16, 16, 2, "silu", True, expert_distribution=distribution)
    with parallel_state.as_rank(ParallelConfig(ep=2), 1):
        experts = ExpertMLPsV2(config)
    assert experts.local_experts() == (3, 2, 0)
    assert experts.mlp_op.down_proj.weight.shape[0] == 3


def test_placements_survive_a_file(tmp_path: Path) -> None:
    placements = [
        place_experts(torch.arange(8), 4, extra_experts=4),
        place_experts(torch.ones(8), 2),
    ]
    save_placements(tmp_path / "p.json", placements)
    assert load_placements(tmp_path / "p.json") == placements
    for text in ("[]", "{}", '{"layers": 3}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match="must be a JSON object with a list 'layers'"):
            load_placements(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "must hold 'expert_distribution', a list of lists"),
        ({"expert_distribution": [[0, 1], [2]]}, r"ranks hold \[1, 2\] experts; must be equally"),
        ({"expert_distribution": [[0], [1]], "num_experts": 3}, "num_experts=3 must be 2"),
    ],
    ids=["nothing", "uneven", "other experts"],
)
def test_a_wrong_entry_of_a_file_of_placements_is_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertPlacement.from_dict(values)


def test_the_selection_bias_balances_a_skewed_router_and_keeps_mean_zero() -> None:
    torch.manual_seed(4)
    router = GroupLimitedRouter(16, 2, 32, n_group=4, topk_group=2)
    preference = torch.linspace(-1.5, 1.5, 16)
    load = torch.zeros(16)
    history = []
    for _ in range(400):
        with torch.no_grad():
            logits = torch.randn(256, 16) + preference
        choice = route(logits, router.spec.formula, router.e_score_correction_bias)
        load = expert_load(choice.expert_index_TK, 16)
        history.append(BalanceStats.of(load).busiest_over_mean)
        update_selection_bias(router, load, rate=5e-3)
        assert abs(float(router.e_score_correction_bias.mean())) < 1e-6
    assert sum(history[:10]) / 10 > 2.0
    assert sum(history[-10:]) / 10 < 1.4


def test_the_bias_moves_by_the_sign_of_the_load_only() -> None:
    router = RouterTopK(4, 1, 8, act_fn="sigmoid", selection_bias=True)
    update_selection_bias(router, torch.tensor([1000, 0, 1, 7]), rate=0.25)
    assert router.e_score_correction_bias.tolist() == [-0.375, 0.125, 0.125, 0.125]
    with pytest.raises(ValueError, match="has no selection bias"):
        update_selection_bias(RouterTopK(4, 1, 8), torch.ones(4))


def test_balance_statistics() -> None:
    even = BalanceStats.of(torch.ones(8))
    assert (even.busiest_over_mean, even.coefficient_of_variation, even.idle_share) == (
        1.0,
        0.0,
        0.0,
    )
    assert even.effective == pytest.approx(8.0)
    one = BalanceStats.of(torch.tensor([0, 0, 0, 5]))
    assert (one.busiest_over_mean, one.idle_share) == (4.0, 0.75)
    assert one.effective == pytest.approx(1.0)
    with pytest.raises(ValueError, match="must be a vector with some load"):
        BalanceStats.of(torch.zeros(3))


def test_traces_have_distinct_choices_and_the_wanted_skew() -> None:
    uniform, zipf = uniform_trace(20_000, 32, 4), zipf_trace(20_000, 32, 4)
    for trace in (uniform, zipf):
        assert bool((trace.sort(1).values.diff(dim=1) > 0).all())
    assert BalanceStats.of(expert_load(uniform, 32)).busiest_over_mean < 1.05
    first_choice = expert_load(skewed_trace(torch.tensor([1.0, 2.0, 3.0, 4.0]), 50_000, 1), 4)
    assert (first_choice / 50_000).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.01)
    assert BalanceStats.of(expert_load(zipf, 32)).busiest_over_mean > 3.0


def test_a_stretched_load_keeps_its_shape() -> None:
    load = torch.tensor([40, 10, 30, 20])
    assert stretch_load(load, 4).tolist() == [40, 30, 20, 10]
    wide = BalanceStats.of(stretch_load(load, 128))
    assert wide.busiest_over_mean == pytest.approx(BalanceStats.of(load).busiest_over_mean)


def test_loads_counted_on_ranks_add_up_to_the_loads_of_one_process(run_ranks: Any) -> None:
    def layer_of(sp: bool) -> MoE:
        torch.manual_seed(0)
        config = RoutedExpertsMLPOpsConfig(8, 16, 16, 2, "silu", True)
        return MoE(RouterTopK(8, 2, 16), ExpertMLPsV2(config), sequence_parallel_enabled=sp)

    hidden = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))

    def counted(rank: int) -> list[list[int]]:
        found = []
        for config in (
            ParallelConfig(),
            ParallelConfig(tp=2, ep=2),
            ParallelConfig(ep=4, sp=True),
            ParallelConfig(ep=4, strategy="all_to_all"),
            ParallelConfig(ep=4, dp=2),
        ):
            if config.world_size > 1:
                parallel_state.initialize_model_parallel(config=config, watch=False)
            layer = layer_of(config.sp)
            layer.enable_load_counters()
            mine = (
                hidden.chunk(4, 1)[rank]
                if config.sp
                else hidden.chunk(config.dp)[rank // 2 % config.dp]
            )
            with torch.no_grad():
                layer(mine)
            alone = None if config.world_size > 1 else SingleRank()
            found.append(gather_expert_load(layer, alone).tolist())
            parallel_state.destroy_model_parallel()
        return found

    for found in run_ranks(4, counted):
        assert sum(found[0]) == 2 * 16
        assert all(load == found[0] for load in found)


def test_explain_counts_replicas_as_experts() -> None:
    config = RoutedExpertsMLPOpsConfig(4, 16, 16, 2, "silu", True)
    placement = ExpertPlacement((0, 1, 2, 3, 0, 0), 1, 4)
    layer = MoE(RouterTopK(4, 2, 16), ExpertMLPsV2(config, placement=placement))
    layer.enable_load_counters()
    with torch.no_grad():
        layer(torch.randn(1, 600, 16))
    explanation = layer.explain("prefill", 600)
    assert explanation.path == "blockwise"
    assert explanation.padding.actual is not None
    assert layer.expert_mlps.local_load()[0] == int(layer.expert_load[0]) // 3
