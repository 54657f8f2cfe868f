"""Which experts a decode step touches, and how much of each a token takes.

For a launch with index d[t, k] (local numbers; others' experts are out of range):

    list     touched experts in ascending order, then NO_ENTRY                     [1, W]
    weight   weight[t, w] = sum over k with d[t, k] == list[w] of affinity[t, k]   [T, W]

and the number of touched experts in registers, as ends of the loops over the list. Every number is
an integer below 2**24, exact in float32.
"""

from dataclasses import dataclass
from typing import Any

import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

from nki_kernels.decode_config import (
    DecodeConfig,
    entry_stride,
    is_direct,
    list_width,
)
from nki_kernels.plans import PARTITIONS

VALUES = 8  # that nc_match_replace8 looks for at once
NO_EXPERT = -2.0  # matches no expert
NO_ENTRY = -(1 << 16)  # in the list past its end; matches no choice, not even another rank's


@dataclass
class Routing(NKIObject):
    """What the loop over experts goes by.

    Attributes:
        list_sb: on partition 0 [W] int32, expert of each entry.
        ends: registers, list positions where groups of `unroll` entries end, then groups of half as
            many, and so on, then the list; empty if the length of the list is known.
        local: per 128 tokens [tokens, K or more] float32, local number of each choice.
        core: number of this core.
        weights: per 128 tokens [tokens, W] float32: factor of the expert's output; see `weigh`.
        inputs: the same, factor of its input; empty unless scaling is "pre".
    """

    list_sb: nl.NkiTensor
    ends: list[nl.VirtualRegister]
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
) -> Routing:
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
    ends: list[nl.VirtualRegister] = []
    if is_direct(config):
        # A missing choice (-1) loads expert 0 and counts for nothing.
        list_sb = nl.ndarray((1, width), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=list_sb, data=index_tiles[0], op0=nl.maximum, operand0=0.0)
        return Routing(list_sb, ends, index_tiles, core, [], [])
    if config.mode == "all":
        list_sb = nl.ndarray((1, width), dtype=nl.int32, buffer=nl.sbuf)
        nisa.iota(dst=list_sb, pattern=[[1, width]], offset=0, channel_multiplier=0)
        local = local_experts(config, index_tiles, first_sb)
        return Routing(list_sb, ends, local, core, [], [])
    local = local_experts(config, index_tiles, first_sb)
    list_sb = find_touched(config, local, bank_ps, ones_sb)
    return Routing(list_sb, loop_ends(config, list_sb), local, core, [], [])


def local_experts(
    config: DecodeConfig, index_tiles: list[nl.NkiTensor], first_sb: nl.NkiTensor
) -> list[nl.NkiTensor]:
    """Return per 128 tokens [tokens, K'] float32 local numbers, K' the next multiple of 8."""
    first_float_sb = nl.ndarray((first_sb.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=first_float_sb, src=first_sb)
    columns = (config.K + VALUES - 1) // VALUES * VALUES
    local = []
    for index_sb in index_tiles:
        rows = index_sb.shape[0]
        local_sb = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.sbuf)
        if config.K < columns:
            nisa.memset(dst=local_sb, value=NO_EXPERT)
        nisa.tensor_scalar(
            dst=local_sb[0:rows, 0 : config.K],
            data=index_sb,
            op0=nl.subtract,
            operand0=first_float_sb[0:rows, 0:1],
        )
        local.append(local_sb)
    return local


