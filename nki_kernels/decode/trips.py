"""One group of list entries of a decode step: what loads when, and what computes when.

Sources: the stages of decode_stages.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

from nki_kernels.decode.buffers import DecodeBuffers, DecodeOperands
from nki_kernels.decode.config import DecodeConfig, entry_stride, group_size, splits_experts
from nki_kernels.decode.list import Routing
from nki_kernels.decode.out import keep_scales, project_out
from nki_kernels.decode.stages import load_in, load_out, project_in, spread_column

FAR_AHEAD = 4  # entries of a group


@dataclass
class Pipeline(NKIObject):
    """The items of a group: `chunks` of each of its experts, in order.

    A block's projection into I comes before the one before it is projected out, so that the tensor
    engine has work while the activation is computed; weights load in the same order.

    Attributes:
        position: list position of the group, an int or a register.
        size: entries of each core; 0 for one entry whose chunks the cores share.
        first: from `position` to this core's first entry.
        chunks: of an expert, on this core.
        items: how many there are.
        looks_up: whether a group may follow whose experts are looked up here.
        experts_in, experts_out: (1, 1) int32 tiles.
        weights, inputs: tables with a column per entry: the group's from `column` on, by `step`.
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
    routing: Routing,
    position: Any,
    size: int,
) -> None:
    """Compute some list entries of this core.

    Args:
        config: sizes.
        b: buffers.
        x: the experts in HBM.
        turned_sb: x^T.
        routing: list and weights.
        position: list position of the group, an int or a register.
        size: entries of each core; 0 for one entry whose chunks the cores share.
    """
    pipeline = make_pipeline(config, b, routing, position, size)
    items = pipeline.items
    if items == 0:
        return
    ahead = min(items, config.weight_buffers)
    for item in range(ahead):
        load_item_in(config, b, x, pipeline, item)
        if item > 0:
            load_item_out(config, b, x, pipeline, item - 1)
    load_item_out(config, b, x, pipeline, ahead - 1)
    blocks = _make_groups(config, items, len(pipeline.chunks))
    for number in range(len(blocks) + 1):
        if number < len(blocks):
            for item in blocks[number]:
                start_item(config, b, x, turned_sb, routing, pipeline, item)
        if number > 0:
            _finish_group(config, b, x, routing, pipeline, blocks[number - 1])


def make_pipeline(
    config: DecodeConfig, b: DecodeBuffers, routing: Routing, position: Any, size: int
) -> Pipeline:
    """Return what a group does; see `run_trip`."""
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
        copy_columns(config, b, routing, position, 0, 1)
        if routing.core > 0:
            experts_in, experts_out = [b.shared_expert], [b.shared_expert]
    return Pipeline(
        position, size, first, chunks, items, size > 0, experts_in, experts_out,
        b.weights, b.inputs, 0, 1,
    )  # fmt: skip


