"""Which experts a decode step touches, and how much of each a token takes.

For a launch with index d[t, k] (local numbers; others' experts are out of range):

    list     touched experts in ascending order, then NO_ENTRY                     [1, W + 1]
    weight   weight[t, w] = sum over k with d[t, k] == list[w] of affinity[t, k]   [T, W + 1]

and the number of touched experts in registers, as ends of the loops over the list. Every number is
an integer below 2**24, exact in float32.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

from nki_kernels.decode_config import (
    DecodeConfig,
    core_chunks,
    entry_stride,
    is_direct,
    list_width,
    splits_experts,
)
from nki_kernels.plans import PARTITIONS

VALUES = 8  # that nc_match_replace8 looks for at once
NO_EXPERT = -2.0  # matches no expert
NO_ENTRY = -(1 << 16)  # in the list past its end; matches no choice, not even another rank's


@dataclass
class Routing(NKIObject):
    """What the loop over experts goes by.

    Attributes:
        list_sb: [1, W + 1] int32, expert of each entry.
        weights: per 128 tokens [tokens, W + 1] float32: factor of the expert's output.
        inputs: the same, factor of its input; empty unless scaling is "pre".
        ends: registers, list positions where groups of `unroll` entries end, then groups of half as
            many, and so on; empty if the length of the list is known.
        core: number of this core.
    """

    list_sb: nl.NkiTensor
    weights: list[nl.NkiTensor]
    inputs: list[nl.NkiTensor]
    ends: list[nl.VirtualRegister]
    core: int


def route(
    config: DecodeConfig,
    index_tiles: list[nl.NkiTensor],
    affinity_tiles: list[nl.NkiTensor],
    first_sb: nl.NkiTensor,
    bank_ps: nl.NkiTensor,
    ones_sb: nl.NkiTensor,
    core: int,
) -> Routing:
    """Work out the touched experts and the weights of the tokens.

    Args:
        config: sizes and mode.
        index_tiles: per 128 tokens [tokens, K] int32, global experts.
        affinity_tiles: per 128 tokens [tokens, K] float32.
        first_sb: [tokens, 1] int32 in every partition: global number of local expert 0.
        bank_ps: a PSUM bank to work in.
        ones_sb: [128, 128] float32 of ones.
        core: number of this core.
    """
    first_float_sb = nl.ndarray((first_sb.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=first_float_sb, src=first_sb)
    width = list_width(config)
    groups = (config.K + VALUES - 1) // VALUES
    local = []
    for index_sb in index_tiles:
        rows = index_sb.shape[0]
        local_sb = nl.ndarray((rows, groups * VALUES), dtype=nl.float32, buffer=nl.sbuf)
        if config.K < groups * VALUES:
            nisa.memset(dst=local_sb, value=NO_EXPERT)
        nisa.tensor_scalar(
            dst=local_sb[0:rows, 0 : config.K],
            data=index_sb,
            op0=nl.subtract,
            operand0=first_float_sb[0:rows, 0:1],
        )
        local.append(local_sb)
    list_sb = nl.ndarray((1, width + 1), dtype=nl.int32, buffer=nl.sbuf)
    ends: list[nl.VirtualRegister] = []
    if config.mode == "all":
        nisa.iota(dst=list_sb, pattern=[[1, width + 1]], offset=0, channel_multiplier=0)
    elif is_direct(config):
        # A missing choice loads expert 0 and counts for nothing.
        nisa.tensor_scalar(
            dst=list_sb[0:1, 0:width], data=local[0][0:1, 0:width], op0=nl.maximum, operand0=0.0
        )
        weights, inputs = weigh_choices(config, local[0], affinity_tiles[0])
        return Routing(list_sb, weights, inputs, ends, core)
    else:
        touched_sb = find_touched(config, local, bank_ps, ones_sb)
        ends = loop_ends(config, touched_sb)
        nisa.memset(dst=list_sb, value=NO_ENTRY)
        nisa.tensor_copy(dst=list_sb[0:1, 0:width], src=touched_sb[0:1, 0:width])
    weights, inputs = weigh(config, local, affinity_tiles, list_sb, bank_ps, ones_sb)
    if len(ends) > 0 and splits_experts(config) and core == 1:
        fill_first_slots(config, list_sb)
    return Routing(list_sb, weights, inputs, ends, core)


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

    Cores that take alternate entries both go to the next even position.
    """
    stride = entry_stride(config)
    padded_sb = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    count_sb = touched_sb[0:1, config.E : config.E + 1]
    nisa.tensor_scalar(dst=padded_sb, data=count_sb, op0=nl.add, operand0=stride - 1)
    ends = []
    size = config.unroll
    while size > 0:
        end_sb = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=end_sb, data=padded_sb, op0=nl.bitwise_and, operand0=-(stride * size)
        )
        end = nisa.register_alloc()
        nisa.register_load(end, end_sb)
        ends.append(end)
        size = size // 2
    return ends


