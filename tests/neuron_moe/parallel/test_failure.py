"""A rank that dies, hangs or was started differently ends the others, by name and in time."""

import os
import signal
from typing import Any
from unittest import mock

import pytest
import torch

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.parallel import CollectiveError, parallel_state
from neuron_moe.parallel.failure import compare_settings

SIZE = 8


def small_layer(
    *,
    top_k: int = 2,
    hidden: int = 16,
    strategy: str = "replicate",
    reduce_dtype: torch.dtype | None = None,
    compat: str | None = None,
    **changes: Any,
) -> MoE:
    config = RoutedExpertsMLPOpsConfig(8, hidden, 32, top_k, "silu", True, **changes)
    torch.manual_seed(0)
    experts = ExpertMLPsV2(config, strategy=strategy, compat=compat)
    return MoE(RouterTopK(8, top_k, hidden), experts, reduce_dtype=reduce_dtype)


def run_until_it_breaks(
    rank: int, victim: int, victim_signal: int, timeout_s: float, strategy: str = "replicate"
) -> tuple[int, str, tuple[int, ...], str] | None:
    """Forward until a rank breaks in the middle of one; return how this rank ended."""
    parallel_state.initialize_model_parallel(2, expert_model_parallel_size=4, timeout_s=timeout_s)
    layer = small_layer(strategy=strategy)
    compute, calls = ExpertMLPsV2.compute, list[int]()

    def breaking(self: ExpertMLPsV2, *args: Any) -> torch.Tensor:
        calls.append(rank)
        if rank == victim and len(calls) == 3:
            os.kill(os.getpid(), victim_signal)
        return compute(self, *args)

    try:
        with mock.patch.object(ExpertMLPsV2, "compute", breaking), torch.no_grad():
            for _ in range(20):
                layer(torch.randn(1, 6, 16))
    except CollectiveError as error:
        return error.rank, error.collective, error.suspects, str(error)
    return None


def check_the_survivors(
    results: list[Any], victim: int, failed: tuple[str, ...] = ("all_reduce",)
) -> None:
    for rank, (kind, value) in enumerate(results):
        if rank == victim:
            continue
        assert kind == "ok", value
        assert value is not None, f"rank {rank} finished"
        here, collective, suspects, message = value
        assert (here, suspects) == (rank, (victim,)), message
        assert collective in failed, message
        # Rank 0 hosts the store through which ranks watch one another.
        signs = ("no sign of life", "its rendezvous store is gone")
        assert any(f"rank {victim}: {sign}" in message for sign in signs), message
        where = "'model' (ranks 0-7) failed" if collective == "all_reduce" else ""
        assert f"{collective} over group {where}" in message


@pytest.mark.long
@pytest.mark.parametrize("victim", [5, 0])
def test_killing_one_of_8_ranks_in_a_forward_ends_the_rest(run_ranks: Any, victim: int) -> None:
    results = run_ranks(
        SIZE, lambda rank: run_until_it_breaks(rank, victim, signal.SIGKILL, 20.0), raw=True
    )
    assert results[victim] == ("error", "process ended without an answer")
    check_the_survivors(results, victim)


@pytest.mark.long
def test_a_rank_that_hangs_ends_the_rest_after_the_time_out(run_ranks: Any) -> None:
    victim = 7
    results = run_ranks(
        SIZE,
        lambda rank: run_until_it_breaks(rank, victim, signal.SIGSTOP, 5.0),
        raw=True,
        timeout_s=14.0,
    )
    check_the_survivors(results, victim)


@pytest.mark.long
def test_a_rank_0_that_hangs_is_named_although_it_hosts_the_store(run_ranks: Any) -> None:
    results = run_ranks(
        SIZE,
        lambda rank: run_until_it_breaks(rank, 0, signal.SIGSTOP, 5.0),
        raw=True,
        timeout_s=14.0,
    )
    check_the_survivors(results, 0)


@pytest.mark.long
@pytest.mark.parametrize("victim", [2, 0])
def test_a_rank_that_dies_in_an_all_to_all_is_named(run_ranks: Any, victim: int) -> None:
    def run(rank: int) -> Any:
        return run_until_it_breaks(rank, victim, signal.SIGKILL, 20.0, "all_to_all")

    check_the_survivors(run_ranks(8, run, raw=True), victim, ("reduce_scatter", "all_to_all"))


