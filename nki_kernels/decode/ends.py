"""Prologue and epilogue of a decode kernel: tokens onto the contraction axis, y^T back into rows.

A few tokens move as they are, [h, T, H/h] being long runs of a row on each partition; more of them
pass the tensor engine. At the end every core finishes half of the tokens: the cores exchange the
other halves of their partial sums. Sums that are rows have an epilogue of their own (row_ends.py).
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.chip import BANK_FLOATS, PARTITIONS
from nki_kernels.common.memory import allocate, allocate_rows
from nki_kernels.common.rank_sums import sum_on_chip
from nki_kernels.common.tiles import copy_alternating, swap_with_other, transpose_rows
from nki_kernels.decode.buffers import SumBuffers
from nki_kernels.decode.config import (
    DecodeConfig,
    is_direct_in,
    is_direct_out,
)
from nki_kernels.decode.memory import ends_table, token_table
from nki_kernels.decode.row_ends import Epilogue, finish_rows

_TRANSPOSED_TILES = BANK_FLOATS // PARTITIONS  # of y^T, in a PSUM bank


def load_tokens(config: DecodeConfig, hidden: nl.NkiTensor) -> list[nl.NkiTensor]:
    """Load [T, H] tokens from HBM, in tiles of at most 128; a few directly as [h, T, H/h]."""
    if is_direct_in(config):
        spread_sb = allocate(token_table(config).transposed)[0]
        _load_directly(config, spread_sb, hidden, 0)
        return [spread_sb]
    tiles = []
    for first in range(0, config.T, PARTITIONS):
        size = min(PARTITIONS, config.T - first)
        rows_sb = allocate_rows(ends_table(config).loaded, size)
        nisa.dma_copy(
            dst=rows_sb,
            src=hidden[first : first + size, 0 : config.H],
            dge_mode=nisa.dge_mode.none,
        )
        tiles.append(rows_sb)
    return tiles


def transpose_tokens(sums: SumBuffers, row_tiles: list[nl.NkiTensor]) -> nl.NkiTensor:
    """Return x^T as a [h, H/h, T] view of what `load_tokens` gives."""
    config = sums.config
    h_axis = config.h_axis
    # Loaded as [h, T, H/h]: x^T but for the order of the axes, which matmuls read with a stride.
    if is_direct_in(config):
        return row_tiles[0].permute((0, 2, 1))
    transposed_sb = allocate(token_table(config).transposed)[0]
    banks = []
    # The last bank is left to the routing, which goes on at the same time.
    for bank_ps in sums.work_ps[0 : len(sums.work_ps) - 1]:
        banks.append(bank_ps.view(row_tiles[0].dtype))
    first = 0
    for rows_sb in row_tiles:
        size = rows_sb.shape[0]
        part_sb = transposed_sb[0 : h_axis.rows, 0 : h_axis.count, first : first + size]
        transpose_rows(part_sb, rows_sb, h_axis, banks, size)
        first = first + size
    return transposed_sb


def _load_directly(
    config: DecodeConfig, spread_sb: nl.NkiTensor, rows: nl.NkiTensor, first: int
) -> None:
    """Load tokens of [T, H] rows in HBM as [h, tokens, H/h], a run of each per partition."""
    axis, tokens = config.h_axis, spread_sb.shape[1]
    full, rest = axis.size // axis.count, axis.size % axis.count
    nisa.dma_copy(
        dst=spread_sb[0:full],
        src=rows.ap(
            [[axis.count, full], [config.H, tokens], [1, axis.count]], offset=first * config.H
        ),
        dge_mode=nisa.dge_mode.none,
    )
    if rest > 0:
        nisa.dma_copy(
            dst=spread_sb[full : full + 1, 0:tokens, 0:rest],
            src=rows.ap(
                [[axis.count, 1], [config.H, tokens], [1, rest]],
                offset=first * config.H + full * axis.count,
            ),
            dge_mode=nisa.dge_mode.none,
        )


def finish(sums: SumBuffers, epilogue: Epilogue) -> None:
    """Add the cores' partial sums and the residual, round once, add up the ranks' on chip, store.

    Args:
        sums: this core's y^T.
        epilogue: what is added, and where it is stored.
    """
    config = sums.config
    if config.gives_rows:
        finish_rows(sums, epilogue)
        return
    T, size, first, skipped = config.T, config.T, 0, 0
    if config.num_cores > 1:
        size = (T + 1) // 2
        first = sums.core * (T - size)
        # Of an odd number the token in the middle is on both cores; core 0 stores it.
        skipped = sums.core * (2 * size - T)
    if not is_direct_out(config, size):
        _store_rows(sums, epilogue, size, first, skipped)
        return
    part_sb = sums.total_sb
    if config.num_cores > 1:
        part_sb = _add_other_half(sums, size, len(epilogue.residuals) > 0)
    if size > skipped or epilogue.ranks.collective == "all_reduce":  # which both cores join
        _store_directly(config, part_sb, epilogue, first, skipped)


def _add_other_half(sums: SumBuffers, size: int, has_residual: bool) -> nl.NkiTensor:
    """Exchange halves of y^T, `size` tokens each way; return the sum of one's own, [h, H/h, size].

    Where nothing is to be added any more, it is rounded, and in the order of the rows.
    """
    config = sums.config
    apart_sb = allocate(ends_table(config).received)[0]
    own_sb, received_sb = _exchange(sums, apart_sb, size, (0, config.h_axis.count))
    part_sb = own_sb
    if not has_residual:
        part_sb = allocate(ends_table(config).stored)[0].permute((0, 2, 1))
    nisa.tensor_tensor(dst=part_sb, data1=own_sb, data2=received_sb, op=nl.add)
    return part_sb


def _exchange(
    sums: SumBuffers, apart_sb: nl.NkiTensor, size: int, piece: tuple[int, int]
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Exchange some tiles of y^T, `size` tokens each way; return one's own and the other's sums.

    Args:
        sums: this core's y^T.
        apart_sb: [h, H/h, T] for what comes. Both sides of an exchange have the same layout, with
            the same gaps.
        size: tokens.
        piece: first tile and the one after the last.
    """
    config = sums.config
    rows, count, T = config.h_axis.rows, config.h_axis.count, config.T
    low, high = piece
    first, theirs = sums.core * (T - size), (1 - sums.core) * (T - size)
    received_sb = apart_sb[0:rows, low:high, 0:size]
    sent_sb = sums.total_sb[0:rows, low:high, theirs : theirs + size]
    swap_with_other(sent_sb, received_sb, sums.core, count * size * 4)
    return sums.total_sb[0:rows, low:high, first : first + size], received_sb


