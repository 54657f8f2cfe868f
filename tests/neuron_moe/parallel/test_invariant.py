"""Counting finds a term that is added to the output more or less than once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import neuron_moe.dispatch.replicate as replicate_module
from neuron_moe import (
    ExpertMLPsV2,
    Experts,
    MoE,
    RoutedExpertsMLPOpsConfig,
    RouterTopK,
    SharedExperts,
)
from neuron_moe.parallel import ExpertShard, parallel_state
from tests.neuron_moe.parallel.one_copy import CopyError, check_one_copy

SIZE = 4


def small_layer() -> MoE:
    config = RoutedExpertsMLPOpsConfig(8, 16, 32, 2, "silu", True, bias=True)
    shared = SharedExperts(16, 32, 1, "silu")
    return MoE(RouterTopK(8, 2, 16), ExpertMLPsV2(config), shared)


def undivided_down_bias() -> Any:
    weights = Experts.weights
    return mock.patch.object(
        Experts, "weights", lambda self: replace(weights(self), down_bias_scale=1.0)
    )


def shared_experts_on_every_copy() -> Any:
    return mock.patch.object(
        replicate_module, "split_evenly", lambda tokens, parts: [slice(0, tokens)] * parts
    )


def overlapping_experts() -> Any:
    def local_experts(self: ExpertShard, num_experts: int) -> range:
        size = num_experts // self.ep_size
        return range(max(0, self.ep_rank * size - 1), (self.ep_rank + 1) * size)

    return mock.patch.object(ExpertShard, "local_experts", local_experts)


def missing_reduction() -> Any:
    return mock.patch.object(replicate_module, "sum_common", lambda group, partial: partial)


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "down bias not divided by tp": (undivided_down_bias, "down bias: token"),
    "shared experts added by every copy": (shared_experts_on_every_copy, "shared experts: token"),
    "an expert on two ranks": (overlapping_experts, "routed experts: token"),
    "no reduction": (missing_reduction, "routed experts: token"),
}


def error_under(fault: Callable[[], Any] | None) -> str:
    torch.manual_seed(3)
    parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2, watch=False)
    layer = small_layer()
    hidden = torch.randn(2, 5, 16)
    try:
        if fault is None:
            check_one_copy(layer, hidden)
        else:
            with fault():
                check_one_copy(layer, hidden)
    except CopyError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()
    return ""


def test_a_sound_layer_counts_one_copy_and_planted_faults_do_not(run_ranks: Any) -> None:
    faults = [None, *(fault for fault, _ in FAULTS.values())]
    results = run_ranks(SIZE, lambda rank: [error_under(fault) for fault in faults])
    sound, *faulty = zip(*results, strict=True)
    assert sound == ("",) * SIZE
    for (name, (_, wanted)), messages in zip(FAULTS.items(), faulty, strict=True):
        found = [message for message in messages if message]
        assert found, name
        assert any(wanted in message for message in found), (name, found)
