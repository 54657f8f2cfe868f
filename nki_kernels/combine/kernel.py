"""Combine: each token's weighted sum over the slots of its experts.

Formula: output[t] = sum over choices k with an expert, over partial sums p, of
    affinities[t, k] * slots[p, slot_of_pair[t, k]]
  + spoils[t] + residual[t] + gates[t] * shared[t], if there are any,
in float32, always in the same order, rounded once.

Inputs, in HBM:
    slots_PSH        [P, S, H]  bfloat16 or float32  what the experts made of each slot, in P parts
    slot_of_pair_TK  [T, K]     int32    slot of each choice, -1 for none, which is left out, or is
                                         the last slot, of zeros (CombineDims.missing)
    affinities_TK    [T, K]     float32
    spoils_T1        [T, 1]     float32, if dims.has_spoils: 0, or NaN for a token to be NaN
    residual_TH      [T, H]     bfloat16 or float32, if dims.has_residual
    shared_SH        [S, H]     bfloat16 or float32, if dims.has_shared; rows beyond T are not read
    gates_T1         [T, 1]     float32, if dims.has_gate, else 1; NaN for a token to be NaN
Output, in shared HBM:
    output_TH        [T, H]     out_dtype; [T/R, H] where dims.ranks scatters the sum of R ranks

Slots that hold no token are never read, so they may hold anything. A slot that is read must be
finite: a NaN or infinity in one spreads to the up to 128 tokens of its tile, as the tensor engine
adds 0 times it to the others.

On chip: tokens are on the partitions as in token_tiles.py. The weighted sum of a tile is a chain of
matmuls in PSUM with diag(affinities[:, k]) stationary and the gathered rows [rows, H] moving.
Beside bfloat16 slots the diagonal is bfloat16 too, as the sum of two terms: an affinity is then off
by 2^-17 of itself at most, a 256th of what rounding a slot to bfloat16 costs. Beside float32 slots
it is float32.

Limits (check_combine): K <= 16, H a multiple of 64, at most 8 partial sums, P * S < 2^24.

Cost: every slot with a token is read once, the output is written once; per tile and choice 2 P H
matmul columns (P H float32 ones beside float32 slots). One gather of 128 whole rows per tile,
choice and part, in pieces of H only where SBUF demands it. Gathers of the next tile overlap.

Steps:
    1. Split the tokens over the cores; load all their slot numbers and affinities at once.
    2. Per tile of 128 tokens: make a diagonal of each choice's affinities.
    3. Per piece of H: gather each choice's rows, one gather per choice and part.
    4. Sum in PSUM, one matmul per choice, part and term, always in this order; round; store. A
       single row of a token, to which no row is added, is multiplied on the Vector engine.
    5. Add up the ranks' rows, if dims.ranks says so, a portion while the next is summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.combine.config import CombineDims, sums_nothing
from nki_kernels.common.arithmetic import apply_two, apply_with
from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.rank_sums import end_portion, make_rows
from nki_kernels.common.slot_sums import piece_size
from nki_kernels.common.tiles import identity, multiply_banks
from nki_kernels.common.token_tiles import (
    TokenTiles,
    load_per_token,
    split_tokens,
    tile_rows,
    token_rows,
    tokens_of_portion,
)

_GROUP = 2048  # columns summed together: half of PSUM
_NO_ROW = -(1 << 30)  # stays negative whatever the number of the part adds


@dataclass
class Beside(nl.NKIObject):
    """What is added to the sums of a tile."""

    columns: list[nl.ndarray]  # [rows, 1] float32, one at most
    gates: list[nl.ndarray]  # [rows, 1] float32, one at most, of the last row that is added
    added: list[nl.ndarray]  # [rows, width]


@nki.jit
def combine(
    slots_PSH: nl.ndarray,
    slot_of_pair_TK: nl.ndarray,
    affinities_TK: nl.ndarray,
    dims: CombineDims,
    spoils_T1: Any = None,
    residual_TH: Any = None,
    shared_SH: Any = None,
    gates_T1: Any = None,
) -> nl.ndarray:
    """Sum the slots of each token; see the module's docstring."""
    num_parts, num_slots, hidden_size = slots_PSH.shape
    num_tokens, top_k = slot_of_pair_TK.shape
    tokens = split_tokens(num_tokens, nl.program_id(0), nl.num_programs(0))
    summed = make_rows(dims.ranks, (num_tokens, hidden_size), dims.out_dtype, tokens.count)
    if tokens.count == 0:
        end_portion(dims.ranks, summed, 0)
        return summed.output
    stored = tokens_of_portion(tokens, dims.ranks.portions)
    slots_RH = slots_PSH.reshape((num_parts * num_slots, hidden_size))
    rows_sb = _load_rows(slot_of_pair_TK, tokens, num_parts, num_slots, dims)
    weights = _load_weights(affinities_TK, tokens, slots_PSH.dtype)
    spoils = _load_columns(spoils_T1, tokens, dims.has_spoils)
    gates = _load_columns(gates_T1, tokens, dims.has_gate)
    added = _added(residual_TH, shared_SH, dims)
    identity_sb = identity(slots_PSH.dtype)
    piece = piece_size(hidden_size, top_k * num_parts, 4 if slots_PSH.dtype == nl.float32 else 2)
    pieces = (hidden_size + piece - 1) // piece
    is_single = sums_nothing(top_k * num_parts, dims)
    gathered, beside, diagonals = [], [], []
    # Rows are gathered, and diagonals made, before those of the step before are summed: what
    # clears their place would otherwise wait behind the copies of that sum.
    for step in range(tokens.count * pieces + 1):
        if step < tokens.count * pieces:
            tile, start = step // pieces, step % pieces * piece
            width = min(piece, hidden_size - start)
            gathered.append(gather_rows(slots_RH, rows_sb, tokens, tile, top_k, start, width, dims))
            beside.append(_load_beside(spoils, gates, added, tokens, tile, start, width))
            if start == 0 and not is_single:
                diagonals.append(spread_weights(weights, identity_sb, tokens, tile, top_k))
        if step > 0:
            tile, start = (step - 1) // pieces, (step - 1) % pieces * piece
            width = min(piece, hidden_size - start)
            if is_single:
                weight_sb = weights[0][0 : tile_rows(tokens, tile), tile : tile + 1]
                total_sb = _scale(gathered.pop(0)[0], weight_sb, dims.out_dtype, beside.pop(0))
            else:
                total_sb = weigh(
                    gathered.pop(0), diagonals[0], num_parts, dims.out_dtype, beside.pop(0)
                )
            portion, place = tile // stored.count, tile % stored.count
            target = token_rows(summed.parts[portion], stored, place, start, width)
            nisa.dma_copy(dst=target, src=total_sb)
            if start + width == hidden_size:
                if not is_single:
                    diagonals.pop(0)
                if place + 1 == stored.count:
                    end_portion(dims.ranks, summed, portion)
    return summed.output


