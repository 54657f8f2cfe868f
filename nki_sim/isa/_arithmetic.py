"""Operators, scalar operands and accumulator registers of the compute instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from nki_sim.constants import reduce_cmd
from nki_sim.dtypes import Array, float32
from nki_sim.errors import IllegalOperand, NkiValidationError
from nki_sim.isa._checks import check_integers, check_on_chip, scalar_operand
from nki_sim.isa.functions import ALU_OPS, REDUCE_ALIASES, AluOp
from nki_sim.machine import Core, NkiTensor
from nki_sim.machine.tensor import check_defined

LANES: Final = 128
_EXACT_IN_TENSOR_SCALAR: Final = frozenset({"add", "subtract", "multiply", "bypass"})
_FIRST_GENERATION: Final = 2
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def op_name(op: Any) -> str:
    """Name of an operator of the language; empty for anything else."""
    return str(getattr(op, "name", None) or getattr(op, "__name__", ""))


def alu(core: Core, operand: str, op: Any, arity: int | None = None) -> AluOp:
    """Return the ALU operator that `op` names.

    Raises:
        IllegalOperand: no ALU operator, of another arity, or not on this generation.
    """
    name = op_name(op)
    found = ALU_OPS.get(name)
    if found is None or (arity is not None and found.arity != arity):
        kind = {None: "", 1: " of one operand", 2: " of two operands"}[arity]
        raise IllegalOperand(operand, f"an ALU operator of nki.language{kind}", name or repr(op))
    least = found.minimum_generation
    if least > _FIRST_GENERATION and least > core.target.version.value:
        raise IllegalOperand(
            operand,
            f"an operator of {core.target.version.name}",
            f"{name}, which needs gen{found.minimum_generation}",
        )
    return found


def reduction(core: Core, operand: str, op: Any, allowed: frozenset[str] | None = None) -> AluOp:
    """Return the reduction operator that `op` names; `nl.max` and `nl.min` are accepted too."""
    name = op_name(op)
    found = ALU_OPS.get(REDUCE_ALIASES.get(name, name))
    if found is None or found.reduce_identity is None or (allowed and found.name not in allowed):
        expected = ", ".join(sorted(allowed)) if allowed else "a reduction operator"
        raise IllegalOperand(operand, expected, name or repr(op))
    if found.minimum_generation > core.target.version.value:
        raise IllegalOperand(operand, f"an operator of {core.target.version.name}", name)
    return found


class Stage(NamedTuple):
    """One operator of a tensor_scalar: ``x op operand``, or ``operand op x`` if reversed."""

    op: AluOp
    operand: Any
    reverse: bool

    def apply(self, values: Array, out: Array | None = None) -> Array:
        """Compute in float32, in `out` where the operator can."""
        op = self.op
        if op.arity == 1:
            return op.into(out, values)
        other = f32_of(self.operand)
        return op.into(out, other, values) if self.reverse else op.into(out, values, other)

    def apply_exact(self, values: Array) -> Array:
        """Compute on int64 arrays."""
        op = self.op
        if op.arity == 1:
            return op.apply(values)
        operand = self.operand
        other = operand.flat().astype(np.int64) if type(operand) is NkiTensor else int(operand)
        return op.apply(other, values) if self.reverse else op.apply(values, other)

    def apply_bits(self, values: Array) -> Array:
        """Compute on the bit patterns of unsigned integers."""
        op = self.op
        if op.arity == 1:
            return op.apply(values)
        operand = self.operand
        if type(operand) is NkiTensor:
            other = bits(operand).astype(values.dtype)
        else:
            mask = (1 << (8 * values.dtype.itemsize)) - 1
            other = values.dtype.type(int(operand) & mask)
        return op.apply(other, values) if self.reverse else op.apply(values, other)


def result_array(dst: NkiTensor, rows: int, inputs: Sequence[NkiTensor]) -> Array | None:
    """Where float32 results may be computed in place of a temporary: the destination itself.

    None if it has another type or shape, if several results go to one place, or if it shares its
    tensor with one of `inputs`, which a later operator still has to read.
    """
    if dst.dtype is not float32 or any(dst._alloc is value._alloc for value in inputs):
        return None
    array = dst.array()
    is_matrix = array.ndim == 2 and array.shape[0] == rows
    return array if is_matrix and 0 not in array.strides else None


def run_stages(dst: NkiTensor, data: NkiTensor, stages: tuple[Stage, ...]) -> None:
    """Apply the operators in float32 and write the result."""
    values = data.f32()
    out = result_array(dst, values.shape[0], tensors_of(stages))
    for item in stages:
        values = item.apply(values, out)
    if values is not out:
        dst.store(values)


def stage(
    core: Core, number: int, op: Any, operand: Any, reverse: bool, partitions: int
) -> Stage | None:
    """Check operator `number` of a tensor_scalar; None (no operator) means that it is skipped."""
    where = f"op{number}"
    if op is None:
        if operand is not None:
            raise IllegalOperand(f"operand{number}", f"None where {where} is None", repr(operand))
        return None
    found = alu(core, where, op)
    if found.arity == 1:
        if operand is not None and not (isinstance(operand, int | float) and operand == 0):
            raise IllegalOperand(f"operand{number}", f"None or 0 for {found.name}", repr(operand))
        return None if found.name == "bypass" else Stage(found, None, False)
    value = scalar_operand(core, f"operand{number}", operand, partitions)
    if found.is_bitvec:
        integral = value.dtype.is_integer if type(value) is NkiTensor else isinstance(value, int)
        if not integral:
            kind = value.dtype if type(value) is NkiTensor else repr(value)
            raise IllegalOperand(f"operand{number}", f"an integer for {found.name}", str(kind))
    return Stage(found, value, bool(reverse))


def check_vector_operators(**operators: AluOp | None) -> None:
    """The operators, by operand, are arithmetic of the Vector engine."""
    for operand, found in operators.items():
        if found is not None and (found.is_bitvec or found.gpsimd_only):
            raise IllegalOperand(operand, "an arithmetic operator of the Vector engine", found.name)


def check_stage_types(data: NkiTensor, dst: NkiTensor, stages: tuple[Stage, ...]) -> None:
    """Bit operators take integers only and do not mix with arithmetic; arithmetic takes floats.

    An integer (P, 1) operand is accepted where it takes part in 32-bit address arithmetic.
    """
    if len(stages) > 1 and stages[0].op.is_bitvec != stages[1].op.is_bitvec:
        names = ", ".join(item.op.name for item in stages)
        raise IllegalOperand("op1", "two bit operators or two arithmetic operators", names)
    if stages and stages[0].op.is_bitvec:
        check_integers(stages[0].op.name, ("data", data), ("dst", dst))
        return
    for number, item in enumerate(stages):
        operand_tensor = item.operand
        if type(operand_tensor) is NkiTensor and not operand_tensor.dtype.is_float:
            if operand_tensor.dtype.is_integer and is_integer32(data):
                continue
            raise IllegalOperand(
                f"operand{number}",
                "a floating-point (P, 1) tensor for arithmetic",
                str(operand_tensor.dtype),
            )


def is_integer32(tensor: NkiTensor) -> bool:
    """Whether the elements are 32-bit integers."""
    return tensor.dtype.itemsize == 4 and tensor.dtype.is_integer


def is_exact(data: NkiTensor, dst: NkiTensor, stages: tuple[Stage, ...]) -> bool:
    """Whether a tensor_scalar is address arithmetic: 32-bit integers and integer operands."""
    if not (is_integer32(data) and is_integer32(dst)):
        return False
    for item in stages:
        if item.op.name not in _EXACT_IN_TENSOR_SCALAR:
            return False
        operand = item.operand
        if type(operand) is NkiTensor:
            if not operand.dtype.is_integer:
                return False
        elif isinstance(operand, float):
            return False
    return True


def bits(tensor: NkiTensor) -> Array:
    """The elements as unsigned integers of their size, [P, elements]."""
    flat = tensor.flat()
    return flat.view(_UNSIGNED[flat.dtype.itemsize])


def store_bits(dst: NkiTensor, values: Array) -> None:
    """Write bit patterns; a wider destination gets zeros above, a narrower one the low bits."""
    array = dst.array()
    unsigned = values.astype(_UNSIGNED[array.dtype.itemsize], copy=False)
    array[...] = unsigned.view(array.dtype).reshape(array.shape)


def store_wrapped(dst: NkiTensor, values: Array) -> None:
    """Write int64 results as 32-bit integers do: modulo 2^32."""
    array = dst.array()
    if values.dtype.kind == "f":  # comparisons give 1.0 and 0.0
        dst.store(values)
    else:
        array[...] = values.astype(array.dtype).reshape(array.shape)


def tensors_of(stages: Sequence[Stage]) -> list[NkiTensor]:
    """The (P, 1) tensors among the operands."""
    return tiles_among(*[item.operand for item in stages])


def tiles_among(*values: Any) -> list[NkiTensor]:
    """The tensors among scalar operands."""
    return [value for value in values if type(value) is NkiTensor]


def f32_of(value: Any) -> Any:
    """A scalar operand in float32: [P, 1], or one number."""
    return value.f32() if type(value) is NkiTensor else np.float32(value)


def is_defined(tensor: NkiTensor) -> bool:
    """Whether every element holds a value that somebody wrote."""
    try:
        check_defined(tensor)
    except NkiValidationError:
        return False
    return True


# Accumulator registers: one float32 per lane, one set on the Vector and one on the Scalar engine.


class Accumulator(NamedTuple):
    """What an instruction does with the accumulator registers of its engine.

    `op` combines; `register` is the key of the set in `Core.accumulators`; `initial` the number or
    (P, 1) tensor that load_reduce starts from; `result` the (P, 1) tensor that gets the registers,
    or None.
    """

    op: AluOp
    register: str
    updates: bool
    initial: Any
    result: NkiTensor | None
    start: int
    partitions: int

    def lanes(self, core: Core) -> Array:
        """The registers of these partitions, with the initial value loaded."""
        lanes: Array = core.accumulators[self.register][self.start : self.start + self.partitions]
        if self.initial is not None:
            lanes[...] = f32_of(self.initial).reshape(-1)
        return lanes

    def update(self, core: Core, row_values: Array, *, negate: bool = False) -> None:
        """Combine one value per row into the registers and store them if asked to."""
        lanes = self.lanes(core)
        if self.updates:
            lanes[...] = self.op.apply(lanes, row_values)
        if self.result is not None:
            self.result.store((-lanes if negate else lanes).reshape(-1, 1))


def accumulator(
    core: Core,
    register: str,
    op: AluOp,
    command: Any,
    result: NkiTensor | None,
    data: NkiTensor,
    initial: Any = None,
) -> Accumulator | None:
    """Prepare the registers for a command; None if the instruction does not touch them.

    Args:
        core: the running core.
        register: "vector" or "scalar".
        op: reduction operator.
        command: a member of `reduce_cmd`.
        result: destination of the registers, already checked, or None.
        data: the input, which decides the lanes.
        initial: number or (P, 1) tensor of load_reduce.
    """
    if not isinstance(command, reduce_cmd):
        raise IllegalOperand("reduce_cmd", "a member of nki.isa.reduce_cmd", repr(command))
    geometry = data.geometry
    start, partitions = geometry.start_partition, geometry.partitions
    if command in (reduce_cmd.reset, reduce_cmd.reset_reduce, reduce_cmd.load_reduce):
        core.accumulators[register] = np.full(LANES, op.reduce_identity, np.float32)
    elif command is reduce_cmd.idle and result is None:
        return None
    elif register not in core.accumulators:
        raise IllegalOperand(
            "reduce_cmd",
            "a reset_reduce or load_reduce before the registers are used",
            f"{command.name} on registers that nobody set",
        )
    updates = command not in (reduce_cmd.idle, reduce_cmd.reset)
    loaded = initial if command is reduce_cmd.load_reduce else None
    return Accumulator(op, register, updates, loaded, result, start, partitions)


def check_result(name: str, result: NkiTensor | None, partitions: int) -> tuple[NkiTensor, ...]:
    """Check the (P, 1) tensor that receives accumulators; return it as a tuple of writes."""
    if result is None:
        return ()
    if type(result) is not NkiTensor:
        raise IllegalOperand(name, f"None or a tensor of shape ({partitions}, 1)", repr(result))
    check_on_chip((name, result))
    geometry = result.geometry
    if geometry.partitions != partitions or geometry.elements != 1:
        raise IllegalOperand(name, f"a tensor of shape ({partitions}, 1)", f"{list(result.shape)}")
    return (result,)
