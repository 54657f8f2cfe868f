"""Decode in `bench gpu`, beside two floors: what its weights take to read.

`copy`: as many bytes at the speed of a copy of 1 GiB. `read`: a kernel that reads the chosen
experts' weights once and does nothing else, captured and timed as decode is. Each is timed alone
in a graph, where an empty launch counts too and the L2 cache is full of what was written before,
and as one of 16 layers in a graph, as a model decodes: four sets of weights in turn, more than
the cache holds.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lab.bench.gpu_clock import Spread, captured, clock
from lab.bench.gpu_peers import Inputs, Peer

SETS = 4  # of weights
LAYERS = (1, 16)  # in a graph
HEADER = (
    "shape",
    "T",
    "layers",
    "copy_us",
    "read_us",
    "of_copy",
    "ours_us",
    "low",
    "high",
    "of_copy",
    "of_read",
)
_COPIED_BYTES = 1 << 30


class DecodeTimes(NamedTuple):
    """Times of one layer, in ms.

    Attributes:
        layers: in the graph.
        copy: of as many bytes at the speed of a copy.
        read: of a kernel that does nothing else.
        ours: of decode.
    """

    layers: int
    copy: Spread
    read: Spread
    ours: Spread

    def columns(self) -> list[str]:
        """Return the numbers below HEADER, from `layers` on: times in us, and their ratios."""
        copy, read, (ours, low, high) = self.copy.median, self.read.median, self.ours
        us = [f"{1e3 * each:.1f}" for each in (copy, read, ours, low, high)]
        ratios = [f"{each:.2f}" for each in (read / copy, ours / copy, ours / read)]
        return [str(self.layers), us[0], us[1], ratios[0], *us[2:], *ratios[1:]]

    def record(self) -> dict[str, float]:
        """Return the same for programs."""
        copy, read, (ours, low, high) = self.copy.median, self.read.median, self.ours
        return {
            "layers": self.layers,
            "copy_ms": copy,
            "read_ms": read,
            "read_low_ms": self.read.low,
            "read_high_ms": self.read.high,
            "ours_ms": ours,
            "ours_low_ms": low,
            "ours_high_ms": high,
            "read_over_copy": read / copy,
            "ours_over_copy": ours / copy,
            "ours_over_read": ours / read,
        }


def decode_times(sets: Sequence[Peer], inputs: Inputs, repeats: int) -> Iterator[DecodeTimes]:
    """Measure the floors first, then decode, for each number of LAYERS.

    Args:
        sets: layers with weights of their own.
        inputs: of each of them.
        repeats: of each time.
    """
    from lab.bench.gpu_read import read_matrices

    chosen_E, out = torch.unique(inputs.index_TK), torch.zeros(1, device="cuda")
    copy = _copy_times(_bytes_read(sets[0], chosen_E), repeats)

    def read(number: int) -> None:
        first_EHI, down_EIH = (each.detach() for each in sets[number].parameters)
        read_matrices(chosen_E, first_EHI, down_EIH, out)

    def compute(number: int) -> object:
        return sets[number].bind(inputs).run()

    for layers in LAYERS:
        yield DecodeTimes(layers, copy, *(_times(run, layers, repeats) for run in (read, compute)))


def _times(run: Callable[[int], object], layers: int, repeats: int) -> Spread:
    """Return the times of a layer of a graph; `run` takes the number of its set of weights."""

    def run_all() -> None:
        for layer in range(layers):
            run(layer % SETS)

    with torch.no_grad():
        return clock(captured(run_all), 2 * repeats).divided(layers)


def _bytes_read(layer: Peer, chosen_E: Tensor) -> int:
    """Return the bytes of the chosen experts' weights."""
    return sum(each[0].nbytes for each in layer.parameters) * chosen_E.shape[0]


def _copy_times(size: int, repeats: int) -> Spread:
    """Return the times of reading some bytes at the speed of a copy, which also writes them."""
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = clock(lambda: target.copy_(source), repeats)
    return Spread(*(each * size / (2 * source.nbytes) for each in times))
