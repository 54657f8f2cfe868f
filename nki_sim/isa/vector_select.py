"""Vector engine: selections and the instructions that keep accumulator registers.

The accumulators hold one float32 per lane and are shared by all instructions of this file;
`reduce_cmd.idle` leaves them in an unknown state, so that a later `reduce` without a reset is
refused (nki.isa, "Accumulator behavior", NKI 0.6).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from nki_sim import dtypes
from nki_sim import trace as tr
from nki_sim.constants import nc_version, reduce_cmd
from nki_sim.dtypes import Array
from nki_sim.errors import IllegalOperand
from nki_sim.isa._arithmetic import (
    accumulator,
    alu,
    check_result,
    check_stage_types,
    check_vector_operators,
    f32_of,
    op_name,
    reduction,
    stage,
    tensors_of,
    tiles_among,
)
from nki_sim.isa._checks import (
    check_dtype,
    check_generation,
    check_not_both_psum,
    check_tiles,
    compute_facts,
    scalar_operand,
)
from nki_sim.isa._instruction import instruction
from nki_sim.isa.functions import ALU_OPS, AluOp, reduce_last
from nki_sim.isa.operators import OPERATORS
from nki_sim.machine import Core, NkiInstruction, NkiTensor

_MAXIMUM: Final = OPERATORS["maximum"]
FP32_MIN: Final = float(np.finfo(np.float32).min)
_VECTOR: Final = "vector"
_COMPARISONS: Final = frozenset({"equal", "less", "less_equal", "greater", "greater_equal"})
_TSR_REDUCTIONS: Final = frozenset({"add", "multiply", "maximum", "minimum"})
_CUMULATIVE: Final = frozenset({"add", "subtract", "multiply", "maximum", "minimum"})
_MAX_ONLY: Final = frozenset({"maximum"})
_IDLE: Final = reduce_cmd.idle
_COMMANDS: Final = (reduce_cmd.reset_reduce, reduce_cmd.reduce, reduce_cmd.load_reduce)


def _check_command(command: Any, allowed: tuple[reduce_cmd, ...]) -> None:
    if command not in allowed:
        names = ", ".join(member.name for member in allowed)
        raise IllegalOperand("reduce_cmd", names, str(getattr(command, "name", command)))


def _check_float(operand: str, value: NkiTensor | None) -> None:
    if value is not None and not value.dtype.is_float:
        raise IllegalOperand(operand, "a floating-point type", str(value.dtype))


def _forget_if_idle(core: Core, command: Any) -> None:
    """After an idle instruction nobody may rely on the registers."""
    if command is reduce_cmd.idle:
        core.accumulators.pop(_VECTOR, None)


@instruction
def select_reduce(
    core: Core,
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: Any,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Any = reduce_cmd.idle,
    reduce_op: Any = _MAXIMUM,
    reverse_pred: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """Take `on_true` where the predicate is nonzero, else `on_false`; optionally the row maximum.

    (nki.isa.select_reduce, NKI 0.6)
    """
    # Constraints.
    operands = (("dst", dst), ("predicate", predicate), ("on_true", on_true))
    check_tiles(*operands)
    check_not_both_psum(("on_true", on_true), ("predicate", predicate))
    if not (predicate.dtype.is_integer and predicate.dtype.itemsize < 4):
        raise IllegalOperand("predicate", "int8, uint8, int16 or uint16", str(predicate.dtype))
    if on_true.dtype in (dtypes.int32, dtypes.uint32, dtypes.tfloat32):
        raise IllegalOperand("on_true", "a type other than int32, uint32, tfloat32", on_true.dtype)
    partitions = on_true.geometry.partitions
    other = scalar_operand(core, "on_false", on_false, partitions)
    _check_command(reduce_cmd, (_IDLE, *_COMMANDS[:2]))
    maximum = reduction(core, "reduce_op", reduce_op, _MAX_ONLY)
    results = check_result("reduce_res", reduce_res, partitions)
    _check_float("reduce_res", reduce_res)
    registers = accumulator(core, _VECTOR, maximum, reduce_cmd, reduce_res, on_true)
    _forget_if_idle(core, reduce_cmd)

    # Cost.
    facts = compute_facts(
        dst, (predicate, on_true), "select", reads_accumulator=reduce_res is not None
    )

    # Meaning.
    def meaning() -> None:
        chosen = predicate.flat() != 0
        if reverse_pred:
            chosen = ~chosen
        values = np.where(chosen, on_true.f32(), f32_of(other))
        dst.store(values)
        if registers is not None:
            registers.update(core, values.max(axis=1))

    reads = (predicate, on_true, *tiles_among(other))
    return core.issue("select_reduce", tr.VECTOR, facts, (dst, *results), reads, meaning, name)


@instruction
def range_select(
    core: Core,
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Any,
    comp_op1: Any,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: Any = reduce_cmd.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Any = _MAXIMUM,
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> NkiInstruction:
    """Keep the elements whose position satisfies two comparisons, else the most negative float32.

    The position is range_start plus the index in the row; narrow float types turn the fill value
    into -inf. The row maximum goes to the accumulators (nki.isa.range_select, NKI 0.6; gen3+).
    """
    # Constraints.
    check_generation(core, nc_version.gen3, "range_select")
    operands = (("dst", dst), ("on_true_tile", on_true_tile))
    check_tiles(*operands)
    partitions, elements = on_true_tile.geometry.partitions, on_true_tile.geometry.elements
    _check_float("on_true_tile", on_true_tile)
    comparisons = []
    for operand, op in (("comp_op0", comp_op0), ("comp_op1", comp_op1)):
        if op_name(op) not in _COMPARISONS:
            raise IllegalOperand(operand, ", ".join(sorted(_COMPARISONS)), op_name(op) or repr(op))
        comparisons.append(alu(core, operand, op))
    for operand, bound in (("bound0", bound0), ("bound1", bound1)):
        if type(bound) is not NkiTensor:
            raise IllegalOperand(operand, f"a tensor of shape ({partitions}, 1)", repr(bound))
        scalar_operand(core, operand, bound, partitions)
        check_dtype(operand, bound, dtypes.float32)
    if not isinstance(range_start, int) or not 0 <= range_start + elements <= 1 << 24:
        raise IllegalOperand(
            "range_start", "an int with all positions below 2^24", f"{range_start!r} + {elements}"
        )
    if np.float32(on_false_value) != np.float32(FP32_MIN):
        raise IllegalOperand("on_false_value", f"{FP32_MIN}", repr(on_false_value))
    _check_command(reduce_cmd, (_IDLE, *_COMMANDS[:2]))
    maximum = reduction(core, "reduce_op", reduce_op, _MAX_ONLY)
    results = check_result("reduce_res", reduce_res, partitions)
    registers = accumulator(core, _VECTOR, maximum, reduce_cmd, reduce_res, on_true_tile)
    _forget_if_idle(core, reduce_cmd)

    # Cost.
    facts = compute_facts(
        dst, (on_true_tile,), "range_select", reads_accumulator=reduce_res is not None
    )

    # Meaning.
    def meaning() -> None:
        positions = np.arange(range_start, range_start + elements, dtype=np.float32)
        kept = comparisons[0].apply(positions, bound0.f32()) != 0
        kept &= comparisons[1].apply(positions, bound1.f32()) != 0
        values = np.where(kept, on_true_tile.f32(), np.float32(FP32_MIN))
        dst.store(values)
        if registers is not None:
            registers.update(core, values.max(axis=1))

    reads = (on_true_tile, bound0, bound1)
    return core.issue("range_select", tr.VECTOR, facts, (dst, *results), reads, meaning, name)


@instruction
def tensor_scalar_reduce(
    core: Core,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: Any = reduce_cmd.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """Compute ``dst = data op0 operand0`` and combine each row of it into the accumulators.

    `reduce_res_negate` changes the stored result only, not the registers
    (nki.isa.tensor_scalar_reduce, NKI 0.6).
    """
    # Constraints.
    operands = (("dst", dst), ("data", data))
    check_tiles(*operands)
    partitions = data.geometry.partitions
    if reverse0:
        raise IllegalOperand("reverse0", "False, as reversing is not supported", "True")
    first = stage(core, 0, op0, operand0, False, partitions)
    stages = () if first is None else (first,)
    check_vector_operators(op0=first and first.op)
    check_stage_types(data, dst, stages)
    operator = reduction(core, "reduce_op", reduce_op, _TSR_REDUCTIONS)
    _check_command(reduce_cmd, _COMMANDS)
    initial = _initial(core, "reduce_init", reduce_cmd, reduce_init, partitions)
    results = check_result("reduce_res", reduce_res, partitions)
    registers = accumulator(core, _VECTOR, operator, reduce_cmd, reduce_res, data, initial)

    # Cost.
    function = first.op.name if first is not None else "bypass"
    facts = compute_facts(dst, (data,), function, reads_accumulator=reduce_res is not None)

    # Meaning.
    def meaning() -> None:
        values = data.f32()
        if first is not None:
            values = first.apply(values)
        dst.store(values)
        if registers is not None:
            registers.update(core, reduce_last(operator, values), negate=reduce_res_negate)

    reads = (data, *tensors_of(stages), *tiles_among(initial))
    return core.issue(
        "tensor_scalar_reduce", tr.VECTOR, facts, (dst, *results), reads, meaning, name
    )


def _initial(core: Core, operand: str, command: Any, value: Any, partitions: int) -> Any:
    """Check the start value that load_reduce needs and no other command takes."""
    if command is not reduce_cmd.load_reduce:
        if value is not None:
            raise IllegalOperand(operand, "None unless reduce_cmd is load_reduce", repr(value))
        return None
    if value is None:
        raise IllegalOperand(operand, "a number or a (P, 1) tensor for load_reduce", "None")
    return _float_operand(core, operand, value, partitions)


def _float_operand(core: Core, operand: str, value: Any, partitions: int) -> Any:
    """A number or a float32 (P, 1) tensor."""
    found = scalar_operand(core, operand, value, partitions)
    if type(found) is NkiTensor:
        check_dtype(operand, found, dtypes.float32)
    return found


@instruction
def tensor_scalar_cumulative(
    core: Core,
    dst: NkiTensor,
    src: NkiTensor,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: Any = reduce_cmd.reset_reduce,
    name: str | None = None,
) -> NkiInstruction:
    """Write the running value ``reg = (src op0 imm0) op1 reg`` of each row.

    (nki.isa.tensor_scalar_cumulative, NKI 0.6)
    """
    # Constraints.
    operands = (("dst", dst), ("src", src))
    check_tiles(*operands)
    partitions = src.geometry.partitions
    for operand, value in operands:
        if value.dtype.is_integer and value.dtype.itemsize == 4:
            raise IllegalOperand(operand, "a float or an 8- or 16-bit integer", str(value.dtype))
    first = stage(core, 0, op0, imm0, False, partitions)
    stages = () if first is None else (first,)
    check_vector_operators(op0=first and first.op)
    if first is not None and first.op.arity == 2:
        _float_operand(core, "imm0", imm0, partitions)
    operator = reduction(core, "op1", op1, _CUMULATIVE)
    _check_command(reduce_cmd, _COMMANDS)
    initial = _initial(core, "imm1", reduce_cmd, imm1, partitions)
    registers = accumulator(core, _VECTOR, operator, reduce_cmd, None, src, initial)
    if registers is None:  # no command of this instruction leaves them alone
        raise IllegalOperand("reduce_cmd", "a command that uses the registers", "idle")

    # Cost.
    function = f"{first.op.name if first else 'bypass'},{operator.name}"
    facts = compute_facts(dst, (src,), function)

    # Meaning.
    def meaning() -> None:
        values = src.f32()
        if first is not None:
            values = first.apply(values)
        lanes = registers.lanes(core)
        running = _running(operator, values, lanes)
        dst.store(running)
        lanes[...] = running[:, -1]

    reads = (src, *tensors_of(stages), *tiles_among(initial))
    return core.issue("tensor_scalar_cumulative", tr.VECTOR, facts, (dst,), reads, meaning, name)


def _running(operator: AluOp, values_PF: Array, start_P: Array) -> Array:
    """Running value of ``reg = value op reg`` along each row."""
    if operator.name != "subtract":
        steps = np.concatenate((start_P[:, None], values_PF), axis=1)
        ufunc: Any = operator.apply
        return np.asarray(ufunc.accumulate(steps, axis=1)[:, 1:])
    result = np.empty_like(values_PF)
    state = start_P
    for column in range(values_PF.shape[1]):
        state = result[:, column] = values_PF[:, column] - state
    return result


@instruction
def exponential(
    core: Core,
    dst: NkiTensor,
    src: NkiTensor,
    max_value: Any = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Any = reduce_cmd.idle,
    reduce_init: Any = 0.0,
    name: str | None = None,
) -> NkiInstruction:
    """Compute ``exp(src - max_value)`` and optionally add each row to the accumulators.

    (nki.isa.exponential, NKI 0.6; gen4)
    """
    # Constraints.
    check_generation(core, nc_version.gen4, "exponential")
    operands = (("dst", dst), ("src", src))
    check_tiles(*operands)
    for operand, value in operands:
        if value.ndim > 4:
            raise IllegalOperand(operand, "at most 4 axes", str(value.ndim))
    if dst.dtype is dtypes.uint32 or "x" in (dst.dtype.kind, src.dtype.kind):
        raise IllegalOperand("dst", "a type other than uint32 and the packed ones", str(dst.dtype))
    partitions = src.geometry.partitions
    shift = _float_operand(core, "max_value", max_value, partitions)
    _check_command(reduce_cmd, (_IDLE, *_COMMANDS))
    loads = reduce_cmd is _COMMANDS[2]
    if not loads and not (isinstance(reduce_init, int | float) and reduce_init == 0):
        raise IllegalOperand(
            "reduce_init", "0.0 unless reduce_cmd is load_reduce", repr(reduce_init)
        )
    initial = _float_operand(core, "reduce_init", reduce_init, partitions)
    results = check_result("reduce_res", reduce_res, partitions)
    _check_float("reduce_res", reduce_res)
    registers = accumulator(core, _VECTOR, ALU_OPS["add"], reduce_cmd, reduce_res, src, initial)
    _forget_if_idle(core, reduce_cmd)

    # Cost.
    facts = compute_facts(dst, (src,), "exp", reads_accumulator=reduce_res is not None)

    # Meaning.
    def meaning() -> None:
        values = np.exp(src.f32() - f32_of(shift))
        dst.store(values)
        if registers is not None:
            registers.update(core, values.sum(axis=1))

    reads = (src, *tiles_among(shift, initial))
    return core.issue("exponential", tr.VECTOR, facts, (dst, *results), reads, meaning, name)
