"""What the index kernel keeps in SBUF: the table that allocation and accounting both read."""

from __future__ import annotations

from typing import NamedTuple

import nki.language as nl

from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.memory import Tiles, table_bytes, tiles, tiles_bytes
from nki_kernels.common.token_tiles import TokenTiles, split_tokens
from nki_kernels.common.visits import VisitDims
from nki_kernels.index.config import NO_VISITS, BlockDims
from nki_kernels.index.slot_inverse import GROUP
from nki_kernels.index.token_search import filled_tiles, places_each
from nki_kernels.index.visits import visit_bytes

AT_ONCE = 8  # values per nc_match_replace8
COUNT_BANKS = 4  # of PSUM, in which running counts are added up
_RANKED_COLUMNS = 1056  # of the slots that tiles' choices would take
_SMALL_TILES_BYTES = 4096


class IndexTable(NamedTuple):
    """The buffers of one core; a pair is a choice of one of its tokens.

    Those with a number of 0 are temporaries that come and go: so many are alive at once.
    """

    experts: Tiles  # of each pair
    slots: Tiles  # of each pair
    chosen: Tiles  # [128, tiles, E], 1 where a token chose an expert
    wanted: Tiles  # experts of each pair, K filled up
    ranks: Tiles  # numbers per pair, while slots are found
    counts: Tiles  # numbers per expert, meanwhile
    digits: Tiles  # numbers per pair, while slots are inverted
    inverse: Tiles  # columns of the inverse, meanwhile
    one_hots: Tiles  # rows of it, meanwhile


def index_table(tokens: TokenTiles, top_k: int, dims: BlockDims) -> IndexTable:
    """Return the buffers.

    Args:
        tokens: of this core.
        top_k: K.
        dims: E, B and N.
    """
    count = max(1, tokens.count)
    pairs = (PARTITIONS, count * top_k)
    filled = (top_k + AT_ONCE - 1) // AT_ONCE * AT_ONCE
    ranked = ranked_tiles(dims.num_experts)
    width = (dims.num_blocks * dims.block_size + PARTITIONS - 1) // PARTITIONS
    return IndexTable(
        experts=tiles(1, pairs, nl.int32),
        slots=tiles(1, pairs, nl.float32),
        chosen=tiles(1, (PARTITIONS, count, dims.num_experts), nl.float8_e4m3),
        wanted=tiles(1, (PARTITIONS, count, filled), nl.float32),
        ranks=Tiles(0, pairs, nl.float32, 2),
        counts=Tiles(0, (PARTITIONS, dims.num_experts + 1), nl.float32, 12 + 2 * ranked),
        digits=Tiles(0, pairs, nl.float32, 14),
        inverse=Tiles(0, (PARTITIONS, min(width, GROUP)), nl.float32, 8),
        one_hots=Tiles(0, (PARTITIONS, PARTITIONS), nl.bfloat16, 8),
    )


def ranked_tiles(num_experts: int) -> int:
    """Return how many tiles of tokens one gather ranks."""
    return max(1, min(8, _RANKED_COLUMNS // (num_experts + 1)))


def listing_bytes(
    tokens: TokenTiles, top_k: int, dims: BlockDims, width: int, visits: VisitDims
) -> int:
    """Return bytes per partition alive in a layer from when its visits are known, till it has
    listed its tokens in W columns.
    """
    table, E = index_table(tokens, top_k, dims), dims.num_experts
    # Experts in three types, affinities and what they are made of, numbers and slots.
    pairs = Tiles(0, table.slots.shape, table.slots.dtype, 10)
    of_experts = Tiles(0, table.counts.shape, table.counts.dtype, 10)
    groups, places = -(-E // PARTITIONS), width // E
    inside = Tiles(0, (PARTITIONS, filled_tiles(tokens), PARTITIONS), nl.bfloat16, groups)
    # Numbers, tokens, counts and parts of places, on as many partitions as there are experts.
    each = places_each(E, places) * visits.tile_rows
    found = Tiles(0, (PARTITIONS, each), nl.float32, 6 * groups)
    lists = Tiles(0, (PARTITIONS, width + 1), nl.float32, 2)
    entries = Tiles(0, (PARTITIONS, visits.num_visits * visits.largest), nl.float32, 4)
    kept = (pairs, table.chosen, of_experts, inside, found, lists, entries, table.one_hots)
    return table_bytes(kept) + _SMALL_TILES_BYTES


def sbuf_bytes(
    num_tokens: int,
    top_k: int,
    dims: BlockDims,
    num_cores: int,
    visits: VisitDims = NO_VISITS,
) -> int:
    """Return bytes per partition alive at once: while pairs are ranked, listed, or inverted."""
    table = index_table(split_tokens(num_tokens, 0, num_cores), top_k, dims)
    pairs = (table.experts, table.slots, table.chosen, table.ranks)
    placing = table_bytes(pairs)
    ranking = placing + tiles_bytes(table.wanted) + tiles_bytes(table.counts)
    listing = placing + visit_bytes(visits, dims.num_experts)
    inverse = (table.digits, table.inverse, table.one_hots)
    return max(max(ranking, listing), table_bytes(inverse)) + _SMALL_TILES_BYTES
