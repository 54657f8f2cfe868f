"""Scalar engine: activation functions with scale, bias and a running row sum.

The accumulators hold one float32 per lane and are shared by all instructions of this file. Sums are
taken of the float32 results, before they are rounded to the destination's type (assumed).

Not modelled: the error of the piecewise polynomials. Inputs outside the documented range of a
function are reported as a finding, not refused: lanes that nobody uses may hold anything.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from nki_sim import dtypes
from nki_sim.constants import engine as Engine
from nki_sim.constants import nc_version, reduce_cmd
from nki_sim.dtypes import Array
from nki_sim.errors import IllegalOperand
from nki_sim.isa._arithmetic import (
    Accumulator,
    Stage,
    accumulator,
    alu,
    check_result,
    f32_of,
    op_name,
    reduction,
    result_array,
    tensors_of,
    tiles_among,
)
from nki_sim.isa._checks import (
    ENGINE_IDS,
    check_engine,
    check_generation,
    check_gpsimd_memory,
    check_same_dtype,
    check_tiles,
    compute_facts,
    scalar_operand,
)
from nki_sim.isa._instruction import instruction
from nki_sim.isa.functions import (
    ACTIVATIONS,
    ALU_OPS,
    PARAMETRIC_ACTIVATION,
    Activation,
    prelu,
    reduce_last,
)
from nki_sim.machine import Core, NkiInstruction, NkiTensor

_Reduces = tuple[Any, NkiTensor | None, Any]  # operator, result and command of a reduction

_SCALAR: Final = "scalar"
_IDLE: Final = reduce_cmd.idle
_RESET_REDUCE: Final = reduce_cmd.reset_reduce
_COMMANDS: Final = (_IDLE, reduce_cmd.reset, reduce_cmd.reduce, _RESET_REDUCE)
_REDUCTIONS: Final = frozenset({"add"})
_REDUCTIONS_GEN4: Final = frozenset({"add", "maximum", "minimum", "abs_max", "abs_min"})
_PIPELINES: Final = frozenset(
    {
        ("multiply", "add"),
        ("multiply", "subtract"),
        ("multiply", "bypass"),
        ("add", "bypass"),
        ("subtract", "bypass"),
        ("bypass", "bypass"),
    }
)


def _function(op: Any) -> Activation:
    name = op_name(op)
    found = ACTIVATIONS.get(name)
    if found is None:
        hint = "Use nisa.activate2, which takes the slope" if name == PARAMETRIC_ACTIVATION else ""
        raise IllegalOperand("op", "an activation function of nki.language", name or repr(op), hint)
    return found


def _check_range(core: Core, function: Activation, values: Array) -> None:
    """Report inputs for which the hardware's result is not defined."""
    if not function.is_bounded:
        return
    low, high = np.float32(function.low), np.float32(function.high)
    magnitudes = np.abs(values) if function.on_magnitude else values
    outside = (magnitudes < low) | (magnitudes > high)
    outside &= np.isfinite(values) & (values != 0)
    if outside.any():
        worst = float(values[outside].flat[0])
        core.note(
            "range",
            f"activation: {function.name} needs {low:.3g} to {high:.3g}; found {worst:.3g}",
        )


def _engine_id(core: Core, engine: Any, tensors: tuple[NkiTensor, ...], reduces: bool) -> int:
    """Return the engine that activates: Scalar, or GpSimd where a kernel for gen4 requests it.

    GpSimd has no reduction registers (nki.isa.activation, NKI 0.7).
    """
    chosen = check_engine(core, engine, (Engine.scalar, Engine.gpsimd), Engine.scalar)
    if chosen is Engine.gpsimd:
        check_generation(core, nc_version.gen4, "engine gpsimd")
        for k, tensor in enumerate(tensors):
            check_gpsimd_memory((("dst", "data")[k] if k < 2 else "scalar operand", tensor))
        if reduces:
            raise IllegalOperand("engine", "scalar, which alone has reduction registers", "gpsimd")
    return ENGINE_IDS[chosen]


def _registers(
    core: Core, reduces: _Reduces, allowed: frozenset[str], data: NkiTensor
) -> Accumulator | None:
    """Prepare the reduction registers; None if nothing reduces."""
    op, result, command = reduces
    if command is _IDLE and result is None:
        return None
    if command not in _COMMANDS:
        raise IllegalOperand("reduce_cmd", "idle, reset, reduce or reset_reduce", repr(command))
    operator = ALU_OPS["add"]
    if op is not None or command is not _IDLE:
        operator = reduction(core, "reduce_op", op, allowed)
    return accumulator(core, _SCALAR, operator, command, result, data)


def _check_tiles(dst: NkiTensor, data: NkiTensor) -> None:
    check_tiles(("data", data), ("dst", dst))
    for operand, value in (("dst", dst), ("data", data)):
        if value.dtype.kind == "x":
            raise IllegalOperand(operand, "an arithmetic type", str(value.dtype))


@instruction
def activation(
    core: Core,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Any = reduce_cmd.idle,
    engine: Any = Engine.scalar,
    name: str | None = None,
) -> NkiInstruction:
    """Compute ``dst = op(data * scale + bias)`` in float32, with an optional running row sum.

    (nki.isa.activation, NKI 0.7)
    """
    reduces = reduce_op, reduce_res, reduce_cmd
    return _activate(core, "activation", dst, op, data, (scale, bias), reduces, engine, name)


