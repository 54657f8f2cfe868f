"""Gradients of what several ranks hold alike: each has a part of them, and all need the sum."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from neuron_moe.moe import MoE
from neuron_moe.parallel.collectives import Collectives


@torch.no_grad()
def sum_shared_gradients(model: nn.Module) -> None:
    """Add up, between backward and the optimizer's step, gradients that ranks have parts of.

    Of a MoE layer these are router, norm and whole shared experts, over the ranks of the layer, and
    biases of the down projection over the ranks that split an expert. Gradients of experts are
    complete already. A model's other modules are whoever's spreads them; so are copies of the whole
    model. Collective over the ranks of each layer.

    Args:
        model: with MoE layers; each rank's loss is its part of a sum, see
            `neuron_moe.parallel.collectives`.

    Raises:
        ValueError: a layer whose experts have replicas, or whose shared experts are split over some
            of its ranks.
    """
    for layer in (module for module in model.modules() if isinstance(module, MoE)):
        _check(layer)
        for group, parameters in _held_alike(layer):
            _sum_over(group, [each for each in parameters if each.requires_grad])


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm over all ranks of the model is at most `max_norm`.

    Between `sum_shared_gradients` and the optimizer's step, instead of
    `torch.nn.utils.clip_grad_norm_`, which takes a rank's experts for all: ranks would scale what
    they hold alike differently, and part. Collective over the ranks of each layer.

    Args:
        model: with MoE layers; other modules are the same on all ranks, or sharded by FSDP2.
        max_norm: of all gradients as one vector.

    Returns:
        [] the norm before.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    split = {id(each): group for layer in layers for group, each in _held_apart(layer)}
    every = tuple(model.parameters())
    wide = functools.reduce(torch.promote_types, {each.dtype for each in every}, torch.float32)
    zero = torch.zeros((), dtype=wide, device=every[0].device)
    given = [each for each in every if each.grad is not None]
    # Each group has its sum, so that ranks without any gradient take part in it.
    groups: tuple[Collectives | None, ...] = (None, *split.values())
    sums = {id(group): (group, [zero]) for group in groups}
    for parameter in given:
        assert parameter.grad is not None
        square = torch.linalg.vector_norm(parameter.grad, dtype=wide).square()
        group = split.get(id(parameter))
        square = square.full_tensor() if isinstance(square, DTensor) else square
        sums[id(group)][1].append(square)
    parts = [(group, sum(squares, zero)) for group, squares in sums.values()]
    whole = [part if group is None else group.all_reduce(part) for group, part in parts]
    norm = sum(whole, zero).sqrt()
    for parameter in given:
        assert parameter.grad is not None
        parameter.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _held_apart(layer: MoE) -> Iterator[tuple[Collectives, nn.Parameter]]:
    """Yield what ranks have parts of, with the group over which the parts are a whole."""
    groups = layer.groups["prefill"]
    alike = {id(each) for _, parameters in _held_alike(layer) for each in parameters}
    for parameter in layer.parameters():
        if id(parameter) not in alike:
            yield groups.model, parameter
    bias_EH = layer.expert_mlps.mlp_op.down_proj.bias
    if bias_EH is not None:
        yield groups.ep, bias_EH


def _held_alike(layer: MoE) -> Iterator[tuple[Collectives, list[nn.Parameter]]]:
    """Yield groups, and what their ranks hold alike."""
    groups = layer.groups["prefill"]
    shared = layer.shared_experts
    alike = [*layer.router.parameters()]
    if layer.rmsnorm is not None:
        alike += layer.rmsnorm.parameters()
    if shared is not None:
        is_whole = shared.group.size == 1
        alike += (
            parameter
            for name, parameter in shared.named_parameters()
            if is_whole or name.startswith("shared_expert_gate")
        )
    yield groups.model, alike
    bias_EH = layer.expert_mlps.mlp_op.down_proj.bias
    if bias_EH is not None:
        yield groups.tp, [bias_EH]


def _sum_over(group: Collectives, parameters: list[nn.Parameter]) -> None:
    """Sum gradients over ranks, those of one dtype in one collective; a missing one is zero."""
    if group.size == 1:
        return
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for same in by_dtype.values():
        gradients = [_gradient(each) for each in same]
        summed = group.all_reduce(torch.cat([each.reshape(-1) for each in gradients]))
        parts = torch.split(summed, [each.numel() for each in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient, made if there is none; of a sharded one this rank's part."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _check(layer: MoE) -> None:
    experts, shared = layer.expert_mlps, layer.shared_experts
    groups = layer.groups["prefill"]
    if experts.num_physical != experts.spec.num_experts:
        raise ValueError(
            f"placement: {experts.num_physical - experts.spec.num_experts} experts are replicas,"
            " whose gradients would part. Train with each expert once, over ranks that divide them;"
            " replicas are for serving."
        )
    if shared is not None and shared.group.size not in (1, groups.model.size):
        raise ValueError(
            f"shared experts split over {shared.group.size} of {groups.model.size} ranks: train"
            " with them whole, or split over all ranks of the layer."
        )
