"""Attention heads split over ranks in vLLM on a CPU: each keeps keys and values of its own heads.

Every rank computes all projections, which are small beside experts, and attends for its heads; what
they give is gathered. So any attention module is split by its core alone.

Letters: Q query heads, N ranks.
"""

from torch import Tensor

from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.collectives import Collectives, SingleRank


def ranks_of_heads(num_heads: int, num_kv_heads: int) -> Collectives:
    """Return the ranks that share the heads of a layer: all, or this one where they do not divide.

    Args:
        num_heads: Q.
        num_kv_heads: of keys and values.
    """
    groups = parallel_state.get_groups()
    if groups is None or num_heads % groups.model.size or num_kv_heads % groups.model.size:
        return SingleRank("heads")
    return groups.model


def own_heads(group: Collectives, heads: Tensor, axis: int = -2) -> Tensor:
    """Return this rank's part of an axis of heads."""
    size = heads.shape[axis] // group.size
    return heads.narrow(axis, group.rank * size, size)


def gather_columns(group: Collectives, own: Tensor) -> Tensor:
    """Return [.., N * c] of the columns of each rank, [.., c]."""
    if group.size == 1:
        return own
    rows = own.flatten(0, -2)
    gathered = group.all_gather(rows).view(group.size, *rows.shape)
    return gathered.transpose(0, 1).reshape(*own.shape[:-1], -1)
