"""The candidate that is best by estimate against all of them simulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import nki_sim
from neuron_moe.blocks import build_block_mapping, num_blocks
from nki_kernels.common.formula import ExpertFormula
from nki_kernels.prefill import (
    Candidate,
    Expected,
    ExpertSizes,
    PrefillWork,
    Search,
    best_candidate,
    blockwise_moe,
    make_config,
    rank_candidates,
    work_tiles_of,
)
from nki_kernels.prefill.candidates import expect_tokens, most_blocks
from nki_sim import SimOptions, TensorSpec

OPTIONS = SimOptions(mode="indices", uninitialized="off", races="off", capacity="reorder")
CLOSE = 1.08  # of the fastest plan's simulated time, for launches of a few work tiles
WORTH_SIMULATING = 1.35  # by estimate, against the best

SHAPES = {  # hidden, intermediate, experts, tokens, choices
    "gpt-oss-64-ranks": (2880, 45, 16, 64, 4),
    "qwen3-30b-8-ranks": (2048, 96, 8, 256, 4),
    "one-token": (2880, 360, 4, 1, 1),
    "two-experts": (2880, 180, 2, 400, 1),
    "short-rows": (512, 512, 8, 300, 2),
    "mixtral-32-ranks": (4096, 448, 4, 256, 2),
}
LONG = ("one-token", "two-experts", "mixtral-32-ranks")


def typical_routing(T: int, E: int, K: int) -> Any:
    """Return [T, K] experts: of five random routings the one in the middle by how even it is."""
    drawn = [
        np.argsort(np.random.default_rng(seed).random((T, E)), axis=1)[:, :K].astype(np.int32)
        for seed in range(5)
    ]
    return sorted(drawn, key=lambda index: np.bincount(index.reshape(-1), minlength=E).std())[2]


def simulate(shape: tuple[int, ...], candidate: Candidate) -> float:
    """Return the simulated time of a candidate with a uniform routing."""
    H, I, E, T, K = shape  # noqa: E741  the axis letter
    index = typical_routing(T, E, K)
    mapping = build_block_mapping(torch.from_numpy(index), E, candidate.block_size)
    slots = mapping.token_position_to_id.numpy()
    work = PrefillWork(candidate.block_size, len(slots), T)
    config = make_config(ExpertFormula(), ExpertSizes(H, I, E), work, candidate.request)
    run = nki_sim.run(
        blockwise_moe,
        TensorSpec((T, H), "bfloat16"),
        TensorSpec((E, H, 2 * I), "bfloat16"),
        TensorSpec((E, I, H), "bfloat16"),
        slots,
        *work_tiles_of(config, slots, mapping.block_to_expert.numpy()),
        config,
        lnc=2,
        options=OPTIONS,
    )
    return float(run.timeline.total_us)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in SHAPES]
)
def test_the_best_candidate_is_about_the_fastest(name: str) -> None:
    H, I, E, T, K = shape = SHAPES[name]  # noqa: E741  the axis letter
    ranked = rank_candidates(ExpertFormula(), ExpertSizes(H, I, E), Expected(num_tokens=T, top_k=K))
    # Work tiles of four and five differ where experts have more tiles than these.
    plans: dict[tuple[str, int], Candidate] = {}
    for candidate in ranked:
        plans.setdefault((candidate.request.shard_plan, candidate.block_size), candidate)
    most_us = WORTH_SIMULATING * ranked[0].estimated_us
    times = [
        simulate(shape, candidate)
        for candidate in plans.values()
        if candidate.estimated_us <= most_us
    ]
    assert len(times) > 1
    assert times[0] <= CLOSE * min(times)
    assert len({candidate.request.shard_plan for candidate in ranked}) >= 2


def test_work_tiles_are_no_larger_than_asked() -> None:
    def largest(most: int) -> int:
        ranked = rank_candidates(
            ExpertFormula(),
            ExpertSizes(2048, 512, 8),
            Expected(num_tokens=8 * 128 * 5 - 400, top_k=1, routing=(1.0,) * 8),
            search=Search(block_sizes=(128,), largest_work_tile=most),
        )
        return max(each.request.largest_work_tile for each in ranked)

    assert largest(2) == 2
    assert 2 < largest(5) <= 5


def test_choices_of_other_ranks_make_the_sum_longer_and_no_work_tiles() -> None:
    sizes, one_of_eight = ExpertSizes(512, 128, 4), Expected(num_tokens=2048, top_k=8, share=0.125)
    assert one_of_eight.num_pairs == 2048
    alone, among_others = (
        best_candidate(ExpertFormula(), sizes, expected)
        for expected in (Expected(num_tokens=2048, top_k=1), one_of_eight)
    )
    assert among_others.request.fit == alone.request.fit
    assert among_others.estimated_us > 1.2 * alone.estimated_us


def test_experts_alike_do_not_get_tokens_alike() -> None:
    tokens_E = expect_tokens(8192, 32, "uniform")
    assert np.ceil(tokens_E / 128).mean() > 2.2  # half of the experts has more than 256


def test_a_hot_expert_gets_all_tokens() -> None:
    assert expect_tokens(100, 4, (0, 1, 0, 0)).tolist() == [0, 100, 0, 0]


@pytest.mark.parametrize(("T", "K", "E", "B"), [(1, 1, 4, 32), (300, 4, 16, 128), (64, 8, 4, 64)])
def test_room_is_that_of_the_block_mapping(T: int, K: int, E: int, B: int) -> None:
    assert most_blocks(T, K, E, B) == num_blocks(T, K, E, B)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        ("zipf", r"routing='zipf': must be 'uniform', or 4 numbers"),
        ((1.0, 2.0), r"routing \[2\]: must be 4 numbers"),
        ((0.0,) * 4, r"routing \[4\]: must be 4 numbers"),
    ],
)
def test_routings_that_say_nothing_are_refused(routing: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        best_candidate(
            ExpertFormula(),
            ExpertSizes(512, 128, 4),
            Expected(num_tokens=64, top_k=1, routing=routing),
        )
