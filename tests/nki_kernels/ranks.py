"""A layer cut over ranks: slices of its arrays, and the sum of what the ranks should give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_kernels.common.rank_sums import RankSum

Array = np.ndarray[Any, Any]
EVERY: dict[str, RankSum] = {
    f"{collective}-{ranks}": RankSum(collective, (tuple(range(ranks)),))
    for collective in ("all_reduce", "reduce_scatter")
    for ranks in (2, 4)
}
_SHORT = (("all_reduce-2", "EP"), ("reduce_scatter-4", "TP"))
SUMS_AND_CUTS = [  # every sum with every cut; by default each sum, cut and number of ranks once
    pytest.param(name, cut, marks=[] if (name, cut) in _SHORT else [pytest.mark.long])
    for name in EVERY
    for cut in ("EP", "TP")
]


def inner_columns(width: int, rank: int, ranks: int) -> Array:
    """Return the columns of gate and up projections [.., 2I] that a tensor-parallel rank holds."""
    mine = np.arange(width // ranks) + rank * (width // ranks)
    return np.concatenate([mine, width + mine])


def rows_of_rank(total_TH: Array, ranks: RankSum, rank: int) -> Array:
    """Return the rows of the sum that a rank returns."""
    group = next(group for group in ranks.groups if rank in group)
    if ranks.collective == "all_reduce":
        return total_TH
    return np.split(total_TH, len(group))[group.index(rank)]
