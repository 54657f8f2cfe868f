"""Which experts a decode step touches, and how much of each a token takes.

For a launch with index d[t, k] (local numbers; others' experts are out of range):

    list     touched experts in ascending order, then _NO_ENTRY                     [1, W]
    weight   weight[t, w] = sum over k with d[t, k] == list[w] of affinity[t, k]   [T, W]

and where the loops over the list end. Every number is an integer below 2**24, exact in float32.
"""

from dataclasses import dataclass
from typing import Any

import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

from nki_kernels.common.arithmetic import add, apply_two
from nki_kernels.common.chip import BANK_FLOATS, PARTITIONS
from nki_kernels.common.memory import allocate, allocate_rows
from nki_kernels.decode.config import (
    DecodeConfig,
    entry_stride,
    is_direct,
    list_width,
    loop_sizes,
)
from nki_kernels.decode.memory import routing_table

_VALUES = 8  # that nc_match_replace8 looks for at once
_NO_EXPERT = -2.0  # matches no expert
_NO_ENTRY = -(1 << 16)  # in the list past its end; matches no choice, not even another rank's


@dataclass
class Listed(NKIObject):
    """What the loop over experts goes by.

    Attributes:
        list_sb: on partition 0 int32, expert of each entry.
        ends: (1, 1) int32 tiles, empty if the length is known: list positions where iterations of
            each of `loop_sizes` end, and behind what the cores share, if anything may be.
        local: per 128 tokens [tokens, K or more] float32, local number of each choice, from 1 on;
            the index itself if `is_direct`.
        core: number of this core.
        weights: per 128 tokens [tokens, W] float32: factor of the expert's output; see
            `weigh`.
        inputs: the same, factor of its input; empty unless scaling is "pre".
    """

    list_sb: nl.NkiTensor
    ends: list[nl.NkiTensor]
    local: list[nl.NkiTensor]
    core: int
    weights: list[nl.NkiTensor]
    inputs: list[nl.NkiTensor]


def list_experts(
    config: DecodeConfig,
    index_tiles: list[nl.NkiTensor],
    first_sb: Any,
    bank_ps: nl.NkiTensor,
    ones_sb: nl.NkiTensor,
    core: int,
) -> Listed:
    """Work out which experts are touched; `weigh` adds what the tokens take of them.

    Args:
        config: sizes and mode.
        index_tiles: per 128 tokens [tokens, K] int32, global experts.
        first_sb: [tokens, 1] int32, global number of local expert 0; not used if `is_direct`.
        bank_ps: a PSUM bank to work in.
        ones_sb: [128, 128] float32 of ones.
        core: number of this core.
    """
    width = list_width(config)
    ends: list[nl.NkiTensor] = []
    if is_direct(config):
        # A missing choice (-1) loads expert 0 and counts for nothing.
        list_sb = allocate(routing_table(config).listed)[0]
        nisa.tensor_scalar(
            dst=list_sb[0:1, 0:width], data=index_tiles[0], op0=nl.maximum, operand0=0.0
        )
        return Listed(list_sb, ends, index_tiles, core, [], [])
    if config.mode == "all":
        list_sb = allocate(routing_table(config).listed)[0]
        nisa.iota(dst=list_sb, pattern=[[1, list_sb.shape[1]]], offset=0, channel_multiplier=0)
        local = _local_experts(config, index_tiles, first_sb)
        return Listed(list_sb, ends, local, core, [], [])
    mask_sb = _loop_masks(config)
    local = _local_experts(config, index_tiles, first_sb)
    list_sb = _find_touched(config, local, bank_ps)
    return Listed(list_sb, _loop_ends(config, list_sb, mask_sb), local, core, [], [])


