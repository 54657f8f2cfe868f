"""Stages of the decode kernels: load an item of weights, project in, project out.

An item is one chunk of one expert's intermediate axis. Its weights are stationary, all tokens move:

    projections  [i, 2, T]    = gate_up[h, i]^T  x^T[h, T]      in PSUM
    inner        [i, T]       = act(gate) * up * weight of the token
    y^T          [h, H/h, T] += down[i, h]^T inner[i, T]        in PSUM, or added to SBUF

Axis letters: h, i partitions of a tile of H or I; T tokens.
"""

from typing import Any

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode_buffers import DecodeBuffers, DecodeOperands
from nki_kernels.decode_config import (
    DecodeConfig,
    accumulator_banks,
    holds_expert,
    joins_projections,
    tiles_per_bank,
    weighs_inner,
)
from nki_kernels.decode_list import Routing
from nki_kernels.plans import PARTITIONS
from nki_kernels.tiles import (
    apply_chain,
    elements_of,
    load_matrix,
    load_row,
    multiply_chain,
    rows_of,
)


def load_in(
    config: DecodeConfig,
    b: DecodeBuffers,
    x: DecodeOperands,
    expert: nl.NkiTensor,
    slot: int,
    chunk: int,
) -> None:
    """Load gate and up weights of a chunk of an expert, with what its activation needs.

    Args:
        config: sizes.
        b: buffers.
        x: operands in HBM.
        expert: (1, 1) int32 tile.
        slot: which buffers to fill.
        chunk: part of the intermediate axis.
    """
    if config.weight_layout == "packed":
        _load_run(b.gate_up[slot], x.gate_up, expert, chunk)
        return
    I, size = config.I, config.i_axis.size  # noqa: E741
    first = chunk * size
    load_matrix(b.gate_up[slot], x.gate_up, config.h_axis, expert, first, 2 * I, [I, 2], size)
    if config.has_gate_up_bias:
        _load_per_row(config, b.gate_up_bias[slot], x.gate_up_bias, expert, first)
    if config.has_scales:
        _load_per_row(config, b.gate_up_scale[slot], x.gate_up_scale, expert, first)
    if config.down_scale == "channel":
        load_matrix(b.down_scale[slot], x.down_scale, config.h_axis, expert, 0, 1, [1, 1], 1)
    elif config.down_scale == "expert":
        source = x.down_scale.ap([[0, PARTITIONS], [1, 1]], scalar_offset=expert, indirect_dim=0)
        _load(b.down_scale[slot], source)


def load_out(
    config: DecodeConfig,
    b: DecodeBuffers,
    x: DecodeOperands,
    expert: nl.NkiTensor,
    slot: int,
    chunk: int,
) -> None:
    """Load down weights of a chunk of an expert; beside the first chunk the expert's bias."""
    H, i_axis = config.H, config.i_axis
    if config.weight_layout == "packed":
        _load_run(b.down[slot], x.down, expert, chunk)
    else:
        base = chunk * i_axis.size * H
        load_matrix(b.down[slot], x.down, i_axis, expert, base, H, [1, 1], H)
    if config.has_down_bias and chunk == 0:
        load_row(b.down_bias[slot], x.down_bias, expert, H, 0, H)


def load_item(
    config: DecodeConfig,
    b: DecodeBuffers,
    x: DecodeOperands,
    expert: nl.NkiTensor,
    slot: int,
    chunk: int,
) -> None:
    """Load all of a chunk of an expert; see `load_in`."""
    load_in(config, b, x, expert, slot, chunk)
    load_out(config, b, x, expert, slot, chunk)


def _load_run(dst_sb: nl.NkiTensor, src: nl.NkiTensor, expert: nl.NkiTensor, chunk: int) -> None:
    """Load a packed item, a run per partition."""
    rows, run = dst_sb.shape
    pattern = [[run, rows], [1, run]]
    offset = chunk * rows * run
    _load(dst_sb, src.ap(pattern, offset=offset, scalar_offset=expert, indirect_dim=0))


