"""How DMA instructions reach memory: static patterns, scalar offsets, and rows chosen by index.

`Access` is one operand with its offsets read. A row is the unit of the range check: one index of a
vector offset, or one step over all but the last axis for a scalar offset. With `oob_mode.skip` rows
that are out of range are left out and the destination keeps what it had there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from nki_sim import dtypes
from nki_sim import trace as tr
from nki_sim.constants import oob_mode as Oob
from nki_sim.dtypes import Array, DType
from nki_sim.errors import IllegalOperand, OutOfBounds
from nki_sim.geometry import contiguous_runs
from nki_sim.machine import Core
from nki_sim.memory import Coverage, Origin, Walk
from nki_sim.tensor import NkiTensor, read_index, read_indices
from nki_sim.undefined import origin_of, poison, report_undefined
from nki_sim.views import Dynamic

Combine = Callable[[list[Array]], Array]
_NO_ROWS: Final = np.zeros(0, dtype=np.int64)


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
        return np.ndarray(walk.shape, tensor.dtype.numpy, tensor._alloc.data, walk.offset,
                          walk.strides)  # fmt: skip

    def cost_key(self) -> Any:
        """Return what the cost depends on."""
        if self.starts is None:
            geometry = self.tensor.geometry
            return geometry.profile, geometry.run, self.registers
        tensor = self.tensor
        return (tensor.shape, tensor.strides, tensor.dtype, self.indirect, self.registers)

    def whole(self) -> NkiTensor:
        """Return a static view that stands for the memory: the operand, or one of its elements."""
        if self.starts is None:
            return self.tensor
        view = self.tensor._derive((1, 1), (1, 1), 0)
        view._dynamic = None
        return view

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

    def _rows_of(self, flat: Any, unit: int, valid: Any) -> tuple[Any, Any]:
        """Return a strided grid over flat storage and the row numbers to index it with.

        `unit` is how many entries of `flat` one element takes.
        """
        starts = self.starts if valid is None else self.starts[valid]
        if not len(starts):
            return None, starts
        base = int(starts.min())
        steps = starts - base
        step = int(np.gcd.reduce(steps)) or 1
        shape: tuple[int, ...] = (int(steps.max()) // step + 1, *self.inner_shape)
        strides = [step, *self.inner_strides]
        entry = flat.dtype.itemsize
        grid = np.ndarray(
            shape, flat.dtype, flat, base * unit * entry, [s * unit * entry for s in strides]
        )
        return grid, steps // step

    def read_rows(self, valid: Any) -> Array:
        """Return the (valid) rows as [rows, elements] in the element type."""
        flat = self.tensor._alloc.data.view(self.tensor.dtype.numpy)
        grid, ids = self._rows_of(flat, 1, valid)
        if grid is None:
            return np.zeros((0, int(np.prod(self.inner_shape))), self.tensor.dtype.numpy)
        return np.asarray(grid[ids].reshape(len(ids), -1))

    def write_rows(self, values: Array, valid: Any) -> None:
        """Write the (valid) rows in order; of equal rows the last one stays."""
        flat = self.tensor._alloc.data.view(self.tensor.dtype.numpy)
        grid, ids = self._rows_of(flat, 1, valid)
        if grid is not None:
            grid[ids] = values.reshape(len(ids), *self.inner_shape)

    def mask_rows(self, coverage: Coverage, valid: Any) -> tuple[Any, Any]:
        """Return the mask grid of a coverage and the row numbers to index it with."""
        item = self.tensor.dtype.itemsize
        starts = self.starts if valid is None else self.starts[valid]
        if not len(starts):
            return None, starts
        base = int(starts.min())
        steps = starts - base
        step = int(np.gcd.reduce(steps)) or 1
        shape = (int(steps.max()) // step + 1, *self.inner_shape)
        strides = (step * item, *[s * item for s in self.inner_strides])
        return coverage.mask_of(Walk(base * item, shape, strides, item)), steps // step


def resolve(core: Core, operand: str, value: Any, mode: Any) -> Access:
    """Read the dynamic offset of an operand and check its range.

    Args:
        core: the running core.
        operand: name for messages.
        value: the tensor.
        mode: `oob_mode` of the instruction.

    Raises:
        OutOfBounds: an index is out of range and the mode is `error`.
    """
    if type(value) is not NkiTensor:
        raise IllegalOperand(operand, "a tensor", repr(value))
    dynamic = value._dynamic
    if dynamic is None:
        return Access(value)
    if dynamic.kind == "vector":
        return _resolve_vector(core, operand, value, dynamic, mode)
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
        highest = max(0, (limit - span - dynamic.static) // max(1, dynamic.multiplier))
        shift = min(max(index, 0), highest) * dynamic.multiplier
        first = dynamic.static + shift
    if 0 <= shift < max(dynamic.limit, 1) and first + span <= limit:
        view = value._derive(value.shape, value.strides, first)
        view._dynamic = None
        return Access(view, registers=1)
    if mode is not Oob.skip:
        raise OutOfBounds(
            operand, f"a scalar offset that keeps the access inside {dynamic.limit} elements",
            f"{index} times {dynamic.multiplier} plus {dynamic.static}, {span} elements long",
            "Use oob_mode.skip for padding",
        )  # fmt: skip
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


def _resolve_vector(
    core: Core, operand: str, value: NkiTensor, dynamic: Dynamic, mode: Any
) -> Access:
    indices = read_indices(dynamic.index)
    return rows_at(core, operand, value, indices, mode)


def rows_at(core: Core, operand: str, value: NkiTensor, indices: Any, mode: Any) -> Access:
    """Resolve a view whose rows are chosen by `indices`, one for each step of its first axis."""
    dynamic = value._dynamic
    assert dynamic is not None
    if len(indices) != value.shape[0]:
        raise IllegalOperand(
            operand, f"{value.shape[0]} indices for the first axis of the pattern",
            f"{len(indices)} in vector_offset",
        )  # fmt: skip
    access = Access(value, registers=1)
    access.indirect = True
    access.inner_shape = value.shape[1:]
    access.inner_strides = value.strides[1:]
    limit = value._alloc.size_bytes // value.dtype.itemsize
    span = (
        sum((c - 1) * s for c, s in zip(access.inner_shape, access.inner_strides, strict=True)) + 1
    )
    if core.options.out_of_bounds == "clamp":
        highest = (min(limit, dynamic.limit + dynamic.base) - span - dynamic.static) // max(
            1, dynamic.multiplier
        )
        indices = np.clip(indices, 0, max(0, highest))
    shifts = indices * dynamic.multiplier
    starts = dynamic.base + dynamic.static + shifts
    valid = (indices >= 0) & (shifts < dynamic.limit) & (starts + span <= limit)
    access.starts = starts
    if not valid.all():
        if mode is not Oob.skip:
            bad = int(np.argmin(valid))
            raise OutOfBounds(
                operand, f"indices of rows inside {dynamic.limit} elements, "
                f"{dynamic.multiplier} a row", f"index {int(indices[bad])} at position {bad}",
                "Use oob_mode.skip for padding",
            )  # fmt: skip
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
    if (
        x.row_start < y.row_end
        and y.row_start < x.row_end
        and x.byte_start < y.byte_end
        and y.byte_start < x.byte_end
    ):
        raise IllegalOperand("src", "a source that does not overlap dst", "overlapping views",
                             "An exact self-copy is allowed")  # fmt: skip


def cast(values: Array, source: DType, target: DType) -> Array:
    """Convert as a DMA does: same type bit by bit, else through float32."""
    if source is target or (source.kind == "x" or target.kind == "x"):
        return values if values.dtype == target.numpy else values.view(target.numpy)
    if source.numpy == target.numpy and target is not dtypes.tfloat32:
        return values
    return dtypes.convert(values.astype(np.float32), target)


def move(
    core: Core,
    op: str,
    dst: Access,
    srcs: Sequence[Access],
    combine: Combine,
    combine_masks: Combine,
) -> None:
    """Carry out a data movement and note what it read and wrote.

    Args:
        core: the running core.
        op: instruction name, for messages.
        dst, srcs: resolved operands.
        combine: from the sources, as arrays of the shape of the destination (or [rows, elements]
            where rows are chosen by index), to the values to write, in the destination's type.
        combine_masks: the same for the masks of defined elements.
    """
    line = core.line
    by_rows = dst.starts is not None or any(src.starts is not None for src in srcs)
    known = 1
    target = dst.tensor._alloc
    for alloc in (target, *[src.tensor._alloc for src in srcs]):
        if alloc.space == tr.SBUF and not alloc.counted:
            core.count_sbuf(alloc)
    rows, valid = _common_rows(dst, srcs) if by_rows else (0, None)
    for src in srcs:
        if src.tensor._alloc.shared_log is not None:
            _log(core, src, valid, False, False, line)
    if not core.full:
        known = core.plan_indices([dst.whole()], [src.whole() for src in srcs])
    masks = _source_masks(srcs, rows, valid) if _any_hole(srcs) else None
    if masks is not None:
        _report(core, op, srcs, masks)
    same = False if known else None
    if known:
        log = target.shared_log
        compare = log is not None and log.written_by_other(core)
        before = _snapshot(dst, valid) if compare else None
        if by_rows:
            arrays = [_rows(src, rows, valid) for src in srcs]
            _put_rows(dst, combine(arrays), rows, valid)
        else:
            array = dst.array()
            shape = array.shape
            arrays = [src.array() for src in srcs]
            array[...] = combine([a if a.shape == shape else a.reshape(shape) for a in arrays])
        if before is not None:
            same = bool((before == _snapshot(dst, valid)).all())
    if masks is None:
        _mark(dst, rows, valid, None, None)
    else:
        holes = [src.tensor for src, mask in zip(srcs, masks, strict=True) if not mask.all()]
        _mark(dst, rows, valid, combine_masks(masks), origin_of(core, op, holes))
    if target.aliases:
        core.clobber(target, dst.tensor)
    if target.shared_log is not None:
        _log(core, dst, valid, True, same, line)


def _common_rows(dst: Access, srcs: Sequence[Access]) -> tuple[int, Any]:
    """Return the number of rows, and which of them every operand has in range."""
    rows = 0
    valid = None
    for access in (dst, *srcs):
        if access.starts is not None:
            if rows and access.num_rows != rows:
                raise IllegalOperand("src", f"{rows} rows like dst", str(access.num_rows))
            rows = access.num_rows
            if access.valid is not None:
                valid = access.valid if valid is None else valid & access.valid
    return rows, valid


def _rows(access: Access, rows: int, valid: Any) -> Array:
    """Return the valid rows of an operand, [rows, elements]."""
    if access.starts is not None:
        return access.read_rows(valid)
    array = access.array()
    matrix = array.reshape(rows, -1)
    return matrix if valid is None else matrix[valid]


def _put_rows(access: Access, values: Array, rows: int, valid: Any) -> None:
    """Write the valid rows of the destination."""
    if access.starts is not None:
        access.write_rows(values, valid)
        return
    array = access.array()
    matrix = array.reshape(rows, -1)
    if valid is None:
        matrix[...] = values
    else:
        matrix[valid] = values
    if not np.may_share_memory(matrix, array):
        array[...] = matrix.reshape(array.shape)


def _snapshot(access: Access, valid: Any) -> Any:
    """Return the bits that a write is about to change."""
    if access.starts is not None:
        values = access.read_rows(valid)
    else:
        values = access.array().copy(order="C")
    return values.view(f"u{values.dtype.itemsize}")


def _any_hole(srcs: Sequence[Access]) -> bool:
    for src in srcs:
        alloc = src.tensor._alloc
        if alloc.defined.full:
            continue
        if src.starts is not None:
            return True
        geometry = src.tensor.geometry
        if not alloc.defined.covers(geometry.box, geometry.walk):
            return True
    return False


def _source_masks(srcs: Sequence[Access], rows: int, valid: Any) -> Any:
    """Return, per source, which elements hold a defined value; None if all do."""
    masks = []
    for src in srcs:
        defined = src.tensor._alloc.defined
        if src.starts is None:
            assert src.walk is not None
            mask = defined.elements_of(src.walk)
            if rows:
                mask = mask.reshape(rows, -1)
                mask = mask if valid is None else mask[valid]
        else:
            grid, ids = src.mask_rows(defined, valid)
            elements = int(np.prod(src.inner_shape))
            if grid is None:
                mask = np.ones((0, elements), dtype=np.bool_)
            else:
                chosen = grid[ids]
                if chosen.ndim > 1 + len(src.inner_shape):
                    chosen = chosen.all(axis=-1)
                mask = chosen.reshape(len(ids), elements)
        masks.append(mask)
    return None if all(mask.all() for mask in masks) else masks


def _report(core: Core, op: str, srcs: Sequence[Access], masks: list[Any]) -> None:
    """Raise or report the reads of unwritten elements."""
    location = core.machine.location(core.line)
    for src, mask in zip(srcs, masks, strict=True):
        if not mask.all():
            report_undefined(core, op, src.tensor, int((~mask).sum()), location)


def _mark(dst: Access, rows: int, valid: Any, defined: Any, origin: Origin | None) -> None:
    """Note which elements of the destination now hold a value."""
    alloc = dst.tensor._alloc
    coverage = alloc.defined
    complete = dst.starts is None and valid is None and defined is None
    if coverage.full and defined is None and alloc.poisoned is None:
        return
    walk = dst.walk if dst.starts is None else None
    if complete:
        assert walk is not None
        coverage.add(dst.tensor.geometry.box, walk)
        if alloc.poisoned is not None:
            alloc.poisoned.remove(walk)
        return
    if walk is not None:
        chosen = np.ones(walk.shape, dtype=np.bool_)
        if valid is not None:
            chosen.reshape(rows, -1)[~valid] = False
        good = chosen.copy()
        if defined is not None:
            if valid is None:
                good &= defined.reshape(walk.shape)
            else:
                good.reshape(rows, -1)[valid] = defined.reshape(-1, good.size // rows)
        if not coverage.full:
            coverage.add_where(walk, good)
        bad = chosen & ~good
        if alloc.poisoned is not None:
            alloc.poisoned.remove(walk, good)
        if origin is not None and bad.any():
            poison(alloc, walk, bad, origin)
        return
    _mark_rows(dst, valid, defined, origin)


def _mark_rows(dst: Access, valid: Any, defined: Any, origin: Origin | None) -> None:
    """The same for a scatter."""
    alloc = dst.tensor._alloc
    grid, ids = dst.mask_rows(alloc.defined, valid)
    if grid is None:
        return
    good = np.ones((len(ids), int(np.prod(dst.inner_shape))), dtype=np.bool_)
    if defined is not None:
        good = defined
    shaped = good.reshape(len(ids), *dst.inner_shape)
    wide = shaped[..., None] if grid.ndim > shaped.ndim else shaped
    grid[ids] = np.broadcast_to(wide, (len(ids), *grid.shape[1:]))
    if alloc.poisoned is None and not good.all():
        alloc.poisoned = Coverage(alloc.rows, alloc.pitch, alloc.dtype.itemsize)
    if alloc.poisoned is not None:
        bad_grid, bad_ids = dst.mask_rows(alloc.poisoned, valid)
        bad = ~shaped[..., None] if bad_grid.ndim > shaped.ndim else ~shaped
        bad_grid[bad_ids] = np.broadcast_to(bad, (len(bad_ids), *bad_grid.shape[1:]))
        if origin is not None and origin not in alloc.poison:
            alloc.poison.append(origin)


def _log(
    core: Core, access: Access, valid: Any, is_write: bool, same: bool | None, line: int
) -> None:
    """Tell the race detector about an access of shared memory."""
    log = access.tensor._alloc.shared_log
    if access.starts is not None:
        starts = access.byte_starts(valid)
        if len(starts):
            log.rows(core, access.walk_of_row(), starts, is_write, same, line)
    elif is_write:
        log.write(core, access.tensor, line, same)
    else:
        log.read(core, access.tensor, line)


__all__ = [
    "Access",
    "cast",
    "check_overlap",
    "is_same",
    "move",
    "resolve",
]
