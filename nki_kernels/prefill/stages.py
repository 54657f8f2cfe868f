"""The stages of the prefill kernel on chip: transpose, project in, project out, store.

Legend: s parity of a work tile, j row tile of a work tile, part of the intermediate or hidden axis;
h, i partitions of a tile of H or I.
"""

from typing import Any

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.arithmetic import apply_with
from nki_kernels.common.chip import BANK_FLOATS
from nki_kernels.common.formula import early_offset, num_projections
from nki_kernels.common.tiles import (
    apply_chain,
    copy_alternating,
    elements_of,
    finish_gate,
    finish_up,
    gate_function,
    is_fused,
    needs_product,
    rows_of,
    transpose_rows,
    when_missing,
)
from nki_kernels.prefill.buffers import Buffers
from nki_kernels.prefill.config import (
    PrefillConfig,
    bias_is_inside,
    bias_terms,
    core_width,
    is_mx,
    largest_work_tile_of,
    part_tiles,
    stored_rows,
    stores_pieces,
)
from nki_kernels.prefill.loads import row_buffer, transposed_buffer
from nki_kernels.prefill.mx_stages import (
    evict,
    multiply_words_in,
    project_words_out,
    quantize_inner,
    transpose_into_words,
)


def transpose_tile(b: Buffers, s: int, j: int) -> None:
    """Transpose the rows of a row tile, scaled first if the configuration says so."""
    config = b.config
    rows_sb = b.rows[row_buffer(config, s, j)]
    if config.scaling == "pre":
        # In place: only the transposes below read these rows.
        nisa.tensor_scalar(
            dst=rows_sb,
            data=rows_sb,
            op0=nl.multiply,
            operand0=b.scale[s][0 : config.tile_rows, j : j + 1],
        )
    if is_mx(config):
        transpose_into_words(b, rows_sb, transposed_buffer(config, j), j)
        return
    transposed_sb = b.transposed[transposed_buffer(config, j)]
    transpose_rows(transposed_sb, rows_sb, config.h_axis, b.transposed_ps, config.tile_rows)


