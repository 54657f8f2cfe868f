"""One trip of the loop over list entries: what loads when, and what computes when.

A trip is `unroll` entries (experts) of each core, an item is a part of a chunk of one of them:

1. The first items, as many as there are weight buffers, are on their way when a trip begins: the
   trip before asked for them, so that a loop whose engines meet at its edge does not stop the
   memory. Else they are asked for now: gate and up of an item and the down weights that are used
   after them by turns.
2. Project an item into I (`_start_item`), then load gate and up of the item that takes its buffer:
   nobody reads the old ones any more.
3. Project a group of items out of I (`_finish_group`) when the items after it have been projected
   in, so that the tensor engine has work while activations are computed. Then load down weights
   into its buffers.
4. On the way look up what the next trip begins with: experts and columns are copied as soon as
   those that lie there were used, since the loop's body has fixed addresses.
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

_FAR_AHEAD = 4  # entries of a trip
_LOOK_UP_AHEAD = 2  # items


@dataclass
class Pipeline(NKIObject):
    """The items of a trip, in order.

    Attributes:
        position: list position of the trip, an int or a register.
        size: entries of each core; 0 for one entry whose chunks the cores share.
        first: from `position` to this core's first entry.
        own: the items of an entry that are this core's, by their number in the expert.
        begin, end: numbers of the trip's items.
        is_halved: whether its entry is shared by halves; see `project_half`.
        is_ahead: whether its first items are on their way.
        is_followed: whether a trip may follow, whose first items are looked up and asked for here.
        experts_in, experts_out: (1, 1) int32 tiles.
        weights, inputs: tables with a column per entry: the trip's from `column` on, by `step`.
    """

    position: Any
    size: int
    first: int
    own: list[int]
    begin: int
    end: int
    is_halved: bool
    is_ahead: bool
    is_followed: bool
    experts_in: list[nl.NkiTensor]
    experts_out: list[nl.NkiTensor]
    weights: list[nl.NkiTensor]
    inputs: list[nl.NkiTensor]
    column: int
    step: int


def run_trip(
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
    if not pipeline.is_ahead:
        load_first(config, b, x, pipeline)
    if pipeline.is_followed:
        _look_up_entries(config, b, routing, pipeline, b.expert_in, -1)
        _look_up_entries(config, b, routing, pipeline, b.expert_out, -1)
    groups = _make_groups(config, pipeline)
    for item in range(pipeline.begin, pipeline.end):
        _start_item(config, b, x, turned_sb, routing, pipeline, item)
        for group in groups:
            if group.after == item:
                _finish_group(config, b, x, routing, pipeline, group)
    for group in groups:
        if group.after >= pipeline.end:
            _finish_group(config, b, x, routing, pipeline, group)


def load_first(
    config: DecodeConfig, b: DecodeBuffers, x: DecodeOperands, pipeline: Pipeline
) -> None:
    """Ask for the first items of a trip, in the order of use."""
    begin, count = pipeline.begin, min(pipeline.end - pipeline.begin, config.weight_buffers)
    for turn in range(count + config.parts):
        if turn < count:
            _load_item_in(config, b, x, pipeline, begin + turn)
        if turn >= config.parts:
            _load_item_out(config, b, x, pipeline, begin + turn - config.parts)


def make_pipeline(
    config: DecodeConfig, b: DecodeBuffers, routing: Listed, position: Any, size: int
) -> Pipeline:
    """Return what a trip does; neither is anything of it on its way, nor does another one follow.

    Args:
        config, b: sizes, buffers.
        routing: list and weights.
        position: list position of the trip, an int or a register.
        size: entries of each core; 0 for one entry whose chunks the cores share.
    """
    own = _own_items(config, routing.core, size)
    first = routing.core if splits_experts(config) and size > 0 else 0
    is_halved = size == 0 and shares_halves(config)
    begin = own[0] if is_halved else 0
    end = begin + max(1, size) * len(own)
    if isinstance(position, int):
        experts = []
        for entry in range(max(1, size)):
            number = position + first + entry * entry_stride(config)
            experts.append(routing.list_sb[0:1, number : number + 1])
        return Pipeline(
            position,
            size,
            first,
            own,
            begin,
            end,
            is_halved,
            False,
            False,
            experts,
            experts,
            routing.weights,
            routing.inputs,
            position + first,
            entry_stride(config),
        )
    experts_in, experts_out = b.expert_in, b.expert_out
    if size == 0:
        _copy_columns(config, b, routing, position, 0, 1)
        _copy_number(b.shared_expert, routing.list_sb, position, 0, nisa.engine.scalar)
        experts_in, experts_out = [b.shared_expert], [b.shared_expert]
    return Pipeline(
        position,
        size,
        first,
        own,
        begin,
        end,
        is_halved,
        False,
        False,
        experts_in,
        experts_out,
        b.weights,
        b.inputs,
        0,
        1,
    )


def make_first_pipeline(config: DecodeConfig, b: DecodeBuffers, routing: Listed) -> Pipeline:
    """Return the first trip of a loop: look up its experts, and the columns of their entries."""
    first = routing.core if splits_experts(config) else 0
    _copy_columns(config, b, routing, 0, first, config.unroll)
    for entry in range(config.unroll):
        number = first + entry * entry_stride(config)
        source = routing.pairs_sb[0:1, number : number + 1]
        nisa.tensor_copy(dst=b.expert_in[entry], src=source, engine=nisa.engine.gpsimd)
        nisa.tensor_copy(dst=b.expert_out[entry], src=source, engine=nisa.engine.gpsimd)
    own = _own_items(config, routing.core, config.unroll)
    return Pipeline(
        0,
        config.unroll,
        first,
        own,
        0,
        config.unroll * len(own),
        False,
        False,
        False,
        b.expert_in,
        b.expert_out,
        b.weights,
        b.inputs,
        column=0,
        step=1,
    )


def _own_items(config: DecodeConfig, core: int, size: int) -> list[int]:
    """Return which items of its experts a core computes."""
    count = config.chunks * config.parts
    if config.num_cores == 1 or (splits_experts(config) and size > 0):
        return list(range(count))
    half = count // 2 if shares_halves(config) else (config.chunks + 1) // 2 * config.parts
    return list(range(half)) if core == 0 else list(range(half, count))


def _start_item(
    config: DecodeConfig,
    b: DecodeBuffers,
    x: DecodeOperands,
    turned_sb: nl.NkiTensor,
    routing: Listed,
    pipeline: Pipeline,
    item: int,
) -> None:
    """Do the gate and up projections of an item, then load and look up what may follow."""
    count = len(pipeline.own)
    entry, own = (item - pipeline.begin) // count, (item - pipeline.begin) % count
    part = item % config.parts
    buffer = item % config.weight_buffers
    if own == 0:
        column = pipeline.column + entry * pipeline.step
        spread_column(config, b, pipeline.weights, pipeline.inputs, column, entry % 2)
        if pipeline.is_followed and entry == pipeline.size - 1:
            after = pipeline.size * entry_stride(config) + pipeline.first
            _copy_columns(config, b, routing, pipeline.position, after, config.unroll)
    if pipeline.is_halved:
        project_half(config, b, turned_sb, buffer, item, entry % 2, routing.core)
    else:
        is_last = part == config.parts - 1
        project_in(config, b, turned_sb, buffer, item, entry % 2, part == 0, is_last)
    if own == min(count, config.parts) - 1:
        keep_scales(config, b, buffer, entry % 2)
    _load_item_in(config, b, x, pipeline, item + config.weight_buffers)
    if pipeline.is_followed:
        _look_up_entries(config, b, routing, pipeline, b.expert_in, item)


def _finish_group(
    config: DecodeConfig,
    b: DecodeBuffers,
    x: DecodeOperands,
    routing: Listed,
    pipeline: Pipeline,
    group: Group,
) -> None:
    """Do the down projections of a group, then load and look up what may follow."""
    project_out(config, b, group)
    for done in range(group.item, group.item + group.size):
        _load_item_out(config, b, x, pipeline, done + config.weight_buffers)
        if pipeline.is_followed:
            _look_up_entries(config, b, routing, pipeline, b.expert_out, done)


def _make_groups(config: DecodeConfig, pipeline: Pipeline) -> list[Group]:
    """Cut the items of a trip into groups, none of which is of two experts, nor of parts of two."""
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
        entry, own = (item - pipeline.begin) // count, (item - pipeline.begin) % count
        size, after = end - item, end - 1 + together
        if config.parts == 1 and number + 2 < len(firsts):
            after = firsts[number + 2] - 1
        adds_bias = loads_bias(config) and pipeline.own[own] == 0
        is_last = own + size == count
        groups.append(Group(item, size, entry % 2, adds_bias, own == 0, is_last, after))
    return groups


def _load_item_in(
    config: DecodeConfig, b: DecodeBuffers, x: DecodeOperands, pipeline: Pipeline, item: int
) -> None:
    """Load gate and up weights of an item of a trip, or of the trip that follows."""
    found = _item_at(config, pipeline, item)
    if found >= 0:
        number, count = found - pipeline.begin, len(pipeline.own)
        expert, own = pipeline.experts_in[number // count], pipeline.own[number % count]
        is_last = number % count % config.parts == min(count, config.parts) - 1
        load_in(config, b, x, expert, found % config.weight_buffers, own, is_last)


def _load_item_out(
    config: DecodeConfig, b: DecodeBuffers, x: DecodeOperands, pipeline: Pipeline, item: int
) -> None:
    """Load down weights of an item of a trip, or of the trip that follows."""
    found = _item_at(config, pipeline, item)
    if found >= 0:
        number, count = found - pipeline.begin, len(pipeline.own)
        expert, own = pipeline.experts_out[number // count], pipeline.own[number % count]
        load_out(config, b, x, expert, found % config.weight_buffers, own)


def _item_at(config: DecodeConfig, pipeline: Pipeline, item: int) -> int:
    """Return which item of its trip an item is; past the end, of the one that follows; -1: none.

    The first item of a trip is in the first buffer.
    """
    if item < pipeline.end:
        return item
    if pipeline.is_followed and config.missing == "skip":
        return item % config.weight_buffers
    return -1


def _look_up_entries(
    config: DecodeConfig,
    b: DecodeBuffers,
    routing: Listed,
    pipeline: Pipeline,
    experts: list[nl.NkiTensor],
    item: int,
) -> None:
    """Look up what follows the entries for which it is time after an item (-1: before the first).

    GpSimd does it where there are entries enough to look ahead; it may be a few behind with sums.
    """
    engine = nisa.engine.gpsimd if config.unroll >= _FAR_AHEAD else nisa.engine.scalar
    stride = entry_stride(config)
    for entry in range(pipeline.size):
        if _look_up_time(config, pipeline, entry) == item:
            number = pipeline.first + (pipeline.size + entry) * stride
            _copy_number(experts[entry], routing.pairs_sb, pipeline.position, number, engine)


def _look_up_time(config: DecodeConfig, pipeline: Pipeline, entry: int) -> int:
    """Return the item after which to look up what follows an entry.

    It is before `need`: an item whose buffer a load of what follows takes. The last load of the
    entry has been asked for by then, or the engine that looks up would wait.
    """
    count, buffers, items = len(pipeline.own), config.weight_buffers, pipeline.end
    first = entry * count
    need = items
    for item in range(first, min(first + count, buffers)):
        need = min(need, items - buffers + (item - items) % buffers)
    return max(-1, need - _LOOK_UP_AHEAD)


def _copy_number(
    dst_sb: nl.NkiTensor, list_sb: nl.NkiTensor, position: Any, number: int, engine: Any
) -> None:
    """Copy an entry of the list."""
    nisa.tensor_copy(
        dst=dst_sb,
        src=list_sb.ap(
            [[list_sb.shape[1], 1], [1, 1]],
            offset=number,
            scalar_offset=position,
            indirect_dim=1,
        ),
        engine=engine,
    )


def _copy_columns(
    config: DecodeConfig, b: DecodeBuffers, routing: Listed, position: Any, first: int, size: int
) -> None:
    """Copy the columns of `size` entries of this core from `position + first` on.

    What follows is known at run time only; it is copied as soon as what is there was used.
    """
    _copy_table(config, b.weights, routing.weights, position, first, size)
    _copy_table(config, b.inputs, routing.inputs, position, first, size)


def _copy_table(
    config: DecodeConfig,
    columns: list[nl.NkiTensor],
    tables: list[nl.NkiTensor],
    position: Any,
    first: int,
    size: int,
) -> None:
    for tile in range(len(tables)):
        rows, width = tables[tile].shape
        pattern = [[width, rows], [entry_stride(config), size]]
        if isinstance(position, int):
            source = tables[tile].ap(pattern, offset=position + first)
        else:
            source = tables[tile].ap(pattern, offset=first, scalar_offset=position, indirect_dim=1)
        nisa.tensor_copy(dst=columns[tile][0:rows, 0:size], src=source, engine=nisa.engine.scalar)
