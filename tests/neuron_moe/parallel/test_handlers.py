"""Layers put together from router, handler and grouped experts, against `MoE`."""

from typing import Any

import pytest
import torch
from torch import Tensor

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
)

E, K, H, I = 6, 2, 8, 5  # noqa: E741  the axis letters of the project


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
        here = slice(rank * E // 2, (rank + 1) * E // 2)
        layer = build_handled(moe, AllToAllHandler(E, group), here)
        found = run(layer, mine)
        return [float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)]

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
