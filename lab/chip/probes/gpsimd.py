"""Micro-kernels of GpSimd: start and cycles per element of its instructions."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from lab.chip.probes.tiles import filled, stored


@nki.jit
def counts(repeats: int, columns: int) -> nl.NkiTensor:
    """Write 0, 1, 2 and so on."""
    tile = nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.sbuf)
    for _turn in range(repeats):
        nisa.iota(dst=tile, pattern=[[1, columns]], offset=0, channel_multiplier=0)
    return stored(tile)


@nki.jit
def fills_on_gpsimd(repeats: int, columns: int) -> nl.NkiTensor:
    """Set a tile."""
    tile = nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.sbuf)
    for _turn in range(repeats):
        nisa.memset(dst=tile, value=1.0, engine=nisa.engine.gpsimd)
    return stored(tile)


@nki.jit
def sums_on_gpsimd(repeats: int, columns: int) -> nl.NkiTensor:
    """Add two tiles."""
    total, term = filled(columns, nl.float32, 0.0), filled(columns, nl.float32, 0.0)
    for _turn in range(repeats):
        nisa.tensor_tensor(dst=total, data1=total, data2=term, op=nl.add, engine=nisa.engine.gpsimd)
    return stored(total)


@nki.jit
def powers(repeats: int, columns: int) -> nl.NkiTensor:
    """Raise ones to a power."""
    tile = filled(columns, nl.float32)
    for _turn in range(repeats):
        nisa.tensor_scalar(
            dst=tile, data=tile, op0=nl.power, operand0=0.5, engine=nisa.engine.gpsimd
        )
    return stored(tile)


@nki.jit
def bounds_of_segments(repeats: int, columns: int) -> nl.NkiTensor:
    """Find where segments begin and end: stands for instructions without a price of their own."""
    segments = filled(columns, nl.int32, 1, rows=1)
    found = filled(2 * columns, nl.int32, 0, rows=1)
    for _turn in range(repeats):
        nisa.sequence_bounds(dst=found.reshape((1, 2, columns)), segment_ids=segments)
    return stored(found)


@nki.jit
def nonzeros(repeats: int, columns: int) -> nl.NkiTensor:
    """List the elements that are not zero."""
    tile = filled(columns, nl.float32)
    found = filled(columns + 1, nl.int32, 1)
    for _turn in range(repeats):
        nisa.nonzero_with_count(dst=found, src=tile)
    return stored(found)


@nki.jit
def lookups(repeats: int, columns: int) -> nl.NkiTensor:
    """Gather elements of a row by their numbers."""
    table, found = filled(64, nl.float32), filled(columns, nl.float32)
    numbers = filled(columns, nl.uint32, 0)
    for _turn in range(repeats):
        nisa.nc_n_gather(dst=found, data=table, indices=numbers)
    return stored(found)


@nki.jit
def sums_over_partitions(repeats: int, columns: int) -> nl.NkiTensor:
    """Add up over the partitions."""
    tile, total = filled(columns, nl.float32), filled(columns, nl.float32, rows=1)
    for _turn in range(repeats):
        nisa.tensor_partition_reduce(dst=total, op=nl.add, data=tile)
    return stored(total)
