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
_SCALAR_TURNS, _TURNS = 3, 8  # one-hots of rows that the Scalar engine makes, of so many


@dataclass
class TokenSums(nl.NKIObject):
    """Sums over pairs that some have been added to; two columns share one, or none does."""

    sums_ps: nl.ndarray  # [R, columns] float32
    terms: list[nl.ndarray]  # [128, tiles] float32, which add up to the number of a token
    line_sb: nl.ndarray  # [128, R] float16, the row that each column stands for
    numbers_sb: nl.ndarray  # [128, columns] float16, 0, 1, ...


@dataclass
class _Rows(nl.NKIObject):
    """What one-hots of rows are made of, float32 but for the first."""

    line_sb: nl.ndarray  # [128, R] float16
    row_sb: nl.ndarray  # [128, pairs]
    minus_row_sb: nl.ndarray
    size_sb: nl.ndarray  # [128, tiles], above 0
    minus_size_sb: nl.ndarray


def start_tokens(tokens: TokenTiles, rows: int, width: int, is_backwards: bool) -> TokenSums:
    """Return sums to which nothing has been added.

    Counted from the core's first, a token needs one term if there are up to 4,096 of them, which
    are told from none by leaving zero out.

    Args:
        tokens: of this core.
        rows: R.
        width: columns of the inverse, at most GROUP.
        is_backwards: row n stands for row R - 1 - n.
    """
    count = max(1, tokens.count)
    number_sb = nl.ndarray((PARTITIONS, count), nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=number_sb, pattern=[[1, count]], offset=1, channel_multiplier=count)
    if num_token_terms(tokens.rows) == 1:
        terms, columns = [_leave_out_zero(number_sb)], _half(width)
    else:
        terms, columns = split_digits(number_sb, num_token_terms(tokens.rows)), width
    line_sb = nl.ndarray((PARTITIONS, rows), nl.float16, buffer=nl.sbuf)
    step = -1 if is_backwards else 1
    first = rows - 1 if is_backwards else 0
    nisa.iota(dst=line_sb, pattern=[[step, rows]], offset=first, channel_multiplier=0)
    sums_ps = nl.ndarray((rows, columns), nl.float32, buffer=nl.psum)
    return TokenSums(sums_ps, terms, line_sb, count_up(columns, nl.float16))


def add_tokens(sums: TokenSums, row_sb: nl.ndarray, column_sb: nl.ndarray, tiles: slice) -> None:
    """Add the pairs of some tiles of tokens; those of tile 0 come first, and start the sums.

    Args:
        sums: to add to.
        row_sb: [128, pairs] float32, rows of these pairs.
        column_sb: likewise, columns; what is none of the columns has no pair.
        tiles: of the pairs.
    """
    count = tiles.stop - tiles.start
    shared = row_sb.shape[1] // count
    if len(sums.terms) == 1:
        _add_shared(sums, row_sb, column_sb, tiles)
        return
    for pair in range(row_sb.shape[1]):
        places = (row_sb[:, pair : pair + 1], column_sb[:, pair : pair + 1])
        values = columns_of_terms(sums.terms, tiles.start + pair // shared)
        accumulate = tiles.start + pair > 0
        numbers = (sums.line_sb, sums.numbers_sb)
        add_values(sums.sums_ps, values, nl.float16, places, numbers, accumulate)


def tell_tokens(sums: TokenSums, tokens: TokenTiles, width: int) -> nl.ndarray:
    """Return 1 plus the token at each place, 0 for none; [R, W + 1] float32, the last one 0."""
    rows = sums.sums_ps.shape[0]
    own_sb = nl.ndarray((rows, width + 1), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=own_sb[:, width : width + 1], value=0.0, engine=nisa.engine.gpsimd)
    told = own_sb[:, 0:width]
    is_signed = len(sums.terms) == 1
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


def _add_shared(sums: TokenSums, row_sb: nl.ndarray, column_sb: nl.ndarray, tiles: slice) -> None:
    """Add pairs to sums that two columns share."""
    value, half = sums.terms[0][:, tiles], sums.sums_ps.shape[1]
    shared = row_sb.shape[1] // value.shape[1]
    here_sb, factor_sb = _share_columns(column_sb, half, value)
    size_sb = nl.ndarray(value.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=size_sb, data=value, op0=nl.abs, operand0=0.0)
    rows = _Rows(sums.line_sb, row_sb, _minus(row_sb), size_sb, _minus(size_sb))
    for pair in range(row_sb.shape[1]):
        moving = nl.ndarray((PARTITIONS, half), nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=moving, data=sums.numbers_sb, op0=nl.equal, operand0=here_sb[:, pair : pair + 1],
            op1=nl.multiply, operand1=factor_sb[:, pair : pair + 1],
        )  # fmt: skip
        stationary = _mark_rows(rows, pair, pair // shared)
        add_pairs(sums.sums_ps, stationary, moving, tiles.start + pair > 0)


def _share_columns(
    column_sb: nl.ndarray, half: int, value_sb: nl.ndarray
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
    count = value_sb.shape[1]
    sign_sb = nl.ndarray(value_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=sign_sb, op=nl.sign, data=value_sb)
    factor_sb = nl.ndarray(here_sb.shape, nl.float32, buffer=nl.sbuf)
    shape = (count, here_sb.shape[1] // count)
    nisa.tensor_tensor(
        dst=factor_sb.reshape_dim(1, shape), data1=weight_sb.reshape_dim(1, shape),
        data2=sign_sb.expand_dim(2).broadcast(2, shape[1]), op=nl.multiply,
    )  # fmt: skip
    return here_sb, factor_sb


def _minus(data_sb: nl.ndarray) -> nl.ndarray:
    """Return -data, float32."""
    minus_sb = nl.ndarray(data_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=minus_sb, data=data_sb, op0=nl.multiply, operand0=-1.0)
    return minus_sb


def _mark_rows(rows: _Rows, pair: int, tile: int) -> nl.ndarray:
    """Return the sizes of 128 pairs, each at its row, [128, R]; both engines take turns."""
    stationary = nl.ndarray(rows.line_sb.shape, nl.float16, buffer=nl.sbuf)
    if pair % _TURNS >= _SCALAR_TURNS:
        nisa.tensor_scalar(
            dst=stationary, data=rows.line_sb, op0=nl.equal,
            operand0=rows.row_sb[:, pair : pair + 1], op1=nl.multiply,
            operand1=rows.size_sb[:, tile : tile + 1],
        )  # fmt: skip
        return stationary
    # The Scalar engine compares nothing: size - size * distance^2 is above 0 at no distance alone.
    distance_sb = nl.ndarray(rows.line_sb.shape, nl.bfloat16, buffer=nl.sbuf)
    nisa.activation(
        dst=distance_sb, op=nl.square, data=rows.line_sb,
        bias=rows.minus_row_sb[:, pair : pair + 1],
    )  # fmt: skip
    nisa.activation(
        dst=stationary, op=nl.relu, data=distance_sb, scale=rows.minus_size_sb[:, tile : tile + 1],
        bias=rows.size_sb[:, tile : tile + 1],
    )  # fmt: skip
    return stationary


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
