"""What the prefill kernel keeps in SBUF: the tables that allocation and accounting both read.

Legend: h, i partitions of a tile of H or I; R rows of a tile, V work tiles, G row tiles of a work
tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import nki.language as nl

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.formula import num_projections
from nki_kernels.common.memory import Tiles, small_tiles, table_bytes, tiles
from nki_kernels.common.mx import fours_of, in_shape, out_shape, whole_quadrants
from nki_kernels.common.tiles import weight_dtype
from nki_kernels.common.work_tiles import loops_of
from nki_kernels.prefill.config import (
    PrefillConfig,
    adds_offset,
    bias_is_inside,
    bias_terms,
    core_width,
    has_scale_table,
    is_alone,
    is_mx,
    iteration_pairs,
    largest_work_tile_of,
    loads_in_parts,
    mx_form,
    num_work_tiles,
    part_tiles,
    row_places,
    stored_rows,
    stores_pieces,
    work_tiles_at_once,
)

_SMALL_TILES_BYTES = (
    2 * 1024
)  # all of `small_tiles`: counters, constants, biases and scales per row


class _WeightTable(NamedTuple):
    """Weights, and what belongs to them; one of each per weight buffer."""

    gate_up: Tiles
    down: Tiles
    gate_up_bias: Tiles
    up_bias: Tiles  # with the offset
    gate_up_scale: Tiles
    down_bias: Tiles
    down_scale: Tiles  # the same row on all partitions
    down_scale_parts: Tiles  # three terms of it


class _RowTable(NamedTuple):
    """Row tiles on their way through an expert."""

    rows: Tiles  # gathered
    transposed: Tiles  # transposed
    own: Tiles  # this core's part of the projections, where the hidden axis is split
    other: Tiles  # the other core's
    inner: Tiles  # what the down projection takes
    words: Tiles  # transposed rows as MX words, if the weights are such
    word_scales: Tiles
    inner_words: Tiles  # what the down projection takes, then
    inner_scales: Tiles
    outer: Tiles  # what waits to be stored
    gate: Tiles  # scratch of the projections
    up: Tiles


class _WorkTileTable(NamedTuple):
    """The work tiles of a core, and what belongs to the two in flight."""

    expert_table: Tiles  # all work tiles
    tile_table: Tiles
    id_table: Tiles
    row_table: Tiles
    piece_table: Tiles
    scale_table: Tiles
    iterations: Tiles
    ends: Tiles  # of the loops over a class, where iterations load for themselves
    expert: Tiles  # one work tile, by parity; or all of an iteration
    expert_out: Tiles
    ids: Tiles
    first_ids: Tiles  # of the first row tile of the work tile two ahead
    scale: Tiles
    out_tile: Tiles
    out_row: Tiles
    out_scale: Tiles
    counter: Tiles
    ahead: Tiles
    one: Tiles
    ones: Tiles
    zeros: Tiles  # what a core multiplies the down bias with, where the other one adds it


def weight_table(config: PrefillConfig) -> _WeightTable:
    """Return the buffers of weights."""
    h_axis, i_axis, loop, formula = config.h_axis, config.i_axis, config.loop, config.formula
    count, width, halves = loop.weight_buffers, core_width(config), num_projections(formula)
    columns, weights = width // loop.out_parts, weight_dtype(config.weight_format)
    i_rows = i_axis.rows + (1 if bias_is_inside(config) else 0)
    i_tile = (i_axis.rows, halves, i_axis.count)
    scales = count if config.has_scales else 0
    biases = count if formula.has_gate_up_bias else 0
    offsets = count if adds_offset(config) else 0
    down_biases = count if formula.has_down_bias else 0
    gate_up: tuple[int, ...] = (h_axis.rows, part_tiles(config), halves, i_axis.size)
    down = (i_rows, i_axis.count * loop.in_parts, columns)
    if is_mx(config):  # biases of the projections are in the run
        gate_up, out = in_shape(mx_form(config)), out_shape(mx_form(config))
        down, biases = (out[0], loop.in_parts, out[1]), 0
    return _WeightTable(
        gate_up=tiles(count, gate_up, weights),
        down=tiles(count, down, weights),
        gate_up_bias=small_tiles(biases, i_tile, nl.float32),
        up_bias=small_tiles(offsets, (i_axis.rows, i_axis.count), nl.float32),
        gate_up_scale=small_tiles(scales, i_tile, nl.float32),
        down_bias=tiles(down_biases, (bias_terms(config), columns), nl.bfloat16),
        down_scale=tiles(scales, (config.tile_rows, width), nl.float32),
        down_scale_parts=tiles(scales, (3, width), nl.bfloat16),
    )


def row_table(config: PrefillConfig) -> _RowTable:
    """Return the buffers of row tiles."""
    R, width, largest, loop = (
        config.tile_rows,
        core_width(config),
        largest_work_tile_of(config),
        config.loop,
    )
    h_axis, i_axis = config.h_axis, config.i_axis
    i_count = i_axis.count * loop.in_parts
    i_rows = i_axis.rows + (1 if bias_is_inside(config) else 0)
    # Two work tiles are in flight where the cores exchange their projections.
    apart = 2 * largest if config.shard.splits_h else 0
    exchanged = (i_axis.rows, i_axis.count, num_projections(config.formula), R)
    inner: tuple[int, ...] = (i_rows, i_count, R)
    transposed, words = (
        _transposed(config, (h_axis.rows, h_axis.count, R)),
        tiles(0, (1, 1), nl.uint8),
    )
    inner_words = words
    if is_mx(config):
        fours = (whole_quadrants(h_axis.rows), fours_of(h_axis), R)
        words = tiles(transposed.number, fours, nl.uint8)
        transposed = tiles(2, (*fours, h_axis.group), nl.bfloat16)
        halfway = (whole_quadrants(i_axis.rows), loop.in_parts, R)
        inner, inner_words = (*halfway, i_axis.group), tiles(largest, halfway, nl.uint8)
    return _RowTable(
        rows=tiles(row_places(loop), (R, width), nl.bfloat16),
        transposed=transposed,
        own=tiles(apart, exchanged, nl.float32),
        other=tiles(apart, exchanged, nl.float32),
        inner=tiles(max(largest, apart), inner, nl.bfloat16),
        words=tiles(words.number, words.shape, nl.float8_e4m3fn_x4),
        word_scales=words,
        inner_words=tiles(inner_words.number, inner_words.shape, nl.float8_e4m3fn_x4),
        inner_scales=inner_words,
        outer=tiles(loop.outer_buffers, (R, width), nl.bfloat16),
        gate=tiles(2, (i_axis.rows, R), nl.float32),
        up=tiles(2, (i_axis.rows, R), nl.float32),
    )


def _transposed(config: PrefillConfig, shape: tuple[int, ...]) -> Tiles:
    """Return the buffers of transposed rows; see `transposed_buffer` for who uses which."""
    loop, largest = config.loop, largest_work_tile_of(config)
    if loads_in_parts(loop):
        return tiles(largest, shape, nl.bfloat16)
    # Work tiles of one tile need one; counted like the others, so that they get the same weights.
    return Tiles(min(2, largest), shape, nl.bfloat16, 2)


def work_tile_table(config: PrefillConfig) -> _WorkTileTable:
    """Return the buffers of work tiles."""
    R, V, G = config.tile_rows, num_work_tiles(config), largest_work_tile_of(config)
    scaled = 1 if has_scale_table(config) else 0
    by_piece = 1 if stores_pieces(config) else 0
    by_row = 0 if config.stores == "tiles" or by_piece else 1
    pieces = R // stored_rows(config)
    one, classes, alone = (1, 1), len(loops_of(config.loop.classes)), int(is_alone(config.loop))
    sizes = len(iteration_pairs(config.loop))
    return _WorkTileTable(
        expert_table=small_tiles(1, (1, V), nl.int32),
        tile_table=small_tiles(1, (1, V, G), nl.int32),
        # Ids, rows to write, scales, and two more while they are made: five, whatever there is.
        id_table=Tiles(1, (R, V, G), nl.int32, 5),
        piece_table=tiles(by_piece, (1, V, G * pieces), nl.int32),
        row_table=Tiles(by_row, (R, V, G), nl.int32, 0),
        scale_table=Tiles(scaled, (R, V, G), nl.float32, 0),
        iterations=small_tiles(1, (1, classes), nl.int32),
        ends=small_tiles(alone, (1, classes, sizes), nl.int32),
        expert=_of_work_tiles(config, 1, 1, 1, nl.int32),
        expert_out=small_tiles(2 - 2 * alone, one, nl.int32),
        ids=_of_work_tiles(config, 1, R, G, nl.int32),
        first_ids=small_tiles(2 * (config.loop.first_buffers - 1) * (1 - alone), (R, 1), nl.int32),
        scale=_of_work_tiles(config, scaled, R, G, nl.float32),
        out_tile=_of_work_tiles(config, 1, 1, G * pieces, nl.int32),
        out_row=_of_work_tiles(config, by_row, R, G, nl.int32),
        out_scale=small_tiles(2 * scaled * (1 - alone), (R, G), nl.float32),
        counter=small_tiles(1, one, nl.int32),
        ahead=small_tiles(1, one, nl.int32),
        one=small_tiles(1, one, nl.int32),
        ones=small_tiles(1, (3, PARTITIONS), nl.bfloat16),
        zeros=small_tiles(int(config.shard.splits_i), (3, PARTITIONS), nl.bfloat16),
    )


def _of_work_tiles(config: PrefillConfig, count: int, rows: int, columns: int, dtype: Any) -> Tiles:
    """Return tiles of the work tiles kept track of: one for all of an iteration, or one each."""
    if is_alone(config.loop):
        return tiles(count, (rows, work_tiles_at_once(config.loop), columns), dtype)
    return small_tiles(2 * count, (rows, columns), dtype)


def sbuf_bytes(config: PrefillConfig) -> int:
    """Return the bytes per partition that the buffers of the kernel are counted with."""
    tables = (weight_table(config), row_table(config), work_tile_table(config))
    return sum(table_bytes(table) for table in tables) + _SMALL_TILES_BYTES