def _load_rows(
    slot_of_pair_TK: nl.ndarray,
    tokens: TokenTiles,
    num_parts: int,
    num_slots: int,
    dims: CombineDims,
) -> list[nl.ndarray]:
    """Return for each part the rows of slots_RH of this core's choices, [128, tiles * K] int32."""
    shape = (PARTITIONS, tokens.count * slot_of_pair_TK.shape[1])
    # Partitions without a token are computed with: they must hold numbers.
    first_sb = nl.ndarray(shape, nl.int32, buffer=nl.sbuf)
    if tokens.full < PARTITIONS:
        nisa.memset(dst=first_sb, value=0)
    load_per_token(first_sb, slot_of_pair_TK, tokens)
    if num_parts > 1 or dims.missing == "spare":
        first_sb = real_rows(first_sb, num_slots, dims)
    rows_sb = [first_sb]
    for part in range(1, num_parts):
        # The parts are one tensor of rows: a slot of the next part is num_slots rows on.
        part_sb = nl.ndarray(shape, nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=part_sb, data=first_sb, op0=nl.add, operand0=part * num_slots)
        rows_sb.append(part_sb)
    return rows_sb


def real_rows(first_sb: nl.ndarray, num_slots: int, dims: CombineDims) -> nl.ndarray:
    """Return int32 rows of the first part, where -1 is what is read in place of a missing one."""
    if not dims.has_no_expert:
        return first_sb
    below_sb = nl.ndarray(first_sb.shape, nl.int32, buffer=nl.sbuf)
    added = float(num_slots if dims.missing == "spare" else _NO_ROW)
    apply_two(below_sb, first_sb, nl.less, 0.0, nl.multiply, added)
    real_sb = nl.ndarray(first_sb.shape, nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=real_sb, data1=first_sb, data2=below_sb, op=nl.add)
    return real_sb


