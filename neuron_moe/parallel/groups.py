"""Process groups of a ParallelConfig: who talks to whom.

Rank r of a model has tp_rank = r % tp and ep_rank = r // tp: tensor parallel neighbours are
contiguous, and so are on one chip where they can. Replicas follow one another. Attention data
parallel groups are contiguous runs of tp * ep / dp ranks.
"""

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from neuron_moe.parallel.collectives import Collectives, SingleRank, as_collectives
from neuron_moe.parallel.config import ExpertLayout, ParallelConfig
from neuron_moe.parallel.hybrid import PhaseShards
from neuron_moe.parallel.shard import ExpertShard


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """The ranks that share the routed experts in one phase.

    Args:
        tp: ranks that split an expert.
        ep: ranks that split the experts.
        model: all of them, tp * ep; outputs are summed over it.
        data: those of them that hold different tokens when attention is data parallel.
        attention: those of them that hold the same tokens as this one.
        strategy: 'replicate' or 'all_to_all'.
    """

    tp: Collectives
    ep: Collectives
    model: Collectives
    data: Collectives
    attention: Collectives
    strategy: str = "replicate"

    @classmethod
    def of(
        cls,
        tp: ProcessGroup | Collectives | None,
        ep: ProcessGroup | Collectives | None,
        model: ProcessGroup | Collectives | None = None,
        strategy: str = "replicate",
    ) -> "ExpertGroups":
        """Build from process groups, tokens being the same on all ranks.

        Raises:
            ValueError: `model` is needed and missing, or is not tp * ep ranks.
        """
        tp, ep = as_collectives(tp, "tensor"), as_collectives(ep, "expert")
        if model is None and tp.size > 1 and ep.size > 1:
            raise ValueError(
                f"experts split over tp={tp.size} x ep={ep.size} ranks: the group of all"
                f" {tp.size * ep.size} must be given too, to sum over. Call"
                " parallel_state.initialize_model_parallel(), which builds all three."
            )
        whole = as_collectives(model, "model") if model is not None else tp if tp.size > 1 else ep
        if whole.size != tp.size * ep.size:
            raise ValueError(
                f"experts split over tp={tp.size} x ep={ep.size} ranks: the group to sum over has"
                f" {whole.size}, must have {tp.size * ep.size}."
            )
        return cls(tp, ep, whole, SingleRank("attention data"), whole, strategy)

    def summed_over(self, model: Collectives | None) -> "ExpertGroups":
        """Return these groups with the sum taken over `model`, if it is given.

        Raises:
            ValueError: no group to sum over is known, or it has the wrong size.
        """
        ranks = self.tp.size * self.ep.size
        if model is not None and model.size == ranks:
            same = self.attention is self.model
            return replace(self, model=model, attention=model if same else self.attention)
        if model is not None and (self.model.size != ranks or model.size != self.tp.size):
            raise ValueError(
                f"tensor_model_parallel_group: has {model.size} ranks, must have the {ranks} that"
                f" hold the experts (tp={self.tp.size} x ep={self.ep.size})."
            )
        if isinstance(self.model, Unsettled):
            raise ValueError(
                f"experts split over tp={self.tp.size} x ep={self.ep.size} ranks: the layer needs"
                f" the group of all {ranks} to sum over. Pass it as tensor_model_parallel_group, or"
                " call parallel_state.initialize_model_parallel() instead of passing groups."
            )
        return self

    @property
    def is_traced(self) -> bool:
        """Whether one process stands for all of these ranks."""
        return any(each.is_traced for each in (self.tp, self.ep, self.model))

    @property
    def shard(self) -> ExpertShard:
        """What this rank owns."""
        return ExpertShard(self.tp.rank, self.tp.size, self.ep.rank, self.ep.size)


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """All groups this rank is in.

    Args:
        config: what they were built from.
        rank: position in the model.
        model: the tp * ep ranks of the model.
        tensor: the tp ranks of `config.tp`.
        expert: the ep ranks of `config.ep`.
        data: one rank of each attention data parallel group.
        attention: the ranks of this attention data parallel group, which hold the same tokens.
        prefill: routed experts in prefill.
        decode: routed experts in decode.
    """

    config: ParallelConfig
    rank: int
    model: Collectives
    tensor: Collectives
    expert: Collectives
    data: Collectives
    attention: Collectives
    prefill: ExpertGroups
    decode: ExpertGroups

    def experts(self, phase: str) -> ExpertGroups:
        """Return the groups of a phase; speculation windows are decoded."""
        return self.decode if phase in ("decode", "speculation") else self.prefill


