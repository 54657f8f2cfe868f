"""Stages of the decode kernels: load an item of weights, project into I.

An item is one chunk of one expert's intermediate axis. Its weights are stationary, all tokens move:

    projections  [i, 2, T]    = gate_up[h, i]^T  x^T[h, T]      in PSUM
    inner        [i, T]       = act(gate) * up * weight of the token
    y^T          [h, H/h, T] += down[i, h]^T inner[i, T]        in PSUM, or added to SBUF

Axis letters: h, i partitions of a tile of H or I; T tokens.
"""

from typing import Any

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.tiles import (
    Entry,
    apply_chain,
    elements_of,
    gate_function,
    load_halves,
    load_matrix,
    load_pattern,
    load_rows,
    multiply_chain,
    rows_of,
)
from nki_kernels.decode.buffers import DecodeBuffers, DecodeOperands
from nki_kernels.decode.config import (
    DecodeConfig,
    is_mx,
    joins_projections,
    weighs_inner,
)
from nki_kernels.decode.mx_stages import project_words_in, quantize_inner


def load_in(
    config: DecodeConfig,
    b: DecodeBuffers,
    x: DecodeOperands,
    expert: nl.NkiTensor,
    buffer: int,
    chunk: int,
) -> None:
    """Load gate and up weights of a chunk of an expert, with what its activation needs.

    Args:
        config, b, x: sizes, buffers, operands in HBM.
        expert: (1, 1) int32 tile.
        buffer: the weight buffer to fill.
        chunk: part of the intermediate axis.
    """
    if config.weights.layout == "packed":
        _load_run(b.gate_up[buffer], _entry(config, x.gate_up, expert), chunk)
        return
    I, i_axis = config.I, config.i_axis  # noqa: E741
    first = chunk * i_axis.size
    gate_up = _entry(config, x.gate_up, expert)
    load_matrix(b.gate_up[buffer], gate_up, config.h_axis, first, 2 * I, [I, 2], i_axis.size)
    if config.formula.has_gate_up_bias:
        bias = _entry(config, x.gate_up_bias, expert)
        load_halves(b.gate_up_bias[buffer], bias, i_axis, I, first)
    if config.weights.has_scales:
        scale = _entry(config, x.gate_up_scale, expert)
        load_halves(b.gate_up_scale[buffer], scale, i_axis, I, first)
    if config.weights.down_scale == "channel":
        scale = _entry(config, x.down_scale, expert)
        load_matrix(b.down_scale[buffer], scale, config.h_axis, 0, 1, [1, 1], 1)
    elif config.weights.down_scale == "expert":
        scale = _entry(config, x.down_scale, expert)
        load_pattern(b.down_scale[buffer], scale, [[0, PARTITIONS], [1, 1]], 0)


def load_out(
    config: DecodeConfig,
    b: DecodeBuffers,
    x: DecodeOperands,
    expert: nl.NkiTensor,
    buffer: int,
    chunk: int,
) -> None:
    """Load down weights of a chunk of an expert; beside the first chunk the expert's bias."""
    H, i_axis, down = config.H, config.i_axis, _entry(config, x.down, expert)
    if config.weights.layout == "packed":
        _load_run(b.down[buffer], down, chunk)
    else:
        load_matrix(b.down[buffer], down, i_axis, chunk * i_axis.size * H, H, [1, 1], H)
    if config.formula.has_down_bias and chunk == 0:
        load_rows(b.down_bias[buffer], _entry(config, x.down_bias, expert), H, 0, H)


def load_item(
    config: DecodeConfig,
    b: DecodeBuffers,
    x: DecodeOperands,
    expert: nl.NkiTensor,
    buffer: int,
    chunk: int,
) -> None:
    """Load all of a chunk of an expert; see `load_in`."""
    load_in(config, b, x, expert, buffer, chunk)
    load_out(config, b, x, expert, buffer, chunk)


def _entry(config: DecodeConfig, stack: nl.NkiTensor, expert: nl.NkiTensor) -> Entry:
    """Return an expert's part of an operand."""
    return Entry(stack, expert, config.missing == "skip")


def _load_run(dst_sb: nl.NkiTensor, entry: Entry, chunk: int) -> None:
    """Load a packed item, a run per partition."""
    rows, run = dst_sb.shape
    load_rows(dst_sb, entry, run, chunk * rows * run, run)


