"""Shared stages over tiles: reading an axis onto partitions, scalar chains, tables, transposes.

Functions take tiles and give tiles; none allocates on chip unless its name says so. Axis letters
as in work_tiles.py; ``x_sb`` is in SBUF and ``x_ps`` in PSUM.
"""

from dataclasses import dataclass
from typing import Any

import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

from nki_kernels.common.arithmetic import apply_two, apply_with
from nki_kernels.common.axes import AxisTiles
from nki_kernels.common.chip import BANK_BYTES, BANK_FLOATS, GPSIMD_BYTES, PARTITIONS
from nki_kernels.common.formula import LEAKY_SLOPE, ExpertFormula

_OAI_SCALE = 1.702  # of the sigmoid that nl.gelu_apprx_sigmoid multiplies with


@dataclass
class Entry(NKIObject):
    """One matrix of a stack in HBM, by its number.

    Attributes:
        stack: [E, ...] tensor.
        index: (1, 1) int32 tile.
        may_miss: a number out of range is none, and loads nothing; else there is no such number.
    """

    stack: nl.NkiTensor
    index: nl.NkiTensor
    may_miss: bool


def when_missing(may_miss: bool) -> Any:
    """Return what a transfer does with an index out of range: leave it out, or fail."""
    return nisa.oob_mode.skip if may_miss else nisa.oob_mode.error


def rows_of(axis: AxisTiles, tile: int) -> int:
    """Return the rows of a tile of an axis."""
    if axis.is_strided:
        return (axis.size - tile + axis.count - 1) // axis.count
    return axis.tail if tile >= axis.count - axis.group else axis.rows


def elements_of(axis: AxisTiles, tile: int) -> slice:
    """Return the elements of an axis that a tile holds, as a slice of a free axis."""
    if axis.is_strided:
        return slice(tile, axis.size, axis.count)
    group = axis.group
    first = tile // group * group * axis.rows + tile % group
    return slice(first, first + (rows_of(axis, tile) - 1) * group + 1, group)


def load_matrix(
    dst_sb: nl.NkiTensor,
    entry: Entry,
    axis: AxisTiles,
    base: int,
    row: int,
    runs: list[int],
    column: int,
) -> None:
    """Load rows of one matrix of a stack, its first axis spread over partitions.

    Args:
        dst_sb: [rows, count, columns] tile.
        entry: the matrix.
        axis: how the rows are spread over partitions.
        base: first element inside the matrix.
        row: elements from a row to the next.
        runs: [stride, count] pair of the pieces of a row.
        column: elements of a piece.
    """
    pieces = runs[1]
    apart, step = row_steps(axis, row)
    if axis.is_strided:
        pattern = [[apart, axis.rows], [step, axis.count], runs, [1, column]]
        load_pattern(dst_sb[0 : axis.rows], entry, pattern, base)
        return
    # A transfer has one pattern: a last tile of fewer partitions takes one of its own.
    full = axis.count if axis.tail == axis.rows else axis.count - 1
    if full > 0:
        pattern = [[apart, axis.rows], [step, full], runs, [1, column]]
        load_pattern(dst_sb[0 : axis.rows, 0 : full * pieces * column], entry, pattern, base)
    if full < axis.count:
        pattern = [[apart, axis.tail], [1, 1], runs, [1, column]]
        begin = full * pieces * column
        tail_sb = dst_sb[0 : axis.tail, begin : begin + pieces * column]
        load_pattern(tail_sb, entry, pattern, base + full * step)


def row_steps(axis: AxisTiles, row: int) -> tuple[int, int]:
    """Return the elements from a partition's row to the next partition's, and to its own next."""
    if axis.is_strided:
        return axis.count * row, row
    return row, axis.rows * row


def load_pattern(dst_sb: nl.NkiTensor, entry: Entry, pattern: list[list[int]], offset: int) -> None:
    """Load a pattern of one entry of a stack in HBM.

    Args:
        dst_sb: tile of as many elements.
        entry: which one.
        pattern: list of [stride, count] pairs inside an entry.
        offset: first element inside the entry.
    """
    runs = join_runs(pattern)
    nisa.dma_copy(
        dst=dst_sb,
        src=entry.stack.ap(runs, offset=offset, scalar_offset=entry.index, indirect_dim=0),
        # The queue of the Sync engine, which computes nothing: a load that waits for its buffer
        # or for the number of its expert holds up no arithmetic.
        oob_mode=when_missing(entry.may_miss),
        dge_mode=nisa.dge_mode.hwdge,
        engine=nisa.engine.sync,
    )


