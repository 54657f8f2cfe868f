"""Collectives of NxD on XLA: on a chip, and while it traces one rank's graph for all ranks.

NxD's ModelBuilder builds a model in one process, in the place of rank 0, and hands its graph to
every rank. So nothing here may meet another process, and what differs between ranks must come from
data (`neuron_moe.nxd_compat.sharder.SPMDRank`).
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class XlaCollectives:
    """Collectives of an XLA process group, through NxD's own functions, which put them into graphs.

    Args:
        group: of NxD; it knows the ranks of all groups of its kind, its mesh.
        name: what messages call the group.

    Raises:
        ImportError: NxD is not installed.
    """

    is_traced = True
    ranks: tuple[int, ...] = ()

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self.group = group
        self.name = name
        self.rank = group.rank()
        self.size = group.size()
        self._nxd: Any = importlib.import_module("neuronx_distributed.parallel_layers.comm")

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, the same on every rank."""
        # NxD's sums in place.
        summed: Tensor = self._nxd.all_reduce("sum", x.clone(), groups=self.group)[0]
        return summed

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the ranks' equally shaped tensors joined along axis 0, in rank order."""
        gathered: Tensor = self._nxd.all_gather(x, dim=0, groups=self.group, pin_layout=False)
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's equal part, along axis 0, of the sum over ranks."""
        scattered: Tensor = self._nxd.reduce_scatter(
            "sum",
            x,
            scale=1,
            scatter_dim=0,
            shard_count=self.size,
            groups=self.group,
            pin_layout=False,
        )
        return scattered

    def all_to_all(
        self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        """Refuse: the number of rows depends on the data, which a graph of static shapes cannot."""
        raise ValueError(
            "strategy='all_to_all': sends a number of rows that the data decides, which NxD's graph"
            " cannot hold. Use strategy='replicate'."
        )


def is_xla(group: ProcessGroup) -> bool:
    """Say whether a process group is one of XLA, or stands for one while NxD traces.

    NxD puts another object in the place of `torch.distributed` then: it is looked up at each call.
    """
    return bool(torch.distributed.get_backend(group) == "xla")
