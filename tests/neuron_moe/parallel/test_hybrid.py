"""What one rank keeps of the experts for prefill and decode, and which run of it a phase takes."""

import itertools

import pytest

from neuron_moe.parallel.hybrid import PhaseShards
from neuron_moe.parallel.shard import ExpertShard

EXPERTS = 12


@pytest.mark.parametrize(
    ("prefill", "decode"), itertools.product([(1, 1), (1, 2), (1, 4), (2, 2), (4, 1)], repeat=2)
)
def test_a_phase_computes_with_its_own_experts(
    prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    for rank in range(4):
        first, second = (ExpertShard(rank % tp, tp, rank % ep, ep) for tp, ep in (prefill, decode))
        parts = PhaseShards.settle(first, second, EXPERTS)
        assert parts.of("prefill") == first
        assert parts.of("decode") == parts.of("speculation") == second
        for phase, wanted in (("prefill", first), ("decode", second)):
            if parts.second is not None and phase == "decode":
                continue
            run = parts.run_of(phase, EXPERTS)
            stored = list(parts.stored.local_experts(EXPERTS))
            taken = stored if run is None else stored[run]
            assert taken == list(wanted.local_experts(EXPERTS))
            assert run is None or (run.stop <= len(stored) and run != slice(0, len(stored)))


@pytest.mark.parametrize("rank", range(4))
def test_two_copies_are_kept_where_neither_part_is_a_run_of_the_other(rank: int) -> None:
    prefill, decode = ExpertShard(0, 1, rank, 4), ExpertShard(rank, 4, 0, 1)
    assert PhaseShards.settle(prefill, decode, EXPERTS).second == decode
    assert PhaseShards.settle(prefill, prefill, EXPERTS, may_share=False).second is None
    whole = ExpertShard()
    assert PhaseShards.settle(whole, prefill, EXPERTS, may_share=False).second == prefill
    assert PhaseShards.settle(whole, prefill, EXPERTS) == PhaseShards(whole, prefill, whole, None)
    assert PhaseShards.settle(prefill, whole, EXPERTS) == PhaseShards(prefill, whole, whole, None)
