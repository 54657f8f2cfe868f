"""Micro-kernels of the Scalar engine, and of signals between engines."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from lab.chip.probes.tiles import filled, stored


@nki.jit
def activations_in_a_chain(repeats: int, columns: int) -> nl.NkiTensor:
    """Apply relu again and again to one tile."""
    tile = filled(columns, nl.float32)
    for _turn in range(repeats):
        nisa.activation(dst=tile, op=nl.relu, data=tile)
    return stored(tile)


@nki.jit
def activations_apart(repeats: int, columns: int) -> nl.NkiTensor:
    """Apply relu from one tile to others."""
    source = filled(columns, nl.float32)
    targets = []
    for _tile in range(8):
        targets.append(filled(columns, nl.float32))
    for turn in range(repeats):
        nisa.activation(dst=targets[turn % 8], op=nl.relu, data=source)
    return stored(targets[0])


@nki.jit
def copies_on_scalar(repeats: int, columns: int) -> nl.NkiTensor:
    """Copy bfloat16 tiles."""
    one, other = filled(columns, nl.bfloat16), filled(columns, nl.bfloat16)
    for _turn in range(repeats):
        nisa.tensor_copy(dst=other, src=one, engine=nisa.engine.scalar)
        nisa.tensor_copy(dst=one, src=other, engine=nisa.engine.scalar)
    return stored(one)


@nki.jit
def other_functions(repeats: int, columns: int) -> nl.NkiTensor:
    """Apply two functions in turn, whose tables take each other's place."""
    tile = filled(columns, nl.float32, 0.0)
    for _turn in range(repeats):
        nisa.activation(dst=tile, op=nl.exp, data=tile)
        nisa.activation(dst=tile, op=nl.gelu, data=tile)
    return stored(tile)


@nki.jit
def signals(repeats: int, columns: int) -> nl.NkiTensor:
    """Hand a tile from GpSimd to Vector and back."""
    one, other = filled(columns, nl.float32), filled(columns, nl.float32)
    for _turn in range(repeats):
        nisa.tensor_copy(dst=other, src=one, engine=nisa.engine.vector)
        nisa.tensor_copy(dst=one, src=other, engine=nisa.engine.gpsimd)
    return stored(one)
