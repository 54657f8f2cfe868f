"""What the prefill kernel keeps on chip, and the tables that say what comes next.

Everything that outlasts an iteration of a dynamic loop is allocated once in `make_buffers`: the
body of such a loop has fixed addresses. Buffers come in pairs where the next load must not wait for
the last use; which of a pair is meant is known at compile time, because an iteration handles two
work tiles.

Legend: s parity of a work tile, j row tile of a work tile, part of the intermediate axis.
"""

from dataclasses import dataclass
from typing import Any

import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

from nki_kernels.common.arithmetic import apply_two, apply_with
from nki_kernels.common.chip import BANK_FLOATS, BANKS, PARTITIONS
from nki_kernels.common.formula import num_projections
from nki_kernels.common.memory import allocate
from nki_kernels.common.mx import bias_tile
from nki_kernels.common.tiles import keep_below, load_table, make_tiles
from nki_kernels.prefill.config import (
    PrefillConfig,
    Share,
    bias_is_inside,
    first_entries,
    has_scale_table,
    inner_banks,
    inner_per_bank,
    inner_places,
    is_alone,
    is_mx,
    iteration_pairs,
    largest_work_tile_of,
    mx_form,
    no_piece,
    share_of,
    stored_rows,
    stores_pieces,
)
from nki_kernels.prefill.memory import row_table, weight_table, work_tile_table


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
class Fetched(NKIObject):
    """A table of all work tiles [rows, V, columns], and an iteration's part, [rows, n, columns]."""

    own_sb: nl.NkiTensor
    table_sb: nl.NkiTensor


@dataclass
class Buffers(NKIObject):
    """What a core works with: its part of the work, the tensors in HBM, and what stays on chip,
    whose sizes are those of memory.py.

    Lists are indexed by weight buffer, parity of a work tile or row tile; one or none of some.
    """

    config: PrefillConfig
    x: Operands
    share: Share
    gate_up: list[nl.NkiTensor]
    down: list[nl.NkiTensor]
    gate_up_bias: list[nl.NkiTensor]
    up_bias: list[nl.NkiTensor]
    gate_up_scale: list[nl.NkiTensor]
    down_bias: list[nl.NkiTensor]
    down_scale: list[nl.NkiTensor]
    down_scale_parts: list[nl.NkiTensor]
    rows: list[nl.NkiTensor]
    transposed: list[nl.NkiTensor]
    own: list[nl.NkiTensor]
    other: list[nl.NkiTensor]
    inner: list[nl.NkiTensor]
    words: list[nl.NkiTensor]
    word_scales: list[nl.NkiTensor]
    inner_words: list[nl.NkiTensor]
    inner_scales: list[nl.NkiTensor]
    outer: list[nl.NkiTensor]
    gate: list[nl.NkiTensor]
    up: list[nl.NkiTensor]
    inner_ps: list[nl.NkiTensor]
    transposed_ps: list[nl.NkiTensor]
    outer_ps: list[nl.NkiTensor]
    ones: nl.NkiTensor
    zeros: list[nl.NkiTensor]
    expert: list[nl.NkiTensor]
    expert_out: list[nl.NkiTensor]
    ids: list[nl.NkiTensor]
    first_ids: list[nl.NkiTensor]
    scale: list[nl.NkiTensor]
    out_tile: list[nl.NkiTensor]
    out_row: list[nl.NkiTensor]
    out_scale: list[nl.NkiTensor]
    expert_table: nl.NkiTensor
    tile_table: nl.NkiTensor
    id_table: nl.NkiTensor
    row_table: list[nl.NkiTensor]
    piece_table: list[nl.NkiTensor]
    scale_table: list[nl.NkiTensor]
    iterations: nl.NkiTensor
    ends: list[nl.NkiTensor]
    fetched: list[Any]
    counter: nl.NkiTensor
    ahead: nl.NkiTensor
    one: nl.NkiTensor
    has_ids: bool  # whether token ids of all work tiles are on chip already
    work_tiles: int = 0  # of the iteration, where it loads for itself


def make_id_table(config: PrefillConfig) -> nl.NkiTensor:
    """Allocate the token ids of all work tiles, [R, V, G] int32."""
    return allocate(work_tile_table(config).id_table)[0]


