"""The sum over ranks with which a launch may end: each has computed a part of every token's row.

A rank of tensor or expert parallelism ends in partial sums of all tokens. Either they are what the
launch returns, and a collective of the graph adds them up, or the launch issues that collective
itself, on chunks of its rows: as soon as both cores have stored a chunk. A collective may neither
read what a launch is given nor write what it returns, so rows come to lie in the output by a copy.

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
        chunks: collectives that the rows are divided among.
    """

    collective: str = "none"
    groups: tuple[tuple[int, ...], ...] = ()
    chunks: int = 1


ALONE = RankSum()


@dataclass
class RankRows(NKIObject):
    """Rows in HBM before and after they are added up, in the order of the output."""

    output: nl.NkiTensor  # [rows of this rank, H]
    parts: list[nl.NkiTensor]  # of each chunk [rows, H], partial; the output itself without a sum


def num_ranks(ranks: RankSum) -> int:
    """Return how many ranks share the rows that a launch returns: 1 but for a reduce-scatter."""
    return len(ranks.groups[0]) if ranks.collective == "reduce_scatter" else 1


def check_rank_sum(ranks: RankSum, num_tokens: int, most_chunks: int = 1) -> None:
    """Raise ValueError unless a launch can end in this sum.

    Args:
        ranks: what becomes of the partial sums.
        num_tokens: T.
        most_chunks: that the launch can store one after the other.
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
    if not 1 <= ranks.chunks <= most_chunks:
        raise ValueError(
            f"chunks={ranks.chunks}: must be 1 to {most_chunks} for {num_tokens} tokens."
        )
    if num_tokens % num_ranks(ranks):
        raise ValueError(
            f"T={num_tokens}: {num_ranks(ranks)} ranks cannot share the rows evenly. Pad the"
            " tokens, or use all_reduce."
        )


def output_rows(ranks: RankSum, num_tokens: int) -> int:
    """Return the rows that a rank returns."""
    return num_tokens // num_ranks(ranks)


def cost_rank_sum(ranks: RankSum, num_tokens: int, row_bytes: int) -> KernelCost:
    """Return what the copy of added rows moves; what the collectives move is not counted."""
    moved = 0 if ranks.collective == "none" else output_rows(ranks, num_tokens) * row_bytes
    return KernelCost(moved, moved, 0)


def make_rows(ranks: RankSum, sums: tuple[int, int], dtype: nl.DType) -> RankRows:
    """Allocate the output of [T, H] sums, and the partial sums where they are not it."""
    rows, width = sums
    output = nl.ndarray((output_rows(ranks, rows), width), dtype=dtype, buffer=nl.shared_hbm)
    if ranks.collective == "none":
        return RankRows(output, [output])
    shape, parts = (rows // ranks.chunks, width), []
    for _chunk in range(ranks.chunks):
        parts.append(nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm))
    return RankRows(output, parts)


def add_chunk(ranks: RankSum, part: nl.NkiTensor) -> nl.NkiTensor:
    """Add up the ranks' rows of a chunk, [rows, H]; return this rank's, in HBM.

    The cores meet first: both have stored rows of it.
    """
    nisa.core_barrier(part, _BOTH)
    rows, width = part.shape
    shape = (output_rows(ranks, rows), width)
    total = nl.ndarray(shape, dtype=part.dtype, buffer=nl.shared_hbm)
    groups = []
    for group in ranks.groups:
        groups.append(list(group))
    replicas = ncc.ReplicaGroup(groups)
    if ranks.collective == "all_reduce":
        ncc.all_reduce(srcs=[part], dsts=[total], replica_group=replicas, op=nl.add)
    else:
        ncc.reduce_scatter(
            srcs=[part], dsts=[total], replica_group=replicas, collective_dim=0, op=nl.add
        )
    return total


def keep_chunk(
    output: nl.NkiTensor, total: nl.NkiTensor, first: int, size: int, count: int
) -> None:
    """Copy added rows into the output, half of them on each core.

    Args:
        output: [rows, H] in runs of `count` rows.
        total: [runs * size, H], of each run the rows from `first` on.
        first, size, count: rows of a run before those of the chunk, in it, and in all.
    """
    width = output.shape[1]
    runs = split_tokens(total.shape[0] // size, nl.program_id(0), nl.num_programs(0))
    if runs.rows == 0:
        return
    run, begin = [1, size * width], (runs.first * count + first) * width
    nisa.dma_copy(
        dst=output.ap([[count * width, runs.rows], run], offset=begin),
        src=total.ap([[size * width, runs.rows], run], offset=runs.first * size * width),
        dge_mode=nisa.dge_mode.none,
    )
