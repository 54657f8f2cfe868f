"""The lists of work tiles on the device: what `list_work_tiles` makes on the host, bit for bit.

Slots of an expert fill up in order, so its live row tiles are the first ceil(tokens / R) of its
blocks, and everything follows from the counts. With n tiles of an expert in v = ceil(n / G) work
tiles, which lack d = G v - n tiles, the formula is, for position p of a lane:

    runs      (size, expert), sizes descending: work tiles of that size, ends[run] = their running
              sum v - d of G tiles and d of G - 1, or v - 1 and one of G - d if that is below 0
    steps     work tiles side by side; S[size] = steps whose first work tile is at least so large
    loops     of common.work tiles.loops_of: first position, first step, first single tile of each
    step(p)   by the loop that p falls in;  work tile(p) = step * lanes + lane, or step + lane *
    steps run       = runs that end at or before work tile(p);  expert, size and tiles follow from
    the run

On chip: all tables [128, ...] are the same on every partition; positions are on partitions in runs,
position `partition * columns + column`. _Runs and loops are found by comparing with all their ends;
their numbers are then gathered. Numbers stay below 2^24: exact in float32.

Cost: some fifteen passes over E numbers and a scan over G * E on the Vector engine, a compare over
G * E for every 128 work tiles, and some fifty short instructions. No byte is read, the lists are
written once. The cores write a lane each.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.arithmetic import (
    add,
    add_up,
    apply_two,
    apply_with,
    divide_down,
    divide_up,
    subtract,
)
from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.work_tiles import WorkTileDims, no_tile
from nki_kernels.index.token_search import Meanwhile, go_on

_FAR = float(1 << 22)  # a step that does not exist; twice it is still exact


@dataclass
class _Runs(nl.NKIObject):
    """Work tiles of one size and expert, float32; run `position * E + expert`, largest sizes first.

    Attributes:
        ends: [128, 1 + G * E], 0 and the work tiles up to and with each run.
        tile: [128, 3 * E + 1], row tile that an expert's full work tiles begin with, then those
            that its other work tiles begin with, then the one after its last; the last one is of
            none.
    """

    ends: nl.NkiTensor
    tile: nl.NkiTensor


@dataclass
class ListedTokens(nl.NKIObject):
    """What a layer that lists the tokens of its experts on chip needs; empty for who does not.

    Attributes:
        lists: of tokens (token_lists.py): the first one from the front, the second one from the
            back of an expert's row tiles.
        meanwhile: what goes on between the short instructions that list work tiles.
    """

    lists: int
    meanwhile: Meanwhile


@dataclass
class KnownWorkTiles(nl.NKIObject):
    """What a core that lists tokens knows of the work tiles of its lane on chip.

    Attributes:
        columns: where each row tile is in each list of tokens, beyond all for none; [128, J]
            float32, those of a lane's [V, G] one after the other, J on a partition.
    """

    columns: list[nl.NkiTensor]


@dataclass
class _Loops(nl.NKIObject):
    """The loops of the kernel, [128, L + 1] float32 each; the last one is none.

    Attributes:
        begin: first position.
        step: step at the first position.
        single: step of single tiles that runs beside it.
        num_steps: [128, 1], all steps.
        iterations: [128, L] int32.
    """

    begin: nl.NkiTensor
    step: nl.NkiTensor
    single: nl.NkiTensor
    num_steps: nl.NkiTensor
    iterations: nl.NkiTensor


def store_work_tiles(
    lists: tuple[nl.ndarray, nl.ndarray, nl.ndarray],
    tokens_sb: nl.ndarray,
    last_block_sb: nl.ndarray,
    work_tiles: WorkTileDims,
    block_size: int,
    num_tiles: int,
    listed: ListedTokens,
) -> KnownWorkTiles:
    """Store the lists of work tiles.

    Args:
        lists: [C, V] experts, [C, V, G] row tiles and [1, L] iterations, int32 in HBM.
        tokens_sb: [128, E] float32, tokens of each expert.
        last_block_sb: [128, E] float32, end of each expert's blocks.
        work_tiles: how work tiles are made.
        block_size: B.
        num_tiles: row tiles in all.
        listed: what is wanted besides.
    """
    core, num_cores = nl.program_id(0), nl.num_programs(0)
    work_expert, work_row_tiles, class_iterations = lists
    num_experts = tokens_sb.shape[1]
    meanwhile = listed.meanwhile
    runs = _group_tiles(tokens_sb, last_block_sb, work_tiles, block_size, listed)
    go_on(meanwhile)
    ends = runs.ends[:, 1 : 1 + work_tiles.largest * num_experts]
    loops = _lay_out_loops(ends, work_tiles, num_experts)
    go_on(meanwhile)
    if core == 0:
        nisa.dma_copy(dst=class_iterations, src=loops.iterations[0:1, :])
    columns = (work_tiles.num_work_tiles + PARTITIONS - 1) // PARTITIONS
    known = KnownWorkTiles([])
    for lane in range(work_tiles.num_lanes):
        is_stored = lane % num_cores == core
        # A core lists the lanes that it stores; the only lane both do, where each looks tokens up.
        if is_stored or (listed.lists > 0 and work_tiles.num_lanes == 1):
            work_tile_sb = _number_work_tiles(loops, work_tiles, lane, columns)
            go_on(meanwhile)
            run_sb = _find(ends, work_tile_sb)
            expert_sb, size_sb = _split_runs(run_sb, work_tiles, num_experts)
            go_on(meanwhile)
            # On its way while tiles are placed.
            before_sb = expert_sb
            if work_tiles.reload_after > 0:
                before_sb = _move_later(expert_sb, work_tiles.reload_after)
            tile_sb = _place_tiles(
                runs, work_tile_sb, run_sb, expert_sb, size_sb, work_tiles.largest, num_tiles
            )
            index_sb = _new(columns, nl.uint32)
            nisa.tensor_copy(dst=index_sb, src=expert_sb)
            for number in range(listed.lists):
                known.columns.append(
                    _place_columns(runs, index_sb, tile_sb, expert_sb, number > 0, num_tiles)
                )
            if is_stored:
                if work_tiles.reload_after > 0:
                    _forget_repeated(expert_sb, before_sb, num_experts)
                _store_lane(work_expert, expert_sb, lane, work_tiles.num_work_tiles, 1)
                _store_lane(
                    work_row_tiles, tile_sb, lane, work_tiles.num_work_tiles, work_tiles.largest
                )
    return known


def work_tile_bytes(work_tiles: WorkTileDims, num_experts: int) -> int:
    """Return the bytes of SBUF per partition that listing work tiles takes (counted generously)."""
    columns = -(-work_tiles.num_work_tiles // PARTITIONS)
    runs = 6 * work_tiles.largest * num_experts + 12 * num_experts
    return 4 * (runs + (24 + 3 * work_tiles.largest) * columns)


def spread_entries(work_tiles: WorkTileDims) -> int:
    """Return the entries of a lane's lists of row tiles, filled up to whole partitions."""
    each = -(-work_tiles.num_work_tiles // PARTITIONS) * work_tiles.largest
    return -(-work_tiles.num_work_tiles * work_tiles.largest // each) * each


def _new(width: int, dtype: nl.DType) -> nl.ndarray:
    """Return a tile [128, width]."""
    return nl.ndarray((PARTITIONS, width), dtype, buffer=nl.sbuf)


def _group_tiles(
    tokens_sb: nl.ndarray,
    last_block_sb: nl.ndarray,
    work_tiles: WorkTileDims,
    block_size: int,
    listed: ListedTokens,
) -> _Runs:
    """Return the work tiles of each size and expert, as `_group` of common.work tiles does."""
    E, G = tokens_sb.shape[1], work_tiles.largest
    blocks_sb, tiles_sb, count_sb = _new(E, nl.int32), _new(E, nl.int32), _new(E, nl.int32)
    divide_up(blocks_sb, tokens_sb, block_size)
    divide_up(tiles_sb, tokens_sb, work_tiles.tile_rows)
    divide_up(count_sb, tiles_sb, G)
    work_tiles_sb, tile_sb = _new(G * E, nl.float32), _new(3 * E + 1, nl.float32)
    first = tile_sb[:, 0:E]
    subtract(first, last_block_sb, blocks_sb)
    tiles_of_block = float(block_size // work_tiles.tile_rows)
    apply_two(first, first, nl.multiply, tiles_of_block, nl.add, 0.0)
    lacking_sb, even_sb = _new(E, nl.float32), _new(E, nl.float32)
    apply_with(lacking_sb, count_sb, nl.multiply, float(G), nl.subtract, tiles_sb)
    nisa.tensor_tensor(dst=even_sb, data1=lacking_sb, data2=count_sb, op=nl.less_equal)
    # Full work tiles: all but the lacking ones, or all but one.
    full, spread_sb = work_tiles_sb[:, 0:E], _new(E, nl.float32)
    nisa.tensor_tensor(dst=spread_sb, data1=lacking_sb, data2=even_sb, op=nl.multiply)
    subtract(full, count_sb, spread_sb)
    apply_with(full, even_sb, nl.add, -1.0, nl.add, full)
    apply_with(tile_sb[:, E : 2 * E], full, nl.multiply, float(G), nl.add, first)
    add(tile_sb[:, 2 * E : 3 * E], first, tiles_sb)
    go_on(listed.meanwhile)
    nisa.memset(dst=tile_sb[:, 3 * E : 3 * E + 1], value=0.0, engine=nisa.engine.vector)
    if G > 1:
        subtract(lacking_sb, lacking_sb, spread_sb)
        nisa.tensor_copy(dst=work_tiles_sb[:, E : 2 * E], src=spread_sb)
    for less in range(2, G):
        run = slice(less * E, (less + 1) * E)
        nisa.tensor_scalar(
            dst=work_tiles_sb[:, run], data=lacking_sb, op0=nl.equal, operand0=float(less)
        )
    go_on(listed.meanwhile)
    go_on(listed.meanwhile)
    ends_sb = _new(G * E + 1, nl.float32)
    nisa.memset(dst=ends_sb[:, 0:1], value=0.0, engine=nisa.engine.vector)
    # A running sum: no count is negative, so that the maximum changes nothing.
    nisa.tensor_tensor_scan(
        dst=ends_sb[:, 1 : G * E + 1],
        data0=work_tiles_sb,
        data1=work_tiles_sb,
        initial=0.0,
        op0=nl.add,
        op1=nl.maximum,
    )
    return _Runs(ends_sb, tile_sb)


def _lay_out_loops(ends_sb: nl.ndarray, work_tiles: WorkTileDims, num_experts: int) -> _Loops:
    """Return the loops; see `_arrange` of common.work tiles, which does the same.

    The first M of the L steps that are large have a single tile beside them, the others run in
    pairs. Of S steps as large as a size, then, min(S, M) are of the former, and ceil((S - M) / 2)
    pairs begin with one of them.
    """
    G = work_tiles.largest
    whole_sb, steps_sb = _new(G, nl.int32), _new(G + 1, nl.float32)
    divide_up(
        whole_sb, ends_sb[:, num_experts - 1 : G * num_experts : num_experts], work_tiles.num_lanes
    )
    nisa.memset(dst=steps_sb[:, 0:1], value=0.0, engine=nisa.engine.vector)
    nisa.tensor_copy(dst=steps_sb[:, 1 : G + 1], src=whole_sb)
    large, every = steps_sb[:, G - 1 : G], steps_sb[:, G : G + 1]
    single_sb, mixed_sb = _new(1, nl.float32), _new(1, nl.float32)
    subtract(single_sb, every, large)
    nisa.tensor_tensor(dst=mixed_sb, data1=large, data2=single_sb, op=nl.minimum)
    _add_odd(mixed_sb, large)
    beside_sb, pairs_sb = _new(G, nl.float32), _new(G, nl.int32)  # before each size
    nisa.tensor_scalar(
        dst=beside_sb, data=steps_sb[:, 0:G], op0=nl.minimum, operand0=mixed_sb[:, 0:1]
    )
    rest_sb = _new(G, nl.float32)
    subtract(rest_sb, steps_sb[:, 0:G], beside_sb)
    divide_up(pairs_sb, rest_sb, 2)
    # Sizes and their loops alternate: alone, beside single tiles; the last of them is single tiles.
    iterations_sb, begin_sb = _new(2 * G, nl.int32), _new(2 * G, nl.float32)
    step_sb, beside_step_sb = _new(2 * G, nl.float32), _new(2 * G, nl.float32)
    nisa.memset(dst=step_sb, value=_FAR, engine=nisa.engine.vector)
    nisa.memset(dst=beside_step_sb, value=_FAR, engine=nisa.engine.vector)
    nisa.memset(dst=begin_sb[:, 0:1], value=0.0, engine=nisa.engine.vector)
    alone, mixed, last = slice(0, 2 * G - 2, 2), slice(1, 2 * G - 2, 2), 2 * G - 2
    if G > 1:
        subtract(iterations_sb[:, alone], pairs_sb[:, 1:G], pairs_sb[:, 0 : G - 1])
        subtract(iterations_sb[:, mixed], beside_sb[:, 1:G], beside_sb[:, 0 : G - 1])
        apply_two(step_sb[:, alone], pairs_sb[:, 0 : G - 1], nl.multiply, 2.0, nl.add, mixed_sb)
        nisa.tensor_copy(dst=step_sb[:, mixed], src=beside_sb[:, 0 : G - 1])
        beside = beside_sb[:, 0 : G - 1]
        apply_two(beside_step_sb[:, mixed], beside, nl.multiply, 1.0, nl.add, large)
    subtract(single_sb, single_sb, mixed_sb)
    nisa.tensor_scalar(dst=single_sb, data=single_sb, op0=nl.maximum, operand0=0.0)
    divide_up(iterations_sb[:, last : last + 1], single_sb, 2)
    add(step_sb[:, last : last + 1], large, mixed_sb)
    iterations = iterations_sb[:, 0 : 2 * G - 1]
    add_up(begin_sb[:, 1 : 2 * G], iterations, iterations)
    return _Loops(begin_sb, step_sb, beside_step_sb, every, iterations)


def _add_odd(mixed_sb: nl.ndarray, large: nl.ndarray) -> None:
    """Add 1 where an odd number of the large steps is not among the mixed ones."""
    rest_sb, half_sb = _new(1, nl.float32), _new(1, nl.int32)
    subtract(rest_sb, large, mixed_sb)
    divide_down(half_sb, rest_sb, 2)
    add(mixed_sb, mixed_sb, _rest_of_two(rest_sb, half_sb))


def _number_work_tiles(
    loops: _Loops, work_tiles: WorkTileDims, lane: int, columns: int
) -> nl.ndarray:
    """Return the work tile at every position of a lane, [128, columns] float32; a large one for
    none.

    Args:
        loops: the loops of the kernel.
        work_tiles: how work tiles are made.
        lane: which list.
        columns: positions on a partition.
    """
    place_sb = _new(columns, nl.float32)
    nisa.iota(dst=place_sb, pattern=[[1, columns]], offset=0, channel_multiplier=columns)
    loop_sb = _find(loops.begin[:, 1 : 1 + loops.iterations.shape[1]], place_sb)
    index_sb = _new(columns, nl.uint32)
    nisa.tensor_copy(dst=index_sb, src=loop_sb)
    begin_sb, step_sb = _gather(loops.begin, index_sb), _gather(loops.step, index_sb)
    change_sb = _gather(loops.single, index_sb)
    since_sb, iteration_sb = _new(columns, nl.float32), _new(columns, nl.int32)
    subtract(since_sb, place_sb, begin_sb)
    divide_down(iteration_sb, since_sb, 2)
    is_second_sb = _rest_of_two(since_sb, iteration_sb)
    # Every second loop has a single tile beside a work tile: step, or single step.
    half_sb = _new(columns, nl.int32)
    divide_down(half_sb, loop_sb, 2)
    is_mixed_sb = _rest_of_two(loop_sb, half_sb)
    subtract(change_sb, change_sb, step_sb)
    apply_with(change_sb, change_sb, nl.add, -1.0, nl.multiply, is_second_sb)
    subtract(change_sb, change_sb, iteration_sb)
    nisa.tensor_tensor(dst=change_sb, data1=change_sb, data2=is_mixed_sb, op=nl.multiply)
    add(step_sb, step_sb, since_sb)
    add(step_sb, step_sb, change_sb)
    if work_tiles.in_halves:
        _lose(step_sb, step_sb, nl.greater_equal, loops.num_steps)
    work_tile_sb = _new(columns, nl.float32)
    if work_tiles.in_halves and lane > 0:
        nisa.tensor_scalar(dst=work_tile_sb, data=step_sb, op0=nl.add, operand0=loops.num_steps)
    elif work_tiles.in_halves:
        nisa.tensor_copy(dst=work_tile_sb, src=step_sb)
    else:
        lanes = float(work_tiles.num_lanes)
        apply_two(work_tile_sb, step_sb, nl.multiply, lanes, nl.add, float(lane))
    return work_tile_sb


def _rest_of_two(data: nl.ndarray, half: nl.ndarray) -> nl.ndarray:
    """Return data - 2 * half as float32."""
    rest_sb = _new(data.shape[1], nl.float32)
    apply_with(rest_sb, half, nl.multiply, -2.0, nl.add, data)
    return rest_sb


def _lose(step_sb: nl.ndarray, data: nl.ndarray, compare: nl.DType, limit: object) -> None:
    """Make steps that do not exist of those where `data` compares true."""
    far_sb = _new(step_sb.shape[1], nl.float32)
    nisa.tensor_scalar(
        dst=far_sb, data=data, op0=compare, operand0=limit, op1=nl.multiply, operand1=_FAR
    )
    add(step_sb, step_sb, far_sb)


def _gather(table: nl.ndarray, index_sb: nl.ndarray) -> nl.ndarray:
    """Return table entries by their numbers, a float32 tile; a wide table takes longer."""
    found_sb = _new(index_sb.shape[1], nl.float32)
    nisa.nc_n_gather(dst=found_sb, data=table, indices=index_sb)
    return found_sb


def _gather_block(runs: _Runs, block: int, index_sb: nl.ndarray) -> nl.ndarray:
    """Return entries of a block of the table of tiles, of experts by number, E for none."""
    E = runs.tile.shape[1] // 3
    return _gather(runs.tile[:, block * E : (block + 1) * E + 1], index_sb)


def _find(ends_sb: nl.ndarray, numbers_sb: nl.ndarray) -> nl.ndarray:
    """Return how many of the ends are not above each number, [128, columns] float32."""
    columns = numbers_sb.shape[1]
    found_sb = _new(columns, nl.float32)
    ended_sb = _new(ends_sb.shape[1], nl.float32)
    # Comparing and counting in one instruction: a column has one number a partition.
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
    run_sb: nl.ndarray, work_tiles: WorkTileDims, num_experts: int
) -> tuple[nl.ndarray, nl.ndarray]:
    """Return expert (E for none) of each run, and its row tiles (0 for none), float32."""
    columns = run_sb.shape[1]
    group_sb, none_sb = _new(columns, nl.int32), _new(columns, nl.float32)
    size_sb, expert_sb = _new(columns, nl.float32), _new(columns, nl.float32)
    divide_down(group_sb, run_sb, num_experts)
    apply_with(expert_sb, group_sb, nl.multiply, float(-num_experts), nl.add, run_sb)
    apply_two(size_sb, group_sb, nl.multiply, -1.0, nl.add, float(work_tiles.largest))
    apply_two(none_sb, size_sb, nl.equal, 0.0, nl.multiply, float(num_experts))
    add(expert_sb, expert_sb, none_sb)
    return expert_sb, size_sb


def _move_later(values_sb: nl.ndarray, positions: int) -> nl.ndarray:
    """Return the values of so many positions before, [128, columns] float32, -1 before the first.

    Positions are on partitions in runs, so that a transfer moves them to other partitions.
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
    """Name no expert where it is that of the earlier work tile, whose weights are on chip."""
    same_sb, none_sb = _new(expert_sb.shape[1], nl.float32), _new(expert_sb.shape[1], nl.float32)
    nisa.tensor_tensor(dst=same_sb, data1=expert_sb, data2=before_sb, op=nl.equal)
    apply_two(none_sb, expert_sb, nl.multiply, -1.0, nl.add, float(num_experts))
    nisa.tensor_tensor(dst=none_sb, data1=none_sb, data2=same_sb, op=nl.multiply)
    add(expert_sb, expert_sb, none_sb)


def _place_tiles(
    runs: _Runs,
    work_tile_sb: nl.ndarray,
    run_sb: nl.ndarray,
    expert_sb: nl.ndarray,
    size_sb: nl.ndarray,
    largest: int,
    num_tiles: int,
) -> nl.ndarray:
    """Return the row tiles of each work tile, [128, columns * G] float32."""
    columns, num_experts = work_tile_sb.shape[1], runs.tile.shape[1] // 3
    none = no_tile(num_tiles)
    tile_sb = nl.ndarray((PARTITIONS, columns, largest), nl.float32, buffer=nl.sbuf)
    first_sb, live_sb = _new(columns, nl.float32), _new(columns, nl.float32)
    index_sb, origin_sb = _new(columns, nl.uint32), _new(columns, nl.uint32)
    nisa.tensor_copy(dst=index_sb, src=run_sb)
    # _Runs of all sizes but the largest begin after the full work tiles.
    apply_two(live_sb, size_sb, nl.less, float(largest), nl.multiply, float(num_experts))
    subtract(first_sb, work_tile_sb, _gather(runs.ends, index_sb))
    add(origin_sb, expert_sb, live_sb)
    nisa.tensor_tensor(dst=first_sb, data1=first_sb, data2=size_sb, op=nl.multiply)
    add(first_sb, first_sb, _gather(runs.tile, origin_sb))
    place_sb = nl.ndarray((PARTITIONS, columns, largest), nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=place_sb, pattern=[[0, columns], [1, largest]], offset=0, channel_multiplier=0)
    wide_sb = nl.ndarray(tile_sb.shape, nl.float32, buffer=nl.sbuf)
    size, first = size_sb.expand_dim(2), first_sb.expand_dim(2)
    nisa.tensor_tensor(dst=wide_sb, data1=size.broadcast(2, largest), data2=place_sb, op=nl.greater)
    apply_with(tile_sb, place_sb, nl.add, float(-none), nl.add, first.broadcast(2, largest))
    nisa.tensor_tensor(dst=tile_sb, data1=tile_sb, data2=wide_sb, op=nl.multiply)
    flat_sb = tile_sb.reshape((PARTITIONS, columns * largest))
    nisa.tensor_scalar(dst=flat_sb, data=flat_sb, op0=nl.add, operand0=float(none))
    return flat_sb


def _place_columns(
    runs: _Runs,
    index_sb: nl.ndarray,
    tile_sb: nl.ndarray,
    expert_sb: nl.ndarray,
    is_backwards: bool,
    num_tiles: int,
) -> nl.ndarray:
    """Return (place * E + expert) of row tiles, [128, columns * G] float32; a large one for none.

    Places count from an expert's first row tile, or back from its last.
    """
    columns, num_experts = expert_sb.shape[1], runs.tile.shape[1] // 3
    shape = (columns, tile_sb.shape[1] // columns)
    column_sb = nl.ndarray(tile_sb.shape, nl.float32, buffer=nl.sbuf)
    places, wanted = column_sb.reshape_dim(1, shape), tile_sb.reshape_dim(1, shape)
    # Back from the tile after the last one, which is number -1.
    origin_sb = _gather_block(runs, 2 if is_backwards else 0, index_sb)
    if is_backwards:
        nisa.tensor_scalar(dst=origin_sb, data=origin_sb, op0=nl.add, operand0=-1.0)
    origin = origin_sb.expand_dim(2).broadcast(2, shape[1])
    if is_backwards:
        subtract(places, origin, wanted)
        beyond_sb = nl.ndarray(tile_sb.shape, nl.float32, buffer=nl.sbuf)
        apply_two(beyond_sb, column_sb, nl.less, 0.0, nl.multiply, 2.0 * no_tile(num_tiles))
        add(column_sb, column_sb, beyond_sb)
    else:
        subtract(places, wanted, origin)
    expert = expert_sb.expand_dim(2).broadcast(2, shape[1])
    apply_with(places, places, nl.multiply, float(num_experts), nl.add, expert)
    return column_sb


def _store_lane(
    list_of_lane: nl.ndarray, values_sb: nl.ndarray, lane: int, num_work_tiles: int, size: int
) -> None:
    """Store the values of one lane, `size` for each work tile, as int32."""
    width = values_sb.shape[1]
    integer_sb = _new(width, nl.int32)
    nisa.tensor_copy(dst=integer_sb, src=values_sb)
    total = num_work_tiles * size
    rows, rest = total // width, total % width
    flat = list_of_lane.reshape((list_of_lane.shape[0] * total,))
    target = flat.ap([[width, rows], [1, width]], offset=lane * total)
    nisa.dma_copy(dst=target, src=integer_sb[0:rows, :])
    if rest > 0:
        target = flat.ap([[width, 1], [1, rest]], offset=lane * total + rows * width)
        nisa.dma_copy(dst=target, src=integer_sb[rows : rows + 1, 0:rest])
