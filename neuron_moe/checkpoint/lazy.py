"""Tensors that are read in parts.

A selection says, for each axis, which indices are wanted: a `range` of step 1, or a tuple of
indices in any order. Transforms turn the selection of a parameter into selections of checkpoint
tensors, so that a rank reads its slice before anything is stacked, and a large parameter is filled
a piece at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Indices = range | tuple[int, ...]
Selection = tuple[Indices, ...]


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is not in memory yet.

    Args:
        name: what messages call it; several checkpoint keys are joined by " + ".
        shape: its full shape.
        dtype: what `read` returns.
        read: returns the selected part; a selection has one entry for each axis.
        is_transposed: whether the last two axes of what is read are the other way in memory.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Selection], Tensor]
    is_transposed: bool = False


def from_tensor(tensor: Tensor, name: str = "tensor") -> LazyTensor:
    """Wrap a tensor that is in memory."""
    return LazyTensor(
        name, tuple(tensor.shape), tensor.dtype, lambda selection: take(tensor, selection)
    )


def stack(parts: Sequence[LazyTensor]) -> LazyTensor:
    """Put tensors of one shape and dtype on a new first axis; only the selected ones are read.

    Raises:
        ValueError: if a part differs from the first in shape or dtype.
    """
    first = parts[0]
    for part in parts[1:]:
        if part.shape != first.shape or part.dtype != first.dtype:
            raise ValueError(
                f"{part.name}: {list(part.shape)} {part.dtype} must be {list(first.shape)} "
                f"{first.dtype} as {first.name}, to be stacked with it. Check that all come from "
                "one checkpoint, and that all codes have scales beside them."
            )

    def read(selection: Selection) -> Tensor:
        return torch.stack([parts[index].read(selection[1:]) for index in selection[0]])

    name = f"{first.name} ... {parts[-1].name}" if len(parts) > 1 else first.name
    return LazyTensor(name, (len(parts), *first.shape), first.dtype, read)


def everything(shape: Sequence[int]) -> Selection:
    """Select all of a tensor."""
    return tuple(range(size) for size in shape)


def is_within(selection: Selection, shape: Sequence[int]) -> bool:
    """Say whether a selection has an entry for each axis and no index outside of it."""
    return len(selection) == len(shape) and all(
        not indices or 0 <= min(indices) <= max(indices) < size
        for indices, size in zip(selection, shape, strict=True)
    )


def hull(indices: Indices) -> range:
    """Return the smallest range that contains the indices."""
    if isinstance(indices, range):
        return indices
    return range(min(indices), max(indices) + 1) if indices else range(0)


def runs(indices: Sequence[int]) -> list[range]:
    """Cut indices into runs of neighbours, in their order.

    Example:
        >>> runs((4, 5, 6, 20, 21, 3))
        [range(4, 7), range(20, 22), range(3, 4)]
    """
    starts = [
        place
        for place in range(len(indices))
        if place == 0 or indices[place] != indices[place - 1] + 1
    ]
    ends = [*starts[1:], len(indices)]
    return [
        range(indices[start], indices[start] + end - start)
        for start, end in zip(starts, ends, strict=True)
    ]


def within(indices: Indices, start: int) -> Indices:
    """Renumber indices for a tensor that was cut to begin at `start`."""
    if isinstance(indices, range):
        return range(indices.start - start, indices.stop - start)
    return tuple(index - start for index in indices)


def take(tensor: Tensor, selection: Selection) -> Tensor:
    """Select part of a tensor in memory; ranges are views, tuples of indices copy."""
    for axis, indices in enumerate(selection):
        if isinstance(indices, range):
            if len(indices) != tensor.shape[axis]:
                tensor = tensor.narrow(axis, indices.start, len(indices))
        else:
            index = torch.tensor(indices, dtype=torch.long, device=tensor.device)
            tensor = tensor.index_select(axis, index)
    return tensor


def pieces(
    selection: Selection, itemsize: int, max_bytes: int
) -> Iterator[tuple[Selection, Selection]]:
    """Cut a selection along its first axes into pieces of about `max_bytes`.

    Yields:
        The piece of the selection, and where it is in the selected tensor.
    """
    shape = [len(indices) for indices in selection]
    if not shape or 0 in shape:
        yield selection, everything(shape)
        return
    yield from _pieces(selection, shape, itemsize, max_bytes, axis=0, place=())


def _pieces(
    selection: Selection,
    shape: list[int],
    itemsize: int,
    max_bytes: int,
    axis: int,
    place: tuple[range, ...],
) -> Iterator[tuple[Selection, Selection]]:
    """Cut along `axis`; go on to the next axis where even one index is too large."""
    rest = itemsize
    for size in shape[axis + 1 :]:
        rest *= size
    # Cuts at multiples of 32 never divide a group of a quantised weight.
    step = max(1, max_bytes // rest)
    step = step // 32 * 32 or step
    for start in range(0, shape[axis], step):
        here = range(start, min(start + step, shape[axis]))
        piece = (*selection[:axis], selection[axis][start : here.stop], *selection[axis + 1 :])
        if rest > max_bytes and axis + 2 < len(shape):
            yield from _pieces(piece, shape, itemsize, max_bytes, axis + 1, (*place, here))
        else:
            yield piece, (*place, here, *everything(shape[axis + 1 :]))
