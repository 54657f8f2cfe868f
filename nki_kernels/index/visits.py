"""The lists of visits on the device: what `list_visits` makes on the host, bit for bit.

Slots of an expert fill up in order, so its live row tiles are the first ceil(tokens / R) of its
blocks, and everything follows from the counts. With n tiles of an expert in v = ceil(n / G) visits,
which lack d = G v - n tiles, the formula is, for position p of a lane:

    runs      (size, expert), sizes descending: visits of that size, ends[run] = their running sum
              v - d of size G and d of size G - 1, or v - 1 and one of G - d if that is below 0
    steps     visits side by side; S[size] = steps whose first visit is at least so large
    loops     of common.visits.loops_of: first position, first step, first single tile of each
    step(p)   by the loop that p falls in;  visit(p) = step * lanes + lane, or step + lane * steps
    run       = runs that end at or before visit(p);  expert, size and tiles follow from the run

On chip: all tables [128, ...] are the same on every partition; positions lie on partitions in runs,
position `partition * columns + column`. _Runs and loops are found by comparing with all their ends;
their numbers are then gathered. Numbers stay below 2^24: exact in float32.

Cost: some fifteen passes over E numbers and a scan over G * E on the Vector engine, a compare over
G * E for every 128 visits, and some fifty short instructions; no byte is read, the lists are
written once. The cores write a lane each.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.integers import divide_down, divide_up
from nki_kernels.common.visits import VisitDims, no_tile

_FAR = float(1 << 22)  # a step that does not exist; twice it is still exact


@dataclass
class _Runs(nl.NKIObject):
    """Visits of one size and expert, float32; run `position * E + expert`, largest sizes first.

    Attributes:
        ends: [128, 1 + G * E], 0 and the visits up to and with each run.
        tile: [128, 2 * E + 1], row tile that an expert's full visits begin with, then those that
            its other visits begin with; the last one is of none.
    """

    ends: nl.NkiTensor
    tile: nl.NkiTensor


@dataclass
class _Loops(nl.NKIObject):
    """The loops of the kernel, [128, L + 1] float32 each; the last one is none.

    Attributes:
        begin: first position.
        step: step at the first position.
        single: step of single tiles that runs beside it.
        num_steps: [128, 1], all steps.
        trips: [128, L] int32.
    """

    begin: nl.NkiTensor
    step: nl.NkiTensor
    single: nl.NkiTensor
    num_steps: nl.NkiTensor
    trips: nl.NkiTensor


def store_visits(
    lists: tuple[nl.ndarray, nl.ndarray, nl.ndarray],
    tokens_sb: nl.ndarray,
    last_block_sb: nl.ndarray,
    visits: VisitDims,
    block_size: int,
    num_tiles: int,
    visit_columns: list[nl.ndarray],
    fronts: list[nl.ndarray],
) -> None:
    """Store the lists of visits.

    Args:
        lists: [C, V] experts, [C, V, G] row tiles and [1, L] trips, int32 in HBM.
        tokens_sb: [128, E] float32, tokens of each expert.
        last_block_sb: [128, E] float32, end of each expert's blocks.
        visits: how visits are made.
        block_size: B.
        num_tiles: row tiles in all.
        visit_columns: where each tile lies in the lists of tokens of each core (token_lists.py), a
            [C, V, G] int32 tensor in HBM for each, beyond all for none; empty if nobody asks.
        fronts: [128, E] float32, tokens that fill each expert's row tiles from the front, where
            others fill them from the back and an expert's last tile is to have the padding; else
            empty.
    """
    core, num_cores = nl.program_id(0), nl.num_programs(0)
    visit_expert, visit_tile, class_trips = lists
    num_experts = tokens_sb.shape[1]
    runs = _group_tiles(tokens_sb, last_block_sb, visits, block_size)
    ends = runs.ends[:, 1 : 1 + visits.largest * num_experts]
    loops = _lay_out_loops(ends, visits, num_experts)
    if core == 0:
        nisa.dma_copy(dst=class_trips, src=loops.trips[0:1, :])
    columns = (visits.num_visits + PARTITIONS - 1) // PARTITIONS
    for lane in range(visits.num_lanes):
        if lane % num_cores == core:
            visit_sb = _number_visits(loops, visits, lane, columns)
            run_sb = _find(ends, visit_sb)
            expert_sb, size_sb = _split_runs(run_sb, visits.largest, num_experts)
            # On its way while tiles are placed.
            before_sb = expert_sb
            if visits.reload_after > 0:
                before_sb = _move_later(expert_sb, visits.reload_after)
            tile_sb = _place_tiles(
                runs, visit_sb, run_sb, expert_sb, size_sb, visits.largest, num_tiles
            )
            for front_sb in fronts:
                last_sb = _last_tiles(runs, tokens_sb, visits.tile_rows)
                _put_padding_last(runs, last_sb, front_sb, tile_sb, expert_sb, visits.tile_rows)
            for number in range(len(visit_columns)):
                column_sb = _place_columns(
                    runs, _last_tiles(runs, tokens_sb, visits.tile_rows), tile_sb, expert_sb,
                    number > 0, num_tiles,
                )  # fmt: skip
                _store_lane(
                    visit_columns[number], column_sb, lane, visits.num_visits, visits.largest
                )
            if visits.reload_after > 0:
                _forget_repeated(expert_sb, before_sb, num_experts)
            _store_lane(visit_expert, expert_sb, lane, visits.num_visits, 1)
            _store_lane(visit_tile, tile_sb, lane, visits.num_visits, visits.largest)


def visit_bytes(visits: VisitDims, num_experts: int) -> int:
    """Return the bytes of SBUF per partition that listing visits takes (counted generously)."""
    columns = -(-visits.num_visits // PARTITIONS)
    runs = 6 * visits.largest * num_experts + 12 * num_experts
    return 4 * (runs + (24 + 3 * visits.largest) * columns)


def _new(width: int, dtype: nl.DType) -> nl.ndarray:
    """Return a tile [128, width]."""
    return nl.ndarray((PARTITIONS, width), dtype, buffer=nl.sbuf)


def _group_tiles(
    tokens_sb: nl.ndarray, last_block_sb: nl.ndarray, visits: VisitDims, block_size: int
) -> _Runs:
    """Return the visits of each size and expert, as `_group` of common.visits does."""
    E, G = tokens_sb.shape[1], visits.largest
    blocks_sb, tiles_sb, count_sb = _new(E, nl.int32), _new(E, nl.int32), _new(E, nl.int32)
    divide_up(blocks_sb, tokens_sb, block_size)
    divide_up(tiles_sb, tokens_sb, visits.tile_rows)
    divide_up(count_sb, tiles_sb, G)
    visits_sb, tile_sb = _new(G * E, nl.float32), _new(2 * E + 1, nl.float32)
    first = tile_sb[:, 0:E]
    _subtract(first, last_block_sb, blocks_sb)
    _scale_and_add(first, first, float(block_size // visits.tile_rows), 0.0)
    lacking_sb, even_sb = _new(E, nl.float32), _new(E, nl.float32)
    _combine_scaled(lacking_sb, count_sb, nl.multiply, G, nl.subtract, tiles_sb)
    nisa.tensor_tensor(dst=even_sb, data1=lacking_sb, data2=count_sb, op=nl.less_equal)
    # Full visits: all but the lacking ones, or all but one.
    full, short_sb = visits_sb[:, 0:E], _new(E, nl.float32)
    nisa.tensor_tensor(dst=short_sb, data1=lacking_sb, data2=even_sb, op=nl.multiply)
    _subtract(full, count_sb, short_sb)
    _combine_scaled(full, even_sb, nl.add, -1, nl.add, full)
    if G > 1:
        _subtract(lacking_sb, lacking_sb, short_sb)
        nisa.tensor_copy(dst=visits_sb[:, E : 2 * E], src=short_sb)
    for position in range(2, G):
        run = slice(position * E, (position + 1) * E)
        nisa.tensor_scalar(
            dst=visits_sb[:, run], data=lacking_sb, op0=nl.equal, operand0=float(position)
        )
    _combine_scaled(tile_sb[:, E : 2 * E], full, nl.multiply, G, nl.add, first)
    nisa.memset(dst=tile_sb[:, 2 * E : 2 * E + 1], value=0.0, engine=nisa.engine.vector)
    ends_sb = _new(G * E + 1, nl.float32)
    nisa.memset(dst=ends_sb[:, 0:1], value=0.0, engine=nisa.engine.vector)
    # A running sum: no count is negative, so that the maximum changes nothing.
    nisa.tensor_tensor_scan(
        dst=ends_sb[:, 1 : G * E + 1], data0=visits_sb, data1=visits_sb, initial=0.0, op0=nl.add,
        op1=nl.maximum,
    )  # fmt: skip
    return _Runs(ends_sb, tile_sb)


def _combine_scaled(
    dst: nl.ndarray, data: nl.ndarray, op0: nl.DType, number: int, op1: nl.DType, other: nl.ndarray
) -> None:
    """Write (data op0 number) op1 other."""
    nisa.scalar_tensor_tensor(
        dst=dst, data=data, op0=op0, operand0=float(number), op1=op1, operand1=other
    )


def _lay_out_loops(ends_sb: nl.ndarray, visits: VisitDims, num_experts: int) -> _Loops:
    """Return the loops; see `_arrange` of common.visits, which does the same.

    A size takes the single tiles that larger ones left. As long as there are enough, each step
    takes one, so that the steps before a size are also the single tiles taken before it.
    """
    G = visits.largest
    whole_sb, steps_sb = _new(G, nl.int32), _new(G + 1, nl.float32)
    divide_up(whole_sb, ends_sb[:, num_experts - 1 : G * num_experts : num_experts],
              visits.num_lanes)  # fmt: skip
    nisa.memset(dst=steps_sb[:, 0:1], value=0.0, engine=nisa.engine.vector)
    nisa.tensor_copy(dst=steps_sb[:, 1 : G + 1], src=whole_sb)
    before, after = steps_sb[:, 0:G], steps_sb[:, 1 : G + 1]
    mine_sb, left_sb = _new(G, nl.float32), _new(G, nl.float32)
    _subtract(mine_sb, after, before)
    nisa.tensor_scalar(
        dst=left_sb, data=before, op0=nl.subtract, operand0=mine_sb[:, G - 1 : G], reverse0=True,
        op1=nl.maximum, operand1=0.0,
    )  # fmt: skip
    # Sizes and their loops alternate: alone, beside single tiles; the last of them is single tiles.
    trips_sb, begin_sb = _new(2 * G, nl.int32), _new(2 * G, nl.float32)
    step_sb, single_sb = _new(2 * G, nl.float32), _new(2 * G, nl.float32)
    nisa.memset(dst=step_sb, value=_FAR, engine=nisa.engine.vector)
    nisa.memset(dst=single_sb, value=_FAR, engine=nisa.engine.vector)
    nisa.memset(dst=begin_sb[:, 0:1], value=0.0, engine=nisa.engine.vector)
    alone, mixed, last = slice(0, 2 * G, 2), slice(1, 2 * G, 2), slice(2 * G - 2, 2 * G - 1)
    over_sb, twice_sb = _new(G, nl.float32), _new(G, nl.float32)
    _subtract(over_sb, mine_sb, left_sb)
    nisa.tensor_scalar(
        dst=over_sb, data=over_sb, op0=nl.maximum, operand0=0.0, op1=nl.multiply, operand1=0.5
    )
    nisa.tensor_scalar(dst=trips_sb[:, alone], data=over_sb, op0=nl.add, operand0=-0.25)
    _scale_and_add(twice_sb, trips_sb[:, alone], 2.0, 0.0)
    _subtract(trips_sb[:, mixed], mine_sb, twice_sb)
    divide_up(trips_sb[:, last], left_sb[:, G - 1 : G], 2)
    trips = trips_sb[:, 0 : 2 * G - 1]
    nisa.tensor_tensor_scan(
        dst=begin_sb[:, 1 : 2 * G], data0=trips, data1=trips, initial=0.0, op0=nl.add, op1=nl.add
    )
    nisa.tensor_copy(dst=step_sb[:, alone], src=before)
    _scale_and_add(single_sb[:, mixed], left_sb, -1.0, steps_sb[:, G : G + 1])
    _subtract(step_sb[:, last], steps_sb[:, G : G + 1], left_sb[:, G - 1 : G])
    _add(step_sb[:, mixed], before, twice_sb)
    # Past the last loop there is neither.
    nisa.memset(dst=step_sb[:, 2 * G - 1 : 2 * G], value=_FAR)
    nisa.memset(dst=single_sb[:, 2 * G - 1 : 2 * G], value=_FAR)
    return _Loops(begin_sb, step_sb, single_sb, steps_sb[:, G : G + 1], trips)


def _add(dst: nl.ndarray, data1: nl.ndarray, data2: nl.ndarray) -> None:
    """Write the sum of two tiles."""
    nisa.tensor_tensor(dst=dst, data1=data1, data2=data2, op=nl.add)


def _subtract(dst: nl.ndarray, data1: nl.ndarray, data2: nl.ndarray) -> None:
    """Write the difference of two tiles."""
    nisa.tensor_tensor(dst=dst, data1=data1, data2=data2, op=nl.subtract)


def _scale_and_add(dst: nl.ndarray, data: nl.ndarray, factor: float, offset: object) -> None:
    """Write data * factor + offset, a number or one per partition."""
    nisa.tensor_scalar(
        dst=dst, data=data, op0=nl.multiply, operand0=factor, op1=nl.add, operand1=offset
    )


def _number_visits(loops: _Loops, visits: VisitDims, lane: int, columns: int) -> nl.ndarray:
    """Return the visit at every position of a lane, [128, columns] float32; a large one for none.

    Args:
        loops: the loops of the kernel.
        visits: how visits are made.
        lane: which list.
        columns: positions on a partition.
    """
    place_sb = _new(columns, nl.float32)
    nisa.iota(dst=place_sb, pattern=[[1, columns]], offset=0, channel_multiplier=columns)
    loop_sb = _find(loops.begin[:, 1 : 1 + loops.trips.shape[1]], place_sb)
    index_sb = _new(columns, nl.uint32)
    nisa.tensor_copy(dst=index_sb, src=loop_sb)
    begin_sb, step_sb = _gather(loops.begin, index_sb), _gather(loops.step, index_sb)
    change_sb = _gather(loops.single, index_sb)
    since_sb, trip_sb = _new(columns, nl.float32), _new(columns, nl.int32)
    _subtract(since_sb, place_sb, begin_sb)
    divide_down(trip_sb, since_sb, 2)
    is_second_sb = _rest_of_two(since_sb, trip_sb)
    # Every second loop has a single tile beside a visit: step, or single step, by the trip.
    half_sb = _new(columns, nl.int32)
    divide_down(half_sb, loop_sb, 2)
    is_mixed_sb = _rest_of_two(loop_sb, half_sb)
    _subtract(change_sb, change_sb, step_sb)
    _combine_scaled(change_sb, change_sb, nl.add, -1, nl.multiply, is_second_sb)
    _subtract(change_sb, change_sb, trip_sb)
    nisa.tensor_tensor(dst=change_sb, data1=change_sb, data2=is_mixed_sb, op=nl.multiply)
    _add(step_sb, step_sb, since_sb)
    _add(step_sb, step_sb, change_sb)
    if visits.in_halves:
        _lose(step_sb, step_sb, nl.greater_equal, loops.num_steps)
    visit_sb = _new(columns, nl.float32)
    if visits.in_halves and lane > 0:
        nisa.tensor_scalar(dst=visit_sb, data=step_sb, op0=nl.add, operand0=loops.num_steps)
    elif visits.in_halves:
        nisa.tensor_copy(dst=visit_sb, src=step_sb)
    else:
        _scale_and_add(visit_sb, step_sb, float(visits.num_lanes), float(lane))
    return visit_sb


def _rest_of_two(data: nl.ndarray, half: nl.ndarray) -> nl.ndarray:
    """Return data - 2 * half as float32."""
    rest_sb = _new(data.shape[1], nl.float32)
    _combine_scaled(rest_sb, half, nl.multiply, -2, nl.add, data)
    return rest_sb


def _lose(step_sb: nl.ndarray, data: nl.ndarray, compare: nl.DType, limit: object) -> None:
    """Make steps that do not exist of those where `data` compares true."""
    far_sb = _new(step_sb.shape[1], nl.float32)
    nisa.tensor_scalar(
        dst=far_sb, data=data, op0=compare, operand0=limit, op1=nl.multiply, operand1=_FAR
    )
    _add(step_sb, step_sb, far_sb)


def _gather(table_sb: nl.ndarray, index_sb: nl.ndarray) -> nl.ndarray:
    """Return table entries by their numbers, a float32 tile."""
    found_sb = _new(index_sb.shape[1], nl.float32)
    nisa.nc_n_gather(dst=found_sb, data=table_sb, indices=index_sb)
    return found_sb


def _find(ends_sb: nl.ndarray, numbers_sb: nl.ndarray) -> nl.ndarray:
    """Return how many of the ends are not above each number, [128, columns] float32."""
    columns = numbers_sb.shape[1]
    found_sb = _new(columns, nl.float32)
    ended_sb = _new(ends_sb.shape[1], nl.float32)
    for column in range(columns):
        nisa.tensor_scalar_reduce(
            dst=ended_sb,
            data=ends_sb,
            op0=nl.less_equal,
            operand0=numbers_sb[:, column : column + 1],
            reduce_op=nl.add,
            reduce_res=found_sb[:, column : column + 1],
        )
    return found_sb


def _split_runs(
    run_sb: nl.ndarray, largest: int, num_experts: int
) -> tuple[nl.ndarray, nl.ndarray]:
    """Return expert (E for none) and size (0 for none) of each run, float32."""
    columns = run_sb.shape[1]
    group_sb, none_sb = _new(columns, nl.int32), _new(columns, nl.float32)
    size_sb, expert_sb = _new(columns, nl.float32), _new(columns, nl.float32)
    divide_down(group_sb, run_sb, num_experts)
    _scale_and_add(size_sb, group_sb, -1.0, float(largest))
    _combine_scaled(expert_sb, group_sb, nl.multiply, -num_experts, nl.add, run_sb)
    nisa.tensor_scalar(
        dst=none_sb, data=size_sb, op0=nl.equal, operand0=0.0, op1=nl.multiply,
        operand1=float(num_experts),
    )  # fmt: skip
    _add(expert_sb, expert_sb, none_sb)
    return expert_sb, size_sb


def _move_later(values_sb: nl.ndarray, positions: int) -> nl.ndarray:
    """Return the values of so many positions before, [128, columns] float32, -1 before the first.

    Positions lie on partitions in runs, so that a transfer moves them to other partitions.
    """
    columns = values_sb.shape[1]
    moved_sb = _new(columns, nl.float32)
    nisa.memset(dst=moved_sb, value=-1.0, engine=nisa.engine.gpsimd)
    rows, rest = positions // columns, positions % columns
    stay = columns - rest  # of a partition's values; the rest go one partition further
    if rows < PARTITIONS:
        nisa.dma_copy(
            dst=moved_sb[rows:PARTITIONS, rest:columns],
            src=values_sb[0 : PARTITIONS - rows, 0:stay],
        )
    if rest > 0 and rows + 1 < PARTITIONS:
        source = values_sb[0 : PARTITIONS - rows - 1, stay:columns]
        nisa.dma_copy(dst=moved_sb[rows + 1 : PARTITIONS, 0:rest], src=source)
    return moved_sb


def _forget_repeated(expert_sb: nl.ndarray, before_sb: nl.ndarray, num_experts: int) -> None:
    """Name no expert where it is that of the earlier visit, whose weights are on chip."""
    same_sb, none_sb = _new(expert_sb.shape[1], nl.float32), _new(expert_sb.shape[1], nl.float32)
    nisa.tensor_tensor(dst=same_sb, data1=expert_sb, data2=before_sb, op=nl.equal)
    _scale_and_add(none_sb, expert_sb, -1.0, float(num_experts))
    nisa.tensor_tensor(dst=none_sb, data1=none_sb, data2=same_sb, op=nl.multiply)
    _add(expert_sb, expert_sb, none_sb)


def _place_tiles(
    runs: _Runs,
    visit_sb: nl.ndarray,
    run_sb: nl.ndarray,
    expert_sb: nl.ndarray,
    size_sb: nl.ndarray,
    largest: int,
    num_tiles: int,
) -> nl.ndarray:
    """Return the row tiles of each visit, [128, columns * G] float32."""
    columns, num_experts = visit_sb.shape[1], runs.tile.shape[1] // 2
    none = no_tile(num_tiles)
    tile_sb = nl.ndarray((PARTITIONS, columns, largest), nl.float32, buffer=nl.sbuf)
    first_sb, live_sb = _new(columns, nl.float32), _new(columns, nl.float32)
    index_sb, origin_sb = _new(columns, nl.uint32), _new(columns, nl.uint32)
    nisa.tensor_copy(dst=index_sb, src=run_sb)
    # _Runs of all sizes but the largest begin after the full visits.
    nisa.tensor_scalar(
        dst=live_sb, data=size_sb, op0=nl.less, operand0=float(largest), op1=nl.multiply,
        operand1=float(num_experts),
    )  # fmt: skip
    _add(origin_sb, expert_sb, live_sb)
    _subtract(first_sb, visit_sb, _gather(runs.ends, index_sb))
    nisa.tensor_tensor(dst=first_sb, data1=first_sb, data2=size_sb, op=nl.multiply)
    _add(first_sb, first_sb, _gather(runs.tile, origin_sb))
    place_sb = nl.ndarray((PARTITIONS, columns, largest), nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=place_sb, pattern=[[0, columns], [1, largest]], offset=0, channel_multiplier=0)
    wide_sb = nl.ndarray(tile_sb.shape, nl.float32, buffer=nl.sbuf)
    size, first = size_sb.expand_dim(2), first_sb.expand_dim(2)
    nisa.tensor_tensor(dst=wide_sb, data1=size.broadcast(2, largest), data2=place_sb, op=nl.greater)
    _combine_scaled(tile_sb, place_sb, nl.add, -none, nl.add, first.broadcast(2, largest))
    nisa.tensor_tensor(dst=tile_sb, data1=tile_sb, data2=wide_sb, op=nl.multiply)
    flat_sb = tile_sb.reshape((PARTITIONS, columns * largest))
    nisa.tensor_scalar(dst=flat_sb, data=flat_sb, op0=nl.add, operand0=float(none))
    return flat_sb


def _last_tiles(runs: _Runs, tokens_sb: nl.ndarray, tile_rows: int) -> nl.ndarray:
    """Return the last row tile of each expert that has one, [128, E + 1] float32; then a 0."""
    E = tokens_sb.shape[1]
    tiles_sb, last_sb = _new(E, nl.int32), _new(E + 1, nl.float32)
    divide_up(tiles_sb, tokens_sb, tile_rows)
    nisa.memset(dst=last_sb[:, E : E + 1], value=0.0, engine=nisa.engine.vector)
    _combine_scaled(last_sb[:, 0:E], tiles_sb, nl.add, -1, nl.add, runs.tile[:, 0:E])
    return last_sb


def _put_padding_last(
    runs: _Runs,
    last_sb: nl.ndarray,
    front_sb: nl.ndarray,
    tile_sb: nl.ndarray,
    expert_sb: nl.ndarray,
    tile_rows: int,
) -> None:
    """Swap the last row tile of each expert with the one in which front and back meet.

    Padding moves no data: the rows of a visit's last tile, which wait for all others', then come
    soonest.
    """
    E, columns = front_sb.shape[1], expert_sb.shape[1]
    whole_sb, index_sb = _new(E, nl.int32), _new(columns, nl.uint32)
    middle_sb, change_sb = _new(E + 1, nl.float32), _new(columns, nl.float32)
    divide_down(whole_sb, front_sb, tile_rows)
    nisa.memset(dst=middle_sb[:, E : E + 1], value=0.0, engine=nisa.engine.vector)
    _add(middle_sb[:, 0:E], runs.tile[:, 0:E], whole_sb)
    nisa.tensor_copy(dst=index_sb, src=expert_sb)
    middle, last = _gather(middle_sb, index_sb), _gather(last_sb, index_sb)
    _subtract(change_sb, last, middle)
    shape = (PARTITIONS, columns, tile_sb.shape[1] // columns)
    tiles, wide = tile_sb.reshape(shape), []
    for values_sb in (middle, last, change_sb):
        wide.append(values_sb.expand_dim(2).broadcast(2, shape[2]))
    moved_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    back_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=moved_sb, data1=tiles, data2=wide[0], op=nl.equal)
    nisa.tensor_tensor(dst=back_sb, data1=tiles, data2=wide[1], op=nl.equal)
    _subtract(moved_sb, moved_sb, back_sb)
    nisa.tensor_tensor(dst=moved_sb, data1=moved_sb, data2=wide[2], op=nl.multiply)
    _add(tiles, tiles, moved_sb)


def _place_columns(
    runs: _Runs,
    last_sb: nl.ndarray,
    tile_sb: nl.ndarray,
    expert_sb: nl.ndarray,
    is_backwards: bool,
    num_tiles: int,
) -> nl.ndarray:
    """Return (place * E + expert) of row tiles, [128, columns * G] float32; a large one for none.

    Places count from an expert's first row tile, or back from its last.
    """
    columns, num_experts = expert_sb.shape[1], last_sb.shape[1] - 1
    index_sb = _new(columns, nl.uint32)
    nisa.tensor_copy(dst=index_sb, src=expert_sb)
    shape = (columns, tile_sb.shape[1] // columns)
    column_sb = nl.ndarray(tile_sb.shape, nl.float32, buffer=nl.sbuf)
    places, wanted = column_sb.reshape_dim(1, shape), tile_sb.reshape_dim(1, shape)
    origin_sb = _gather(last_sb if is_backwards else runs.tile, index_sb)
    origin = origin_sb.expand_dim(2).broadcast(2, shape[1])
    if is_backwards:
        _subtract(places, origin, wanted)
        beyond_sb = nl.ndarray(tile_sb.shape, nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=beyond_sb, data=column_sb, op0=nl.less, operand0=0.0, op1=nl.multiply,
            operand1=2.0 * no_tile(num_tiles),
        )  # fmt: skip
        _add(column_sb, column_sb, beyond_sb)
    else:
        _subtract(places, wanted, origin)
    expert = expert_sb.expand_dim(2).broadcast(2, shape[1])
    _combine_scaled(places, places, nl.multiply, num_experts, nl.add, expert)
    return column_sb


def _store_lane(
    list_of_lane: nl.ndarray, values_sb: nl.ndarray, lane: int, num_visits: int, size: int
) -> None:
    """Store the values of one lane, `size` for each visit, as int32."""
    width = values_sb.shape[1]
    integer_sb = _new(width, nl.int32)
    nisa.tensor_copy(dst=integer_sb, src=values_sb)
    total = num_visits * size
    rows, rest = total // width, total % width
    flat = list_of_lane.reshape((list_of_lane.shape[0] * total,))
    target = flat.ap([[width, rows], [1, width]], offset=lane * total)
    nisa.dma_copy(dst=target, src=integer_sb[0:rows, :])
    if rest > 0:
        target = flat.ap([[width, 1], [1, rest]], offset=lane * total + rows * width)
        nisa.dma_copy(dst=target, src=integer_sb[rows : rows + 1, 0:rest])
