"""The ranks of this process's model, set once and read by modules when they are built.

The names are NxD's:

    from neuron_moe.parallel import parallel_state
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=4, expert_model_parallel_size=16
    )

Modules built afterwards hold this rank's part of their weights and take their groups from here
unless they are given others. Without a call everything is one rank.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from neuron_moe.parallel import failure
from neuron_moe.parallel.collectives import (
    Collectives,
    SingleRank,
    as_collectives,
    process_group_of,
)
from neuron_moe.parallel.config import ParallelConfig
from neuron_moe.parallel.groups import (
    ExpertGroups,
    GroupBuilder,
    ParallelGroups,
    Unsettled,
    build_groups,
    build_mesh,
    offline_groups,
)
from neuron_moe.parallel.groups import phases_share_weights as phases_nest

_NXD = "neuronx_distributed.parallel_layers.parallel_state"


@dataclass
class _State:
    groups: ParallelGroups
    builder: GroupBuilder | None = None
    shuffle: Collectives | None = None
    started_distributed: bool = False
    mesh: DeviceMesh | None = None
    lives: Callable[[], bool] = lambda: True  # adopted groups end with whoever built them


_state: _State | None = None


def _current() -> _State | None:
    """Return the state, having forgotten adopted groups that are gone."""
    global _state
    if _state is not None and not _state.lives():
        _state = None
    return _state


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    *,
    data_parallel_size: int = 1,
    config: ParallelConfig | None = None,
    timeout_s: float = failure.DEFAULT_TIMEOUT_S,
    watch: bool = True,
) -> ParallelGroups:
    """Build the groups of a model; every process calls it with the same arguments.

    Under torchrun it starts `torch.distributed` itself (nccl with a GPU, else gloo).

    Args:
        tensor_model_parallel_size: ranks that split each expert.
        pipeline_model_parallel_size: must be 1.
        context_parallel_size: must be 1.
        expert_model_parallel_size: ranks that split the experts.
        data_parallel_size: independent copies of the model.
        config: the whole configuration instead of these sizes.
        timeout_s: a collective that takes longer fails, naming rank and collective.
        watch: publish this rank's progress, so that a failure can name the culprit.

    Returns:
        The groups.

    Raises:
        ValueError: a size is wrong, the product is not the number of processes, or ranks were
            started with different settings.
        RuntimeError: called twice.
    """
    global _state
    if _current() is not None:
        raise RuntimeError(
            "initialize_model_parallel: already called. Call destroy_model_parallel() first."
        )
    started = _start_distributed()
    if dist.is_initialized() and watch and dist.get_world_size() > 1:
        _start_watch()
    try:
        sizes = {
            "tensor_model_parallel_size": tensor_model_parallel_size,
            "pipeline_model_parallel_size": pipeline_model_parallel_size,
            "context_parallel_size": context_parallel_size,
            "expert_model_parallel_size": expert_model_parallel_size,
            "data_parallel_size": data_parallel_size,
        }
        if dist.is_initialized() and dist.get_world_size() > 1:
            failure.meet_everyone()
            settings = sizes if config is None else config.to_dict()
            failure.check_same_on_all_ranks("initialize_model_parallel", settings)
        config = config or _config_of_sizes(sizes)
        _state = _build(config, timeout_s, started)
    except BaseException:
        failure.stop_watch()
        raise
    return _state.groups


def destroy_model_parallel() -> None:
    """Forget the groups; modules built before keep theirs, but can no longer communicate."""
    global _state
    failure.stop_watch()
    if _state is None:
        return
    if _state.builder is not None:
        _state.builder.destroy()
    if _state.started_distributed:
        dist.destroy_process_group()
    _state = None


def default_groups() -> ParallelGroups | None:
    """Return the groups of modules that are given none: those built here, else those of an NxD that
    this process has initialised, else None.
    """
    nxd = sys.modules.get(_NXD)
    if _current() is None and nxd is not None and nxd.model_parallel_is_initialized():
        adopt_nxd_groups()
    return get_groups()


def model_parallel_is_initialized() -> bool:
    """Say whether groups were built."""
    return _current() is not None


def get_groups() -> ParallelGroups | None:
    """Return the groups, or None."""
    state = _current()
    return None if state is None else state.groups


def phases_share_weights() -> bool:
    """Say whether prefill and decode can share one copy of the experts on every rank."""
    groups = get_groups()
    return groups is not None and phases_nest(groups.config)


@contextmanager
def as_rank(config: ParallelConfig, rank: int) -> Iterator[ParallelGroups]:
    """Build modules as one rank of a model would, without processes; they cannot communicate.

    For sharding checkpoints offline, and for looking at shapes.
    """
    global _state
    before = _state
    _state = _State(offline_groups(config, rank))
    try:
        yield _state.groups
    finally:
        _state = before


def adopt_nxd_groups() -> ParallelGroups:
    """Take the groups of an initialised NxD instead of building new ones; they end with NxD's.

    Raises:
        ImportError: NxD is not installed.
        RuntimeError: NxD's model parallel is not initialised, or ours is already.
    """
    if _current() is not None:
        raise RuntimeError("adopt_nxd_groups: groups exist. Call destroy_model_parallel() first.")
    nxd = importlib.import_module(_NXD)
    if not nxd.model_parallel_is_initialized():
        raise RuntimeError(
            "adopt_nxd_groups: NxD has no groups yet. Call its initialize_model_parallel() first."
        )
    nxds = nxd.get_tensor_model_parallel_group()
    is_split = nxd.get_expert_model_parallel_size() > 1

    def is_nxds() -> bool:
        lives = nxd.model_parallel_is_initialized()
        return bool(lives) and nxd.get_tensor_model_parallel_group() is nxds

    expert = nxd.get_expert_model_parallel_group() if is_split else None
    return adopt_groups(nxds, expert, nxd.get_world_group() if is_split else None, lives=is_nxds)


def adopt_groups(
    tensor: ProcessGroup | None,
    expert: ProcessGroup | None = None,
    model: ProcessGroup | None = None,
    *,
    lives: Callable[[], bool] = lambda: True,
) -> ParallelGroups:
    """Take the groups of whoever started the ranks instead of building new ones.

    Args:
        tensor: ranks that split each expert; None for this one alone.
        expert: ranks that split the experts; None for this one alone.
        model: all of them, where both groups have several.
        lives: says whether the groups are still there.

    Raises:
        RuntimeError: the groups do not fit together, or there are groups already.
    """
    global _state
    if _current() is not None:
        raise RuntimeError("adopt_groups: groups exist. Call destroy_model_parallel() first.")
    split, spread = as_collectives(tensor, "tensor"), as_collectives(expert, "expert")
    whole = split if spread.size == 1 else spread
    whole = whole if model is None else as_collectives(model, "model")
    config = ParallelConfig(tp=split.size, ep=spread.size)
    if config.model_size != whole.size:
        raise RuntimeError(
            f"adopt_groups: groups of {split.size} x {spread.size} ranks do not cover the model's"
            f" {whole.size}. Start the ranks with data parallel size 1."
        )
    experts = ExpertGroups.of(split, spread, whole)
    data = SingleRank("attention data")
    groups = ParallelGroups(config, whole.rank, whole, split, spread, data, whole, experts, experts)
    _state = _State(groups, lives=lives)
    return groups


def initialize_token_shuffle_group(token_shuffle_group_size: int = 1) -> None:
    """Build the groups tokens are shuffled in: runs of this many ranks of the model.

    Raises:
        RuntimeError: no groups exist.
        ValueError: the size does not divide the model's ranks.
    """
    if _state is None or _state.builder is None:
        raise RuntimeError(
            "initialize_token_shuffle_group: call initialize_model_parallel() first."
        )
    ranks = _state.groups.config.model_size
    if token_shuffle_group_size < 1 or ranks % token_shuffle_group_size:
        raise ValueError(
            f"token_shuffle_group_size={token_shuffle_group_size}: must divide the {ranks} ranks"
            " of the model."
        )
    world = torch.arange(_state.groups.config.world_size).view(-1, token_shuffle_group_size)
    _state.shuffle = _state.builder.build(world, "token shuffle")


def get_token_shuffle_group() -> Collectives | None:
    """Return the group tokens are shuffled in, or None."""
    return None if _state is None else _state.shuffle


def resolve_expert_groups(
    tensor: ProcessGroup | None, expert: ProcessGroup | None, phase: str, strategy: str | None
) -> ExpertGroups:
    """Return the groups of routed experts: those given, else those of this state, else one rank.

    The group to sum over follows from a single given group; for two, `MoE` must be given it.
    """
    state = default_groups()
    if tensor is None and expert is None and state is not None:
        groups = state.experts(phase)
        return groups if strategy is None else replace(groups, strategy=strategy)
    tp, ep = as_collectives(tensor, "tensor"), as_collectives(expert, "expert")
    model: Collectives | None = None
    if tp.size > 1 and ep.size > 1:
        known = None if state is None else state.experts(phase).model
        fits = known is not None and known.size == tp.size * ep.size
        model = known if fits else Unsettled(tp.size * ep.size)
    return ExpertGroups.of(tp, ep, model, strategy or "replicate")


def get_device_mesh() -> DeviceMesh:
    """Return the ranks as a DeviceMesh with axes replica, ep and tp; the first call is collective.

    For DTensor and for models around the MoE; its groups hold the ranks of those here.

    Raises:
        RuntimeError: no groups were built.
    """
    if _state is None or _state.builder is None:
        raise RuntimeError("get_device_mesh: call initialize_model_parallel() first.")
    if _state.mesh is None:
        _state.mesh = build_mesh(_state.groups.config)
    return _state.mesh


def get_tensor_model_parallel_group() -> ProcessGroup | None:
    """Return the process group that splits each expert; None for one rank."""
    return _process_group("tensor")


def get_expert_model_parallel_group() -> ProcessGroup | None:
    """Return the process group that splits the experts; None for one rank."""
    return _process_group("expert")


def get_world_group() -> ProcessGroup | None:
    """Return the process group of all ranks of the model; None for one rank."""
    return _process_group("model")


def get_tensor_model_parallel_size() -> int:
    """Return the ranks that split each expert."""
    groups = get_groups()
    return 1 if groups is None else groups.tensor.size


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's position among them."""
    groups = get_groups()
    return 0 if groups is None else groups.tensor.rank


