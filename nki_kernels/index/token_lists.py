"""Which tokens an expert's row tiles hold, on chip: for a layer, which stores no list of slots.

Nobody asks for an order inside an expert, so a core places its pairs before it knows the other's:
the first fills an expert's row tiles from the front, the second one from the back, backwards. Of a
pair that is number n among its core's choices of an expert, by tiles of tokens, then partitions,

    place = n // R, row tiles from the expert's first, or back from its last
    row   = that of number n % R, or R - 1 - n % R, of `row_runs`

Column place * E + expert of a [R, W] tile tells who is there (token_sums.py), for W // E places:
twice what an expert gets where tokens choose alike. Places beyond them are the business of further
passes, in a loop with a run-time trip count. The token of a slot is the sum of both cores' columns,
as it has one at most; visits.py lists the columns of each visit.

Where few pairs have an expert here, as on ranks that split the experts, those of a partition are
pulled together first, the largest key of each pair eight at a time, so that one-hots are made of
hardly more than these. Pairs beyond the columns they get are added in a loop, again in few columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.integers import count_up, divide_down, divide_up
from nki_kernels.common.memory import allocate
from nki_kernels.common.tiles import compare_columns, ones
from nki_kernels.common.token_tiles import TokenTiles
from nki_kernels.common.visits import RowRun
from nki_kernels.index.config import BlockDims
from nki_kernels.index.kernel import (
    count_up_tiles,
    keep_near,
    list_wanted,
    look_up_columns,
    mark_tile,
)
from nki_kernels.index.memory import AT_ONCE, COUNT_BANKS, index_table, ranked_tiles
from nki_kernels.index.slot_inverse import GROUP, exchange
from nki_kernels.index.token_sums import (
    TokenSums,
    add_tokens,
    num_token_terms,
    start_tokens,
    tell_tokens,
    value_tokens,
)

NOBODY = float(1 << 20)  # minus the number of a pair without an expert: its place is below all
_FLOOR = 128  # columns that cost a matmul as much as fewer do, two to a sum
# A pair's key: its expert, its number there, and its tile of tokens; 23 bits.
_EXPERT, _NUMBER, _MOST_EXPERTS = 1 << 17, 1 << 5, 64
_NO_KEY = -float(1 << 23)  # of no expert: a negative one, whose column is none
MORE_NEAR = 2 * AT_ONCE  # columns of near pairs of a further trip
_WORTH = 32  # columns of pairs less, that pay for pulling the others together


@dataclass
class _Counts(nl.NKIObject):
    """What running counts are made of; matrices are [128, 128] bfloat16."""

    chosen_sb: nl.ndarray  # [128, tiles, E], 1 where a token chose an expert
    lower_sb: nl.ndarray  # 1 where the row comes before the column
    rest_sb: nl.ndarray  # 1 elsewhere
    ones_sb: nl.ndarray
    all_ps: nl.ndarray  # [128, E] float32, choices of all tiles so far
    banks: list[nl.ndarray]  # [128, E] float32 in PSUM


@dataclass
class RankedPairs(nl.NKIObject):
    """The choices of a core's tokens, [128, pairs], as far as groups of tiles have been ranked."""

    group: int  # tiles of tokens
    expert_sb: nl.ndarray  # uint32, E for none
    look_sb: nl.ndarray  # uint32, of the tiles of a group side by side, E + 1 columns each
    number_sb: nl.ndarray  # float32, among the core's choices of the expert; -NOBODY for none
    row_sb: nl.ndarray  # float32
    column_sb: nl.ndarray  # float32
    wanted_sb: nl.ndarray  # [128, tiles, K filled up] float32
    names_sb: nl.ndarray  # [128, E] float32, 0, 1, ...
    counts: _Counts


