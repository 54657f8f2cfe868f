"""Auxiliary losses weigh as the loss does: divided, scaled and computed again with it."""

import copy

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.router_losses import RouterLosses, auxiliary_loss

E, K, H = 8, 2, 16
Z = 0.7  # weight of the z-loss: a mean over tokens, of which equal parts have equal shares


def build() -> MoE:
    torch.manual_seed(0)
    config = RoutedExpertsMLPOpsConfig(E, H, 12, K, "silu", True)
    layer = MoE(RouterTopK(E, K, H), ExpertMLPsV2(config)).double().train()
    layer.use_router_losses(RouterLosses(z=Z))
    return layer


def hidden() -> Tensor:
    return torch.randn(8, 6, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def written_out(layer: MoE) -> Tensor:
    """Return the gradient of the router from the loss of all tokens, formula by formula."""
    layer.use_router_losses(None)
    weight, x = layer.router.linear_router.weight, hidden()
    z = torch.logsumexp(x.reshape(-1, H) @ weight.T, -1).square().mean()
    (gradient,) = torch.autograd.grad(layer(x)[0].square().mean() + Z * z, weight)
    return gradient


@pytest.mark.parametrize("parts", [1, 4])
def test_a_layer_that_is_computed_again_gives_parts_the_gradient_of_all(parts: int) -> None:
    """Losses that are taken within what is computed again are in test_training_matrix.py."""
    wanted = written_out(build())
    layer = build()
    for part in hidden().chunk(parts):
        output = checkpoint(layer, part, use_reentrant=False)[0]
        ((output.square().mean() + auxiliary_loss(layer)) / parts).backward()
    gradient = layer.router.linear_router.weight.grad
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=0)
    assert float(auxiliary_loss(layer)) == 0  # each is added once


def test_every_pass_of_every_layer_is_added() -> None:
    layers = torch.nn.ModuleList([build(), build()])
    x = hidden()
    for layer in (layers[0], layers[0], layers[1]):
        layer(x)
    values = [float(layer.losses["z"]) for layer in (layers[0], layers[0], layers[1])]
    assert float(auxiliary_loss(layers).detach()) == pytest.approx(sum(values), rel=1e-12)
    assert values[0] > 0


def test_a_backward_pass_tells_of_losses_that_were_not_added() -> None:
    layer = build()
    with pytest.warns(UserWarning, match=r"loss \+ auxiliary_loss\(model\)"):
        layer(hidden())[0].sum().backward()
    assert float(auxiliary_loss(layer)) == 0  # nor does a later loss get them
    layer.use_router_losses(None)
    layer(hidden())[0].sum().backward()


def test_losses_without_the_gradient_that_is_wanted_are_refused() -> None:
    layer = build()
    part = hidden().requires_grad_()
    checkpoint(layer, part, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        auxiliary_loss(layer)
    with torch.no_grad():  # as a validation that nobody meant to train on
        layer(part)
    output = layer(part)[0]
    (output.sum() + auxiliary_loss(layer)).backward()


def test_a_frozen_router_has_losses_without_gradients() -> None:
    layer = build()
    layer.router.requires_grad_(False)
    output = layer(hidden())[0]
    loss = auxiliary_loss(layer)
    assert float(loss.detach()) == pytest.approx(float(layer.losses["z"]))
    (output.sum() + loss).backward()


def test_a_copy_owes_nothing() -> None:
    layer = build()
    layer(hidden())
    assert float(auxiliary_loss(copy.deepcopy(layer))) == 0
    assert float(auxiliary_loss(layer).detach()) > 0
