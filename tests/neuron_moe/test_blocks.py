"""Token-to-block mapping: every pair in one slot, as few blocks as always suffice."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_moe.blocks import (
    build_block_mapping,
    expected_valid_blocks,
    num_blocks,
    padding_overhead,
    sort_pairs,
)


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """Draw ([T, K] index with -1 for no expert, E, block size)."""
    num_experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, num_experts))
    tokens = draw(st.integers(1, 40))
    block_size = draw(st.integers(1, 17))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    skew = draw(st.sampled_from([0.0, 1.0, 50.0]))
    scores_TE = torch.rand((tokens, num_experts), generator=generator)
    scores_TE = scores_TE + skew * torch.rand(num_experts, generator=generator)
    index_TK = scores_TE.topk(top_k).indices
    if draw(st.booleans()):
        gone = torch.rand((tokens, top_k), generator=generator) < 0.3
        index_TK = torch.where(gone, -1, index_TK)
    return index_TK, num_experts, block_size


def test_worked_example_bit_for_bit() -> None:
    mapping = build_block_mapping(torch.tensor([[0], [1], [0], [2], [0], [1]]), 3, 2)
    assert num_blocks(6, 1, 3, 2) == 4
    assert mapping.token_position_to_id.tolist() == [0, 2, 4, -1, 1, 5, 3, -1]
    assert mapping.block_to_expert.tolist() == [0, 0, 1, 2]
    assert mapping.tokens_per_expert_E.tolist() == [3, 2, 1]
    assert mapping.num_valid_blocks.item() == 4
    assert mapping.token_position_to_id.dtype == torch.int32
    assert mapping.block_to_expert.dtype == torch.int32


@given(routings())
@settings(max_examples=200, deadline=None)
def test_every_pair_sits_in_exactly_one_slot_of_its_expert(
    case: tuple[torch.Tensor, int, int],
) -> None:
    index_TK, num_experts, block_size = case
    top_k = index_TK.shape[1]
    mapping = build_block_mapping(index_TK, num_experts, block_size)
    used = mapping.pair_of_slot[mapping.pair_of_slot >= 0]
    wanted = (index_TK.reshape(-1) >= 0).nonzero().reshape(-1)
    assert sorted(used.tolist()) == wanted.tolist()
    for slot, pair in enumerate(mapping.pair_of_slot.tolist()):
        token = mapping.token_position_to_id[slot].item()
        if pair < 0:
            assert token == -1
            continue
        assert token == pair // top_k
        expert = mapping.block_to_expert[slot // block_size].item()
        assert expert == index_TK.reshape(-1)[pair].item()


@given(routings())
@settings(max_examples=100, deadline=None)
def test_blocks_follow_experts_and_tokens_keep_their_order(
    case: tuple[torch.Tensor, int, int],
) -> None:
    index_TK, num_experts, block_size = case
    mapping = build_block_mapping(index_TK, num_experts, block_size)
    experts = mapping.block_to_expert.tolist()
    assert experts == sorted(experts)
    valid = mapping.num_valid_blocks.item()
    assert all(expert == num_experts - 1 for expert in experts[valid:])
    blocks = mapping.token_position_to_id.view(-1, block_size)
    assert all((block >= 0).any() for block in blocks[:valid])
    assert (blocks[valid:] == -1).all()
    for expert in range(num_experts):
        mine = blocks[mapping.block_to_expert == expert].reshape(-1)
        real = mine[mine >= 0].tolist()
        assert real == sorted(real)


def _most_blocks(tokens: int, top_k: int, experts: int, block_size: int) -> int:
    """Search all loads an expert-distinct routing can produce."""
    pairs = tokens * top_k
    loads = itertools.product(range(tokens + 1), repeat=experts)
    return max(
        sum(-(-load // block_size) for load in split) for split in loads if sum(split) == pairs
    )


@pytest.mark.parametrize("experts", [1, 2, 3, 4])
def test_block_count_is_the_exact_worst_case(experts: int) -> None:
    for tokens, top_k, block_size in itertools.product(
        range(1, 7), range(1, experts + 1), range(1, 9)
    ):
        count = num_blocks(tokens, top_k, experts, block_size)
        case = f"T={tokens} K={top_k} E={experts} B={block_size}"
        assert count == _most_blocks(tokens, top_k, experts, block_size), case


def test_more_choices_than_local_experts_do_not_add_blocks() -> None:
    assert num_blocks(100, 8, 4, 32) == num_blocks(100, 4, 4, 32)
    assert num_blocks(1000, 2, 8, 256) == 15
    assert num_blocks(1000, 2, 8, 256, pad_to_even=True) == 16
    assert num_blocks(0, 2, 8, 256) == 0


def test_even_padding_credits_the_last_expert() -> None:
    index_TK = torch.tensor([[0], [0], [1]])
    mapping = build_block_mapping(index_TK, 2, 1, pad_to_even=True)
    assert len(build_block_mapping(index_TK, 2, 1).block_to_expert) == 3
    assert mapping.block_to_expert.tolist() == [0, 0, 1, 1]
    assert mapping.token_position_to_id.tolist() == [0, 1, 2, -1]


def test_sort_is_stable() -> None:
    pairs = sort_pairs(torch.tensor([[1, 0], [0, 1], [-1, 0]]), 2)
    assert pairs.order_P.tolist() == [1, 2, 5, 0, 3, 4]
    assert pairs.expert_P.tolist() == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_expected_blocks_match_a_simulation(block_size: int) -> None:
    tokens, top_k, experts, trials = 48, 2, 8, 400
    total = 0
    for _ in range(trials):
        index_TK = torch.rand(tokens, experts).topk(top_k).indices
        load = torch.bincount(index_TK.reshape(-1), minlength=experts)
        total += int(((load + block_size - 1) // block_size).sum())
    expected = expected_valid_blocks(tokens, top_k, experts, block_size)
    assert expected == pytest.approx(total / trials, rel=0.02)


@pytest.mark.parametrize("tokens", [1, 5])
def test_expected_blocks_are_the_mean_over_binomial_loads(tokens: int) -> None:
    chances = [math.comb(tokens, h) * 0.25**h * 0.75 ** (tokens - h) for h in range(tokens + 1)]
    mean = sum(chance * math.ceil(hits / 2) for hits, chance in enumerate(chances))
    assert expected_valid_blocks(tokens, 2, 4, 2, num_routed=8) == pytest.approx(4 * mean)
    assert expected_valid_blocks(tokens, 2, 8, 2) == pytest.approx(8 * mean)
    overhead = padding_overhead(tokens, 2, 4, 2, num_routed=8)
    assert overhead.pairs == tokens
    assert overhead.expected == pytest.approx(4 * mean * 2 / tokens - 1)
    assert overhead.worst == num_blocks(tokens, 2, 4, 2) * 2 / tokens - 1


def test_every_expert_gets_every_token_where_all_are_chosen() -> None:
    assert expected_valid_blocks(10, 4, 4, 4) == 4 * 3
    assert expected_valid_blocks(10, 4, 2, 4, num_routed=4) == 2 * 3


def test_a_load_of_nothing_has_no_overhead_and_of_one_pair_has() -> None:
    assert padding_overhead(4, 1, 2, 4, tokens_per_expert=[0, 0]).actual is None
    assert padding_overhead(4, 1, 2, 4, tokens_per_expert=[1, 0]).actual == 0.0


@pytest.mark.parametrize("name", ["num_tokens", "top_k", "num_experts", "block_size"])
def test_sizes_that_are_no_counts_are_refused_by_name(name: str) -> None:
    sizes = {"num_tokens": 4, "top_k": 1, "num_experts": 2, "block_size": 4, name: -1}
    with pytest.raises(ValueError, match=f"{name}=-1"):
        num_blocks(**sizes)


def test_overhead_of_the_guide_example() -> None:
    overhead = padding_overhead(1000, 2, 8, 256, tokens_per_expert=[250] * 8)
    assert overhead.worst == pytest.approx(15 * 256 / 2000 - 1)
    assert overhead.actual == pytest.approx(2048 / 2000 - 1)
    assert overhead.actual < overhead.expected < overhead.worst


def test_actual_overhead_scales_a_longer_record_to_the_tokens_at_hand() -> None:
    short = padding_overhead(100, 2, 4, 32, tokens_per_expert=[80, 60, 40, 20])
    long = padding_overhead(100, 2, 4, 32, tokens_per_expert=[8000, 6000, 4000, 2000])
    assert short == long
    assert long.actual <= long.worst


def test_without_tokens_there_are_as_many_blocks_as_are_asked_for() -> None:
    nobody = torch.zeros(0, 2, dtype=torch.int32)
    assert build_block_mapping(nobody, 4, 32).block_to_expert.shape == (num_blocks(0, 2, 4, 32),)
    assert build_block_mapping(nobody, 4, 32, min_blocks=3).block_to_expert.shape == (3,)
