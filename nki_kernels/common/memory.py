"""Buffers as data: one table per kernel says what it keeps in SBUF.

A table is a named tuple of `Tiles`. Kernels allocate by it (`allocate`), and what decides whether a
kernel fits adds it up (`table_bytes`), so that nothing is sized twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import nki.language as nl

from nki_kernels.common.tiles import make_tiles


class Tiles(NamedTuple):
    """Buffers of one kind.

    Attributes:
        number: how many.
        shape: of each, partitions first.
        dtype: of their elements.
        counted: how many are added up. It differs from `number` where the room is the same for
            every variant of a kernel, or where temporaries take the place of buffers.
    """

    number: int
    shape: tuple[int, ...]
    dtype: Any
    counted: int


def tiles(count: int, shape: tuple[int, ...], dtype: Any) -> Tiles:
    """Return buffers that are counted as they are."""
    return Tiles(count, shape, dtype, count)


def small_tiles(count: int, shape: tuple[int, ...], dtype: Any) -> Tiles:
    """Return buffers of a few bytes, for which a kernel counts a lump sum."""
    return Tiles(count, shape, dtype, 0)


def allocate(buffers: Tiles) -> list[nl.NkiTensor]:
    """Allocate the buffers of one kind."""
    return make_tiles(buffers.number, buffers.shape, buffers.dtype)


def allocate_rows(buffers: Tiles, rows: int) -> nl.NkiTensor:
    """Allocate one buffer with fewer rows, where the last tile of tokens is shorter."""
    shape = (rows,) + buffers.shape[1 : len(buffers.shape)]
    return nl.ndarray(shape, dtype=buffers.dtype, buffer=nl.sbuf)


def table_bytes(table: Iterable[Tiles]) -> int:
    """Return the bytes per partition that the buffers of a table are counted with."""
    total = 0
    for kind in table:
        total += tiles_bytes(kind)
    return total


def tiles_bytes(buffers: Tiles) -> int:
    """Return the bytes per partition that buffers of one kind are counted with."""
    return buffers.counted * tile_bytes(buffers)


def tile_bytes(buffers: Tiles) -> int:
    """Return the bytes per partition of one buffer of a kind."""
    size = _item_bytes(buffers.dtype)
    for extent in buffers.shape[1 : len(buffers.shape)]:
        size *= extent
    return size


def _item_bytes(dtype: Any) -> int:
    if dtype == nl.float32 or dtype == nl.int32 or dtype == nl.uint32:
        return 4
    if dtype == nl.float8_e4m3fn_x4:
        return 4
    return 2 if dtype == nl.bfloat16 or dtype == nl.float16 else 1
