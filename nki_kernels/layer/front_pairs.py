"""What the sum over a token's slots reads, where few of its choices are of this rank.

`combine` gathers a row for every column of its table, choice or not. Where a token's K choices are
of all ranks and P of them at most of this one, the table has C <= P columns: the token's pairs
here, moved to the front. A token with more than C pairs has them added up before, to one row, a
fold (combine/folds.py), which then stands in its first column with weight 1.

A partition takes its tokens with most pairs first: tile f of folds has the f-th of each partition.

Shapes: n tiles of tokens of a core (token_tiles.py), F tiles of its folds, L = P - C loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nki.isa as nisa
import nki.language as nl

from nki_kernels.combine.folds import FoldDims, Folds
from nki_kernels.common.arithmetic import add_up, apply_two, apply_with, divide_up
from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.slot_sums import tiles_of_iteration
from nki_kernels.common.tiles import identity
from nki_kernels.common.token_tiles import TokenTiles, store_per_token
from nki_kernels.index.slot_inverse import exchange

_EIGHT = 8  # values that max8 finds


@dataclass
class FrontPairs(nl.NKIObject):
    """What is known of a core's pairs before their slots are."""

    rank_sb: nl.NkiTensor  # [128, n, K], pairs of the same token here that come before
    count_sb: nl.NkiTensor  # [128, n], of a token
    weights_sb: nl.NkiTensor  # [128, 1 + n, P], in front; of nobody first
    place_sb: Any  # [128, n], of `_places`, if there are folds
    pair_of_fold_sb: Any  # [128, F * P] uint32


def compact_front(
    index_sb: nl.NkiTensor,
    weight_sb: nl.NkiTensor,
    tokens: TokenTiles,
    folds: Folds,
    dims: FoldDims,
    num_experts: int,
) -> FrontPairs:
    """Find the pairs of this core's tokens that are here, and the folds among them; store of these
    what does not need slots.

    Args:
        index_sb: [128, n * K] int32 experts, any number that is none for no expert here.
        weight_sb: [128, n * K] float32.
        tokens: of this core.
        folds: of `make_folds`.
        dims: C, P and the folds.
        num_experts: E.
    """
    n = max(1, tokens.count)
    rank_sb, here_sb = _ranks(index_sb, n, num_experts)
    shape = here_sb.shape
    count_sb, near_sb = _new((PARTITIONS, n)), _new(shape)
    nisa.tensor_reduce(dst=count_sb, data=here_sb, op=nl.add, axis=2)
    nisa.tensor_tensor(dst=near_sb, data1=weight_sb.reshape(shape), data2=here_sb, op=nl.multiply)
    weights_sb = _front(near_sb, rank_sb, dims.most)
    if not dims.tiles:
        return FrontPairs(rank_sb, count_sb, weights_sb, None, None)
    place_sb, most_sb = _places(count_sb, dims)
    index_sb, core = _fold_tokens(count_sb, place_sb, dims), nl.program_id(0)
    found_sb = _new((PARTITIONS, dims.tiles * dims.most))
    nisa.nc_n_gather(dst=found_sb, data=_flat(weights_sb), indices=index_sb)
    nisa.dma_copy(dst=folds.weights[core * PARTITIONS : (core + 1) * PARTITIONS, :], src=found_sb)
    nisa.dma_copy(dst=folds.ends[core : core + 1, :], src=_ends(most_sb, dims))
    return FrontPairs(rank_sb, count_sb, weights_sb, place_sb, index_sb)


