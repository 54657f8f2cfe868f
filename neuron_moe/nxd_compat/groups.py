"""NxD's MoE-private process groups: prefill ("cte") and decode ("tkg") may cut experts differently.

The functions are those of `neuronx_distributed.modules.moe.moe_process_group`. Where NxD is loaded
its groups are these groups: on devices it builds them; on a CPU, where it builds only the first of
them, they are built here with gloo and handed to it, because its sharder requests them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from neuron_moe.nxd_compat.nxd import NXD_MOE_GROUPS, NXD_STATE, is_on_cpu, loaded

Mesh = list[list[int]]
_PHASES = {True: "CTE", False: "TKG"}


@dataclass(frozen=True)
class _Pair:
    """The groups of this process in one phase, and the ranks of all of them."""

    tensor: ProcessGroup
    expert: ProcessGroup
    experts_of_all: Mesh


_pairs: dict[bool, _Pair] = {}
_RANK_OF = "get_expert_parallel_rank_from_global_rank"
_nxds_own: dict[ModuleType, Any] = {}  # the function that was replaced, by NxD's module


def init_tensor_expert_parallel_moe_process_groups(
    tkg_tp_degree: int, tkg_ep_degree: int, cte_tp_degree: int, cte_ep_degree: int
) -> None:
    """Build the groups of both phases, unless they exist; every process calls it alike.

    Args:
        tkg_tp_degree: ranks that split an expert in decode.
        tkg_ep_degree: ranks that split the experts in decode.
        cte_tp_degree: ranks that split an expert in prefill.
        cte_ep_degree: ranks that split the experts in prefill.

    Raises:
        ValueError: a product does not divide the number of processes, or groups of other degrees
            exist.
    """
    nxd = loaded(NXD_MOE_GROUPS)
    if nxd is not None and not is_on_cpu():
        nxd.init_tensor_expert_parallel_moe_process_groups(
            tkg_tp_degree, tkg_ep_degree, cte_tp_degree, cte_ep_degree
        )
        return
    for prefill, tp, ep in (
        (False, tkg_tp_degree, tkg_ep_degree),
        (True, cte_tp_degree, cte_ep_degree),
    ):
        _check_degrees(prefill, tp, ep)
        _forget_if_dead(prefill)
        if prefill in _pairs:
            _check_same(prefill, tp, ep)
        else:
            _pairs[prefill] = _build(tp, ep, _pairs.get(not prefill))
        _hand_over(prefill)


def get_moe_tp_ep_group(prefill: bool = True) -> ProcessGroup:
    """Return the ranks that split an expert with this one."""
    return _of(prefill, "tensor")


def get_moe_ep_group(prefill: bool = True) -> ProcessGroup:
    """Return the ranks that split the experts with this one."""
    return _of(prefill, "expert")


def destroy_moe_model_parallel() -> None:
    """Forget the groups, NxD's too, and give NxD back its own function."""
    _pairs.clear()
    nxd, state = loaded(NXD_MOE_GROUPS), loaded(NXD_STATE)
    if nxd is not None:
        nxd.destroy_moe_model_parallel()
    if state is not None and state in _nxds_own:
        setattr(state, _RANK_OF, _nxds_own.pop(state))


def get_expert_parallel_rank_from_global_rank(
    rank: int, expert_parallel_group: ProcessGroup
) -> int:
    """Return the position of a rank among the ranks that split the experts with it.

    Raises:
        ValueError: the rank is in no such group.
    """
    mesh = expert_mesh(expert_parallel_group)
    if mesh is None:
        mesh = [list(dist.get_process_group_ranks(expert_parallel_group))]
    for row in mesh:
        if rank in row:
            return row.index(rank)
    raise ValueError(f"rank={rank}: must be in one of the groups {mesh}. Check the degrees.")


def get_experts_for_expert_parallel_rank(
    expert_parallel_rank: int,
    total_number_of_experts: int,
    expert_model_parallel_size: int,
    expert_distribution: list[list[int]] | None = None,
) -> list[int]:
    """Return the experts of a rank: an equal run, or what `expert_distribution` gives it."""
    if expert_distribution:
        return expert_distribution[expert_parallel_rank]
    count, rest = divmod(total_number_of_experts, expert_model_parallel_size)
    if rest:
        raise ValueError(
            f"total_number_of_experts={total_number_of_experts}: must divide by"
            f" expert_model_parallel_size={expert_model_parallel_size}. Choose other degrees."
        )
    return list(range(expert_parallel_rank * count, (expert_parallel_rank + 1) * count))


