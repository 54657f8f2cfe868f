"""One trip of the loop over list entries: what loads when, and what computes when.

A trip is `unroll` entries (experts) of each core, an item is a chunk of one of them:

1. Load the first items, as many as there are weight buffers: gate and up of an item before the
   down weights of the one before, which is the order of use.
2. Project an item into I (`_start_item`), then load gate and up of the item that takes its buffer:
   nobody reads the old ones any more.
3. Project the group before it out of I (`_finish_group`): a group behind, so that the tensor engine
   has work while activations are computed. Then load down weights into its buffers.
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
from nki_kernels.decode.config import DecodeConfig, entry_stride, group_size, splits_experts
from nki_kernels.decode.list import Listed
from nki_kernels.decode.out import Group, keep_scales, project_out
from nki_kernels.decode.stages import load_in, load_out, project_in, spread_column

_FAR_AHEAD = 4  # entries of a trip


@dataclass
class Pipeline(NKIObject):
    """The items of a trip: `chunks` of each of its experts, in order.

    Attributes:
        position: list position of the trip, an int or a register.
        size: entries of each core; 0 for one entry whose chunks the cores share.
        first: from `position` to this core's first entry.
        chunks: of an expert, on this core.
        items: how many there are.
        looks_up: whether a trip may follow whose experts are looked up here.
        experts_in, experts_out: (1, 1) int32 tiles.
        weights, inputs: tables with a column per entry: the trip's from `column` on, by `step`.
    """

    position: Any
    size: int
    first: int
    chunks: list[int]
    items: int
    looks_up: bool
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
    position: Any,
    size: int,
) -> None:
    """Compute some list entries of this core.

    Args:
        config, b, x: sizes, buffers, the experts in HBM.
        turned_sb: x^T.
        routing: list and weights.
        position: list position of the trip, an int or a register.
        size: entries of each core; 0 for one entry whose chunks the cores share.
    """
    pipeline = _make_pipeline(config, b, routing, position, size)
    items = pipeline.items
    if items == 0:
        return
    ahead = min(items, config.weight_buffers)
    for item in range(ahead):
        _load_item_in(config, b, x, pipeline, item)
        if item > 0:
            _load_item_out(config, b, x, pipeline, item - 1)
    _load_item_out(config, b, x, pipeline, ahead - 1)
    groups = _make_groups(config, pipeline)
    for number in range(len(groups) + 1):
        if number < len(groups):
            first = groups[number].item
            for item in range(first, first + groups[number].size):
                _start_item(config, b, x, turned_sb, routing, pipeline, item)
        if number > 0:
            _finish_group(config, b, x, routing, pipeline, groups[number - 1])


def _make_pipeline(
    config: DecodeConfig, b: DecodeBuffers, routing: Listed, position: Any, size: int
) -> Pipeline:
    """Return what a trip does; see `run_trip`."""
    chunks = _trip_chunks(config, routing.core, size)
    first = routing.core if splits_experts(config) and size > 0 else 0
    items = max(1, size) * len(chunks)
    if isinstance(position, int):
        experts = []
        for entry in range(max(1, size)):
            number = position + first + entry * entry_stride(config)
            experts.append(routing.list_sb[0:1, number : number + 1])
        return Pipeline(
            position, size, first, chunks, items, False, experts, experts,
            routing.weights, routing.inputs, position + first, entry_stride(config),
        )  # fmt: skip
    experts_in, experts_out = b.expert_in, b.expert_out
    if size == 0:
        _copy_columns(config, b, routing, position, 0, 1)
        if routing.core > 0:
            experts_in, experts_out = [b.shared_expert], [b.shared_expert]
    return Pipeline(
        position, size, first, chunks, items, size > 0, experts_in, experts_out,
        b.weights, b.inputs, 0, 1,
    )  # fmt: skip


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
    count, buffer = len(pipeline.chunks), item % config.weight_buffers
    entry = item // count
    position, size = pipeline.position, pipeline.size
    after = size * entry_stride(config)
    if item % count == 0:
        column = pipeline.column + entry * pipeline.step
        spread_column(config, b, pipeline.weights, pipeline.inputs, column, entry % 2)
        if pipeline.looks_up and entry == size - 1:
            _copy_columns(config, b, routing, position, after + pipeline.first, size)
    project_in(config, b, turned_sb, buffer, item, entry % 2)
    if item % count == 0:
        keep_scales(config, b, buffer, entry % 2)
    _load_item_in(config, b, x, pipeline, item + config.weight_buffers)
    if pipeline.looks_up and (item + 1) % count == 0:
        _look_up(config, b.expert_in[entry], routing, position, entry, size)
        if entry == 0 and routing.core > 0:
            engine = nisa.engine.scalar
            _copy_number(b.shared_expert, routing.list_sb, position, after, engine)


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
    if pipeline.looks_up and group.is_last:
        entry = group.item // len(pipeline.chunks)
        _look_up(config, b.expert_out[entry], routing, pipeline.position, entry, pipeline.size)


def _make_groups(config: DecodeConfig, pipeline: Pipeline) -> list[Group]:
    """Cut the items of a trip into groups, none of which is of two experts."""
    chunks = pipeline.chunks
    groups = []
    for entry in range(pipeline.items // len(chunks)):
        for turn in range(0, len(chunks), group_size(config)):
            size = min(len(chunks) - turn, group_size(config))
            adds_bias = config.formula.has_down_bias and chunks[turn] == 0
            is_last = turn + size == len(chunks)
            item = entry * len(chunks) + turn
            groups.append(Group(item, size, entry % 2, adds_bias, turn == 0, is_last))
    return groups


def _load_item_in(
    config: DecodeConfig, b: DecodeBuffers, x: DecodeOperands, pipeline: Pipeline, item: int
) -> None:
    """Load gate and up weights of an item of a trip, if there is one."""
    if item < pipeline.items:
        count = len(pipeline.chunks)
        expert, chunk = pipeline.experts_in[item // count], pipeline.chunks[item % count]
        load_in(config, b, x, expert, item % config.weight_buffers, chunk)


def _load_item_out(
    config: DecodeConfig, b: DecodeBuffers, x: DecodeOperands, pipeline: Pipeline, item: int
) -> None:
    """Load down weights of an item of a trip, if there is one."""
    if item < pipeline.items:
        count = len(pipeline.chunks)
        expert, chunk = pipeline.experts_out[item // count], pipeline.chunks[item % count]
        load_out(config, b, x, expert, item % config.weight_buffers, chunk)


def _trip_chunks(config: DecodeConfig, core: int, size: int) -> list[int]:
    """Return which chunks of its experts a core computes."""
    if config.num_cores == 1 or (splits_experts(config) and size > 0):
        return list(range(config.chunks))
    half = (config.chunks + 1) // 2
    return list(range(half)) if core == 0 else list(range(half, config.chunks))


def look_up_first(config: DecodeConfig, b: DecodeBuffers, routing: Listed) -> None:
    """Look up the experts of the first trip of a loop, and the columns of their entries."""
    _copy_columns(config, b, routing, 0, _entry_number(config, routing, 0), config.unroll)
    for entry in range(config.unroll):
        number = _entry_number(config, routing, entry)
        source = routing.list_sb[0:1, number : number + 1]
        nisa.tensor_copy(dst=b.expert_in[entry], src=source, engine=nisa.engine.gpsimd)
        nisa.tensor_copy(dst=b.expert_out[entry], src=source, engine=nisa.engine.gpsimd)
    if routing.core > 0:
        source = routing.list_sb[0:1, 0:1]
        nisa.tensor_copy(dst=b.shared_expert, src=source, engine=nisa.engine.gpsimd)


def _entry_number(config: DecodeConfig, routing: Listed, entry: int) -> int:
    """Return where in a trip an entry of this core is."""
    first = routing.core if splits_experts(config) else 0
    return first + entry * entry_stride(config)


def _look_up(
    config: DecodeConfig,
    dst_sb: nl.NkiTensor,
    routing: Listed,
    position: Any,
    entry: int,
    size: int,
) -> None:
    """Look up the expert that follows an entry of a trip of `size`, whose loads are over by then.

    GpSimd does it where there are entries enough to look ahead; it may be a few behind with sums.
    """
    number = size * entry_stride(config) + _entry_number(config, routing, entry)
    engine = nisa.engine.gpsimd if config.unroll >= _FAR_AHEAD else nisa.engine.scalar
    _copy_number(dst_sb, routing.list_sb, position, number, engine)


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