@instruction
def activation_reduce(
    core: Core,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    reduce_op: Any,
    reduce_res: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    name: str | None = None,
) -> NkiInstruction:
    """Compute `activation` and store the sum of each row in `reduce_res`.

    (nki.isa.activation_reduce, NKI 0.7)
    """
    if type(reduce_res) is not NkiTensor:
        raise IllegalOperand("reduce_res", "a tensor of shape (P, 1)", repr(reduce_res))
    factors, reduces = (scale, bias), (reduce_op, reduce_res, _RESET_REDUCE)
    unit = Engine.scalar
    return _activate(core, "activation_reduce", dst, op, data, factors, reduces, unit, name)


def _activate(
    core: Core,
    instruction_name: str,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    factors: tuple[Any, Any],
    reduces: _Reduces,
    engine: Any,
    name: str | None,
) -> NkiInstruction:
    """Issue an activation with its scale and bias."""
    # Constraints.
    (scale, bias), reduce_res = factors, reduces[1]
    _check_tiles(dst, data)
    partitions = data.geometry.partitions
    function = _function(op)
    factor = scalar_operand(core, "scale", scale, partitions)
    if type(factor) is NkiTensor and factor.dtype is not dtypes.float32:
        raise IllegalOperand("scale", "a number or a float32 tensor", str(factor.dtype))
    shift = None if bias is None else scalar_operand(core, "bias", bias, partitions)
    if type(shift) is NkiTensor:
        if shift.dtype is dtypes.tfloat32:
            raise IllegalOperand("bias", "any type but tfloat32", "tfloat32")
    elif shift is not None and core.target.version < nc_version.gen3:
        raise IllegalOperand("bias", f"a ({partitions}, 1) tensor before gen3", repr(bias))
    results = check_result("reduce_res", reduce_res, partitions)
    registers = _registers(core, reduces, _REDUCTIONS, data)
    tiles = tiles_among(shift, factor)
    chosen = _engine_id(core, engine, (dst, data, *tiles), registers is not None)

    # Cost.
    facts = compute_facts(dst, (data,), function.name, reads_accumulator=reduce_res is not None)

    # Meaning.
    def meaning() -> None:
        values = data.f32()
        if type(factor) is NkiTensor or factor != 1.0:
            values = values * f32_of(factor)
        if type(shift) is NkiTensor or shift:
            values = values + f32_of(shift)
        _check_range(core, function, values)
        out = result_array(dst, values.shape[0], ())
        values = function.into(out, values)
        if values is not out:
            dst.store(values)
        if registers is not None:
            registers.update(core, values.sum(axis=1, dtype=np.float32))

    writes, reads = (dst, *results), (data, *tiles)
    return core.issue(instruction_name, chosen, facts, writes, reads, meaning, name)


@instruction
def activate2(
    core: Core,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    imm0: Any,
    imm1: Any,
    op0: Any,
    op1: Any,
    relu_param: Any = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Any = reduce_cmd.idle,
    engine: Any = Engine.scalar,
    name: str | None = None,
) -> NkiInstruction:
    """Compute ``dst = op((data op0 imm0) op1 imm1)`` with an optional running reduction.

    (nki.isa.activate2, NKI 0.7; gen4)
    """
    # Constraints.
    check_generation(core, nc_version.gen4, "activate2")
    _check_tiles(dst, data)
    partitions = data.geometry.partitions
    is_prelu = op_name(op) == PARAMETRIC_ACTIVATION
    function = None if is_prelu else _function(op)
    slope = scalar_operand(core, "relu_param", relu_param, partitions)
    names = tuple(["bypass" if item is None else op_name(item) for item in (op0, op1)])
    if names not in _PIPELINES:
        pairs = ", ".join("+".join(pair) for pair in sorted(_PIPELINES))
        raise IllegalOperand("op0, op1", f"one of {pairs}", "+".join(names))
    for number, reverse in enumerate((reverse0, reverse1)):
        if reverse and names[number] == "bypass":
            raise IllegalOperand(f"reverse{number}", f"False where op{number} is bypass", "True")
    stages = []
    codes = ((op0, imm0, reverse0), (op1, imm1, reverse1))
    for number, (code, value, reverse) in enumerate(codes):
        if names[number] != "bypass":
            operand = scalar_operand(core, f"imm{number}", value, partitions)
            stages.append(Stage(alu(core, f"op{number}", code), operand, bool(reverse)))
    tiles = tensors_of(stages)
    if len(tiles) == 2:
        check_same_dtype(("imm0", tiles[0]), ("imm1", tiles[1]))
    results = check_result("reduce_res", reduce_res, partitions)
    registers = _registers(core, (reduce_op, reduce_res, reduce_cmd), _REDUCTIONS_GEN4, data)
    reads = (data, *tiles, *tiles_among(slope))
    chosen = _engine_id(core, engine, (dst, *reads), registers is not None)

    # Cost.
    label = function.name if function is not None else PARAMETRIC_ACTIVATION
    facts = compute_facts(dst, (data,), label, reads_accumulator=reduce_res is not None)

    # Meaning.
    def meaning() -> None:
        values = data.f32()
        for item in stages:
            values = item.apply(values)
        if function is None:
            values = prelu(values, f32_of(slope))
        else:
            _check_range(core, function, values)
            values = function.apply(values)
        dst.store(values)
        if registers is not None:
            registers.update(core, reduce_last(registers.op, values))

    return core.issue("activate2", chosen, facts, (dst, *results), reads, meaning, name)
