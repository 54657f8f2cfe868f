"""How long work takes on this GPU: between CUDA events, the L2 cache overwritten before."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

_FLUSHED_BYTES = 256 << 20


class Spread(NamedTuple):
    """Times of repeats, in ms.

    Attributes:
        median: of all.
        low: a tenth of the repeats was faster.
        high: a tenth was slower.
    """

    median: float
    low: float
    high: float

    def divided(self, count: int) -> "Spread":
        """Return the times of one of `count` equal parts."""
        return Spread(*(each / count for each in self))


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a run as a CUDA graph: the host's time does not count."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def clock(run: Callable[[], object], repeats: int) -> Spread:
    """Return the times of a run, after two that do not count.

    Args:
        run: that queues work.
        repeats: that count.
    """
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    events = []
    for _ in range(repeats + 2):  # without waiting, so that the device never waits for the host
        flushed.zero_()
        start, end = _event(), _event()
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return spread([float(start.elapsed_time(end)) for start, end in events[2:]])


def spread(times: list[float]) -> Spread:
    """Return median and spread of times in ms, at least one."""
    times, rest = sorted(times), len(times) // 10
    return Spread(statistics.median(times), times[rest], times[len(times) - 1 - rest])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
