"""Micro-kernels of the Vector engine: elements per cycle, overhead, what overlaps."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from lab.chip.probes.tiles import filled, stored


@nki.jit
def copies(repeats: int, columns: int, in_a_chain: bool) -> nl.NkiTensor:
    """Copy float32 tiles: each copy needs the one before, or none needs another."""
    tiles = []
    for _tile in range(8):
        tiles.append(filled(columns, nl.float32))
    for turn in range(repeats):
        source = tiles[turn % 7] if in_a_chain else tiles[7]
        target = tiles[(turn + 1) % 7] if in_a_chain else tiles[turn % 7]
        nisa.tensor_copy(dst=target, src=source, engine=nisa.engine.vector)
    return stored(tiles[0])


@nki.jit
def copies_of_16_bits(repeats: int, columns: int) -> nl.NkiTensor:
    """Copy contiguous bfloat16 tiles."""
    one, other = filled(columns, nl.bfloat16), filled(columns, nl.bfloat16)
    for _turn in range(repeats):
        nisa.tensor_copy(dst=other, src=one, engine=nisa.engine.vector)
        nisa.tensor_copy(dst=one, src=other, engine=nisa.engine.vector)
    return stored(one)


@nki.jit
def copies_of_every_second(repeats: int, columns: int) -> nl.NkiTensor:
    """Copy every second element of bfloat16 tiles."""
    one, other = filled(2 * columns, nl.bfloat16), filled(2 * columns, nl.bfloat16)
    for _turn in range(repeats):
        nisa.tensor_copy(
            dst=other[:, 0 : 2 * columns : 2],
            src=one[:, 0 : 2 * columns : 2],
            engine=nisa.engine.vector,
        )
        nisa.tensor_copy(
            dst=one[:, 0 : 2 * columns : 2],
            src=other[:, 0 : 2 * columns : 2],
            engine=nisa.engine.vector,
        )
    return stored(one)


@nki.jit
def copies_of_every_eighth(repeats: int, columns: int) -> nl.NkiTensor:
    """Copy every eighth element of float32 tiles: a stride of 32 bytes."""
    one, other = filled(8 * columns, nl.float32), filled(8 * columns, nl.float32)
    for _turn in range(repeats):
        nisa.tensor_copy(
            dst=other[:, 0 : 8 * columns : 8],
            src=one[:, 0 : 8 * columns : 8],
            engine=nisa.engine.vector,
        )
        nisa.tensor_copy(
            dst=one[:, 0 : 8 * columns : 8],
            src=other[:, 0 : 8 * columns : 8],
            engine=nisa.engine.vector,
        )
    return stored(one)


@nki.jit
def copies_to_8_bits(repeats: int, columns: int) -> nl.NkiTensor:
    """Convert a bfloat16 tile to float8 and back."""
    one, other = filled(columns, nl.bfloat16), filled(columns, nl.float8_e4m3)
    for _turn in range(repeats):
        nisa.tensor_copy(dst=other, src=one, engine=nisa.engine.vector)
        nisa.tensor_copy(dst=one, src=other, engine=nisa.engine.vector)
    return stored(one)


@nki.jit
def sums_of_two(repeats: int, columns: int, is_narrow: bool) -> nl.NkiTensor:
    """Add two tiles in SBUF, of bfloat16 or of float32."""
    dtype = nl.bfloat16 if is_narrow else nl.float32
    total, term = filled(columns, dtype, 0.0), filled(columns, dtype, 0.0)
    for _turn in range(repeats):
        nisa.tensor_tensor(dst=total, data1=total, data2=term, op=nl.add, engine=nisa.engine.vector)
    return stored(total)


@nki.jit
def scans(repeats: int, columns: int) -> nl.NkiTensor:
    """Run prefix sums."""
    total, term = filled(columns, nl.float32, 0.0), filled(columns, nl.float32, 0.0)
    for _turn in range(repeats):
        nisa.tensor_tensor_scan(
            dst=total, data0=total, data1=term, initial=0.0, op0=nl.add, op1=nl.add
        )
    return stored(total)


@nki.jit
def reciprocals(repeats: int, columns: int) -> nl.NkiTensor:
    """Take reciprocals of ones."""
    tile = filled(columns, nl.float32)
    for _turn in range(repeats):
        nisa.reciprocal(dst=tile, data=tile)
    return stored(tile)


@nki.jit
def reductions(repeats: int, columns: int) -> nl.NkiTensor:
    """Find the largest of bfloat16 rows."""
    tile, most = filled(columns, nl.bfloat16), filled(1, nl.bfloat16)
    for _turn in range(repeats):
        nisa.tensor_reduce(dst=most, op=nl.maximum, data=tile, axis=1)
    return stored(most)


@nki.jit
def fills(repeats: int, columns: int) -> nl.NkiTensor:
    """Set bfloat16 tiles to zero."""
    tile = filled(columns, nl.bfloat16)
    for _turn in range(repeats):
        nisa.memset(dst=tile, value=0.0, engine=nisa.engine.vector)
    return stored(tile)


@nki.jit
def reduced_results(repeats: int, columns: int) -> nl.NkiTensor:
    """Add up a row on the way, and read the accumulator."""
    tile, total = filled(columns, nl.float32), filled(1, nl.float32)
    for _turn in range(repeats):
        nisa.tensor_scalar_reduce(
            dst=tile, data=tile, op0=nl.multiply, operand0=1.0, reduce_op=nl.add, reduce_res=total
        )
    return stored(total)
