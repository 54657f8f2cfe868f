"""Stages of the decode kernels: load an item of weights, project into I.

A chunk is a piece of one expert's intermediate axis, an item is a chunk or a part of one: some
rows of H of its gate and up weights, and some rows of I of its down weights. Where the chunk is the
whole axis, a part is one run of memory per partition. The projections of a chunk are added up in
PSUM over its parts. Weights are stationary, all tokens move:

    projections  [i, 2, T]    = gate_up[h, i]^T  x^T[h, T]      in PSUM
    inner        [i, T]       = act(gate) * up * weight of the token
    y^T          [h, H/h, T] += down[i, h]^T inner[i, T]        in PSUM, or added to SBUF
    or y         [T, H]      += inner[i, T]^T down[i, H]

Axis letters: h, i partitions of a tile of H or I; T tokens.
"""

from typing import Any

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.arithmetic import apply_with
from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.formula import early_offset
from nki_kernels.common.mx import QUADRANT
from nki_kernels.common.tiles import (
    Entry,
    apply_chain,
    copy_alternating,
    elements_of,
    finish_gate,
    finish_up,
    gate_function,
    load_halves,
    load_matrix,
    load_pattern,
    load_rows,
    needs_product,
    rows_of,
    swap_with_other,
)
from nki_kernels.decode.buffers import DecodeBuffers
from nki_kernels.decode.config import (
    DecodeConfig,
    bias_partitions,
    bias_quadrants,
    inner_rows,
    is_mx,
    joins_projections,
    loads_bias,
    tiles_of_part,
    weighs_inner,
)
from nki_kernels.decode.mx_stages import project_words_in, quantize_inner


def load_in(b: DecodeBuffers, expert: nl.NkiTensor, buffer: int, item: int, is_last: bool) -> None:
    """Load gate and up weights of an item, with the last of a chunk what its activation needs.

    Args:
        b: buffers.
        expert: (1, 1) int32 tile.
        buffer: the weight buffer to fill.
        item: which of the expert's.
        is_last: whether it is the last one of its chunk on this core.
    """
    config = b.config
    if config.weights.layout == "packed":
        _load_run(b.gate_up[buffer], _entry(b.x.gate_up, expert), item)
        return
    I, i_axis = config.I, config.i_axis  # noqa: E741
    first = item // config.parts * i_axis.size
    gate_up = _entry(b.x.gate_up, expert)
    if config.h_axis.is_strided:
        _load_part_in(config, b.gate_up[buffer], gate_up, first, item % config.parts)
    else:
        load_matrix(b.gate_up[buffer], gate_up, config.h_axis, first, 2 * I, [I, 2], i_axis.size)
    # The activation of a chunk comes after its last item: so do its scales and biases.
    if not is_last:
        return
    if config.formula.has_gate_up_bias:
        bias = _entry(b.x.gate_up_bias, expert)
        load_halves(b.gate_up_bias[buffer], bias, i_axis, I, first)
    if config.weights.has_scales:
        scale = _entry(b.x.gate_up_scale, expert)
        load_halves(b.gate_up_scale[buffer], scale, i_axis, I, first)
    if config.weights.down_scale == "channel":
        scale = _entry(b.x.down_scale, expert)
        load_matrix(b.down_scale[buffer], scale, config.h_axis, 0, 1, [1, 1], 1)
    elif config.weights.down_scale == "expert":
        scale = _entry(b.x.down_scale, expert)
        # One number, read onto all partitions.
        load_pattern(b.down_scale[buffer], scale, [[0, PARTITIONS], [1, 1]], 0)


def load_out(
    b: DecodeBuffers, expert: nl.NkiTensor, buffer: int, item: int, is_first: bool
) -> None:
    """Load down weights of an item; beside the first one of a core its bias, if it is apart."""
    config = b.config
    H, i_axis, down = config.H, config.i_axis, _entry(b.x.down, expert)
    first = item // config.parts * i_axis.size
    if config.weights.layout == "packed":
        _load_run(b.down[buffer], down, item)
    elif i_axis.is_strided:
        _load_part_out(config, b.down[buffer], down, first, item % config.parts)
    else:
        load_matrix(b.down[buffer], down, i_axis, first * H, H, [1, 1], H)
    if loads_bias(config) and is_first:
        _load_down_bias(config, b.down_bias[buffer], _entry(b.x.down_bias, expert))


def _load_down_bias(config: DecodeConfig, dst_sb: nl.NkiTensor, down_bias: Entry) -> None:
    """Load an expert's down bias, the same number of tiles of H to each quadrant it takes."""
    h_axis, quadrants = config.h_axis, bias_quadrants(config)
    size = dst_sb.shape[1]
    for quadrant in range(quadrants):
        row = quadrant * QUADRANT
        tiles = h_axis.count // quadrants
        pattern = [[1, size]] if quadrants == 1 else [[h_axis.count, h_axis.rows], [1, tiles]]
        load_pattern(dst_sb[row : row + 1], down_bias, pattern, quadrant * tiles)