def make_buffers(config: PrefillConfig, x: Operands, id_tables: list[nl.NkiTensor]) -> Buffers:
    """Allocate what stays on chip.

    Args:
        config: sizes.
        x: what they are filled from.
        id_tables: token ids of all work tiles, of `make_id_table`, where they are on chip; none
            where they come from HBM.
    """
    w, r, v = weight_table(config), row_table(config), work_tile_table(config)
    gate_up, down, biases = allocate(w.gate_up), allocate(w.down), allocate(w.gate_up_bias)
    if is_mx(config) and config.formula.has_gate_up_bias:
        for run_sb in gate_up:
            biases.append(bias_tile(mx_form(config), run_sb))
    up_bias, gate_up_scale = allocate(w.up_bias), allocate(w.gate_up_scale)
    down_bias, down_scale = allocate(w.down_bias), allocate(w.down_scale)
    down_scale_parts, expert_table = allocate(w.down_scale_parts), allocate(v.expert_table)[0]
    # Transposed rows and output rows are never in PSUM at once: they share what sums of the gate
    # and up projections leave of its banks.
    outer_ps = make_tiles(
        BANKS - inner_banks(config), (PARTITIONS, BANK_FLOATS), nl.float32, nl.psum
    )
    transposed_ps = []
    for bank_ps in outer_ps:
        transposed_ps.append(bank_ps.view(nl.bfloat16))
    expert, ids, scale = allocate(v.expert), allocate(v.ids), allocate(v.scale)
    out_tile, out_row = allocate(v.out_tile), allocate(v.out_row)
    tile_table, row_tables = allocate(v.tile_table)[0], allocate(v.row_table)
    piece_tables, scale_tables = allocate(v.piece_table), allocate(v.scale_table)
    has_ids = len(id_tables) > 0
    id_table = id_tables[0] if has_ids else make_id_table(config)
    fetched = []
    if is_alone(config.loop):
        wide = (1, expert_table.shape[1], 1)
        fetched = [Fetched(expert[0], expert_table.reshape(wide)), Fetched(ids[0], id_table)]
        if config.stores == "tiles":
            fetched.append(Fetched(out_tile[0], tile_table))
        elif stores_pieces(config):
            fetched.append(Fetched(out_tile[0], piece_tables[0]))
        else:
            fetched.append(Fetched(out_row[0], row_tables[0]))
        for number in range(len(scale)):
            fetched.append(Fetched(scale[number], scale_tables[number]))
    scales = _by_work_tile(config, scale)
    return Buffers(
        config=config,
        x=x,
        share=share_of(config, nl.program_id(0)),
        gate_up=gate_up,
        down=down,
        gate_up_bias=biases,
        up_bias=up_bias,
        gate_up_scale=gate_up_scale,
        down_bias=down_bias,
        down_scale=down_scale,
        down_scale_parts=down_scale_parts,
        rows=allocate(r.rows),
        transposed=allocate(r.transposed),
        own=allocate(r.own),
        other=allocate(r.other),
        inner=allocate(r.inner),
        words=allocate(r.words),
        word_scales=allocate(r.word_scales),
        inner_words=allocate(r.inner_words),
        inner_scales=allocate(r.inner_scales),
        outer=allocate(r.outer),
        gate=allocate(r.gate),
        up=allocate(r.up),
        inner_ps=_make_sums(config),
        transposed_ps=transposed_ps,
        outer_ps=outer_ps,
        ones=allocate(v.ones)[0],
        zeros=allocate(v.zeros),
        expert=_by_work_tile(config, expert),
        expert_out=allocate(v.expert_out),
        ids=_by_work_tile(config, ids),
        first_ids=allocate(v.first_ids),
        scale=scales,
        out_tile=_by_work_tile(config, out_tile),
        out_row=_by_work_tile(config, out_row),
        out_scale=scales if is_alone(config.loop) else allocate(v.out_scale),
        expert_table=expert_table,
        tile_table=tile_table,
        id_table=id_table,
        row_table=row_tables,
        piece_table=piece_tables,
        scale_table=scale_tables,
        fetched=fetched,
        iterations=allocate(v.iterations)[0],
        ends=allocate(v.ends),
        counter=allocate(v.counter)[0],
        ahead=allocate(v.ahead)[0],
        one=allocate(v.one)[0],
        has_ids=has_ids,
    )


