"""The stages of the prefill kernel: gather, turn, project in, project out, store.

Legend: s parity of a visit, j row tile of a visit, part of the intermediate or hidden axis; h, i
partitions of a tile of H or I.
"""

from typing import Any

import nki.isa as nisa
import nki.language as nl

from nki_kernels.blockwise_buffers import Buffers, Operands, adds_offset, bias_is_inside
from nki_kernels.blockwise_config import (
    PrefillConfig,
    Share,
    bias_terms,
    core_width,
    num_projections,
    scales_late,
    stored_parts,
)
from nki_kernels.tiles import (
    apply_chain,
    copy_alternating,
    elements_of,
    load_matrix,
    load_rows,
    multiply_chain,
    rows_of,
    transpose_rows,
)


def gather_rows(
    config: PrefillConfig, b: Buffers, x: Operands, share: Share, s: int, j: int
) -> None:
    """Gather this core's share of the token rows of a row tile; padding moves no data."""
    R, H, width = config.tile_rows, config.H, core_width(config)
    if config.loop.turns == "dma":
        rows, count = config.h_axis.rows, config.h_axis.count
        nisa.dma_transpose(
            dst=b.turned[turned_slot(config, s, j)].reshape((rows, count, 1, R)),
            src=x.hidden.ap(
                [[H, R], [rows, count], [rows, 1], [1, rows]],
                offset=share.h_first,
                vector_offset=b.ids[s][0:R, j : j + 1],
            ),
            oob_mode=nisa.oob_mode.skip,
            dge_mode=nisa.dge_mode.swdge,
        )
        return
    nisa.dma_copy(
        dst=b.rows[row_buffer(config, j)],
        src=x.hidden.ap(
            [[H, R], [1, width]],
            offset=share.h_first,
            vector_offset=b.ids[s][0:R, j : j + 1],
        ),
        oob_mode=nisa.oob_mode.skip,
        dge_mode=nisa.dge_mode.swdge,
    )


def row_buffer(config: PrefillConfig, j: int) -> int:
    """Return which buffer the gathered rows of tile j use: the first its own, the rest a ring."""
    return 0 if j == 0 else 1 + (j - 1) % (config.loop.row_buffers - 1)


def gather_after(
    config: PrefillConfig,
    b: Buffers,
    x: Operands,
    share: Share,
    s: int,
    j: int,
    size: int,
    next_size: int,
) -> None:
    """Refill the buffer of tile j, which is free again: for this visit or the next one."""
    ring = config.loop.row_buffers - 1
    if j + ring < size:
        gather_rows(config, b, x, share, s, j + ring)
    elif 1 + (j - 1) % ring < next_size:
        gather_rows(config, b, x, share, 1 - s, 1 + (j - 1) % ring)


def turned_slot(config: PrefillConfig, s: int, j: int) -> int:
    """Return which buffer of turned rows tile j of a visit uses.

    Turned by the tensor engine: two in turn, or all if they are used again. By the gather: the
    first tile of two visits and a ring of the others, which are loaded ahead.
    """
    if config.loop.turns == "dma":
        return s if j == 0 else 1 + row_buffer(config, j)
    return j if config.loop.in_parts > 1 else j % 2


def turn_rows(config: PrefillConfig, b: Buffers, s: int, j: int) -> None:
    """Transpose a row tile, scaled first if the configuration says so."""
    if config.loop.turns == "dma":
        return
    R = config.tile_rows
    rows_sb = b.rows[row_buffer(config, j)]
    if config.scaling == "pre":
        nisa.tensor_scalar(
            dst=rows_sb,
            data=rows_sb,
            op0=nl.multiply,
            operand0=b.scale[s][0:R, j : j + 1],
        )
    transpose_rows(b.turned[turned_slot(config, s, j)], rows_sb, config.h_axis, b.turn_ps, R)