def join_runs(pattern: list[list[int]]) -> list[list[int]]:
    """Return a pattern with neighbours in memory on one axis; what goes over partitions stays.

    A transfer that is left out still has a descriptor for each run.
    """
    runs = [pattern[0]]
    for axis in pattern[1:]:
        last = runs[len(runs) - 1]
        if len(runs) > 1 and last[0] == axis[0] * axis[1]:
            runs[len(runs) - 1] = [axis[0], last[1] * axis[1]]
        else:
            runs.append(axis)
    return runs


def load_rows(dst_sb: nl.NkiTensor, entry: Entry, size: int, begin: int, columns: int) -> None:
    """Load columns of the rows of one matrix of [E, rows, size] in HBM, a row on each partition."""
    load_pattern(dst_sb, entry, [[size, dst_sb.shape[0]], [1, columns]], begin)


def load_halves(dst_sb: nl.NkiTensor, entry: Entry, axis: AxisTiles, size: int, first: int) -> None:
    """Load elements of the halves of a row of [E, halves * size] as [rows, halves, count].

    That is how the projections of one axis are stored, gate first.
    """
    for half in range(dst_sb.shape[1]):
        part_sb = dst_sb[0 : axis.rows, half, 0 : axis.count]
        load_matrix(part_sb, entry, axis, half * size + first, 1, [1, 1], 1)


def make_tiles(
    count: int, shape: tuple[int, ...], dtype: Any, buffer: Any = nl.sbuf
) -> list[nl.NkiTensor]:
    """Allocate tiles of one shape in SBUF, or in another buffer."""
    made = []
    for _index in range(count):
        made.append(nl.ndarray(shape, dtype=dtype, buffer=buffer))
    return made


def weight_dtype(weight_format: str) -> Any:
    """Return the element type of weights on chip; words of MX formats are among other bytes."""
    if weight_format.endswith("_x4"):
        return nl.uint8
    if weight_format == "float8_e4m3":
        return nl.float8_e4m3
    if weight_format == "float8_e5m2":
        return nl.float8_e5m2
    return nl.bfloat16


def activation_function(activation: str) -> Any:
    """Return the Scalar engine's function of an activation of `ExpertFormula`."""
    if activation == "silu":
        return nl.silu
    if activation == "gelu":
        return nl.gelu
    if activation == "gelu_tanh":
        return nl.gelu_apprx_tanh
    if activation == "relu" or activation == "relu2":  # squared by a product
        return nl.relu
    if activation == "leaky_relu":  # finished by a maximum
        return nl.copy
    if activation == "tanh":
        return nl.tanh
    return nl.sigmoid


def is_fused(formula: ExpertFormula) -> bool:
    """Whether the Scalar engine has gate * sigmoid(scale * gate), this scale, as one function."""
    is_known = formula.scale == 1.0 or formula.scale == _OAI_SCALE
    return formula.gates_itself and formula.gate_softcap == 0.0 and is_known


def needs_product(formula: ExpertFormula) -> bool:
    """Whether what the Scalar engine makes of the gate is finished by a product."""
    is_unfinished = formula.activation == "relu2" or formula.activation == "leaky_relu"
    return is_unfinished or (formula.gates_itself and not is_fused(formula))


def gate_function(formula: ExpertFormula) -> Any:
    """Return the Scalar engine's function of the gate: the fused one if there is, else act."""
    if not is_fused(formula):
        return activation_function(formula.activation)
    return nl.silu if formula.scale == 1.0 else nl.gelu_apprx_sigmoid


def finish_gate(
    formula: ExpertFormula,
    dst_sb: nl.NkiTensor,
    scratch_sb: nl.NkiTensor,
    source: nl.NkiTensor,
    activated_sb: nl.NkiTensor,
) -> None:
    """Multiply an activation with the gate, capped if it is, or with itself (relu2), or give its
    negative part the slope of leaky_relu.

    Args:
        formula: of which `needs_product` is true.
        dst_sb: for the product.
        scratch_sb: may be `source`, which a cap overwrites.
        source: what was activated.
        activated_sb: act of it.
    """
    if formula.activation == "leaky_relu":
        # max(slope x, x): the slope is below 1.
        apply_with(dst_sb, activated_sb, nl.multiply, LEAKY_SLOPE, nl.maximum, activated_sb)
    elif not formula.gates_itself:
        nisa.tensor_tensor(dst=dst_sb, data1=activated_sb, data2=activated_sb, op=nl.multiply)
    elif formula.gate_softcap == 0.0:
        nisa.tensor_tensor(dst=dst_sb, data1=source, data2=activated_sb, op=nl.multiply)
    else:
        cap = formula.gate_softcap
        nisa.activation(dst=scratch_sb, op=nl.tanh, data=source, scale=1.0 / cap)
        multiply_chain(dst_sb, scratch_sb, scratch_sb, [nl.multiply], [cap], activated_sb)


