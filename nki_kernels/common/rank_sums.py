"""The sum over ranks with which a launch may end: each has computed a part of every token's row.

A rank of tensor or expert parallelism ends in partial sums of all tokens. Either they are what the
launch returns, and a collective of the graph adds them up, or the launch issues that collective
itself: on rows on chip before they are stored (`sum_on_chip`), each core on its own, or in HBM on
portions of the rows, as soon as both cores have stored one (`end_portion`). A collective may
neither read what a launch is given nor write what it returns, so rows in HBM come to be in the
output by a copy.

Sums are made in float32 from rows in the output's type, and rounded to it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

from nki_kernels.common.costs import KernelCost
from nki_kernels.common.token_tiles import split_tokens

COLLECTIVES = ("none", "all_reduce", "reduce_scatter")
_BOTH = (0, 1)


@dataclass(frozen=True)
class RankSum(NKIObject):
    """What becomes of the partial sums of several ranks.

    Attributes:
        collective: none: they are returned. all_reduce: every rank returns the sum of its group.
            reduce_scatter: every rank returns its share of the rows of that sum, in the order of
            the group.
        groups: ranks that add up their sums, one tuple of them per group; () for none.
        portions: collectives that the rows are divided among.
    """

    collective: str = "none"
    groups: tuple[tuple[int, ...], ...] = ()
    portions: int = 1


ALONE = RankSum()


@dataclass
class RankRows(NKIObject):
    """Rows in HBM before and after they are added up."""

    output: nl.NkiTensor  # [rows of this rank, H]
    parts: list[nl.NkiTensor]  # of each portion [rows, H], partial; the output itself without a sum
    totals: list[nl.NkiTensor]  # of each portion so far [rows of this rank, H], added up
    run: int  # neighbours in the output; each portion has a part of every run


def rest_in_hbm(ranks: RankSum) -> RankSum:
    """Return what is left to do in HBM where a launch adds up all rows on chip that it can."""
    return ALONE if ranks.collective == "all_reduce" else ranks


def _num_shares(ranks: RankSum) -> int:
    """Return how many ranks share the rows that a launch returns: 1 but for a reduce-scatter."""
    return len(ranks.groups[0]) if ranks.collective == "reduce_scatter" else 1


def check_rank_sum(ranks: RankSum, num_tokens: int, has_residual: bool, tiles: int = 1) -> None:
    """Raise ValueError unless a launch can end in this sum.

    Args:
        ranks: what becomes of the partial sums.
        num_tokens: T.
        has_residual: whether the launch adds one to its rows.
        tiles: of tokens that every core stores one after the other, all of them full; else 1.
    """
    if ranks.collective not in COLLECTIVES:
        raise ValueError(
            f"collective={ranks.collective!r}: must be one of {', '.join(COLLECTIVES)}."
        )
    if (ranks.collective == "none") != (ranks.groups == ()):
        raise ValueError(
            f"groups={ranks.groups}: collective {ranks.collective} takes"
            f" {'no groups' if ranks.groups else 'groups of ranks'}. Name both or none."
        )
    members = [rank for group in ranks.groups for rank in group]
    sizes = {len(group) for group in ranks.groups}
    is_apart = len(set(members)) == len(members) and min(members, default=0) >= 0
    if not is_apart or len(sizes) > 1 or 0 in sizes:
        raise ValueError(
            f"groups={ranks.groups}: must be groups of equally many ranks, each of which is in one."
        )
    if ranks.portions < 1 or tiles % ranks.portions:
        raise ValueError(
            f"portions={ranks.portions}: must divide the {tiles} tiles that a core has of"
            f" {num_tokens} tokens. Use 1, or a multiple of 256 tokens."
        )
    runs = num_tokens if ranks.portions == 1 else num_tokens // tiles
    if runs % _num_shares(ranks):
        raise ValueError(
            f"T={num_tokens}: {_num_shares(ranks)} ranks cannot share {runs} rows evenly. Pad the"
            " tokens, or use all_reduce."
        )
    if has_residual and ranks.collective != "none":
        raise ValueError(
            f"has_residual=True: with {ranks.collective} every rank would add it. Add it to"
            " what the launch returns."
        )


def output_rows(ranks: RankSum, num_tokens: int) -> int:
    """Return the rows that a rank returns."""
    return num_tokens // _num_shares(ranks)


def cost_rank_sum(ranks: RankSum, num_tokens: int, row_bytes: int) -> KernelCost:
    """Return what the copy of added rows moves; what the collectives move is not counted."""
    moved = 0 if ranks.collective == "none" else output_rows(ranks, num_tokens) * row_bytes
    return KernelCost(moved, moved, 0)


def make_rows(ranks: RankSum, sums: tuple[int, int], dtype: nl.DType, tiles: int = 1) -> RankRows:
    """Allocate the output of [T, H] sums, and the partial sums where they are not it.

    Args:
        ranks: what becomes of the sums.
        sums: their shape.
        dtype: their element type.
        tiles: of tokens that each core stores.
    """
    rows, width = sums
    output = nl.ndarray((output_rows(ranks, rows), width), dtype=dtype, buffer=nl.shared_hbm)
    if ranks.collective == "none":
        return RankRows(output, [output], [], 1)
    shape, parts = (rows // ranks.portions, width), []
    for portion in range(ranks.portions):
        parts.append(_exchanged(shape, dtype, f"rank_part_{portion}"))
    return RankRows(output, parts, [], tiles if ranks.portions > 1 else 1)


def _exchanged(shape: tuple[int, int], dtype: nl.DType, name: str) -> nl.NkiTensor:
    """Allocate a tensor in HBM for a collective; without a name the compiler finds it no place."""
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm, name=name)


def sum_on_chip(ranks: RankSum, part_sb: nl.NkiTensor) -> nl.NkiTensor:
    """Return the sum over ranks of a tile that the same core of every rank holds in SBUF.

    A tile of which ranks keep different rows (reduce-scatter) is returned as it is: on two cores
    they would not be neighbours.
    """
    if ranks.collective != "all_reduce":
        return part_sb
    total_sb = nl.ndarray(part_sb.shape, dtype=part_sb.dtype, buffer=nl.sbuf)
    ncc.all_reduce(srcs=[part_sb], dsts=[total_sb], replica_group=_replicas(ranks), op=nl.add)
    return total_sb


def _replicas(ranks: RankSum) -> ncc.ReplicaGroup:
    """Return the groups as collectives take them."""
    groups = []
    for group in ranks.groups:
        groups.append(list(group))
    return ncc.ReplicaGroup(groups)


def end_portion(ranks: RankSum, rows: RankRows, portion: int) -> None:
    """Add up a portion over the ranks, if they are to be added up, as soon as it is stored.

    Its sum is copied when the next portion's is under way, so that no transfer waits for it.
    """
    if ranks.collective == "none":
        return
    part = rows.parts[portion]
    # Each core has stored a half; that a collective waits for both cores' is not documented. Other
    # engines go on.
    nisa.core_barrier(part, _BOTH, engine=nisa.engine.sync)
    shape = (output_rows(ranks, part.shape[0]), part.shape[1])
    total = _exchanged(shape, part.dtype, f"rank_total_{portion}")
    replicas = _replicas(ranks)
    if ranks.collective == "all_reduce":
        ncc.all_reduce(srcs=[part], dsts=[total], replica_group=replicas, op=nl.add)
    else:
        ncc.reduce_scatter(
            srcs=[part], dsts=[total], replica_group=replicas, collective_dim=0, op=nl.add
        )
    rows.totals.append(total)
    if portion > 0:
        _keep(ranks, rows, portion - 1)
    if portion + 1 == ranks.portions:
        _keep(ranks, rows, portion)


def _keep(ranks: RankSum, rows: RankRows, portion: int) -> None:
    """Copy a portion that is added up into the output, half of its runs on each core."""
    total, width = rows.totals[portion], rows.output.shape[1]
    size = rows.run // ranks.portions * width  # elements of a run
    runs = split_tokens(total.shape[0] * width // size, nl.program_id(0), nl.num_programs(0))
    if runs.rows == 0:
        return
    apart = rows.run * width
    nisa.dma_copy(
        dst=rows.output.ap(
            [[apart, runs.rows], [1, size]], offset=runs.first * apart + portion * size
        ),
        src=total.ap([[size, runs.rows], [1, size]], offset=runs.first * size),
        dge_mode=nisa.dge_mode.none,
    )
