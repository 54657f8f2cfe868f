"""Layers put together from router, handler and grouped experts, against `MoE`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.collectives import as_collectives
from neuron_moe.parallel.handlers import (
    AllToAllHandler,
    CommunicationHandler,
    GroupedLinear,
    GroupedSwiGLU,
    HandledMoE,
    LocalHandler,
    SentRows,
)

E, K, H, I = 6, 2, 8, 5  # noqa: E741  the axis letters of the project


class Exchange(torch.autograd.Function):
    """Equal parts from every rank to every rank; gradients go back the same way."""

    @staticmethod
    def forward(_: Any, sent: Tensor) -> Tensor:
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent.contiguous())
        return arrived

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return Exchange.forward(None, gradient.contiguous())


class SlotHandler:
    """A transport of another kind: messages of a fixed size with slots for each expert's rows.

    So works DeepEP's mode for little latency: nobody has to know how many rows will come.
    """

    def __init__(self, ranks: int, slots: int) -> None:
        self.ranks, self.slots = ranks, slots

    def dispatch(self, hidden_TH: Tensor, index_TK: Tensor, affinities_TK: Tensor) -> SentRows:
        self.top_k = index_TK.shape[1]
        index_P = index_TK.flatten().long()
        before_PE = functional.one_hot(index_P, E).cumsum(0)
        self.slot_P = index_P * self.slots + before_PE.gather(1, index_P[:, None])[:, 0] - 1
        rows_PX = torch.cat(
            [hidden_TH.repeat_interleave(self.top_k, 0), affinities_TK.reshape(-1, 1)], 1
        )
        empty_NX = rows_PX.new_zeros(E * self.slots, H + 1)
        arrived_NX = Exchange.apply(empty_NX.index_copy(0, self.slot_P, rows_PX))
        counts_We = Exchange.apply(before_PE[-1]).view(self.ranks, -1)
        self.is_used_eWS = torch.arange(self.slots) < counts_We.t()[:, :, None]
        by_expert = arrived_NX.view(self.ranks, -1, self.slots, H + 1).transpose(0, 1)
        rows_RX = by_expert[self.is_used_eWS]
        return SentRows(rows_RX[:, :H], rows_RX[:, H], counts_We.sum(0))

    def combine(self, rows_RH: Tensor) -> Tensor:
        home_eWSH = rows_RH.new_zeros(*self.is_used_eWS.shape, H)
        home_eWSH[self.is_used_eWS] = rows_RH
        returned_NH = Exchange.apply(home_eWSH.transpose(0, 1).reshape(-1, H))
        return returned_NH[self.slot_P].view(-1, self.top_k, H).sum(1)


def build_moe() -> MoE:
    torch.manual_seed(0)
    config = RoutedExpertsMLPOpsConfig(
        num_experts=E, top_k=K, hidden_size=H, intermediate_size=I, hidden_act="silu", glu_mlp=True
    )
    return MoE(RouterTopK(E, K, H, renormalize=True), ExpertMLPsV2(config)).double()


def build_handled(moe: MoE, handler: CommunicationHandler, experts: slice) -> HandledMoE:
    """Return the same layer with some of the experts."""
    weights = moe.expert_mlps.weights().run(experts)
    grouped = GroupedSwiGLU(H, I, weights.num_experts).double()
    gate, up = weights.gate_up_proj_EHI.detach().chunk(2, dim=2)
    with torch.no_grad():
        for linear, weight in (
            (grouped.gate_proj, gate),
            (grouped.up_proj, up),
            (grouped.down_proj, weights.down_proj_EIH),
        ):
            linear.weight.copy_(weight)
    return HandledMoE(moe.router, grouped, handler)


def run(layer: torch.nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of the input."""
    hidden = hidden.clone().requires_grad_()
    output = layer(hidden)
    output = output if isinstance(output, Tensor) else output[0]
    (gradient,) = torch.autograd.grad(output.square().sum(), hidden)
    return output.detach(), gradient


def inputs() -> Tensor:
    return torch.randn(3, 4, H, generator=torch.Generator().manual_seed(1)).double()


def test_a_local_handler_makes_the_same_layer_and_counts() -> None:
    moe = build_moe()
    layer = build_handled(moe, LocalHandler(E), slice(0, E))
    for mine, theirs in zip(run(layer, inputs()), run(moe, inputs()), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert int(layer.tokens_per_expert_E.sum()) == 3 * 4 * K
    layer.reset_stats()
    assert not layer.tokens_per_expert_E.any()


def test_rows_travel_between_ranks_and_gradients_come_back(run_ranks: Any) -> None:
    def errors(rank: int) -> list[float]:
        moe, hidden = build_moe(), inputs()
        mine = hidden.tensor_split(2, dim=1)[rank]
        wanted = [each.tensor_split(2, dim=1)[rank] for each in run(moe, hidden)]
        parallel_state.initialize_model_parallel(1, expert_model_parallel_size=2, watch=False)
        group = as_collectives(parallel_state.get_world_group(), "world")
        here, slots = slice(rank * E // 2, (rank + 1) * E // 2), mine.shape[0] * mine.shape[1]
        handlers = (AllToAllHandler(E, group), SlotHandler(2, slots))
        found = [
            each for handler in handlers for each in run(build_handled(moe, handler, here), mine)
        ]
        return [float((a - b).abs().max()) for a, b in zip(found, 2 * wanted, strict=True)]

    assert all(max(each) < 1e-12 for each in run_ranks(2, errors))


def test_groups_are_multiplied_each_with_its_matrix() -> None:
    linear = GroupedLinear(3, 4, 2)
    rows = torch.randn(5, 4)
    output = linear(rows, [2, 0, 3])
    torch.testing.assert_close(
        output, torch.cat([rows[:2] @ linear.weight[0], rows[2:] @ linear.weight[2]])
    )
    assert linear(rows[:0], torch.zeros(3, dtype=torch.int64)).shape == (0, 2)
    assert float(linear.weight.detach().abs().max()) <= 0.5


@pytest.mark.parametrize("counts", [[5], [1, 1, 1], [6, 0, -1]])
def test_counts_that_do_not_fit_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="counts"):
        GroupedLinear(3, 4, 2)(torch.randn(5, 4), counts)
