"""Bytes on the wire: counted as they pass, and the formulas they must equal.

A rank's bytes are those it receives from other ranks, the least that any algorithm can do:

    all_gather       (n - 1) / n of the result
    reduce_scatter   (n - 1) / n of the input
    all_reduce       twice that (a reduce-scatter and an all-gather)
    all_to_all       the rows that come from other ranks

`WireCounter` wraps any `Collectives`. `layer_bytes` gives the same numbers from sizes alone; tests
hold one against the other, and `socket_bytes` against what the sockets really carried (gloo's
reduce-scatter carries twice its formula: it is an all-reduce inside).
"""

import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch import Tensor

from neuron_moe.dispatch.tokens import AFFINITY_BYTES, INDEX_BYTES
from neuron_moe.moe import MoE
from neuron_moe.parallel.collectives import Collectives
from neuron_moe.parallel.groups import ExpertGroups

_TCP_INFO_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in struct tcp_info, linux/tcp.h


@dataclass
class WireTally:
    """Bytes received from other ranks, by collective."""

    bytes_by_collective: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes of all collectives."""
        return sum(self.bytes_by_collective.values())

    def add(self, collective: str, num_bytes: int) -> None:
        """Count one call."""
        before = self.bytes_by_collective.get(collective, 0)
        self.bytes_by_collective[collective] = before + num_bytes
        self.calls[collective] = self.calls.get(collective, 0) + 1

    def clear(self) -> None:
        """Start again."""
        self.bytes_by_collective.clear()
        self.calls.clear()


class WireCounter:
    """Collectives that count the bytes they receive.

    Args:
        inner: does the work.
        tally: where to count; several groups may share one.
    """

    def __init__(self, inner: Collectives, tally: WireTally) -> None:
        self.inner = inner
        self.tally = tally
        self.name, self.rank, self.size = inner.name, inner.rank, inner.size
        self.ranks, self.is_traced = inner.ranks, inner.is_traced

    def all_reduce(self, x: Tensor) -> Tensor:
        """Count and sum."""
        self.tally.add("all_reduce", 2 * self._share(x.nbytes))
        return self.inner.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Count and gather."""
        self.tally.add("all_gather", x.nbytes * (self.size - 1))
        return self.inner.all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Count, sum and scatter."""
        self.tally.add("reduce_scatter", self._share(x.nbytes))
        return self.inner.reduce_scatter(x)

    def all_to_all(
        self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        """Count and exchange."""
        foreign = sum(receive_counts) - receive_counts[self.rank]
        row_bytes = x.element_size()
        for size in x.shape[1:]:
            row_bytes *= size
        self.tally.add("all_to_all", foreign * row_bytes)
        return self.inner.all_to_all(x, send_counts, receive_counts)

    def _share(self, num_bytes: int) -> int:
        return num_bytes * (self.size - 1) // self.size


def count_wire(layer: MoE) -> WireTally:
    """Count what a layer's collectives receive from now on.

    Returns:
        The tally; it grows with every forward.
    """
    tally = WireTally()

    def wrap(collectives: Collectives) -> Collectives:
        return WireCounter(collectives, tally)

    def wrap_groups(groups: ExpertGroups) -> ExpertGroups:
        return replace(
            groups,
            tp=wrap(groups.tp),
            ep=wrap(groups.ep),
            model=wrap(groups.model),
            data=wrap(groups.data),
            attention=wrap(groups.attention),
        )

    layer.use_groups({phase: wrap_groups(groups) for phase, groups in layer.groups.items()})
    if layer.shared_experts is not None:
        layer.shared_experts.group = wrap(layer.shared_experts.group)
    return tally


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


def socket_bytes() -> int:
    """Return the bytes all TCP sockets of this process have received (Linux).

    What gloo really moved, its own headers included; start-up traffic too, so take differences.
    """
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # not a TCP socket, or closed meanwhile
            total += _received(os.dup(int(entry)))
    return total


def _received(descriptor: int) -> int:
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise
    with connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("=Q", info, _TCP_INFO_BYTES_RECEIVED)[0])


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