def _by_work_tile(config: PrefillConfig, made: list[nl.NkiTensor]) -> list[nl.NkiTensor]:
    """Return what belongs to work tiles, [rows, columns] each: tiles by parity, or parts of one."""
    if not is_alone(config.loop):
        return made
    views = []
    for wide_sb in made:
        for work_tile in range(wide_sb.shape[1]):
            views.append(wide_sb[:, work_tile])
    return views


def work_tile_after(b: Buffers, s: int, count: int) -> int:
    """Return which work tile comes so many after one: by parity, or of the iteration, -1 past its
    end.
    """
    if b.work_tiles == 0:
        return (s + count) % 2
    return s + count if s + count < b.work_tiles else -1


def _make_sums(config: PrefillConfig) -> list[nl.NkiTensor]:
    """Allocate the sums [128, 2 or 1, R] of the gate and up projections."""
    halves, each = num_projections(config.formula), inner_per_bank(config)
    if config.loop.h_parts == 1:  # a bank each
        each = 1
    banks = make_tiles(
        inner_banks(config), (PARTITIONS, each, halves, config.tile_rows), nl.float32, nl.psum
    )
    sums = []
    for place in range(inner_places(config)):
        sums.append(banks[place // each][:, place % each])
    return sums


@dataclass
class Lists(NKIObject):
    """What says which work tiles there are, in HBM; `lane` is the row of the lists.

    `slots`: [num_slots] int32 token ids, None if they are on chip; `slot_scale`: [num_slots]
    float32, read if the configuration scales; `meets`: whether both cores write it before.
    """

    slots: Any
    slot_scale: nl.NkiTensor
    work_expert: nl.NkiTensor
    work_row_tiles: nl.NkiTensor
    class_iterations: nl.NkiTensor
    lane: int
    meets: bool = False


def fill_first(b: Buffers, lists: Lists) -> None:
    """Load what the first work tiles need: token ids and experts; reset counters.

    What is loaded after the first weights waits for these, so the ids come before.
    """
    config = b.config
    stop = first_entries(config)
    if not b.has_ids:
        _fill_ids(b, lists, 0, stop)
    num_work_tiles, largest = b.expert_table.shape[1], largest_work_tile_of(config)
    nisa.dma_copy(
        dst=b.expert_table,
        src=lists.work_expert[lists.lane : lists.lane + 1, 0:num_work_tiles],
    )
    if config.loop.missing == "spare":
        keep_below(b.expert_table, config.E)
    nisa.dma_copy(
        dst=b.tile_table,
        src=lists.work_row_tiles[lists.lane : lists.lane + 1, 0:num_work_tiles, 0:largest],
    )
    if config.loop.missing == "spare":
        # The lane's spare tile of the output stands for none.
        keep_below(b.tile_table, config.num_tiles + lists.lane + 1)
    nisa.memset(dst=b.counter, value=0)
    # `start_work_tiles` takes the first two.
    nisa.memset(dst=b.ahead, value=2)
    nisa.memset(dst=b.one, value=1)
    nisa.memset(dst=b.ones, value=1.0)
    for zeros_sb in b.zeros:
        nisa.memset(dst=zeros_sb, value=0.0)
    _clear_rows(b)
    if is_mx(config):
        _clear_fours(b)


def _clear_rows(b: Buffers) -> None:
    """Clear places of gathered rows.

    Rows of padding keep what they had; it must be a number, though no one reads the result.
    """
    for gathered_sb in b.rows:
        nisa.memset(dst=gathered_sb, value=0.0, engine=nisa.engine.vector)


def fill_later(b: Buffers, lists: Lists) -> None:
    """Load the token ids of later work tiles, and their scales; the first down weights, which are
    used last, are loaded after them.
    """
    config = b.config
    num_work_tiles, largest = b.expert_table.shape[1], largest_work_tile_of(config)
    entries, first = num_work_tiles * largest, first_entries(config)
    if first < entries:
        if not b.has_ids:
            _fill_ids(b, lists, first, entries)
        if has_scale_table(config):
            _fill_scales(b, lists, first, entries)
    if is_alone(config.loop):
        return
    last_sb = b.id_table[0:1, num_work_tiles - 1, largest - 1 : largest]
    loop = config.loop
    ahead = 1 if config.shard.splits_h else -(-loop.weight_buffers // loop.out_parts)
    # The first loads of down weights read these numbers, and so wait for the ids of all work tiles.
    for s in range(ahead):
        _follow(b.expert_out[s], b.expert[s], last_sb)


def fill_rest(b: Buffers, lists: Lists) -> None:
    """Load what later work tiles need, beside the first weights."""
    config = b.config
    entries, lane = b.expert_table.shape[1] * largest_work_tile_of(config), lists.lane
    nisa.dma_copy(dst=b.iterations, src=lists.class_iterations)
    if is_alone(config.loop):
        _find_ends(b)
    if stores_pieces(config):
        _fill_piece_table(b, lists)
    elif config.stores == "rows":
        _fill_row_table(b, lists, lane * entries)
    for j in range(len(b.inner)):
        if bias_is_inside(config):
            spare = config.i_axis.rows
            R = config.tile_rows
            # A transfer: engines start at partitions 0, 32, 64 and 96 only.
            nisa.dma_copy(dst=b.inner[j][spare : spare + 1, 0, 0:R], src=b.ones[0:1, 0:R])


def _fill_ids(b: Buffers, lists: Lists, first: int, stop: int) -> None:
    """Load token ids of some entries."""
    config = b.config
    R, entries = config.tile_rows, b.id_table.shape[1] * b.id_table.shape[2]
    ids_sb = b.id_table.reshape((R, entries))[0:R, first:stop]
    values, may_miss = lists.slots.reshape((config.num_tiles, R)), config.loop.missing == "skip"
    offset = lists.lane * entries + first
    load_table(ids_sb, values, lists.work_row_tiles, offset, -1, b.outer_ps[0], may_miss)
    keep_ids(config, ids_sb)


def keep_ids(config: PrefillConfig, ids_sb: nl.NkiTensor) -> None:
    """Name any token where there is none, if one has to be named."""
    if config.loop.missing == "spare":
        nisa.tensor_scalar(dst=ids_sb, data=ids_sb, op0=nl.maximum, operand0=0.0)


def _fill_scales(b: Buffers, lists: Lists, first: int, stop: int) -> None:
    """Load scales of some entries."""
    config = b.config
    R, entries = config.tile_rows, b.id_table.shape[1] * b.id_table.shape[2]
    scales_sb = b.scale_table[0].reshape((R, entries))[0:R, first:stop]
    values = lists.slot_scale.reshape((config.num_tiles, R))
    offset, may_miss = lists.lane * entries + first, config.loop.missing == "skip"
    load_table(scales_sb, values, lists.work_row_tiles, offset, 0.0, b.outer_ps[1], may_miss)


def start_work_tiles(b: Buffers) -> None:
    """Take experts and ids of work tiles 0 and 1 from tables, of which more may be on its way.

    Transfers stand in one queue: weights that were issued earlier would hold up the first rows.
    """
    R, G = b.config.tile_rows, largest_work_tile_of(b.config)
    for s in range(2):
        nisa.tensor_copy(dst=b.ids[s], src=b.id_table[0:R, s, 0:G], engine=nisa.engine.gpsimd)
    for s in range(2):
        _follow(b.expert[s], b.expert_table[0:1, s : s + 1], b.ids[0][0:1, 0:1])


def start_scales(b: Buffers, lists: Lists) -> None:
    """Load scales of the first work tiles, once both cores have theirs in HBM; the first rows are
    on their way.
    """
    config = b.config
    if config.scaling == "none":
        return
    if lists.meets:
        nisa.core_barrier(lists.slot_scale, (0, 1))
    if has_scale_table(config):
        _fill_scales(b, lists, 0, first_entries(config))
    if config.scaling == "pre":
        R, G = config.tile_rows, largest_work_tile_of(config)
        for s in range(2):
            nisa.tensor_copy(
                dst=b.scale[s], src=b.scale_table[0][0:R, s, 0:G], engine=nisa.engine.gpsimd
            )


def _follow(expert: nl.NkiTensor, source: nl.NkiTensor, behind: nl.NkiTensor) -> None:
    """Copy the number of an expert once an integer is there."""
    nothing = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=nothing, data1=behind, data2=behind, op=nl.subtract, engine=nisa.engine.gpsimd
    )
    nisa.tensor_tensor(
        dst=expert, data1=source, data2=nothing, op=nl.add, engine=nisa.engine.gpsimd
    )


def _clear_fours(b: Buffers) -> None:
    """Set places of words that no element fills to zero, where there are such."""
    if b.config.h_axis.tail < b.transposed[0].shape[0]:
        for fours_sb in b.transposed:
            nisa.memset(dst=fours_sb, value=0.0, engine=nisa.engine.vector)
    if b.config.i_axis.rows < b.inner[0].shape[0]:
        for fours_sb in b.inner:
            nisa.memset(dst=fours_sb, value=0.0, engine=nisa.engine.vector)


def _fill_row_table(b: Buffers, lists: Lists, offset: int) -> None:
    """Write the slot of every row that holds a token: tile * R + number; -1 for padding, which has
    no id.

    float32 inside, exact below 2**24 slots.
    """
    R = b.config.tile_rows
    rows_sb = b.row_table[0]
    entries = rows_sb.shape[1] * rows_sb.shape[2]
    nisa.dma_copy(dst=rows_sb, src=lists.work_row_tiles.ap([[0, R], [1, entries]], offset=offset))
    number_sb = nl.ndarray((R, 1), dtype=nl.float32, buffer=nl.sbuf)
    # From 1 on, so that 0 is left for padding; the last step takes the 1 off again.
    nisa.iota(dst=number_sb, pattern=[[1, 1]], offset=1, channel_multiplier=1)
    live_sb = nl.ndarray(rows_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=live_sb, data=b.id_table, op0=nl.greater_equal, operand0=0.0)
    slot_sb = nl.ndarray(rows_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    apply_two(slot_sb, rows_sb, nl.multiply, float(R), nl.add, number_sb)
    nisa.tensor_tensor(dst=slot_sb, data1=slot_sb, data2=live_sb, op=nl.multiply)
    nisa.tensor_scalar(dst=rows_sb, data=slot_sb, op0=nl.add, operand0=-1.0)


def _fill_piece_table(b: Buffers, lists: Lists) -> None:
    """Write the number of every piece that holds a token, `none` for the others: tile * pieces of a
    tile + piece.

    A sum over the rows of a piece is 0 where none is live, else -`none` or less. float32 inside,
    exact below 2**24 slots.
    """
    config = b.config
    R, rows = config.tile_rows, stored_rows(config)
    count, entries = R // rows, b.id_table.shape[1] * b.id_table.shape[2]
    none = no_piece(config)
    live_sb = nl.ndarray((R, entries), dtype=nl.bfloat16, buffer=nl.sbuf)
    ids_sb = b.id_table.reshape((R, entries))
    nisa.tensor_scalar(dst=live_sb, data=ids_sb, op0=nl.greater_equal, operand0=0.0)
    weight_sb = nl.ndarray((R, 1), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=weight_sb, value=-float(none))
    number_sb = nl.ndarray((1, entries), dtype=nl.float32, buffer=nl.sbuf)
    tiles_sb = b.tile_table.reshape((1, entries))
    pieces_sb = b.piece_table[0].reshape((1, entries, count))
    for piece in range(count):
        first = piece * rows
        apply_two(number_sb, tiles_sb, nl.multiply, float(count), nl.add, float(piece))
        for begin in range(0, entries, BANK_FLOATS):
            end = min(entries, begin + BANK_FLOATS)
            sum_ps = b.outer_ps[piece % len(b.outer_ps)][0:1, 0 : end - begin]
            # A matmul adds up over partitions.
            nisa.nc_matmul(
                dst=sum_ps,
                stationary=weight_sb[first : first + rows, 0:1],
                moving=live_sb[first : first + rows, begin:end],
                accumulate=False,
            )
            found_sb, numbers = pieces_sb[0:1, begin:end, piece], number_sb[0:1, begin:end]
            apply_with(found_sb, sum_ps, nl.add, float(none), nl.maximum, numbers)


def _find_ends(b: Buffers) -> None:
    """Write where the loops over each class end, in pairs of work tiles from the first class on."""
    sizes = iteration_pairs(b.config.loop)
    mask_sb = nl.ndarray((1, len(sizes)), dtype=nl.int32, buffer=nl.sbuf)
    # Sizes are powers of two: the mask leaves what whole iterations of that size cover.
    for k in range(len(sizes)):
        nisa.memset(dst=mask_sb[0:1, k : k + 1], value=-sizes[k])
        nisa.tensor_tensor(
            dst=b.ends[0][0:1, :, k],
            data1=b.iterations,
            data2=mask_sb[0:1, k : k + 1].broadcast(1, b.iterations.shape[1]),
            op=nl.bitwise_and,
        )
    for number in range(1, b.iterations.shape[1]):
        first_sb = b.ends[0][0:1, number - 1, len(sizes) - 1 : len(sizes)]
        ends_sb = b.ends[0][0:1, number]
        nisa.tensor_tensor(
            dst=ends_sb, data1=ends_sb, data2=first_sb.broadcast(1, len(sizes)), op=nl.add
        )


def fetch_iteration(b: Buffers, pair: Any, work_tiles: int) -> None:
    """Fetch what belongs to so many work tiles from a pair on, whose number is known or in a
    register.

    Engines stand idle at the start of an iteration, and each fetches something.
    """
    engines = [nisa.engine.vector, nisa.engine.scalar, nisa.engine.gpsimd, nisa.engine.gpsimd]
    b.work_tiles = work_tiles
    for number in range(len(b.fetched)):
        part = b.fetched[number]
        rows, total, columns = part.table_sb.shape
        size = work_tiles * columns
        pairs_sb = part.table_sb.reshape((rows, total // 2, 2 * columns))
        pattern = [[total * columns, rows], [1, size]]
        nisa.tensor_copy(
            dst=part.own_sb.reshape((rows, part.own_sb.shape[1] * columns))[:, 0:size],
            src=pairs_sb.ap(pattern, scalar_offset=pair, indirect_dim=1),
            engine=engines[number],
        )
    if b.config.loop.skips_weights and work_tiles > 1:
        # An expert that the work tile before has on chip is none.
        expert_sb = b.fetched[0].own_sb[:, :, 0]
        same_sb = nl.ndarray((1, work_tiles - 1), dtype=nl.int32, buffer=nl.sbuf)
        later_sb = expert_sb[0:1, 1:work_tiles]
        nisa.tensor_tensor(
            dst=same_sb,
            data1=later_sb,
            data2=expert_sb[0:1, 0 : work_tiles - 1],
            op=nl.equal,
            engine=nisa.engine.vector,
        )
        apply_with(later_sb, same_sb, nl.multiply, float(b.config.E), nl.add, later_sb)


def look_at_expert(b: Buffers, s: int) -> None:
    """Fetch the expert of the work tile two ahead, once the gate and up weights of this one are
    there; before `look_ahead`.
    """
    _fetch(b.expert[s], b.expert_table, b.ahead)


def look_ahead(b: Buffers, s: int) -> None:
    """Fetch token ids of the work tile two ahead, and step the counter."""
    _fetch(b.ids[s], b.id_table, b.ahead)
    if b.config.scaling == "pre":
        _fetch(b.scale[s], b.scale_table[0], b.ahead)
    nisa.tensor_tensor(dst=b.ahead, data1=b.ahead, data2=b.one, op=nl.add)


def look_at_first_rows(b: Buffers, s: int) -> None:
    """Fetch the token ids of the first tile of the work tile two ahead, before `look_ahead`
    does.
    """
    _fetch(b.first_ids[s], b.id_table, b.ahead)


def look_at_outputs(b: Buffers, s: int) -> None:
    """Fetch the row tiles that this work tile writes, and step the counter."""
    config = b.config
    if stores_pieces(config):
        _fetch(b.out_tile[s], b.piece_table[0], b.counter)
    elif config.stores == "tiles":
        _fetch(b.out_tile[s], b.tile_table, b.counter)
    else:
        _fetch(b.out_row[s], b.row_table[0], b.counter)
    if config.scaling == "post":
        _fetch(b.out_scale[s], b.scale_table[0], b.counter)
    nisa.tensor_tensor(dst=b.counter, data1=b.counter, data2=b.one, op=nl.add)
    # The down weights of the next work tile are prefetched while its other parts are still in use.
    _fetch(b.expert_out[1 - s], b.expert_table, b.counter)


def _fetch(dst_sb: nl.NkiTensor, table_sb: nl.NkiTensor, index: nl.NkiTensor) -> None:
    """Copy the first columns of one entry of a table [rows, V, columns] or [rows, V], whose number
    is in SBUF; GpSimd has the time for it.
    """
    rows, apart = table_sb.shape[0], 1
    for extent in table_sb.shape[1 : len(table_sb.shape)]:
        apart *= extent
    pattern = [[apart, rows], [1, dst_sb.shape[1]]]
    entry = table_sb.ap(pattern, scalar_offset=index, indirect_dim=1)
    nisa.tensor_copy(dst=dst_sb, src=entry, engine=nisa.engine.gpsimd)