def finish_up(
    formula: ExpertFormula,
    dst_sb: nl.NkiTensor,
    scratch_sb: nl.NkiTensor,
    data: nl.NkiTensor,
    operators: list[Any],
    operands: list[Any],
    other_sb: nl.NkiTensor,
) -> None:
    """Do what `multiply_chain` does, with the cap and the offset of up projections that have one.

    Args:
        formula: of the expert.
        dst_sb, scratch_sb, data, operators, operands, other_sb: as there; without the offset if
            the formula has a cap.
    """
    cap = formula.up_softcap
    if cap == 0.0:
        multiply_chain(dst_sb, scratch_sb, data, operators, operands, other_sb)
        return
    source = apply_chain(scratch_sb, data, operators, operands)
    nisa.activation(dst=scratch_sb, op=nl.tanh, data=source, scale=1.0 / cap)
    late, numbers = [nl.multiply], [cap]
    if formula.up_offset != 0.0:
        late, numbers = [nl.multiply, nl.add], [cap, formula.up_offset]
    multiply_chain(dst_sb, scratch_sb, scratch_sb, late, numbers, other_sb)


def apply_chain(
    dst_sb: nl.NkiTensor, data: nl.NkiTensor, operators: list[Any], operands: list[Any]
) -> nl.NkiTensor:
    """Apply scalar operators in order, two per instruction; return the tile with the result.

    Args:
        dst_sb: tile for results; untouched if there is no operator.
        data: input tile.
        operators: list of nl operators.
        operands: list of as many numbers or (P, 1) tiles.
    """
    source = data
    for k in range(0, len(operators), 2):
        if k + 1 < len(operators):
            apply_two(dst_sb, source, operators[k], operands[k], operators[k + 1], operands[k + 1])
        else:
            nisa.tensor_scalar(dst=dst_sb, data=source, op0=operators[k], operand0=operands[k])
        source = dst_sb
    return source


def multiply_chain(
    dst_sb: nl.NkiTensor,
    scratch_sb: nl.NkiTensor,
    data: nl.NkiTensor,
    operators: list[Any],
    operands: list[Any],
    other_sb: nl.NkiTensor,
) -> None:
    """Apply scalar operators to `data` and multiply with a tile, the last operator on the way."""
    last = len(operators) - 1
    if last < 0:
        nisa.tensor_tensor(dst=dst_sb, data1=data, data2=other_sb, op=nl.multiply)
        return
    source = apply_chain(scratch_sb, data, operators[0:last], operands[0:last])
    apply_with(dst_sb, source, operators[last], operands[last], nl.multiply, other_sb)


def multiply_banks(
    dst_ps: nl.NkiTensor, stationary: nl.NkiTensor, moving: nl.NkiTensor, accumulate: bool
) -> None:
    """Write or add a product [rows, columns] that may span several banks of PSUM."""
    columns = dst_ps.shape[1]
    # A matmul writes a single bank.
    for first in range(0, columns, BANK_FLOATS):
        bank = slice(first, min(first + BANK_FLOATS, columns))
        nisa.nc_matmul(
            dst=dst_ps[:, bank],
            stationary=stationary,
            moving=moving[:, bank],
            accumulate=accumulate,
        )


def swap_with_other(src_sb: nl.NkiTensor, dst_sb: nl.NkiTensor, core: int, size: int) -> None:
    """Send a tile to the other core of two, which sends its own, of so many bytes a partition.

    A few bytes go through GpSimd, in less time than a DMA takes to start.
    """
    is_short = size <= GPSIMD_BYTES
    nisa.sendrecv(
        src=src_sb,
        dst=dst_sb,
        send_to_rank=1 - core,
        recv_from_rank=1 - core,
        pipe_id=0,
        dma_engine=nisa.dma_engine.gpsimd_dma if is_short else nisa.dma_engine.dma,
    )


def copy_alternating(dst_sb: nl.NkiTensor, src: nl.NkiTensor, turn: int) -> None:
    """Copy a tile on the Vector or the Scalar engine, so that both share the work."""
    engine = nisa.engine.vector if turn % 2 == 0 else nisa.engine.scalar
    nisa.tensor_copy(dst=dst_sb, src=src, engine=engine)