def find_touched(
    config: DecodeConfig,
    local: list[nl.NkiTensor],
    bank_ps: nl.NkiTensor,
    ones_sb: nl.NkiTensor,
) -> nl.NkiTensor:
    """Return [128, E + 1] int32: on partition 0 the touched experts, NO_ENTRY, their number."""
    E = config.E
    expert_sb = nl.ndarray((PARTITIONS, E), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=expert_sb, pattern=[[1, E]], offset=0, channel_multiplier=0)
    for tile in range(len(local)):
        rows, columns = local[tile].shape
        marked_sb = expert_sb[0:rows, 0:E]
        for group in range(columns // VALUES):
            next_sb = nl.ndarray((rows, E), dtype=nl.float32, buffer=nl.sbuf)
            wanted = local[tile][0:rows, group * VALUES : (group + 1) * VALUES]
            nisa.nc_match_replace8(dst=next_sb, data=marked_sb, vals=wanted, imm=-1.0)
            marked_sb = next_sb
        chosen_sb = nl.ndarray((rows, E), dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=chosen_sb, data=marked_sb, op0=nl.equal, operand0=-1.0)
        ones_16_sb = nl.ndarray((rows, PARTITIONS), dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.memset(dst=ones_16_sb, value=1.0, engine=nisa.engine.gpsimd)
        nisa.nc_matmul(
            dst=bank_ps[0:PARTITIONS, 0:E],
            stationary=ones_16_sb,
            moving=chosen_sb,
            accumulate=tile > 0,
        )
    count_sb = nl.ndarray((PARTITIONS, E), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=count_sb, src=bank_ps[0:PARTITIONS, 0:E])
    touched_sb = nl.ndarray((PARTITIONS, E + 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.nonzero_with_count(dst=touched_sb, src=count_sb, padding_val=NO_ENTRY)
    return touched_sb


def loop_ends(config: DecodeConfig, touched_sb: nl.NkiTensor) -> list[nl.VirtualRegister]:
    """Return registers with the list positions at which the loops over groups end.

    Cores that take alternate entries do so up to an even position; the last end is the list's.
    """
    stride = entry_stride(config)
    count_sb = touched_sb[0:1, config.E : config.E + 1]
    ends = []
    size = config.unroll
    while size > 0:
        end_sb = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=end_sb, data=count_sb, op0=nl.bitwise_and, operand0=-(stride * size))
        end = nisa.register_alloc()
        nisa.register_load(end, end_sb)
        ends.append(end)
        size = size // 2
    if stride > 1:
        last = nisa.register_alloc()
        nisa.register_load(last, count_sb)
        ends.append(last)
    return ends


def weigh(
    config: DecodeConfig,
    routing: Routing,
    affinity_tiles: list[nl.NkiTensor],
    bank_ps: nl.NkiTensor,
    ones_sb: nl.NkiTensor,
) -> None:
    """Fill in the factors of outputs and of inputs of every entry; see `Routing`.

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
    nisa.nc_matmul(
        dst=bank_ps[0:PARTITIONS, 0:width],
        stationary=ones_sb[0:1, 0:PARTITIONS],
        moving=list_float_sb,
        accumulate=False,
    )
    wide_sb = nl.ndarray((PARTITIONS, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=wide_sb, src=bank_ps[0:PARTITIONS, 0:width])
    for tile in range(len(routing.local)):
        local_sb, affinity_sb = routing.local[tile], affinity_tiles[tile]
        routing.weights.append(_table(config, local_sb, affinity_sb, wide_sb, counts))
        if config.scaling == "pre":
            routing.inputs.append(_table(config, local_sb, affinity_sb, wide_sb, False))


def _row(
    config: DecodeConfig, routing: Routing, affinity_sb: nl.NkiTensor, counts: bool
) -> nl.NkiTensor:
    """Return [1, K] float32: the affinities of a single token, or 1; 0 for a missing choice."""
    row_sb = nl.ndarray((1, config.K), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=row_sb, data=routing.local[0], op0=nl.greater_equal, operand0=0.0)
    if not counts:
        nisa.tensor_tensor(dst=row_sb, data1=row_sb, data2=affinity_sb, op=nl.multiply)
    return row_sb


def _table(
    config: DecodeConfig,
    local_sb: nl.NkiTensor,
    affinity_sb: nl.NkiTensor,
    wide_sb: nl.NkiTensor,
    counts: bool,
) -> nl.NkiTensor:
    """Return [tokens, W] float32: a token's affinity to every entry, or 1 where it chose it."""
    rows, width = local_sb.shape[0], wide_sb.shape[1]
    table_sb = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=table_sb, value=0.0)
    term_sb = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
    for k in range(config.K):
        nisa.tensor_scalar(
            dst=term_sb,
            data=wide_sb[0:rows, 0:width],
            op0=nl.equal,
            operand0=local_sb[0:rows, k : k + 1],
            op1=nl.multiply,
            operand1=1.0 if counts else affinity_sb[0:rows, k : k + 1],
        )
        nisa.tensor_tensor(
            dst=table_sb[0:rows, 0:width],
            data1=table_sb[0:rows, 0:width],
            data2=term_sb,
            op=nl.add,
        )
    return table_sb