def _local_experts(
    config: DecodeConfig, index_tiles: list[nl.NkiTensor], first_sb: Any
) -> list[nl.NkiTensor]:
    """Return per 128 tokens [tokens, K'] float32 local numbers from 1 on, K' a multiple of 8."""
    columns = (config.K + _VALUES - 1) // _VALUES * _VALUES
    local = []
    for index_sb in index_tiles:
        local_sb = nl.ndarray((index_sb.shape[0], columns), dtype=nl.float32, buffer=nl.sbuf)
        if config.K < columns:
            nisa.memset(dst=local_sb, value=_NO_EXPERT)
        local.append(local_sb)
    if config.num_experts == config.E:
        for tile in range(len(local)):
            rows = local[tile].shape[0]
            nisa.tensor_scalar(
                dst=local[tile][0:rows, 0 : config.K],
                data=index_tiles[tile],
                op0=nl.add,
                operand0=1.0,
            )
        return local
    first_float_sb = nl.ndarray((first_sb.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=first_float_sb, data=first_sb, op0=nl.add, operand0=-1.0)
    for tile in range(len(local)):
        rows = local[tile].shape[0]
        nisa.tensor_scalar(
            dst=local[tile][0:rows, 0 : config.K],
            data=index_tiles[tile],
            op0=nl.subtract,
            operand0=first_float_sb[0:rows, 0:1],
        )
    return local


def _find_touched(
    config: DecodeConfig, local: list[nl.NkiTensor], bank_ps: nl.NkiTensor
) -> nl.NkiTensor:
    """Return [128, E + 1] int32: on partition 0 touched experts, _NO_ENTRY, their number.

    The number is in column E.
    """
    E = config.E
    # Numbers from 1 on, and 0 where a token chose the expert: a column of n that all T tokens left
    # alone adds up to n T.
    searched = max(E, _VALUES)  # as many as are looked for, at least
    expert_sb = nl.ndarray((PARTITIONS, searched), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=expert_sb, pattern=[[1, searched]], offset=1, channel_multiplier=0)
    left_sb = nl.ndarray((PARTITIONS, E), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=left_sb, pattern=[[config.T, E]], offset=config.T, channel_multiplier=0)
    ones_sb = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones_sb, value=1.0, engine=nisa.engine.gpsimd)
    touched_sb = allocate(routing_table(config).listed)[0]
    marked = []
    counts = []  # one
    for first in range(0, E, BANK_FLOATS):
        bank = slice(first, min(first + BANK_FLOATS, E))
        sums_ps = bank_ps[0:PARTITIONS, 0 : bank.stop - first]
        for tile in range(len(local)):
            rows = local[tile].shape[0]
            if first == 0:
                marked.append(_mark_chosen(expert_sb, local[tile]))
            nisa.nc_matmul(
                dst=sums_ps,
                stationary=ones_sb[0:rows, 0:PARTITIONS],
                moving=marked[tile][0:rows, bank],
                accumulate=tile > 0,
            )
        if first == 0:
            counts.append(nl.ndarray((PARTITIONS, E), dtype=nl.float32, buffer=nl.sbuf))
        nisa.tensor_tensor(
            dst=counts[0][:, bank], data1=sums_ps, data2=left_sb[:, bank], op=nl.not_equal
        )
    listed_sb = touched_sb[0:PARTITIONS, 0 : E + 1]
    nisa.nonzero_with_count(dst=listed_sb, src=counts[0], padding_val=_NO_ENTRY)
    return touched_sb


def _mark_chosen(expert_sb: nl.NkiTensor, local_sb: nl.NkiTensor) -> nl.NkiTensor:
    """Return the numbers of experts for every token, 0 where it chose them."""
    rows, columns = local_sb.shape
    searched = expert_sb.shape[1]
    marked_sb = expert_sb[0:rows, 0:searched]
    for first in range(0, columns, _VALUES):
        next_sb = nl.ndarray((rows, searched), dtype=nl.float32, buffer=nl.sbuf)
        wanted = local_sb[0:rows, first : first + _VALUES]
        nisa.nc_match_replace8(dst=next_sb, data=marked_sb, vals=wanted, imm=0.0)
        marked_sb = next_sb
    return marked_sb


def _loop_masks(config: DecodeConfig) -> nl.NkiTensor:
    """Return [1, n] int32 that leave of the list's length where each loop over it ends."""
    masks = []
    for size in loop_sizes(config):
        masks.append(-entry_stride(config) * size)  # powers of two
    if entry_stride(config) > 1:
        masks.append(-1)
    mask_sb = nl.ndarray((1, len(masks)), dtype=nl.int32, buffer=nl.sbuf)
    for k in range(len(masks)):
        nisa.memset(dst=mask_sb[0:1, k : k + 1], value=masks[k], engine=nisa.engine.gpsimd)
    return mask_sb


