"""Which pair each slot holds: the inverse of the slots of pairs, by matmuls of one-hots.

Slot s goes to row s // F, column s % F of a [128, F] tile; the sum over pairs of
value * onehot(row) x onehot(column) holds the pair's value where there is a pair, 0 elsewhere. A
core sums its own pairs; the cores add up their parts, and each stores half of the rows. Values are
sums of terms that 16 bits hold exactly, a matmul each; a pair's number, its token or a weight.

Two slots share a float32 sum where values are integers of one term: those of the right half of the
columns count _APART times as much, and both are told apart afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.chip import BANK_FLOATS, PARTITIONS
from nki_kernels.common.integers import count_up, divide_down
from nki_kernels.common.token_tiles import TokenTiles

GROUP = 2048  # columns of the inverse summed at once: half of PSUM, and exact in float16
_DIGIT_BITS = 11  # of a float16 significand
_SPAN = 1 << _DIGIT_BITS  # float16 has all integers up to it, of either sign
WEIGHT_TERMS = 3  # bfloat16 numbers that add up to any float32 one
# Three spans: a left value is a third of it at most, so that rounding tells the right one; exact in
# bfloat16, and its product with a span plus one more span stays below 2^24.
_APART = 3 * _SPAN
_PAIRS_AT_ONCE = 128  # columns of pairs whose places are worked out together
_SCALAR_TURNS, _TURNS = 3, 8  # one-hots of rows that the Scalar engine makes, of so many


@dataclass
class _Rows(nl.NKIObject):
    """What one-hots of rows are made of, float32 but for the first."""

    line_sb: nl.ndarray  # [128, 128] float16, 0, 1, ... on every partition
    row_sb: nl.ndarray  # [128, pairs], -1 for no expert
    minus_row_sb: nl.ndarray
    size_sb: nl.ndarray  # [128, tiles], above 0
    minus_size_sb: nl.ndarray


def invert(
    token_of_slot: nl.ndarray,
    pair_of_slot: nl.ndarray,
    slot_sb: nl.ndarray,
    tokens: TokenTiles,
    top_k: int,
) -> None:
    """Store the pair and the token of every slot, -1 for none."""
    width = slot_sb.shape[1]
    number_sb = nl.ndarray(slot_sb.shape, nl.int32, buffer=nl.sbuf)
    nisa.iota(
        dst=number_sb,
        pattern=[[1, width]],
        offset=tokens.first * top_k + 1,
        channel_multiplier=width,
    )
    last_pair = (tokens.first + PARTITIONS * max(1, tokens.count)) * top_k
    digits = _split_digits(number_sb, num_digits(last_pair))
    row_size = _row_size(pair_of_slot)
    for start in range(0, row_size, GROUP):
        own_sb = _spread(digits, nl.float16, slot_sb, row_size, start)
        pair_sb = nl.ndarray(own_sb.shape, nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=pair_sb, data=_add_other(own_sb), op0=nl.add, operand0=-1.0)
        token_sb = nl.ndarray(own_sb.shape, nl.int32, buffer=nl.sbuf)
        divide_down(token_sb, pair_sb, top_k)
        _store_share(pair_of_slot, pair_sb, row_size, start)
        _store_share(token_of_slot, token_sb, row_size, start)


def invert_tokens(token_of_slot: nl.ndarray, slot_sb: nl.ndarray, tokens: TokenTiles) -> None:
    """Store the token of every slot, -1 for none.

    Counted from the core's first, a token needs fewer terms than a pair: one up to 4,096 of them,
    which are told from none by leaving zero out.
    """
    count = max(1, tokens.count)
    number_sb = nl.ndarray((PARTITIONS, count), nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=number_sb, pattern=[[1, count]], offset=1, channel_multiplier=count)
    is_signed = num_token_terms(tokens.rows) == 1 and tokens.rows > _SPAN
    if is_signed:
        terms = [_leave_out_zero(number_sb)]
    else:
        terms = _split_digits(number_sb, num_token_terms(tokens.rows))
    row_size = _row_size(token_of_slot)
    for start in range(0, row_size, GROUP):
        if len(terms) == 1:
            own_sb = _spread_shared(terms[0], slot_sb, row_size, start)
        else:
            own_sb = _spread(terms, nl.float16, slot_sb, row_size, start)
        _count_from(own_sb, float(tokens.first), is_signed)
        token_sb = nl.ndarray(own_sb.shape, nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=token_sb, data=_add_other(own_sb), op0=nl.add, operand0=-1.0)
        _store_share(token_of_slot, token_sb, row_size, start)


def invert_weights(weight_of_slot: nl.ndarray, weights_sb: nl.ndarray, slot_sb: nl.ndarray) -> None:
    """Store the weight of the pair in every slot, 0 for none; weights are [128, pairs] float32."""
    terms, rest_sb = [], weights_sb
    for _term in range(WEIGHT_TERMS):
        short_sb = nl.ndarray(weights_sb.shape, nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_copy(dst=short_sb, src=rest_sb)
        term_sb = nl.ndarray(weights_sb.shape, nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=term_sb, src=short_sb)
        less_sb = nl.ndarray(weights_sb.shape, nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=less_sb, data1=rest_sb, data2=term_sb, op=nl.subtract)
        terms.append(term_sb)
        rest_sb = less_sb
    row_size = _row_size(weight_of_slot)
    for start in range(0, row_size, GROUP):
        own_sb = _spread(terms, nl.bfloat16, slot_sb, row_size, start)
        _store_share(weight_of_slot, _add_other(own_sb), row_size, start)


def num_digits(largest: int) -> int:
    """Return how many digits the numbers 1 to `largest` need."""
    digits: int = 1
    while (1 << (_DIGIT_BITS * digits)) <= largest:
        digits += 1
    return digits


def num_token_terms(rows: int) -> int:
    """Return the matmuls of a pair for `rows` tokens of a core."""
    if rows <= 2 * _SPAN:
        return 1
    return num_digits(rows)


def token_columns(rows: int, row_size: int) -> int:
    """Return the columns of the matmuls of a pair for `rows` tokens of a core.

    Args:
        rows: tokens of the core.
        row_size: columns of the inverse.
    """
    terms = num_token_terms(rows)
    if terms > 1:
        return terms * row_size
    columns: int = 0
    for start in range(0, row_size, GROUP):
        columns += _half(min(GROUP, row_size - start))
    return columns


def _half(width: int) -> int:
    """Return the columns of sums that two slots share."""
    return (width + 1) // 2


def _row_size(of_slot: nl.ndarray) -> int:
    num_slots: int = of_slot.shape[0]
    return (num_slots + PARTITIONS - 1) // PARTITIONS


def _split_digits(numbers_sb: nl.ndarray, digits: int) -> list[nl.ndarray]:
    """Return float32 tiles that add up to the int32 numbers, each of one digit's bits."""
    parts = []
    for digit in range(digits):
        bits_sb = nl.ndarray(numbers_sb.shape, nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=bits_sb,
            data=numbers_sb,
            op0=nl.bitwise_and,
            operand0=(_SPAN - 1) << (_DIGIT_BITS * digit),
        )
        part_sb = nl.ndarray(numbers_sb.shape, nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=part_sb, src=bits_sb)
        parts.append(part_sb)
    return parts


