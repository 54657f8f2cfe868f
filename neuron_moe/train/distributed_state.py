"""Weights and optimizer state of a model over ranks as DTensors, for distributed checkpoints.

`torch.distributed.checkpoint` saves what each rank has of a DTensor and gives each rank what it
needs, whatever the number of ranks then and now. Experts of a rank are its part of [E, ..] along
axis 0; where FSDP2 splits them further among copies of the model, along axis 0 again.

    fully_shard(model, mesh=mesh["replica"])
    state = distributed_state(model, mesh, optimizer)
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)  # into the very same memory
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from neuron_moe.experts import RoutedExperts

EXPERT_AXIS, COPY_AXIS = "ep", "replica"


def distributed_state(
    model: nn.Module, mesh: DeviceMesh | None, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Tensor]:
    """Return every tensor of a model and its optimizer under a name; views, nothing is copied.

    An optimizer that has not stepped yet gets its state first, so that there is something to load
    into.

    Args:
        model: as this rank holds it; if fully sharded, over the mesh's copies.
        mesh: from `parallel_state.get_device_mesh`, with the axes 'replica' and 'ep'; None for one
            process.
        optimizer: of the model's parameters.

    Raises:
        ValueError: experts split along their intermediate axis, or experts with replicas.
    """
    rows = _expert_rows(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {
        f"model.{name}": _placed(weight.detach(), rows.get(name), mesh)
        for name, weight in model.state_dict(keep_vars=True).items()
    }
    if optimizer is None:
        return state
    if not optimizer.state:
        _make_state(optimizer)
    for parameter, values in optimizer.state.items():
        name = names[id(parameter)]
        for kind, value in values.items():
            if isinstance(value, Tensor):
                num_rows = rows.get(name) if value.shape == parameter.shape else None
                key = f"optimizer.{name}.{kind}"
                state[key] = _placed(value, num_rows, mesh)
    return state


def _expert_rows(model: nn.Module) -> dict[str, int]:
    """Return E of every parameter that has a row for each expert."""
    found: dict[str, int] = {}
    for path, experts in model.named_modules():
        if not isinstance(experts, RoutedExperts):
            continue
        prefix = f"{path}." if path else ""
        if experts.shards.stored.tp_size > 1 or experts.shards.second is not None:
            raise ValueError(
                f"{path}: experts split over tp={experts.shards.stored.tp_size} ranks hold columns"
                " of gate and up, which no DTensor describes. Save with neuron_moe.checkpoint."
            )
        if experts.num_physical != experts.spec.num_experts:
            raise ValueError(
                f"{path}: {experts.num_physical} physical experts are more than the model's"
                f" {experts.spec.num_experts}. Train with each expert once."
            )
        names = (name for name, _ in experts.mlp_op.named_parameters())
        found |= {f"{prefix}mlp_op.{name}": experts.num_physical for name in names}
    return found


def _placed(value: Tensor, num_rows: int | None, mesh: DeviceMesh | None) -> Tensor:
    """Return a part of all experts as such; anything else as it is."""
    if num_rows is None or mesh is None:
        return value
    axes: tuple[str, ...] = (EXPERT_AXIS,)
    local = value
    if isinstance(value, DTensor):
        axes, local = (EXPERT_AXIS, COPY_AXIS), value.to_local()
    elif mesh[EXPERT_AXIS].size() == 1:
        return value
    placements: list[Placement] = [Shard(0) for _ in axes]
    shape = torch.Size((num_rows, *value.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    parts = [mesh[axis] for axis in axes]
    where = parts[0] if len(parts) == 1 else _joined(mesh, axes)
    return DTensor.from_local(local, where, placements, run_check=False, shape=shape, stride=stride)


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
    """Let an optimizer make its state, without moving a weight."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
