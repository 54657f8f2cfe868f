"""Which pair each slot holds: the inverse of the slots of pairs, by matmuls of one-hots.

Slot s goes to row s // F, column s % F of a [128, F] tile; the sum over pairs of
(pair + 1) * onehot(row) x onehot(column) holds pair + 1 where there is a pair, 0 elsewhere. A core
sums its own pairs; the cores add up their parts, and each stores half of the rows.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.chip import BANK_FLOATS, PARTITIONS
from nki_kernels.common.integers import count_up, divide_down
from nki_kernels.common.token_tiles import TokenTiles

GROUP = 2048  # columns of the inverse summed at once: half of PSUM, and exact in float16
_DIGIT_BITS = 8  # of a bfloat16 significand


def invert(
    token_of_slot: nl.ndarray,
    pair_of_slot: nl.ndarray,
    slot_sb: nl.ndarray,
    tokens: TokenTiles,
    top_k: int,
) -> None:
    """Store the pair and the token of every slot."""
    num_slots = pair_of_slot.shape[0]
    pairs_per_partition = slot_sb.shape[1]
    row_size = (num_slots + PARTITIONS - 1) // PARTITIONS
    row_sb, column_sb = _split_slots(slot_sb, row_size)
    number_sb = nl.ndarray(slot_sb.shape, nl.int32, buffer=nl.sbuf)
    nisa.iota(
        dst=number_sb,
        pattern=[[1, pairs_per_partition]],
        offset=tokens.first * top_k + 1,
        channel_multiplier=pairs_per_partition,
    )
    last_pair = (tokens.first + PARTITIONS * max(1, tokens.count)) * top_k
    digits = _split_digits(number_sb, num_digits(last_pair))
    # Small integers are exact in 16 bits, of which the Vector engine compares four at a time.
    line_sb = count_up(PARTITIONS, nl.float16)
    numbers_sb = count_up(min(row_size, GROUP), nl.float16)
    for start in range(0, row_size, GROUP):
        width = min(GROUP, row_size - start)
        here_sb = nl.ndarray(column_sb.shape, nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=here_sb, data=column_sb, op0=nl.subtract, operand0=float(start))
        inverse_ps = nl.ndarray((PARTITIONS, width), nl.float32, buffer=nl.psum)
        for pair in range(pairs_per_partition):
            column = slice(pair, pair + 1)
            moving = _one_hot(numbers_sb[:, 0:width], here_sb[:, column])
            stationary = _weighted_one_hots(line_sb, row_sb[:, column], digits, pair)
            for digit in range(len(digits)):
                for bank in range(0, width, BANK_FLOATS):
                    banked = slice(bank, min(bank + BANK_FLOATS, width))
                    nisa.nc_matmul(
                        dst=inverse_ps[:, banked],
                        stationary=stationary[digit],
                        moving=moving[:, banked],
                        accumulate=pair + digit > 0,
                    )
        _store_inverse(token_of_slot, pair_of_slot, inverse_ps, row_size, start, top_k)


def num_digits(num_pairs: int) -> int:
    """Return how many digits of 8 bits the numbers 1 to num_pairs need."""
    digits = 1
    while (1 << (_DIGIT_BITS * digits)) <= num_pairs:
        digits += 1
    return digits


def _split_digits(numbers_sb: nl.ndarray, digits: int) -> list[nl.ndarray]:
    """Return float32 tiles that add up to the int32 numbers, each with 8 significant bits."""
    parts = []
    for digit in range(digits):
        bits_sb = nl.ndarray(numbers_sb.shape, nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=bits_sb,
            data=numbers_sb,
            op0=nl.bitwise_and,
            operand0=((1 << _DIGIT_BITS) - 1) << (_DIGIT_BITS * digit),
        )
        part_sb = nl.ndarray(numbers_sb.shape, nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=part_sb, src=bits_sb)
        parts.append(part_sb)
    return parts


def _one_hot(numbers: nl.ndarray, place: nl.ndarray) -> nl.ndarray:
    """Return bfloat16 1 where a partition's number equals its `place` [128, 1], else 0."""
    found_sb = nl.ndarray(numbers.shape, nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=found_sb, data=numbers, op0=nl.equal, operand0=place)
    return found_sb


def _weighted_one_hots(
    numbers: nl.ndarray, place: nl.ndarray, digits: list[nl.ndarray], pair: int
) -> list[nl.ndarray]:
    """Return, for each digit of a pair's number, bfloat16 tiles that hold it at its `place`.

    The Scalar engine makes up to two of them, which takes as long as the rest does the Vector
    engine.
    """
    column = slice(pair, pair + 1)
    found_sb = _one_hot(numbers, place)
    weighted = []
    for digit in range(len(digits)):
        weighted_sb = nl.ndarray(numbers.shape, nl.bfloat16, buffer=nl.sbuf)
        factor = digits[digit][:, column]
        if digit < 2:
            nisa.activation(dst=weighted_sb, op=nl.copy, data=found_sb, scale=factor)
        else:
            nisa.tensor_scalar(dst=weighted_sb, data=found_sb, op0=nl.multiply, operand0=factor)
        weighted.append(weighted_sb)
    return weighted


def _split_slots(slot_sb: nl.ndarray, row_size: int) -> tuple[nl.ndarray, nl.ndarray]:
    """Return slot // row_size and slot % row_size as float32; row -1 for slot -1."""
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
    return row_sb, column_sb


def _store_inverse(
    token_of_slot: nl.ndarray,
    pair_of_slot: nl.ndarray,
    inverse_ps: nl.ndarray,
    row_size: int,
    start: int,
    top_k: int,
) -> None:
    """Add the other core's part, turn pair + 1 into pair and token, store half of the rows."""
    shape = inverse_ps.shape
    own_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=own_sb, src=inverse_ps)
    both_sb = own_sb
    if nl.num_programs(0) > 1:
        other_sb = exchange(own_sb)
        both_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=both_sb, data1=own_sb, data2=other_sb, op=nl.add)
    pair_sb = nl.ndarray(shape, nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=pair_sb, data=both_sb, op0=nl.add, operand0=-1.0)
    token_sb = nl.ndarray(shape, nl.int32, buffer=nl.sbuf)
    divide_down(token_sb, pair_sb, top_k)
    share = PARTITIONS // nl.num_programs(0)
    first = nl.program_id(0) * share
    store_flat(pair_of_slot, pair_sb, row_size, start, shape[1], first, first + share)
    store_flat(token_of_slot, token_sb, row_size, start, shape[1], first, first + share)


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