def _load_weights(
    affinities_TK: nl.ndarray, tokens: TokenTiles, slots_dtype: nl.DType
) -> list[nl.ndarray]:
    """Return the affinities of this core's choices, [128, tiles * K], as of `split_weights`."""
    shape = (PARTITIONS, tokens.count * affinities_TK.shape[1])
    whole_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    if tokens.full < PARTITIONS:
        nisa.memset(dst=whole_sb, value=0.0)
    load_per_token(whole_sb, affinities_TK, tokens)
    return split_weights(whole_sb, slots_dtype)


def split_weights(whole_sb: nl.ndarray, slots_dtype: nl.DType) -> list[nl.ndarray]:
    """Return float32 tiles that add up to the weights: one, or, beside bfloat16 slots, whose
    diagonals round the first to bfloat16, that and the rest.
    """
    if slots_dtype == nl.float32:
        return [whole_sb]
    high_sb = nl.ndarray(whole_sb.shape, nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=high_sb, src=whole_sb)
    low_sb = nl.ndarray(whole_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=low_sb, data1=whole_sb, data2=high_sb, op=nl.subtract)
    return [whole_sb, low_sb]


def _load_columns(values_T1: Any, tokens: TokenTiles, is_there: bool) -> list[nl.ndarray]:
    """Return [128, tiles] float32, a number of each token; none if there is none."""
    if not is_there:
        return []
    values_sb = nl.ndarray((PARTITIONS, tokens.count), nl.float32, buffer=nl.sbuf)
    load_per_token(values_sb, values_T1, tokens)
    return [values_sb]


def _added(residual_TH: Any, shared_SH: Any, dims: CombineDims) -> list[nl.ndarray]:
    """Return the tensors whose row of a token is added to it."""
    added = []
    if dims.has_residual:
        added.append(residual_TH)
    if dims.has_shared:
        added.append(shared_SH)
    return added


def _load_beside(
    spoils: list[nl.ndarray],
    gates: list[nl.ndarray],
    added: list[nl.ndarray],
    tokens: TokenTiles,
    tile: int,
    start: int,
    width: int,
) -> Beside:
    """Return what is added to columns start.. of a tile of tokens."""
    rows, columns, factors, loaded = tile_rows(tokens, tile), [], [], []
    for spoils_sb in spoils:
        columns.append(spoils_sb[0:rows, tile : tile + 1])
    for gates_sb in gates:
        factors.append(gates_sb[0:rows, tile : tile + 1])
    for tensor_TH in added:
        rows_sb = nl.ndarray((rows, width), tensor_TH.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows_sb, src=token_rows(tensor_TH, tokens, tile, start, width))
        loaded.append(rows_sb)
    return Beside(columns, factors, loaded)


def spread_weights(
    weights: list[nl.ndarray],
    identity_sb: nl.ndarray,
    tokens: TokenTiles,
    tile: int,
    top_k: int,
) -> list[list[nl.ndarray]]:
    """Return, for each choice, the diagonal matrices [rows, rows] whose sum holds its weights."""
    rows = tile_rows(tokens, tile)
    diagonals = []
    for choice in range(top_k):
        terms = []
        column = slice(tile * top_k + choice, tile * top_k + choice + 1)
        for weight_sb in weights:
            # Rounding to the diagonal's type makes the first term the bfloat16 nearest the weight.
            diagonal_sb = nl.ndarray((rows, rows), identity_sb.dtype, buffer=nl.sbuf)
            nisa.tensor_scalar(
                dst=diagonal_sb,
                data=identity_sb[0:rows, 0:rows],
                op0=nl.multiply,
                operand0=weight_sb[0:rows, column],
            )
            terms.append(diagonal_sb)
        diagonals.append(terms)
    return diagonals


