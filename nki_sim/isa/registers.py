"""Registers (nki.isa.register_alloc and friends, NKI 0.6) and scalars (NKI 0.7)."""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_sim import trace as tr
from nki_sim.dtypes import int32, int64
from nki_sim.errors import IllegalOperand, LanguageError
from nki_sim.isa._instruction import instruction
from nki_sim.machine import Core, NkiInstruction, NkiScalar, NkiTensor, VirtualRegister
from nki_sim.machine.tensor import check_defined


def _note(core: Core, op: str, tensor: NkiTensor | None, name: str | None = None) -> NkiInstruction:
    """Append a register instruction to the trace, under another name with the same price."""
    space = -1 if tensor is None else tensor._alloc.space
    ids = () if tensor is None else (tensor.range_id(core.trace),)
    index = core.emit(name or op, tr.SYNC, tr.ControlFacts(op, space), ids, ())
    if tensor is not None and space == tr.SBUF and not tensor._alloc.counted:
        core.count_sbuf(tensor._alloc)
    if tensor is not None and tensor._alloc.shared_log is not None:
        tensor._alloc.shared_log.read(core, tensor, core.line)
    return NkiInstruction(index, core.trace)


def _one_element(operand: str, value: Any) -> NkiTensor:
    if type(value) is not NkiTensor or value.size != 1:
        raise IllegalOperand(operand, "a tensor of one element", repr(value))
    if value._alloc.space == tr.PSUM:
        raise IllegalOperand(operand, "a tensor in SBUF or HBM", "psum")
    return value


def _word(operand: str, value: Any) -> NkiTensor:
    """Check what a register is loaded from or stored to."""
    tensor = _one_element(operand, value)
    if tensor.dtype.itemsize > 4 or tensor.dtype.kind == "x":
        raise IllegalOperand(operand, "an element of at most 32 bits", str(tensor.dtype))
    return tensor


def _integer(core: Core, operand: str, value: Any) -> NkiTensor:
    """Check what a scalar is loaded from or stored to."""
    if core.nki == "0.6":
        raise LanguageError(
            "scalar", "registers in NKI 0.6", "an NkiScalar", "Use nisa.register_load"
        )
    tensor = _one_element(operand, value)
    if tensor.dtype not in (int32, int64):
        raise IllegalOperand(operand, "an element of int32 or int64", str(tensor.dtype))
    return tensor


def _register(operand: str, value: Any) -> VirtualRegister:
    if not isinstance(value, VirtualRegister):
        raise IllegalOperand(operand, "a register", repr(value))
    return value


@instruction
def register_alloc(core: Core, x: Any = None) -> VirtualRegister:
    """Return a new register, without a value or holding `x`: an int, or a tensor to load."""
    register = VirtualRegister()
    if isinstance(x, NkiTensor):
        _load(core, register, x)
    elif isinstance(x, VirtualRegister):
        register.write(x.state)
        _note(core, "register_move", None)
    elif x is not None:
        register.write(int(x))
    return register


@instruction
def register_move(core: Core, dst: VirtualRegister, src: Any) -> NkiInstruction:
    """Set a register to an int or to another register."""
    value = src.state if isinstance(src, VirtualRegister) else int(src)
    _register("dst", dst).write(value)
    return _note(core, "register_move", None)


@instruction
def register_load(core: Core, dst: VirtualRegister, src: NkiTensor) -> NkiInstruction:
    """Load one element of SBUF or HBM into a register."""
    return _load(core, _register("dst", dst), src)


def _load(core: Core, dst: VirtualRegister, src: Any) -> NkiInstruction:
    source = _word("src", src)
    check_defined(source)
    value = source.array().reshape(-1)[0]
    dst.write(int(value) if source.dtype.kind in "iub" else float(value))
    return _note(core, "register_load", source)


@instruction
def register_store(core: Core, dst: NkiTensor, src: VirtualRegister) -> NkiInstruction:
    """Store a register in one element of SBUF or HBM."""
    target = _word("dst", dst)
    register = _register("src", src)
    if register.state is None:
        raise IllegalOperand("src", "a register with a value", "none")
    state = register.state

    def meaning() -> None:
        target.store(np.array([state]))

    facts = tr.ControlFacts("register_store", target._alloc.space)
    return core.issue("register_store", tr.SYNC, facts, (target,), (), meaning)


@instruction
def scalar_load(core: Core, src: NkiTensor) -> NkiScalar:
    """Return one int32 or int64 element of SBUF or HBM as a scalar of that type."""
    source = _integer(core, "src", src)
    check_defined(source)
    value = int(source.array().reshape(-1)[0])
    _note(core, "register_load", source, "scalar_load")
    return NkiScalar(value, source.dtype)


@instruction
def scalar_store(core: Core, dst: NkiTensor, value: NkiScalar) -> None:
    """Store a scalar in one element of its type in SBUF or HBM."""
    target = _integer(core, "dst", dst)
    if not isinstance(value, NkiScalar):
        raise IllegalOperand(
            "value", "an NkiScalar", repr(value), "Use nisa.memset for a number known to Python"
        )
    if value.dtype != target.dtype:
        raise IllegalOperand("value", f"{target.dtype} like dst", str(value.dtype))
    number = value.read()

    def meaning() -> None:
        target.array()[...] = number

    facts = tr.ControlFacts("register_store", target._alloc.space)
    core.issue("scalar_store", tr.SYNC, facts, (target,), (), meaning)
