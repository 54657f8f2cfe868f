"""Weights and optimizer state of a model over ranks as DTensors, for distributed checkpoints.

`torch.distributed.checkpoint` saves what each rank has of a DTensor and gives each rank what it
needs, whatever the number of ranks then and now. Experts of a rank are its part of [E, ..] along
axis 0; where FSDP2 splits them further among copies of the model, along axis 0 again. Ranks that
split an expert, or shared experts, hold several blocks of the whole: of gate and up one each.

    fully_shard(model, mesh=mesh["replica"])
    state = distributed_state(model, mesh, optimizer)
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)  # into the very same memory
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from neuron_moe.checkpoint.lazy import Indices
from neuron_moe.experts import RoutedExperts
from neuron_moe.sharded.sharding import sharding_of
from neuron_moe.shared_experts import SharedExperts
from nki_kernels.common.formula import num_projections

EXPERT_AXIS, COPY_AXIS = "ep", "replica"


def distributed_state(
    model: nn.Module, mesh: DeviceMesh | None, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Tensor]:
    """Return every tensor of a model and its optimizer under a name; views, nothing is copied.

    Parameters whose state the optimizer has not made yet, for it has not stepped or they had no
    gradient, get it first: a checkpoint holds all of them, and there is something to load into.

    Args:
        model: as this rank holds it; if fully sharded, over the mesh's copies.
        mesh: from `parallel_state.get_device_mesh`, with the axes 'replica' and 'ep'; None for one
            process.
        optimizer: of the model's parameters.

    Raises:
        ValueError: experts with replicas, or held twice in two layouts.
    """
    shapes, sharding = _whole_shapes(model), sharding_of(model)

    def placed(value: Tensor, name: str) -> Tensor:
        if name not in shapes or mesh is None:
            return value
        return _placed(value, shapes[name], sharding(name, tuple(shapes[name])), mesh)

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {
        f"model.{name}": placed(weight.detach(), name)
        for name, weight in model.state_dict(keep_vars=True).items()
    }
    if optimizer is None:
        return state
    _make_state(optimizer)
    for parameter, values in optimizer.state.items():
        name = names[id(parameter)]
        for kind, value in values.items():
            if isinstance(value, Tensor):
                key = f"optimizer.{name}.{kind}"
                state[key] = placed(value, name) if value.shape == parameter.shape else value
    return state


def _whole_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape in the whole model of every parameter that ranks have parts of."""
    found: dict[str, torch.Size] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, RoutedExperts):
            _check(path, module)
            experts, width = module.mlp_op, module.spec.intermediate_size
            first = width * num_projections(experts.formula)
            for name, weight in experts.named_parameters():
                shape = [module.num_physical, *weight.shape[1:]]
                if name.startswith(experts.first_name):
                    shape[-1] = first
                elif name == "down_proj.weight":
                    shape[1] = width
                found[f"{prefix}mlp_op.{name}"] = torch.Size(shape)
        elif isinstance(module, SharedExperts) and module.shard.tp_size > 1:
            for name, weight in module.named_parameters():
                axis = 1 if name.startswith("down") else 0
                shape = [*weight.shape]
                if not name.startswith("shared_expert_gate"):
                    halves = 2 if name.startswith("gate_up") else 1
                    shape[axis] = halves * module.spec.intermediate_size
                    found[prefix + name] = torch.Size(shape)
    return found


def _check(path: str, experts: RoutedExperts) -> None:
    if experts.shards.second is not None:
        raise ValueError(
            f"{path}: holds experts twice, in the layouts of prefill and of decode. Train in one."
        )
    if experts.num_physical != experts.spec.num_experts:
        raise ValueError(
            f"{path}: {experts.num_physical} physical experts are more than the model's"
            f" {experts.spec.num_experts}. Train with each expert once."
        )


def _placed(
    value: Tensor, shape: torch.Size, here: tuple[Indices, ...], mesh: DeviceMesh
) -> Tensor:
    """Return a rank's part of a parameter as such; `here` are its indices on every axis."""
    axes: tuple[str, ...] = (EXPERT_AXIS,)
    local, start = value, 0
    if isinstance(value, DTensor):
        axes, local = (EXPERT_AXIS, COPY_AXIS), value.to_local()
        _, (start, *_) = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
    elif value.shape == shape:
        return value
    stride = torch.empty(shape, device="meta").stride()
    first, *others = here
    as_shard = range(len(first) * mesh[EXPERT_AXIS].get_local_rank(), shape[0])[: len(first)]
    is_rows = first == as_shard and [len(each) for each in others] == [*shape[1:]]
    axes = axes if is_rows else (EXPERT_AXIS,)
    where = mesh[axes[0]] if len(axes) == 1 else _joined(mesh, axes)
    placements: list[Placement] = [Shard(0) for _ in axes]
    part = DTensor.from_local(local, where, placements, run_check=False, shape=shape, stride=stride)
    if not is_rows:
        mine = (first[start : start + len(local)], *others)
        blocks = [*itertools.product(*map(_runs, mine))]
        parts = [local[tuple(slice(at, at + size) for _, at, size in block)] for block in blocks]
        offsets = [tuple(begin for begin, _, _ in block) for block in blocks]
        part._local_tensor = LocalShardsWrapper(parts, offsets)  # from_local takes no such part
    return part


def _runs(indices: Indices) -> Iterator[tuple[int, int, int]]:
    """Yield where each run of neighbours begins in the whole, where among these, and its size."""
    at = 0
    for _, run in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        begin, *more = [index for _, index in run]
        yield begin, at, 1 + len(more)
        at += 1 + len(more)


def _joined(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of two axes in another order than it was built with; experts come first."""
    assert mesh.mesh_dim_names is not None
    order = [mesh.mesh_dim_names.index(axis) for axis in axes]
    others = [axis for axis in range(mesh.mesh.ndim) if axis not in order]
    ranks = mesh.mesh.permute(*order, *others).flatten(2)
    column = int((ranks == torch.distributed.get_rank()).nonzero()[0, 2])
    return DeviceMesh(
        mesh.device_type, ranks[:, :, column], mesh_dim_names=axes, _init_backend=False
    )


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make the state that is missing, at step 0, without moving a weight."""
    every = [each for group in optimizer.param_groups for each in group["params"]]
    missing = [each for each in every if each.requires_grad and each not in optimizer.state]
    if not missing:
        return
    gradients = [each.grad for each in every]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in every:
        parameter.grad = None
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(every, gradients, strict=True):
        parameter.grad = gradient
    for parameter in missing:
        step = optimizer.state[parameter].get("step")
        if isinstance(step, Tensor):
            step.zero_()