def transpose_rows(
    dst_sb: nl.NkiTensor,
    rows_sb: nl.NkiTensor,
    axis: AxisTiles,
    banks_ps: list[nl.NkiTensor],
    num_rows: int,
) -> None:
    """Transpose rows [R, size] into [rows, count, R], a PSUM bank of tiles per eviction.

    Args:
        dst_sb: [rows, count, R] tile.
        rows_sb: [R, size] tile of a 16-bit type.
        axis: how `size` is spread over partitions.
        banks_ps: PSUM banks [128, 1024] of the same type, used in turn.
        num_rows: R.
    """
    # One copy for all tiles that fit a bank, as every copy has a fixed time.
    group = BANK_BYTES // 2 // num_rows
    for turn in range(-(-axis.count // group)):
        first = turn * group
        bank_ps = banks_ps[turn % len(banks_ps)]
        stop = min(first + group, axis.count)
        for tile in range(first, stop):
            rows = rows_of(axis, tile)
            begin = (tile - first) * num_rows
            nisa.nc_transpose(
                dst=bank_ps[0:rows, begin : begin + num_rows],
                data=rows_sb[0:num_rows, elements_of(axis, tile)],
                engine=nisa.engine.tensor,
            )
        # A copy has one height: shorter tiles at the end of the axis follow in another one.
        full = first
        while full < stop and rows_of(axis, full) == axis.rows:
            full += 1
        width = (full - first) * num_rows
        if full > first:
            copy_alternating(
                dst_sb[0 : axis.rows, first:full, 0:num_rows], bank_ps[0 : axis.rows, 0:width], turn
            )
        if full < stop:
            copy_alternating(
                dst_sb[0 : axis.tail, full:stop, 0:num_rows],
                bank_ps[0 : axis.tail, width : (stop - first) * num_rows],
                turn + 1,
            )


def keep_below(numbers_sb: nl.NkiTensor, end: int) -> None:
    """Take the largest number below an end for those that are not; integers below 2**24."""
    nisa.tensor_scalar(dst=numbers_sb, data=numbers_sb, op0=nl.minimum, operand0=float(end - 1))


def load_table(
    dst_sb: nl.NkiTensor,
    values: nl.NkiTensor,
    index: nl.NkiTensor,
    offset: int,
    fill: float,
    bank_ps: nl.NkiTensor,
    may_miss: bool,
) -> None:
    """Gather rows of values and transpose them, so that entry n of the index is column n.

    The Scalar engine copies them, which others need less at the start of a launch.

    Args:
        dst_sb: [R, n] tile of the type of the values.
        values: [num_rows, R] tensor in HBM, int32 below 2**24 or float32.
        index: int32 tensor in HBM.
        offset: element of `index` that belongs to column 0.
        fill: value of missing rows.
        bank_ps: PSUM tile [128, 512] float32.
        may_miss: rows past the end are missing; else the last row is taken for them.
    """
    num_rows, count = dst_sb.shape
    for begin in range(0, count, 128):
        size = min(128, count - begin)
        index_sb = nl.ndarray((size, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=index_sb, src=index.ap([[1, size], [1, 1]], offset=offset + begin))
        rows_sb = nl.ndarray((size, num_rows), dtype=values.dtype, buffer=nl.sbuf)
        if may_miss:
            nisa.memset(dst=rows_sb, value=fill)
        else:
            keep_below(index_sb, values.shape[0])
        nisa.dma_copy(
            dst=rows_sb,
            src=values.ap([[num_rows, size], [1, num_rows]], vector_offset=index_sb),
            oob_mode=when_missing(may_miss),
        )
        # The tensor engine transposes floats; integers below 2**24 are exact in float32.
        float_sb = nl.ndarray((size, num_rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=float_sb, src=rows_sb, engine=nisa.engine.scalar)
        nisa.nc_transpose(dst=bank_ps[0:num_rows, 0:size], data=float_sb, engine=nisa.engine.tensor)
        nisa.tensor_copy(
            dst=dst_sb[0:num_rows, begin : begin + size],
            src=bank_ps[0:num_rows, 0:size],
            engine=nisa.engine.scalar,
        )


def identity(dtype: nl.DType) -> nl.NkiTensor:
    """Return the identity matrix [128, 128]."""
    return compare_columns(ones(dtype), nl.equal)


def ones(dtype: nl.DType) -> nl.NkiTensor:
    """Return [128, 128] of ones."""
    ones_sb = nl.ndarray((PARTITIONS, PARTITIONS), dtype, buffer=nl.sbuf)
    nisa.memset(dst=ones_sb, value=1.0)
    return ones_sb


def compare_columns(ones_sb: nl.NkiTensor, compare: nl.DType) -> nl.NkiTensor:
    """Return ones where column minus partition compares true with 0, else zeros."""
    compared_sb = nl.ndarray(ones_sb.shape, ones_sb.dtype, buffer=nl.sbuf)
    nisa.affine_select(
        dst=compared_sb,
        pattern=[[1, ones_sb.shape[1]]],
        offset=0,
        channel_multiplier=-1,
        on_true_tile=ones_sb,
        on_false_value=0.0,
        cmp_op=compare,
    )
    return compared_sb
