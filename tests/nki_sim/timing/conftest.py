"""Traces written by hand: the timeline is tested without the simulator that records them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from nki_sim.trace import (
    DMA,
    HBM,
    PSUM,
    SBUF,
    TENSOR,
    VECTOR,
    ComputeFacts,
    DmaFacts,
    MatmulFacts,
    MemoryRange,
    Storage,
    Trace,
)

BYTES = {"float32": 4, "bfloat16": 2, "int32": 4}


@dataclass(frozen=True)
class Matrix:
    """A matrix in HBM."""

    storage: int
    rows: int
    columns: int
    dtype: str


@dataclass(frozen=True)
class Tile:
    """A tile on chip, or some of its columns."""

    storage: int
    partitions: int
    first: int
    columns: int
    dtype: str
    space: int

    def __getitem__(self, columns: slice) -> "Tile":
        width = columns.stop - columns.start
        return Tile(
            self.storage,
            self.partitions,
            self.first + columns.start,
            width,
            self.dtype,
            self.space,
        )


@dataclass
class TraceBuilder:
    """Emits instructions of one core; the names follow nki.isa."""

    trace: Trace = field(default_factory=Trace)
    core: int = 0
    rank: int = 0

    def hbm(self, rows: int, columns: int, dtype: str = "bfloat16", core: int = -1) -> Matrix:
        size = rows * columns * BYTES[dtype]
        storage = self.trace.add_storage(Storage(HBM, core, self.rank, 1, size, None, "hbm"))
        return Matrix(storage, rows, columns, dtype)

    def tile(
        self,
        columns: int,
        dtype: str = "bfloat16",
        space: int = SBUF,
        partitions: int = 128,
        address: tuple[int, int] | None = None,
    ) -> Tile:
        storage = self.trace.add_storage(
            Storage(
                space, self.core, self.rank, partitions, columns * BYTES[dtype], address, "tile"
            )
        )
        return Tile(storage, partitions, 0, columns, dtype, space)

    def psum(self, columns: int = 512, dtype: str = "float32") -> Tile:
        return self.tile(columns, dtype, PSUM)

    def id_of(self, tile: Tile) -> int:
        width = BYTES[tile.dtype]
        begin = tile.first * width
        return self.trace.range_id(
            MemoryRange(tile.storage, 0, tile.partitions, begin, begin + tile.columns * width)
        )

    def part_id(self, matrix: Matrix, rows: slice, columns: slice) -> int:
        width = BYTES[matrix.dtype]
        pitch = matrix.columns * width
        begin = rows.start * pitch + columns.start * width
        run = (columns.stop - columns.start) * width
        count = rows.stop - rows.start
        return self.trace.range_id(
            MemoryRange(
                matrix.storage,
                0,
                1,
                begin,
                begin + (count - 1) * pitch + run,
                run,
                ((pitch, count),),
            )
        )

    def load(
        self, dst: Tile, src: Matrix, rows: slice, columns: slice, line: int = 1, **facts: Any
    ) -> int:
        count = rows.stop - rows.start
        size = count * (columns.stop - columns.start) * BYTES[src.dtype]
        known = DmaFacts(size, count, count, count, HBM, SBUF, size, 0, BYTES[src.dtype], **facts)
        return self.emit(
            "dma_copy", DMA, known, [self.part_id(src, rows, columns)], [self.id_of(dst)], line
        )

    def store(
        self, dst: Matrix, rows: slice, columns: slice, src: Tile, line: int = 1, **facts: Any
    ) -> int:
        count = rows.stop - rows.start
        size = count * (columns.stop - columns.start) * BYTES[dst.dtype]
        known = DmaFacts(size, count, count, count, SBUF, HBM, 0, size, BYTES[dst.dtype], **facts)
        return self.emit(
            "dma_copy", DMA, known, [self.id_of(src)], [self.part_id(dst, rows, columns)], line
        )

    def matmul(
        self,
        dst: Tile,
        stationary: Tile,
        moving: Tile,
        line: int = 1,
        k: int = 128,
        tile: tuple[int, ...] = (),
        is_transpose: bool = False,
    ) -> int:
        facts = MatmulFacts(
            k,
            stationary.columns,
            moving.columns,
            stationary.dtype,
            moving.dtype,
            dst.dtype,
            is_transpose,
            "none",
            tile,
        )
        operands = [self.id_of(stationary), self.id_of(moving)]
        return self.emit("nc_matmul", TENSOR, facts, operands, [self.id_of(dst)], line)

    def compute(
        self,
        op: str,
        dst: Tile,
        *inputs: Tile,
        engine: int = VECTOR,
        function: str = "",
        line: int = 1,
        **facts: Any,
    ) -> int:
        tensors = (dst, *inputs)
        known = ComputeFacts(
            max(tensor.columns for tensor in tensors),
            dst.partitions,
            tuple(tensor.dtype for tensor in tensors),
            tuple(tensor.space for tensor in tensors),
            (True,) * len(tensors),
            function,
            **facts,
        )
        reads = [self.id_of(tensor) for tensor in inputs]
        return self.emit(op, engine, known, reads, [self.id_of(dst)], line)

    def emit(
        self, op: str, engine: int, facts: Any, reads: list[int], writes: list[int], line: int = 1
    ) -> int:
        return self.trace.emit(
            op,
            engine,
            facts,
            tuple(reads),
            tuple(writes),
            self.trace.line_id("kernel.py", line),
            self.core,
            self.rank,
        )


@pytest.fixture
def make_builder() -> Callable[..., TraceBuilder]:
    """Return the class, to build as many traces as a test needs."""
    return TraceBuilder


@pytest.fixture
def builder() -> TraceBuilder:
    return TraceBuilder()
