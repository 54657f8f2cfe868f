"""A rank that dies, hangs or was started differently ends the others, by name and in time."""

import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple
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
@pytest.mark.parametrize(
    ("strategy", "victim", "failed"),
    [
        ("replicate", 5, ("all_reduce",)),
        ("replicate", 0, ("all_reduce",)),
        ("all_to_all", 2, ("reduce_scatter", "all_to_all")),
        ("all_to_all", 0, ("reduce_scatter", "all_to_all")),
    ],
)
def test_killing_one_of_8_ranks_in_a_forward_ends_the_rest(
    run_ranks: Any, strategy: str, victim: int, failed: tuple[str, ...]
) -> None:
    def run(rank: int) -> Any:
        return run_until_it_breaks(rank, victim, signal.SIGKILL, 20.0, strategy)

    results = run_ranks(SIZE, run, raw=True)
    assert results[victim] == ("error", "process ended without an answer")
    check_the_survivors(results, victim, failed)


@pytest.mark.long
@pytest.mark.parametrize("victim", [7, 0])  # rank 0 hosts the store
def test_a_rank_that_hangs_ends_the_rest_after_the_time_out(run_ranks: Any, victim: int) -> None:
    def run(rank: int) -> Any:
        return run_until_it_breaks(rank, victim, signal.SIGSTOP, 5.0)

    check_the_survivors(run_ranks(SIZE, run, raw=True, timeout_s=14.0), victim)


MASK = torch.tensor([[1, 1, 1, 0]])


class Odd(NamedTuple):
    """What rank 1 has of its own, in one forward or in the second of two, and what is said of it.

    The others have a layer of defaults, 4 tokens, and MASK where rank 1's second mask is given.
    """

    message: str
    layer: Mapping[str, Any] = MappingProxyType({})
    tokens: tuple[int, ...] = (4,)
    masks: tuple[torch.Tensor | None, ...] = ()
    negates_router: bool = False

    def forward(self, is_odd: bool) -> None:
        parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2, watch=False)
        layer = small_layer(**(self.layer if is_odd else {}))
        if is_odd and self.negates_router:
            layer.router.linear_router.weight.data.neg_()
        for tokens in self.tokens if not self.masks else ():
            layer(torch.randn(1, tokens if is_odd else 4, 16))
        for mask in self.masks:
            layer(torch.randn(1, 4, 16), mask if is_odd else MASK)


ODD = [
    Odd("router is RouterSpec", layer={"top_k": 3}),
    Odd(
        "strategy is 'all_to_all' on rank 1 and 'replicate' on the others",
        layer={"strategy": "all_to_all"},
    ),
    Odd(
        "normalizes_affinities is True on rank 1 and False on the others",
        layer={"normalize_top_k_affinities": True},
    ),
    Odd(
        "scales_input is True on rank 1 and False on the others",
        layer={"early_expert_affinity_modulation": True},
    ),
    Odd(
        "reduce_dtype is torch.bfloat16 on rank 1 and None on the others",
        layer={"reduce_dtype": torch.bfloat16},
    ),
    Odd("compat is 'nxd' on rank 1 and None on the others", layer={"compat": "nxd"}),
    Odd("tokens is 5 on rank 1 and 4 on the others. These ranks hold the same", tokens=(5,)),
    Odd("tokens is 5 on rank 1 and 4 on the others. These ranks hold the same", tokens=(4, 5)),
    Odd("padding_mask is missing on rank 1 and of 3 real tokens", masks=(MASK, None)),
    Odd("padding_mask is of 2 real tokens", masks=(MASK, torch.tensor([[1, 1, 0, 0]]))),
    Odd("on rank 1 and of 3 real tokens", masks=(MASK, torch.tensor([[0, 1, 1, 1]]))),
    Odd("weights of the router is 'crc32 ", negates_router=True),
]


def failure_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()
    return "no error"


def test_ranks_started_with_other_settings_are_found_before_any_work(run_ranks: Any) -> None:
    def start(tp: int, ep: int) -> None:
        parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep)

    def run(rank: int) -> list[str]:
        starts = (partial(start, *((1, 4) if rank == 1 else (2, 2))), partial(start, 4, 16))
        with torch.no_grad():
            return [failure_of(each) for each in starts] + [
                failure_of(partial(odd.forward, rank == 1)) for odd in ODD
            ]

    wanted = [
        "expert_model_parallel_size is 4 on rank 1 and 2 on the others",
        "need 64 ranks, the product, but the world has 4",
        *(odd.message for odd in ODD),
    ]
    for messages in run_ranks(4, run):
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
