"""What the prefill kernel keeps on chip, and the tables that say what comes next.

Everything that outlasts a trip of a dynamic loop is allocated once in `make_buffers`: the body of
such a loop has fixed addresses. Buffers come in pairs where the next load must not wait for the
last use; which of a pair is meant is known at compile time, because a trip handles two visits.

Legend: s parity of a visit, j row tile of a visit, part of the intermediate axis.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.tiles import (
    load_table,
    make_tiles,
    weight_dtype,
)
from nki_kernels.common.visits import loops_of
from nki_kernels.prefill.config import (
    PrefillConfig,
    bias_terms,
    core_width,
    has_scale_table,
    largest_visit_of,
    num_projections,
    scales_late,
)


@dataclass
class Operands(NKIObject):
    """The tensors in HBM; optional ones are absent if the configuration says so."""

    hidden: nl.NkiTensor
    gate_up: nl.NkiTensor
    down: nl.NkiTensor
    gate_up_bias: nl.NkiTensor
    down_bias: nl.NkiTensor
    gate_up_scale: nl.NkiTensor
    down_scale: nl.NkiTensor
    slot_scale: nl.NkiTensor
    output: nl.NkiTensor


@dataclass
class Buffers(NKIObject):
    """What stays on chip; lists are indexed by slot, parity or row tile."""

    gate_up: list[nl.NkiTensor]
    down: list[nl.NkiTensor]
    gate_up_bias: list[nl.NkiTensor]
    up_bias: list[nl.NkiTensor]
    gate_up_scale: list[nl.NkiTensor]
    down_bias: list[nl.NkiTensor]
    down_scale: list[nl.NkiTensor]
    down_scale_parts: list[nl.NkiTensor]
    rows: list[nl.NkiTensor]
    turned: list[nl.NkiTensor]
    own: list[nl.NkiTensor]
    other: list[nl.NkiTensor]
    inner: list[nl.NkiTensor]
    outer: list[nl.NkiTensor]
    gate: list[nl.NkiTensor]
    up: list[nl.NkiTensor]
    inner_ps: list[nl.NkiTensor]
    turn_ps: list[nl.NkiTensor]
    outer_ps: list[nl.NkiTensor]
    ones: nl.NkiTensor
    expert: list[nl.NkiTensor]
    expert_out: list[nl.NkiTensor]
    ids: list[nl.NkiTensor]
    scale: list[nl.NkiTensor]
    wide_scale: list[nl.NkiTensor]
    in_tile: list[nl.NkiTensor]
    out_tile: list[nl.NkiTensor]
    out_row: list[nl.NkiTensor]
    out_scale: list[nl.NkiTensor]
    expert_table: nl.NkiTensor
    tile_table: nl.NkiTensor
    id_table: nl.NkiTensor
    row_table: list[nl.NkiTensor]
    scale_table: nl.NkiTensor
    trips: nl.NkiTensor
    counter: nl.NkiTensor
    ahead: nl.NkiTensor
    one: nl.NkiTensor


def bias_is_inside(config: PrefillConfig) -> bool:
    """Whether the down bias is a spare contraction row of the first tile of down weights.

    Tiles with fewer than 128 rows have one; it costs nothing, as matmuls are paid by column.
    """
    fits = config.i_axis.is_strided and config.i_axis.rows < PARTITIONS
    return config.has_down_bias and fits and config.weight_format == "bfloat16"


def adds_offset(config: PrefillConfig) -> bool:
    """Whether the bias of the up projection also carries the offset."""
    return config.has_gate_up_bias and config.up_offset != 0.0


def num_turned(config: PrefillConfig) -> int:
    """Return how many buffers of turned rows there are."""
    if config.loop.turns == "dma":
        return 1 + config.loop.row_buffers
    return largest_visit_of(config) if config.loop.in_parts > 1 else min(2, config.loop.classes[0])


def make_buffers(config: PrefillConfig, num_visits: int) -> Buffers:
    """Allocate everything that stays on chip."""
    R, width, largest = config.tile_rows, core_width(config), largest_visit_of(config)
    loop, slots = config.loop, config.loop.slots
    h_axis, i_axis = config.h_axis, config.i_axis
    i_count, columns = i_axis.count * loop.in_parts, width // loop.out_parts
    spare = 1 if bias_is_inside(config) else 0
    scales = slots if config.has_scales else 0
    halves = num_projections(config)
    i_tile = (i_axis.rows, halves, i_axis.count)
    num_loops = len(loops_of(config.loop.classes))
    tables = 1 if has_scale_table(config) else 0
    late = 1 if scales_late(config) else 0
    apart = 2 * largest if config.shard.splits_h else 0
    by_row = config.stores != "tiles"
    float32, int32, weights = nl.float32, nl.int32, weight_dtype(config.weight_format)
    # Turned rows and output rows are never in PSUM at once: they share six of its eight banks.
    outer_ps = make_tiles(6, (PARTITIONS, 512), float32, nl.psum)
    turn_ps = []
    for bank_ps in outer_ps:
        turn_ps.append(bank_ps.view(nl.bfloat16))
    return Buffers(
        gate_up=make_tiles(
            slots,
            (h_axis.rows, h_axis.count, halves, i_axis.size),
            weights,
        ),
        down=make_tiles(slots, (i_axis.rows + spare, i_count, columns), weights),
        gate_up_bias=make_tiles(slots if config.has_gate_up_bias else 0, i_tile, float32),
        up_bias=make_tiles(
            slots if adds_offset(config) else 0, (i_axis.rows, i_axis.count), float32
        ),
        gate_up_scale=make_tiles(scales, i_tile, float32),
        down_bias=make_tiles(
            slots if config.has_down_bias else 0, (bias_terms(config), columns), nl.bfloat16
        ),
        down_scale=make_tiles(scales, (R, width), float32),
        down_scale_parts=make_tiles(scales, (3, width), nl.bfloat16),
        rows=make_tiles(0 if loop.turns == "dma" else loop.row_buffers, (R, width), nl.bfloat16),
        turned=make_tiles(
            num_turned(config),
            (h_axis.rows, h_axis.count, R),
            nl.bfloat16,
        ),
        own=make_tiles(apart, (i_axis.rows, i_axis.count, halves, R), float32),
        other=make_tiles(apart, (i_axis.rows, i_axis.count, halves, R), float32),
        inner=make_tiles(max(largest, apart), (i_axis.rows + spare, i_count, R), nl.bfloat16),
        outer=make_tiles(loop.outer_buffers, (R, width), nl.bfloat16),
        gate=make_tiles(2, (i_axis.rows, R), float32),
        up=make_tiles(2, (i_axis.rows, R), float32),
        inner_ps=make_tiles(2, (PARTITIONS, halves, R), float32, nl.psum),
        turn_ps=turn_ps,
        outer_ps=outer_ps,
        ones=nl.ndarray((3, PARTITIONS), dtype=nl.bfloat16, buffer=nl.sbuf),
        expert=make_tiles(2, (1, 1), int32),
        expert_out=make_tiles(2, (1, 1), int32),
        ids=make_tiles(2, (R, largest), int32),
        scale=make_tiles(2 * tables, (R, largest), float32),
        wide_scale=make_tiles(late * largest, (i_axis.rows, R), float32),
        in_tile=make_tiles(2 * late, (1, largest), int32),
        out_tile=make_tiles(2, (1, largest), int32),
        out_row=make_tiles(2 if by_row else 0, (R, largest), int32),
        out_scale=make_tiles(2 * tables, (R, largest), float32),
        expert_table=nl.ndarray((1, num_visits), dtype=int32, buffer=nl.sbuf),
        tile_table=nl.ndarray((1, num_visits, largest), dtype=int32, buffer=nl.sbuf),
        id_table=nl.ndarray((R, num_visits, largest), dtype=int32, buffer=nl.sbuf),
        row_table=make_tiles(1 if by_row else 0, (R, num_visits, largest), int32),
        scale_table=make_tiles(tables, (R, num_visits, largest), float32),
        trips=nl.ndarray((1, num_loops), dtype=int32, buffer=nl.sbuf),
        counter=nl.ndarray((1, 1), dtype=int32, buffer=nl.sbuf),
        ahead=nl.ndarray((1, 1), dtype=int32, buffer=nl.sbuf),
        one=nl.ndarray((1, 1), dtype=int32, buffer=nl.sbuf),
    )


def fill_tables(
    config: PrefillConfig,
    b: Buffers,
    slots: nl.NkiTensor,
    slot_scale: nl.NkiTensor,
    plan: list[nl.NkiTensor],
    lane: int,
) -> None:
    """Bring the plan of this core on chip: experts, tiles, token ids, scales; reset counters.

    Args:
        slots: [num_slots] int32 token ids.
        slot_scale: [num_slots] float32, read if the configuration scales.
        plan: list of visit_expert, visit_tile, class_trips.
        lane: row of the plan.
    """
    R, largest = config.tile_rows, largest_visit_of(config)
    num_visits = b.expert_table.shape[1]
    entries = num_visits * largest
    nisa.dma_copy(dst=b.expert_table, src=plan[0][lane : lane + 1, 0:num_visits])
    nisa.dma_copy(dst=b.tile_table, src=plan[1][lane : lane + 1, 0:num_visits, 0:largest])
    nisa.dma_copy(dst=b.trips, src=plan[2])
    bank_ps = b.outer_ps[0]
    ids_sb = b.id_table.reshape((R, entries))
    by_tile = slots.reshape((config.num_tiles, R))
    load_table(ids_sb, by_tile, plan[1], lane * entries, -1, bank_ps)
    if config.stores == "rows":
        fill_row_table(config, b, plan[1], lane * entries)
    elif config.stores == "tokens":
        nisa.tensor_copy(dst=b.row_table[0], src=b.id_table)
    if has_scale_table(config):
        scales_sb = b.scale_table[0].reshape((R, entries))
        by_tile = slot_scale.reshape((config.num_tiles, R))
        load_table(scales_sb, by_tile, plan[1], lane * entries, 0.0, bank_ps)
    nisa.memset(dst=b.counter, value=0)
    nisa.memset(dst=b.ahead, value=0)
    nisa.memset(dst=b.one, value=1)
    nisa.memset(dst=b.ones, value=1.0)
    # Rows of padding keep what they had; it must be a number, though no one reads the result.
    gathered = b.turned if config.loop.turns == "dma" else b.rows
    for j in range(len(gathered)):
        nisa.memset(dst=gathered[j], value=0.0, engine=nisa.engine.vector)
    for j in range(len(b.inner)):
        if bias_is_inside(config):
            spare = config.i_axis.rows
            nisa.dma_copy(dst=b.inner[j][spare : spare + 1, 0, 0:R], src=b.ones[0:1, 0:R])


def fill_row_table(
    config: PrefillConfig, b: Buffers, visit_tile: nl.NkiTensor, offset: int
) -> None:
    """Write the slot of every row that holds a token, -1 for padding: tile * R + row, if id >= 0.

    float32 inside, exact below 2**24 slots.
    """
    R = config.tile_rows
    rows_sb = b.row_table[0]
    entries = rows_sb.shape[1] * rows_sb.shape[2]
    nisa.dma_copy(dst=rows_sb, src=visit_tile.ap([[0, R], [1, entries]], offset=offset))
    number_sb = nl.ndarray((R, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=number_sb, pattern=[[1, 1]], offset=1, channel_multiplier=1)
    live_sb = nl.ndarray(rows_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=live_sb, data=b.id_table, op0=nl.greater_equal, operand0=0.0)
    slot_sb = nl.ndarray(rows_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=slot_sb, data=rows_sb, op0=nl.multiply, operand0=float(R), op1=nl.add,
        operand1=number_sb,
    )  # fmt: skip
    nisa.tensor_tensor(dst=slot_sb, data1=slot_sb, data2=live_sb, op=nl.multiply)
    nisa.tensor_scalar(dst=rows_sb, data=slot_sb, op0=nl.add, operand0=-1.0)


def look_ahead(config: PrefillConfig, b: Buffers, s: int) -> None:
    """Fetch expert and token ids of the visit two ahead, and step the counter."""
    num_visits, largest = b.expert_table.shape[1], largest_visit_of(config)
    _fetch(b.expert[s], b.expert_table, [[num_visits, 1], [1, 1]], b.ahead)
    wide = [[num_visits * largest, config.tile_rows], [1, largest]]
    _fetch(b.ids[s], b.id_table, wide, b.ahead)
    if config.scaling == "pre" and not scales_late(config):
        _fetch(b.scale[s], b.scale_table[0], wide, b.ahead)
    nisa.tensor_tensor(dst=b.ahead, data1=b.ahead, data2=b.one, op=nl.add)


def load_late_scales(config: PrefillConfig, b: Buffers, x: Operands, s: int, size: int) -> None:
    """Load the scales of this visit's tokens, the same row for every partition."""
    R, rows = config.tile_rows, config.i_axis.rows
    num_visits, largest = b.expert_table.shape[1], largest_visit_of(config)
    # The counter already names the next visit; what it fetched for this one came a visit ago.
    for j in range(size):
        nisa.dma_copy(
            dst=b.wide_scale[j],
            src=x.slot_scale.reshape((config.num_tiles, R)).ap(
                [[0, rows], [1, R]],
                scalar_offset=b.in_tile[s][0:1, j : j + 1],
                indirect_dim=0,
            ),
            oob_mode=nisa.oob_mode.skip,
            dge_mode=nisa.dge_mode.hwdge,
            engine=nisa.engine.scalar,
        )
    pattern = [[num_visits * largest, 1], [1, largest]]
    _fetch(b.in_tile[1 - s], b.tile_table, pattern, b.counter)