def _store_directly(
    config: DecodeConfig,
    part_sb: nl.NkiTensor,
    epilogue: Epilogue,
    first: int,
    skipped: int,
) -> None:
    """Add up ranks and store a few tokens of y^T: on each partition a run of every token's row.

    What two cores added without a residual is rounded and in the order of the rows already.
    """
    rows, count, size = part_sb.shape
    spread_sb = part_sb.permute((0, 2, 1))
    # `_add_other_half` rounded them where it could.
    is_ready = config.num_cores > 1 and len(epilogue.residuals) == 0
    if not is_ready:
        stored = ends_table(config).stored
        rounded_sb = allocate(stored)[0]
        if len(epilogue.residuals) == 0:
            nisa.tensor_copy(dst=rounded_sb, src=spread_sb)
        else:
            residual_sb = nl.ndarray(
                stored.shape, dtype=epilogue.residuals[0].dtype, buffer=nl.sbuf
            )
            # Nothing is loaded past H, but the sum reads it.
            if config.h_axis.size < rows * count:
                nisa.memset(dst=residual_sb, value=0.0)
            _load_directly(config, residual_sb, epilogue.residuals[0], first)
            nisa.tensor_tensor(dst=rounded_sb, data1=spread_sb, data2=residual_sb, op=nl.add)
        spread_sb = rounded_sb
    spread_sb = sum_on_chip(epilogue.ranks, spread_sb)
    if size == skipped:
        return
    axis, offset = config.h_axis, (first + skipped) * config.H
    full, rest = axis.size // axis.count, axis.size % axis.count
    nisa.dma_copy(
        dst=epilogue.output.ap(
            [[count, full], [config.H, size - skipped], [1, count]], offset=offset
        ),
        src=spread_sb[0:full, skipped:size, 0:count],
        dge_mode=nisa.dge_mode.none,
    )
    if rest > 0:  # token by token: no public kernel stores from SBUF with gaps
        begin = full * count
        for token in range(skipped, size):
            nisa.dma_copy(
                dst=epilogue.output[first + token : first + token + 1, begin : begin + rest],
                src=spread_sb[full : full + 1, token, 0:rest],
                dge_mode=nisa.dge_mode.none,
            )