def get_expert_model_parallel_size() -> int:
    """Return the ranks that split the experts."""
    groups = get_groups()
    return 1 if groups is None else groups.expert.size


def get_expert_model_parallel_rank() -> int:
    """Return this rank's position among them."""
    groups = get_groups()
    return 0 if groups is None else groups.expert.rank


def _process_group(name: str) -> ProcessGroup | None:
    return process_group_of(getattr(get_groups(), name, None))


def _config_of_sizes(sizes: dict[str, int]) -> ParallelConfig:
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        if sizes[name] != 1:
            raise ValueError(
                f"{name}={sizes[name]!r}: must be 1; these modules are one MoE layer. Split layers"
                " or context in the model around them."
            )
    return ParallelConfig(
        tp=sizes["tensor_model_parallel_size"],
        ep=sizes["expert_model_parallel_size"],
        replicas=sizes["data_parallel_size"],
    )


def _start_distributed() -> bool:
    """Initialise torch.distributed under torchrun; say whether this call did it."""
    if dist.is_initialized() or not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return False
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return True


def _start_watch() -> None:
    store = dist.distributed_c10d._get_default_store()
    failure.start_watch(store, dist.get_rank(), dist.get_world_size())


def _build(config: ParallelConfig, timeout_s: float, started: bool) -> _State:
    if dist.is_initialized():
        config.check_world(dist.get_world_size())
    elif config.world_size > 1:
        raise ValueError(
            f"tensor_model_parallel_size={config.tp}, expert_model_parallel_size={config.ep}: need"
            f" {config.world_size} ranks, but this process is alone: torch.distributed is not"
            " initialised. Start the script with"
            f" `torchrun --nproc-per-node {config.world_size} ...`, or call"
            " torch.distributed.init_process_group() first."
        )
    if config.world_size == 1:
        return _State(offline_groups(config, 0), None, None, started)
    builder = GroupBuilder(timeout_s)
    return _State(build_groups(config, builder), builder, None, started)
