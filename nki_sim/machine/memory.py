"""Memory regions, allocations, and the record of which bytes hold a defined value.

An allocation has its own bytes. On chip it is a grid of partitions by `pitch` bytes, in HBM a grid
of rows of the tensor's last axis by `pitch` bytes; both are numbered as one flat range, row after
row. Tensors that a kernel places on the same address keep separate bytes: writing one makes the
overlapped bytes of the others undefined, so that reading them afterwards is an error
(`OverlapError`) instead of a silent reuse.

What is not modelled: the choice of addresses for tensors without one; the timeline places those.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nki_sim.dtypes import DType
from nki_sim.trace import HBM, PSUM, SBUF

_Mask = NDArray[np.bool_]


class MemoryRegion(Enum):
    """Where a tensor lives."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


_REGION_SPACE: Final = {
    MemoryRegion.sbuf: SBUF,
    MemoryRegion.psum: PSUM,
    MemoryRegion.private_hbm: HBM,
    MemoryRegion.shared_hbm: HBM,
}
_MAX_BOXES: Final = 12
UNKNOWN, CONSTANT, EXACT = range(3)
# In `indices` mode, float tensors above this many elements hold no values unless they come from
# integers; smaller inputs are followed exactly, so that routing inside a kernel works.
SMALL_ELEMENTS: Final = 128 * 128
# Host memory of dropped on-chip tensors, by size: allocating it anew costs a page fault per 4 KiB.
_POOL: dict[int, list[NDArray[np.uint8]]] = {}
_POOL_DEPTH: Final = 8
_POOL_MIN_BYTES: Final = 32 * 1024


class Box(NamedTuple):
    """The rows and bytes of a grid that an access touches; `dense` if it touches all of them."""

    row_start: int
    row_end: int
    byte_start: int
    byte_end: int
    dense: bool