def failure_of(function: Any) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()
    return "no error"


def mismatches(rank: int) -> list[str]:
    odd = rank == 1

    def other_sizes() -> None:
        sizes = (1, 4) if odd else (2, 2)
        parallel_state.initialize_model_parallel(sizes[0], expert_model_parallel_size=sizes[1])

    def too_few_ranks() -> None:
        parallel_state.initialize_model_parallel(4, expert_model_parallel_size=16)

    def other_layer(**settings: Any) -> Any:
        def build() -> None:
            parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2, watch=False)
            layer = small_layer(**(settings if odd else {}))
            layer(torch.randn(1, 4, 16))

        return build

    def other_tokens() -> None:
        parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2, watch=False)
        small_layer()(torch.randn(1, 5 if odd else 4, 16))

    def other_mask(own: torch.Tensor | None) -> Any:
        def build() -> None:
            parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2, watch=False)
            layer, mask = small_layer(), torch.tensor([[1, 1, 1, 0]])
            layer(torch.randn(1, 4, 16), mask)
            layer(torch.randn(1, 4, 16), own if odd else mask)

        return build

    def other_router_weights() -> None:
        parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2, watch=False)
        layer = small_layer()
        if odd:
            layer.router.linear_router.weight.data.neg_()
        layer(torch.randn(1, 4, 16))

    def other_tokens_later() -> None:
        parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2, watch=False)
        layer = small_layer()
        layer(torch.randn(1, 4, 16))
        layer(torch.randn(1, 5 if odd else 4, 16))

    cases = [
        other_sizes,
        too_few_ranks,
        other_layer(top_k=3),
        other_layer(strategy="all_to_all"),
        other_tokens,
        other_layer(normalize_top_k_affinities=True),
        other_layer(early_expert_affinity_modulation=True),
        other_layer(reduce_dtype=torch.bfloat16),
        other_layer(compat="nxd"),
        other_mask(None),
        other_mask(torch.tensor([[1, 1, 0, 0]])),
        other_mask(torch.tensor([[0, 1, 1, 1]])),
        other_tokens_later,
        other_router_weights,
    ]
    with torch.no_grad():
        return [failure_of(case) for case in cases]


def test_ranks_started_with_other_settings_are_found_before_any_work(run_ranks: Any) -> None:
    results = run_ranks(4, mismatches)
    wanted = [
        "expert_model_parallel_size is 4 on rank 1 and 2 on the others",
        "need 64 ranks, the product, but the world has 4",
        "router is RouterSpec",
        "strategy is 'all_to_all' on rank 1 and 'replicate' on the others",
        "tokens is 5 on rank 1 and 4 on the others",
        "normalizes_affinities is True on rank 1 and False on the others",
        "scales_input is True on rank 1 and False on the others",
        "reduce_dtype is torch.bfloat16 on rank 1 and None on the others",
        "compat is 'nxd' on rank 1 and None on the others",
        "padding_mask is missing on rank 1 and of 3 real tokens",
        "padding_mask is of 2 real tokens",
        "on rank 1 and of 3 real tokens",
        "tokens is 5 on rank 1 and 4 on the others. These ranks hold the same tokens",
        "weights of the router is 'crc32 ",
    ]
    for messages in results:
        for part, message in zip(wanted, messages, strict=True):
            assert part in message, message


def test_one_process_cannot_be_64_ranks() -> None:
    with pytest.raises(ValueError, match="need 64 ranks, but this process is alone"):
        parallel_state.initialize_model_parallel(4, expert_model_parallel_size=16)
    assert not parallel_state.model_parallel_is_initialized()


def test_the_odd_ranks_out_are_named() -> None:
    everyone = [{"dtype": "bf16"}, {"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "fp8"}]
    with pytest.raises(ValueError, match=r"dtype is fp32 on rank 5, 7 and bf16 on the others"):
        compare_settings("MoE layer", [4, 5, 6, 7], everyone)
