"""Public reports about training MoE layers, tried on ours on 2026-11-28: twenty kinds.

Hurt us, and mended (where it is tested):

| report | what | was |
| --- | --- | --- |
| DeepSpeed#8475, #8613, Automodel#3816, fastmoe#29 | a rank's norm clips (test_training) | silent |
| Megatron#5916 | norms under EP x TP (test_training) | silent |
| Automodel#2088 | no gradient, no resuming (test_distributed_state) | crash |
| TransformerEngine#3116, transformers#48205 | NaN of padding (test_router_losses) | NaN |
| trl#5713 | split experts in a checkpoint (test_distributed_state) | refused; shared ones silent |

Right already, tested elsewhere: pytorch#160285, Automodel#1260, torchtitan#2387 and #2416,
Megatron-Bridge#6009 (test_training); transformers#48687 (test_beside_peers); KempnerForge#115
(test_distributed_state); Automodel#1408 (test_auxiliary_loss); hyper-parallel#752, minimind#290,
transformers#31464 (test_router_losses); DeepSpeed#8358 (test_titan). Right, and tested here: the
tests' names. Found on the way: counters on the meta device, alpha that changes after a first step.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.router_losses import RouterLosses, auxiliary_loss
from neuron_moe.transformers_experts import register_experts
from tests.neuron_moe.test_transformers_experts import qwen

E, K, H, I = 8, 2, 16, 12  # noqa: E741  the axis letters of the project


def build(save_percent: int | None = None, jitter_eps: float = 0.0, **options: Any) -> MoE:
    torch.manual_seed(0)
    config = RoutedExpertsMLPOpsConfig(E, H, I, K, "silu", True, **options)
    router = RouterTopK(E, K, H, jitter_eps=jitter_eps)
    return MoE(router, ExpertMLPsV2(config, save_percent=save_percent)).train()


@pytest.mark.parametrize("save_percent", [None, 0, 50, 100])
def test_tokamax_887_and_pytorch_172439_no_gradient_without_tokens(
    save_percent: int | None,
) -> None:
    layer = build(save_percent)
    with torch.no_grad():
        layer.router.linear_router.weight.zero_()
        layer.router.linear_router.weight[:K] = torch.tensor([[3.0], [2.0]])
    layer(torch.rand(1, 9, H))[0].sum().backward()
    for weight in layer.expert_mlps.mlp_op.parameters():
        assert weight.grad is not None
        assert not bool(weight.grad[K:].any())
        assert bool(weight.grad[:K].any())


def test_transformers_45621_experts_of_other_ranks_give_no_nan() -> None:
    experts: Any = qwen().model.layers[0].mlp.experts  # type: ignore[union-attr, operator]
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.3)
    index_TK = torch.tensor([[0, 4], [4, 4], [1, 2], [4, 1]])  # 4 is none of the four here
    hidden, shares = torch.randn(4, 32, requires_grad=True), torch.rand(4, 2, requires_grad=True)
    ours = ALL_EXPERTS_FUNCTIONS[register_experts("torch")]
    ours(experts, hidden, index_TK, shares).sum().backward()
    assert hidden.grad is not None
    assert shares.grad is not None
    assert bool(torch.isfinite(hidden.grad).all())
    assert not bool(shares.grad[index_TK == 4].any())


def test_adamole_3_no_pass_has_no_auxiliary_loss() -> None:
    layer = build()
    layer.use_router_losses(RouterLosses(balance=1.0))
    assert float(auxiliary_loss(layer)) == 0


def test_megatron_1617_losses_count_choices_before_capacity_drops_them() -> None:
    found = []
    for options in ({}, {"capacity_factor": 0.5}):
        layer = build(**options)
        layer.use_router_losses(RouterLosses(balance=1.0, sequence=1.0))
        layer(torch.randn(2, 20, H, generator=torch.Generator().manual_seed(1)))
        found.append({name: float(loss) for name, loss in layer.losses.items()})
    assert found[0] == found[1]


def test_transformers_33969_jitter_does_not_reach_the_experts() -> None:
    plain, jittered, seen = build(), build(jitter_eps=0.1), []
    for layer in (plain, jittered):
        layer.expert_mlps.check_hidden = seen.append  # type: ignore[method-assign, assignment]
        layer(torch.ones(1, 5, H))
    assert torch.equal(seen[0], seen[1])


@pytest.mark.long
@pytest.mark.parametrize("save_percent", [None, 0, 50, 100])
def test_sonic_moe_60_numbers_of_tokens_share_graphs(save_percent: int | None) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    step = torch.compile(build(save_percent), backend=counter, fullgraph=True)
    for tokens in (5, 9, 17, 33, 64, 100, 200):
        step(torch.randn(1, tokens, H))[0].sum().backward()
    assert counter.frame_count <= 3


@pytest.mark.parametrize("frozen", ["router", "expert_mlps"])
def test_unsloth_6936_and_ms_swift_5512_a_part_can_be_frozen(frozen: str) -> None:
    layer = build(save_percent=0)
    layer.get_submodule(frozen).requires_grad_(False)
    layer(torch.randn(1, 9, H))[0].sum().backward()
    for name, weight in layer.named_parameters():
        assert (weight.grad is None) == name.startswith(frozen)
