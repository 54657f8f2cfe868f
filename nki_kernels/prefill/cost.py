"""What a launch of `blockwise_moe` moves and multiplies, counted from its work tiles."""

from __future__ import annotations

import numpy as np

from nki_kernels.common.costs import KernelCost
from nki_kernels.common.formula import num_projections
from nki_kernels.common.mx import in_shape, out_shape
from nki_kernels.common.weight_formats import ITEM_BYTES
from nki_kernels.common.work_tiles import Ints, WorkTileLists, loops_of
from nki_kernels.prefill.config import (
    PrefillConfig,
    bias_is_inside,
    bias_terms,
    core_depth,
    core_width,
    has_scale_table,
    is_mx,
    largest_work_tile_of,
    mx_form,
    stored_rows,
    stores_pieces,
)

_INT32_BYTES, _FLOAT32_BYTES, _BFLOAT16_BYTES = 4, 4, 2


def cost_blockwise_moe(
    config: PrefillConfig, lists: WorkTileLists, slots: Ints, *, has_ids: bool = False
) -> KernelCost:
    """Count bytes and columns of a launch; equal to those of its trace.

    Args:
        config: what the kernel is compiled for.
        lists: the work tiles.
        slots: [N*B] int32 token of each slot, -1 for padding.
        has_ids: token ids of the work tiles are on chip before.

    Raises:
        ValueError: spare rows and experts are moved, too.
    """
    if config.loop.missing == "spare":
        raise ValueError("missing='spare': is counted by the trace alone. Use missing='skip'.")
    live = (slots >= 0).reshape(config.num_tiles, config.tile_rows)
    rows_of_tile = np.append(live.sum(axis=1), 0)
    pieces = live.reshape(config.num_tiles, -1, stored_rows(config)).any(axis=2)
    pieces_of_tile = np.append(pieces.sum(axis=1), 0)
    read = write = columns = 0
    tables = int(has_scale_table(config)) + int(not has_ids)
    for core in range(config.num_cores):
        lane = core if config.shard.num_lanes > 1 else 0
        tile = np.minimum(lists.work_row_tiles_CVG[lane].reshape(-1), config.num_tiles)
        work_tiles = int((lists.work_expert_CV[lane] < config.E).sum())
        rows = int(rows_of_tile[tile].sum())
        stored = rows
        if config.stores == "tiles":
            stored = int((tile < config.num_tiles).sum()) * config.tile_rows
        elif stores_pieces(config):
            stored = int(pieces_of_tile[tile].sum()) * stored_rows(config)
        row_bytes = core_width(config) * _BFLOAT16_BYTES
        read += (
            work_tiles * _expert_bytes(config)
            + rows * row_bytes
            + _table_bytes(config, lists, tile, tables)
        )
        write += stored * row_bytes
        columns += _columns(config, lists, core, tables)
    return KernelCost(read, write, columns)


def _iterations(config: PrefillConfig, lists: WorkTileLists) -> list[tuple[tuple[int, int], int]]:
    """Return the sizes of the work tiles of each loop, and its iterations."""
    iterations = [int(count) for count in lists.class_iterations_1L[0]]
    if not config.loop.is_dynamic:
        iterations = [(int(lists.work_expert_CV.shape[1]) - 2) // 2]
    return list(zip(loops_of(config.loop.classes), iterations, strict=True))


def _expert_bytes(config: PrefillConfig) -> int:
    """Return the bytes that one work tile loads of its expert, on one core."""
    H, i_core = core_width(config), core_depth(config)
    if is_mx(config):
        form = mx_form(config)
        runs = (in_shape(form), out_shape(form))
        bias = H * _BFLOAT16_BYTES if config.formula.has_down_bias else 0
        return form.chunks * sum(rows * run for rows, run in runs) + bias
    halves = num_projections(config.formula)
    size = (halves + 1) * H * i_core * ITEM_BYTES[config.weight_format]
    if config.formula.has_gate_up_bias:
        size += halves * i_core * _FLOAT32_BYTES
    if config.formula.has_down_bias:
        size += bias_terms(config) * H * _BFLOAT16_BYTES
    if config.has_scales:
        size += halves * i_core * _FLOAT32_BYTES + 3 * H * _BFLOAT16_BYTES
    return size


def _table_bytes(config: PrefillConfig, lists: WorkTileLists, tile: Ints, tables: int) -> int:
    """Return the bytes that a core reads to load its work tiles and some tables."""
    work_tiles, entries = int(lists.work_expert_CV.shape[1]), len(tile)
    known = int((tile < config.num_tiles).sum())
    words = work_tiles + entries + len(loops_of(config.loop.classes))
    words += tables * (entries + known * config.tile_rows)
    if config.stores == "rows" and not stores_pieces(config):
        words += config.tile_rows * entries
    return words * _INT32_BYTES


def _columns(config: PrefillConfig, lists: WorkTileLists, core: int, tables: int) -> int:
    """Return the columns that stream through the tensor engine of a core."""
    H, loop = core_width(config), config.loop
    depth, i_count = config.h_axis.count, config.i_axis.count * loop.in_parts
    deep = config.h_axis.group  # elements that a matmul adds up on a partition
    row = depth * num_projections(config.formula) * i_count // deep + depth
    tile = i_count * H // deep
    if config.formula.has_down_bias and not bias_is_inside(config):
        tile += H
    iterations = _iterations(config, lists)
    total = depth * config.tile_rows
    for sizes, count in iterations:
        total += count * sum(sizes) * (config.tile_rows * row + tile)
    entries = int(lists.work_expert_CV.shape[1]) * largest_work_tile_of(config)
    work_tiles = 2 * sum(count for _, count in iterations)
    if stores_pieces(config):
        tables += config.tile_rows // stored_rows(config)
    return total + tables * entries + (work_tiles * H if config.has_scales else 0)