def _load(dst_sb: nl.NkiTensor, source: nl.NkiTensor) -> None:
    nisa.dma_copy(
        dst=dst_sb,
        src=source,
        oob_mode=nisa.oob_mode.skip,
        dge_mode=nisa.dge_mode.hwdge,
        engine=nisa.engine.sync,
    )


def _load_per_row(
    config: DecodeConfig,
    dst_sb: nl.NkiTensor,
    src: nl.NkiTensor,
    expert: nl.NkiTensor,
    first: int,
) -> None:
    """Load [2I] numbers of an expert as [rows, 2, count], the layout of the projections."""
    i_axis = config.i_axis
    for half in range(2):
        part_sb = dst_sb[0 : i_axis.rows, half, 0 : i_axis.count]
        load_matrix(part_sb, src, i_axis, expert, half * config.I + first, 1, [1, 1], 1)


def spread_column(
    config: DecodeConfig, b: DecodeBuffers, routing: Routing, base: Any, offset: int, ring: int
) -> None:
    """Put what every token takes of an expert on all partitions.

    Args:
        config: sizes.
        b: buffers.
        routing: tables of weights.
        base: list position, an int or a register.
        offset: entries from there on.
        ring: which buffers to fill.
    """
    column_ps = b.column_ps[ring]
    if config.scaling == "pre":
        _spread(b, b.input_ps[ring], routing.inputs, base, offset)
        nisa.tensor_copy(dst=b.input_scale[ring], src=b.input_ps[ring], engine=nisa.engine.scalar)
    if weighs_inner(config) or config.has_down_bias:
        _spread(b, column_ps, routing.weights, base, offset)
    if config.has_down_bias:
        nisa.tensor_copy(dst=b.column_row[ring], src=column_ps[0:1, 0 : config.T])


def _spread(
    b: DecodeBuffers, column_ps: nl.NkiTensor, tables: list[nl.NkiTensor], base: Any, offset: int
) -> None:
    """Multiply a column, repeated 128 times, with the identity."""
    begin = 0
    for table_sb in tables:
        rows, width = table_sb.shape
        if isinstance(base, int):
            column_sb = table_sb.ap([[width, rows], [0, PARTITIONS]], offset=base + offset)
        else:
            column_sb = table_sb.ap(
                [[width, rows], [0, PARTITIONS]],
                offset=offset,
                scalar_offset=base,
                indirect_dim=1,
            )
        nisa.nc_matmul(
            dst=column_ps[0:PARTITIONS, begin : begin + rows],
            stationary=column_sb,
            moving=b.sums.identity_sb[0:rows, 0:rows],
            is_moving_onezero=True,
            accumulate=False,
        )
        begin = begin + rows


def project_in(
    config: DecodeConfig, b: DecodeBuffers, turned_sb: nl.NkiTensor, slot: int, item: int, ring: int
) -> None:
    """Compute the inner activations of an item.

    Args:
        config: sizes.
        b: buffers.
        turned_sb: x^T, [h, H/h, T] view.
        slot: buffers of the weights.
        item: number of the item, for the rings.
        ring: buffers of the expert's column.
    """
    h_axis, i_axis, T = config.h_axis, config.i_axis, config.T
    run = h_axis.count * 2 * i_axis.size
    weights_sb = b.gate_up[slot][0 : h_axis.rows, 0:run].reshape_dim(
        1, (h_axis.count, 2, i_axis.size)
    )
    for tile in range(i_axis.count):
        rows, columns = rows_of(i_axis, tile), elements_of(i_axis, tile)
        bank_ps = b.inner_ps[(item * i_axis.count + tile) % len(b.inner_ps)]
        if joins_projections(config):
            gate_up_sb = b.gate_up[slot][0 : h_axis.rows, 0:run]
            joined_sb = gate_up_sb.reshape_dim(1, (h_axis.count, 2 * rows))
            project(config, bank_ps[0 : 2 * rows, 0:T], joined_sb, turned_sb)
            gate, up = bank_ps[0:rows, 0:T], bank_ps[rows : 2 * rows, 0:T]
        else:
            gate, up = bank_ps[0:rows, 0:T], bank_ps[0:rows, T : 2 * T]
            project(config, gate, weights_sb[0 : h_axis.rows, :, 0, columns], turned_sb)
            project(config, up, weights_sb[0 : h_axis.rows, :, 1, columns], turned_sb)
        activate(config, b, gate, up, slot, item, ring, tile)


