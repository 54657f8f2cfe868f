"""Bytes on the wire, counted as they pass; `neuron_moe.planner.wire` has the formulas.

`WireCounter` wraps any `Collectives`, and `socket_bytes` tells what the sockets really carried
(gloo's reduce-scatter carries twice its formula: it is an all-reduce inside).
"""

import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch import Tensor

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
