"""Ranks of this machine: the same work on each, and what happens when one fails."""

import os
import signal

import pytest
import torch

from neuron_moe.parallel import parallel_state
from neuron_moe.tools.ranks import run_on_ranks


def test_every_rank_takes_part_and_rank_0_answers() -> None:
    def work() -> tuple[int, ...]:
        groups = parallel_state.get_groups()
        assert groups is not None
        assert (groups.tensor.size, groups.expert.size) == (1, 3)
        return tuple(groups.model.all_gather(torch.tensor([groups.rank])).tolist())

    assert run_on_ranks(1, 3, work) == (0, 1, 2)
    assert not parallel_state.model_parallel_is_initialized()


def test_a_rank_that_the_system_kills_is_named_with_the_signal() -> None:
    def work() -> None:
        groups = parallel_state.get_groups()
        assert groups is not None
        if groups.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        groups.model.all_gather(torch.zeros(1))

    with pytest.raises(RuntimeError, match=r"rank 2 of 3: ended by SIGKILL\. Perhaps the memory"):
        run_on_ranks(1, 3, work)


def test_the_first_cause_is_told_not_what_others_saw_of_it() -> None:
    def work() -> None:
        groups = parallel_state.get_groups()
        assert groups is not None
        if groups.rank == 2:
            raise ValueError("no luck")
        groups.model.all_gather(torch.zeros(1))

    with pytest.raises(RuntimeError, match=r"rank 2 of 3: ValueError: no luck"):
        run_on_ranks(1, 3, work)
    assert not parallel_state.model_parallel_is_initialized()


def test_one_rank_needs_no_processes() -> None:
    assert run_on_ranks(1, 1, parallel_state.get_groups) is None