def list_width(tokens: TokenTiles, top_k: int, dims: BlockDims, share: float, rows: int) -> int:
    """Return W, whole places of all experts.

    Args:
        tokens: of a core.
        top_k: K.
        dims: E, B and N.
        share: of all experts that an expert is.
        rows: R.
    """
    expected = tokens.rows * top_k * share
    places = max(-(-int(2 * expected) // rows), _FLOOR // dims.num_experts)
    most = max(1, -(-tokens.rows // rows))
    return min(places, most, GROUP // dims.num_experts) * dims.num_experts


def near_columns(tokens: TokenTiles, top_k: int, num_experts: int, share: float) -> int:
    """Return the columns of pairs that are added to the lists at once: of all pairs, or of those
    that are pulled together.

    Args:
        tokens: of a core.
        top_k: K.
        num_experts: E.
        share: of all experts that are here.
    """
    every = max(1, tokens.count) * top_k
    if num_experts > _MOST_EXPERTS or num_token_terms(tokens.rows) > 1:
        return every
    expected = every * share
    # Four deviations where tokens choose alike.
    near = -(-int(expected + 4.0 * math.sqrt(expected)) // AT_ONCE) * AT_ONCE
    return near if near + _WORTH <= every else every


def start_ranks(
    index_sb: nl.ndarray, tokens: TokenTiles, dims: BlockDims, top_k: int
) -> RankedPairs:
    """Return the pairs of this core, of which none has been ranked.

    Args:
        index_sb: as of `place_pairs`.
        tokens: of this core.
        dims: E, B and N.
        top_k: K.
    """
    keep_near(index_sb, dims.num_experts)
    table, E = index_table(tokens, top_k, dims), dims.num_experts
    wanted_sb, chosen_sb = list_wanted(index_sb, table, top_k), allocate(table.chosen)[0]
    names_sb, expert_sb = count_up(E, nl.float32), look_up_columns(index_sb, E)
    count, group = chosen_sb.shape[1], ranked_tiles(E)
    look_sb = nl.ndarray(expert_sb.shape, nl.uint32, buffer=nl.sbuf)
    count_up_tiles(look_sb, expert_sb, count, E + 1, group)
    ones_sb = ones(nl.bfloat16)
    lower_sb = compare_columns(ones_sb, nl.greater)
    rest_sb = compare_columns(ones_sb, nl.less_equal)
    all_ps = nl.ndarray((PARTITIONS, E), nl.float32, buffer=nl.psum)
    counts = _Counts(chosen_sb, lower_sb, rest_sb, ones_sb, all_ps, [])
    for _bank in range(min(COUNT_BANKS, count)):
        counts.banks.append(nl.ndarray((PARTITIONS, E), nl.float32, buffer=nl.psum))
    number_sb, row_sb, column_sb = allocate(table.slots._replace(number=3))
    return RankedPairs(
        group, expert_sb, look_sb, number_sb, row_sb, column_sb, wanted_sb, names_sb, counts
    )


def mark_group(pairs: RankedPairs, tiles: slice) -> None:
    """Mark who chose whom, before `rank_group`."""
    for tile in range(tiles.start, tiles.stop):
        mark_tile(pairs.counts.chosen_sb, pairs.wanted_sb, pairs.names_sb, tile)


def count_group(pairs: RankedPairs, tiles: slice) -> nl.ndarray:
    """Return how many earlier tokens of the core chose what a marked group of tiles chooses from,
    [128, tiles, E + 1] float32, where column E is for no choice; groups one after the other.
    """
    counts, E = pairs.counts, pairs.names_sb.shape[1]
    before_sb = nl.ndarray(
        (PARTITIONS, tiles.stop - tiles.start, E + 1), nl.float32, buffer=nl.sbuf
    )
    nisa.memset(dst=before_sb[:, :, E], value=-NOBODY, engine=nisa.engine.gpsimd)
    for tile in range(tiles.start, tiles.stop):
        _count_before(before_sb[:, tile - tiles.start, 0:E], counts, tile)
        nisa.nc_matmul(
            dst=counts.all_ps, stationary=counts.ones_sb, moving=counts.chosen_sb[:, tile, :],
            accumulate=tile > 0,
        )  # fmt: skip
    return before_sb


def rank_group(pairs: RankedPairs, tiles: slice, before_sb: nl.ndarray) -> None:
    """Write the numbers of the pairs of a group of tiles; `before_sb` of `count_group`."""
    columns = columns_of(pairs, tiles)
    flat_sb = before_sb.reshape((PARTITIONS, before_sb.shape[1] * before_sb.shape[2]))
    number = pairs.number_sb[:, columns]
    nisa.nc_n_gather(dst=number, data=flat_sb, indices=pairs.look_sb[:, columns])


def place_group(pairs: RankedPairs, tiles: slice, rows: int) -> None:
    """Write rows and columns of the pairs of a group of tiles, which have numbers; R rows."""
    columns, E = columns_of(pairs, tiles), pairs.names_sb.shape[1]
    number = pairs.number_sb[:, columns]
    place_sb = nl.ndarray(number.shape, nl.int32, buffer=nl.sbuf)
    divide_down(place_sb, number, rows)
    nisa.scalar_tensor_tensor(
        dst=pairs.row_sb[:, columns], data=place_sb, op0=nl.multiply, operand0=-float(rows),
        op1=nl.add, operand1=number,
    )  # fmt: skip
    nisa.scalar_tensor_tensor(
        dst=pairs.column_sb[:, columns], data=place_sb, op0=nl.multiply, operand0=float(E),
        op1=nl.add, operand1=pairs.expert_sb[:, columns],
    )  # fmt: skip


def columns_of(pairs: RankedPairs, tiles: slice) -> slice:
    """Return the columns of pairs that belong to some tiles of tokens."""
    top_k = pairs.number_sb.shape[1] // pairs.counts.chosen_sb.shape[1]
    return slice(tiles.start * top_k, tiles.stop * top_k)


def count_choices(pairs: RankedPairs) -> nl.ndarray:
    """Return how many of this core's tokens chose each expert, [128, E] float32, alike on all
    partitions, once all groups are counted.
    """
    own_sb = nl.ndarray(pairs.counts.all_ps.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=own_sb, src=pairs.counts.all_ps)
    return own_sb


def _count_before(before: nl.ndarray, counts: _Counts, tile: int) -> None:
    """Write how many earlier tokens of the core chose each expert, [128, E].

    Sums of the tensor engine; of some banks in turn, so that none waits for the copy of another.
    """
    bank_ps, last = counts.banks[tile % len(counts.banks)], tile - COUNT_BANKS
    parts = [(counts.rest_sb, last)] if last >= 0 else []
    for earlier in range(max(0, last + 1), tile):
        parts.append((counts.ones_sb, earlier))
    parts.append((counts.lower_sb, tile))
    for number in range(len(parts)):
        stationary, earlier = parts[number]
        nisa.nc_matmul(
            dst=bank_ps, stationary=stationary, moving=counts.chosen_sb[:, earlier, :],
            accumulate=last >= 0 or number > 0,
        )  # fmt: skip
    nisa.tensor_copy(dst=before, src=bank_ps, engine=nisa.engine.scalar)


def start_lists(tokens: TokenTiles, runs: list[RowRun], width: int) -> TokenSums:
    """Return sums of this core's lists [R, W], to which nothing has been added; `runs` are those of
    the rows (`row_runs`).
    """
    return start_tokens(tokens, runs, width, nl.program_id(0) > 0)


def add_to_lists(sums: TokenSums, pairs: RankedPairs, tiles: slice) -> None:
    """Add some tiles of tokens to the lists, those of tile 0 first."""
    columns, starts = columns_of(pairs, tiles), tiles.start == 0
    row, column = pairs.row_sb[:, columns], pairs.column_sb[:, columns]
    add_tokens(sums, row, column, tiles, sums.values, not starts)


@dataclass
class NearPairs(nl.NKIObject):
    """Pairs with an expert here, pulled together on their partitions."""

    key_sb: nl.ndarray  # [128, pairs] float32, keys of all pairs but the found ones; < 0 for none
    found_sb: nl.ndarray  # [128, columns] float32, those of the largest keys
    rest_ps: nl.ndarray  # [1, 128] float32, how many more there are of each partition


def pull_together(pairs: RankedPairs, columns: int) -> NearPairs:
    """Find the pairs with the largest keys, once all have numbers."""
    tiles = pairs.counts.chosen_sb.shape[1]
    tile_sb = count_up(tiles, nl.int32)
    key_sb = nl.ndarray(pairs.number_sb.shape, nl.float32, buffer=nl.sbuf)
    shape = (tiles, key_sb.shape[1] // tiles)
    nisa.scalar_tensor_tensor(
        dst=key_sb.reshape_dim(1, shape), data=pairs.number_sb.reshape_dim(1, shape),
        op0=nl.multiply, operand0=float(_NUMBER), op1=nl.add,
        operand1=tile_sb.expand_dim(2).broadcast(2, shape[1]),
    )  # fmt: skip
    nisa.scalar_tensor_tensor(
        dst=key_sb, data=pairs.expert_sb, op0=nl.multiply, operand0=float(_EXPERT), op1=nl.add,
        operand1=key_sb,
    )  # fmt: skip
    found_sb = _take_largest(key_sb, columns)
    left_sb = nl.ndarray(key_sb.shape, nl.bfloat16, buffer=nl.sbuf)
    rest_sb = nl.ndarray((PARTITIONS, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar_reduce(
        dst=left_sb, data=key_sb, op0=nl.greater_equal, operand0=0.0, reduce_op=nl.add,
        reduce_res=rest_sb,
    )  # fmt: skip
    rest_ps = nl.ndarray((1, PARTITIONS), nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=rest_ps, data=rest_sb)
    return NearPairs(key_sb, found_sb, rest_ps)


def add_near(
    sums: TokenSums, near: NearPairs, tokens: TokenTiles, num_experts: int, rows: int
) -> None:
    """Add the pairs that have been pulled together to the lists, which they start; the others, of
    partitions that have more, in a loop.

    Args:
        sums: to which nothing has been added.
        near: of all pairs of this core.
        tokens: of this core.
        num_experts: E.
        rows: R.
    """
    most_sb = nl.ndarray((1, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=most_sb, op=nl.maximum, data=near.rest_ps, axis=1)
    trips_sb = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
    divide_up(trips_sb, most_sb, MORE_NEAR)
    _add_found(sums, near.found_sb, tokens, num_experts, rows, False)
    trips = nisa.register_alloc()
    nisa.register_load(trips, trips_sb)

    def add_more(_trip: int) -> None:
        found_sb = _take_largest(near.key_sb, MORE_NEAR)
        _add_found(sums, found_sb, tokens, num_experts, rows, True)

    nl.fori_loop(0, trips, add_more)


def _take_largest(key_sb: nl.ndarray, columns: int) -> nl.ndarray:
    """Return the largest keys of each partition, [128, columns]; no key stays in their places."""
    found_sb = nl.ndarray((PARTITIONS, columns), nl.float32, buffer=nl.sbuf)
    for first in range(0, columns, AT_ONCE):
        found = found_sb[:, first : first + AT_ONCE]
        nisa.max8(dst=found, src=key_sb)
        nisa.nc_match_replace8(dst=key_sb, data=key_sb, vals=found, imm=_NO_KEY)
    return found_sb


def _add_found(
    sums: TokenSums,
    found_sb: nl.ndarray,
    tokens: TokenTiles,
    num_experts: int,
    rows: int,
    accumulate: bool,
) -> None:
    """Add the pairs of some keys to the lists; powers of two divide keys exactly."""
    shape = found_sb.shape
    kept_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=kept_sb, data=found_sb, op0=nl.maximum, operand0=_NO_KEY)
    rest_sb, tile_sb = _split_keys(kept_sb, _NUMBER)
    expert_sb, number_sb = _split_keys(rest_sb, _EXPERT // _NUMBER)
    place_sb, row_sb = _split_keys(number_sb, rows)
    column_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=column_sb, data=place_sb, op0=nl.multiply, operand0=float(num_experts), op1=nl.add,
        operand1=expert_sb,
    )  # fmt: skip
    first_sb = nl.ndarray((PARTITIONS, 1), nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=first_sb, pattern=[[1, 1]], offset=1, channel_multiplier=max(1, tokens.count))
    token_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=token_sb, data=tile_sb, op0=nl.add, operand0=first_sb)
    values = value_tokens(token_sb, tokens.rows)
    add_tokens(sums, row_sb, column_sb, slice(0, shape[1]), values, accumulate)


def _split_keys(data: nl.ndarray, divisor: int) -> tuple[nl.ndarray, nl.ndarray]:
    """Return quotients, int32, and remainders, float32."""
    quotient_sb = nl.ndarray(data.shape, nl.int32, buffer=nl.sbuf)
    divide_down(quotient_sb, data, divisor)
    rest_sb = nl.ndarray(data.shape, nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=rest_sb, data=quotient_sb, op0=nl.multiply, operand0=-float(divisor), op1=nl.add,
        operand1=data,
    )  # fmt: skip
    return quotient_sb, rest_sb


def slots_of(pairs: RankedPairs, start_sb: nl.ndarray, end_sb: nl.ndarray) -> nl.ndarray:
    """Return the slot of each pair, [128, pairs] float32, -1 for no expert.

    Args:
        pairs: of this core.
        start_sb: [128, E] float32, first slot of each expert.
        end_sb: likewise, the slot behind its last row tile.
    """
    is_backwards = nl.program_id(0) > 0
    E = start_sb.shape[1]
    first_sb = nl.ndarray((PARTITIONS, E + 1), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=first_sb[:, E : E + 1], value=-1.0 - NOBODY if is_backwards else NOBODY - 1.0)
    if is_backwards:
        nisa.tensor_scalar(dst=first_sb[:, 0:E], data=end_sb, op0=nl.add, operand0=-1.0)
    else:
        nisa.tensor_copy(dst=first_sb[:, 0:E], src=start_sb)
    slot_sb = nl.ndarray(pairs.number_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=slot_sb, data=first_sb, indices=pairs.expert_sb)
    nisa.tensor_tensor(
        dst=slot_sb, data1=slot_sb, data2=pairs.number_sb,
        op=nl.subtract if is_backwards else nl.add, engine=nisa.engine.gpsimd,
    )  # fmt: skip
    return slot_sb


def tell_lists(sums: TokenSums, tokens: TokenTiles, width: int) -> list[nl.ndarray]:
    """Return the lists of this core, and those of the other one if there are two, which are on
    their way: [R, W + 1] float32, 1 plus the token at each place, 0 for none, which column W is.

    Args:
        sums: to which all tokens of this core have been added.
        tokens: of this core.
        width: W.
    """
    lists = [tell_tokens(sums, tokens, width)]
    if nl.num_programs(0) > 1:
        lists.append(exchange(lists[0]))
    return lists


def look_up_tokens(lists: list[nl.ndarray], columns: list[nl.ndarray]) -> list[nl.ndarray]:
    """Return tiles [R, entries] float32 that add up to 1 plus the token of a slot, 0 for none.

    Args:
        lists: of `tell_lists`.
        columns: [R, entries] uint32 of each of them; W where there is none.
    """
    found = []
    for number in range(len(columns)):
        found_sb = nl.ndarray(columns[number].shape, nl.float32, buffer=nl.sbuf)
        nisa.nc_n_gather(dst=found_sb, data=lists[number], indices=columns[number])
        found.append(found_sb)
    return found


def more_passes(own_sb: nl.ndarray, other_sb: nl.ndarray, room: int) -> nl.ndarray:
    """Return how many passes over the pairs follow the first one, the same on both cores.

    Args:
        own_sb: [128, E] float32, choices of each expert on this core.
        other_sb: likewise, of the other core.
        room: tokens of an expert that a pass lists.

    Returns:
        [1, 1] int32.
    """
    most_sb = nl.ndarray((1, own_sb.shape[1]), nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=most_sb, data1=own_sb[0:1, :], data2=other_sb[0:1, :], op=nl.maximum)
    largest_sb = nl.ndarray((1, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=largest_sb, op=nl.maximum, data=most_sb, axis=1)
    # The first pass is one of them, if there is a token at all.
    nisa.tensor_scalar(
        dst=largest_sb, data=largest_sb, op0=nl.maximum, operand0=1.0, op1=nl.add,
        operand1=-float(room),
    )  # fmt: skip
    passes_sb = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
    divide_up(passes_sb, largest_sb, room)
    nisa.tensor_scalar(dst=passes_sb, data=passes_sb, op0=nl.maximum, operand0=0.0)
    return passes_sb