def load_item(b: DecodeBuffers, expert: nl.NkiTensor, buffer: int, item: int) -> None:
    """Load all of an item, a whole chunk; see `load_in`."""
    load_in(b, expert, buffer, item, True)
    load_out(b, expert, buffer, item, item == 0)


def _load_part_in(
    config: DecodeConfig, dst_sb: nl.NkiTensor, gate_up: Entry, first: int, part: int
) -> None:
    """Load tiles of H of the gate and up columns from `first` on.

    Whole rows follow each other: one descriptor per partition, whether the expert is there or
    is left out.
    """
    h_axis, I, columns = config.h_axis, config.I, config.i_axis.size  # noqa: E741
    begin, end = tiles_of_part(h_axis, config, part)
    pattern = [[h_axis.count * 2 * I, h_axis.rows], [2 * I, end - begin], [I, 2], [1, columns]]
    if columns == I:
        pattern = [[h_axis.count * 2 * I, h_axis.rows], [1, (end - begin) * 2 * I]]
    part_sb = dst_sb[0 : h_axis.rows, 0 : (end - begin) * 2 * columns]
    load_pattern(part_sb, gate_up, pattern, begin * 2 * I + first)


def _load_part_out(
    config: DecodeConfig, dst_sb: nl.NkiTensor, down: Entry, first: int, part: int
) -> None:
    """Load tiles of I of the down rows from `first` on; a partition has consecutive ones."""
    i_axis, H = config.i_axis, config.H
    begin, end = tiles_of_part(i_axis, config, part)
    part_sb = dst_sb[0 : i_axis.rows, 0 : (end - begin) * H]
    pattern = [[i_axis.count * H, i_axis.rows], [1, (end - begin) * H]]
    load_pattern(part_sb, down, pattern, (first + begin) * H)


def _entry(stack: nl.NkiTensor, expert: nl.NkiTensor) -> Entry:
    """Return an expert's part of an operand."""
    return Entry(stack, expert, False)


def _load_run(dst_sb: nl.NkiTensor, entry: Entry, chunk: int) -> None:
    """Load a packed item, a run per partition."""
    rows, run = dst_sb.shape
    load_rows(dst_sb, entry, run, chunk * rows * run, run)


def spread_column(
    b: DecodeBuffers,
    weights: list[nl.NkiTensor],
    inputs: list[nl.NkiTensor],
    column: int,
    ring: int,
    bias: float,
) -> None:
    """Put what every token takes of an expert, and gives to it, on all partitions.

    Args:
        b: buffers.
        weights, inputs: per 128 tokens [tokens, entries] float32; see `Listed`.
        column: the expert's entry.
        ring: which buffers to fill.
        bias: what to multiply the expert's down bias with.
    """
    config = b.config
    column_ps = b.banks.column_ps[ring]
    if config.scaling == "pre":
        # Copied to SBUF: they multiply projections in PSUM, and an instruction reads PSUM once.
        _spread(b.banks.input_ps[ring], inputs, column)
        nisa.tensor_copy(
            dst=b.input_scale[ring], src=b.banks.input_ps[ring], engine=nisa.engine.scalar
        )
    if weighs_inner(config) or config.formula.has_down_bias:
        _spread(column_ps, weights, column)
    if loads_bias(config):
        # A bias is added by a matmul of one row, bias times what the tokens take of the expert.
        nisa.tensor_scalar(
            dst=b.column_row[ring],
            data=column_ps[0 : bias_partitions(config), 0 : config.T],
            op0=nl.multiply,
            operand0=bias,
        )


def _spread(column_ps: nl.NkiTensor, tables: list[nl.NkiTensor], column: int) -> None:
    """Transpose a column, repeated 128 times; a token that is not a number stays alone."""
    begin = 0
    for table_sb in tables:
        rows, width = table_sb.shape
        # A stride of 0 repeats the column 128 times along the free axis: on all partitions, then.
        nisa.nc_transpose(
            dst=column_ps[0:PARTITIONS, begin : begin + rows],
            data=table_sb.ap([[width, rows], [0, PARTITIONS]], offset=column),
            engine=nisa.engine.tensor,
        )
        begin = begin + rows


