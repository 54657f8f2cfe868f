"""What the critical path of a run is made of, and how long the same path is on a changed chip.

The path is a chain of instructions: each holds it with a part of its price until the next one can
start. Counted by kind of instruction and part of the price, a path of many thousand instructions
becomes a short sum, which is evaluated for another chip without playing the run again. That is a
first-order estimate: with other coefficients another chain may be the longest, and what the HBM
stack or the clock of the array add to a price is taken as constant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from nki_sim.hardware import Hardware
from nki_sim.time.costs import ComputePrice, DmaPrice, MatmulPrice
from nki_sim.time.dependencies import VISIBLE, Graph
from nki_sim.time.playback import Schedule
from nki_sim.time.prepare import Prepared, queue_and_price

_MOVING: Final = ("engine_ns", "single_queue_ns")
_STACK_LIMITS: Final = (
    1.001  # a transfer that takes so many times its price waits for the HBM stack
)


_WAITS: Final = frozenset({"dma_first_byte_ns", "dma_done_ns", "semaphore_ns"})


@dataclass(slots=True)
class CriticalPath:
    """A critical path as a sum of priced parts.

    Attributes:
        prepared: what was played.
        total_ns: of the run.
        parts: how often the path holds a part of a price, by number of the kind in `prepared.kinds`
            and name of the part (a field of its price); where the next node waited for a
            share of it only, that share.
        waits: how often it holds a coefficient of the chip, by the field's name.
        limited: of `parts`, how often the HBM stack took longer, and for how long in all: faster
            engines do not help these.
        priced_ns: what all of it comes to on the chip of the run.
    """

    prepared: Prepared = field(repr=False)
    total_ns: float
    parts: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    waits: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    limited: dict[tuple[int, str], tuple[float, float]] = field(default_factory=dict)
    priced_ns: float = 0.0

    @classmethod
    def of(cls, prepared: Prepared, result: Schedule, chip: Hardware) -> CriticalPath:
        """Return the path of a run that was played on a chip."""
        path = cls(prepared, result.total_ns)
        for node, following, held_ns in _chain(result):
            names = list(_held(result, node, following))
            price = result.prices[result.pair[node]]
            sum_ns = sum(getattr(chip if name in _WAITS else price, name) for name in names)
            path._add(result, node, names, held_ns / sum_ns if sum_ns > held_ns else 1.0)
        path.priced_ns = path._sum_ns(chip)
        return path

    def total_on_ns(self, chip: Hardware) -> float:
        """Return the total time on another chip if the path stays the same, as an estimate."""
        return self.total_ns + self._sum_ns(chip) - self.priced_ns

    def _add(self, result: Schedule, node: int, names: list[str], share: float) -> None:
        """Add a share of some parts of a node's price."""
        kind = int(result.pair[node])
        for name in names:
            if name in _WAITS:
                self.waits[name] += share
                continue
            self.parts[kind, name] += share
            moving_ns = result.data_end[node] - result.data_start[node]
            if moving_ns > _STACK_LIMITS * getattr(result.prices[kind], name) and name in _MOVING:
                count, sum_ns = self.limited.get((kind, name), (0.0, 0.0))
                self.limited[kind, name] = count + share, sum_ns + share * moving_ns

    def _sum_ns(self, chip: Hardware) -> float:
        kinds = self.prepared.kinds
        total: float = sum(getattr(chip, name) * count for name, count in self.waits.items())
        prices = {kind: queue_and_price(*kinds[kind], chip)[1] for kind, _ in self.parts}
        for (kind, part), count in self.parts.items():
            price = getattr(prices[kind], part)
            limited, sum_ns = self.limited.get((kind, part), (0.0, 0.0))
            total += (count - limited) * price + max(limited * price, sum_ns)
        return total


def _chain(result: Schedule) -> Iterator[tuple[int, int, float]]:
    """Yield the nodes of the critical path from its end: each, who waited for it, for how long."""
    if not result.visible:
        return
    node, following = int(np.argmax(np.array(result.visible))), -1
    until = result.visible[node]
    while node >= 0:
        since = min(until, result.path_start[node])
        yield node, following, until - since
        node, following, until = result.cause[node], node, since


def _held(result: Schedule, node: int, following: int) -> Iterator[str]:
    """Yield the parts of its price with which a node keeps the next one of the path waiting."""
    graph = result.graph
    price = result.prices[result.pair[node]]
    link = VISIBLE if following < 0 else _link(graph, node, following)
    if isinstance(price, DmaPrice):
        yield from _held_by_transfer(result, node, following, price)
        return
    if isinstance(price, MatmulPrice):
        yield "stream_ns"
        if link == VISIBLE:
            yield "drain_ns"
    elif isinstance(price, ComputePrice):
        yield "latency_ns" if link == VISIBLE else "occupancy_ns"
    else:
        yield "duration_ns"
    if link is not None and following >= 0 and graph.queue[node] != graph.queue[following]:
        yield "semaphore_ns"


def _held_by_transfer(
    result: Schedule, node: int, following: int, price: DmaPrice
) -> Iterator[str]:
    """Yield the same of a data movement: its trigger alone, or its bytes and what is around."""
    waits_for_data = following < 0 or _link(result.graph, node, following) is not None
    waits_for_engines = result.path_start[following] > result.start[following]
    if not waits_for_data and not waits_for_engines:
        yield "generator_ns"
        return
    if result.path_start[node] == result.start[node]:
        yield "dma_first_byte_ns"
        yield "extra_ns"
    moving_ns = result.data_end[node] - result.data_start[node]
    is_single = abs(moving_ns - price.single_queue_ns) < abs(moving_ns - price.engine_ns)
    yield "single_queue_ns" if is_single else "engine_ns"
    if waits_for_data:
        yield "dma_done_ns"


def _link(graph: Graph, node: int, following: int) -> int | None:
    """Return what an edge from a node to another waits for, None if there is no edge."""
    for edge in graph.targets[graph.first[node] : graph.first[node + 1]]:
        if edge >> 1 == following:
            return int(edge & 1)
    return None