def look_at_outputs(config: PrefillConfig, b: Buffers, s: int) -> None:
    """Fetch the row tiles that this visit writes, and step the counter."""
    num_visits, largest = b.expert_table.shape[1], largest_visit_of(config)
    wide = [[num_visits * largest, config.tile_rows], [1, largest]]
    if config.stores == "tiles":
        _fetch(b.out_tile[s], b.tile_table, [[num_visits * largest, 1], [1, largest]], b.counter)
    else:
        _fetch(b.out_row[s], b.row_table[0], wide, b.counter)
    if config.scaling == "post":
        _fetch(b.out_scale[s], b.scale_table[0], wide, b.counter)
    nisa.tensor_tensor(dst=b.counter, data1=b.counter, data2=b.one, op=nl.add)
    # The down weights of the next visit are asked for while its other parts are still in use.
    _fetch(b.expert_out[1 - s], b.expert_table, [[num_visits, 1], [1, 1]], b.counter)


def _fetch(
    dst_sb: nl.NkiTensor, table_sb: nl.NkiTensor, pattern: list[list[int]], index: nl.NkiTensor
) -> None:
    """Copy one entry of a table, whose number is in SBUF; GpSimd has the time for it."""
    nisa.tensor_copy(
        dst=dst_sb,
        src=table_sb.ap(pattern, scalar_offset=index, indirect_dim=1),
        engine=nisa.engine.gpsimd,
    )