def _loop_ends(
    config: DecodeConfig, touched_sb: nl.NkiTensor, mask_sb: nl.NkiTensor
) -> list[nl.NkiTensor]:
    """Return (1, 1) tiles with the list positions at which the loops over iterations end."""
    count = mask_sb.shape[1]
    end_sb = nl.ndarray((1, count), dtype=nl.int32, buffer=nl.sbuf)
    length_sb = touched_sb[0:1, config.E : config.E + 1].broadcast(1, count)
    nisa.tensor_tensor(dst=end_sb, data1=length_sb, data2=mask_sb, op=nl.bitwise_and)
    ends = []
    for k in range(count):
        ends.append(end_sb[0:1, k : k + 1])
    return ends


def weigh(
    config: DecodeConfig,
    routing: Listed,
    affinity_tiles: list[nl.NkiTensor],
    bank_ps: nl.NkiTensor,
    ones_sb: nl.NkiTensor,
) -> None:
    """Fill in the factors of outputs and of inputs of every entry; see `Listed`.

    Args:
        config: sizes and mode.
        routing: the list.
        affinity_tiles: per 128 tokens [tokens, K] float32.
        bank_ps: a PSUM bank to work in.
        ones_sb: [128, 128] float32 of ones.
    """
    counts = config.scaling != "post"
    if is_direct(config):
        routing.weights.append(_row(config, routing, affinity_tiles[0], counts))
        if config.scaling == "pre":
            routing.inputs.append(_row(config, routing, affinity_tiles[0], False))
        return
    width = list_width(config)
    list_float_sb = nl.ndarray((1, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=list_float_sb, src=routing.list_sb[0:1, 0:width])
    wide = []  # one
    for first in range(0, width, BANK_FLOATS):
        bank = slice(first, min(first + BANK_FLOATS, width))
        spread_ps = bank_ps[0:PARTITIONS, 0 : bank.stop - first]
        nisa.nc_matmul(
            dst=spread_ps,
            stationary=ones_sb[0:1, 0:PARTITIONS],
            moving=list_float_sb[0:1, bank],
            accumulate=False,
        )
        if first == 0:
            wide.append(nl.ndarray((PARTITIONS, width), dtype=nl.float32, buffer=nl.sbuf))
        nisa.tensor_scalar(dst=wide[0][:, bank], data=spread_ps, op0=nl.add, operand0=1.0)
    for tile in range(len(routing.local)):
        local_sb, affinity_sb = routing.local[tile], affinity_tiles[tile]
        routing.weights.append(_table(config, local_sb, affinity_sb, wide[0], counts))
        if config.scaling == "pre":
            routing.inputs.append(_table(config, local_sb, affinity_sb, wide[0], False))


def _row(
    config: DecodeConfig, routing: Listed, affinity_sb: nl.NkiTensor, counts: bool
) -> nl.NkiTensor:
    """Return [1, K] float32: affinities of a single token, or 1; 0 for a missing choice."""
    K = config.K
    row_sb = allocate(routing_table(config).weights)[0]
    chosen_sb = row_sb[0:1, 0:K]
    nisa.tensor_scalar(dst=chosen_sb, data=routing.local[0], op0=nl.greater_equal, operand0=0.0)
    if not counts:
        nisa.tensor_tensor(dst=chosen_sb, data1=chosen_sb, data2=affinity_sb, op=nl.multiply)
    return row_sb


def _table(
    config: DecodeConfig,
    local_sb: nl.NkiTensor,
    affinity_sb: nl.NkiTensor,
    wide_sb: nl.NkiTensor,
    counts: bool,
) -> nl.NkiTensor:
    """Return [tokens, W] float32: affinities to every entry, or 1 where it was chosen."""
    rows, width = local_sb.shape[0], wide_sb.shape[1]
    table_sb = allocate_rows(routing_table(config).weights, rows)
    nisa.memset(dst=table_sb, value=0.0)
    term_sb = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
    for k in range(config.K):
        expert, worth = local_sb[0:rows, k : k + 1], 1.0
        if not counts:
            worth = affinity_sb[0:rows, k : k + 1]
        apply_two(term_sb, wide_sb[0:rows, 0:width], nl.equal, expert, nl.multiply, worth)
        add(table_sb[0:rows, 0:width], table_sb[0:rows, 0:width], term_sb)
    return table_sb