def start_item(
    config: DecodeConfig,
    b: DecodeBuffers,
    x: DecodeOperands,
    turned_sb: nl.NkiTensor,
    routing: Routing,
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
            copy_columns(config, b, routing, position, after + pipeline.first, size)
    project_in(config, b, turned_sb, buffer, item, entry % 2)
    if item % count == 0:
        keep_scales(config, b, buffer, entry % 2)
    load_item_in(config, b, x, pipeline, item + config.weight_buffers)
    if pipeline.looks_up and (item + 1) % count == 0:
        look_up(config, b.expert_in[entry], routing, position, entry, size)
        if entry == 0 and routing.core > 0:
            engine = nisa.engine.scalar
            _look_up(b.shared_expert, routing.list_sb, position, after, engine)


def _finish_group(
    config: DecodeConfig,
    b: DecodeBuffers,
    x: DecodeOperands,
    routing: Routing,
    pipeline: Pipeline,
    block: list[int],
) -> None:
    """Do the down projections of a block, then load and look up what may follow."""
    chunks, item = pipeline.chunks, block[0]
    turn, entry = item % len(chunks), item // len(chunks)
    adds_bias = config.formula.has_down_bias and chunks[turn] == 0
    is_last = turn + len(block) == len(chunks)
    buffer = item % config.weight_buffers
    project_out(config, b, buffer, item, entry % 2, adds_bias, turn == 0, is_last, len(block))
    for done in block:
        load_item_out(config, b, x, pipeline, done + config.weight_buffers)
    if pipeline.looks_up and is_last:
        look_up(config, b.expert_out[entry], routing, pipeline.position, entry, pipeline.size)


def _make_groups(config: DecodeConfig, items: int, chunks: int) -> list[list[int]]:
    """Cut the items of a group into blocks, none of which is of two experts."""
    blocks = []
    for entry in range(0, items, chunks):
        for begin in range(entry, entry + chunks, group_size(config)):
            end = min(entry + chunks, begin + group_size(config))
            blocks.append(list(range(begin, end)))
    return blocks


def load_item_in(
    config: DecodeConfig, b: DecodeBuffers, x: DecodeOperands, pipeline: Pipeline, item: int
) -> None:
    """Load gate and up weights of an item of a group, if there is one."""
    if item < pipeline.items:
        count = len(pipeline.chunks)
        expert, chunk = pipeline.experts_in[item // count], pipeline.chunks[item % count]
        load_in(config, b, x, expert, item % config.weight_buffers, chunk)


def load_item_out(
    config: DecodeConfig, b: DecodeBuffers, x: DecodeOperands, pipeline: Pipeline, item: int
) -> None:
    """Load down weights of an item of a group, if there is one."""
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


def look_up_first(config: DecodeConfig, b: DecodeBuffers, routing: Routing) -> None:
    """Look up the experts of the first group of a loop, and the columns of their entries."""
    copy_columns(config, b, routing, 0, entry_number(config, routing, 0), config.unroll)
    for entry in range(config.unroll):
        number = entry_number(config, routing, entry)
        source = routing.list_sb[0:1, number : number + 1]
        nisa.tensor_copy(dst=b.expert_in[entry], src=source, engine=nisa.engine.gpsimd)
        nisa.tensor_copy(dst=b.expert_out[entry], src=source, engine=nisa.engine.gpsimd)
    if routing.core > 0:
        source = routing.list_sb[0:1, 0:1]
        nisa.tensor_copy(dst=b.shared_expert, src=source, engine=nisa.engine.gpsimd)


def entry_number(config: DecodeConfig, routing: Routing, entry: int) -> int:
    """Return where in a group of the list an entry of this core is."""
    first = routing.core if splits_experts(config) else 0
    return first + entry * entry_stride(config)


def look_up(
    config: DecodeConfig,
    dst_sb: nl.NkiTensor,
    routing: Routing,
    position: Any,
    entry: int,
    size: int,
) -> None:
    """Look up the expert that follows an entry of a group of `size`, whose loads are over by then.

    GpSimd does it where there are entries enough to look ahead; it may be a few behind with sums.
    """
    number = size * entry_stride(config) + entry_number(config, routing, entry)
    engine = nisa.engine.gpsimd if config.unroll >= FAR_AHEAD else nisa.engine.scalar
    _look_up(dst_sb, routing.list_sb, position, number, engine)


def _look_up(
    dst_sb: nl.NkiTensor, list_sb: nl.NkiTensor, position: Any, number: int, engine: Any
) -> None:
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


def copy_columns(
    config: DecodeConfig, b: DecodeBuffers, routing: Routing, position: Any, first: int, size: int
) -> None:
    """Copy the columns of `size` entries of this core from `position + first` on.

    What follows is known at run time only; it is copied as soon as what is there was used.
    """
    _copy_columns(config, b.weights, routing.weights, position, first, size)
    _copy_columns(config, b.inputs, routing.inputs, position, first, size)


def _copy_columns(
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
