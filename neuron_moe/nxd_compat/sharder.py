"""What NxD's checkpoint sharder looks for: classes, attributes of parameters, and a hook.

NxD walks a model, lets each module with a `preshard_hook` change the whole state dict, and slices
the parameters of its own parallel layers by what their attributes say. Ours carry the same, so that
one checkpoint goes through the same code. Our hook changes no number: biases are arithmetic at run
time.

Axes: E experts, H hidden, I intermediate.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.experts import RoutedExperts
from neuron_moe.nxd_compat.nxd import as_parallel_layer, set_quantized_form
from neuron_moe.nxd_compat.quantized import (
    BY_EXPERT,
    PER_TENSOR,
    QuantizedExpertLinear,
    QuantizedShared,
)
from neuron_moe.shared_experts import SharedExperts
from neuron_moe.weights.experts import Experts
from nki_kernels.common.formula import num_projections


@dataclass(frozen=True)
class Cut:
    """How one parameter is split over the ranks that split I.

    Args:
        dim: the axis that is split; None for a parameter that is whole on each rank.
        stride: runs of it that are split each, 2 for gate and up in one matrix.
        is_by_expert: its first axis is the experts, over whose ranks it is split too.
    """

    dim: int | None
    stride: int = 1
    is_by_expert: bool = True


def expert_cuts(experts: Experts) -> Iterator[tuple[nn.Module, str, Cut]]:
    """Yield module, parameter and cut of the experts of one phase."""
    halves = num_projections(experts.formula)
    yield experts.first, "weight", Cut(2, halves)
    yield experts.first, "bias", Cut(1, halves)
    yield experts.down_proj, "weight", Cut(1)
    yield experts.down_proj, "bias", Cut(None)
    for linear, cut in ((experts.first, Cut(2, halves)), (experts.down_proj, Cut(None))):
        if isinstance(linear, QuantizedExpertLinear):
            dim = None if linear.scheme == PER_TENSOR else cut.dim
            yield linear, "scale", Cut(dim, cut.stride, linear.scheme == BY_EXPERT)


def shared_cuts(shared: SharedExperts) -> Iterator[tuple[nn.Module, str, Cut]]:
    """Yield module, parameter and cut of shared experts."""
    for name in shared.first_names:
        yield getattr(shared, name), "weight", Cut(0, 2 if shared.spec.is_fused else 1)
    yield shared.down_proj, "weight", Cut(1)


def mark_experts(mlps: RoutedExperts, expert_distribution: list[list[int]] | None) -> None:
    """Make the experts of all phases visible to NxD's sharder."""
    for name, experts in mlps.named_children():
        if not isinstance(experts, Experts):
            continue
        is_prefill = name == "mlp_op"
        for module, parameter, cut in expert_cuts(experts):
            found = _mark(module, parameter, cut, experts.shard.tp_size)
            if not isinstance(module, QuantizedExpertLinear):
                set_quantized_form(module, QuantizedExpertLinear)
            if found is not None and cut.is_by_expert and experts.shard.ep_size > 1:
                found.expert_model_parallel = True  # type: ignore[attr-defined]
                found.expert_distribution = (  # type: ignore[attr-defined]
                    expert_distribution if is_prefill else None
                )
                if is_prefill:  # NxD asks whether it is there
                    found.is_prefill = True  # type: ignore[attr-defined]


def mark_shared(shared: SharedExperts) -> None:
    """Make shared experts visible to NxD's sharder."""
    for module, parameter, cut in shared_cuts(shared):
        _mark(module, parameter, cut, shared.shard.tp_size)
        set_quantized_form(module, QuantizedShared)


def _mark(module: nn.Module, name: str, cut: Cut, num_partitions: int) -> Tensor | None:
    as_parallel_layer(module)
    parameter: Tensor | None = getattr(module, name)
    if parameter is not None:
        _set_cut(parameter, cut, num_partitions)
    return parameter


def _set_cut(parameter: Tensor, cut: Cut, num_partitions: int) -> None:
    values: dict[str, Any] = {
        "tensor_model_parallel": cut.dim is not None,
        "partition_dim": -1 if cut.dim is None else cut.dim,
        "partition_stride": cut.stride,
        "num_partitions": num_partitions,
        "rank_ordering": None,
    }
    for name, value in values.items():
        setattr(parameter, name, value)


class SPMDRank(nn.Module):
    """The place of a rank as parameters, NxD's way to give one graph to all ranks.

    State dict: `rank` [1] int32, and `local_expert_indices` [1, E of this rank] int32 where experts
    are split over ranks. They start with the values of this process.

    Args:
        rank: of this process.
        world_size: processes.
        local_experts: of this rank, if experts are split.
        is_open: one process stands for all ranks, so a state dict may hold any rank's place.
    """

    rank: nn.Parameter
    local_expert_indices: nn.Parameter

    def __init__(
        self,
        rank: int,
        world_size: int,
        local_experts: list[int] | None,
        *,
        is_open: bool = False,
    ) -> None:
        super().__init__()
        self.world_size = world_size
        self.is_open = is_open
        values = {"rank": [rank]} | (
            {} if local_experts is None else {"local_expert_indices": [local_experts]}
        )
        self.of_process = {
            name: torch.tensor(value, dtype=torch.int32, device="cpu")
            for name, value in values.items()
        }
        for name, value in self.of_process.items():
            self.register_parameter(name, nn.Parameter(value.clone(), requires_grad=False))
        self.mark()

    def mark(self) -> None:
        """Make the parameters visible to NxD's sharder."""
        as_parallel_layer(self, "SPMDRank")
        for parameter in self.parameters():
            _set_cut(parameter, Cut(0), self.world_size)

    def get_rank(self) -> Tensor:
        """Return [1] int32."""
        return self.rank

    def get_local_expert_indices(self) -> Tensor:
        """Return [1, E of this rank] int32."""
        return self.local_expert_indices

    def settle(self, state_dict: dict[str, Any], prefix: str) -> str:
        """Fill in what a state dict leaves open; return what is wrong with it, or ''.

        Zeros are open: modules of NxD hold them until its hook has run.
        """
        for name, value in self.of_process.items():
            given = state_dict.get(prefix + name)
            if self.is_open and given is not None:
                continue
            if isinstance(given, Tensor) and given.shape[:1] == (self.world_size,):
                row = int(self.of_process["rank"])
                given = given[row : row + 1]
            if isinstance(given, Tensor) and not given.is_meta and bool(given.any()):
                have, want = given.tolist(), value.tolist()
                if have != want:
                    return (
                        f"{prefix}{name}: holds {have}, this process is {want}. Load the part of"
                        " the checkpoint that was cut for this rank."
                    )
            state_dict[prefix + name] = value.clone()
        return ""
