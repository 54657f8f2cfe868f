"""Path choice: our rules, NxD's table, and what explain() tells."""

from types import SimpleNamespace

import pytest
import torch

from neuron_moe import (
    BlockwiseMatmulConfig,
    ExpertMLPsV2,
    MoE,
    RoutedExpertsMLPOpsConfig,
    RouterTopK,
    choose_path,
)
from neuron_moe.dispatch import TokenBatch
from neuron_moe.dispatch.ranks import OverRanks, TokenSpread
from neuron_moe.dispatch.replicate import copy_of
from neuron_moe.dispatch.shuffle import TokenShuffle
from neuron_moe.parallel.shard import ExpertShard
from neuron_moe.paths import PATHS
from neuron_moe.plan import Step

# phase, tokens, K, E, local experts, block size, capacity factor -> our path, NxD's path
CASES = [
    ("decode", 1, 4, 128, 128, 512, None, "selective", "selective"),
    ("decode", 31, 4, 128, 128, 512, None, "selective", "selective"),
    ("decode", 32, 4, 128, 128, 512, None, "all_experts", "all_experts"),
    ("decode", 4, 4, 128, 128, 512, 1.0, "selective", "selective"),
    ("decode", 16, 8, 128, 32, 512, None, "all_experts", "all_experts"),
    ("decode", 4, 8, 128, 32, 512, None, "selective", NotImplementedError),
    ("decode", 1, 1, 16, 2, 512, None, "selective", NotImplementedError),
    ("speculation", 5, 4, 128, 128, 512, None, "selective", "selective"),
    ("speculation", 64, 4, 128, 128, 512, None, "all_experts", "all_experts"),
    ("prefill", 2, 4, 128, 128, 512, None, "selective", "selective"),
    ("prefill", 100, 4, 128, 128, 512, None, "all_experts", "all_experts"),
    ("prefill", 128, 4, 128, 128, 512, None, "all_experts", "blockwise"),
    ("prefill", 129, 4, 128, 128, 1024, None, "blockwise", "all_experts"),
    ("prefill", 1024, 4, 128, 128, 512, None, "blockwise", "blockwise"),
    ("prefill", 1024, 4, 128, 128, 512, 1.25, "capacity", "capacity"),
    ("prefill", 1024, 4, 128, 128, 512, 32.0, "blockwise", "blockwise"),
    ("prefill", 1024, 8, 128, 4, 512, None, "blockwise", "blockwise"),
    ("training", 1024, 4, 128, 128, 512, None, "blockwise", "all_experts"),
    ("training", 1024, 4, 128, 128, 512, 1.25, "capacity", "capacity"),
]


def _ids(case: tuple[object, ...]) -> str:
    return f"{case[0]}-T{case[1]}-K{case[2]}-E{case[4]}of{case[3]}-B{case[5]}-cf{case[6]}"


@pytest.mark.parametrize("case", CASES, ids=_ids)
def test_rules(case: tuple[object, ...]) -> None:
    phase, tokens, top_k, experts, local, block_size, factor, ours, theirs = case

    def path(compat: str | None) -> str:
        decision = choose_path(
            phase,
            tokens,
            top_k,
            experts,
            num_local_experts=local,
            block_size=block_size,
            capacity_factor=factor,
            compat=compat,
        )
        assert decision.reasons
        assert {name for name, _ in decision.rejected} == set(PATHS) - {decision.path}
        return decision.path

    assert path(None) == ours
    if theirs is NotImplementedError:
        with pytest.raises(NotImplementedError, match="selective loading under expert parallelism"):
            path("nxd")
    else:
        assert path("nxd") == theirs


def _moe(**changes: object) -> MoE:
    sizes = {"num_experts": 16, "hidden_size": 8, "intermediate_size": 8, "top_k": 2}
    config = RoutedExpertsMLPOpsConfig(**sizes, hidden_act="silu", glu_mlp=True, **changes)
    experts = ExpertMLPsV2(config, BlockwiseMatmulConfig.from_kwargs(block_size=64))
    return MoE(RouterTopK(16, 2, 8), experts)


def test_explain_prints_path_blocks_padding_and_what_was_rejected() -> None:
    text = str(_moe().explain("prefill", 1024))
    for part in ("blockwise", "because", "block_size=64", "N=47", "worst", "expected", "actual"):
        assert part in text
    for other in ("selective", "all_experts", "capacity"):
        assert f"not      {other}" in text