def spread_column(
    config: DecodeConfig,
    b: DecodeBuffers,
    weights: list[nl.NkiTensor],
    inputs: list[nl.NkiTensor],
    column: int,
    ring: int,
) -> None:
    """Put what every token takes of an expert, and gives to it, on all partitions.

    Args:
        config: sizes.
        b: buffers.
        weights, inputs: per 128 tokens [tokens, entries] float32; see `Listed`.
        column: the expert's entry.
        ring: which buffers to fill.
    """
    column_ps = b.banks.column_ps[ring]
    if config.scaling == "pre":
        _spread(b.banks.input_ps[ring], inputs, column)
        nisa.tensor_copy(
            dst=b.input_scale[ring], src=b.banks.input_ps[ring], engine=nisa.engine.scalar
        )
    if weighs_inner(config) or config.formula.has_down_bias:
        _spread(column_ps, weights, column)
    if config.formula.has_down_bias:
        nisa.tensor_copy(dst=b.column_row[ring], src=column_ps[0:1, 0 : config.T])


def _spread(column_ps: nl.NkiTensor, tables: list[nl.NkiTensor], column: int) -> None:
    """Turn a column, repeated 128 times; a token that is not a number stays alone."""
    begin = 0
    for table_sb in tables:
        rows, width = table_sb.shape
        nisa.nc_transpose(
            dst=column_ps[0:PARTITIONS, begin : begin + rows],
            data=table_sb.ap([[width, rows], [0, PARTITIONS]], offset=column),
            engine=nisa.engine.tensor,
        )
        begin = begin + rows


def project_in(
    config: DecodeConfig,
    b: DecodeBuffers,
    turned_sb: nl.NkiTensor,
    buffer: int,
    item: int,
    ring: int,
) -> None:
    """Compute the inner activations of an item.

    Args:
        config, b: sizes and buffers.
        turned_sb: x^T, [h, H/h, T] view.
        buffer: the weight buffer.
        item: number of the item, for the rings.
        ring: buffers of the expert's column.
    """
    if is_mx(config):
        _project_words_in(config, b, buffer, item, ring)
        return
    h_axis, i_axis, T = config.h_axis, config.i_axis, config.T
    run = h_axis.count * 2 * i_axis.size
    weights_sb = b.gate_up[buffer][0 : h_axis.rows, 0:run].reshape_dim(
        1, (h_axis.count, 2, i_axis.size)
    )
    for tile in range(i_axis.count):
        rows, columns = rows_of(i_axis, tile), elements_of(i_axis, tile)
        bank_ps = b.banks.inner_ps[(item * i_axis.count + tile) % len(b.banks.inner_ps)]
        if joins_projections(config):
            gate_up_sb = b.gate_up[buffer][0 : h_axis.rows, 0:run]
            joined_sb = gate_up_sb.reshape_dim(1, (h_axis.count, 2 * rows))
            _project(config, bank_ps[0 : 2 * rows, 0:T], joined_sb, turned_sb)
            gate, up = bank_ps[0:rows, 0:T], bank_ps[rows : 2 * rows, 0:T]
        else:
            gate, up = bank_ps[0:rows, 0:T], bank_ps[0:rows, T : 2 * T]
            _project(config, gate, weights_sb[0 : h_axis.rows, :, 0, columns], turned_sb)
            _project(config, up, weights_sb[0 : h_axis.rows, :, 1, columns], turned_sb)
        _activate(config, b, gate, up, buffer, item, ring, tile)


def _project_words_in(
    config: DecodeConfig, b: DecodeBuffers, buffer: int, item: int, ring: int
) -> None:
    """Compute the inner activations of an item of MX words, and make words of them."""
    rows, T = config.i_axis.rows, config.T
    for tile in range(config.i_axis.count):
        bank_ps = b.banks.inner_ps[(item * config.i_axis.count + tile) % len(b.banks.inner_ps)]
        gate, up = bank_ps[0:rows, 0:T], bank_ps[0:rows, T : 2 * T]
        project_words_in(config, b, gate, buffer, 0, tile)
        project_words_in(config, b, up, buffer, 1, tile)
        _activate(config, b, gate, up, buffer, item, ring, tile)
    quantize_inner(b, item)


def _project(
    config: DecodeConfig, dst_ps: nl.NkiTensor, weights_sb: nl.NkiTensor, turned_sb: nl.NkiTensor
) -> None:
    """Multiply [h, H/h, i] weights with the tokens, [i, T]."""
    h_axis, columns = config.h_axis, weights_sb.shape[2]
    for t in range(h_axis.count):
        depth = rows_of(h_axis, t)
        nisa.nc_matmul(
            dst=dst_ps,
            stationary=weights_sb[0:depth, t, 0:columns],
            moving=turned_sb[0:depth, t, 0 : config.T],
            accumulate=t > 0,
        )


