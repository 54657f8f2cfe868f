"""Stages of the decode kernels: project out of I, and add up y.

1. For every PSUM bank of y: the down projections of a group of chunks, added (`_project_bank`).
2. The expert's down bias, times the tokens' weights: in the same bank, or apart where the bank is
   scaled by channel.
3. The bank goes to the sums in SBUF (`_add_bank`).

A *group* is one or more items of an expert that are added up in PSUM before they go to the sums.
Where an expert's part of y stays there until its last chunk, a group is one chunk.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.arithmetic import apply_with
from nki_kernels.common.mx import QUADRANT
from nki_kernels.common.tiles import elements_of, rows_of
from nki_kernels.decode.buffers import DecodeBuffers
from nki_kernels.decode.config import (
    DecodeConfig,
    accumulator_banks,
    bank_span,
    bias_quadrants,
    holds_expert,
    inner_rows,
    is_mx,
    keeps_scales,
    most_tiles,
    out_banks,
    tiles_of_part,
)
from nki_kernels.decode.mx_stages import multiply_words_out
from nki_kernels.decode.steps import Group

_TILEWISE_TOKENS = 64  # from here on an instruction per tile of y^T costs no more than one per bank


def project_out(b: DecodeBuffers, group: Group) -> None:
    """Add a group's part of y, with the expert's down bias if asked."""
    config = b.config
    buffer = group.item % config.weight_buffers
    by_channel = config.weights.down_scale == "channel"
    scales = []
    if by_channel:
        scales.append(b.kept_scale[group.ring] if keeps_scales(config) else b.down_scale[buffer])
    order = b.sums.order
    for place in range(len(order)):
        first, stop = bank_span(config, order[place])
        turn = _out_turn(config, group, place)
        bank_ps = b.banks.out_ps[turn % len(b.banks.out_ps)]
        _project_bank(b, bank_ps, group, first, stop)
        if group.is_last or not holds_expert(config):
            _add_bank(b, bank_ps, scales, first, stop, turn, place)
    if group.adds_bias and by_channel:
        # Biases are not scaled: they take a bank of their own to the sums.
        for number in order:
            first, stop = bank_span(config, number)
            for tile in range(first, stop):
                begin = (tile - first) * config.T
                _multiply_bias(b, b.banks.bias_ps, group, tile, begin, False)
            _add_bank(b, b.banks.bias_ps, [], first, stop, number, number)


def _project_bank(
    b: DecodeBuffers, bank_ps: nl.NkiTensor, group: Group, first: int, stop: int
) -> None:
    """Write or add the down projections of a group for tiles, or columns, first .. stop of H."""
    config = b.config
    continues = holds_expert(config) and not group.is_first
    if config.gives_rows:
        for k in range(group.size):
            _multiply_rows(b, bank_ps, group.item + k, first, stop, continues or k > 0)
        if group.adds_bias:
            _multiply_bias_rows(b, bank_ps, group, first, stop)
        return
    # Tile by tile: products of all items of the group add up in one place.
    for tile in range(first, stop):
        begin = (tile - first) * config.T
        for k in range(group.size):
            _multiply_out(b, bank_ps, group.item + k, tile, begin, continues or k > 0)
        if group.adds_bias and config.weights.down_scale != "channel":
            _multiply_bias(b, bank_ps, group, tile, begin, True)


def keep_scales(b: DecodeBuffers, buffer: int, ring: int) -> None:
    """Copy an expert's channel scales, if `keeps_scales`, before its buffer is loaded again."""
    if keeps_scales(b.config):
        rows = b.config.h_axis.rows
        nisa.tensor_copy(
            dst=b.kept_scale[ring][0:rows],
            src=b.down_scale[buffer][0:rows],
            engine=nisa.engine.scalar,
        )


def _out_turn(config: DecodeConfig, group: Group, place: int) -> int:
    """Return which of a ring of banks the bank at a place of their order takes."""
    banks = accumulator_banks(config)
    if not holds_expert(config):
        return group.item * banks + place
    # Two experts alternate where there is room: the products of one do not wait for the sums of
    # the other.
    return (group.ring * banks if 2 * banks <= out_banks(config) else 0) + place


