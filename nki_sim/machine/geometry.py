"""Where a view is: partitions, bytes, runs, and its memory range in the trace."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nki_sim.dtypes import DType
from nki_sim.errors import IllegalOperand, OutOfBounds
from nki_sim.machine.memory import Allocation, Box, Walk
from nki_sim.trace import HBM, MemoryRange


class Profile(NamedTuple):
    """What the price of an instruction may depend on: one per distinct kind of view."""

    space: int
    dtype: DType
    partitions: int
    elements: int
    contiguous: bool
    wide_stride: bool


_PROFILES: dict[Profile, Profile] = {}
_GEOMETRIES: dict[tuple[Any, ...], Geometry] = {}
_WIDE_BYTES = 16  # between elements
_MAX_GEOMETRIES = 1 << 17  # about 100 MB; views that are still in use keep theirs


def find_geometry(
    alloc: Allocation,
    dtype: DType,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    label: str,
) -> Geometry:
    """Return the geometry of a view; equal views of equal allocations share it.

    Raises:
        OutOfBounds: the view leaves its tensor, or on chip its partition.
        IllegalOperand: on chip, the first stride is not one partition.
    """
    key = (alloc.space, alloc.rows, alloc.pitch, shape, strides, offset, dtype)
    found = _GEOMETRIES.get(key)
    if found is None:
        found = Geometry(alloc, dtype, shape, strides, offset, label)
        if len(_GEOMETRIES) >= _MAX_GEOMETRIES:
            _GEOMETRIES.clear()
        _GEOMETRIES[key] = found
    return found


class Geometry:
    """Where a view is: partitions and bytes, and whether it touches all bytes in between.

    Attributes:
        box: rows and bytes of the grid of its allocation.
        walk: the byte walk.
        start, end: first byte and one past the last byte, in flat numbering.
        run: elements of a contiguous piece, which on chip ends with the partition.
        partitions, elements: on chip, elements per partition; in HBM one "partition".
        free_dims: dimensions of the pattern inside a partition, neighbours joined (0 in HBM).
        start_partition: first partition.
        engines_reach: set once an engine's operand was found to keep all rules of place and shape.
        profile: interned summary for the cost of instructions.
    """

    __slots__ = (
        "box",
        "elements",
        "end",
        "engines_reach",
        "free_dims",
        "partitions",
        "profile",
        "run",
        "start",
        "start_partition",
        "walk",
    )

    def __init__(
        self,
        alloc: Allocation,
        dtype: DType,
        shape: tuple[int, ...],
        element_strides: tuple[int, ...],
        offset: int,
        label: str,
    ) -> None:
        self.engines_reach = False
        itemsize = dtype.itemsize
        strides = tuple([stride * itemsize for stride in element_strides])
        start = offset * itemsize
        size = math.prod(shape)
        self.walk = Walk(start, shape, strides, itemsize)
        self.start = start
        self.end = end = _end(self.walk)
        pitch = alloc.pitch
        if start < 0 or end > alloc.size_bytes or size == 0:
            raise OutOfBounds(
                label,
                f"a non-empty view inside the {alloc.size_bytes} bytes of {describe(alloc)}",
                f"bytes {start} to {end} for shape {list(shape)}, strides {list(element_strides)}",
            )
        if alloc.space == HBM:
            self.partitions = 1
            self.free_dims = 0
            self.elements = size
            self.start_partition = 0
            self.box = _hbm_box(start, end, shape, strides, itemsize, pitch)
        else:
            self.partitions = shape[0]
            self.free_dims = joined_dims(shape[1:], strides[1:])
            self.elements = size // shape[0]
            self.start_partition = start // pitch
            self.box = self._chip_box(alloc, label, shape, strides, itemsize, pitch)
        self.run = contiguous_runs(self.walk, 0 if alloc.space == HBM else 1)[0] // itemsize
        inner = [(c, s) for c, s in zip(shape, strides, strict=True) if c > 1]
        contiguous = (
            not inner
            or inner[-1][1] == itemsize
            or (alloc.space != HBM and len(inner) == 1 and shape[0] > 1)
        )
        wide = not contiguous and abs(inner[-1][1]) > _WIDE_BYTES
        profile = Profile(alloc.space, dtype, self.partitions, self.elements, contiguous, wide)
        self.profile = _PROFILES.setdefault(profile, profile)

    def _chip_box(
        self,
        alloc: Allocation,
        label: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        item: int,
        pitch: int,
    ) -> Box:
        if shape[0] > 1 and strides[0] != pitch:
            raise IllegalOperand(
                label,
                f"a first stride of one partition ({pitch // item} elements)",
                f"{strides[0] // item}",
            )
        first = self.start % pitch
        last = first + item
        touched = item
        dense_span = item
        for count, stride in zip(shape[1:], strides[1:], strict=True):
            last += (count - 1) * stride
            if count > 1 and stride:
                touched *= count
                dense_span += (count - 1) * stride
        if last > pitch:
            raise OutOfBounds(
                label,
                f"a pattern inside one partition ({pitch} bytes) of {describe(alloc)}",
                f"bytes {first} to {last} of the partition, shape {list(shape)}",
            )
        row = self.start_partition
        return Box(row, row + shape[0], first, last, touched == dense_span)


def joined_dims(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Count the dimensions of a pattern; neighbours that continue each other are one."""
    dims = 0
    outer = 0  # stride of the dimension before
    for count, stride in zip(shape, strides, strict=True):
        if count > 1:
            dims += dims == 0 or outer != stride * count
            outer = stride
    return dims


