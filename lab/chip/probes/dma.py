"""Micro-kernels of DMA: issue, runs, bytes, latency, gathers, transposes."""

from __future__ import annotations

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from lab.chip.probes.tiles import filled, stored


@nki.jit
def nothing(repeats: int) -> nl.NkiTensor:
    """Store a tile: what every kernel here ends with."""
    tile = filled(1, nl.float32)
    for _turn in range(repeats):
        nisa.memset(dst=tile, value=1.0, engine=nisa.engine.vector)
    return stored(tile)


def mode_of(word: str) -> Any:
    """Return a way of making descriptors by its name."""
    if word == "none":
        return nisa.dge_mode.none
    if word == "swdge":
        return nisa.dge_mode.swdge
    return nisa.dge_mode.unknown if word == "auto" else nisa.dge_mode.hwdge


@nki.jit
def transfers(
    source: nl.NkiTensor, repeats: int, rows: int, pieces: int, width: int, mode: str
) -> nl.NkiTensor:
    """Load tiles of several pieces a row into eight buffers.

    Args:
        source: [128, n] float32 in HBM, n at least 2 * pieces * width; pieces are apart.
        repeats: transfers.
        rows: partitions of a tile.
        pieces: of a row, each contiguous.
        width: elements of a piece.
        mode: "none", "auto", "swdge", "one queue" or "two queues" of the hardware generator.
    """
    stride = source.shape[1]
    tiles = []
    for _tile in range(8):
        tiles.append(nl.ndarray((rows, pieces * width), dtype=nl.float32, buffer=nl.sbuf))
    for turn in range(repeats):
        pattern = source.ap([[stride, rows], [2 * width, pieces], [1, width]], offset=0)
        if mode == "one queue" or mode == "two queues":
            is_second = mode == "two queues" and turn % 2 == 1
            nisa.dma_copy(
                dst=tiles[turn % 8],
                src=pattern,
                dge_mode=nisa.dge_mode.hwdge,
                engine=nisa.engine.scalar if is_second else nisa.engine.sync,
            )
        else:
            nisa.dma_copy(dst=tiles[turn % 8], src=pattern, dge_mode=mode_of(mode))
    result = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    if mode == "one queue":
        nisa.dma_copy(
            dst=result,
            src=tiles[0][:, 0:1],
            dge_mode=nisa.dge_mode.hwdge,
            engine=nisa.engine.sync,
        )
    else:
        nisa.dma_copy(dst=result, src=tiles[0][:, 0:1], dge_mode=nisa.dge_mode.none)
    return result


@nki.jit
def there_and_back(source: nl.NkiTensor, repeats: int, has_offset: bool) -> nl.NkiTensor:
    """Load what was just stored, store what was just loaded.

    Args:
        source: [128, 16] float32 in HBM.
        repeats: times there and back.
        has_offset: take the row that a register names.
    """
    tile = filled(32, nl.float32, rows=1)
    zero = filled(1, nl.int32, 0, rows=1)
    place = nl.ndarray((1, 16), dtype=nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(dst=place, src=source[0:1, 0:16], dge_mode=nisa.dge_mode.none)
    row = nisa.register_alloc()
    nisa.register_load(row, zero)
    spot, part = place, tile[:, 0:16]
    if has_offset:
        spot = place.ap([[16, 1], [1, 16]], scalar_offset=row, indirect_dim=0)
        part = tile.ap([[32, 1], [1, 16]], scalar_offset=row, indirect_dim=1)
    for _turn in range(repeats):
        nisa.dma_copy(dst=part, src=spot, dge_mode=nisa.dge_mode.hwdge)
        nisa.dma_copy(dst=spot, src=part, dge_mode=nisa.dge_mode.hwdge)
    return stored(tile)


@nki.jit
def gathers(source: nl.NkiTensor, repeats: int, rows: int) -> nl.NkiTensor:
    """Gather row numbers by the numbers gathered before: rows that name themselves, or none.

    Args:
        source: [128, 1] int32 in HBM: their own numbers, or some out of range, which move nothing.
        repeats: gathers.
        rows: of a gather.
    """
    one = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    other = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=one, src=source[0:rows, :], dge_mode=nisa.dge_mode.none)
    nisa.dma_copy(dst=other, src=source[0:rows, :], dge_mode=nisa.dge_mode.none)
    for turn in range(repeats):
        index, found = (one, other) if turn % 2 == 0 else (other, one)
        nisa.dma_copy(
            dst=found,
            src=source.ap([[1, rows], [1, 1]], vector_offset=index),
            oob_mode=nisa.oob_mode.skip,
            dge_mode=nisa.dge_mode.swdge,
        )
    return stored(one)


@nki.jit
def loads_of_nothing(source: nl.NkiTensor, repeats: int, pieces: int) -> nl.NkiTensor:
    """Load tiles of an entry that is out of range, so that nothing moves.

    Args:
        source: [1, n] float32 in HBM, n at least 128 * pieces * 8.
        repeats: loads.
        pieces: of a row, four elements each.
    """
    entry = filled(1, nl.int32, 1000000, rows=1)
    tiles = []
    for _tile in range(8):
        tiles.append(filled(pieces * 4, nl.float32))
    for turn in range(repeats):
        nisa.dma_copy(
            dst=tiles[turn % 8],
            src=source.ap(
                [[pieces * 8, 128], [8, pieces], [1, 4]], scalar_offset=entry, indirect_dim=0
            ),
            oob_mode=nisa.oob_mode.skip,
            dge_mode=nisa.dge_mode.hwdge,
            engine=nisa.engine.sync if turn % 2 == 0 else nisa.engine.scalar,
        )
    return stored(tiles[0])


@nki.jit
def transposes(source: nl.NkiTensor, repeats: int, on_chip: bool) -> nl.NkiTensor:
    """Transpose tiles on their way, from HBM or from SBUF.

    Args:
        source: [128, 128] in HBM, of a 16-bit type or of float32.
        repeats: transposes.
        on_chip: start from SBUF.
    """
    tile = nl.ndarray((128, 128), dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source, dge_mode=nisa.dge_mode.none)
    targets = []
    for _target in range(8):
        targets.append(nl.ndarray((128, 128), dtype=source.dtype, buffer=nl.sbuf))
    for turn in range(repeats):
        nisa.dma_transpose(
            dst=targets[turn % 8],
            src=tile if on_chip else source,
            dge_mode=nisa.dge_mode.none,
        )
    return stored(targets[0])


@nki.jit
def sums_in_flight(source: nl.NkiTensor, repeats: int) -> nl.NkiTensor:
    """Add two tensors of HBM on the way to SBUF."""
    columns = source.shape[1]
    tiles = []
    for _tile in range(8):
        tiles.append(nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.sbuf))
    for turn in range(repeats):
        nisa.dma_compute(dst=tiles[turn % 8], srcs=[source, source], reduce_op=nl.add)
    return stored(tiles[0])