def _store_rows(sums: SumBuffers, epilogue: Epilogue, size: int, first: int, skipped: int) -> None:
    """Transpose y^T into rows on the tensor engine, 128 tokens at a time; add up ranks; store.

    Half of the tiles of the axis are added up and transposed while the others are exchanged. Rows
    on chip are as wide as the tiles of the axis together; what is past H is not stored.
    """
    config = sums.config
    H, count = config.H, config.h_axis.count
    half = min(count, -(-count // (2 * _TRANSPOSED_TILES)) * _TRANSPOSED_TILES)
    pieces = [(0, half)]
    if half < count:
        pieces.append((half, count))
    apart = []
    if config.num_cores > 1:
        apart = allocate(ends_table(config).received)
    for begin in range(0, size, PARTITIONS):
        tokens = min(PARTITIONS, size - begin)
        low = max(0, skipped - begin)
        rows_sb = allocate_rows(ends_table(config).stored, tokens)
        width = rows_sb.shape[1]
        residual_tiles = []
        for residual in epilogue.residuals:
            residual_sb = nl.ndarray((tokens, width), dtype=residual.dtype, buffer=nl.sbuf)
            where = slice(first + begin, first + begin + tokens)
            if H < width:
                nisa.memset(dst=residual_sb[0:tokens, H:width], value=0.0)
            nisa.dma_copy(dst=residual_sb[0:tokens, 0:H], src=residual[where, 0:H])
            residual_tiles.append(residual_sb)
        for piece in pieces:
            for apart_sb in apart:  # all tokens of one of two cores are in one tile
                _add_piece(sums, apart_sb, size, piece)
            if low < tokens:
                part_sb = sums.total_sb[
                    0 : config.h_axis.rows, 0:count, first + begin : first + begin + tokens
                ]
                _transpose_sums(sums, rows_sb, part_sb, residual_tiles, piece[0], piece[1])
        if low == tokens and epilogue.ranks.collective == "all_reduce":
            nisa.memset(dst=rows_sb, value=0.0)  # both cores join a sum
        rows_sb = sum_on_chip(epilogue.ranks, rows_sb[0:tokens, 0:H])
        if low < tokens:
            where = slice(first + begin + low, first + begin + tokens)
            for columns in (slice(0, H // 2), slice(H // 2, H)):
                nisa.dma_copy(
                    dst=epilogue.output[where, columns],
                    src=rows_sb[low:tokens, columns],
                    dge_mode=nisa.dge_mode.none,
                )


def _add_piece(sums: SumBuffers, apart_sb: nl.NkiTensor, size: int, piece: tuple[int, int]) -> None:
    """Exchange some tiles of y^T and add them up, on two engines in turn; see `_exchange`."""
    own_sb, received_sb = _exchange(sums, apart_sb, size, piece)
    rows, count = own_sb.shape[0], own_sb.shape[1]
    engines = (nisa.engine.vector, nisa.engine.gpsimd)
    for tile in range(0, count, _TRANSPOSED_TILES):
        end = min(count, tile + _TRANSPOSED_TILES)
        sum_sb = own_sb[0:rows, tile:end, 0:size]
        nisa.tensor_tensor(
            dst=sum_sb,
            data1=sum_sb,
            data2=received_sb[0:rows, tile:end, 0:size],
            op=nl.add,
            engine=engines[tile // _TRANSPOSED_TILES % 2],
        )


def _transpose_sums(
    sums: SumBuffers,
    rows_sb: nl.NkiTensor,
    part_sb: nl.NkiTensor,
    residual_tiles: list[nl.NkiTensor],
    low: int,
    high: int,
) -> None:
    """Transpose tiles low .. high of some tokens' y^T into columns of rows [tokens, width], a PSUM
    bank of tiles per eviction.
    """
    axis, tokens, width = sums.config.h_axis, rows_sb.shape[0], rows_sb.shape[1]
    rows, count = axis.rows, axis.count
    tiles = _TRANSPOSED_TILES
    for tile in range(low, high, tiles):
        number = min(tiles, high - tile)
        bank_ps = sums.work_ps[tile // tiles % len(sums.work_ps)]
        for k in range(number):
            nisa.nc_transpose(
                dst=bank_ps[0:tokens, k * PARTITIONS : k * PARTITIONS + rows],
                data=part_sb[0:rows, tile + k, 0:tokens],
                engine=nisa.engine.tensor,
            )
        # Both sides in the order of the rows on chip, where tiles of the axis may alternate.
        source = [[BANK_FLOATS, tokens], [PARTITIONS, number], [1, rows]]
        target = [[width, tokens], [rows, number], [1, rows]]
        offset = tile * rows
        if axis.is_strided or axis.group > 1:
            source = [[BANK_FLOATS, tokens], [1, rows], [PARTITIONS, number]]
            target = [
                [width, tokens],
                [count if axis.is_strided else axis.group, rows],
                [1, number],
            ]
            offset = tile if axis.is_strided else tile * rows
        to_sb, transposed_ps = rows_sb.ap(target, offset=offset), bank_ps.ap(source)
        if len(residual_tiles) == 0:
            copy_alternating(to_sb, transposed_ps, tile // tiles)
        for residual_sb in residual_tiles:
            added_sb = residual_sb.ap(target, offset=offset)
            nisa.tensor_tensor(dst=to_sb, data1=transposed_ps, data2=added_sb, op=nl.add)