def meet(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Say whether two boxes, given with or without `dense`, have a byte in common."""
    r0, r1, b0, b1 = one[:4]
    return bool(r0 < other[1] and other[0] < r1 and b0 < other[3] and other[2] < b1)


class Walk(NamedTuple):
    """How a view walks its allocation: byte offset, shape, byte strides, bytes of one element."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


class Origin(NamedTuple):
    """Where unwritten memory was first read: instruction, operands, "file:line"."""

    op: str
    operands: str
    location: str

    def __str__(self) -> str:
        return f"{self.op} at {self.location}" if self.op else self.location


class Coverage:
    """A set of bytes of one allocation: a few boxes, or a mask once boxes do not suffice.

    Args:
        rows: rows of the grid.
        pitch: bytes of a row.
        unit: bytes that one mask entry stands for; shrinks when a finer access comes.
    """

    __slots__ = ("_boxes", "_mask", "_unit", "full", "pitch", "rows")

    def __init__(self, rows: int, pitch: int, unit: int, full: bool = False) -> None:
        self.rows = rows
        self.pitch = pitch
        self.full = full
        self._unit = unit
        self._boxes: list[tuple[int, int, int, int]] = []
        self._mask: _Mask | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing was ever added."""
        return not self.full and self._mask is None and not self._boxes

    def covers(self, box: Box, walk: Walk) -> bool:
        """Return whether every byte of an access is in the set."""
        if self.full:
            return True
        if self._mask is None:
            if any(_contains(outer, box) for outer in self._boxes):
                return True
            if not any(meet(near, box) for near in self._boxes):
                return False
        return bool(self.mask_of(walk).all())

    def touches(self, box: Box, walk: Walk) -> bool:
        """Return whether some byte of an access is in the set."""
        if self.full:
            return True
        if self._mask is None:
            is_near = any(meet(near, box) for near in self._boxes)
            if not is_near or box.dense:
                return is_near
        return bool(self.mask_of(walk).any())

    def add(self, box: Box, walk: Walk) -> None:
        """Put all bytes of an access in the set."""
        if self.full:
            return
        if self._mask is None and box[4]:
            self._add_box(box[0], box[1], box[2], box[3])
        else:
            self.mask_of(walk)[...] = True
            if box[4] and box[1] == self.rows and box[3] == self.pitch:
                self._collapse()

    def add_where(self, walk: Walk, chosen: _Mask) -> None:
        """Put the chosen elements of an access in the set; `chosen` has the shape of the walk."""
        if not self.full:
            mask = self.mask_of(walk)
            mask |= _widen(chosen, mask)

    def remove(self, walk: Walk, chosen: _Mask | None = None) -> None:
        """Take the (chosen) elements of an access out of the set."""
        mask = self.mask_of(walk)
        if chosen is None:
            mask[...] = False
        else:
            mask &= ~_widen(chosen, mask)

    def remove_box(self, row_start: int, row_end: int, byte_start: int, byte_end: int) -> None:
        """Take whole bytes of a row range out of the set."""
        grid = self._materialise().reshape(self.rows, -1)
        grid[row_start:row_end, byte_start // self._unit : -(-byte_end // self._unit)] = False

    def elements_of(self, walk: Walk) -> _Mask:
        """Return, for each element of an access, whether all its bytes are in the set (a copy)."""
        if self.full:
            return np.ones(walk.shape, dtype=np.bool_)
        mask = self.mask_of(walk)
        return np.asarray(mask.all(axis=-1)) if mask.ndim > len(walk.shape) else mask.copy()

    def mask_of(self, walk: Walk) -> _Mask:
        """Return the writable mask entries of an access, with a last axis if elements need several.

        After this call the set is kept as a mask.
        """
        offset, shape, strides, itemsize = walk
        grain = itemsize
        for value in (offset, *strides):
            while value % grain:
                grain //= 2
        if self._mask is not None and self._unit > grain:
            self._mask = np.repeat(self._mask, self._unit // grain)
            self._unit = grain
        elif self._mask is None and self._unit > grain:
            self._unit = grain
        mask = self._materialise()
        unit = self._unit
        if itemsize > unit:
            shape = (*shape, itemsize // unit)
            strides = (*strides, unit)
        return np.ndarray(
            shape, np.bool_, mask, offset // unit, tuple(stride // unit for stride in strides)
        )

    def _materialise(self) -> _Mask:
        if self._mask is None:
            self._mask = np.full(self.rows * self.pitch // self._unit, self.full, dtype=np.bool_)
            grid = self._mask.reshape(self.rows, -1)
            for r0, r1, b0, b1 in self._boxes:
                grid[r0:r1, b0 // self._unit : b1 // self._unit] = True
            self._boxes = []
            self.full = False
        return self._mask

    def _collapse(self) -> None:
        if self._mask is not None and bool(self._mask.all()):
            self._mask = None
            self.full = True

    def _add_box(self, r0: int, r1: int, b0: int, b1: int) -> None:
        """Add a dense box, joining it with a neighbour where the union is a box again."""
        boxes = self._boxes
        for index in range(len(boxes) - 1, -1, -1):
            s0, s1, c0, c1 = boxes[index]
            if _contains(boxes[index], (r0, r1, b0, b1)):
                return
            if (s0 == r0 and s1 == r1 and b0 <= c1 and c0 <= b1) or (
                c0 == b0 and c1 == b1 and r0 <= s1 and s0 <= r1
            ):
                r0, r1, b0, b1 = min(r0, s0), max(r1, s1), min(b0, c0), max(b1, c1)
                del boxes[index]
        unit = self._unit
        if b0 % unit or b1 % unit:
            self._unit = 1
        if r0 == 0 and b0 == 0 and r1 == self.rows and b1 == self.pitch:
            self.full = True
            self._boxes = []
            return
        boxes.append((r0, r1, b0, b1))
        if len(boxes) > _MAX_BOXES:
            self._materialise()


def _contains(outer: tuple[int, ...], inner: tuple[int, ...]) -> bool:
    r0, r1, b0, b1 = outer
    return r0 <= inner[0] and inner[1] <= r1 and b0 <= inner[2] and inner[3] <= b1


def _widen(chosen: _Mask, mask: _Mask) -> _Mask:
    """Give a per-element mask the trailing byte axis of `mask` if that has one."""
    return chosen[..., None] if mask.ndim > chosen.ndim else chosen


class _Owner(Protocol):
    """Whose memory an allocation takes: a core, as far as the memory need know it."""

    loop_depth: int

    def uncount_sbuf(self, alloc: Allocation) -> None:
        """Give back the SBUF bytes of a counted tensor that Python has dropped."""


class Allocation:
    """The bytes of one tensor and what is known about them.

    Attributes:
        birth: its number among the tensors and registers of its core; -1 where cores share it.
        is_input: whether it came from the caller and nobody has written it.
        original: bytes of an input from before the first write.
        space: SBUF, PSUM or HBM of `trace.py`.
        region: the language's name of the memory.
        rows, pitch: the grid; on chip partitions and bytes per partition.
        data: flat uint8 array of rows * pitch bytes, or None while nothing has been stored
            (`indices` mode keeps most float tensors that way).
        known: UNKNOWN for results of skipped arithmetic, CONSTANT for values that memset or
            arithmetic on such made, EXACT for what comes from integers. Only `indices` mode cares.
        pending: a memset that is carried out when somebody looks at the data.
        defined: bytes that hold a value somebody wrote.
        accumulated: PSUM bytes that a matmul wrote since the allocation.
        unread: products in PSUM that nothing has read, each with its source line and operands.
        trace_id: id of the storage in the trace.
        address: (partition, byte) given by the kernel, or None.
        poison: instructions that wrote undefined values here; `poisoned` says where.
        owner: the core that counts its SBUF bytes from the first use.
        shared_log: the accesses that the race detector looks at, or None.
    """

    __slots__ = (
        "__weakref__",
        "_data",
        "accumulated",
        "address",
        "aliases",
        "birth",
        "clobbered_by",
        "counted",
        "defined",
        "dtype",
        "is_input",
        "known",
        "line",
        "loop_depth",
        "name",
        "original",
        "owner",
        "pending",
        "pitch",
        "poison",
        "poisoned",
        "region",
        "rows",
        "shape",
        "shared_log",
        "space",
        "trace_id",
        "unread",
        "views",
    )

    def __init__(
        self,
        owner: _Owner,
        region: MemoryRegion,
        shape: tuple[int, ...],
        dtype: DType,
        name: str,
        address: tuple[int, int] | None = None,
    ) -> None:
        itemsize = dtype.itemsize
        self.birth = -1
        self.is_input = False
        self.original: NDArray[np.uint8] | None = None
        self.owner = owner
        self.region = region
        self.space = space = _REGION_SPACE[region]
        self.shape = shape
        self.dtype = dtype
        self.name = name
        self.address = address
        count = math.prod(shape)
        if space == HBM:
            self.pitch = max(1, shape[-1] * itemsize)
        else:
            self.pitch = max(1, count // max(1, shape[0]) * itemsize)
        self.rows = count * itemsize // self.pitch
        self._data: NDArray[np.uint8] | None = None
        self.known = CONSTANT
        self.pending: Callable[[], None] | None = None
        self.defined = Coverage(self.rows, self.pitch, itemsize)
        self.accumulated: Coverage | None = None
        self.unread: dict[Box, Any] = {}
        self.poison: list[Origin] = []
        self.poisoned: Coverage | None = None
        self.views: dict[Any, Any] = {}
        self.trace_id = -1
        self.line = 0
        self.loop_depth = owner.loop_depth
        self.counted = False
        self.clobbered_by: str = ""
        self.aliases: list[Any] = []
        self.shared_log: Any = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.pitch // self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.rows * self.pitch

    @property
    def has_data(self) -> bool:
        """Whether bytes have been allocated on the host."""
        return self._data is not None

    @property
    def data(self) -> NDArray[np.uint8]:
        """The bytes; allocated on first use, not initialised."""
        if self._data is None:
            size = self.rows * self.pitch
            free = _POOL.get(size)
            self._data = free.pop() if free else np.empty(size, dtype=np.uint8)
            if self.pending is not None:
                fill, self.pending = self.pending, None
                fill()
        return self._data

    def adopt(self, array: NDArray[np.uint8]) -> None:
        """Use the given flat bytes as storage; kernel inputs are shared with the caller's copy."""
        self._data = array
        self.defined.full = True

    def __del__(self) -> None:
        if self.counted:
            self.owner.uncount_sbuf(self)
        data = self._data
        if data is not None and self.space != HBM and data.size >= _POOL_MIN_BYTES:
            self._data = None
            # Nobody else holds the bytes: this frame and the argument of getrefcount.
            if sys.getrefcount(data) == 2:
                free = _POOL.setdefault(data.size, [])
                if len(free) < _POOL_DEPTH:
                    free.append(data)