def spread_down_scale(b: Buffers, s: int) -> None:
    """Broadcast the scales of the output columns over the rows: a sum of three bfloat16 terms.

    float32 has 24 bits of mantissa, three times the 8 of bfloat16, so the sum in PSUM is exact.
    """
    config = b.config
    width, R, kept = core_width(config), config.tile_rows, s % config.loop.weight_buffers
    # A matmul with ones adds the three rows and has the sum on all partitions. Its banks are those
    # of output rows, whose products come next.
    for begin in range(0, width, BANK_FLOATS):
        end = min(width, begin + BANK_FLOATS)
        bank_ps = b.outer_ps[begin // BANK_FLOATS % len(b.outer_ps)]
        nisa.nc_matmul(
            dst=bank_ps[0:R, 0 : end - begin],
            stationary=b.ones[0:3, 0:R],
            moving=b.down_scale_parts[kept][0:3, begin:end],
            accumulate=False,
        )
        copy_alternating(
            b.down_scale[kept][0:R, begin:end], bank_ps[0:R, 0 : end - begin], begin // BANK_FLOATS
        )


def project_in(
    b: Buffers, buffer: int, beside: int, s: int, j: int, part: int, h_part: int, tile: int
) -> None:
    """Compute one tile of the intermediate axis for a row tile: gate, up, activation, product.

    Those of all parts of the hidden axis but the last only add to PSUM.

    Args:
        b: sizes and buffers.
        buffer: of the weights.
        beside: of their biases and scales.
        s, j: work tile and row tile.
        part, h_part: of the intermediate and of the hidden axis.
        tile: of the part.
    """
    config = b.config
    # Two banks alternate, one filled while the other is activated. With parts of H every sum of the
    # work tile waits in PSUM for the last part, and has a place of its own.
    if config.loop.h_parts == 1:
        bank_ps = b.inner_ps[inner_turn(config, j, part, tile)]
    else:
        bank_ps = b.inner_ps[j * config.i_axis.count + tile]
    multiply_in(b, buffer, s, j, tile, h_part, bank_ps)
    if h_part + 1 < config.loop.h_parts:
        return
    finish_in(b, beside, s, j, part, tile, bank_ps[0 : rows_of(config.i_axis, tile)])
    if is_mx(config) and tile == config.i_axis.count - 1:
        quantize_inner(b, inner_buffer(config, s, j), part)


def multiply_in(
    b: Buffers, buffer: int, s: int, j: int, tile: int, h_part: int, bank_ps: nl.NkiTensor
) -> None:
    """Multiply a row tile with one tile of the gate and up weights, one part of this core's share
    of H.
    """
    config = b.config
    if is_mx(config):
        multiply_words_in(b, buffer, transposed_buffer(config, j), tile, bank_ps)
        return
    h_axis, R = config.h_axis, bank_ps.shape[2]
    rows, columns = rows_of(config.i_axis, tile), elements_of(config.i_axis, tile)
    transposed_sb = b.transposed[transposed_buffer(config, j)]
    # Weights are stationary and rows move: the product [i, R] is what the down projection takes as
    # its stationary side, without another transpose.
    for half in range(num_projections(config.formula)):
        for t in range(part_tiles(config)):
            of_all = h_part * part_tiles(config) + t
            depth = rows_of(h_axis, of_all)
            nisa.nc_matmul(
                dst=bank_ps[0:rows, half, 0:R],
                stationary=b.gate_up[buffer][0:depth, t, half, columns],
                moving=transposed_sb[0:depth, of_all, 0:R],
                # The first product overwrites the bank: it is never cleared.
                accumulate=of_all > 0,
            )


def finish_in(
    b: Buffers, buffer: int, s: int, j: int, part: int, tile: int, projected: nl.NkiTensor
) -> None:
    """Make of projections [rows, 2 or 1, R] a tile of what goes into the down projection; without
    a gate the activation is that of the only projection, and there is no product.
    """
    config = b.config
    rows, R = rows_of(config.i_axis, tile), projected.shape[2]
    turn = inner_turn(config, j, part, tile)
    gate_sb, up_sb = b.gate[turn][0:rows, 0:R], b.up[turn][0:rows, 0:R]
    inner_sb = b.inner[inner_buffer(config, s, j)]
    if is_mx(config):
        inner_sb = inner_sb[0:rows, part, 0:R, tile]
    else:
        inner_sb = inner_sb[0:rows, part * config.i_axis.count + tile, 0:R]
    gate, up = projected[0:rows, 0, 0:R], projected[0:rows, projected.shape[1] - 1, 0:R]
    if not config.formula.has_gate:
        _activate(b, buffer, tile, inner_sb, gate, gate_sb, up_sb)
        return
    # The activation may use the scratch of the up projection, so it comes first.
    _activate(b, buffer, tile, gate_sb, gate, gate_sb, up_sb)
    # The last to read the projections, whose place is free for another tile behind this.
    operators, operands = _chain(b, buffer, tile, 1)
    finish_up(config.formula, inner_sb, up_sb, up, operators, operands, gate_sb)


def inner_turn(config: PrefillConfig, j: int, part: int, tile: int) -> int:
    """Return which of two banks and scratch tiles a tile of the projections takes: tiles, parts and
    row tiles that follow each other take turns.
    """
    return ((part + j) * config.i_axis.count + tile) % 2


def inner_buffer(config: PrefillConfig, s: int, j: int) -> int:
    """Return which buffer holds a row tile between the projections."""
    return s % 2 * largest_work_tile_of(config) + j if config.shard.splits_h else j


def _chain(b: Buffers, buffer: int, tile: int, half: int) -> tuple[list[Any], list[Any]]:
    """Return the scalar operators and operands of a projection: scale, bias, clamps."""
    config = b.config
    operators = []
    operands = []
    rows = rows_of(config.i_axis, tile)
    formula = config.formula
    offset = early_offset(formula) if half == 1 else 0.0
    clamps = formula.gate_limits if half == 0 and formula.has_gate else formula.up_limits
    if config.has_scales:
        operators.append(nl.multiply)
        operands.append(b.gate_up_scale[buffer][0:rows, half, tile : tile + 1])
    if config.formula.has_gate_up_bias and offset != 0.0:
        operators.append(nl.add)
        operands.append(b.up_bias[buffer][0:rows, tile : tile + 1])
    elif config.formula.has_gate_up_bias:
        operators.append(nl.add)
        operands.append(b.gate_up_bias[buffer][0:rows, half, tile : tile + 1])
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


def _activate(
    b: Buffers,
    buffer: int,
    tile: int,
    dst_sb: nl.NkiTensor,
    gate: nl.NkiTensor,
    gate_sb: nl.NkiTensor,
    up_sb: nl.NkiTensor,
) -> None:
    """Apply scale, bias, clamps and activation to the first projection, in float32.

    The scratch tiles of both projections, `gate_sb` and `up_sb`, may be written.
    """
    config = b.config
    formula = config.formula
    function, factor = gate_function(formula), 1.0 if is_fused(formula) else formula.scale
    clamps = formula.gate_limits if formula.has_gate else formula.up_limits
    multiplies = needs_product(formula)
    needs_chain = clamps.has_upper or clamps.has_lower or config.has_scales
    if formula.has_gate_up_bias and not needs_chain and not multiplies and factor == 1.0:
        # One instruction of the Scalar engine, which leaves the Vector engine free.
        bias_sb = b.gate_up_bias[buffer][0 : rows_of(config.i_axis, tile), 0, tile : tile + 1]
        nisa.activation(dst=dst_sb, op=function, data=gate, bias=bias_sb)
        return
    operators, operands = _chain(b, buffer, tile, 0)
    source = apply_chain(gate_sb, gate, operators, operands)
    if multiplies:
        nisa.activation(dst=up_sb, op=function, data=source, scale=factor)
        finish_gate(formula, dst_sb, gate_sb, source, up_sb)
    else:
        nisa.activation(dst=dst_sb, op=function, data=source, scale=factor)


def project_out(b: Buffers, s: int, j: int, part: int, outer: int) -> None:
    """Multiply a row tile with one part of the columns of the down weights; leave the result in
    `outer`.
    """
    config = b.config
    if is_mx(config):
        project_words_out(b, s % config.loop.weight_buffers, s, j, outer)
        return
    i_axis, R = config.i_axis, config.tile_rows
    buffer = (s * config.loop.out_parts + part) % config.loop.weight_buffers
    columns = core_width(config) // config.loop.out_parts
    count = -(-columns // BANK_FLOATS)
    width = -(-columns // count)
    for bank in range(count):
        begin = bank * width
        end = min(columns, begin + width)
        turn = (part + j) * count + bank  # the next tile's products wait for none of this one's
        bank_ps = b.outer_ps[turn % len(b.outer_ps)][0:R, 0 : end - begin]
        for t in range(config.loop.in_parts * i_axis.count):
            depth = rows_of(i_axis, t % i_axis.count)
            # One row more: ones in inner (`fill_rest`), the bias in the weights (`load_down`).
            if t == 0 and b.share.adds_bias and bias_is_inside(config):
                depth = depth + 1
            # Here rows are stationary: the product has them on the partitions, as they are stored.
            nisa.nc_matmul(
                dst=bank_ps,
                stationary=b.inner[inner_buffer(config, s, j)][0:depth, t, 0:R],
                moving=b.down[buffer][0:depth, t, begin:end],
                accumulate=t > 0,
            )
        if config.formula.has_down_bias and not bias_is_inside(config):
            # Both cores have the same instructions: one that adds no bias adds zeros.
            factor_sb = b.ones if b.share.adds_bias else b.zeros[0]
            nisa.nc_matmul(
                dst=bank_ps,
                stationary=factor_sb[0 : bias_terms(config), 0:R],
                moving=b.down_bias[buffer][0 : bias_terms(config), begin:end],
                accumulate=True,
            )
        first = part * columns
        _evict_rows(b, s, j, bank_ps, turn, slice(first + begin, first + end), outer)


def _evict_rows(
    b: Buffers, s: int, j: int, rows_ps: nl.NkiTensor, turn: int, columns: slice, outer: int
) -> None:
    """Move columns of output rows out of PSUM: scale them and round once."""
    config = b.config
    R = rows_ps.shape[0]
    outer_sb = b.outer[outer][0:R, columns]
    if config.has_scales:
        # Vector takes all: the Scalar engine multiplies by one number a partition, and GpSimd reads
        # no PSUM.
        row_sb = b.down_scale[s % config.loop.weight_buffers][0:R, columns]
        if config.scaling == "post":
            scale = b.out_scale[s][0:R, j : j + 1]
            apply_with(outer_sb, rows_ps, nl.multiply, scale, nl.multiply, row_sb)
        else:
            nisa.tensor_tensor(dst=outer_sb, data1=rows_ps, data2=row_sb, op=nl.multiply)
    else:
        evict(b, s, j, outer_sb, rows_ps, turn)


def store_rows(b: Buffers, s: int, j: int, outer: int) -> None:
    """Write the rows of a tile to their slots; a missing tile moves no data."""
    config = b.config
    R, H, width = config.tile_rows, config.H, core_width(config)
    num_partials, num_rows = b.x.output.shape[0], b.x.output.shape[1]
    if config.stores == "tiles" or stores_pieces(config):
        each = stored_rows(config)
        count = R // each
        pieces = b.x.output.reshape((num_partials * num_rows // each, each, H))
        for piece in range(count):
            place = j * count + piece
            nisa.dma_copy(
                dst=pieces.ap(
                    [[H, each], [1, width]],
                    offset=b.share.partial * num_rows * H + b.share.h_first,
                    scalar_offset=b.out_tile[s][0:1, place : place + 1],
                    indirect_dim=0,
                ),
                src=b.outer[outer][piece * each : (piece + 1) * each],
                oob_mode=when_missing(config.loop.missing == "skip"),
                dge_mode=nisa.dge_mode.hwdge,
                # Of both queues: an iteration ends when its last transfer is issued.
                engine=nisa.engine.scalar if piece % 2 == 0 else nisa.engine.sync,
            )
    else:
        rows = b.x.output.reshape((num_partials * num_rows, H))
        nisa.dma_copy(
            dst=rows.ap(
                [[H, R], [1, width]],
                offset=b.share.partial * num_rows * H + b.share.h_first,
                vector_offset=b.out_row[s][0:R, j : j + 1],
            ),
            src=b.outer[outer],
            oob_mode=when_missing(config.loop.missing == "skip"),
            dge_mode=nisa.dge_mode.swdge,
        )


def store_zeros(b: Buffers) -> None:
    """Write zeros to the last row of this core's output, for whoever misses a slot."""
    H, width, num_rows = b.config.H, core_width(b.config), b.x.output.shape[1]
    row_sb = b.outer[0][0:1, 0:width]
    nisa.memset(dst=row_sb, value=0.0)
    last = (b.share.partial + 1) * num_rows - 1
    nisa.dma_copy(
        dst=b.x.output.ap([[H, 1], [1, width]], offset=last * H + b.share.h_first), src=row_sb
    )
