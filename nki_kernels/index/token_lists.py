"""Which tokens an expert's row tiles hold, on chip: for a layer, which stores no list of slots.

Nobody needs an order inside an expert, so a core places its pairs before it knows the other's:
the first fills an expert's row tiles from the front, the second one from the back, backwards. Of a
pair that is number n among its core's choices of an expert, by tiles of tokens, then partitions,

    place = n // R, row tiles from the expert's first, or back from its last
    row   = n % R, or R - 1 - n % R

Column place * E + expert of a [R, W] tile says who is there (token_search.py), for W // E places:
twice what an expert gets where tokens choose alike. Places beyond them are the business of further
passes, in a loop with a run-time iteration count. The token of a slot is the sum of both cores'
columns, as it has one at most; work_tiles.py lists the columns of each work tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.arithmetic import apply_two, count_up, divide_up
from nki_kernels.common.chip import BANK_FLOATS, PARTITIONS
from nki_kernels.common.memory import allocate
from nki_kernels.common.tiles import compare_columns, multiply_banks, ones
from nki_kernels.common.token_tiles import TokenTiles
from nki_kernels.index.config import BlockDims
from nki_kernels.index.kernel import (
    count_up_tiles,
    keep_near,
    list_wanted,
    look_up_columns,
    mark_tiles,
)
from nki_kernels.index.memory import index_table, ranked_tiles
from nki_kernels.index.slot_inverse import GROUP, exchange
from nki_kernels.index.token_search import (
    ChoiceCounts,
    LookUp,
    PlaceSearch,
    count_ends,
    count_inside,
    list_found,
    make_banks,
    start_counts,
    start_searches,
)

NOBODY = float(1 << 20)  # minus the number of a pair without an expert: its place is below all
_FLOOR = 128  # columns that cost as much as fewer do


@dataclass
class MarkedPairs(nl.NKIObject):
    """Who chose whom, as far as groups of tiles of a core's tokens have been marked."""

    group: int  # tiles of tokens
    index_sb: nl.ndarray  # [128, pairs] int32, experts; what is none is near them
    wanted_sb: nl.ndarray  # [128, tiles, K filled up] float32
    names_sb: nl.ndarray  # [128, E] float32, 0, 1, ...
    chosen_sb: nl.ndarray  # [128, tiles, E], 1 where a token chose an expert


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
    places = max(max(1, -(-int(2 * expected) // rows)), _FLOOR // dims.num_experts)
    most = max(1, -(-tokens.rows // rows))
    return min(min(places, most), GROUP // dims.num_experts) * dims.num_experts


def start_marks(
    index_sb: nl.ndarray, tokens: TokenTiles, dims: BlockDims, top_k: int
) -> MarkedPairs:
    """Return the pairs of this core, of which none has been marked.

    Args:
        index_sb: as of `place_pairs`.
        tokens: of this core.
        dims: E, B and N.
        top_k: K.
    """
    keep_near(index_sb, dims.num_experts)
    table, E = index_table(tokens, top_k, dims), dims.num_experts
    wanted_sb, names_sb = list_wanted(index_sb, table, top_k), count_up(E, nl.float32)
    chosen_sb = allocate(table.chosen)[0]
    return MarkedPairs(ranked_tiles(E), index_sb, wanted_sb, names_sb, chosen_sb)


def tiles_of(pairs: MarkedPairs) -> list[slice]:
    """Return the tiles of tokens of each group."""
    groups, count = [], pairs.chosen_sb.shape[1]
    for first in range(0, count, pairs.group):
        groups.append(slice(first, min(first + pairs.group, count)))
    return groups


def mark_group(pairs: MarkedPairs, tiles: slice) -> None:
    """Mark who chose whom."""
    mark_tiles(pairs.chosen_sb, pairs.wanted_sb, pairs.names_sb, tiles)


@dataclass
class TokenLists(nl.NKIObject):
    """The tokens of each expert of a core, [R, W], before they are exchanged.

    Matrices are [128, 128] bfloat16.
    """

    tokens: TokenTiles
    rows: int  # R
    width: int  # W
    num_experts: int  # E
    ones_sb: nl.ndarray
    before_sb: nl.ndarray  # 1 where the row comes before the column
    until_sb: nl.ndarray  # likewise, and where they are the same
    all_ps: nl.ndarray  # [128, E] float32, choices of all tiles so far
    counts: list[ChoiceCounts]
    searches: list[PlaceSearch]


def start_lists(tokens: TokenTiles, rows: int, width: int, num_experts: int) -> TokenLists:
    """Return the lists of this core, of which nothing is known.

    Args:
        tokens: of this core.
        rows: R.
        width: W, of `list_width`.
        num_experts: E.
    """
    ones_sb = ones(nl.bfloat16)
    before_sb = compare_columns(ones_sb, nl.greater)
    until_sb = compare_columns(ones_sb, nl.greater_equal)
    all_ps = nl.ndarray((PARTITIONS, num_experts), nl.float32, buffer=nl.psum)
    places, searches = width // num_experts, []
    counts, banks = start_counts(tokens, num_experts, places), make_banks()
    for part in counts:
        searches.extend(start_searches(tokens, part, banks, rows, places, nl.program_id(0) > 0))
    return TokenLists(
        tokens, rows, width, num_experts, ones_sb, before_sb, until_sb, all_ps, counts, searches
    )


def count_group(lists: TokenLists, pairs: MarkedPairs, tiles: slice) -> None:
    """Count the choices of a marked group of tiles; groups one after the other."""
    for tile in range(tiles.start, tiles.stop):
        multiply_banks(lists.all_ps, lists.ones_sb, pairs.chosen_sb[:, tile, :], tile > 0)
    for part in lists.counts:
        count_inside(part, pairs.chosen_sb, lists.until_sb, tiles)


def count_choices(lists: TokenLists) -> nl.ndarray:
    """Return how many of this core's tokens chose each expert, [128, E] float32, alike on all
    partitions, once all groups are counted.
    """
    own_sb = nl.ndarray(lists.all_ps.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=own_sb, src=lists.all_ps)
    return own_sb


def finish_counts(lists: TokenLists) -> None:
    """Add up the counts of all groups; then tokens can be looked for."""
    for part in lists.counts:
        count_ends(part)


@dataclass
class NumberedPairs(nl.NKIObject):
    """Pairs of a core, [128, pairs], once what numbers them has been looked up."""

    expert_sb: nl.ndarray  # uint32, E for none
    number_sb: nl.ndarray  # float32, among the core's choices of the expert; -NOBODY for none
    look_ups: list[LookUp]


def number_pairs(lists: TokenLists, pairs: MarkedPairs) -> NumberedPairs:
    """Return the pairs with what is to be looked up for them, once all are counted."""
    chosen_sb, E = pairs.chosen_sb, lists.num_experts
    expert_sb = look_up_columns(pairs.index_sb, E)
    look_sb = nl.ndarray(expert_sb.shape, nl.uint32, buffer=nl.sbuf)
    count_up_tiles(look_sb, expert_sb, chosen_sb.shape[1], E + 1, pairs.group)
    number_sb = nl.ndarray(expert_sb.shape, nl.float32, buffer=nl.sbuf)
    of_tile_sb = _count_tiles(lists, chosen_sb.shape[1])
    top_k, look_ups = expert_sb.shape[1] // chosen_sb.shape[1], []
    for tiles in tiles_of(pairs):
        flat_sb = _count_before(lists, of_tile_sb, chosen_sb, tiles)
        columns = slice(tiles.start * top_k, tiles.stop * top_k)
        look_ups.append(LookUp(number_sb[:, columns], flat_sb, look_sb[:, columns]))
    return NumberedPairs(expert_sb, number_sb, look_ups)


def _count_tiles(lists: TokenLists, tiles: int) -> nl.ndarray:
    """Return how many tokens of each tile chose each expert, [tiles, E] bfloat16."""
    of_tile_sb = nl.ndarray((tiles, lists.num_experts), nl.bfloat16, buffer=nl.sbuf)
    for part in lists.counts:
        transposed_ps = nl.ndarray((tiles, part.experts), nl.bfloat16, buffer=nl.psum)
        inside = part.inside_sb[0 : part.experts, 0:tiles, PARTITIONS - 1]
        nisa.nc_transpose(dst=transposed_ps, data=inside)
        nisa.tensor_copy(
            dst=of_tile_sb[:, part.first : part.first + part.experts],
            src=transposed_ps,
            engine=nisa.engine.scalar,
        )
    return of_tile_sb


def _count_before(
    lists: TokenLists, of_tile_sb: nl.ndarray, chosen_sb: nl.ndarray, tiles: slice
) -> nl.ndarray:
    """Return how many earlier tokens of the core chose each expert, for each token of a group of
    tiles, [128, tiles * (E + 1)] float32; a tile's last column is for no choice.
    """
    E, count, every = chosen_sb.shape[2], tiles.stop - tiles.start, of_tile_sb.shape[0]
    before_sb = nl.ndarray((PARTITIONS, count, E + 1), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=before_sb[:, :, E], value=-NOBODY, engine=nisa.engine.gpsimd)
    at_once = max(1, BANK_FLOATS // E)
    for first in range(0, count, at_once):
        number = min(at_once, count - first)
        bank_ps = nl.ndarray((PARTITIONS, number, E), nl.float32, buffer=nl.psum)
        for each in range(number):
            tile = tiles.start + first + each
            counted_ps = bank_ps[:, each, :]
            multiply_banks(counted_ps, lists.before_sb, chosen_sb[:, tile, :], False)
            earlier = lists.before_sb[0:every, tile : tile + 1].broadcast(1, PARTITIONS)
            multiply_banks(counted_ps, earlier, of_tile_sb, True)
        nisa.tensor_copy(
            dst=before_sb[:, first : first + number, 0:E], src=bank_ps, engine=nisa.engine.scalar
        )
    return before_sb.reshape((PARTITIONS, count * (E + 1)))


def slots_of(pairs: NumberedPairs, start_sb: nl.ndarray, end_sb: nl.ndarray) -> nl.ndarray:
    """Return the slot of each pair, [128, pairs] float32, -1 for no expert.

    Args:
        pairs: whose numbers have been looked up.
        start_sb: [128, E] float32, first slot of each expert.
        end_sb: likewise, the slot behind its last row tile.
    """
    is_backwards = nl.program_id(0) > 0
    expert_sb, number_sb = pairs.expert_sb, pairs.number_sb
    E = start_sb.shape[1]
    first_sb = nl.ndarray((PARTITIONS, E + 1), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=first_sb[:, E : E + 1], value=-1.0 - NOBODY if is_backwards else NOBODY - 1.0)
    if is_backwards:
        nisa.tensor_scalar(dst=first_sb[:, 0:E], data=end_sb, op0=nl.add, operand0=-1.0)
    else:
        nisa.tensor_copy(dst=first_sb[:, 0:E], src=start_sb)
    slot_sb = nl.ndarray(number_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=slot_sb, data=first_sb, indices=expert_sb)
    nisa.tensor_tensor(
        dst=slot_sb,
        data1=slot_sb,
        data2=number_sb,
        op=nl.subtract if is_backwards else nl.add,
        engine=nisa.engine.gpsimd,
    )
    return slot_sb


def exchange_lists(lists: TokenLists) -> list[nl.ndarray]:
    """Return the lists of this core, and those of the other one if there are two, which are on
    their way: [R, W + 1] uint16, 1 plus the token at each place, 0 for none, which column W is.
    """
    rows, width = lists.rows, lists.width
    own_sb = nl.ndarray((rows, width + 1), nl.uint16, buffer=nl.sbuf)
    nisa.memset(dst=own_sb[:, width : width + 1], value=0, engine=nisa.engine.gpsimd)
    for search in lists.searches:
        list_found(own_sb, search, lists.num_experts, rows)
    both = [own_sb]
    if nl.num_programs(0) > 1:
        both.append(exchange(own_sb))
    return both


def spread_columns(
    columns_sb: nl.ndarray, identity_sb: nl.ndarray, shape: tuple[int, int], width: int
) -> nl.ndarray:
    """Return columns of row tiles on all rows of the lists, uint32: those beyond as the last, W.

    Args:
        columns_sb: [128, J] float32, those of the entries one after the other.
        identity_sb: [128, 128] float16, which has all numbers up to W.
        shape: R rows, and the entries.
        width: W.
    """
    rows, entries = shape
    J = columns_sb.shape[1]
    kept_sb = nl.ndarray(columns_sb.shape, nl.float16, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=kept_sb, data=columns_sb, op0=nl.minimum, operand0=float(width))
    spread_sb = nl.ndarray(shape, nl.uint32, buffer=nl.sbuf)
    partitions, at_once = -(-entries // J), max(1, BANK_FLOATS // J)
    for first in range(0, partitions, at_once):
        count = min(at_once, partitions - first)
        spread_ps = nl.ndarray((rows, count, J), nl.float32, buffer=nl.psum)
        for column in range(J):
            nisa.nc_matmul(
                dst=spread_ps[:, :, column],
                stationary=kept_sb[:, column : column + 1].broadcast(1, rows),
                moving=identity_sb[:, first : first + count],
                accumulate=False,
            )
        stop = min((first + count) * J, entries)
        flat_ps = spread_ps.reshape((rows, count * J))
        nisa.tensor_copy(
            dst=spread_sb[:, first * J : stop],
            src=flat_ps[:, 0 : stop - first * J],
            engine=nisa.engine.scalar,
        )
    return spread_sb


def look_up_tokens(lists: list[nl.ndarray], columns: list[nl.ndarray]) -> list[nl.ndarray]:
    """Return tiles [R, entries] uint16 that add up to 1 plus the token of a slot, 0 for none.

    Args:
        lists: of `exchange_lists`.
        columns: [R, entries] uint32 of each of them; W where there is none.
    """
    found = []
    for number in range(len(columns)):
        found_sb = nl.ndarray(columns[number].shape, lists[number].dtype, buffer=nl.sbuf)
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
    apply_two(largest_sb, largest_sb, nl.maximum, 1.0, nl.add, -float(room))
    passes_sb = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
    divide_up(passes_sb, largest_sb, room)
    nisa.tensor_scalar(dst=passes_sb, data=passes_sb, op0=nl.maximum, operand0=0.0)
    return passes_sb