def _activate(
    config: DecodeConfig,
    b: DecodeBuffers,
    gate: nl.NkiTensor,
    up: nl.NkiTensor,
    buffer: int,
    item: int,
    ring: int,
    tile: int,
) -> None:
    """Turn the projections of one tile into inner activations, times the tokens' weights."""
    T, rows = config.T, rows_of(config.i_axis, tile)
    turn = (item * config.i_axis.count + tile) % 2
    gate_sb, up_sb = b.gate[turn][0:rows, 0:T], b.up[turn][0:rows, 0:T]
    if config.scaling == "pre":
        _scale_input(config, b, gate_sb, gate, buffer, ring, tile, 0)
        _scale_input(config, b, up_sb, up, buffer, ring, tile, 1)
        gate, up = gate_sb, up_sb
    _activate_gate(config, b, gate_sb, gate, buffer, tile)
    operators, operands = _chain(config, b, buffer, tile, 1)
    inner_sb = b.inner[item % len(b.inner)][0:rows, tile, 0:T]
    if config.weights.down_scale == "expert":
        operators.append(nl.multiply)
        operands.append(b.down_scale[buffer][0:rows, 0, 0:1])
    if not weighs_inner(config):
        multiply_chain(inner_sb, up_sb, up, operators, operands, gate_sb)
        return
    multiply_chain(up_sb, up_sb, up, operators, operands, gate_sb)
    column_ps = b.banks.column_ps[ring][0:rows, 0:T]
    nisa.tensor_tensor(dst=inner_sb, data1=up_sb, data2=column_ps, op=nl.multiply)


def _scale_input(
    config: DecodeConfig,
    b: DecodeBuffers,
    dst_sb: nl.NkiTensor,
    projected_ps: nl.NkiTensor,
    buffer: int,
    ring: int,
    tile: int,
    half: int,
) -> None:
    """Multiply a projection with the affinities of its input, and its scale if it has one."""
    rows, T = dst_sb.shape
    column_sb = b.input_scale[ring][0:rows, 0:T]
    if config.weights.has_scales:
        nisa.scalar_tensor_tensor(
            dst=dst_sb,
            data=projected_ps,
            op0=nl.multiply,
            operand0=b.gate_up_scale[buffer][0:rows, half, tile : tile + 1],
            op1=nl.multiply,
            operand1=column_sb,
        )
    else:
        nisa.tensor_tensor(dst=dst_sb, data1=projected_ps, data2=column_sb, op=nl.multiply)


def _activate_gate(
    config: DecodeConfig,
    b: DecodeBuffers,
    gate_sb: nl.NkiTensor,
    gate: nl.NkiTensor,
    buffer: int,
    tile: int,
) -> None:
    """Apply scale, bias, clamps and activation to the gate projection, in float32."""
    function, rows = gate_function(config.formula), gate_sb.shape[0]
    clamps = config.formula.gate_limits
    if clamps.has_upper or clamps.has_lower:
        operators, operands = _chain(config, b, buffer, tile, 0)
        nisa.activation(
            dst=gate_sb, op=function, data=apply_chain(gate_sb, gate, operators, operands)
        )
        return
    bias: Any = 0.0
    scale: Any = 1.0
    if config.formula.has_gate_up_bias:
        bias = b.gate_up_bias[buffer][0:rows, 0, tile : tile + 1]
    if config.weights.has_scales and config.scaling != "pre":
        scale = b.gate_up_scale[buffer][0:rows, 0, tile : tile + 1]
    nisa.activation(dst=gate_sb, op=function, data=gate, bias=bias, scale=scale)


def _chain(
    config: DecodeConfig, b: DecodeBuffers, buffer: int, tile: int, half: int
) -> tuple[list[Any], list[Any]]:
    """Return the scalar operators and operands of a projection: scale, bias, clamps, offset."""
    operators = []
    operands = []
    rows = rows_of(config.i_axis, tile)
    clamps = config.formula.up_limits if half == 1 else config.formula.gate_limits
    if config.weights.has_scales and config.scaling != "pre":
        operators.append(nl.multiply)
        operands.append(b.gate_up_scale[buffer][0:rows, half, tile : tile + 1])
    if config.formula.has_gate_up_bias:
        operators.append(nl.add)
        operands.append(b.gate_up_bias[buffer][0:rows, half, tile : tile + 1])
    if clamps.has_upper:
        operators.append(nl.minimum)
        operands.append(clamps.upper)
    if clamps.has_lower:
        operators.append(nl.maximum)
        operands.append(clamps.lower)
    if half == 1 and config.formula.up_offset != 0.0:
        operators.append(nl.add)
        operands.append(config.formula.up_offset)
    return operators, operands