def store_table(
    rows_TC: nl.NkiTensor,
    weights_TC: nl.NkiTensor,
    folds: Folds,
    slot_sb: nl.NkiTensor,
    front: FrontPairs,
    tokens: TokenTiles,
    dims: FoldDims,
) -> None:
    """Store the table that `combine` reads of this core's tokens, and the rows of their folds.

    Args:
        rows_TC, weights_TC: int32, -1 for none, and float32.
        folds: of `make_folds`.
        slot_sb: [128, n * K] float32, -1 for no expert here.
        front: of `compact_front`.
        tokens: of this core.
        dims: C, P and the folds.
    """
    n, C, shape = max(1, tokens.count), dims.columns, front.rank_sb.shape
    # Counted from 1, so that 0 is none.
    number_sb = _new(shape)
    nisa.tensor_scalar(dst=number_sb, data=slot_sb.reshape(shape), op0=nl.add, operand0=1.0)
    rows_sb, weights_sb = _front(number_sb, front.rank_sb, dims.most), front.weights_sb
    if dims.tiles:
        found_sb = _new((PARTITIONS, dims.tiles * dims.most))
        nisa.nc_n_gather(dst=found_sb, data=_flat(rows_sb), indices=front.pair_of_fold_sb)
        row_sb = nl.ndarray(found_sb.shape, nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=row_sb, data=found_sb, op0=nl.add, operand0=-1.0)
        first = nl.program_id(0) * PARTITIONS
        nisa.dma_copy(dst=folds.rows[first : first + PARTITIONS, :], src=row_sb)
        rows_sb, weights_sb = _with_folds(rows_sb, front, dims)
    else:
        rows_sb, weights_sb = rows_sb[:, 1 : n + 1, :], weights_sb[:, 1 : n + 1, :]
    if tokens.count == 0:
        return
    row_sb = nl.ndarray((PARTITIONS, n * C), nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=row_sb.reshape((PARTITIONS, n, C)), data=rows_sb, op0=nl.add, operand0=-1.0
    )
    flat_sb = _new((PARTITIONS, n * C))
    nisa.tensor_copy(dst=flat_sb.reshape((PARTITIONS, n, C)), src=weights_sb)
    store_per_token(rows_TC, row_sb, tokens)
    store_per_token(weights_TC, flat_sb, tokens)


def _new(shape: tuple[int, ...]) -> nl.NkiTensor:
    return nl.ndarray(shape, nl.float32, buffer=nl.sbuf)


def _ranks(index_sb: nl.NkiTensor, n: int, num_experts: int) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Return how many pairs of the same token here come before, and which are here, [128, n, K]."""
    flat = index_sb.shape
    shape = (PARTITIONS, n, flat[1] // n)
    low_sb, here_sb, zeros_sb = _new(flat), _new(flat), _new(flat)
    nisa.tensor_scalar(dst=low_sb, data=index_sb, op0=nl.greater_equal, operand0=0.0)
    apply_with(here_sb, index_sb, nl.less, float(num_experts), nl.multiply, low_sb)
    # One scan over all tokens of a partition; what precedes a token's first pair is taken off.
    nisa.memset(dst=zeros_sb, value=0.0)
    running_sb, before_sb, rank_sb = _new(flat), _new(flat), _new(shape)
    add_up(running_sb, here_sb, zeros_sb)
    nisa.tensor_tensor(dst=before_sb, data1=running_sb, data2=here_sb, op=nl.subtract)
    before_sb = before_sb.reshape(shape)
    first_sb = before_sb[:, :, 0].expand_dim(2).broadcast(2, shape[2])
    nisa.tensor_tensor(dst=rank_sb, data1=before_sb, data2=first_sb, op=nl.subtract)
    return rank_sb, here_sb.reshape(shape)


def _front(values_sb: nl.NkiTensor, rank_sb: nl.NkiTensor, most: int) -> nl.NkiTensor:
    """Return a token's values in the order of their ranks, [128, 1 + n, P]; the first token is
    nobody's, all zeros.
    """
    n = values_sb.shape[1]
    front_sb = _new((PARTITIONS, n + 1, most))
    nisa.memset(dst=front_sb[:, 0, :], value=0.0)
    # A token has one pair of a rank at most: the sum over its choices is that pair, or 0.
    for rank in range(most):
        one_sb = _new(values_sb.shape)
        apply_with(one_sb, rank_sb, nl.equal, float(rank), nl.multiply, values_sb)
        nisa.tensor_reduce(dst=front_sb[:, 1 : n + 1, rank], data=one_sb, op=nl.add, axis=2)
    return front_sb


def _places(count_sb: nl.NkiTensor, dims: FoldDims) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Return the place of each token among its partition's folds, from 1, 0 for no fold,
    [128, n], and how many it has with at least P, P - 1, ... pairs, [128, L].
    """
    shape, loops = count_sb.shape, dims.most - dims.columns
    n = shape[1]
    place_sb, zeros_sb, most_sb = _new(shape), _new(shape), _new((PARTITIONS, loops + 1))
    nisa.memset(dst=place_sb, value=0.0)
    nisa.memset(dst=zeros_sb, value=0.0)
    nisa.memset(dst=most_sb[:, 0:1], value=0.0)
    # Tokens of most pairs first: those of a loop stand behind all that were counted before.
    for loop in range(loops):
        has_sb, running_sb, found_sb, sum_sb = _new(shape), _new(shape), _new(shape), _new(shape)
        nisa.tensor_scalar(
            dst=has_sb, data=count_sb, op0=nl.equal, operand0=float(dims.most - loop)
        )
        add_up(running_sb, has_sb, zeros_sb)
        apply_with(found_sb, running_sb, nl.add, most_sb[:, loop : loop + 1], nl.multiply, has_sb)
        nisa.tensor_tensor(dst=sum_sb, data1=place_sb, data2=found_sb, op=nl.add)
        nisa.tensor_tensor(
            dst=most_sb[:, loop + 1 : loop + 2],
            data1=most_sb[:, loop : loop + 1],
            data2=running_sb[:, n - 1 : n],
            op=nl.add,
        )
        place_sb = sum_sb
    return place_sb, most_sb[:, 1 : loops + 1]