def _multiply_out(
    b: DecodeBuffers, bank_ps: nl.NkiTensor, item: int, tile: int, begin: int, adds: bool
) -> None:
    """Multiply an item's inner activations with a tile of H of its down weights."""
    config = b.config
    h_axis, T = config.h_axis, config.T
    if is_mx(config):
        dst_ps = bank_ps[0 : rows_of(h_axis, tile), begin : begin + T]
        multiply_words_out(b, dst_ps, item, tile, adds)
        return
    weights_sb, inner_sb, first, end = _out_operands(b, item)
    rows, columns = rows_of(h_axis, tile), elements_of(h_axis, tile)
    if config.weights.layout == "packed":
        columns = slice(tile * h_axis.rows, tile * h_axis.rows + rows)
    for t in range(first, end):
        depth = inner_rows(config, t)
        nisa.nc_matmul(
            dst=bank_ps[0:rows, begin : begin + T],
            stationary=weights_sb[0:depth, t - first, columns],
            moving=inner_sb[0:depth, t, 0:T],
            accumulate=t > first or adds,
        )


def _out_operands(b: DecodeBuffers, item: int) -> tuple[nl.NkiTensor, nl.NkiTensor, int, int]:
    """Return down weights of an item [i, tiles, columns], inner activations, and which tiles."""
    config = b.config
    down_sb = b.down[item % config.weight_buffers]
    most = most_tiles(config.i_axis, config)
    weights_sb = down_sb.reshape_dim(1, (most, down_sb.shape[1] // most))
    first, end = tiles_of_part(config.i_axis, config, item % config.parts)
    return weights_sb, b.inner[item // config.parts % len(b.inner)], first, end


def _multiply_rows(
    b: DecodeBuffers, bank_ps: nl.NkiTensor, item: int, first: int, stop: int, adds: bool
) -> None:
    """Multiply an item's inner activations with columns first .. stop of its down weights.

    The tokens are stationary. Packed weights are read across their tiles, in the order of a row.
    """
    config = b.config
    h_axis, T = config.h_axis, config.T
    weights_sb, inner_sb, first_tile, end = _out_operands(b, item)
    for t in range(first_tile, end):
        depth = inner_rows(config, t)
        columns_sb = weights_sb[0:depth, t - first_tile]
        if config.weights.layout == "packed":
            # Stored tile by tile, where a tile has every count-th column of the row.
            tiles_sb = columns_sb.reshape_dim(1, (h_axis.count, h_axis.rows)).permute((0, 2, 1))
            columns_sb = tiles_sb[0:depth, first // h_axis.count : stop // h_axis.count]
        else:
            columns_sb = columns_sb[0:depth, first:stop]
        nisa.nc_matmul(
            dst=bank_ps[0:T, 0 : stop - first],
            stationary=inner_sb[0:depth, t, 0:T],
            moving=columns_sb,
            accumulate=t > first_tile or adds,
        )


def _multiply_bias_rows(
    b: DecodeBuffers, bank_ps: nl.NkiTensor, group: Group, first: int, stop: int
) -> None:
    """Add columns first .. stop of the down bias times the tokens' weights."""
    config = b.config
    end = min(stop, config.H)
    nisa.nc_matmul(
        dst=bank_ps[0 : config.T, 0 : end - first],
        stationary=b.column_row[group.ring][0:1],
        moving=b.down_bias[group.item % config.weight_buffers][0:1, first:end],
        accumulate=True,
    )


def _multiply_bias(
    b: DecodeBuffers, bank_ps: nl.NkiTensor, group: Group, tile: int, begin: int, accumulate: bool
) -> None:
    """Add, or write, the down bias of a tile of H times the tokens' weights."""
    config = b.config
    bias_sb, quadrants = b.down_bias[group.item % config.weight_buffers], bias_quadrants(config)
    row, columns = 0, elements_of(config.h_axis, tile)
    if quadrants > 1:
        count = config.h_axis.count // quadrants
        row, columns = tile // count * QUADRANT, slice(tile % count, bias_sb.shape[1], count)
    nisa.nc_matmul(
        dst=bank_ps[0 : rows_of(config.h_axis, tile), begin : begin + config.T],
        stationary=bias_sb[row : row + 1, columns],
        moving=b.column_row[group.ring][row : row + 1],
        accumulate=accumulate,
    )


def _add_bank(
    b: DecodeBuffers,
    bank_ps: nl.NkiTensor,
    scales: list[nl.NkiTensor],
    first: int,
    stop: int,
    turn: int,
    place: int,
) -> None:
    """Add tiles of y^T, or columns of y, to the sums in SBUF, scaled by channel if asked."""
    config = b.config
    if config.gives_rows:
        total_sb = b.sums.total_sb[0 : config.T, first:stop]
        scratch_sb = b.scratch[place // 3 % len(b.scratch)]
        part_ps = bank_ps[0 : config.T, 0 : stop - first]
        _add_part(total_sb, part_ps, scratch_sb, place % 3 == 2)
        return
    # An instruction has one height: shorter tiles at the end of H are added in another one.
    full = first
    while full < stop and rows_of(config.h_axis, full) == config.h_axis.rows:
        full += 1
    _add_tiles(b, bank_ps, scales, first, first, full, turn)
    _add_tiles(b, bank_ps, scales, first, full, stop, turn)


def _add_tiles(
    b: DecodeBuffers,
    bank_ps: nl.NkiTensor,
    scales: list[nl.NkiTensor],
    first: int,
    begin: int,
    end: int,
    turn: int,
) -> None:
    """Add tiles of one height; the bank holds those from `first` on."""
    if begin == end:
        return
    T, rows = b.config.T, rows_of(b.config.h_axis, end - 1)
    scratch_sb = b.scratch[turn % len(b.scratch)]
    if len(scales) == 0:
        total_sb = b.sums.total_sb[0:rows, begin:end, 0:T]
        part_ps = bank_ps[0:rows, (begin - first) * T : (end - first) * T]
        _add_part(total_sb, part_ps, scratch_sb, turn % 3 == 1)
        return
    alone = begin
    if T >= _TILEWISE_TOKENS:
        # Vector does 3 tiles in 8 alone, Scalar scales the others.
        alone = begin + 3 * end // 8 - 3 * begin // 8
        for c in range(begin, end):
            part_ps = bank_ps[0:rows, (c - first) * T : (c - first + 1) * T]
            scale_sb = scales[0][0:rows, c, 0:1]
            if c < alone:
                _add_scaled(b.sums.total_sb[0:rows, c, 0:T], part_ps, scale_sb)
            else:
                to_sb = scratch_sb[0:rows, (c - alone) * T : (c - alone + 1) * T]
                nisa.activation(dst=to_sb, op=nl.copy, data=part_ps, scale=scale_sb)
        if alone == end:
            return
    # GpSimd reads no PSUM: what it adds is scaled into SBUF first.
    total_sb = b.sums.total_sb[0:rows, alone:end, 0:T]
    part_ps = bank_ps[0:rows, (alone - first) * T : (end - first) * T]
    part_sb = scratch_sb[0:rows, 0 : (end - alone) * T]
    if T < _TILEWISE_TOKENS:
        scale_sb = scales[0][0:rows, alone:end, 0:1].broadcast(2, T)
        nisa.tensor_tensor(dst=part_sb, data1=part_ps, data2=scale_sb, op=nl.multiply)
    nisa.tensor_tensor(
        dst=total_sb, data1=total_sb, data2=part_sb, op=nl.add, engine=nisa.engine.gpsimd
    )


def _add_part(
    total_sb: nl.NkiTensor, part_ps: nl.NkiTensor, scratch_sb: nl.NkiTensor, by_gpsimd: bool
) -> None:
    """Add a bank to the sums in SBUF.

    The Vector engine adds two of three itself; of the third, Scalar empties PSUM and GpSimd adds.
    """
    if not by_gpsimd:
        nisa.tensor_tensor(dst=total_sb, data1=part_ps, data2=total_sb, op=nl.add)
        return
    rows, size = part_ps.shape
    part_sb = scratch_sb[0:rows, 0:size]
    nisa.tensor_copy(dst=part_sb, src=part_ps, engine=nisa.engine.scalar)
    nisa.tensor_tensor(
        dst=total_sb, data1=total_sb, data2=part_sb, op=nl.add, engine=nisa.engine.gpsimd
    )


def _add_scaled(total_sb: nl.NkiTensor, part_ps: nl.NkiTensor, scale_sb: nl.NkiTensor) -> None:
    """Add a tile of y^T times the scales of its channels to the sums."""
    apply_with(total_sb, part_ps, nl.multiply, scale_sb, nl.add, total_sb)
