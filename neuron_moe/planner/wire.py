"""Bytes on the wire of a layer, from sizes alone.

A rank's bytes are those it receives from other ranks, the least that any algorithm can do:

    all_gather       (n - 1) / n of the result
    reduce_scatter   (n - 1) / n of the input
    all_reduce       twice that (a reduce-scatter and an all-gather)
    all_to_all       the rows that come from other ranks
"""

from collections.abc import Callable
from dataclasses import dataclass

from neuron_moe.dispatch.tokens import AFFINITY_BYTES, INDEX_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSizes:
    """What decides the bytes of one layer on one rank.

    Args:
        tokens: T of all ranks.
        hidden_size: H.
        top_k: K.
        num_experts: E.
        tp: ranks that split an expert.
        ep: ranks that split the experts.
        hidden_bytes: bytes of one hidden element on its way to the experts.
        reduce_bytes: the same on the way back.
    """

    tokens: int
    hidden_size: int
    top_k: int
    num_experts: int
    tp: int
    ep: int
    hidden_bytes: int = 2
    reduce_bytes: int = 2

    @property
    def ranks(self) -> int:
        """W = tp * ep."""
        return self.tp * self.ep

    @property
    def own_tokens(self) -> float:
        """Tokens of one rank under sequence parallelism."""
        return self.tokens / self.ranks


def replicated_bytes(sizes: WireSizes) -> float:
    """All tokens on all ranks before and after: one all-reduce of [T, H]."""
    whole = sizes.tokens * sizes.hidden_size * sizes.reduce_bytes
    return 2 * (sizes.ranks - 1) / sizes.ranks * whole


def sequence_bytes(sizes: WireSizes) -> float:
    """Sequence parallel replicate-and-reduce: gather rows and k-wide routings, reduce-scatter."""
    routing = sizes.top_k * (INDEX_BYTES + AFFINITY_BYTES)
    row = sizes.hidden_size * (sizes.hidden_bytes + sizes.reduce_bytes)
    return (sizes.ranks - 1) * sizes.own_tokens * (row + routing)


def naive_bytes(sizes: WireSizes) -> float:
    """The same with E-wide float32 logits gathered in place of the k-wide routing."""
    row = sizes.hidden_size * (sizes.hidden_bytes + sizes.reduce_bytes)
    return (sizes.ranks - 1) * sizes.own_tokens * (row + sizes.num_experts * 4)


def all_to_all_bytes(sizes: WireSizes, ranks_per_token: float, local_share: float = 0.0) -> float:
    """Sequence parallel all-to-all: a row to each expert rank of a token, and back.

    Args:
        sizes: the layer.
        ranks_per_token: mean number of expert parallel ranks a token goes to, its own included.
        local_share: share of these rows that stay on their rank; 1 / ep on average.
    """
    routing = sizes.top_k * (INDEX_BYTES + AFFINITY_BYTES)
    there = sizes.hidden_size * sizes.hidden_bytes + routing
    back = sizes.hidden_size * sizes.reduce_bytes
    rows = sizes.own_tokens * ranks_per_token
    return rows * ((1 - local_share) + (sizes.tp - 1)) * (there + back)


def expected_ranks_per_token(num_experts: int, top_k: int, ep: int) -> float:
    """Return the mean number of distinct ranks that hold K experts drawn uniformly.

    ep * (1 - C(E - E/ep, K) / C(E, K)): a rank is missed if none of the K is among its E/ep.
    """
    missed, per_rank = 1.0, num_experts // ep
    for draw in range(top_k):
        missed *= max(0, num_experts - per_rank - draw) / (num_experts - draw)
    return ep * (1.0 - missed)


FORMULAS: dict[str, Callable[[WireSizes], float]] = {
    "all-reduce": replicated_bytes,
    "replicate": sequence_bytes,
    "naive gather": naive_bytes,
    "all-to-all": lambda sizes: all_to_all_bytes(
        sizes,
        expected_ranks_per_token(sizes.num_experts, sizes.top_k, sizes.ep),
        1.0 / sizes.ep,
    ),
}
