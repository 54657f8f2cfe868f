"""Which pair each slot holds: the inverse of the slots of pairs, by matmuls of one-hots.

Slot s goes to row s // F, column s % F of a [128, F] tile; the sum over pairs of
value * onehot(row) x onehot(column) holds the pair's value where there is a pair, 0 elsewhere. A
core sums its own pairs; the cores add up their parts, and each stores half of the rows. Values are
sums of terms that 16 bits hold exactly, a matmul each; a pair's number or a weight.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.arithmetic import apply_two, apply_with, count_up, divide_down
from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.tiles import multiply_banks
from nki_kernels.common.token_tiles import TokenTiles
from nki_kernels.index.token_search import Meanwhile, go_on

GROUP = 2048  # columns of the inverse summed at once: half of PSUM, and exact in float16
_DIGIT_BITS = 11  # of a float16 significand
SPAN = 1 << _DIGIT_BITS  # float16 has all integers up to it, of either sign
_BESIDE = 4  # pairs, in whose time GpSimd does what else goes on
WEIGHT_TERMS = 3  # bfloat16 numbers that add up to any float32 one


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
        own_sb = _spread(digits, nl.float16, slot_sb, row_size, start, Meanwhile([], []))
        pair_sb = nl.ndarray(own_sb.shape, nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=pair_sb, data=_add_other(own_sb), op0=nl.add, operand0=-1.0)
        token_sb = nl.ndarray(own_sb.shape, nl.int32, buffer=nl.sbuf)
        divide_down(token_sb, pair_sb, top_k)
        _store_share(pair_of_slot, pair_sb, row_size, start)
        _store_share(token_of_slot, token_sb, row_size, start)


def invert_weights(
    weight_of_slot: nl.ndarray, weights_sb: nl.ndarray, slot_sb: nl.ndarray, meanwhile: Meanwhile
) -> None:
    """Store the weight of the pair in every slot, 0 for none; weights are [128, pairs] float32."""
    terms, rest_sb = [], weights_sb
    # Each term is what bfloat16 holds of what the terms before leave.
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
        own_sb = _spread(terms, nl.bfloat16, slot_sb, row_size, start, meanwhile)
        _store_share(weight_of_slot, _add_other(own_sb), row_size, start)


def num_digits(largest: int) -> int:
    """Return how many digits the numbers 1 to `largest` need."""
    digits: int = 1
    while (1 << (_DIGIT_BITS * digits)) <= largest:
        digits += 1
    return digits


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
            operand0=(SPAN - 1) << (_DIGIT_BITS * digit),
        )
        part_sb = nl.ndarray(numbers_sb.shape, nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=part_sb, src=bits_sb)
        parts.append(part_sb)
    return parts


def _spread(
    terms: list[nl.ndarray],
    dtype: nl.DType,
    slot_sb: nl.ndarray,
    row_size: int,
    start: int,
    meanwhile: Meanwhile,
) -> nl.ndarray:
    """Return columns start.. of the inverse of this core's pairs, [128, width] float32.

    Args:
        terms: float32 tiles whose sum is a pair's value, [128, pairs], or [128, tiles] where the
            pairs of a token share it.
        dtype: that has all terms.
        slot_sb: [128, pairs] float32, -1 for no expert.
        row_size: columns of the inverse.
        start: the first one wanted; GROUP at most are made.
        meanwhile: what goes on beside.
    """
    width = min(GROUP, row_size - start)
    row_sb, here_sb = _split_slots(slot_sb, row_size, start)
    # Small integers are exact in 16 bits, of which the Vector engine compares four at a time.
    line_sb, numbers_sb = count_up(PARTITIONS, nl.float16), count_up(width, nl.float16)
    inverse_ps = nl.ndarray((PARTITIONS, width), nl.float32, buffer=nl.psum)
    shared = slot_sb.shape[1] // terms[0].shape[1]
    for pair in range(slot_sb.shape[1]):
        places = (row_sb[:, pair : pair + 1], here_sb[:, pair : pair + 1])
        values = _columns_of_terms(terms, pair // shared)
        _add_values(inverse_ps, values, dtype, places, (line_sb, numbers_sb), pair > 0)
        if pair % _BESIDE == 0:
            go_on(meanwhile)
    own_sb = nl.ndarray((PARTITIONS, width), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=own_sb, src=inverse_ps)
    return own_sb


def _columns_of_terms(terms: list[nl.ndarray], column: int) -> list[nl.ndarray]:
    """Return a column of each term, [128, 1]."""
    columns = []
    for term_sb in terms:
        columns.append(term_sb[:, column : column + 1])
    return columns


def _add_values(
    inverse_ps: nl.ndarray,
    values: list[nl.ndarray],
    dtype: nl.DType,
    places: tuple[nl.ndarray, nl.ndarray],
    numbers: tuple[nl.ndarray, nl.ndarray],
    accumulate: bool,
) -> None:
    """Add the values of 128 pairs to their places.

    Args:
        inverse_ps: [rows, width] float32 sums.
        values: terms of them, [128, 1] float32.
        dtype: that has all terms.
        places: row and column of each pair, [128, 1] float32.
        numbers: of rows [128, rows] and of columns [128, width], 16 bits.
        accumulate: add to what is there.
    """
    line_sb, numbers_sb = numbers
    moving = nl.ndarray(numbers_sb.shape, nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=moving, data=numbers_sb, op0=nl.equal, operand0=places[1])
    if dtype == nl.bfloat16:
        marked = _mark_on_others(line_sb, places[0], values)
    else:
        marked = []
        for value in values:
            marked_sb = nl.ndarray(line_sb.shape, dtype, buffer=nl.sbuf)
            apply_two(marked_sb, line_sb, nl.equal, places[0], nl.multiply, value)
            marked.append(marked_sb)
    for term in range(len(values)):
        multiply_banks(inverse_ps, marked[term], moving, accumulate or term > 0)


def _mark_on_others(
    line_sb: nl.ndarray, row: nl.ndarray, values: list[nl.ndarray]
) -> list[nl.ndarray]:
    """Return values at the rows of 128 pairs, [128, rows] bfloat16 each: the Vector engine marks
    the rows once, others, which have less to do, multiply.
    """
    equal_sb = nl.ndarray(line_sb.shape, nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=equal_sb, data=line_sb, op0=nl.equal, operand0=row)
    marked = []
    for term in range(len(values)):
        marked_sb = nl.ndarray(line_sb.shape, nl.bfloat16, buffer=nl.sbuf)
        if term == 0:
            nisa.tensor_tensor(
                dst=marked_sb,
                data1=equal_sb,
                data2=values[0].broadcast(1, line_sb.shape[1]),
                op=nl.multiply,
                engine=nisa.engine.gpsimd,
            )
        else:
            nisa.activation(dst=marked_sb, op=nl.copy, data=equal_sb, scale=values[term])
        marked.append(marked_sb)
    return marked


def _split_slots(slot_sb: nl.ndarray, row_size: int, start: int) -> tuple[nl.ndarray, nl.ndarray]:
    """Return slot // row_size and slot % row_size - start as float32; row -1 for slot -1."""
    row_sb = nl.ndarray(slot_sb.shape, nl.float32, buffer=nl.sbuf)
    whole_sb = nl.ndarray(slot_sb.shape, nl.int32, buffer=nl.sbuf)
    divide_down(whole_sb, slot_sb, row_size)
    nisa.tensor_copy(dst=row_sb, src=whole_sb)
    column_sb = nl.ndarray(slot_sb.shape, nl.float32, buffer=nl.sbuf)
    apply_with(column_sb, row_sb, nl.multiply, -float(row_size), nl.add, slot_sb)
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
