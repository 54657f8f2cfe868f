"""Searching, scanning and gathering inside partitions, as pure functions of NumPy arrays.

Arrays are [P, F]: one row per partition, the free axes flattened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SLOTS: Final = 8  # values that one search instruction handles
NO_MATCH: Final = -1  # all ones in an unsigned index
GROUP: Final = 16  # partitions of one GpSimd core


def largest8(data_PF: Array) -> Array:
    """The 8 largest values of each row in descending order, duplicates kept.

    NaN is above all, 0 above -0. The order is that of the bits: NumPy's order of floats leaves the
    places of zeros and the kinds of NaN to the processor.
    """
    columns = data_PF.shape[1]
    missing = np.isnan(data_PF)
    if missing.any():
        data_PF = np.where(missing, np.float32(np.nan), data_PF)
    keys = _order(data_PF.view(np.int32))
    top = np.partition(keys, columns - SLOTS, axis=1)[:, columns - SLOTS :]
    top.sort(axis=1)
    return _order(np.ascontiguousarray(top[:, ::-1])).view(np.float32)


def _order(bits: NDArray[np.int32]) -> NDArray[np.int32]:
    """Make integers that are ordered like floats of their bits; twice gives them back."""
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def match8(data_PF: Array, vals_P8: Array, *, first_slot_first: bool) -> Array:
    """Positions of 8 values in each row; equal values take successive occurrences.

    Args:
        data_PF: [P, F] values to search.
        vals_P8: [P, 8] values to find.
        first_slot_first: among equal values, whether slot 0 or slot 7 takes the first occurrence.

    Returns:
        [P, 8] int64 positions, `NO_MATCH` where no occurrence is left.
    """
    columns = data_PF.shape[1]
    column = np.arange(columns)
    order = range(SLOTS) if first_slot_first else range(SLOTS - 1, -1, -1)
    positions = np.empty(vals_P8.shape, np.int64)
    done: list[int] = []
    for slot in order:
        hits = data_PF == vals_P8[:, slot, None]
        # Where an earlier slot has the same value, only what is behind its occurrence counts.
        behind = np.full(data_PF.shape[0], -1)
        for other in done:
            taken = np.where(positions[:, other] == NO_MATCH, columns, positions[:, other])
            same = vals_P8[:, other] == vals_P8[:, slot]
            behind = np.where(same, np.maximum(behind, taken), behind)
        shared = np.flatnonzero(behind >= 0)
        if shared.size:
            hits[shared] &= column > behind[shared, None]
        first = hits.argmax(axis=1)
        is_hit = np.take_along_axis(hits, first[:, None], axis=1)[:, 0]
        positions[:, slot] = np.where(is_hit, first, NO_MATCH)
        done.append(slot)
    return positions


def scan(
    data0_PF: Array,
    data1_PF: Array,
    initial: Array,
    op0: Callable[[Array, Array], Array],
    op1: Callable[[Array, Array], Array],
    *,
    reverse0: bool,
    reverse1: bool,
) -> Array:
    """The recurrence r[i] = op1(op0(data0[i], r[i-1]), data1[i]) along each row, in float32."""
    if op0 is np.multiply and op1 is np.add and (data0_PF == 1).all():
        first = data1_PF[:, :1] + initial.reshape(-1, 1)
        return np.add.accumulate(np.concatenate((first, data1_PF[:, 1:]), axis=1), axis=1)
    steps0_FP = np.ascontiguousarray(data0_PF.T)
    steps1_FP = np.ascontiguousarray(data1_PF.T)
    result_FP = np.empty_like(steps0_FP)
    state = initial
    for step, (x, y) in enumerate(zip(steps0_FP, steps1_FP, strict=True)):
        inner = op0(state, x) if reverse0 else op0(x, state)
        state = result_FP[step] = op1(y, inner) if reverse1 else op1(inner, y)
    return result_FP.T


def half_statistics(data_PF: Array) -> Array:
    """Count, mean and variance * count of the even and of the odd elements: [P, 6]."""
    result = np.zeros((data_PF.shape[0], 6), np.float32)
    for half in (0, 1):
        part = data_PF[:, half::2]
        count = part.shape[1]
        if count == 0:
            continue
        mean = part.mean(axis=1, dtype=np.float32)
        result[:, 3 * half] = count
        result[:, 3 * half + 1] = mean
        result[:, 3 * half + 2] = np.square(part - mean[:, None]).sum(axis=1, dtype=np.float32)
    return result


def merge_statistics(statistics_P3n: Array) -> Array:
    """Mean and population variance of (count, mean, variance * count) triples: [P, 2]."""
    triples = statistics_P3n.reshape(statistics_P3n.shape[0], -1, 3)
    count, mean, spread = triples[:, :, 0], triples[:, :, 1], triples[:, :, 2]
    total = count.sum(axis=1)
    merged = (count * mean).sum(axis=1) / total
    deviation = (count * np.square(mean - merged[:, None])).sum(axis=1)
    return np.stack((merged, (spread.sum(axis=1) + deviation) / total), axis=1)


def lists_of_groups(values_PC: Array) -> Array:
    """One row per 16-partition group: its columns, one after the other."""
    groups = values_PC.shape[0] // GROUP
    return values_PC.reshape(groups, GROUP, -1).transpose(0, 2, 1).reshape(groups, -1)


def gather_in_groups(data_PF: Array, index_PC: Array, elements: int, num_valid: int) -> Array:
    """Gather with one index list per 16 partitions, taken column by column.

    Args:
        data_PF: [P, F]; P a multiple of 16.
        index_PC: [P, C] element positions.
        elements: contiguous elements per index.
        num_valid: indices used of each group's list.

    Returns:
        [P, num_valid * elements].
    """
    starts = lists_of_groups(index_PC)[:, :num_valid].astype(np.int64)
    positions = (starts[:, :, None] + np.arange(elements)).reshape(len(starts), -1)
    return np.take_along_axis(data_PF, np.repeat(positions, GROUP, axis=0), axis=1)


def snake_topk(src_PC: Array, n: int, k: int) -> tuple[Array, Array]:
    """The k largest of n elements laid out down the partitions of each 16-partition group.

    Element e of a group sits in its partition e % 16, column e // 16.

    Returns:
        values [P, k] ascending and positions [P, k] int64; all 16 rows of a group are the same.
    """
    flat = lists_of_groups(src_PC)[:, :n]
    positions = np.argsort(flat, axis=1, kind="stable")[:, n - k :]
    values = np.take_along_axis(flat, positions, axis=1)
    return np.repeat(values, GROUP, axis=0), np.repeat(positions, GROUP, axis=0)