def fill_first_slots(config: DecodeConfig, list_sb: nl.NkiTensor) -> None:
    """Let missing entries that come first in their slot load the first expert of the list.

    Their weights count for nothing, but must be numbers. Later ones load nothing: what the slot
    held before will do.
    """
    chunks = core_chunks(config)
    entries = (config.slots + chunks - 1) // chunks
    size = min(list_sb.shape[1], config.num_cores * entries)
    missing_sb = nl.ndarray((1, size), dtype=nl.float32, buffer=nl.sbuf)
    filled_sb = nl.ndarray((1, size), dtype=nl.float32, buffer=nl.sbuf)
    first_sb = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=first_sb, data=list_sb[0:1, 0:1], op0=nl.add, operand0=float(-NO_ENTRY))
    nisa.tensor_scalar(
        dst=missing_sb, data=list_sb[0:1, 0:size], op0=nl.less, operand0=0.0, op1=nl.multiply,
        operand1=first_sb,
    )  # fmt: skip
    nisa.tensor_tensor(dst=filled_sb, data1=list_sb[0:1, 0:size], data2=missing_sb, op=nl.add)
    nisa.tensor_copy(dst=list_sb[0:1, 0:size], src=filled_sb)


def weigh_choices(
    config: DecodeConfig, local_sb: nl.NkiTensor, affinity_sb: nl.NkiTensor
) -> tuple[list[nl.NkiTensor], list[nl.NkiTensor]]:
    """Return `weigh` of a list that is the index row of a single token."""
    width = config.K
    chosen_sb = nl.ndarray((1, width + 1), dtype=nl.float32, buffer=nl.sbuf)
    given_sb = nl.ndarray((1, width + 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=chosen_sb[0:1, 0:width],
        data=local_sb[0:1, 0:width],
        op0=nl.greater_equal,
        operand0=0.0,
    )
    if config.scaling == "none":
        return [chosen_sb], []
    nisa.tensor_tensor(
        dst=given_sb[0:1, 0:width],
        data1=chosen_sb[0:1, 0:width],
        data2=affinity_sb,
        op=nl.multiply,
    )
    if config.scaling == "pre":
        return [chosen_sb], [given_sb]
    return [given_sb], []


def weigh(
    config: DecodeConfig,
    local: list[nl.NkiTensor],
    affinity_tiles: list[nl.NkiTensor],
    list_sb: nl.NkiTensor,
    bank_ps: nl.NkiTensor,
    ones_sb: nl.NkiTensor,
) -> tuple[list[nl.NkiTensor], list[nl.NkiTensor]]:
    """Return the factors of outputs and of inputs of every entry; see `Routing`."""
    width = list_width(config)
    list_float_sb = nl.ndarray((1, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=list_float_sb, src=list_sb[0:1, 0:width])
    nisa.nc_matmul(
        dst=bank_ps[0:PARTITIONS, 0:width],
        stationary=ones_sb[0:1, 0:PARTITIONS],
        moving=list_float_sb,
        accumulate=False,
    )
    wide_sb = nl.ndarray((PARTITIONS, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=wide_sb, src=bank_ps[0:PARTITIONS, 0:width])
    weights = []
    inputs = []
    for tile in range(len(local)):
        affinity_sb = affinity_tiles[tile]
        chosen = config.scaling != "post"
        weights.append(_table(config, local[tile], affinity_sb, wide_sb, chosen))
        if config.scaling == "pre":
            inputs.append(_table(config, local[tile], affinity_sb, wide_sb, False))
    return weights, inputs


def _table(
    config: DecodeConfig,
    local_sb: nl.NkiTensor,
    affinity_sb: nl.NkiTensor,
    wide_sb: nl.NkiTensor,
    counts: bool,
) -> nl.NkiTensor:
    """Return [tokens, W + 1] float32: a token's affinity to every entry, or 1 where it chose it."""
    rows, width = local_sb.shape[0], wide_sb.shape[1]
    table_sb = nl.ndarray((rows, width + 1), dtype=nl.float32, buffer=nl.sbuf)
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