def project(
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


def activate(
    config: DecodeConfig,
    b: DecodeBuffers,
    gate: nl.NkiTensor,
    up: nl.NkiTensor,
    slot: int,
    item: int,
    ring: int,
    tile: int,
) -> None:
    """Turn the projections of one tile into inner activations, times the tokens' weights."""
    T, rows = config.T, rows_of(config.i_axis, tile)
    turn = (item * config.i_axis.count + tile) % 2
    gate_sb, up_sb = b.gate[turn][0:rows, 0:T], b.up[turn][0:rows, 0:T]
    if config.scaling == "pre":
        scale_input(config, b, gate_sb, gate, slot, ring, tile, 0)
        scale_input(config, b, up_sb, up, slot, ring, tile, 1)
        gate, up = gate_sb, up_sb
    activate_gate(config, b, gate_sb, gate, slot, tile)
    operators, operands = _chain(config, b, slot, tile, 1)
    inner_sb = b.inner[item % 2][0:rows, tile, 0:T]
    if config.down_scale == "expert":
        operators.append(nl.multiply)
        operands.append(b.down_scale[slot][0:rows, 0, 0:1])
    if not weighs_inner(config):
        multiply_chain(inner_sb, up_sb, up, operators, operands, gate_sb)
        return
    multiply_chain(up_sb, up_sb, up, operators, operands, gate_sb)
    column_ps = b.column_ps[ring][0:rows, 0:T]
    nisa.tensor_tensor(dst=inner_sb, data1=up_sb, data2=column_ps, op=nl.multiply)


def scale_input(
    config: DecodeConfig,
    b: DecodeBuffers,
    dst_sb: nl.NkiTensor,
    projected_ps: nl.NkiTensor,
    slot: int,
    ring: int,
    tile: int,
    half: int,
) -> None:
    """Multiply a projection with the affinities of its input, and its scale if it has one."""
    rows, T = dst_sb.shape
    column_sb = b.input_scale[ring][0:rows, 0:T]
    if config.has_scales:
        nisa.scalar_tensor_tensor(
            dst=dst_sb,
            data=projected_ps,
            op0=nl.multiply,
            operand0=b.gate_up_scale[slot][0:rows, half, tile : tile + 1],
            op1=nl.multiply,
            operand1=column_sb,
        )
    else:
        nisa.tensor_tensor(dst=dst_sb, data1=projected_ps, data2=column_sb, op=nl.multiply)


def activate_gate(
    config: DecodeConfig,
    b: DecodeBuffers,
    gate_sb: nl.NkiTensor,
    gate: nl.NkiTensor,
    slot: int,
    tile: int,
) -> None:
    """Apply scale, bias, clamps and activation to the gate projection, in float32."""
    function, rows = activation_function(config), gate_sb.shape[0]
    clamps = config.gate_limits
    if clamps.has_upper or clamps.has_lower:
        operators, operands = _chain(config, b, slot, tile, 0)
        nisa.activation(
            dst=gate_sb, op=function, data=apply_chain(gate_sb, gate, operators, operands)
        )
        return
    bias: Any = 0.0
    scale: Any = 1.0
    if config.has_gate_up_bias:
        bias = b.gate_up_bias[slot][0:rows, 0, tile : tile + 1]
    if config.has_scales and config.scaling != "pre":
        scale = b.gate_up_scale[slot][0:rows, 0, tile : tile + 1]
    nisa.activation(dst=gate_sb, op=function, data=gate, bias=bias, scale=scale)


def _chain(
    config: DecodeConfig, b: DecodeBuffers, slot: int, tile: int, half: int
) -> tuple[list[Any], list[Any]]:
    """Return the scalar operators and operands of a projection: scale, bias, clamps, offset."""
    operators = []
    operands = []
    rows = rows_of(config.i_axis, tile)
    clamps = config.up_limits if half == 1 else config.gate_limits
    if config.has_scales and config.scaling != "pre":
        operators.append(nl.multiply)
        operands.append(b.gate_up_scale[slot][0:rows, half, tile : tile + 1])
    if config.has_gate_up_bias:
        operators.append(nl.add)
        operands.append(b.gate_up_bias[slot][0:rows, half, tile : tile + 1])
    if clamps.has_upper:
        operators.append(nl.minimum)
        operands.append(clamps.upper)
    if clamps.has_lower:
        operators.append(nl.maximum)
        operands.append(clamps.lower)
    if half == 1 and config.up_offset != 0.0:
        operators.append(nl.add)
        operands.append(config.up_offset)
    return operators, operands


def activation_function(config: DecodeConfig) -> Any:
    """Return the Scalar engine's function."""
    if config.activation == "silu":
        return nl.silu
    if config.activation == "gelu":
        return nl.gelu
    if config.activation == "gelu_tanh":
        return nl.gelu_apprx_tanh
    if config.activation == "relu":
        return nl.relu
    if config.activation == "sigmoid":
        return nl.sigmoid
    if config.activation == "tanh":
        return nl.tanh
    return nl.gelu_apprx_sigmoid


def project_out(
    config: DecodeConfig,
    b: DecodeBuffers,
    slot: int,
    item: int,
    ring: int,
    adds_bias: bool,
    is_first: bool = True,
    is_last: bool = True,
) -> None:
    """Add an item's part of y^T, with the expert's down bias if asked.

    Args:
        config: sizes.
        b: buffers.
        slot: buffers of the weights.
        item: number of the item, for the rings.
        ring: buffers of the expert's column.
        adds_bias: whether this item adds the bias.
        is_first, is_last: whether it is the first and the last item of its expert on this core.
    """
    per_bank, count = tiles_per_bank(config), config.h_axis.count
    stays = holds_expert(config)
    by_channel = config.down_scale == "channel"
    for first in range(0, count, per_bank):
        stop = min(count, first + per_bank)
        bank_ps = out_bank(config, b, item, first // per_bank)
        adds = config.sums_in_psum or (stays and not is_first)
        for c in range(first, stop):
            begin = (c - first) * config.T
            multiply_out(config, b, bank_ps, slot, item, c, begin, adds)
            if adds_bias and not by_channel:
                multiply_bias(config, b, bank_ps, slot, ring, c, begin, True)
        if not config.sums_in_psum and (is_last or not stays):
            add_bank(config, b, bank_ps, slot, first, stop, by_channel)
    if adds_bias and by_channel:
        for first in range(0, count, per_bank):
            stop = min(count, first + per_bank)
            bank_ps = b.bias_ps
            for c in range(first, stop):
                multiply_bias(config, b, bank_ps, slot, ring, c, (c - first) * config.T, False)
            add_bank(config, b, bank_ps, slot, first, stop, False)


def out_bank(config: DecodeConfig, b: DecodeBuffers, item: int, number: int) -> nl.NkiTensor:
    """Return where a bank of an item's y^T goes: the sums, or a ring that is read out."""
    if config.sums_in_psum:
        return b.sums.total_ps[number]
    if holds_expert(config):
        return b.out_ps[number]
    return b.out_ps[(item * accumulator_banks(config) + number) % len(b.out_ps)]


def multiply_out(
    config: DecodeConfig,
    b: DecodeBuffers,
    bank_ps: nl.NkiTensor,
    slot: int,
    item: int,
    tile: int,
    begin: int,
    adds: bool,
) -> None:
    """Multiply an item's inner activations with a tile of H of its down weights."""
    h_axis, i_axis, T = config.h_axis, config.i_axis, config.T
    weights_sb = b.down[slot].reshape_dim(1, (i_axis.count, b.down[slot].shape[1] // i_axis.count))
    rows, columns = rows_of(h_axis, tile), elements_of(h_axis, tile)
    if config.weight_layout == "packed":
        columns = slice(tile * h_axis.rows, tile * h_axis.rows + rows)
    for t in range(i_axis.count):
        depth = rows_of(i_axis, t)
        nisa.nc_matmul(
            dst=bank_ps[0:rows, begin : begin + T],
            stationary=weights_sb[0:depth, t, columns],
            moving=b.inner[item % 2][0:depth, t, 0:T],
            accumulate=t > 0 or adds,
        )


def multiply_bias(
    config: DecodeConfig,
    b: DecodeBuffers,
    bank_ps: nl.NkiTensor,
    slot: int,
    ring: int,
    tile: int,
    begin: int,
    accumulate: bool,
) -> None:
    """Add, or write, the down bias of a tile of H times the tokens' weights."""
    nisa.nc_matmul(
        dst=bank_ps[0 : rows_of(config.h_axis, tile), begin : begin + config.T],
        stationary=b.down_bias[slot][0:1, elements_of(config.h_axis, tile)],
        moving=b.column_row[ring],
        accumulate=accumulate,
    )


def add_bank(
    config: DecodeConfig,
    b: DecodeBuffers,
    bank_ps: nl.NkiTensor,
    slot: int,
    first: int,
    stop: int,
    scales: bool,
) -> None:
    """Add tiles first.. of y^T to the sums in SBUF, scaled by channel if asked.

    The Vector engine adds every other bank itself; for the rest Scalar empties PSUM and GpSimd
    adds.
    """
    full = first
    while full < stop and rows_of(config.h_axis, full) == config.h_axis.rows:
        full += 1
    _add_tiles(config, b, bank_ps, slot, first, first, full, scales)
    _add_tiles(config, b, bank_ps, slot, first, full, stop, scales)


def _add_tiles(
    config: DecodeConfig,
    b: DecodeBuffers,
    bank_ps: nl.NkiTensor,
    slot: int,
    first: int,
    begin: int,
    end: int,
    scales: bool,
) -> None:
    """Add tiles of one height; the bank holds those from `first` on."""
    if begin == end:
        return
    T, rows = config.T, rows_of(config.h_axis, end - 1)
    number = first // tiles_per_bank(config)
    total_sb = b.sums.total_sb[0:rows, begin:end, 0:T]
    part_ps = bank_ps[0:rows, (begin - first) * T : (end - first) * T]
    if not scales and number % 2 == 0:
        nisa.tensor_tensor(dst=total_sb, data1=part_ps, data2=total_sb, op=nl.add)
        return
    scratch_sb = b.scratch[number % len(b.scratch)][0:rows, 0 : (end - begin) * T]
    if scales:
        scale_sb = b.down_scale[slot][0:rows, begin:end, 0:1].broadcast(2, T)
        nisa.tensor_tensor(dst=scratch_sb, data1=part_ps, data2=scale_sb, op=nl.multiply)
    else:
        nisa.tensor_copy(dst=scratch_sb, src=part_ps, engine=nisa.engine.scalar)
    nisa.tensor_tensor(
        dst=total_sb, data1=total_sb, data2=scratch_sb, op=nl.add, engine=nisa.engine.gpsimd
    )