def gather_rows(
    slots_RH: nl.ndarray,
    rows_sb: list[nl.ndarray],
    tokens: TokenTiles,
    tile: int,
    top_k: int,
    start: int,
    width: int,
    dims: CombineDims,
) -> list[nl.ndarray]:
    """Return columns start.. of each choice's slot, [rows, width] per choice and part."""
    hidden_size = slots_RH.shape[1]
    rows = tile_rows(tokens, tile)
    gathered = []
    for choice in range(top_k):
        column = slice(tile * top_k + choice, tile * top_k + choice + 1)
        for part_sb in rows_sb:
            slot_sb = nl.ndarray((rows, width), slots_RH.dtype, buffer=nl.sbuf)
            source = slots_RH.ap(
                [[hidden_size, rows], [1, width]],
                offset=start,
                vector_offset=part_sb[0:rows, column],
            )
            if dims.has_no_expert and dims.missing == "skip":
                # A row that is left out is not written: its zeros count for nothing.
                nisa.memset(dst=slot_sb, value=0.0, engine=nisa.engine.vector)
                nisa.dma_copy(dst=slot_sb, src=source, oob_mode=nisa.oob_mode.skip)
            else:
                nisa.dma_copy(dst=slot_sb, src=source)
            gathered.append(slot_sb)
    return gathered


def weigh(
    gathered: list[nl.ndarray],
    diagonals: list[list[nl.ndarray]],
    num_parts: int,
    out_dtype: nl.DType,
    beside: Beside,
) -> nl.ndarray:
    """Return the weighted sum of the gathered rows, [rows, width] in the output's type."""
    rows, width = gathered[0].shape
    total_sb = nl.ndarray((rows, width), out_dtype, buffer=nl.sbuf)
    for group in range(0, width, _GROUP):
        group_width = min(_GROUP, width - group)
        # A new tile for each group: one half of PSUM fills while the other is emptied.
        total_ps = nl.ndarray((rows, group_width), nl.float32, buffer=nl.psum)
        for index in range(len(gathered)):
            terms = diagonals[index // num_parts]
            for term in range(len(terms)):
                rows_sb = gathered[index][:, group : group + group_width]
                multiply_banks(total_ps, terms[term], rows_sb, index + term > 0)
        _empty(total_sb[:, group : group + group_width], total_ps, beside, group)
    return total_sb


def _scale(
    row_sb: nl.ndarray, weight_sb: nl.ndarray, out_dtype: nl.DType, beside: Beside
) -> nl.ndarray:
    """Return rows times their weights, and what is added to a token."""
    total_sb = nl.ndarray(row_sb.shape, out_dtype, buffer=nl.sbuf)
    if not beside.columns:
        nisa.tensor_scalar(dst=total_sb, data=row_sb, op0=nl.multiply, operand0=weight_sb)
    for column in beside.columns:
        apply_two(total_sb, row_sb, nl.multiply, weight_sb, nl.add, column)
    return total_sb


def _empty(target_sb: nl.ndarray, total_ps: nl.ndarray, beside: Beside, start: int) -> None:
    """Copy sums from PSUM, columns start.. of a piece, and add what comes beside them.

    Two engines take half of the columns each; the Vector engine takes all where rows are added.
    """
    width = total_ps.shape[1]
    half = width // 2
    if beside.added:
        _add_rows(target_sb, total_ps, beside, start)
        return
    for column in beside.columns:
        nisa.activation(dst=target_sb[:, 0:half], op=nl.copy, data=total_ps[:, 0:half], bias=column)
        nisa.tensor_scalar(
            dst=target_sb[:, half:width], data=total_ps[:, half:width], op0=nl.add, operand0=column
        )
        return
    nisa.tensor_copy(dst=target_sb[:, 0:half], src=total_ps[:, 0:half], engine=nisa.engine.scalar)
    nisa.tensor_copy(
        dst=target_sb[:, half:width], src=total_ps[:, half:width], engine=nisa.engine.vector
    )


def _add_rows(target_sb: nl.ndarray, total_ps: nl.ndarray, beside: Beside, start: int) -> None:
    """Copy sums from PSUM and add rows to them, rounded once."""
    width, partial = total_ps.shape[1], total_ps
    for number in range(len(beside.added)):
        is_last = number + 1 == len(beside.added)
        next_sb = target_sb
        if not is_last:
            next_sb = nl.ndarray(total_ps.shape, nl.float32, buffer=nl.sbuf)
        rows_sb = beside.added[number][:, start : start + width]
        if is_last and beside.gates:
            apply_with(next_sb, rows_sb, nl.multiply, beside.gates[0], nl.add, partial)
        elif number == 0 and beside.columns:
            apply_with(next_sb, partial, nl.add, beside.columns[0], nl.add, rows_sb)
        else:
            nisa.tensor_tensor(dst=next_sb, data1=partial, data2=rows_sb, op=nl.add)
        partial = next_sb
