"""Auxiliary losses weigh as the loss does: divided, scaled and computed again with it."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.router_losses import RouterLosses, auxiliary_loss

E, K, H = 8, 2, 16
Z = 0.7  # weight of the z-loss: a mean over tokens, of which equal parts have equal shares
Run = Callable[[MoE, Tensor], tuple[Tensor, Tensor]]


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


def plain(layer: MoE, part: Tensor) -> tuple[Tensor, Tensor]:
    output = layer(part)[0]
    return output, auxiliary_loss(layer)


def recomputed(layer: MoE, part: Tensor) -> tuple[Tensor, Tensor]:
    output = checkpoint(layer, part, use_reentrant=False)[0]
    return output, auxiliary_loss(layer)


def within(is_reentrant: bool) -> Run:
    def run(layer: MoE, part: Tensor) -> tuple[Tensor, Tensor]:
        part.requires_grad_()
        found: tuple[Tensor, Tensor] = checkpoint(plain, layer, part, use_reentrant=is_reentrant)
        return found

    return run


def compiled(layer: MoE, part: Tensor) -> tuple[Tensor, Tensor]:
    step = torch.compile(layer, backend="aot_eager", fullgraph=True)
    output = checkpoint(step, part, use_reentrant=False)[0]
    return output, auxiliary_loss(layer)


@pytest.mark.parametrize("scale", [None, 2.0**12], ids=["plain", "scaled"])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(plain, id="plain"),
        pytest.param(recomputed, id="recomputed"),
        pytest.param(within(False), id="taken-within"),
        pytest.param(within(True), id="reentrant"),
        pytest.param(compiled, id="compiled", marks=pytest.mark.long),
    ],
)
def test_parts_of_a_batch_give_the_gradient_of_all(
    run: Run, parts: int, scale: float | None
) -> None:
    wanted = written_out(build())
    layer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for part in hidden().chunk(parts):
        output, auxiliary = run(layer, part)
        loss = (output.square().mean() + auxiliary) / parts
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
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