def project_in(
    b: DecodeBuffers,
    transposed_sb: nl.NkiTensor,
    buffer: int,
    item: int,
    ring: int,
    is_first: bool,
    is_last: bool,
) -> None:
    """Add an item to the projections of its chunk, and after the last one activate them.

    Args:
        b: buffers.
        transposed_sb: x^T, [h, H/h, T] view.
        buffer: the weight buffer.
        item: number of the item, for the rings.
        ring: buffers of the expert's column.
        is_first, is_last: whether it is the first and the last one of its chunk.
    """
    config = b.config
    if is_mx(config):
        _project_words_in(b, buffer, item, ring)
        return
    h_axis, i_axis, T = config.h_axis, config.i_axis, config.T
    begin, end = tiles_of_part(h_axis, config, item % config.parts)
    run = (end - begin) * 2 * i_axis.size
    weights_sb = b.gate_up[buffer][0 : h_axis.rows, 0:run].reshape_dim(
        1, (end - begin, 2, i_axis.size)
    )
    first = item // config.parts * i_axis.count
    for tile in range(i_axis.count):
        rows, columns = rows_of(i_axis, tile), elements_of(i_axis, tile)
        bank_ps = b.banks.inner_ps[(first + tile) % len(b.banks.inner_ps)]
        # A narrow chunk: one matmul for gate and up, whose columns are side by side.
        if joins_projections(config):
            gate_up_sb = b.gate_up[buffer][0 : h_axis.rows, 0:run]
            joined_sb = gate_up_sb.reshape_dim(1, (h_axis.count, 2 * rows))
            _project(config, bank_ps[0 : 2 * rows, 0:T], joined_sb, transposed_sb, 0, True)
            gate, up = bank_ps[0:rows, 0:T], bank_ps[rows : 2 * rows, 0:T]
        else:
            gate, up = bank_ps[0:rows, 0:T], bank_ps[0:rows, T : 2 * T]
            gate_sb = weights_sb[0 : h_axis.rows, :, 0, columns]
            up_sb = weights_sb[0 : h_axis.rows, :, 1, columns]
            _project(config, gate, gate_sb, transposed_sb, begin, is_first)
            _project(config, up, up_sb, transposed_sb, begin, is_first)
        if is_last:
            _activate(b, gate, up, buffer, item, ring, tile)


def project_half(
    b: DecodeBuffers, transposed_sb: nl.NkiTensor, buffer: int, item: int, ring: int
) -> None:
    """Add an item to the projections of an expert that the cores share by halves.

    After the last one the cores exchange projections of each other's tiles of I, add them to their
    own and activate those.

    Args:
        b: buffers.
        transposed_sb: x^T, [h, H/h, T] view.
        buffer: the weight buffer.
        item: number of the item, from that of this core's first part on.
        ring: buffers of the expert's column.
    """
    config = b.config
    half = config.parts // 2
    first = b.sums.core * half
    project_in(b, transposed_sb, buffer, item, ring, item == first, False)
    if item < first + half - 1:
        return
    T, rows, middle = config.T, config.i_axis.rows, tiles_of_part(config.i_axis, config, half)[0]
    begin, end = (0, middle) if b.sums.core == 0 else (middle, config.i_axis.count)
    theirs = middle if b.sums.core == 0 else 0
    sent_sb, received_sb = b.halves[0], b.halves[1]
    # Only what the other core activates leaves; own tiles stay in PSUM until its part is here.
    for k in range(config.i_axis.count - (end - begin)):
        copy_alternating(sent_sb[0:rows, k], b.banks.inner_ps[theirs + k][0:rows, 0 : 2 * T], k)
    swap_with_other(sent_sb, received_sb, b.sums.core, sent_sb.shape[1] * 2 * T * 4)
    for tile in range(begin, end):
        sum_sb = received_sb[0:rows, tile - begin]
        own_ps = b.banks.inner_ps[tile][0:rows, 0 : 2 * T]
        nisa.tensor_tensor(dst=sum_sb, data1=own_ps, data2=sum_sb, op=nl.add)
        gate, up = sum_sb[0:rows, 0:T], sum_sb[0:rows, T : 2 * T]
        _activate(b, gate, up, buffer, item, ring, tile)


def _project_words_in(b: DecodeBuffers, buffer: int, item: int, ring: int) -> None:
    """Compute the inner activations of an item of MX words, and make words of them."""
    config = b.config
    rows, T = config.i_axis.rows, config.T
    for tile in range(config.i_axis.count):
        bank_ps = b.banks.inner_ps[(item * config.i_axis.count + tile) % len(b.banks.inner_ps)]
        gate, up = bank_ps[0:rows, 0:T], bank_ps[0:rows, T : 2 * T]
        project_words_in(b, gate, buffer, 0, tile)
        project_words_in(b, up, buffer, 1, tile)
        _activate(b, gate, up, buffer, item, ring, tile)
    quantize_inner(b, item)