def _flat(table_sb: nl.NkiTensor) -> nl.NkiTensor:
    return table_sb.reshape((PARTITIONS, table_sb.shape[1] * table_sb.shape[2]))


def _fold_tokens(count_sb: nl.NkiTensor, place_sb: nl.NkiTensor, dims: FoldDims) -> nl.NkiTensor:
    """Return where the pairs of each fold stand among those of tokens, [128, F * P] uint32.

    A key of place, first ones largest, and token is sorted; what remains is the token.
    """
    (_, n), F, P = count_sb.shape, dims.tiles, dims.most
    step = F + 1  # beyond all numbers of tokens
    line_sb, key_sb, keys_sb = _new((PARTITIONS, n)), _new((PARTITIONS, n)), _new((PARTITIONS, F))
    nisa.iota(dst=line_sb, pattern=[[1, n]], offset=(F + 1) * step + 1, channel_multiplier=0)
    apply_with(key_sb, place_sb, nl.multiply, -float(step), nl.add, line_sb)
    nisa.memset(dst=keys_sb, value=0.0)
    apply_with(keys_sb[:, 0:n], count_sb, nl.greater, float(dims.columns), nl.multiply, key_sb)
    sorted_sb = _new((PARTITIONS, F))
    # max8 finds eight; they are taken out for the next eight.
    for first in range(0, F, _EIGHT):
        eight_sb = sorted_sb[:, first : first + _EIGHT]
        nisa.max8(dst=eight_sb, src=keys_sb)
        if first + _EIGHT < F:
            rest_sb = _new((PARTITIONS, F))
            nisa.nc_match_replace8(dst=rest_sb, data=keys_sb, vals=eight_sb, imm=0.0)
            keys_sb = rest_sb
    above_sb, token_sb, none_sb = (
        _new((PARTITIONS, F)),
        _new((PARTITIONS, F)),
        _new((PARTITIONS, F)),
    )
    nisa.iota(dst=above_sb, pattern=[[step, F]], offset=-F * step, channel_multiplier=0)
    nisa.tensor_tensor(dst=token_sb, data1=sorted_sb, data2=above_sb, op=nl.add)
    nisa.tensor_scalar(dst=none_sb, data=token_sb, op0=nl.maximum, operand0=0.0)
    pair_sb = _new((PARTITIONS, F, P))
    nisa.iota(dst=pair_sb, pattern=[[0, F], [1, P]], offset=0, channel_multiplier=0)
    index_sb = nl.ndarray((PARTITIONS, F, P), nl.uint32, buffer=nl.sbuf)
    first = none_sb.expand_dim(2).broadcast(2, P)
    apply_with(index_sb, first, nl.multiply, float(P), nl.add, pair_sb)
    return _flat(index_sb)