def load_gate_up(
    config: PrefillConfig,
    b: Buffers,
    x: Operands,
    share: Share,
    expert: nl.NkiTensor,
    slot: int,
    part: int,
) -> None:
    """Load one part of the gate and up weights of an expert."""
    h_axis, i_axis = config.h_axis, config.i_axis
    halves = num_projections(config)
    width = config.I // stored_parts(config)[0]
    column = share.i_first + part * i_axis.size
    # Parts before this one, rows of other cores, columns of other parts.
    first = column // width * config.H * halves * width
    first = first + share.h_first * halves * width + column % width
    flat = b.gate_up[slot].reshape((h_axis.rows, h_axis.count * halves * i_axis.size))
    load_matrix(
        flat, x.gate_up, h_axis, expert, first, halves * width, [width, halves], i_axis.size
    )


def load_beside(
    config: PrefillConfig,
    b: Buffers,
    x: Operands,
    share: Share,
    expert: nl.NkiTensor,
    slot: int,
    part: int,
) -> None:
    """Load biases and scales of one part of the gate and up projections."""
    first = share.i_first + part * config.i_axis.size
    if config.has_gate_up_bias:
        _load_per_row(b.gate_up_bias[slot], x.gate_up_bias, config, expert, first)
    if config.has_scales:
        _load_per_row(b.gate_up_scale[slot], x.gate_up_scale, config, expert, first)


def prepare_part(config: PrefillConfig, b: Buffers, slot: int) -> None:
    """Turn what was loaded beside the weights of a part into what its use needs.

    Done when the part is used, not when it is loaded: engines take their work in order. What was
    loaded stays as it is, for a visit that finds it still there.
    """
    if adds_offset(config):
        rows, count = config.i_axis.rows, config.i_axis.count
        nisa.tensor_scalar(
            dst=b.up_bias[slot],
            data=b.gate_up_bias[slot][0:rows, 1, 0:count],
            op0=nl.add,
            operand0=config.up_offset,
        )


def _load_per_row(
    dst_sb: nl.NkiTensor,
    src: nl.NkiTensor,
    config: PrefillConfig,
    expert: nl.NkiTensor,
    i_first: int,
) -> None:
    """Load [2I] numbers of an expert as [rows, 2, count], the layout of the projections."""
    i_axis = config.i_axis
    for half in range(num_projections(config)):
        load_matrix(
            dst_sb[0 : i_axis.rows, half, 0 : i_axis.count],
            src,
            i_axis,
            expert,
            half * config.I + i_first,
            1,
            [1, 1],
            1,
        )


def load_down(
    config: PrefillConfig,
    b: Buffers,
    x: Operands,
    share: Share,
    expert: nl.NkiTensor,
    slot: int,
    part: int,
    s: int,
) -> None:
    """Load one part of the columns of an expert's down weights, with bias and, once, scales.

    Args:
        share: which rows and columns are this core's.
        expert: (1, 1) int32 tile.
        slot: buffer of the weights.
        part: which part of the columns.
        s: parity of the visit that the weights are for.
    """
    H, i_axis, in_parts = config.H, config.i_axis, config.loop.in_parts
    width = core_width(config)
    columns = width // config.loop.out_parts
    begin = share.h_first + part * columns
    row = H // stored_parts(config)[1]
    first = begin // row * config.I * row + begin % row
    if config.has_scales and part == 0:
        nisa.dma_copy(
            dst=b.down_scale_parts[s % config.loop.slots],
            src=x.down_scale.ap(
                [[H, 3], [1, width]], offset=share.h_first, scalar_offset=expert, indirect_dim=0
            ),
            oob_mode=nisa.oob_mode.skip,
            dge_mode=nisa.dge_mode.hwdge,
            engine=nisa.engine.sync,
        )
    if config.has_down_bias:
        bias_sb = b.down_bias[slot]
        if bias_is_inside(config):
            bias_sb = b.down[slot][i_axis.rows : i_axis.rows + 1, 0, 0:columns]
        load_rows(bias_sb, x.down_bias, expert, H, begin, columns)
    flat = b.down[slot].reshape((b.down[slot].shape[0], in_parts * i_axis.count * columns))
    size = i_axis.count * columns
    for k in range(in_parts):
        part_sb = flat[0 : i_axis.rows, k * size : (k + 1) * size]
        base = first + (share.i_first + k * i_axis.size) * row
        load_matrix(part_sb, x.down, i_axis, expert, base, row, [1, 1], columns)


