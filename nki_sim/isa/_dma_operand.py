"""One operand of a DMA: static patterns, scalar offsets, and rows chosen by index.

`Access` is an operand with its offsets read. A row is the unit of the range check: one index of a
vector offset, or one step over all but the last axis for a scalar offset. With `oob_mode.skip` rows
that are out of range are left out and the destination keeps what it had there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_sim import dtypes
from nki_sim import trace as tr
from nki_sim.constants import oob_mode as Oob
from nki_sim.dtypes import Array, DType
from nki_sim.errors import IllegalOperand, OutOfBounds
from nki_sim.machine import Core, NkiTensor
from nki_sim.machine.geometry import contiguous_runs
from nki_sim.machine.memory import Coverage, Walk, meet
from nki_sim.machine.numbers import watch_integers, watch_narrowing
from nki_sim.machine.tensor import read_index, read_indices
from nki_sim.machine.views import Dynamic


class Access:
    """One operand of a DMA, its dynamic offset resolved.

    Attributes:
        tensor: the view; static if `starts` is None.
        walk: the bytes of a static view, in the order in which elements are paired.
        starts: element positions at which the rows start, all rows; None for a static view.
        valid: which rows are in range; None means all.
        inner_shape, inner_strides: one row, in elements.
        indirect: whether a vector offset chose the rows.
        registers: dynamic offsets of the operand.
    """

    __slots__ = (
        "indirect",
        "inner_shape",
        "inner_strides",
        "registers",
        "starts",
        "tensor",
        "valid",
        "walk",
    )

    def __init__(self, tensor: NkiTensor, registers: int = 0) -> None:
        self.tensor = tensor
        self.walk: Walk | None = None
        self.starts: Any = None
        self.valid: Any = None
        self.inner_shape: tuple[int, ...] = ()
        self.inner_strides: tuple[int, ...] = ()
        self.indirect = False
        self.registers = registers
        if tensor._dynamic is None:
            self.walk = tensor.geometry.walk

    def reorder(self, axes: tuple[int, ...]) -> None:
        """Walk the axes of a static view in another order."""
        assert self.walk is not None
        offset, shape, strides, item = self.walk
        self.walk = Walk(
            offset, tuple([shape[k] for k in axes]), tuple([strides[k] for k in axes]), item
        )

    def array(self) -> Array:
        """Return the elements of a static view, in walking order."""
        walk = self.walk
        assert walk is not None
        tensor = self.tensor
        return np.ndarray(
            walk.shape, tensor.dtype.numpy, tensor._alloc.data, walk.offset, walk.strides
        )

    def cost_key(self) -> Any:
        """Return what the cost depends on."""
        if self.starts is None:
            geometry = self.tensor.geometry
            return geometry.profile, geometry.run, self.registers
        tensor = self.tensor
        place = tensor._alloc.space, tensor.shape, tensor.strides, tensor.dtype
        return (*place, self.indirect, self.registers)

    def whole(self) -> NkiTensor:
        """Return a static view that stands for the memory: the operand, or one of its elements."""
        if self.starts is None:
            return self.tensor
        return self.tensor._derive((1, 1), (1, 1), 0, static=True)

    @property
    def num_rows(self) -> int:
        """Rows, in range or not."""
        return len(self.starts)

    @property
    def num_skipped(self) -> int:
        """Rows out of range."""
        return 0 if self.valid is None else int((~self.valid).sum())

    def walk_of_row(self) -> Walk:
        """Return the bytes of one row, relative to its start."""
        item = self.tensor.dtype.itemsize
        return Walk(0, self.inner_shape, tuple(s * item for s in self.inner_strides), item)

    def byte_starts(self, valid: Any = None) -> Any:
        """Return the byte positions of the (valid) rows."""
        chosen = self.starts if valid is None else self.starts[valid]
        return chosen * self.tensor.dtype.itemsize

    def range_ids(self, trace: tr.Trace) -> tuple[int, ...]:
        """Return the memory range in the trace; none if every row is skipped."""
        if self.starts is None:
            return (self.tensor.range_id(trace),)
        starts = self.byte_starts(self.valid)
        if not len(starts):
            return ()
        walk = self.walk_of_row()
        span = walk.itemsize + sum(
            (c - 1) * s for c, s in zip(walk.shape, walk.strides, strict=True)
        )
        run, dims = contiguous_runs(walk, 0)
        first, last = int(starts.min()), int(starts.max()) + span
        sid = self.tensor._alloc.trace_id
        memory = tr.MemoryRange(sid, 0, 1, first, last, run, dims, starts.tobytes())
        return (trace.range_id(memory),)

    def _rows(self, valid: Any) -> tuple[Any, int, tuple[int, ...], int]:
        """Return the (valid) rows as numbers in an even grid of rows: these, where the grid begins,
        its shape and the elements from one row to the next. No rows have an empty shape.
        """
        starts = self.starts if valid is None else self.starts[valid]
        if not len(starts):
            return starts, 0, (), 1
        base = int(starts.min())
        steps = starts - base
        step = int(np.gcd.reduce(steps)) or 1
        return steps // step, base, (int(steps.max()) // step + 1, *self.inner_shape), step

    def _grid(self, valid: Any) -> tuple[Any, Any]:
        """Return a strided grid over the storage and the row numbers to index it with."""
        ids, base, shape, step = self._rows(valid)
        if not shape:
            return None, ids
        flat = self.tensor._alloc.data.view(self.tensor.dtype.numpy)
        item = flat.dtype.itemsize
        strides = [s * item for s in (step, *self.inner_strides)]
        return np.ndarray(shape, flat.dtype, flat, base * item, strides), ids

    def read_rows(self, valid: Any) -> Array:
        """Return the (valid) rows as [rows, elements] in the element type."""
        grid, ids = self._grid(valid)
        if grid is None:
            return np.zeros((0, int(np.prod(self.inner_shape))), self.tensor.dtype.numpy)
        return np.asarray(grid[ids].reshape(len(ids), -1))

    def write_rows(self, values: Array, valid: Any) -> None:
        """Write the (valid) rows in order; of equal rows the last one stays."""
        grid, ids = self._grid(valid)
        if grid is not None:
            grid[ids] = values.reshape(len(ids), *self.inner_shape)

    def mask_rows(self, coverage: Coverage, valid: Any) -> tuple[Any, Any]:
        """Return the mask grid of a coverage and the row numbers to index it with."""
        ids, base, shape, step = self._rows(valid)
        if not shape:
            return None, ids
        item = self.tensor.dtype.itemsize
        strides = tuple([s * item for s in (step, *self.inner_strides)])
        return coverage.mask_of(Walk(base * item, shape, strides, item)), ids


def resolve(core: Core, operand: str, value: NkiTensor, mode: Any) -> Access:
    """Read the dynamic offset of an operand and check its range.

    Args:
        core: the running core.
        operand: name for messages.
        value: the tensor.
        mode: `oob_mode` of the instruction.

    Raises:
        OutOfBounds: an index is out of range and the mode is `error`.
        LanguageError: the tensor belongs to the body of a dynamic loop that has ended.
    """
    if value._alloc.loop_depth > core.loop_depth:
        core.refuse_escaped(value)
    dynamic = value._dynamic
    if dynamic is None:
        return Access(value)
    if dynamic.kind == "vector":
        return rows_at(core, operand, value, read_indices(dynamic.index), mode)
    return _resolve_scalar(core, operand, value, dynamic, mode)


def _resolve_scalar(
    core: Core, operand: str, value: NkiTensor, dynamic: Dynamic, mode: Any
) -> Access:
    index = read_index(dynamic.index)
    shift = index * dynamic.multiplier
    limit = value._alloc.size_bytes // value.dtype.itemsize
    first = dynamic.static + shift
    span = sum((c - 1) * s for c, s in zip(value.shape, value.strides, strict=True)) + 1
    if core.options.out_of_bounds == "clamp":
        last = min(dynamic.limit - 1, limit - span - dynamic.static)
        highest = max(0, last // max(1, dynamic.multiplier))
        shift = min(max(index, 0), highest) * dynamic.multiplier
        first = dynamic.static + shift
    if 0 <= shift < max(dynamic.limit, 1) and first + span <= limit:
        return Access(value._derive(value.shape, value.strides, first, static=True), registers=1)
    if mode is not Oob.skip:
        raise OutOfBounds(
            operand,
            f"a scalar offset that keeps the access inside {dynamic.limit} elements",
            f"{index} times {dynamic.multiplier} plus {dynamic.static}, {span} elements long",
            "Use oob_mode.skip for padding",
        )
    access = Access(value, registers=1)
    starts = np.full(1, first, dtype=np.int64)
    for count, stride in zip(value.shape[:-1], value.strides[:-1], strict=True):
        steps = np.arange(count, dtype=np.int64) * stride
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    access.inner_shape = value.shape[-1:]
    access.inner_strides = value.strides[-1:]
    row_span = (value.shape[-1] - 1) * value.strides[-1] + 1
    access.starts = starts
    access.valid = (starts + row_span <= limit) & (starts >= 0)
    if not 0 <= shift < max(dynamic.limit, 1):
        access.valid[:] = False
    return access


def rows_at(core: Core, operand: str, value: NkiTensor, indices: Any, mode: Any) -> Access:
    """Resolve a view whose rows are chosen by `indices`, one for each step of its first axis."""
    dynamic = value._dynamic
    assert dynamic is not None
    if len(indices) != value.shape[0]:
        raise IllegalOperand(
            operand,
            f"{value.shape[0]} indices for the first axis of the pattern",
            f"{len(indices)} in vector_offset",
        )
    access = Access(value, registers=1)
    access.indirect = True
    access.inner_shape = value.shape[1:]
    access.inner_strides = value.strides[1:]
    limit = value._alloc.size_bytes // value.dtype.itemsize
    span = (
        sum((c - 1) * s for c, s in zip(access.inner_shape, access.inner_strides, strict=True)) + 1
    )
    if core.options.out_of_bounds == "clamp":
        last = min(dynamic.limit - 1, limit - span - dynamic.base - dynamic.static)
        highest = last // max(1, dynamic.multiplier)
        indices = np.clip(indices, 0, max(0, highest))
    shifts = indices * dynamic.multiplier
    starts = dynamic.base + dynamic.static + shifts
    valid = (indices >= 0) & (shifts < dynamic.limit) & (starts + span <= limit)
    access.starts = starts
    if not valid.all():
        if mode is not Oob.skip:
            bad = int(np.argmin(valid))
            raise OutOfBounds(
                operand,
                f"indices of rows inside {dynamic.limit} elements, {dynamic.multiplier} a row",
                f"index {int(indices[bad])} at position {bad}",
                "Use oob_mode.skip for padding",
            )
        access.valid = valid
    return access


def is_same(first: Access, second: Access) -> bool:
    """Whether two operands are exactly the same static view."""
    a, b = first.tensor, second.tensor
    return (
        a._alloc is b._alloc
        and first.starts is None
        and second.starts is None
        and a.geometry.walk == b.geometry.walk
    )


def check_overlap(dst: Access, src: Access) -> None:
    """Refuse a copy whose source and destination overlap without being the same."""
    a, b = dst.tensor, src.tensor
    if a._alloc is not b._alloc or dst.starts is not None or src.starts is not None:
        return
    x, y = a.geometry.box, b.geometry.box
    if not (x.dense and y.dense):
        return
    if meet(x, y):
        raise IllegalOperand(
            "src",
            "a source that does not overlap dst",
            "overlapping views",
            "An exact self-copy is allowed",
        )


def cast(values: Array, source: DType, target: DType) -> Array:
    """Convert as a DMA does: same type bit by bit, else through float32."""
    if source is target or (source.kind == "x" or target.kind == "x"):
        return values if values.dtype == target.numpy else values.view(target.numpy)
    if source.numpy == target.numpy and target is not dtypes.tfloat32:
        return values
    wide = values.astype(np.float32)
    if source.itemsize == 4 and source.is_integer:
        watch_integers(values)
    watch_narrowing(wide, target)
    return dtypes.convert(wide, target)
