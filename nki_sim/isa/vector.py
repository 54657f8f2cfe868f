"""Vector engine: element-wise arithmetic and reductions along the free axes.

Arithmetic widens to float32, computes there and rounds once to the destination; bit operators work
on patterns. Some of these run on the Scalar or GpSimd engine too.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from nki_sim import trace as tr
from nki_sim.constants import engine as Engine
from nki_sim.constants import nc_version
from nki_sim.dtypes import Array
from nki_sim.errors import IllegalOperand
from nki_sim.isa import search
from nki_sim.isa._arithmetic import (
    Stage,
    alu,
    bits,
    check_stage_types,
    check_vector_operators,
    f32_of,
    is_exact,
    is_integer32,
    reduction,
    result_array,
    run_stages,
    stage,
    store_bits,
    store_wrapped,
    tensors_of,
    tiles_among,
)
from nki_sim.isa._checks import (
    ENGINE_IDS,
    check_engine,
    check_gpsimd_memory,
    check_integers,
    check_not_both_psum,
    check_on_chip,
    check_same_partitions,
    check_tiles,
    compute_facts,
    scalar_operand,
)
from nki_sim.isa._instruction import instruction
from nki_sim.isa.functions import reduce_last
from nki_sim.machine import Core, NkiInstruction, NkiTensor

# Operator pairs of tensor_scalar that the Scalar engine has from gen3 on (nki.isa.tensor_scalar).
_SCALAR_ENGINE_PAIRS = frozenset({("multiply", "add"), ("multiply", ""), ("add", "")})


_UNKNOWN: Final = Engine.unknown


@instruction
def tensor_tensor(
    core: Core,
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Any,
    engine: Any = Engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """Compute ``dst = data1 op data2`` element by element.

    Integers of 32 bits on GpSimd are exact; everything else is float32 inside
    (nki.isa.tensor_tensor, NKI 0.6).
    """
    # Constraints.
    operands = (("dst", dst), ("data1", data1), ("data2", data2))
    check_tiles(*operands)
    check_not_both_psum(operands[1], operands[2])
    operator = alu(core, "op", op, 2)
    integers = is_integer32(dst) and is_integer32(data1) and is_integer32(data2)
    in_psum = tr.PSUM in (dst._alloc.space, data1._alloc.space, data2._alloc.space)
    gpsimd = operator.gpsimd_only or (integers and not operator.is_bitvec and not in_psum)
    default = Engine.gpsimd if gpsimd else Engine.vector
    allowed = (Engine.gpsimd,) if operator.gpsimd_only else (Engine.vector, Engine.gpsimd)
    chosen = check_engine(core, engine, allowed, default)
    if chosen is Engine.gpsimd:
        check_gpsimd_memory(*operands)
    if operator.is_bitvec:
        check_integers(operator.name, *operands)
    exact = integers and chosen is Engine.gpsimd

    # Cost.
    facts = compute_facts(dst, (data1, data2), operator.name)

    # Meaning.
    def meaning() -> None:
        if operator.is_bitvec:
            left = bits(data1)
            store_bits(dst, operator.apply(left, bits(data2).astype(left.dtype, copy=False)))
        elif exact:
            values = operator.apply(data1.flat().astype(np.int64), data2.flat().astype(np.int64))
            store_wrapped(dst, values)
        else:
            left, right = data1.f32(), data2.f32()
            out = result_array(dst, left.shape[0], ())
            widened = None if data1.dtype.numpy == np.float32 else left  # memory of its own
            values = operator.into(widened if out is None else out, left, right)
            if values is not out:
                dst.store(values)

    return core.issue(
        "tensor_tensor", ENGINE_IDS[chosen], facts, (dst,), (data1, data2), meaning, name
    )


@instruction
def tensor_scalar(
    core: Core,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Any = Engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """Compute ``dst = (data op0 operand0) op1 operand1`` with numbers or one value per partition.

    32-bit integers with integer operands are exact in add, subtract and multiply (address
    arithmetic); everything else is float32 inside (nki.isa.tensor_scalar, NKI 0.6).
    """
    # Constraints.
    operands = (("dst", dst), ("data", data))
    check_tiles(*operands)
    partitions = data.geometry.partitions
    first = stage(core, 0, op0, operand0, reverse0, partitions)
    second = stage(core, 1, op1, operand1, reverse1, partitions)
    stages = tuple([item for item in (first, second) if item is not None])
    check_stage_types(data, dst, stages)
    chosen = _tensor_scalar_engine(core, engine, stages, operands)
    exact = is_exact(data, dst, stages)

    # Cost.
    facts = compute_facts(dst, (data,), ",".join([item.op.name for item in stages]))

    # Meaning.
    def meaning() -> None:
        values: Array
        if stages and stages[0].op.is_bitvec:
            values = bits(data)
            for item in stages:
                values = item.apply_bits(values)
            store_bits(dst, values)
        elif exact:
            values = data.flat().astype(np.int64)
            for item in stages:
                values = item.apply_exact(values)
            store_wrapped(dst, values)
        else:
            run_stages(dst, data, stages)

    reads = (data, *tensors_of(stages))
    return core.issue("tensor_scalar", ENGINE_IDS[chosen], facts, (dst,), reads, meaning, name)


def _tensor_scalar_engine(
    core: Core, engine: Any, stages: tuple[Stage, ...], operands: tuple[tuple[str, NkiTensor], ...]
) -> Any:
    """Choose the engine of a tensor_scalar and refuse what the chosen one cannot do."""
    gpsimd_only = any(item.op.gpsimd_only for item in stages)
    if not gpsimd_only and engine is _UNKNOWN:
        return Engine.vector
    allowed = (Engine.gpsimd,) if gpsimd_only else (Engine.vector, Engine.scalar)
    default = Engine.gpsimd if gpsimd_only else Engine.vector
    chosen = check_engine(core, engine, allowed, default)
    if chosen is Engine.gpsimd:
        check_gpsimd_memory(*operands)
    if chosen is Engine.scalar:
        names = [item.op.name for item in stages]
        pair = (names[0] if names else "", names[1] if len(names) > 1 else "")
        if core.target.version < nc_version.gen3 or pair not in _SCALAR_ENGINE_PAIRS:
            raise IllegalOperand(
                "engine",
                "vector, or gen3 with multiply+add, multiply or add for the Scalar engine",
                f"scalar with {', '.join(names)} on {core.target.name}",
            )
    return chosen


@instruction
def scalar_tensor_tensor(
    core: Core,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
    dtype: Any = None,
) -> NkiInstruction:
    """Compute ``dst = (data op0 operand0) op1 operand1`` where operand1 is a whole tile.

    `dtype` is a parameter of older releases and is ignored (nki.isa.scalar_tensor_tensor, NKI 0.6).
    """
    # Constraints.
    operands = (("dst", dst), ("data", data), ("operand1", operand1))
    check_tiles(*operands)
    check_not_both_psum(operands[1], operands[2])
    first = stage(core, 0, op0, operand0, reverse0, data.geometry.partitions)
    operator = alu(core, "op1", op1, 2)
    stages = (first,) if first is not None else ()
    check_vector_operators(op0=first and first.op, op1=operator)
    check_stage_types(data, dst, stages)
    if dtype is not None:
        core.note("deprecated", "scalar_tensor_tensor: dtype is ignored")

    # Cost.
    function = f"{first.op.name},{operator.name}" if first is not None else operator.name
    facts = compute_facts(dst, (data, operand1), function)

    # Meaning.
    def meaning() -> None:
        values, other = data.f32(), operand1.f32()
        out = result_array(dst, values.shape[0], (operand1,))
        if first is not None:
            values = first.apply(values, out)
        pair = (other, values) if reverse1 else (values, other)
        values = operator.into(out, *pair)
        if values is not out:
            dst.store(values)

    reads = (data, *tensors_of(stages), operand1)
    return core.issue("scalar_tensor_tensor", tr.VECTOR, facts, (dst,), reads, meaning, name)


@instruction
def tensor_reduce(
    core: Core,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    axis: Any,
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """Reduce the last free axes of a tile; with `negate` the result is multiplied by -1.

    `keepdims` changes no bytes: the destination's shape is the kernel's choice. The data may have
    four free dimensions (nki.isa.tensor_reduce and nki.language.sum, NKI 0.6).
    """
    # Constraints.
    check_on_chip(("dst", dst))
    check_on_chip(("data", data), free_dims=4)
    check_same_partitions(("data", data), ("dst", dst))
    operator = reduction(core, "op", op)
    axes = sorted(a + data.ndim if a < 0 else a for a in _axes(axis))
    if not axes or axes != list(range(data.ndim - len(axes), data.ndim)) or axes[0] < 1:
        raise IllegalOperand(
            "axis", f"the last free axes, ending at {data.ndim - 1}", f"{axis} of {data.ndim} axes"
        )
    kept = math.prod(data.shape[1 : axes[0]])
    if dst.geometry.elements != kept:
        raise IllegalOperand(
            "dst", f"{kept} elements per partition", f"{dst.geometry.elements} ({list(dst.shape)})"
        )
    if operator.is_bitvec:
        if negate:
            raise IllegalOperand("negate", "False for a bit operator", "True")
        check_integers(operator.name, ("data", data), ("dst", dst))

    # Cost.
    facts = compute_facts(dst, (data,), operator.name)

    # Meaning.
    def meaning() -> None:
        rows = bits(data) if operator.is_bitvec else data.f32()
        result = reduce_last(operator, rows.reshape(rows.shape[0], kept, -1))
        if operator.is_bitvec:
            store_bits(dst, result)
        else:
            dst.store(-result if negate else result)

    return core.issue("tensor_reduce", tr.VECTOR, facts, (dst,), (data,), meaning, name)


def _axes(axis: Any) -> list[int]:
    if isinstance(axis, int):
        return [axis]
    if isinstance(axis, tuple | list) and all(isinstance(a, int) for a in axis):
        return list(axis)
    raise IllegalOperand("axis", "an int or a tuple of ints", repr(axis))


@instruction
def reciprocal(
    core: Core, dst: NkiTensor, data: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """Compute ``dst = 1 / data`` in float32 (nki.isa.reciprocal, NKI 0.6)."""
    # Constraints.
    check_tiles(("data", data), ("dst", dst))

    # Cost.
    facts = compute_facts(dst, (data,), "reciprocal")

    # Meaning.
    def meaning() -> None:
        values = data.f32()
        out = result_array(dst, values.shape[0], ())
        if out is None:
            dst.store(np.float32(1) / values)
        else:
            np.divide(np.float32(1), values, out=out)

    return core.issue("reciprocal", tr.VECTOR, facts, (dst,), (data,), meaning, name)


@instruction
def tensor_tensor_scan(
    core: Core,
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """Compute ``r[i] = (data0[i] op0 r[i-1]) op1 data1[i]`` along each row, r[-1] = initial.

    float32 inside (nki.isa.tensor_tensor_scan, NKI 0.6).
    """
    # Constraints.
    operands = (("dst", dst), ("data0", data0), ("data1", data1))
    check_tiles(*operands)
    check_not_both_psum(operands[1], operands[2])
    partitions = data0.geometry.partitions
    start = scalar_operand(core, "initial", initial, partitions)
    first, second = alu(core, "op0", op0, 2), alu(core, "op1", op1, 2)
    check_vector_operators(op0=first, op1=second)

    # Cost.
    facts = compute_facts(dst, (data0, data1), f"{first.name},{second.name}")

    # Meaning.
    def meaning() -> None:
        state = np.broadcast_to(f32_of(start).reshape(-1), partitions)
        steps = data0.f32(), data1.f32(), state, first.apply, second.apply
        dst.store(search.scan(*steps, reverse0=reverse0, reverse1=reverse1))

    reads = (data0, data1, *tiles_among(start))
    return core.issue("tensor_tensor_scan", tr.VECTOR, facts, (dst,), reads, meaning, name)