def _project(
    config: DecodeConfig,
    dst_ps: nl.NkiTensor,
    weights_sb: nl.NkiTensor,
    transposed_sb: nl.NkiTensor,
    first: int,
    is_first: bool,
) -> None:
    """Multiply [h, n, i] weights of the tiles of H from `first` on with the tokens, [i, T]."""
    count, columns = weights_sb.shape[1], weights_sb.shape[2]
    for t in range(count):
        depth = rows_of(config.h_axis, first + t)
        nisa.nc_matmul(
            dst=dst_ps,
            stationary=weights_sb[0:depth, t, 0:columns],
            moving=transposed_sb[0:depth, first + t, 0 : config.T],
            accumulate=t > 0 or not is_first,
        )


def _activate(
    b: DecodeBuffers,
    gate: nl.NkiTensor,
    up: nl.NkiTensor,
    buffer: int,
    item: int,
    ring: int,
    tile: int,
) -> None:
    """Make of the projections of one tile inner activations, times the tokens' weights."""
    config = b.config
    T, rows = config.T, rows_of(config.i_axis, tile)
    chunk = item // config.parts
    turn = (chunk * config.i_axis.count + tile) % 2
    gate_sb, up_sb = b.gate[turn][0:rows, 0:T], b.up[turn][0:rows, 0:T]
    if config.scaling == "pre":
        # Scaled tokens would be another x^T for each expert; their products are scaled instead.
        _scale_input(b, gate_sb, gate, buffer, ring, tile, 0)
        _scale_input(b, up_sb, up, buffer, ring, tile, 1)
        gate, up = gate_sb, up_sb
    # Gate first: it may use the scratch of up, which is written behind it.
    _activate_gate(b, gate_sb, up_sb, gate, buffer, tile)
    operators, operands = _chain(b, buffer, tile, 1)
    inner_sb = b.inner[chunk % len(b.inner)][0 : inner_rows(config, tile), tile, 0:T]
    if config.weights.down_scale == "expert":
        operators.append(nl.multiply)
        operands.append(b.down_scale[buffer][0:rows, 0, 0:1])
    if not weighs_inner(config):
        finish_up(config.formula, inner_sb, up_sb, up, operators, operands, gate_sb)
        return
    finish_up(config.formula, up_sb, up_sb, up, operators, operands, gate_sb)
    # A bias inside the down weights is multiplied with the tokens' weights: its row of up is 1.
    weighed = inner_sb.shape[0]
    nisa.tensor_tensor(
        dst=inner_sb,
        data1=b.up[turn][0:weighed, 0:T],
        data2=b.banks.column_ps[ring][0:weighed, 0:T],
        op=nl.multiply,
    )


def _scale_input(
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
    if b.config.weights.has_scales:
        scale = b.gate_up_scale[buffer][0:rows, half, tile : tile + 1]
        apply_with(dst_sb, projected_ps, nl.multiply, scale, nl.multiply, column_sb)
    else:
        nisa.tensor_tensor(dst=dst_sb, data1=projected_ps, data2=column_sb, op=nl.multiply)


def _activate_gate(
    b: DecodeBuffers,
    gate_sb: nl.NkiTensor,
    scratch_sb: nl.NkiTensor,
    gate: nl.NkiTensor,
    buffer: int,
    tile: int,
) -> None:
    """Apply scale, bias, clamps and activation to the gate projection, in float32."""
    config = b.config
    function, rows = gate_function(config.formula), gate_sb.shape[0]
    clamps = config.formula.gate_limits
    if needs_product(config.formula):
        operators, operands = _chain(b, buffer, tile, 0)
        source = apply_chain(gate_sb, gate, operators, operands)
        nisa.activation(dst=scratch_sb, op=function, data=source, scale=config.formula.scale)
        finish_gate(config.formula, gate_sb, gate_sb, source, scratch_sb)
        return
    # Clamps stand between bias and function: the Vector engine applies them and all before.
    if clamps.has_upper or clamps.has_lower:
        operators, operands = _chain(b, buffer, tile, 0)
        nisa.activation(
            dst=gate_sb, op=function, data=apply_chain(gate_sb, gate, operators, operands)
        )
        return
    # Without clamps the Scalar engine scales, adds the bias and activates in one instruction.
    bias: Any = 0.0
    scale: Any = 1.0
    if config.formula.has_gate_up_bias:
        bias = b.gate_up_bias[buffer][0:rows, 0, tile : tile + 1]
    if config.weights.has_scales and config.scaling != "pre":
        scale = b.gate_up_scale[buffer][0:rows, 0, tile : tile + 1]
    nisa.activation(dst=gate_sb, op=function, data=gate, bias=bias, scale=scale)


def _chain(b: DecodeBuffers, buffer: int, tile: int, half: int) -> tuple[list[Any], list[Any]]:
    """Return the scalar operators and operands of a projection: scale, bias, clamps, offset."""
    config = b.config
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
    if half == 1 and early_offset(config.formula) != 0.0:
        operators.append(nl.add)
        operands.append(early_offset(config.formula))
    return operators, operands
