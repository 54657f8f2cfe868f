"""The record of a run: what every instruction read, wrote and was, in program order.

Running a kernel appends to a `Trace`; the timeline, the race detector and the liveness checks read
nothing else. A record is a fixed row of small integers in a flat buffer plus the ids of its memory
ranges. Everything that repeats (operation names, source lines, memory ranges, instruction facts) is
interned, so one more matmul on known tiles costs about a hundred bytes, and a cost model can price
each distinct fact once.

Conventions the readers rely on:

- `Trace.emit` is called in the program order of each core; the calls of several cores interleave
  freely.
- Byte positions in a `MemoryRange` are relative to its storage. A storage with an `address` is
  pinned there; one without is placed by whoever reads the trace.
- reads of a matmul: stationary first, then moving. writes: destination first, then accumulators.
- Waiting for another core is a record of its own with `SyncFacts`; all partners share its `key`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

SBUF: Final = 0
PSUM: Final = 1
HBM: Final = 2
SPACE_NAMES: Final = ("sbuf", "psum", "hbm")

TENSOR: Final = 0
VECTOR: Final = 1
SCALAR: Final = 2
GPSIMD: Final = 3
SYNC: Final = 4
DMA: Final = 5
ALL: Final = 6
ENGINE_NAMES: Final = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma", "all")


class Storage(NamedTuple):
    """One allocation.

    A `core` of -1 marks memory that every core of the rank can reach. On chip `size_bytes` counts
    the bytes of one partition, in HBM those of the whole tensor. `address` is (first partition,
    first byte) of a tensor that the kernel placed itself.
    """

    space: int
    core: int
    rank: int
    partitions: int
    size_bytes: int
    address: tuple[int, int] | None
    name: str


class MemoryRange(NamedTuple):
    """A part of one storage that an instruction touches.

    On chip: partitions [partition_start, partition_end), in each of them bytes [byte_start,
    byte_end). In HBM the partitions are 0 and 1. Where not all bytes in between are touched, `dims`
    lists the (stride in bytes, count) pairs of the walk, outermost first, which repeats runs of
    `run_bytes` contiguous bytes from `byte_start`; an empty `dims` means that the range is dense.
    `rows` serves gathers and scatters: the native int64 byte positions at which the walk starts,
    instead of `byte_start`.
    """

    storage: int
    partition_start: int
    partition_end: int
    byte_start: int
    byte_end: int
    run_bytes: int = 0
    dims: tuple[tuple[int, int], ...] = ()
    rows: bytes = b""

    def starts(self) -> NDArray[np.int64]:
        """Return the byte position of every contiguous run of the range, in walk order."""
        if self.rows:
            starts = np.frombuffer(self.rows, dtype=np.int64)
        else:
            starts = np.array([self.byte_start], dtype=np.int64)
        for stride, count in self.dims:
            steps = np.arange(count, dtype=np.int64) * stride
            starts = (starts[:, None] + steps[None, :]).reshape(-1)
        return starts


class ComputeFacts(NamedTuple):
    """What the price of a Vector, Scalar or GpSimd instruction depends on.

    `elements` is the number per partition of the widest tensor operand. `dtypes`, `spaces` and
    `contiguous` (innermost stride of one element) describe the tensor operands, destination first,
    (P, 1) operands left out. `function` is the activation function or the ALU operations. `extent`
    is whatever else the instruction scales with (k of topk, indices of a gather);
    `reads_accumulator` is true where it stores an accumulator register; `is_dynamic` where a number
    known at run time only is in the address of an operand; `wide_stride` where the elements of one
    are more than 16 bytes apart.
    """

    elements: int
    partitions: int
    dtypes: tuple[str, ...]
    spaces: tuple[int, ...]
    contiguous: tuple[bool, ...] = ()
    function: str = ""
    reads_accumulator: bool = False
    extent: int = 0
    is_dynamic: bool = False
    wide_stride: bool = False


class MatmulFacts(NamedTuple):
    """What the price of a Tensor instruction depends on: K x M stationary, K x N moving.

    `tile` is (first row, first column, rows, columns) of the part of the array it runs on; the
    empty tuple is the whole. `onezero` counts the operands flagged as holding only ones and zeros;
    `accumulates` is true where it adds to what PSUM holds.
    """

    k: int
    m: int
    n: int
    stationary_dtype: str
    moving_dtype: str
    dst_dtype: str
    is_transpose: bool = False
    perf_mode: str = "none"
    tile: tuple[int, ...] = ()
    onezero: int = 0
    registers: int = 0
    accumulates: bool = False


class DmaFacts(NamedTuple):
    """What the price of a data movement depends on.

    `moved_bytes` is counted on the larger side, sources of a sum added up. `rows` is the number of
    rows that spread over the DMA engines: the partitions on chip, or the outermost rows between HBM
    tensors. `runs` is the number of pieces contiguous on both sides (descriptors); `hbm_runs` what
    is left of them when neighbours in HBM merge. `dge` is none, hwdge, swdge or unknown; `queue`
    the engine that triggers it (sync, scalar, gpsimd) or the empty string. `indirect_rows` counts
    the indices of a gather or scatter, `skipped_rows` those that were out of range; their bytes and
    runs are not in the other counts. `transpose` is empty, "2-byte" or "4-byte" (the element);
    `sources` is above one for a sum.
    """

    moved_bytes: int
    rows: int
    runs: int
    hbm_runs: int
    src_space: int
    dst_space: int
    hbm_read_bytes: int
    hbm_write_bytes: int
    element_bytes: int = 2
    dge: str = "unknown"
    queue: str = ""
    indirect_rows: int = 0
    skipped_rows: int = 0
    transpose: str = ""
    sources: int = 1
    registers: int = 0


class SyncFacts(NamedTuple):
    """A meeting of cores or ranks.

    `kind` is core_barrier, sendrecv or the name of a collective. `key` is equal for the records of
    all partners and differs from every other meeting; `partners` is how many records carry it.
    `moved_bytes` is what one partner sends, in a collective one rank; `partitions` how many
    partitions it spreads over; `path` is dma, gpsimd_dma or the empty string; `ranks` the size of
    the replica group.
    """

    kind: str
    key: tuple[object, ...]
    partners: int
    moved_bytes: int = 0
    partitions: int = 128
    path: str = ""
    ranks: int = 1


class ControlFacts(NamedTuple):
    """Registers and dynamic loops.

    `kind`: register_load, register_store, register_move, loop_begin, loop_iteration (start of each
    iteration), loop_end. `space` is the memory that a load or store touches, -1 for none.
    """

    kind: str
    space: int = -1


Facts = ComputeFacts | MatmulFacts | DmaFacts | SyncFacts | ControlFacts


class Instruction(NamedTuple):
    """One record, unpacked for reading; `Trace` keeps it as integers."""

    position: int
    op: str
    engine: int
    core: int
    rank: int
    file: str
    line: int
    facts: Facts
    loop_depth: int
    reads: tuple[MemoryRange, ...]
    writes: tuple[MemoryRange, ...]
    after: tuple[int, ...]
    name: str


# Columns of the fixed part of a record.
OP: Final = 0
ENGINE: Final = 1
CORE: Final = 2
RANK: Final = 3
LINE: Final = 4
FACTS: Final = 5
LOOP_DEPTH: Final = 6
NUM_READS: Final = 7
NUM_WRITES: Final = 8
_NUM_COLUMNS: Final = 9


Callers = tuple[tuple[str, int], ...]
"""File and line of calls that lead to a line, the nearest first."""


_T = TypeVar("_T")


def _id_of(known: dict[_T, int], kept: list[_T], item: _T) -> int:
    """Return the place of an item in a list without repetitions, to which a new one is added."""
    found = known.get(item)
    if found is None:
        found = known[item] = len(kept)
        kept.append(item)
    return found


class Trace:
    """The instructions of one launch, all cores and ranks.

    Append with `emit`; read one record with `trace[i]`, or all of them as integer arrays with
    `columns()` and `operand_ids()`.
    """

    __slots__ = (
        "_callers_id",
        "_callers_of",
        "_facts_id",
        "_line_id",
        "_op_id",
        "_operands",
        "_range_id",
        "_rows",
        "after",
        "callers",
        "digests",
        "facts",
        "lines",
        "names",
        "ops",
        "ranges",
        "storages",
    )

    def __init__(self) -> None:
        self._rows = array("i")
        self._operands = array("i")
        self._op_id: dict[str, int] = {}
        self._line_id: dict[tuple[str, int], int] = {}
        self._facts_id: dict[Facts, int] = {}
        self._range_id: dict[MemoryRange, int] = {}
        self.ops: list[str] = []
        self.lines: list[tuple[str, int]] = []
        self._callers_id: dict[Callers, int] = {(): 0}
        self._callers_of = array("i")
        self.callers: list[Callers] = [()]
        self.facts: list[Facts] = []
        self.ranges: list[MemoryRange] = []
        self.storages: list[Storage] = []
        self.after: dict[int, tuple[int, ...]] = {}
        self.names: dict[int, str] = {}
        self.digests: dict[int, int] = {}

    def add_storage(self, storage: Storage) -> int:
        """Register an allocation; return the id for its memory ranges."""
        self.storages.append(storage)
        return len(self.storages) - 1

    def range_id(self, memory: MemoryRange) -> int:
        """Return the id of a memory range, the same for equal ranges. Views may cache it."""
        return _id_of(self._range_id, self.ranges, memory)

    def facts_id(self, facts: Facts) -> int:
        """Return the id of an instruction's facts, the same for equal facts."""
        return _id_of(self._facts_id, self.facts, facts)

    def line_id(self, file: str, line: int) -> int:
        """Return the id of a source line."""
        return _id_of(self._line_id, self.lines, (sys.intern(file), line))

    def op_id(self, op: str) -> int:
        """Return the id of an operation name."""
        return _id_of(self._op_id, self.ops, sys.intern(op))

    def note_callers(self, index: int, callers: Callers) -> None:
        """Keep the calls that led to the line of an instruction, nearest first."""
        found = _id_of(self._callers_id, self.callers, callers)
        missing = index - len(self._callers_of)
        self._callers_of.extend((*(0,) * missing, found))

    def callers_of(self) -> NDArray[np.int64]:
        """Return for every instruction the position of its callers in `callers`; 0: not known."""
        found = np.zeros(len(self), np.int64)
        found[: len(self._callers_of)] = self._callers_of
        return found

    def emit(
        self,
        op: str,
        engine: int,
        facts: Facts,
        read_ids: tuple[int, ...],
        write_ids: tuple[int, ...],
        line: int,
        core: int = 0,
        rank: int = 0,
        loop_depth: int = 0,
    ) -> int:
        """Append one instruction; return its index.

        Args:
            op: operation name, as in nki.isa.
            engine: one of TENSOR .. ALL; DMA for every data movement, ALL for what stops the whole
                core.
            facts: what its price depends on.
            read_ids: ids of `range_id` for everything it reads, (P, 1) operands and indices
                included.
            write_ids: the same for what it writes.
            line: id of `line_id`.
            core: physical core within the rank.
            rank: rank of the collective group.
            loop_depth: how many dynamic loops enclose it.
        """
        rows = self._rows
        index = len(rows) // _NUM_COLUMNS
        op_id = self._op_id.get(op)
        facts_id = self._facts_id.get(facts)
        rows.extend(
            (
                self.op_id(op) if op_id is None else op_id,
                engine,
                core,
                rank,
                line,
                self.facts_id(facts) if facts_id is None else facts_id,
                loop_depth,
                len(read_ids),
                len(write_ids),
            )
        )
        self._operands.extend(read_ids)
        self._operands.extend(write_ids)
        return index

    def __len__(self) -> int:
        return len(self._rows) // _NUM_COLUMNS

    def row(self, index: int) -> Sequence[int]:
        """Return the fixed part of one record; OP to NUM_WRITES say what stands where."""
        return self._rows[index * _NUM_COLUMNS : (index + 1) * _NUM_COLUMNS]

    def columns(self) -> NDArray[np.int32]:
        """Return a copy of the fixed parts: [instructions, columns] int32."""
        return np.array(self._rows, dtype=np.int32).reshape(-1, _NUM_COLUMNS)

    def operand_ids(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the range ids of all operands, reads before writes, and each instruction's first
        position.

        The second array has one entry more than there are instructions.
        """
        counts = self.columns()[:, NUM_READS : NUM_WRITES + 1].sum(axis=1, dtype=np.int64)
        first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        return np.array(self._operands, dtype=np.int32), first

    def __iter__(self) -> Iterator[Instruction]:
        first = 0
        for index in range(len(self)):
            base = index * _NUM_COLUMNS
            yield self._unpack(index, first)
            first += self._rows[base + NUM_READS] + self._rows[base + NUM_WRITES]

    def __getitem__(self, index: int) -> Instruction:
        if not 0 <= index < len(self):
            raise IndexError(f"index={index}: the trace has {len(self)} instructions.")
        return self._unpack(index, int(self.operand_ids()[1][index]))

    def _unpack(self, index: int, first: int) -> Instruction:
        """Build the readable record whose operands start at position `first`."""
        row = self._rows[index * _NUM_COLUMNS : (index + 1) * _NUM_COLUMNS]
        middle = first + row[NUM_READS]
        reads = self._operands[first:middle]
        writes = self._operands[middle : middle + row[NUM_WRITES]]
        file, line = self.lines[row[LINE]]
        return Instruction(
            position=index,
            op=self.ops[row[OP]],
            engine=row[ENGINE],
            core=row[CORE],
            rank=row[RANK],
            file=file,
            line=line,
            facts=self.facts[row[FACTS]],
            loop_depth=row[LOOP_DEPTH],
            reads=tuple(self.ranges[i] for i in reads),
            writes=tuple(self.ranges[i] for i in writes),
            after=self.after.get(index, ()),
            name=self.names.get(index, ""),
        )