def test_explain_gives_the_actual_padding_of_the_recorded_load() -> None:
    moe = _moe().eval()
    assert moe.explain("prefill", 300).padding.actual is None
    moe.enable_load_counters()
    with torch.no_grad():
        moe(torch.randn(1, 300, 8))
    load = moe.expert_load.tolist()
    assert sum(load) == 600
    blocks = sum(-(-count // 64) for count in load)
    assert moe.explain("prefill", 300).padding.actual == pytest.approx(blocks * 64 / 600 - 1)
    moe.enable_load_counters(False)
    assert moe.expert_load is None


def test_compat_on_the_module_follows_nxds_table() -> None:
    config = _moe().expert_mlps.config
    experts = ExpertMLPsV2(config, compat="nxd")
    assert experts.choose_path("prefill", 100).path == "all_experts"
    assert experts.choose_path("prefill", 1000).path == "blockwise"


def test_explain_suggests_a_block_size_that_fits_the_load() -> None:
    moe = _moe()
    assert "block_size=256 would be faster" in str(
        moe.explain("prefill", 2048, tokens_per_expert=[256] * 16)
    )
    assert "would be faster" not in str(moe.explain("prefill", 300, tokens_per_expert=[38] * 16))


def test_decode_names_no_blocks_of_its_own() -> None:
    shown = str(_moe().explain("decode", 2))
    assert "padding" not in shown
    assert "block_size" not in shown.split("  not ")[0]


@pytest.mark.parametrize(
    ("ranks", "copy"),
    [((0, 1), 0), ((2, 3), 1), ((6, 7), 3), ((0, 4), 0), ((1, 5), 1), ((3, 7), 3), ((), 2)],
)
def test_groups_of_neighbours_and_of_evenly_spaced_ranks_are_numbered(
    ranks: tuple[int, ...], copy: int
) -> None:
    model = SimpleNamespace(name="model", size=8, rank=5, ranks=tuple(range(8)))
    part = SimpleNamespace(name="part", size=2, rank=1, ranks=ranks)
    if ranks and ranks[1] == ranks[0] + 1:
        model.rank = ranks[1]
    assert copy_of(part, model) == copy


def test_a_group_that_is_neither_is_refused() -> None:
    model = SimpleNamespace(name="model", size=8, rank=5, ranks=tuple(range(8)))
    part = SimpleNamespace(name="part", size=2, rank=1, ranks=(1, 4))
    with pytest.raises(ValueError, match=r"part.*\[1, 4\] of the model must be neighbours"):
        copy_of(part, model)
    assert copy_of(model, model) == 0


def test_what_cannot_be_shuffled_is_refused_before_any_rank_sends() -> None:
    shuffle = TokenShuffle(SimpleNamespace(size=2, rank=0), 0)
    batch = TokenBatch(torch.zeros(4, 2), 1, None, "prefill", True, (4,))
    refused = {
        "needs different tokens on each rank": batch._replace(is_sequence_part=False),
        "must divide the 3 tokens of a rank": batch._replace(hidden_TH=torch.zeros(3, 2)),
        r"padding_mask: shape \(8,\) .* each of the 4 tokens": batch._replace(
            padding_mask=torch.ones(8)
        ),
    }
    for message, each in refused.items():
        with pytest.raises(ValueError, match=message):
            shuffle.forth(each)


def test_every_rank_draws_an_order_of_its_own() -> None:
    drawn = [TokenShuffle(SimpleNamespace(size=4, rank=rank), 5).generator for rank in range(4)]
    assert [generator.initial_seed() for generator in drawn] == [5, 7924, 15843, 23762]


def test_a_shuffle_among_one_rank_is_undone() -> None:
    shuffle = TokenShuffle(SimpleNamespace(size=1, rank=0, all_to_all=lambda x, *_: x), 0)
    hidden_TH, mask = torch.arange(12.0).view(6, 2), torch.tensor([[1, 0, 2], [0, 0, 1]])
    for padding_mask in (None, mask):
        batch = TokenBatch(hidden_TH, 2, padding_mask, "prefill", True, (6,))
        shuffled, order = shuffle.forth(batch)
        assert shuffled.batch_size == 1
        assert not torch.equal(shuffled.hidden_TH, hidden_TH)
        assert torch.equal(shuffle.back(shuffled.hidden_TH, order), hidden_TH)
        if padding_mask is not None:
            assert shuffled.padding_mask[order.inverse_T].tolist() == [1, 0, 1, 0, 0, 1]


def test_sequences_that_are_gathered_whole_lie_one_after_the_other() -> None:
    one = SimpleNamespace(rank=1, is_traced=False)
    layout = OverRanks(None, TokenSpread(one, one), None, alike=one, parted=one)
    mask = torch.tensor([1, 1, 1, 1, 0, 1, 0, 0]) > 0
    batch = TokenBatch(torch.zeros(4, 2), 2, mask, "prefill", False, (4, 4))
    assert layout._own_mask(batch).tolist() == mask[4:].tolist()


@pytest.mark.parametrize("axis", ["tp", "ep"])
@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_a_shard_is_one_of_at_least_one(axis: str, size: float) -> None:
    with pytest.raises(ValueError, match=f"{axis}_size={size}: must be"):
        ExpertShard(**{f"{axis}_size": size})


def test_a_step_is_prepared_without_padding_unless_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[Step] = []
    monkeypatch.setattr(MoE, "_make_ready", lambda _layer, *step: steps.append(Step(*step)))
    config = RoutedExpertsMLPOpsConfig(4, 16, 8, 1, "silu", True)
    layer = MoE(RouterTopK(4, 1, 16), ExpertMLPsV2(config))
    layer.prepare("decode", 3)
    layer.prepare("prefill", 5, has_padding=True)
    assert steps == [Step("decode", 3, False), Step("prefill", 5, True)]
