"""Tensor engine: matrix multiplication and transpose through the systolic array.

Links: nki.isa.nc_matmul, nki.isa.nc_transpose (NKI 0.6); tiling and performance modes in the
Trainium 2 architecture guide. A product is rounded to float32 once, from the exact sum, and added
to what is in PSUM in float32: the order in which the hardware adds is not documented, nor the
precision of the four passes that float32 operands take.

Not checked here: that the moving operand of a transpose is an identity, and that operands flagged
as one-zero hold only ones and zeros.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from nki_sim import trace as tr
from nki_sim.constants import engine as Engine
from nki_sim.constants import matmul_perf_mode, nc_version
from nki_sim.dtypes import (
    FP8,
    Array,
    bfloat16,
    float8_e4m3,
    float8_e4m3fn,
    float16,
    float32,
    tfloat32,
    to_float32,
)
from nki_sim.errors import AccumulateError, IllegalOperand
from nki_sim.isa._arithmetic import result_array
from nki_sim.isa._checks import (
    check_engine,
    check_generation,
    check_memory,
    check_on_chip,
    check_partitions,
    check_same_dtype,
    compute_facts,
)
from nki_sim.isa._instruction import instruction
from nki_sim.isa._products import matrix_product
from nki_sim.machine import Core, NkiInstruction, NkiTensor
from nki_sim.machine.geometry import Geometry

_WIDE: Final = frozenset((float32, tfloat32))
_OPERANDS: Final = FP8 | _WIDE | {bfloat16, float16}
_STATIONARY_MAX: Final = 128
_VECTOR_BLOCK: Final = 32
_NO_MODE: Final = matmul_perf_mode.none
_FACTS: dict[Any, tr.MatmulFacts] = {}
_TYPES: set[tuple[Any, ...]] = set()  # combinations that keep the rules


@instruction
def nc_matmul(
    core: Core,
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: Any = _NO_MODE,
    name: str | None = None,
) -> NkiInstruction:
    """Compute ``dst[M, N] (+)= sum_k stationary[k, M] * moving[k, N]``.

    `accumulate` False overwrites, True adds, None overwrites what no matmul has written since the
    tensor was created and adds to the rest. `is_transpose` copies ``stationary.T`` bit by bit, with
    an identity as `moving`. `dst` may have more partitions than M; the others stay as they are.
    """
    # Constraints.
    mode = "none" if perf_mode is _NO_MODE else getattr(perf_mode, "value", perf_mode)
    double = mode == "double_row"
    if mode not in ("none", "double_row"):
        raise IllegalOperand("perf_mode", "none or double_row", str(perf_mode))
    check_in_sbuf("stationary", stationary)
    check_in_sbuf("moving", moving)
    held, streamed = stationary.geometry, moving.geometry
    k, pairs = held.partitions, 2 if double else 1
    m, n = held.elements // pairs, streamed.elements // pairs
    result = _check_shapes(core, dst, held, streamed, m, n)
    _check_types(core, dst, stationary, moving, is_transpose)
    if double:
        _check_double_row(core, stationary, moving, is_transpose)
    tile = _check_tile(core, k, m, stationary, moving, result, tile_position, tile_size, double)
    if is_transpose and (n != k or accumulate):
        raise IllegalOperand(
            "moving",
            f"an identity of {k} columns, and no accumulation",
            f"{n} columns, accumulate={accumulate}",
        )

    adds, mask = False, None
    if not is_transpose:
        adds, mask = accumulation(core, result, accumulate, (stationary, moving))

    # Cost.
    key = (
        held.profile,
        streamed.profile,
        result.dtype,
        is_transpose,
        mode,
        tile,
        is_stationary_onezero,
        is_moving_onezero,
        adds,
    )
    facts = _FACTS.get(key)
    if facts is None:
        facts = _FACTS[key] = tr.MatmulFacts(
            k,
            m,
            n,
            str(stationary.dtype),
            str(moving.dtype),
            str(result.dtype),
            is_transpose,
            str(mode),
            tile,
            int(is_stationary_onezero) + int(is_moving_onezero),
            accumulates=adds,
        )

    # Meaning.
    def meaning() -> None:
        if is_transpose:
            result.store(stationary.flat().T)
            return
        if double:
            a = stationary.f32().reshape(k * 2, m)
            b = moving.f32().reshape(k * 2, n)
        else:
            a, b = stationary.f32(), moving.f32()
        product = matrix_product(a, b)
        out = result_array(result, m, ()) if adds and mask is None else None
        if out is not None:
            out += product
            return
        store_sum(result, product, adds, mask)

    reads = (stationary, moving, result) if adds else (stationary, moving)
    handle = core.issue("nc_matmul", tr.TENSOR, facts, (result,), reads, meaning, name)
    _note_product(core, result, (stationary, moving))
    return handle


@instruction
def nc_transpose(
    core: Core,
    dst: NkiTensor,
    data: NkiTensor,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """Write the transpose of `data` [P, F] to `dst` [F, P]; free axes of `data` are flattened.

    The Tensor engine takes up to 128 x 128 from SBUF to PSUM, the Vector engine up to 32 x 32
    between SBUF and PSUM. `dst` may have more partitions than F.
    """
    # Constraints.
    check_on_chip(("dst", dst), ("data", data))
    rows, columns = data.geometry.partitions, data.geometry.elements
    default = Engine.tensor if dst._alloc.space == tr.PSUM else Engine.vector
    chosen = check_engine(core, engine, (Engine.tensor, Engine.vector), default)
    check_same_dtype(("data", data), ("dst", dst))
    limit = _VECTOR_BLOCK
    if chosen is Engine.tensor:
        check_memory("data", data, (tr.SBUF,))
        check_memory("dst", dst, (tr.PSUM,))
        limit = _STATIONARY_MAX
    if rows > limit or columns > limit:
        raise IllegalOperand(
            "data", f"at most {limit} x {limit} on the {chosen.name} engine", f"{rows} x {columns}"
        )
    if dst.geometry.elements != rows or dst.geometry.partitions < columns:
        raise IllegalOperand("dst", f"shape [{columns}, {rows}]", f"{list(dst.shape)}")
    result = first_rows(dst, columns)

    # Cost.
    def meaning() -> None:
        result.store(data.flat().T)

    if chosen is Engine.vector:
        facts = compute_facts(result, (data,), "transpose")
        return core.issue("nc_transpose", tr.VECTOR, facts, (result,), (data,), meaning, name)
    _check_bank(core, result)
    core.identity_bytes = max(core.identity_bytes, _STATIONARY_MAX * data.dtype.itemsize)
    dtype = str(data.dtype)
    pe_facts = tr.MatmulFacts(rows, columns, rows, dtype, dtype, str(result.dtype), True)

    # Meaning.
    handle = core.issue("nc_transpose", tr.TENSOR, pe_facts, (result,), (data,), meaning, name)
    coverage = result._alloc.accumulated
    if coverage is not None:
        coverage.add(result.geometry.box, result.geometry.walk)
    return handle


def check_in_sbuf(operand: str, value: Any) -> None:
    """A tensor in SBUF that keeps to the partition rule."""
    check_memory(operand, value, (tr.SBUF,))
    check_partitions(operand, value)


def first_rows(dst: NkiTensor, rows: int) -> NkiTensor:
    """Return the view of the first partitions, where the result goes."""
    if dst.shape[0] == rows:
        return dst
    return dst._derive((rows, *dst.shape[1:]), dst.strides, dst.offset)


def store_sum(result: NkiTensor, product_MN: Array, adds: bool, mask: Array | None) -> None:
    """Write a product, added to what is there as `accumulation` says."""
    if mask is not None:
        old = result.f32().reshape(product_MN.shape)
        product_MN += np.where(mask.reshape(product_MN.shape), old, np.float32(0))
    elif adds:
        product_MN += to_float32(result.flat())
    result.store(product_MN)


def check_product(core: Core, dst: NkiTensor, m: int, n: int) -> NkiTensor:
    """Check the destination of a product [M, N]; return the part of it that is written."""
    target = core.target
    limit = target.moving_max_bf16 if dst.dtype is bfloat16 else target.moving_max
    if n > limit:
        raise IllegalOperand("moving", f"at most {limit} columns", str(n))
    into = dst.geometry
    if into.elements != n or into.partitions < m:
        raise IllegalOperand("dst", f"shape [{m}, {n}]", f"{list(dst.shape)}")
    result = first_rows(dst, m)
    check_partitions("dst", result)
    return result


def _check_shapes(
    core: Core, dst: Any, stationary: Geometry, moving: Geometry, m: int, n: int
) -> NkiTensor:
    """Check sizes; return the part of the destination that is written."""
    check_memory("dst", dst, (tr.PSUM,))
    k = stationary.partitions
    if moving.partitions != k:
        raise IllegalOperand("moving", f"{k} partitions like stationary", str(moving.partitions))
    if stationary.start_partition != moving.start_partition:
        raise IllegalOperand(
            "moving",
            f"start partition {stationary.start_partition} like stationary",
            str(moving.start_partition),
        )
    if m > _STATIONARY_MAX:
        raise IllegalOperand("stationary", f"at most {_STATIONARY_MAX} columns", str(m))
    result = check_product(core, dst, m, n)
    _check_bank(core, result)
    return result


def _check_bank(core: Core, result: NkiTensor) -> None:
    """The result of one instruction is in one PSUM bank, up to generation 3."""
    bank = core.target.psum_bank_bytes
    box = result.geometry.box
    is_inside = box.byte_start // bank == (box.byte_end - 1) // bank
    if not is_inside and core.target.version < nc_version.gen4:
        raise IllegalOperand(
            "dst",
            f"a result inside one PSUM bank of {bank} bytes",
            f"bytes {box.byte_start} to {box.byte_end} of its tensor",
        )


def _check_types(
    core: Core, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, is_transpose: bool
) -> None:
    """Check element types, once for each combination."""
    types = (core.target.name, dst.dtype, stationary.dtype, moving.dtype, is_transpose)
    if types not in _TYPES:
        _check_new_types(core, dst, stationary, moving, is_transpose)
        _TYPES.add(types)


def _check_new_types(
    core: Core, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, is_transpose: bool
) -> None:
    if is_transpose:
        check_same_dtype(("stationary", stationary), ("dst", dst))
        return
    for operand, value in (("stationary", stationary), ("moving", moving)):
        if value.dtype not in _OPERANDS:
            raise IllegalOperand(
                operand, "a floating-point type of up to 32 bits", str(value.dtype)
            )
        if value.dtype is float8_e4m3fn:
            check_generation(core, nc_version.gen4, "float8_e4m3fn")
    kinds = {stationary.dtype, moving.dtype}
    if kinds & _WIDE and not kinds <= _WIDE:
        raise IllegalOperand(
            "moving", "float32 on both sides or on none", f"{stationary.dtype} with {moving.dtype}"
        )
    if kinds == {float8_e4m3, float8_e4m3fn}:
        raise IllegalOperand(
            "moving",
            "no mixture of float8_e4m3 and float8_e4m3fn",
            f"{stationary.dtype} with {moving.dtype}",
        )
    if dst.dtype is bfloat16:
        check_generation(core, nc_version.gen4, "bfloat16 dst")
    elif dst.dtype is not float32:
        raise IllegalOperand("dst", "float32 (bfloat16 on generation 4)", str(dst.dtype))


def _check_double_row(
    core: Core, stationary: NkiTensor, moving: NkiTensor, is_transpose: bool
) -> None:
    check_generation(core, nc_version.gen3, "double_row")
    for operand, value in (("stationary", stationary), ("moving", moving)):
        if value.dtype not in FP8:
            raise IllegalOperand(operand, "an 8-bit float with double_row", str(value.dtype))
        if value.ndim < 3 or value.shape[1] != 2:
            raise IllegalOperand(
                operand, "shape [K, 2, ..] with double_row", f"{list(value.shape)}"
            )
    if is_transpose:
        raise IllegalOperand("perf_mode", "none for a transpose", "double_row")


def _check_tile(
    core: Core,
    k: int,
    m: int,
    stationary: NkiTensor,
    moving: NkiTensor,
    result: NkiTensor,
    position: Any,
    size: Any,
    double: bool,
) -> tuple[int, ...]:
    """Check the part of the array to use; return (row, column, rows, columns), empty for all."""
    tile = tile_of(position, size)
    if not tile:
        return ()
    row, column, rows, columns = tile
    allowed = (64, 128) if core.target.version is nc_version.gen2 else (32, 64, 128)
    if rows not in allowed or columns not in allowed:
        raise IllegalOperand("tile_size", f"rows and columns among {allowed}", f"{(rows, columns)}")
    if row not in range(0, 128, rows) or column not in range(0, 128, columns):
        raise IllegalOperand(
            "tile_position", f"multiples of {(rows, columns)} inside the array", f"{(row, column)}"
        )
    if k > rows or m > columns:
        raise IllegalOperand(
            "tile_size",
            f"at least {(k, m)}, the rows and columns of stationary",
            f"{(rows, columns)}",
        )
    if double and columns != 128:
        raise IllegalOperand("tile_size", "128 columns with double_row", str(columns))
    check_in_tile("stationary", stationary, "row", row, rows)
    check_in_tile("dst", result, "column", column, columns)
    return tile


def tile_of(position: Any, size: Any) -> tuple[int, ...]:
    """Return (row, column, rows, columns) of a part of the array, empty for all of it."""
    if not position and not size:
        return ()
    if len(position or ()) != 2 or len(size or ()) != 2:
        raise IllegalOperand(
            "tile_position",
            "two numbers each in tile_position and tile_size",
            f"{position} and {size}",
        )
    return tuple([int(number) for number in (*position, *size)])


def check_in_tile(operand: str, value: NkiTensor, side: str, at: int, length: int) -> None:
    """What a part of the array reads or writes lies at its place."""
    start = value.geometry.start_partition
    if length < 128 and start != at:
        raise IllegalOperand(operand, f"start partition {at}, the {side} of the tile", str(start))


def _note_product(core: Core, result: NkiTensor, operands: tuple[NkiTensor, NkiTensor]) -> None:
    """Note that a matmul wrote here, and what nothing has read yet."""
    geometry, coverage = result.geometry, result._alloc.accumulated
    if coverage is not None and not coverage.full:
        coverage.add(geometry.box, geometry.walk)
    result._alloc.unread[geometry.box] = (core.line, _views(operands))


def _views(operands: tuple[NkiTensor, ...]) -> tuple[Any, ...]:
    """Return what tells operands apart, without keeping them alive."""
    return tuple([(each._alloc.trace_id, each.geometry.walk) for each in operands])


def accumulation(
    core: Core,
    result: NkiTensor,
    accumulate: bool | None,
    operands: tuple[NkiTensor, ...] = (),
) -> tuple[bool, Array | None]:
    """Return whether to add to what is there, and to which elements if not to all.

    A line that overwrites what it has just made of other operands lost a sum. The same product may
    be repeated, and overwritten elsewhere: kernels warm the engine up so.
    """
    alloc = result._alloc
    if accumulate is False:
        line, last = alloc.unread.get(result.geometry.box, (-1, ()))
        if line >= 0 and last != _views(operands) and line == core.here():
            _settle(
                core,
                "True for a product that is to be added to the one in PSUM",
                "False, which overwrites a product that nothing has read",
            )
        return False, None
    coverage = alloc.accumulated
    assert coverage is not None
    box, walk = result.geometry.box, result.geometry.walk
    if coverage.covers(box, walk):
        if accumulate is None and core.loop_depth > alloc.loop_depth:
            _settle(core, "True or False for a PSUM tensor made outside the dynamic loop", "None")
        return True, None
    if accumulate:
        core.machine.settle(
            core.options.accumulate,
            "accumulate",
            AccumulateError(
                "dst",
                "PSUM that a matmul has written, with accumulate=True",
                f"{result.label()}, parts of which no matmul has written",
                "Use accumulate=None, or False for the first one",
                instruction="nc_matmul",
                location=core.location(),
            ),
        )
        return True, None
    if not coverage.touches(box, walk):
        if not alloc.defined.empty and alloc.defined.touches(box, walk):
            # Kernels that run on chips do it, with zeros: reported, never refused.
            _settle(
                core,
                "True, or False to overwrite what another instruction put in this tensor",
                "None, which overwrites it",
                is_error=False,
            )
        return False, None
    return False, coverage.elements_of(walk)


def _settle(core: Core, expected: str, found: str, *, is_error: bool = True) -> None:
    """Raise, report or drop a fault of `accumulate`, as the options say; report it at most, if it
    is no error.
    """
    policy = core.options.accumulate
    if not is_error and policy == "error":
        policy = "report"
    error = AccumulateError(
        "accumulate", expected, found, instruction="nc_matmul", location=core.location()
    )
    core.machine.settle(policy, "accumulate", error)
