"""Memory ranges as rectangles: the form in which overlap is cheap to decide.

On chip a rectangle is partitions by bytes. A tensor in HBM is cut into lines of its longest common
row stride, so that two column tiles of a matrix do not seem to overlap. Rectangles are never too
small; where a walk does not fit the form, the rectangle is its bounding box, and a gather or
scatter is taken to reach all of its tensor, as the compiler, which does not know the indices, has
to do as well.
"""

from __future__ import annotations

from collections import Counter

from nki_sim.trace import HBM, MemoryRange, Trace

Rectangle = tuple[int, int, int, int]
"""First and end line (or partition), first and end byte within it."""


def rectangles(trace: Trace) -> tuple[list[int], list[Rectangle]]:
    """Return the memory and the rectangle of every range of a trace, by range id.

    A memory is the id of a storage; storages that the kernel placed by address share one memory per
    space, since their bytes may coincide: its id is -1 - space. Trace order decides nothing here.
    """
    pitches = _pitches(trace)
    memories: list[int] = []
    shapes: list[Rectangle] = []
    for memory in trace.ranges:
        storage = trace.storages[memory.storage]
        if storage.space == HBM:
            memories.append(memory.storage)
            pitch = pitches.get(memory.storage, 0)
            shapes.append(_in_lines(memory, pitch, storage.size_bytes))
            continue
        part0, part1, byte0, byte1 = memory[1:5]
        if storage.address is None:
            memories.append(memory.storage)
        else:
            memories.append(-1 - storage.space)
            part, byte = storage.address
            part0, part1, byte0, byte1 = part0 + part, part1 + part, byte0 + byte, byte1 + byte
        shapes.append((part0, part1, byte0, byte1))
    return memories, shapes


def _pitches(trace: Trace) -> dict[int, int]:
    """Return the commonest row stride of each HBM tensor that is ever walked in rows."""
    seen: dict[int, Counter[int]] = {}
    for memory in trace.ranges:
        if memory.dims and trace.storages[memory.storage].space == HBM:
            strides = [stride for stride, count in memory.dims if count > 1]
            if strides:
                seen.setdefault(memory.storage, Counter())[max(strides)] += 1
    return {storage: counts.most_common(1)[0][0] for storage, counts in seen.items()}


def _in_lines(memory: MemoryRange, pitch: int, size_bytes: int) -> Rectangle:
    """Return the rectangle of an HBM range in lines of `pitch` bytes; a pitch of 0 is one line."""
    if memory.rows:
        return (0, max(1, -(-size_bytes // pitch)), 0, pitch) if pitch else (0, 1, 0, size_bytes)
    if not pitch:
        return (0, 1, memory.byte_start, memory.byte_end)
    lines, width = 1, memory.run_bytes or memory.byte_end - memory.byte_start
    if memory.dims:
        for stride, count in memory.dims:
            if stride % pitch == 0:
                lines += stride // pitch * (count - 1)
            else:
                width += stride * (count - 1)
    line, column = divmod(memory.byte_start, pitch)
    if column + width <= pitch:
        return (line, line + lines, column, column + width)
    return (line, -(-memory.byte_end // pitch), 0, pitch)


def covers(a: Rectangle, b: Rectangle) -> bool:
    """Tell whether the first rectangle holds all of the second."""
    return a[0] <= b[0] and a[1] >= b[1] and a[2] <= b[2] and a[3] >= b[3]
