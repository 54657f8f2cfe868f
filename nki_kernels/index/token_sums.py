"""Which token each place holds: an inverse by matmuls of one-hots, some tiles after the others.

As slot_inverse.py, but that two columns share a float32 sum where a token's number is one term:
those of the right half count _APART times as much, and both are told apart afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.integers import count_up
from nki_kernels.common.token_tiles import TokenTiles
from nki_kernels.common.visits import RowRun, num_rows
from nki_kernels.index.slot_inverse import (
    SPAN,
    add_pairs,
    add_values,
    columns_of_terms,
    num_digits,
    split_digits,
)

# Three spans: a left value is a third of it at most, so that rounding tells the right one; exact in
# bfloat16, and its product with a span plus one more span stays below 2^24.
_APART = 3 * SPAN
# One-hots of rows that engines make in turn: GpSimd, then the Scalar, then the Vector engine.
_GPSIMD_TURNS, _SCALAR_TURNS, _TURNS = 3, 2, 8


@dataclass
class TokenValues(nl.NKIObject):
    """Numbers of tokens as sums take them, [128, tokens] float32 each."""

    terms: list[nl.ndarray]  # which add up to the number
    # Of sums that are shared, one of each: sign and size of the number, and minus its size.
    signs: list[nl.ndarray]
    sizes: list[nl.ndarray]
    minus_sizes: list[nl.ndarray]


@dataclass
class TokenSums(nl.NKIObject):
    """Sums over pairs that some have been added to; two columns share one, or none does."""

    sums_ps: nl.ndarray  # [R, columns] float32
    line_sb: nl.ndarray  # [128, R] float16, the row that each column stands for
    numbers_sb: nl.ndarray  # [128, columns] float16, 0, 1, ...
    values: TokenValues  # of this core's tokens, as they lie on the partitions


def start_tokens(
    tokens: TokenTiles, runs: list[RowRun], width: int, is_backwards: bool
) -> TokenSums:
    """Return sums to which nothing has been added.

    Args:
        tokens: of this core.
        runs: numbers of the R rows, of `row_runs`.
        width: columns of the inverse, at most GROUP.
        is_backwards: number n stands for number R - 1 - n.
    """
    rows, tiles = num_rows(runs), max(1, tokens.count)
    number_sb = nl.ndarray((PARTITIONS, tiles), nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=number_sb, pattern=[[1, tiles]], offset=1, channel_multiplier=tiles)
    values = value_tokens(number_sb, tokens.rows)
    columns = _half(width) if len(values.terms) == 1 else width
    line_sb = nl.ndarray((PARTITIONS, rows), nl.float16, buffer=nl.sbuf)
    step = -1 if is_backwards else 1
    for run in runs:
        offset = rows - 1 - run.number if is_backwards else run.number
        line = line_sb[:, run.first : run.first + run.count]
        nisa.iota(dst=line, pattern=[[step, run.count]], offset=offset, channel_multiplier=0)
    sums_ps = nl.ndarray((rows, columns), nl.float32, buffer=nl.psum)
    numbers_sb = count_up(columns, nl.float16)
    return TokenSums(sums_ps, line_sb, numbers_sb, values)


def value_tokens(number_sb: nl.ndarray, rows: int) -> TokenValues:
    """Return numbers of tokens as sums take them: of one term if there are up to 4,096, which are
    told from none by leaving zero out.

    Args:
        number_sb: [128, tokens], 1 and up, counted from the core's first token.
        rows: tokens of this core.
    """
    if num_token_terms(rows) > 1:
        return TokenValues(split_digits(number_sb, num_token_terms(rows)), [], [], [])
    value_sb = _leave_out_zero(number_sb)
    sign_sb = nl.ndarray(value_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=sign_sb, op=nl.sign, data=value_sb)
    size_sb = nl.ndarray(value_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=size_sb, data=value_sb, op0=nl.abs, operand0=0.0)
    minus_sb = nl.ndarray(value_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=minus_sb, data=size_sb, op0=nl.multiply, operand0=-1.0)
    return TokenValues([value_sb], [sign_sb], [size_sb], [minus_sb])


def add_tokens(
    sums: TokenSums,
    row_sb: nl.ndarray,
    column_sb: nl.ndarray,
    tiles: slice,
    values: TokenValues,
    accumulate: bool,
) -> None:
    """Add the pairs of some tokens.

    Args:
        sums: to add to.
        row_sb: [128, pairs] float32, rows of these pairs.
        column_sb: likewise, columns; what is none of the columns has no pair.
        tiles: columns of the values, which as many of the pairs have each.
        values: numbers of tokens.
        accumulate: False for those that come first, and start the sums.
    """
    if len(values.terms) == 1:
        _add_shared(sums, row_sb, column_sb, tiles, values, accumulate)
        return
    shared = row_sb.shape[1] // (tiles.stop - tiles.start)
    for pair in range(row_sb.shape[1]):
        places = (row_sb[:, pair : pair + 1], column_sb[:, pair : pair + 1])
        terms = columns_of_terms(values.terms, tiles.start + pair // shared)
        numbers = (sums.line_sb, sums.numbers_sb)
        add_values(sums.sums_ps, terms, nl.float16, places, numbers, accumulate or pair > 0)


def tell_tokens(sums: TokenSums, tokens: TokenTiles, width: int) -> nl.ndarray:
    """Return 1 plus the token at each place, 0 for none; [R, W + 1] float32, the last one 0."""
    rows = sums.sums_ps.shape[0]
    own_sb = nl.ndarray((rows, width + 1), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=own_sb[:, width : width + 1], value=0.0, engine=nisa.engine.gpsimd)
    told = own_sb[:, 0:width]
    is_signed = len(sums.values.terms) == 1
    if is_signed:
        _tell_apart(told, sums.sums_ps)
    else:
        nisa.tensor_copy(dst=told, src=sums.sums_ps)
    _count_from(told, float(tokens.first), is_signed)
    return own_sb


def num_token_terms(rows: int) -> int:
    """Return the matmuls of a pair for `rows` tokens of a core."""
    if rows <= 2 * SPAN:
        return 1
    return num_digits(rows)


def token_columns(rows: int, width: int) -> int:
    """Return the columns of the matmuls of a pair for `rows` tokens of a core.

    Args:
        rows: tokens of the core.
        width: columns of the inverse.
    """
    terms = num_token_terms(rows)
    return terms * width if terms > 1 else _half(width)


def _half(width: int) -> int:
    """Return the columns of sums that two slots share."""
    return (width + 1) // 2


def _leave_out_zero(numbers_sb: nl.ndarray) -> nl.ndarray:
    """Return 1 to 4096 as -2048 to -1 and 1 to 2048, float32."""
    upper_sb = nl.ndarray(numbers_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=upper_sb, data=numbers_sb, op0=nl.greater, operand0=float(SPAN), op1=nl.add,
        operand1=-float(SPAN + 1),
    )  # fmt: skip
    signed_sb = nl.ndarray(numbers_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=signed_sb, data1=numbers_sb, data2=upper_sb, op=nl.add)
    return signed_sb


def _count_from(own_sb: nl.ndarray, first: float, is_signed: bool) -> None:
    """Add the core's first token to its tokens' numbers, undoing `_leave_out_zero`; 0 stays."""
    shift_sb = nl.ndarray(own_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=shift_sb, data=own_sb, op0=nl.not_equal, operand0=0.0, op1=nl.multiply,
        operand1=first + (SPAN if is_signed else 0),
    )  # fmt: skip
    if is_signed:
        nisa.scalar_tensor_tensor(
            dst=shift_sb, data=own_sb, op0=nl.less, operand0=0.0, op1=nl.add, operand1=shift_sb
        )
    nisa.tensor_tensor(dst=own_sb, data1=own_sb, data2=shift_sb, op=nl.add)


def _add_shared(
    sums: TokenSums,
    row_sb: nl.ndarray,
    column_sb: nl.ndarray,
    tiles: slice,
    values: TokenValues,
    accumulate: bool,
) -> None:
    """Add pairs to sums that two columns share."""
    half, top_k = sums.sums_ps.shape[1], row_sb.shape[1] // (tiles.stop - tiles.start)
    here_sb, factor_sb = _share_columns(column_sb, half, values.signs[0][:, tiles])
    for tile in range(tiles.start, tiles.stop):
        first = (tile - tiles.start) * top_k
        marked = _mark_rows(sums, row_sb[:, first : first + top_k], values, tile)
        for choice in range(top_k):
            column = slice(first + choice, first + choice + 1)
            moving = nl.ndarray((PARTITIONS, half), nl.bfloat16, buffer=nl.sbuf)
            nisa.tensor_scalar(
                dst=moving, data=sums.numbers_sb, op0=nl.equal, operand0=here_sb[:, column],
                op1=nl.multiply, operand1=factor_sb[:, column],
            )  # fmt: skip
            add_pairs(sums.sums_ps, marked[choice], moving, accumulate or first + choice > 0)


def _share_columns(
    column_sb: nl.ndarray, half: int, sign_sb: nl.ndarray
) -> tuple[nl.ndarray, nl.ndarray]:
    """Return the sum that each pair belongs to, and its sign and weight there."""
    here_sb = nl.ndarray(column_sb.shape, nl.float32, buffer=nl.sbuf)
    is_right_sb = nl.ndarray(here_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=is_right_sb, data=column_sb, op0=nl.greater_equal, operand0=float(half))
    nisa.scalar_tensor_tensor(
        dst=here_sb, data=is_right_sb, op0=nl.multiply, operand0=-float(half), op1=nl.add,
        operand1=column_sb,
    )  # fmt: skip
    weight_sb = nl.ndarray(here_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=weight_sb, data=is_right_sb, op0=nl.multiply, operand0=float(_APART - 1), op1=nl.add,
        operand1=1.0,
    )  # fmt: skip
    count = sign_sb.shape[1]
    factor_sb = nl.ndarray(here_sb.shape, nl.float32, buffer=nl.sbuf)
    shape = (count, here_sb.shape[1] // count)
    nisa.tensor_tensor(
        dst=factor_sb.reshape_dim(1, shape), data1=weight_sb.reshape_dim(1, shape),
        data2=sign_sb.expand_dim(2).broadcast(2, shape[1]), op=nl.multiply,
    )  # fmt: skip
    return here_sb, factor_sb


def _mark_rows(
    sums: TokenSums, row_sb: nl.ndarray, values: TokenValues, tile: int
) -> list[nl.ndarray]:
    """Return the sizes of the pairs of a tile, each at its row, [128, R] for each choice."""
    marked: list[nl.ndarray] = []
    top_k = row_sb.shape[1]
    while len(marked) < top_k:
        choice = len(marked)
        turn = (tile * top_k + choice) % _TURNS
        if turn < _GPSIMD_TURNS:
            count = min(_GPSIMD_TURNS - turn, top_k - choice)
            several_sb = _mark_several(sums, row_sb[:, choice : choice + count], values, tile)
            for number in range(count):
                marked.append(several_sb[:, number, :])
        elif turn < _GPSIMD_TURNS + _SCALAR_TURNS:
            marked.append(_mark_by_distance(sums, row_sb[:, choice : choice + 1], values, tile))
        else:
            marked_sb = nl.ndarray(sums.line_sb.shape, nl.float16, buffer=nl.sbuf)
            nisa.tensor_scalar(
                dst=marked_sb, data=sums.line_sb, op0=nl.equal,
                operand0=row_sb[:, choice : choice + 1], op1=nl.multiply,
                operand1=values.sizes[0][:, tile : tile + 1],
            )  # fmt: skip
            marked.append(marked_sb)
    return marked


def _mark_several(
    sums: TokenSums, row_sb: nl.ndarray, values: TokenValues, tile: int
) -> nl.ndarray:
    """Return what `_mark_rows` does of some choices, [128, choices, R], by GpSimd, which compares
    two tiles and nothing else; the Scalar engine multiplies.
    """
    rows, count = sums.line_sb.shape[1], row_sb.shape[1]
    equal_sb = nl.ndarray((PARTITIONS, count, rows), nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=equal_sb, data1=sums.line_sb.expand_dim(1).broadcast(1, count),
        data2=row_sb.expand_dim(2).broadcast(2, rows), op=nl.equal, engine=nisa.engine.gpsimd,
    )  # fmt: skip
    marked_sb = nl.ndarray(equal_sb.shape, nl.float16, buffer=nl.sbuf)
    nisa.activation(
        dst=marked_sb, op=nl.copy, data=equal_sb, scale=values.sizes[0][:, tile : tile + 1]
    )
    return marked_sb


def _mark_by_distance(
    sums: TokenSums, row: nl.ndarray, values: TokenValues, tile: int
) -> nl.ndarray:
    """Return what `_mark_rows` does of one choice, by the Scalar engine, which compares nothing:
    size - size * distance^2 is above 0 at no distance alone.
    """
    size, minus_size = values.sizes[0], values.minus_sizes[0]
    distance_sb = nl.ndarray(sums.line_sb.shape, nl.bfloat16, buffer=nl.sbuf)
    nisa.activation(dst=distance_sb, op=nl.square, data=sums.line_sb, bias=row, scale=-1.0)
    marked_sb = nl.ndarray(sums.line_sb.shape, nl.float16, buffer=nl.sbuf)
    nisa.activation(
        dst=marked_sb, op=nl.relu, data=distance_sb, scale=minus_size[:, tile : tile + 1],
        bias=size[:, tile : tile + 1],
    )  # fmt: skip
    return marked_sb


def _tell_apart(own_sb: nl.ndarray, shared_ps: nl.ndarray) -> None:
    """Write the left and the right values, [rows, width], of sums that two columns share."""
    width, half = own_sb.shape[1], shared_ps.shape[1]
    right_sb = nl.ndarray(shared_ps.shape, nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=right_sb, data=shared_ps, op0=nl.multiply, operand0=1.0 / _APART)
    nisa.scalar_tensor_tensor(
        dst=own_sb[:, 0:half], data=right_sb, op0=nl.multiply, operand0=-float(_APART), op1=nl.add,
        operand1=shared_ps,
    )  # fmt: skip
    if half < width:
        nisa.tensor_copy(dst=own_sb[:, half:width], src=right_sb[:, 0 : width - half])
