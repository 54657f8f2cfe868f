"""Values that come from memory nobody wrote.

An instruction that reads unwritten elements is executed several times, each time with another
filling of them; result elements whose bits depend on the filling are undefined in turn. So a value
is followed through any instruction without a rule per instruction, and what does not matter (a row
that is masked out, a column that is never copied) never shows. An error is raised when such a value
reaches a returned tensor or an address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nki_sim.errors import OverlapError, UninitializedRead
from nki_sim.machine.allocator import Allocator
from nki_sim.machine.memory import Allocation, Coverage, Origin, Walk
from nki_sim.machine.tensor import NkiTensor

# Bytes put in unwritten elements besides the fill of the options: -12, 12 and 0 as floats.
_FILLS = (0xC1, 0x41, 0x00)


def read_undefined(
    core: Allocator,
    op: str,
    undefined: list[NkiTensor],
    writes: Sequence[NkiTensor],
    meaning: Callable[[], None] | None,
) -> None:
    """Execute with several fillings of the unwritten elements; what differs stays undefined."""
    options = core.options
    location = core.machine.location(core.line)
    for tensor in undefined:
        missing = int((~tensor._alloc.defined.elements_of(tensor.geometry.walk)).sum())
        report_undefined(core, op, tensor, missing, location)
    if meaning is None or options.uninitialized == "off":
        if meaning is not None:
            for tensor in undefined:
                _settle_fill(tensor, options.fill)
            meaning()
        core.mark_written(writes, core.line)
        return
    holes = []
    for tensor in undefined:
        walk = tensor.geometry.walk
        holes.append((tensor.array(), ~tensor._alloc.defined.elements_of(walk)))
    before = [tensor.array().copy() for tensor in writes]
    accumulators = {key: value.copy() for key, value in core.accumulators.items()}
    results = []
    watches, core.watches_numbers = core.watches_numbers, False
    for fill in (*_FILLS, options.fill):
        for tensor, old in zip(writes, before, strict=True):
            tensor.array()[...] = old
        for array, hole in holes:
            pattern = np.full(array.dtype.itemsize, fill, np.uint8).view(array.dtype)[0]
            array[hole] = pattern
        core.accumulators = {key: value.copy() for key, value in accumulators.items()}
        meaning()
        results.append([_bits(tensor.array()) for tensor in writes])
    core.watches_numbers = watches
    core.machine.float_flags.raised = 0
    core.mark_written(writes, core.line)
    for position, tensor in enumerate(writes):
        *others, last = (result[position] for result in results)
        differs = np.logical_or.reduce([other != last for other in others])
        if differs.any():
            poison(tensor._alloc, tensor.geometry.walk, differs, origin_of(core, op, undefined))


def _settle_fill(tensor: NkiTensor, fill: int) -> None:
    """Give the unwritten elements of a view the fill for good."""
    alloc, walk = tensor._alloc, tensor.geometry.walk
    hole = ~alloc.defined.elements_of(walk)
    array = tensor.array()
    array[hole] = np.full(array.dtype.itemsize, fill, np.uint8).view(array.dtype)[0]
    alloc.defined.add_where(walk, hole)


def origin_of(core: Allocator, op: str, undefined: Sequence[NkiTensor]) -> Origin:
    """Describe the present instruction as the place where unwritten memory was read.

    If the memory was itself computed from unwritten memory, that first place is the origin.
    """
    for tensor in undefined:
        if tensor._alloc.poison:
            return tensor._alloc.poison[0]
    operands = ", ".join(dict.fromkeys(core.operand_of(tensor) for tensor in undefined))
    return Origin(op, operands, core.machine.location(core.line))


def poison(alloc: Allocation, walk: Walk, chosen: Any, origin: Origin) -> None:
    """Mark elements that were computed from unwritten memory."""
    alloc.defined.remove(walk, chosen)
    if alloc.poisoned is None:
        alloc.poisoned = Coverage(alloc.rows, alloc.pitch, alloc.dtype.itemsize)
    alloc.poisoned.add_where(walk, chosen)
    if origin not in alloc.poison:
        alloc.poison.append(origin)


def report_undefined(
    core: Allocator, op: str, tensor: NkiTensor, missing: int, location: str
) -> None:
    """Raise or report the read of elements that nobody wrote."""
    options = core.options
    alloc = tensor._alloc
    if alloc.clobbered_by:
        core.machine.settle(
            options.overlap,
            "overlap",
            OverlapError(
                core.operand_of(tensor),
                "bytes that still belong to this tensor",
                f"bytes overwritten by {alloc.clobbered_by}",
                instruction=op,
                location=location,
            ),
        )
    if options.uninitialized == "off":
        return
    origin = f"; computed from unwritten memory by {alloc.poison[0]}" if alloc.poison else ""
    error = UninitializedRead(
        core.operand_of(tensor),
        "elements that were written before they are read",
        f"{missing} of {tensor.size} elements unwritten{origin}",
        instruction=op,
        location=location,
    )
    if options.uninitialized == "read":
        raise error
    core.machine.find("uninitialized", location, str(error))


def _bits(array: Any) -> Any:
    """Return a copy of an array as unsigned integers, so that NaN equals itself."""
    copied = np.ascontiguousarray(array)
    if copied is array:
        copied = array.copy()
    return copied.view(f"u{copied.dtype.itemsize}")
