"""How the tokens of a launch are spread over cores, tiles and partitions.

A core takes a contiguous run of tokens and deals it out so that a partition holds neighbours: token
`first + partition * count + tile` sits in that partition of that tile. What a tile produces per
token (K indices, K weights: a few bytes) is then contiguous per partition over all tiles and moves
in one transfer with long runs, not in one short run per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.chip import PARTITIONS


@dataclass
class TokenTiles(nl.NKIObject):
    """The tokens of one core; compile-time integers only.

    Attributes:
        first: first token.
        rows: tokens of this core.
        count: tiles; 0 if the core has no token.
        full: partitions that hold a token in every tile.
        rest: partition `full` holds a token in this many tiles.
    """

    first: int
    rows: int
    count: int
    full: int
    rest: int


def split_tokens(num_tokens: int, core: int, num_cores: int) -> TokenTiles:
    """Return the tokens of one core: equal runs, the last one shorter."""
    run = (num_tokens + num_cores - 1) // num_cores
    first = min(num_tokens, core * run)
    rows = min(run, num_tokens - first)
    count = (rows + PARTITIONS - 1) // PARTITIONS
    full = rows // count if count > 0 else 0
    return TokenTiles(first, rows, count, full, rows - full * count)


def whole_tiles(num_tokens: int, num_cores: int) -> int:
    """Return the tiles of each core, if all of them are full; else 1."""
    share = num_cores * PARTITIONS
    return num_tokens // share if num_tokens % share == 0 else 1


def tokens_of_portion(tokens: TokenTiles, portions: int) -> TokenTiles:
    """Return where a core's tokens are in a tensor of some of its tiles: one portion of equal ones.

    With several portions all tiles are full.
    """
    return TokenTiles(
        tokens.first // portions,
        tokens.rows // portions,
        tokens.count // portions,
        tokens.full,
        tokens.rest,
    )


def tile_rows(tokens: TokenTiles, tile: int) -> int:
    """Return how many partitions of a tile hold a token."""
    return tokens.full + (1 if tile < tokens.rest else 0)


def used_partitions(tokens: TokenTiles) -> int:
    """Return how many partitions hold a token in some tile."""
    return tokens.full + (1 if tokens.rest > 0 else 0)


def token_rows(
    tensor_TX: nl.ndarray, tokens: TokenTiles, tile: int, start: int, width: int
) -> nl.ndarray:
    """Return the view [rows, width] of a [T, X] tensor in HBM that belongs to a tile."""
    row_size = tensor_TX.shape[1]
    return tensor_TX.ap(
        [[tokens.count * row_size, tile_rows(tokens, tile)], [1, width]],
        offset=(tokens.first + tile) * row_size + start,
    )


def load_per_token(values_sb: nl.ndarray, tensor_TX: nl.ndarray, tokens: TokenTiles) -> None:
    """Load [T, X] values: partition p of `values_sb` [128, count * X] gets those of its tokens."""
    for place in _per_token(tensor_TX, values_sb, tokens):
        nisa.dma_copy(dst=place[1], src=place[0])


def store_per_token(tensor_TX: nl.ndarray, values_sb: nl.ndarray, tokens: TokenTiles) -> None:
    """Store what `load_per_token` would load."""
    for place in _per_token(tensor_TX, values_sb, tokens):
        nisa.dma_copy(dst=place[0], src=place[1])


def _per_token(
    tensor_TX: nl.ndarray, values_sb: nl.ndarray, tokens: TokenTiles
) -> list[tuple[nl.ndarray, nl.ndarray]]:
    """Return where values are in HBM and on chip: of full partitions, and of the one behind."""
    width, places = tensor_TX.shape[1], []
    start, run, full = tokens.first * width, tokens.count * width, tokens.full
    if full > 0:
        there = tensor_TX.ap([[run, full], [1, run]], offset=start)
        places.append((there, values_sb[0:full, 0:run]))
    if tokens.rest > 0:
        rest = tokens.rest * width
        there = tensor_TX.ap([[run, 1], [1, rest]], offset=start + full * run)
        places.append((there, values_sb[full : full + 1, 0:rest]))
    return places
