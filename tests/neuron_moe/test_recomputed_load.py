"""Activation checkpointing runs a layer twice; each token counts once."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK

E, K, H, T = 8, 2, 32, 100


@pytest.mark.parametrize("is_reentrant", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_token_counts_once(is_reentrant: bool, layers: int) -> None:
    torch.manual_seed(0)
    config = RoutedExpertsMLPOpsConfig(E, H, 16, K, "silu", True)
    stack = [MoE(RouterTopK(E, K, H), ExpertMLPsV2(config)).train() for _ in range(layers)]
    for layer in stack:
        layer.enable_load_counters()
    hidden = torch.randn(1, T, H, requires_grad=True)
    plain = hidden
    for layer in stack:
        plain = layer(plain)[0]
    loads = [layer.expert_load.clone() for layer in stack if layer.expert_load is not None]
    for layer in stack:
        layer.enable_load_counters()  # from nothing
    found = hidden
    for layer in stack:
        found = checkpoint(layer, found, use_reentrant=is_reentrant)[0]
    found.sum().backward()
    for layer, load in zip(stack, loads, strict=True):
        assert layer.expert_load is not None
        assert layer.expert_load.equal(load)
        assert int(load.sum()) == T * K


def test_a_layer_built_without_memory_counts_from_zero() -> None:
    config = RoutedExpertsMLPOpsConfig(E, H, 16, K, "silu", True)
    with torch.device("meta"):
        layer = MoE(RouterTopK(E, K, H), ExpertMLPsV2(config))
        layer.enable_load_counters()
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    layer(torch.randn(1, T, H))
    assert layer.expert_load is not None
    assert int(layer.expert_load.sum()) == T * K
