"""Vector, Scalar and GpSimd engines: copies and fills on chip."""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_sim import trace as tr
from nki_sim.constants import engine as Engine
from nki_sim.constants import nc_version
from nki_sim.errors import IllegalOperand
from nki_sim.isa._checks import (
    ENGINE_IDS,
    check_engine,
    check_gpsimd_memory,
    check_not_both_psum,
    check_on_chip,
    check_same_dtype,
    check_tiles,
    compute_facts,
)
from nki_sim.isa._instruction import instruction
from nki_sim.machine import Core, NkiInstruction, NkiTensor, SequencerValue
from nki_sim.machine.numbers import watch_narrowing

# Elements per partition from which a fill in SBUF goes to GpSimd if the kernel names no engine
# (assumed: the compiler's choice is not published).
_GPSIMD_MEMSET_ELEMENTS = 128


@instruction
def tensor_copy(
    core: Core,
    dst: NkiTensor,
    src: NkiTensor,
    engine: Any = Engine.unknown,
    name: str | None = None,
    dtype: Any = None,
) -> NkiInstruction:
    """Copy a tile on chip: the same bits for equal types, through float32 otherwise.

    The Scalar engine copies from gen3 on (nki.isa.tensor_copy, NKI 0.6). `dtype`, which tutorials
    still write, is that of dst.
    """
    # Constraints.
    check_tiles(("src", src), ("dst", dst))
    if dtype is not None:
        text = f"dtype={dtype} is a word of NKI 0.1; the type of dst, {dst.dtype}, says it"
        core.note("deprecated", text)
    chosen = check_engine(
        core, engine, (Engine.vector, Engine.scalar, Engine.gpsimd), Engine.vector
    )
    if chosen is Engine.gpsimd:
        check_gpsimd_memory(("dst", dst), ("src", src))
    if chosen is Engine.scalar and core.target.version < nc_version.gen3:
        raise IllegalOperand(
            "engine", "vector or gpsimd before gen3", "scalar", "Use nisa.activation(op=nl.copy)"
        )
    same = dst.dtype == src.dtype
    if not same and "x" in (dst.dtype.kind, src.dtype.kind):
        raise IllegalOperand("dst", f"{src.dtype}, as packed types are not converted", dst.dtype)

    # Cost.
    facts = compute_facts(dst, (src,), "copy")

    # Meaning.
    def meaning() -> None:
        if same:
            source, target = src.array(), dst.array()
            if source.shape != target.shape:
                source = source.reshape(target.shape)
            target[...] = source
        else:
            dst.store(src.f32())

    return core.issue("tensor_copy", ENGINE_IDS[chosen], facts, (dst,), (src,), meaning, name)


@instruction
def memset(
    core: Core,
    dst: NkiTensor,
    value: Any,
    engine: Any = Engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """Fill a tile with a compile-time number; packed x4 types take only 0 (nki.isa.memset)."""
    # Constraints.
    check_on_chip(("dst", dst))
    dtype = dst.dtype
    if isinstance(value, SequencerValue | NkiTensor) or not isinstance(
        value, bool | int | float | np.number
    ):
        raise IllegalOperand("value", "a number known at compile time", repr(value))
    if dtype.kind == "x" and value != 0:
        raise IllegalOperand("value", f"0 for the packed type {dtype}", repr(value))
    if dtype.is_integer:
        bounds = np.iinfo(dtype.numpy)
        if not bounds.min <= value <= bounds.max or value != int(value):
            raise IllegalOperand("value", f"an int that {dtype} can hold", repr(value))
        if isinstance(value, float):
            core.note(
                "deprecated",
                f"memset of a {dtype} tile with the float {value!r}; an int is expected",
            )
    elif dtype.is_float:
        watch_narrowing(np.array([value], np.float32), dtype)
    in_psum = dst._alloc.space == tr.PSUM
    small = dst.geometry.elements <= _GPSIMD_MEMSET_ELEMENTS
    default = Engine.vector if in_psum or small else Engine.gpsimd
    chosen = check_engine(core, engine, (Engine.vector, Engine.gpsimd), default)
    if chosen is Engine.gpsimd:
        check_gpsimd_memory(("dst", dst))

    # Cost.
    facts = compute_facts(dst, (), "zero" if value == 0 else "fill")

    # Meaning.
    def meaning() -> None:
        dst.array()[...] = dtype.numpy.type(value)

    return core.issue("memset", ENGINE_IDS[chosen], facts, (dst,), (), meaning, name)


@instruction
def tensor_copy_predicated(
    core: Core,
    dst: NkiTensor,
    src: Any,
    predicate: NkiTensor,
    reverse_pred: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """Copy elements (or one number) where the predicate is nonzero; the others keep their value.

    `reverse_pred` copies where it is zero (nki.isa.tensor_copy_predicated, NKI 0.6).
    """
    # Constraints.
    check_tiles(("dst", dst), ("predicate", predicate))
    if predicate.dtype.kind != "u":
        raise IllegalOperand("predicate", "uint8, uint16 or uint32", str(predicate.dtype))
    is_tile = type(src) is NkiTensor
    if is_tile:
        check_tiles(("dst", dst), ("src", src))
        check_not_both_psum(("src", src), ("predicate", predicate))
        check_same_dtype(("dst", dst), ("src", src))
    elif not isinstance(src, int | float):
        raise IllegalOperand("src", "a tensor or a number", repr(src))

    # Cost.
    facts = compute_facts(dst, (src, predicate) if is_tile else (predicate,), "copy_predicated")

    # Meaning.
    def meaning() -> None:
        target = dst.array()
        chosen = (predicate.array() == 0) if reverse_pred else (predicate.array() != 0)
        chosen = chosen.reshape(target.shape)
        if is_tile:
            np.copyto(target, src.array().reshape(target.shape), where=chosen)
        else:
            np.copyto(target, dst.dtype.numpy.type(src), where=chosen)

    reads = (src, predicate, dst) if is_tile else (predicate, dst)
    return core.issue("tensor_copy_predicated", tr.VECTOR, facts, (dst,), reads, meaning, name)