def _ends(most_sb: nl.NkiTensor, dims: FoldDims) -> nl.NkiTensor:
    """Return the tile at which each loop ends, on both cores the same, [1, L] int32."""
    loops = most_sb.shape[1]
    identity_sb = identity(nl.float16)
    short_sb = nl.ndarray(most_sb.shape, nl.float16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=short_sb, src=most_sb)
    # The largest over partitions: transposed by a matmul with the identity, reduced along the free
    # axis, and back into a row.
    transposed_ps = nl.ndarray((loops, PARTITIONS), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=transposed_ps, stationary=short_sb, moving=identity_sb, accumulate=False)
    largest_sb = nl.ndarray((loops, 1), nl.float16, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=largest_sb, data=transposed_ps, op=nl.maximum, axis=1)
    line_ps = nl.ndarray((1, loops), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(
        dst=line_ps,
        stationary=largest_sb,
        moving=identity_sb[0:loops, 0:loops],
        accumulate=False,
    )
    own_sb, both_sb = _new((1, loops)), _new((1, loops))
    nisa.tensor_copy(dst=own_sb, src=line_ps)
    nisa.tensor_tensor(dst=both_sb, data1=own_sb, data2=exchange(own_sb), op=nl.maximum)
    ends_sb = nl.ndarray((1, loops), nl.int32, buffer=nl.sbuf)
    begin_sb = _new((1, 1))
    nisa.memset(dst=begin_sb, value=0.0)
    for loop in range(loops):
        size, left_sb = tiles_of_iteration(dims.most - loop), _new((1, 1))
        apply_two(left_sb, both_sb[:, loop : loop + 1], nl.subtract, begin_sb, nl.maximum, 0.0)
        iterations_sb = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
        divide_up(iterations_sb, left_sb, size)
        end_sb = _new((1, 1))
        apply_with(end_sb, iterations_sb, nl.multiply, float(size), nl.add, begin_sb)
        nisa.tensor_copy(dst=ends_sb[:, loop : loop + 1], src=end_sb)
        begin_sb = end_sb
    return ends_sb


def _with_folds(
    rows_sb: nl.NkiTensor, front: FrontPairs, dims: FoldDims
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Return the first C columns, a fold alone where there is one; rows from 1, [128, n, C]."""
    count_sb, place_sb = front.count_sb, front.place_sb
    (_, n), C = count_sb.shape, dims.columns
    few_sb, many_sb = _new((PARTITIONS, n)), _new((PARTITIONS, n))
    nisa.tensor_scalar(dst=few_sb, data=count_sb, op0=nl.less_equal, operand0=float(C))
    nisa.tensor_scalar(dst=many_sb, data=count_sb, op0=nl.greater, operand0=float(C))
    first_sb, row_sb, fold_sb = _new((PARTITIONS, 1)), _new((PARTITIONS, n)), _new((PARTITIONS, n))
    # Row 1 + first_row + tile * 128 + partition, of the tile before the place.
    offset = 1 + dims.first_row + (nl.program_id(0) * dims.tiles - 1) * PARTITIONS
    nisa.iota(dst=first_sb, pattern=[[1, 1]], offset=offset, channel_multiplier=1)
    apply_two(row_sb, place_sb, nl.multiply, float(PARTITIONS), nl.add, first_sb)
    nisa.tensor_tensor(dst=fold_sb, data1=row_sb, data2=many_sb, op=nl.multiply)
    made, few_sb = [], few_sb.expand_dim(2).broadcast(2, C)
    fronts, added = (rows_sb, front.weights_sb), (fold_sb, many_sb)
    for each in range(2):
        table_sb = _new((PARTITIONS, n, C))
        nisa.tensor_tensor(
            dst=table_sb, data1=fronts[each][:, 1 : n + 1, 0:C], data2=few_sb, op=nl.multiply
        )
        nisa.tensor_tensor(
            dst=table_sb[:, :, 0], data1=table_sb[:, :, 0], data2=added[each], op=nl.add
        )
        made.append(table_sb)
    return made[0], made[1]