def spread_down_scale(config: PrefillConfig, b: Buffers, s: int) -> None:
    """Broadcast the scales of the output columns over the rows: a sum of three bfloat16 terms.

    float32 has 24 bits of mantissa, three times the 8 of bfloat16, so the sum in PSUM is exact.
    """
    width, R, kept = core_width(config), config.tile_rows, s % config.loop.slots
    for begin in range(0, width, 512):
        end = min(width, begin + 512)
        bank_ps = b.outer_ps[begin // 512 % len(b.outer_ps)]
        nisa.nc_matmul(
            dst=bank_ps[0:R, 0 : end - begin],
            stationary=b.ones[0:3, 0:R],
            moving=b.down_scale_parts[kept][0:3, begin:end],
            accumulate=False,
        )
        copy_alternating(
            b.down_scale[kept][0:R, begin:end], bank_ps[0:R, 0 : end - begin], begin // 512
        )


def project_in(
    config: PrefillConfig, b: Buffers, slot: int, s: int, j: int, part: int, tile: int
) -> None:
    """Compute one tile of the intermediate axis for a row tile: gate, up, activation, product."""
    rows, R = rows_of(config.i_axis, tile), config.tile_rows
    bank_ps = b.inner_ps[tile % 2]
    multiply_in(config, b, slot, s, j, tile, bank_ps)
    up = bank_ps[0:rows, num_projections(config) - 1, 0:R]
    finish_in(config, b, slot, s, j, part, tile, bank_ps[0:rows, 0, 0:R], up)


def multiply_in(
    config: PrefillConfig,
    b: Buffers,
    slot: int,
    s: int,
    j: int,
    tile: int,
    bank_ps: nl.NkiTensor,
) -> None:
    """Multiply a row tile with one tile of the gate and up weights, this core's share of H."""
    h_axis, R = config.h_axis, config.tile_rows
    rows, columns = rows_of(config.i_axis, tile), elements_of(config.i_axis, tile)
    turned_sb = b.turned[turned_slot(config, s, j)]
    for half in range(num_projections(config)):
        for t in range(h_axis.count):
            depth = rows_of(h_axis, t)
            nisa.nc_matmul(
                dst=bank_ps[0:rows, half, 0:R],
                stationary=b.gate_up[slot][0:depth, t, half, columns],
                moving=turned_sb[0:depth, t, 0:R],
                accumulate=t > 0,
            )


def finish_in(
    config: PrefillConfig,
    b: Buffers,
    slot: int,
    s: int,
    j: int,
    part: int,
    tile: int,
    gate: nl.NkiTensor,
    up: nl.NkiTensor,
) -> None:
    """Turn gate and up projections into a tile of what goes into the down projection.

    Without a gate, the activation is that of the only projection, and there is no product.
    """
    rows, R = rows_of(config.i_axis, tile), config.tile_rows
    gate_sb = b.gate[tile % 2][0:rows, 0:R]
    up_sb = b.up[tile % 2][0:rows, 0:R]
    inner_sb = b.inner[inner_slot(config, s, j)][0:rows, part * config.i_axis.count + tile, 0:R]
    if scales_late(config):
        scale_sb = b.wide_scale[j][0:rows, 0:R]
        nisa.tensor_tensor(dst=gate_sb, data1=gate, data2=scale_sb, op=nl.multiply)
        gate = gate_sb
    if not config.has_gate:
        activate(config, b, slot, tile, inner_sb, gate)
        return
    activate(config, b, slot, tile, gate_sb, gate)
    if scales_late(config):
        nisa.tensor_tensor(dst=up_sb, data1=up, data2=scale_sb, op=nl.multiply)
        up = up_sb
    operators, operands = _chain(config, b, slot, tile, 1)
    multiply_chain(inner_sb, up_sb, up, operators, operands, gate_sb)


def inner_slot(config: PrefillConfig, s: int, j: int) -> int:
    """Return which buffer holds a row tile between the projections."""
    return s * config.loop.classes[0] + j if config.shard.splits_h else j


def _chain(
    config: PrefillConfig, b: Buffers, slot: int, tile: int, half: int
) -> tuple[list[Any], list[Any]]:
    """Return the scalar operators and operands of a projection: scale, bias, clamps."""
    operators = []
    operands = []
    rows = rows_of(config.i_axis, tile)
    offset = config.up_offset if half == 1 else 0.0
    clamps = config.up_limits if half == 1 else config.gate_limits
    if config.has_scales:
        operators.append(nl.multiply)
        operands.append(b.gate_up_scale[slot][0:rows, half, tile : tile + 1])
    if config.has_gate_up_bias and offset != 0.0:
        operators.append(nl.add)
        operands.append(b.up_bias[slot][0:rows, tile : tile + 1])
    elif config.has_gate_up_bias:
        operators.append(nl.add)
        operands.append(b.gate_up_bias[slot][0:rows, half, tile : tile + 1])
    elif offset != 0.0:
        operators.append(nl.add)
        operands.append(offset)
    # The offset was added before the clamp, so it moves the limits too.
    if clamps.has_upper:
        operators.append(nl.minimum)
        operands.append(clamps.upper + offset)
    if clamps.has_lower:
        operators.append(nl.maximum)
        operands.append(clamps.lower + offset)
    return operators, operands


def activate(
    config: PrefillConfig,
    b: Buffers,
    slot: int,
    tile: int,
    dst_sb: nl.NkiTensor,
    gate: nl.NkiTensor,
) -> None:
    """Apply scale, bias, clamps and activation to the first projection, in float32.

    The scratch tiles of both projections may be written.
    """
    function = activation_function(config)
    clamps, factor = config.gate_limits, config.activation_scale
    rows, R = rows_of(config.i_axis, tile), config.tile_rows
    is_swish = config.activation == "swish"
    needs_chain = clamps.has_upper or clamps.has_lower or config.has_scales
    if config.has_gate_up_bias and not needs_chain and not is_swish and factor == 1.0:
        bias_sb = b.gate_up_bias[slot][0:rows, 0, tile : tile + 1]
        nisa.activation(dst=dst_sb, op=function, data=gate, bias=bias_sb)
        return
    operators, operands = _chain(config, b, slot, tile, 0)
    source = apply_chain(b.gate[tile % 2][0:rows, 0:R], gate, operators, operands)
    if is_swish:
        sigmoid_sb = b.up[tile % 2][0:rows, 0:R]
        nisa.activation(dst=sigmoid_sb, op=function, data=source, scale=factor)
        nisa.tensor_tensor(dst=dst_sb, data1=source, data2=sigmoid_sb, op=nl.multiply)
    else:
        nisa.activation(dst=dst_sb, op=function, data=source, scale=factor)


def activation_function(config: PrefillConfig) -> Any:
    """Return the Scalar engine's function; of swish, the sigmoid."""
    if config.activation == "silu":
        return nl.silu
    if config.activation == "gelu":
        return nl.gelu
    if config.activation == "gelu_tanh":
        return nl.gelu_apprx_tanh
    if config.activation == "relu":
        return nl.relu
    if config.activation == "tanh":
        return nl.tanh
    if config.activation == "swiglu_oai":
        return nl.gelu_apprx_sigmoid
    return nl.sigmoid


def project_out(
    config: PrefillConfig,
    b: Buffers,
    slot: int,
    s: int,
    j: int,
    part: int,
    adds_bias: bool,
    outer: int,
) -> None:
    """Multiply with one part of the columns of the down weights; leave the rows in `outer`."""
    i_axis, R = config.i_axis, config.tile_rows
    columns = core_width(config) // config.loop.out_parts
    width = -(-columns // -(-columns // 512))
    for turn in range(-(-columns // width)):
        begin = turn * width
        end = min(columns, begin + width)
        bank_ps = b.outer_ps[turn % len(b.outer_ps)][0:R, 0 : end - begin]
        for t in range(config.loop.in_parts * i_axis.count):
            depth = rows_of(i_axis, t % i_axis.count)
            if t == 0 and adds_bias and bias_is_inside(config):
                depth = depth + 1
            nisa.nc_matmul(
                dst=bank_ps,
                stationary=b.inner[inner_slot(config, s, j)][0:depth, t, 0:R],
                moving=b.down[slot][0:depth, t, begin:end],
                accumulate=t > 0,
            )
        if adds_bias and config.has_down_bias and not bias_is_inside(config):
            nisa.nc_matmul(
                dst=bank_ps,
                stationary=b.ones[0 : bias_terms(config), 0:R],
                moving=b.down_bias[slot][0 : bias_terms(config), begin:end],
                accumulate=True,
            )
        first = part * columns
        evict_rows(config, b, s, j, bank_ps, turn, slice(first + begin, first + end), outer)


def evict_rows(
    config: PrefillConfig,
    b: Buffers,
    s: int,
    j: int,
    rows_ps: nl.NkiTensor,
    turn: int,
    columns: slice,
    outer: int,
) -> None:
    """Move columns of output rows out of PSUM: scale them and round once."""
    R = config.tile_rows
    outer_sb = b.outer[outer][0:R, columns]
    if config.has_scales:
        row_sb = b.down_scale[s % config.loop.slots][0:R, columns]
        if config.scaling == "post":
            nisa.scalar_tensor_tensor(
                dst=outer_sb,
                data=rows_ps,
                op0=nl.multiply,
                operand0=b.out_scale[s][0:R, j : j + 1],
                op1=nl.multiply,
                operand1=row_sb,
            )
        else:
            nisa.tensor_tensor(dst=outer_sb, data1=rows_ps, data2=row_sb, op=nl.multiply)
    elif config.scaling == "post":
        nisa.tensor_scalar(
            dst=outer_sb,
            data=rows_ps,
            op0=nl.multiply,
            operand0=b.out_scale[s][0:R, j : j + 1],
            engine=nisa.engine.vector if turn % 2 == 1 else nisa.engine.scalar,
        )
    else:
        copy_alternating(outer_sb, rows_ps, turn + 1)


def store_rows(
    config: PrefillConfig, b: Buffers, x: Operands, share: Share, s: int, j: int, outer: int
) -> None:
    """Write the rows of a tile to their slots or tokens; a missing tile moves no data."""
    R, H, width = config.tile_rows, config.H, core_width(config)
    num_partials, num_rows = x.output.shape[0], x.output.shape[1]
    if config.stores == "tiles":
        tiles = x.output.reshape((num_partials * config.num_tiles, R, H))
        nisa.dma_copy(
            dst=tiles.ap(
                [[H, R], [1, width]],
                offset=share.partial * num_rows * H + share.h_first,
                scalar_offset=b.out_tile[s][0:1, j : j + 1],
                indirect_dim=0,
            ),
            src=b.outer[outer],
            oob_mode=nisa.oob_mode.skip,
            dge_mode=nisa.dge_mode.hwdge,
            engine=nisa.engine.scalar,
        )
    else:
        rows = x.output.reshape((num_partials * num_rows, H))
        nisa.dma_copy(
            dst=rows.ap(
                [[H, R], [1, width]],
                offset=share.partial * num_rows * H + share.h_first,
                vector_offset=b.out_row[s][0:R, j : j + 1],
            ),
            src=b.outer[outer],
            oob_mode=nisa.oob_mode.skip,
            dge_mode=nisa.dge_mode.swdge,
        )
