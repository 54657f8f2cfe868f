"""The enumerations of `nki.isa`; also importable as `nki.isa.constants`.

Values are those of the public stubs (NKI 0.6).
"""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any, Final


class engine(Enum):
    """The engines that an instruction can be sent to."""

    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    dma = 4
    sync = 6
    unknown = 0


class reduce_cmd(Enum):
    """What an instruction does with the accumulator registers of its engine."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who writes the descriptors of a DMA."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What a DMA does with an index that is out of range."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """Throughput modes of the matrix multiplication."""

    none = "none"
    double_row = "double_row"


@functools.total_ordering
class nc_version(Enum):
    """Generations of the NeuronCore, in order."""

    gen2 = 2
    gen3 = 3
    gen4 = 4

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < other.value)


class dma_engine(Enum):
    """Who moves the bytes of a sendrecv."""

    dma = 1
    gpsimd_dma = 2


tensor_engine: Final = engine.tensor
vector_engine: Final = engine.vector
scalar_engine: Final = engine.scalar
gpsimd_engine: Final = engine.gpsimd
unknown_engine: Final = engine.unknown

__all__ = [
    "dge_mode",
    "dma_engine",
    "engine",
    "gpsimd_engine",
    "matmul_perf_mode",
    "nc_version",
    "oob_mode",
    "reduce_cmd",
    "scalar_engine",
    "tensor_engine",
    "unknown_engine",
    "vector_engine",
]