def _of(prefill: bool, kind: str) -> ProcessGroup:
    nxd = loaded(NXD_MOE_GROUPS)
    if nxd is not None and not is_on_cpu():
        found: ProcessGroup = getattr(
            nxd, "get_moe_tp_ep_group" if kind == "tensor" else "get_moe_ep_group"
        )(prefill)
        return found
    _forget_if_dead(prefill)
    if prefill not in _pairs:
        raise RuntimeError(
            "get_moe_tp_ep_group, get_moe_ep_group: no groups yet. Call"
            " init_tensor_expert_parallel_moe_process_groups() first."
        )
    group: ProcessGroup = getattr(_pairs[prefill], kind)
    return group


def _check_degrees(prefill: bool, tp: int, ep: int) -> None:
    world = dist.get_world_size()
    if tp < 1 or ep < 1 or world % (tp * ep):
        word = _PHASES[prefill].lower()
        raise ValueError(
            f"{word}_tp_degree={tp}, {word}_ep_degree={ep}: the product must divide the {world}"
            " processes. Choose other degrees."
        )


def _check_same(prefill: bool, tp: int, ep: int) -> None:
    pair = _pairs[prefill]
    have = dist.get_world_size(pair.tensor), dist.get_world_size(pair.expert)
    if have != (tp, ep):
        raise ValueError(
            f"tp_degree={tp}, ep_degree={ep}: groups of {have[0]} x {have[1]} ranks exist. Call"
            " destroy_moe_model_parallel() first, or keep the degrees."
        )


def _forget_if_dead(prefill: bool) -> None:
    """Forget groups of a torch.distributed that was shut down since."""
    pair = _pairs.get(prefill)
    if pair is not None and pair.tensor not in dist.distributed_c10d._world.pg_map:
        del _pairs[prefill]


def _build(tp: int, ep: int, other: _Pair | None) -> _Pair:
    """Create every group of a phase, or take those of the other phase."""
    tensor_mesh, expert_mesh = _meshes(tp, ep)
    if other is not None and other.experts_of_all == expert_mesh:
        return other
    return _Pair(_own(tensor_mesh), _own(expert_mesh), expert_mesh)


def _meshes(tp: int, ep: int) -> tuple[Mesh, Mesh]:
    """Return the ranks of all groups, in NxD's order for this hardware where NxD is loaded."""
    nxd = loaded(NXD_STATE)
    if nxd is not None and nxd.model_parallel_is_initialized():
        found = nxd.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=ep,
            mesh_only=True,
            lnc_size=1 if tp * ep <= 32 else 2,
        )
        return _as_lists(found.tp_groups), _as_lists(found.ep_model_groups)
    grid_CET = torch.arange(dist.get_world_size()).view(-1, ep, tp)
    return grid_CET.flatten(0, 1).tolist(), grid_CET.transpose(1, 2).flatten(0, 1).tolist()


def _as_lists(mesh: Sequence[Sequence[int]]) -> Mesh:
    return [[int(rank) for rank in row] for row in mesh]


def _own(mesh: Mesh) -> ProcessGroup:
    """Create a group for each row; return this process's."""
    created = {tuple(row): dist.new_group(row) for row in mesh}
    rank = dist.get_rank()
    mine: ProcessGroup = next(group for row, group in created.items() if rank in row)
    return mine


def _hand_over(prefill: bool) -> None:
    """Give NxD the groups that its sharder requests."""
    nxd, state = loaded(NXD_MOE_GROUPS), loaded(NXD_STATE)
    if nxd is None or state is None:
        return
    word, pair = _PHASES[prefill], _pairs[prefill]
    setattr(nxd, f"_MOE_{word}_TENSOR_MODEL_PARALLEL_GROUP", pair.tensor)
    setattr(nxd, f"_MOE_{word}_EXPERT_MODEL_PARALLEL_GROUP", pair.expert)
    # NxD's reads an attribute that gloo groups do not have.
    _nxds_own.setdefault(state, getattr(state, _RANK_OF))
    setattr(state, _RANK_OF, get_expert_parallel_rank_from_global_rank)


def expert_mesh(group: ProcessGroup | None) -> Mesh | None:
    """Return the ranks of all groups that were built with this one, if anybody has noted them."""
    noted: Mesh | None = getattr(group, "_mesh", None)
    if noted:
        return noted
    built = [pair.experts_of_all for pair in _pairs.values() if group is pair.expert]
    if built:
        return built[0]
    nxd = loaded(NXD_STATE)
    if nxd is None or group is None or not nxd.model_parallel_is_initialized():
        return None
    is_main = group is nxd.get_expert_model_parallel_group()
    return _as_lists(nxd.get_expert_model_parallel_replica_groups()) if is_main else None
