"""Folds: tokens with more pairs than the sum over slots has columns, added up before it.

A fold is the weighted sum of a token's pairs, rounded as slots are, in a row behind theirs. Folds
of a core are in tiles of 128 rows, one of each partition, those of most pairs first. A loop for
each number of pairs, the most first, adds up the tiles in which a partition of either core has a
fold of as many: both cores make as many iterations. An iteration takes some tiles and loads for
itself.

Shapes: C columns, P pairs of a token at most, F tiles of folds of a core, L = P - C loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nki.isa as nisa
import nki.language as nl

from nki_kernels.combine.config import CombineDims
from nki_kernels.combine.kernel import (
    Beside,
    gather_rows,
    real_rows,
    split_weights,
    spread_weights,
    weigh,
)
from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.slot_sums import fold_tiles, piece_size, tiles_of_iteration
from nki_kernels.common.tiles import identity
from nki_kernels.common.token_tiles import TokenTiles, split_tokens


@dataclass(frozen=True)
class FoldDims(nl.NKIObject):
    """Sizes of tables and folds.

    Attributes:
        columns: C, at least 1.
        most: P, pairs of a token here; columns for no folds.
        first_row: of the folds of core 0 among the rows of slots, a multiple of 128.
        tiles: F.
    """

    columns: int
    most: int
    first_row: int = 0
    tiles: int = 0


@dataclass
class Folds(nl.NKIObject):
    """Which pairs each fold adds up, in HBM, of each of C' cores."""

    rows: Any  # [C' * 128, F * P] int32, -1 for none
    weights: Any  # [C' * 128, F * P] float32
    ends: Any  # [C', L] int32, tile at which each loop ends


def fold_dims(
    num_tokens: int, columns: int, most: int, num_slot_rows: int, num_cores: int
) -> FoldDims:
    """Return the sizes for tokens with up to P pairs here, in a table of C columns.

    Args:
        num_tokens: T.
        columns: C.
        most: P.
        num_slot_rows: rows of slots, in front of which nothing is put.
        num_cores: physical cores of the launch.
    """
    if columns >= most:
        return FoldDims(most, most)
    first = -(-num_slot_rows // PARTITIONS) * PARTITIONS
    tiles = fold_tiles(split_tokens(num_tokens, 0, num_cores).count)
    return FoldDims(columns, most, first, tiles)


def fold_rows(dims: FoldDims, num_cores: int, has_spare: bool) -> int:
    """Return the rows of slots and folds together; 0 without folds.

    Args:
        dims: of the folds.
        num_cores: physical cores of the launch.
        has_spare: whether the last row of all is to hold zeros.
    """
    if not dims.tiles:
        return 0
    return dims.first_row + (num_cores * dims.tiles + int(has_spare)) * PARTITIONS


def make_folds(dims: FoldDims, num_cores: int) -> Folds:
    """Allocate what says which pairs are folded."""
    if not dims.tiles:
        return Folds(None, None, None)
    shape = (num_cores * PARTITIONS, dims.tiles * dims.most)
    return Folds(
        nl.ndarray(shape, nl.int32, buffer=nl.shared_hbm),
        nl.ndarray(shape, nl.float32, buffer=nl.shared_hbm),
        nl.ndarray((num_cores, dims.most - dims.columns), nl.int32, buffer=nl.shared_hbm),
    )


def add_folds(slots_RH: nl.NkiTensor, folds: Folds, out: CombineDims, dims: FoldDims) -> None:
    """Add up the pairs of this core's folds, in the rows of slots that are theirs.

    Args:
        slots_RH: bfloat16 rows of slots, then of folds.
        folds: of `store_table`.
        out: of the sum behind it, which says how a missing row is read.
        dims: C, P and the folds.
    """
    F, P, core = dims.tiles, dims.most, nl.program_id(0)
    mine, shape = slice(core * PARTITIONS, (core + 1) * PARTITIONS), (PARTITIONS, F * P)
    row_sb = nl.ndarray(shape, nl.int32, buffer=nl.sbuf)
    weight_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=row_sb, src=folds.rows[mine, :])
    nisa.dma_copy(dst=weight_sb, src=folds.weights[mine, :])
    ends_sb = nl.ndarray((1, P - dims.columns), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=ends_sb, src=folds.ends[core : core + 1, :])
    number_sb = nl.ndarray((1, F), nl.int32, buffer=nl.sbuf)
    first_tile = dims.first_row // PARTITIONS + core * F
    nisa.iota(dst=number_sb, pattern=[[1, F]], offset=first_tile, channel_multiplier=0)
    tables = [real_rows(row_sb, slots_RH.shape[0], out)] + split_weights(weight_sb, nl.bfloat16)
    begin: Any = 0
    for loop in range(P - dims.columns):
        # Loaded where it is needed: what follows waits for the register.
        end = nisa.register_alloc()
        nisa.register_load(end, ends_sb[0:1, loop : loop + 1])
        _loop_over(slots_RH, tables, number_sb, begin, end, P - loop, out, dims)
        begin = end


def _loop_over(
    slots_RH: nl.NkiTensor,
    tables: list[nl.NkiTensor],
    number_sb: nl.NkiTensor,
    begin: Any,
    end: Any,
    pairs: int,
    out: CombineDims,
    dims: FoldDims,
) -> None:
    """Add up the tiles of folds of so many pairs, from one tile on."""
    F, P, size = dims.tiles, dims.most, tiles_of_iteration(pairs)
    H = slots_RH.shape[1]
    blocks = slots_RH.reshape((slots_RH.shape[0] // PARTITIONS, PARTITIONS, H))
    tokens = TokenTiles(0, size * PARTITIONS, size, PARTITIONS, 0)
    identity_sb, piece = identity(nl.bfloat16), piece_size(H, size * pairs, 2)

    def one_iteration(tile: Any) -> None:
        own = []
        # Gathers and products have fixed addresses; only these copies depend on the register.
        for table_sb in tables:
            own_sb = nl.ndarray((PARTITIONS, size, pairs), table_sb.dtype, buffer=nl.sbuf)
            found = table_sb.reshape((PARTITIONS, F, P)).ap(
                [[F * P, PARTITIONS], [P, size], [1, pairs]], scalar_offset=tile, indirect_dim=1
            )
            nisa.tensor_copy(dst=own_sb, src=found)
            own.append(own_sb.reshape((PARTITIONS, size * pairs)))
        place_sb = nl.ndarray((1, size), nl.int32, buffer=nl.sbuf)
        where = number_sb.ap([[F, 1], [1, size]], scalar_offset=tile, indirect_dim=1)
        nisa.tensor_copy(dst=place_sb, src=where, engine=nisa.engine.gpsimd)
        for start in range(0, H, piece):
            width, gathered = min(piece, H - start), []
            # All gathers come before the first sum, which they overlap.
            for each in range(size):
                gathered.append(
                    gather_rows(slots_RH, own[0:1], tokens, each, pairs, start, width, out)
                )
            for each in range(size):
                diagonals = spread_weights(own[1:], identity_sb, tokens, each, pairs)
                total_sb = weigh(gathered[each], diagonals, 1, nl.bfloat16, Beside([], [], []))
                nisa.dma_copy(
                    dst=blocks.ap(
                        [[H, PARTITIONS], [1, width]],
                        offset=start,
                        scalar_offset=place_sb[0:1, each : each + 1],
                        indirect_dim=0,
                    ),
                    src=total_sb,
                    dge_mode=nisa.dge_mode.hwdge,
                    engine=nisa.engine.sync,
                )

    nl.fori_loop(begin, end, one_iteration, step=size)
