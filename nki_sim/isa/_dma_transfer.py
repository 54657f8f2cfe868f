"""Carrying out a data movement: values, unwritten elements, and what the race detector is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nki_sim import trace as tr
from nki_sim.dtypes import Array
from nki_sim.errors import IllegalOperand
from nki_sim.isa._dma_operand import Access
from nki_sim.machine import Core
from nki_sim.machine.memory import Coverage, Origin
from nki_sim.machine.undefined import origin_of, poison, report_undefined

Combine = Callable[[list[Array]], Array]


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
    known: int = True
    target = dst.tensor._alloc
    for alloc in (target, *[src.tensor._alloc for src in srcs]):
        if alloc.space == tr.SBUF and not alloc.counted:
            core.count_sbuf(alloc)
    if target.is_input:
        core.keep_input(target)
    rows, valid = _common_rows(dst, srcs) if by_rows else (0, None)
    for src in srcs:
        if src.tensor._alloc.shared_log is not None:
            _log(core, src, valid, False, False, line)
    has_values = core.full or bool(target.known)
    if not core.full:
        known = core.plan_indices([dst.whole()], [src.whole() for src in srcs])
    masks = _source_masks(srcs, rows, valid) if _any_hole(srcs) else None
    if masks is not None:
        _report(core, op, srcs, masks)
    same: bool | None = False if known else None
    if known:
        log = target.shared_log
        compare = log is not None and log.written_by_other(core) and _is_written(dst, rows, valid)
        compare = compare and masks is None  # what nobody wrote equals nothing
        before = _snapshot(dst, valid) if compare and has_values else None
        watches = core.watches_numbers
        core.watches_numbers = watches and masks is None
        if by_rows:
            arrays = [_rows(src, rows, valid) for src in srcs]
            values = combine(arrays)
            if dst.indirect:
                defined = None if masks is None else combine_masks(masks)
                _report_contest(core, op, dst, values, valid, defined)
            _put_rows(dst, values, rows, valid)
        else:
            array = dst.array()
            shape = array.shape
            arrays = [src.array() for src in srcs]
            array[...] = combine([a if a.shape == shape else a.reshape(shape) for a in arrays])
        core.watches_numbers = watches
        if before is not None:
            same = bool((before == _snapshot(dst, valid)).all())
        elif compare:
            same = None
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


def _report_contest(
    core: Core, op: str, dst: Access, values: Array, valid: Any, defined: Any
) -> None:
    """Raise or report rows of a scatter that get several different values.

    What nobody wrote, where `defined` says so, is taken for zeros: its bits are the host's.
    """
    if defined is not None:
        values = np.where(defined.reshape(values.shape), values, np.zeros((), values.dtype))
    starts = dst.starts if valid is None else dst.starts[valid]
    order = np.argsort(starts, kind="stable")
    is_repeat = starts[order][1:] == starts[order][:-1]
    if not is_repeat.any():
        return
    bits = np.ascontiguousarray(values.reshape(len(starts), -1)).view(np.uint8)[order]
    differs = is_repeat & (bits[1:] != bits[:-1]).any(axis=1)
    if differs.any():
        alloc, item = dst.tensor._alloc, dst.tensor.dtype.itemsize
        contested = starts[order][1:][differs] * item
        first = int(contested.min())
        error = IllegalOperand(
            core.operand_of(dst.tensor),
            "different rows, or equal values, as which value stays is not specified on the chip",
            f"several values for the row at element {first // item}",
            "Padding must be out of range, with oob_mode.skip",
            instruction=op,
            location=core.machine.location(core.line),
        )
        is_padding = alloc.rows > 1 and first >= (alloc.rows - 1) * alloc.pitch
        policy = "report" if is_padding else core.options.scatter
        core.machine.settle(policy, "scatter", error)


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


def _is_written(access: Access, rows: int, valid: Any) -> bool:
    """Say whether something was written to every element; else no value was there to be equal."""
    return not _any_hole([access]) or _source_masks([access], rows, valid) is None


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