def _leave_out_zero(numbers_sb: nl.ndarray) -> nl.ndarray:
    """Return 1 to 4096 as -2048 to -1 and 1 to 2048, float32."""
    upper_sb = nl.ndarray(numbers_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=upper_sb, data=numbers_sb, op0=nl.greater, operand0=float(_SPAN), op1=nl.add,
        operand1=-float(_SPAN + 1),
    )  # fmt: skip
    signed_sb = nl.ndarray(numbers_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=signed_sb, data1=numbers_sb, data2=upper_sb, op=nl.add)
    return signed_sb


def _count_from(own_sb: nl.ndarray, first: float, is_signed: bool) -> None:
    """Add the core's first token to its tokens' numbers, undoing `_leave_out_zero`; 0 stays."""
    shift_sb = nl.ndarray(own_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=shift_sb, data=own_sb, op0=nl.not_equal, operand0=0.0, op1=nl.multiply,
        operand1=first + (_SPAN if is_signed else 0),
    )  # fmt: skip
    if is_signed:
        nisa.scalar_tensor_tensor(
            dst=shift_sb, data=own_sb, op0=nl.less, operand0=0.0, op1=nl.add, operand1=shift_sb
        )
    nisa.tensor_tensor(dst=own_sb, data1=own_sb, data2=shift_sb, op=nl.add)