def _hbm_box(
    start: int, end: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int, pitch: int
) -> Box:
    """Rows by bytes of an HBM walk; not dense where it does not fit that form."""
    row, first = divmod(start, pitch)
    rows_span = 1
    rows_touched = 1
    last = first + item
    touched = item
    for count, stride in zip(shape, strides, strict=True):
        if count == 1 or stride == 0:
            continue
        if stride % pitch == 0:
            rows_span += (count - 1) * (stride // pitch)
            rows_touched *= count
        else:
            last += (count - 1) * stride
            touched *= count
    if last <= pitch:
        dense = rows_span == rows_touched and touched == last - first
        return Box(row, row + rows_span, first, last, dense)
    flat = first == 0 and end % pitch == 0
    moves = zip(shape, strides, strict=True)
    total = item * math.prod(count for count, stride in moves if stride)
    return Box(row, -(-end // pitch), 0, pitch, flat and total == end - start)


def memory_range(alloc: Allocation, geometry: Geometry) -> MemoryRange:
    """Translate a view's geometry for the trace."""
    box = geometry.box
    runs = contiguous_runs(geometry.walk, skip=0 if alloc.space == HBM else 1)
    if alloc.space == HBM:
        area, is_dense = (0, 1, geometry.start, geometry.end), not runs[1]
    else:
        area, is_dense = box[:4], box.dense
    return MemoryRange(alloc.trace_id, *area, *(() if is_dense else runs))


def contiguous_runs(walk: Walk, skip: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the bytes of a contiguous run and the (stride, count) pairs around it."""
    run = walk.itemsize
    dims: list[tuple[int, int]] = []
    pairs = list(zip(walk.strides, walk.shape, strict=True))[skip:]
    for stride, count in reversed(pairs):
        if count == 1 or stride == 0:
            continue
        if not dims and stride == run:
            run *= count
        else:
            dims.insert(0, (stride, count))
    return run, tuple(dims)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides in elements."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def describe(alloc: Allocation) -> str:
    """Return name, memory, shape and type of an allocation, for messages."""
    name = alloc.name or "a tensor"
    return f"{name} ({alloc.region.name}, shape {list(alloc.shape)}, {alloc.dtype})"


def join_axes(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """Return size and stride of axes seen as one, or None if they are not side by side."""
    size = 1
    stride: int | None = None
    expected = 0
    for count, step in zip(reversed(shape), reversed(strides), strict=True):
        if count == 1:
            continue
        if stride is None:
            stride = step
        elif step != expected:
            return None
        expected = step * count
        size *= count
    return size, 1 if stride is None else stride


def reshape_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], new_shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the strides of a reshape without copy, or None if there are none."""
    old = [(c, s) for c, s in zip(shape, strides, strict=True) if c != 1]
    result = [1] * len(new_shape)
    position = 0
    k = 0
    while k < len(new_shape):
        if new_shape[k] == 1:
            k += 1
            continue
        first = k
        wanted = new_shape[k]
        have_first = position
        if position >= len(old):
            return None
        have = old[position][0]
        while wanted != have:
            if wanted < have:
                k += 1
                wanted *= new_shape[k]
            else:
                position += 1
                if position >= len(old):
                    return None
                have *= old[position][0]
        joined = join_axes(
            [c for c, _ in old[have_first : position + 1]],
            [s for _, s in old[have_first : position + 1]],
        )
        if joined is None:
            return None
        stride = joined[1]
        for axis in range(k, first - 1, -1):
            result[axis] = stride
            stride *= new_shape[axis]
        position += 1
        k += 1
    outer = 1
    for axis in range(len(new_shape) - 1, -1, -1):
        if new_shape[axis] == 1:
            result[axis] = outer
        else:
            outer = result[axis] * new_shape[axis]
    return tuple(result)


@functools.lru_cache(maxsize=4096)
def share_bytes(one: Walk, other: Walk) -> bool:
    """Say whether two walks over one allocation have a byte in common."""
    low, high = min(one.offset, other.offset), max(_end(one), _end(other))
    marks = np.zeros(high - low, np.bool_)
    _marked(marks, one, low)[...] = True
    return bool(_marked(marks, other, low).any())


def _end(walk: Walk) -> int:
    """Return one past the last byte of a walk."""
    steps = zip(walk.shape, walk.strides, strict=True)
    return walk.offset + walk.itemsize + sum((size - 1) * stride for size, stride in steps)


def _marked(marks: Any, walk: Walk, low: int) -> Any:
    """Return the entries of a walk among marks of the bytes from `low` on."""
    shape, strides = (*walk.shape, walk.itemsize), (*walk.strides, 1)
    return np.ndarray(shape, np.bool_, marks, walk.offset - low, strides)