class GroupBuilder:
    """Creates each distinct set of ranks once; every process must ask in the same order."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout = timedelta(seconds=timeout_s)
        self.created: dict[tuple[int, ...], tuple[ProcessGroup | None, str]] = {}

    def build(self, ranks_GR: Tensor, name: str) -> Collectives:
        """Create a group for each row of ranks; return this process's."""
        mine: Collectives = SingleRank(name)
        for row in ranks_GR.tolist():
            if len(row) == 1:
                continue
            key = tuple(row)
            if key not in self.created:
                # The first name stays: one set of ranks serves several purposes.
                self.created[key] = dist.new_group(row, timeout=self.timeout), name
            group, first_name = self.created[key]
            if dist.get_rank() in row and group is not None:
                mine = as_collectives(group, first_name)
        return mine

    def destroy(self) -> None:
        """Destroy every group made here."""
        for ranks, (group, _) in self.created.items():
            if dist.get_rank() in ranks:
                dist.destroy_process_group(group)
        self.created.clear()


class Offline:
    """The place of a rank in a group, for work that needs no communication.

    Sharding a checkpoint for a rank that does not run is such work.
    """

    is_traced = False

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.ranks: tuple[int, ...] = ()

    def _refuse(self, collective: str) -> None:
        raise RuntimeError(
            f"{collective} over group {self.name!r}: this rank {self.rank} of {self.size} was only"
            " made up (parallel_state.as_rank). Start the processes and call"
            " initialize_model_parallel() to compute."
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Refuse."""
        self._refuse("all_reduce")
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Refuse."""
        self._refuse("all_gather")
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Refuse."""
        self._refuse("reduce_scatter")
        return x

    def all_to_all(self, x: Tensor, send_counts: object, receive_counts: object) -> Tensor:
        """Refuse."""
        self._refuse("all_to_all")
        return x


class Unsettled(SingleRank):
    """The group to sum over when tensor and expert groups were given without it.

    Experts on their own return partial sums and never use it; `MoE` refuses it.
    """

    def __init__(self, size: int) -> None:
        super().__init__("unsettled")
        self.size = size


def model_ranks(config: ParallelConfig) -> Tensor:
    """Return the global ranks as [replicas, tp * ep]."""
    return torch.arange(config.world_size, device="cpu").view(config.replicas, config.model_size)


def expert_ranks(config: ParallelConfig, layout: ExpertLayout) -> Tensor:
    """Return the global ranks as [copies, ep, tp], copies counting every full set of experts.

    Copies within a model follow one another, so that one can serve one attention data parallel
    group. Without such groups they interleave, where that lets prefill and decode share weights:
    rank e * copies + c then computes run e in decode and, in prefill, the c-th part of that run.
    """
    ranks = torch.arange(config.world_size, device="cpu")
    copies = config.model_size // layout.size
    if copies > 1 and config.dp == 1 and layout.tp == config.prefill.tp:
        grid_RECT = ranks.view(config.replicas, layout.ep, copies, layout.tp)
        return grid_RECT.transpose(1, 2).reshape(-1, layout.ep, layout.tp)
    return ranks.view(-1, layout.ep, layout.tp)


def shard_of_rank(config: ParallelConfig, layout: ExpertLayout, rank: int) -> ExpertShard:
    """Return what a rank of the model owns in a layout."""
    _, ep_rank, tp_rank = (expert_ranks(config, layout) == rank).nonzero()[0].tolist()
    return ExpertShard(tp_rank, layout.tp, ep_rank, layout.ep)


def phases_share_weights(config: ParallelConfig) -> bool:
    """Say whether on every rank one phase's experts are a run of the other's.

    All ranks must do the same: they hold the same parameters then, and the same memory.
    """
    num_parts = config.prefill.ep * config.decode.ep
    return all(
        PhaseShards.settle(
            shard_of_rank(config, config.prefill, rank),
            shard_of_rank(config, config.decode, rank),
            num_parts,
        ).second
        is None
        for rank in range(config.model_size)
    )


def build_groups(config: ParallelConfig, builder: GroupBuilder) -> ParallelGroups:
    """Create every group of a configuration; collective over all processes."""
    ranks_RM = model_ranks(config)

    def columns_and_rows(grid_CRK: Tensor, outer: str, inner: str) -> tuple[Collectives, ...]:
        columns = builder.build(grid_CRK.transpose(1, 2).flatten(0, 1), outer)
        return columns, builder.build(grid_CRK.flatten(0, 1), inner)

    per_attention = config.model_size // config.dp

    def experts(layout: ExpertLayout, phase: str) -> ExpertGroups:
        grid_CET = expert_ranks(config, layout)
        ep, tp = columns_and_rows(grid_CET, f"{phase} expert", f"{phase} tensor")
        whole = builder.build(grid_CET.flatten(1), f"{phase} model")
        same = min(layout.size, per_attention)
        by_data = grid_CET.reshape(-1, layout.size // same, same)
        data, attention = columns_and_rows(by_data, f"{phase} data", f"{phase} attention")
        return ExpertGroups(tp, ep, whole, data, attention, layout.strategy)

    model = builder.build(ranks_RM, "model")
    main = ExpertLayout(config.tp, config.ep)
    expert, tensor = columns_and_rows(expert_ranks(config, main), "expert", "tensor")
    by_data = ranks_RM.view(config.replicas, config.dp, -1)
    data, attention = columns_and_rows(by_data, "attention data", "attention")
    prefill, decode = experts(config.prefill, "prefill"), experts(config.decode, "decode")
    return ParallelGroups(
        config, model.rank, model, tensor, expert, data, attention, prefill, decode
    )


def build_mesh(config: ParallelConfig) -> DeviceMesh:
    """Return all ranks as a DeviceMesh with axes replica, ep, tp; collective over all processes."""
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    shape = (config.replicas, config.ep, config.tp)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replica", "ep", "tp"))


def offline_groups(config: ParallelConfig, rank: int) -> ParallelGroups:
    """Return the groups of one rank of a model without any process."""
    if not 0 <= rank < config.model_size:
        raise ValueError(f"rank={rank}: must be in [0, {config.model_size}), the model's ranks.")

    def place(name: str, position: int, size: int) -> Collectives:
        return SingleRank(name) if size == 1 else Offline(name, position, size)

    def experts(layout: ExpertLayout, phase: str) -> ExpertGroups:
        shard = shard_of_rank(config, layout, rank)
        local = shard.ep_rank * layout.tp + shard.tp_rank
        same = min(layout.size, per_group)
        return ExpertGroups(
            place(f"{phase} tensor", shard.tp_rank, layout.tp),
            place(f"{phase} expert", shard.ep_rank, layout.ep),
            place(f"{phase} model", local, layout.size),
            place(f"{phase} data", local // same, layout.size // same),
            place(f"{phase} attention", local % same, same),
            layout.strategy,
        )

    per_group = config.model_size // config.dp
    return ParallelGroups(
        config,
        rank,
        place("model", rank, config.model_size),
        place("tensor", rank % config.tp, config.tp),
        place("expert", rank // config.tp, config.ep),
        place("attention data", rank // per_group, config.dp),
        place("attention", rank % per_group, per_group),
        experts(config.prefill, "prefill"),
        experts(config.decode, "decode"),
    )