def _spread(
    terms: list[nl.ndarray], dtype: nl.DType, slot_sb: nl.ndarray, row_size: int, start: int
) -> nl.ndarray:
    """Return columns start.. of the inverse of this core's pairs, [128, width] float32.

    Args:
        terms: float32 tiles whose sum is a pair's value, [128, pairs], or [128, tiles] where the
            pairs of a token share it.
        dtype: that has all terms.
        slot_sb: [128, pairs] float32, -1 for no expert.
        row_size: columns of the inverse.
        start: the first one wanted; GROUP at most are made.
    """
    pairs, width = slot_sb.shape[1], min(GROUP, row_size - start)
    shared = pairs // terms[0].shape[1]
    row_sb, here_sb = _split_slots(slot_sb, row_size, start)
    # Small integers are exact in 16 bits, of which the Vector engine compares four at a time.
    line_sb, numbers_sb = count_up(PARTITIONS, nl.float16), count_up(width, nl.float16)
    inverse_ps = nl.ndarray((PARTITIONS, width), nl.float32, buffer=nl.psum)
    for pair in range(pairs):
        moving = nl.ndarray((PARTITIONS, width), nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=moving, data=numbers_sb, op0=nl.equal, operand0=here_sb[:, pair : pair + 1]
        )
        column = slice(pair // shared, pair // shared + 1)
        for term in range(len(terms)):
            stationary = nl.ndarray((PARTITIONS, PARTITIONS), dtype, buffer=nl.sbuf)
            nisa.tensor_scalar(
                dst=stationary, data=line_sb, op0=nl.equal, operand0=row_sb[:, pair : pair + 1],
                op1=nl.multiply, operand1=terms[term][:, column],
            )  # fmt: skip
            _add_pairs(inverse_ps, stationary, moving, pair + term > 0)
    own_sb = nl.ndarray((PARTITIONS, width), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=own_sb, src=inverse_ps)
    return own_sb


def _add_pairs(
    inverse_ps: nl.ndarray, stationary: nl.ndarray, moving: nl.ndarray, accumulate: bool
) -> None:
    """Add the values of 128 pairs to their places."""
    width = moving.shape[1]
    for bank in range(0, width, BANK_FLOATS):
        banked = slice(bank, min(bank + BANK_FLOATS, width))
        nisa.nc_matmul(
            dst=inverse_ps[:, banked],
            stationary=stationary,
            moving=moving[:, banked],
            accumulate=accumulate,
        )


def _spread_shared(
    value_sb: nl.ndarray, slot_sb: nl.ndarray, row_size: int, start: int
) -> nl.ndarray:
    """Return what `_spread` does, from sums that two slots share.

    Args:
        value_sb: [128, tiles] float32 integers of the pairs of a token, up to a span, of either
            sign, none of them 0.
        slot_sb: [128, pairs] float32, -1 for no expert.
        row_size: columns of the inverse.
        start: the first one wanted; GROUP at most are made.
    """
    pairs, width = slot_sb.shape[1], min(GROUP, row_size - start)
    half, shared = _half(width), pairs // value_sb.shape[1]
    line_sb, numbers_sb = count_up(PARTITIONS, nl.float16), count_up(half, nl.float16)
    inverse_ps = nl.ndarray((PARTITIONS, half), nl.float32, buffer=nl.psum)
    # Slots come some tiles of tokens after the others.
    tiles = max(1, _PAIRS_AT_ONCE // shared)
    for first in range(0, value_sb.shape[1], tiles):
        stop = min(first + tiles, value_sb.shape[1])
        slots, value = slot_sb[:, first * shared : stop * shared], value_sb[:, first:stop]
        _add_shared(inverse_ps, value, slots, row_size, start, line_sb, numbers_sb, first > 0)
    own_sb = nl.ndarray((PARTITIONS, width), nl.float32, buffer=nl.sbuf)
    _tell_apart(own_sb, inverse_ps)
    return own_sb


def _add_shared(
    inverse_ps: nl.ndarray,
    value: nl.ndarray,
    slots: nl.ndarray,
    row_size: int,
    start: int,
    line_sb: nl.ndarray,
    numbers_sb: nl.ndarray,
    accumulate: bool,
) -> None:
    """Add the pairs of some tiles of tokens to sums that two slots share."""
    half, shared = inverse_ps.shape[1], slots.shape[1] // value.shape[1]
    row_sb, here_sb = _split_slots(slots, row_size, start)
    factor_sb = _share_columns(here_sb, half, value)
    size_sb = nl.ndarray(value.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=size_sb, data=value, op0=nl.abs, operand0=0.0)
    rows = _Rows(line_sb, row_sb, _minus(row_sb), size_sb, _minus(size_sb))
    for pair in range(slots.shape[1]):
        moving = nl.ndarray((PARTITIONS, half), nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=moving, data=numbers_sb, op0=nl.equal, operand0=here_sb[:, pair : pair + 1],
            op1=nl.multiply, operand1=factor_sb[:, pair : pair + 1],
        )  # fmt: skip
        stationary = _mark_rows(rows, pair, pair // shared)
        _add_pairs(inverse_ps, stationary, moving, accumulate or pair > 0)


def _share_columns(here_sb: nl.ndarray, half: int, value_sb: nl.ndarray) -> nl.ndarray:
    """Bring columns of the right half to the left; return sign and weight of each pair's sum."""
    is_right_sb = nl.ndarray(here_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=is_right_sb, data=here_sb, op0=nl.greater_equal, operand0=float(half))
    nisa.scalar_tensor_tensor(
        dst=here_sb, data=is_right_sb, op0=nl.multiply, operand0=-float(half), op1=nl.add,
        operand1=here_sb,
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
    return factor_sb


def _minus(data_sb: nl.ndarray) -> nl.ndarray:
    """Return -data, float32."""
    minus_sb = nl.ndarray(data_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=minus_sb, data=data_sb, op0=nl.multiply, operand0=-1.0)
    return minus_sb


def _mark_rows(rows: _Rows, pair: int, tile: int) -> nl.ndarray:
    """Return the sizes of 128 pairs, each at its row, [128, 128]; both engines take turns."""
    stationary = nl.ndarray((PARTITIONS, PARTITIONS), nl.float16, buffer=nl.sbuf)
    if pair % _TURNS >= _SCALAR_TURNS:
        nisa.tensor_scalar(
            dst=stationary, data=rows.line_sb, op0=nl.equal,
            operand0=rows.row_sb[:, pair : pair + 1], op1=nl.multiply,
            operand1=rows.size_sb[:, tile : tile + 1],
        )  # fmt: skip
        return stationary
    # The Scalar engine compares nothing: size - size * distance^2 is above 0 at no distance alone.
    distance_sb = nl.ndarray((PARTITIONS, PARTITIONS), nl.bfloat16, buffer=nl.sbuf)
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
    """Write the left and the right values, [128, width], of sums that two slots share."""
    width, half = own_sb.shape[1], shared_ps.shape[1]
    right_sb = nl.ndarray(shared_ps.shape, nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=right_sb, data=shared_ps, op0=nl.multiply, operand0=1.0 / _APART)
    nisa.scalar_tensor_tensor(
        dst=own_sb[:, 0:half], data=right_sb, op0=nl.multiply, operand0=-float(_APART), op1=nl.add,
        operand1=shared_ps,
    )  # fmt: skip
    if half < width:
        nisa.tensor_copy(dst=own_sb[:, half:width], src=right_sb[:, 0 : width - half])


def _split_slots(slot_sb: nl.ndarray, row_size: int, start: int) -> tuple[nl.ndarray, nl.ndarray]:
    """Return slot // row_size and slot % row_size - start as float32; row -1 for slot -1."""
    row_sb = nl.ndarray(slot_sb.shape, nl.float32, buffer=nl.sbuf)
    whole_sb = nl.ndarray(slot_sb.shape, nl.int32, buffer=nl.sbuf)
    divide_down(whole_sb, slot_sb, row_size)
    nisa.tensor_copy(dst=row_sb, src=whole_sb)
    column_sb = nl.ndarray(slot_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=column_sb,
        data=row_sb,
        op0=nl.multiply,
        operand0=-float(row_size),
        op1=nl.add,
        operand1=slot_sb,
    )
    here_sb = nl.ndarray(slot_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=here_sb, data=column_sb, op0=nl.subtract, operand0=float(start))
    return row_sb, here_sb


def _add_other(own_sb: nl.ndarray) -> nl.ndarray:
    """Return the sum of both cores' parts."""
    if nl.num_programs(0) == 1:
        return own_sb
    other_sb = exchange(own_sb)
    both_sb = nl.ndarray(own_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=both_sb, data1=own_sb, data2=other_sb, op=nl.add)
    return both_sb


def _store_share(flat: nl.ndarray, values_sb: nl.ndarray, row_size: int, start: int) -> None:
    """Store this core's share of the rows, columns start.. of them."""
    share = PARTITIONS // nl.num_programs(0)
    first = nl.program_id(0) * share
    store_flat(flat, values_sb, row_size, start, values_sb.shape[1], first, first + share)


def exchange(own_sb: nl.ndarray) -> nl.ndarray:
    """Return the other core's tile; zeros if there is none."""
    other_sb = nl.ndarray(own_sb.shape, own_sb.dtype, buffer=nl.sbuf)
    if nl.num_programs(0) == 1:
        nisa.memset(dst=other_sb, value=0.0)
    else:
        other = 1 - nl.program_id(0)
        nisa.sendrecv(src=own_sb, dst=other_sb, send_to_rank=other, recv_from_rank=other, pipe_id=0)
    return other_sb


def store_flat(
    flat: nl.ndarray,
    values_sb: nl.ndarray,
    row_size: int,
    start: int,
    width: int,
    first_row: int,
    end_row: int,
) -> None:
    """Store [128, width] values to columns start.. of rows of row_size elements of a flat tensor.

    Rows first_row to end_row are stored, as far as the flat tensor goes; its last row may be short.
    """
    whole = (flat.shape[0] - start - width) // row_size + 1
    rows = min(end_row, whole) - first_row
    if rows > 0:
        nisa.dma_copy(
            dst=flat.ap([[row_size, rows], [1, width]], offset=first_row * row_size + start),
            src=values_sb[first_row : first_row + rows, :],
        )
    rest = flat.shape[0] - whole * row_size - start
    if first_row <= whole and whole < end_row and rest > 0:
        nisa.dma_copy(
            dst=flat.ap([[row_size, 1], [1, rest]], offset=whole * row_size + start),
            src=values_sb[whole : whole + 1, 0:rest],
        )
