"""One iteration of the loop over list entries: what loads when, and what computes when.

An iteration is some entries (experts) of each core, an item is a part of a chunk of one of them. It
loads what it uses, and leaves nothing on chip for another one but the sums: public kernels show no
loop whose transfers are under way from iteration to iteration.

1. Look up the experts of the iteration, and what tokens take of them.
2. Ask for the first items, as many as there are weight buffers: gate and up of an item and the down
   weights that are used after them by turns.
3. Project an item into I (`_start_item`), then load gate and up of the item that takes its buffer:
   nobody reads the old ones any more.
4. Project a group of items out of I (`_finish_group`) when the items after it have been projected
   in, so that the tensor engine has work while activations are computed. Then load down weights
   into its buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

from nki_kernels.decode.buffers import DecodeBuffers, DecodeOperands
from nki_kernels.decode.config import (
    DecodeConfig,
    entry_stride,
    group_size,
    loads_bias,
    run_of_numbers,
    shares_halves,
    splits_experts,
)
from nki_kernels.decode.list import Listed
from nki_kernels.decode.out import Group, keep_scales, project_out
from nki_kernels.decode.stages import (
    load_in,
    load_out,
    project_half,
    project_in,
    spread_column,
)


@dataclass
class Pipeline(NKIObject):
    """The items of an iteration, in order.

    Attributes:
        own: the items of an entry that are this core's, by their number in the expert.
        begin, end: numbers of the iteration's items.
        is_halved: whether its entry is shared by halves; see `project_half`.
        bias: what this core multiplies the down bias with: where the cores share an expert, one
            adds it, and the other one zeros.
        experts: (1, 1) int32 tiles.
        weights, inputs: tables with a column per entry: the iteration's from `column` on, by
            `step`.
    """

    own: list[int]
    begin: int
    end: int
    is_halved: bool
    bias: float
    experts: list[nl.NkiTensor]
    weights: list[nl.NkiTensor]
    inputs: list[nl.NkiTensor]
    column: int
    step: int


def run_iteration(
    config: DecodeConfig,
    b: DecodeBuffers,
    x: DecodeOperands,
    turned_sb: nl.NkiTensor,
    routing: Listed,
    pipeline: Pipeline,
) -> None:
    """Compute some list entries of this core.

    Args:
        config, b, x: sizes, buffers, the experts in HBM.
        turned_sb: x^T.
        routing: list and weights.
        pipeline: which ones.
    """
    if pipeline.begin == pipeline.end:
        return
    _load_first(config, b, x, pipeline)
    groups = _make_groups(config, pipeline)
    for item in range(pipeline.begin, pipeline.end):
        _start_item(config, b, x, turned_sb, routing.core, pipeline, item)
        for group in groups:
            if group.after == item:
                _finish_group(config, b, x, pipeline, group)
    for group in groups:
        if group.after >= pipeline.end:
            _finish_group(config, b, x, pipeline, group)


def _load_first(
    config: DecodeConfig, b: DecodeBuffers, x: DecodeOperands, pipeline: Pipeline
) -> None:
    """Ask for the first items of an iteration, in the order of use."""
    begin, count = pipeline.begin, min(pipeline.end - pipeline.begin, config.weight_buffers)
    for turn in range(count + config.parts):
        if turn < count:
            _load_item_in(config, b, x, pipeline, begin + turn)
        if turn >= config.parts:
            _load_item_out(config, b, x, pipeline, begin + turn - config.parts)


def make_pipeline(
    config: DecodeConfig, b: DecodeBuffers, routing: Listed, position: Any, size: int
) -> Pipeline:
    """Return what an iteration does, once its experts are looked up.

    Args:
        config, b: sizes, buffers.
        routing: list and weights.
        position: list position of the iteration, an int or a register.
        size: entries of each core; 0 for one entry whose chunks the cores share.
    """
    own, is_twice = _own_items(config, routing.core, size), False
    if not isinstance(position, int) and len(_own_items(config, 1, size)) == 0:
        # In a loop the cores have the same instructions: the other one computes it for nothing.
        own, is_twice = _own_items(config, 0, size), routing.core > 0
    first = routing.core if splits_experts(config) and size > 0 else 0
    is_halved = size == 0 and shares_halves(config)
    begin = own[0] if is_halved else 0
    count = max(1, size)
    end = begin + count * len(own)
    experts = []
    if isinstance(position, int):
        for entry in range(count):
            number = position + first + entry * entry_stride(config)
            experts.append(routing.list_sb[0:1, number : number + 1])
        column, step = position + first, entry_stride(config)
        weights, inputs = routing.weights, routing.inputs
    else:
        _copy_entries(config, b.experts[0:1, 0:count], routing.list_sb, position, first)
        for tile in range(len(routing.weights)):
            columns = b.weights[tile][:, 0:count]
            _copy_entries(config, columns, routing.weights[tile], position, first)
        for tile in range(len(routing.inputs)):
            columns = b.inputs[tile][:, 0:count]
            _copy_entries(config, columns, routing.inputs[tile], position, first)
        if _is_shared(config, size) and len(_own_items(config, 1, size)) == 0:
            for table_sb in b.weights + b.inputs[0 : len(routing.inputs)]:
                column_sb = table_sb[:, 0:1]
                nisa.tensor_scalar(
                    dst=column_sb,
                    data=column_sb,
                    op0=nl.multiply,
                    operand0=0.0 if is_twice else 1.0,
                )
        for entry in range(count):
            experts.append(b.experts[0:1, entry : entry + 1])
        column, step, weights, inputs = 0, 1, b.weights, b.inputs
    bias = 0.0 if _is_shared(config, size) and routing.core > 0 else 1.0
    return Pipeline(own, begin, end, is_halved, bias, experts, weights, inputs, column, step)


def _is_shared(config: DecodeConfig, size: int) -> bool:
    """Whether the cores share the experts of an iteration."""
    return config.num_cores > 1 and not (splits_experts(config) and size > 0)


def _own_items(config: DecodeConfig, core: int, size: int) -> list[int]:
    """Return which items of its experts a core computes."""
    count = config.chunks * config.parts
    if config.num_cores == 1 or (splits_experts(config) and size > 0):
        return run_of_numbers(0, count)
    half = count // 2 if shares_halves(config) else (config.chunks + 1) // 2 * config.parts
    return run_of_numbers(0, half) if core == 0 else run_of_numbers(half, count)


def _place_of(pipeline: Pipeline, item: int) -> tuple[int, int]:
    """Return the entry of an item among those of the iteration, and its number within the entry."""
    number, count = item - pipeline.begin, len(pipeline.own)
    return number // count, number % count


def _start_item(
    config: DecodeConfig,
    b: DecodeBuffers,
    x: DecodeOperands,
    turned_sb: nl.NkiTensor,
    core: int,
    pipeline: Pipeline,
    item: int,
) -> None:
    """Do the gate and up projections of an item, then load what may follow."""
    count = len(pipeline.own)
    entry, own = _place_of(pipeline, item)
    part = item % config.parts
    buffer = item % config.weight_buffers
    if own == 0:
        column = pipeline.column + entry * pipeline.step
        spread_column(
            config, b, pipeline.weights, pipeline.inputs, column, entry % 2, pipeline.bias
        )
    if pipeline.is_halved:
        project_half(config, b, turned_sb, buffer, item, entry % 2, core)
    else:
        is_last = part == config.parts - 1
        project_in(config, b, turned_sb, buffer, item, entry % 2, part == 0, is_last)
    if own == min(count, config.parts) - 1:
        keep_scales(config, b, buffer, entry % 2)
    _load_item_in(config, b, x, pipeline, item + config.weight_buffers)


def _finish_group(
    config: DecodeConfig,
    b: DecodeBuffers,
    x: DecodeOperands,
    pipeline: Pipeline,
    group: Group,
) -> None:
    """Do the down projections of a group, then load what may follow."""
    project_out(config, b, group)
    for done in range(group.item, group.item + group.size):
        _load_item_out(config, b, x, pipeline, done + config.weight_buffers)


def _make_groups(config: DecodeConfig, pipeline: Pipeline) -> list[Group]:
    """Cut the items of an iteration into groups, none of two experts, nor of parts of two."""
    count = len(pipeline.own)
    together = count if config.parts == 1 else min(count, config.parts)
    firsts = []
    for begin in range(pipeline.begin, pipeline.end, together):
        for turn in range(0, together, group_size(config)):
            firsts.append(begin + turn)
    firsts.append(pipeline.end)
    groups = []
    for number in range(len(firsts) - 1):
        item, end = firsts[number], firsts[number + 1]
        entry, own = _place_of(pipeline, item)
        size, after = end - item, end - 1 + together
        if config.parts == 1 and number + 2 < len(firsts):
            after = firsts[number + 2] - 1
        adds_bias = loads_bias(config) and own == 0
        is_last = own + size == count
        groups.append(Group(item, size, entry % 2, adds_bias, own == 0, is_last, after))
    return groups


def _load_item_in(
    config: DecodeConfig, b: DecodeBuffers, x: DecodeOperands, pipeline: Pipeline, item: int
) -> None:
    """Load gate and up weights of an item, if it is one of the iteration."""
    if item < pipeline.end:
        entry, number = _place_of(pipeline, item)
        is_last = number % config.parts == min(len(pipeline.own), config.parts) - 1
        expert, own = pipeline.experts[entry], pipeline.own[number]
        load_in(config, b, x, expert, item % config.weight_buffers, own, is_last)


def _load_item_out(
    config: DecodeConfig, b: DecodeBuffers, x: DecodeOperands, pipeline: Pipeline, item: int
) -> None:
    """Load down weights of an item, if it is one of the iteration."""
    if item < pipeline.end:
        entry, number = _place_of(pipeline, item)
        expert, own = pipeline.experts[entry], pipeline.own[number]
        load_out(config, b, x, expert, item % config.weight_buffers, own, number == 0)


def _copy_entries(
    config: DecodeConfig, dst_sb: nl.NkiTensor, table_sb: nl.NkiTensor, position: Any, first: int
) -> None:
    """Copy columns of a table, of this core's entries from `position + first` on."""
    rows, size = dst_sb.shape
    pattern = [[table_sb.shape[1], rows], [entry_stride(config), size]]
    source = table_sb.ap(pattern, offset=first, scalar_offset=position, indirect_dim=1)
    nisa.tensor_copy(dst=dst_sb, src=source, engine=nisa.engine.scalar)
