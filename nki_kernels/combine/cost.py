"""What a launch of combine moves and multiplies."""

from __future__ import annotations

import nki.language as nl
import numpy as np
from numpy.typing import NDArray

from nki_kernels.combine.config import CombineDims, sums_nothing
from nki_kernels.combine.folds import FoldDims
from nki_kernels.common.chip import PARTITIONS
from nki_kernels.common.costs import KernelCost
from nki_kernels.common.rank_sums import cost_rank_sum
from nki_kernels.common.slot_sums import tiles_of_iteration
from nki_kernels.common.token_tiles import split_tokens


def cost_combine(
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    num_parts: int = 1,
    slots_dtype: str = "bfloat16",
    out_dtype: str = "bfloat16",
    num_pairs: int | None = None,
    num_cores: int = 2,
    dims: CombineDims | None = None,
) -> KernelCost:
    """Predict the work of a launch.

    Args:
        num_tokens: T.
        top_k: K.
        hidden_size: H.
        num_parts: P.
        slots_dtype: element type of slots_PSH.
        out_dtype: element type of output_TH.
        num_pairs: choices that have an expert; all by default.
        num_cores: physical cores of the launch.
        dims: what the kernel is compiled for; of alone sums by default.
    """
    dims = dims or CombineDims(nl.bfloat16, False)
    pairs = num_tokens * top_k if num_pairs is None else num_pairs
    slots_bytes = 4 if slots_dtype == "float32" else 2
    out_bytes = 4 if out_dtype == "float32" else 2
    read = pairs * num_parts * hidden_size * slots_bytes + num_tokens * top_k * 8
    tiles = sum(split_tokens(num_tokens, core, num_cores).count for core in range(num_cores))
    terms = 1 if slots_dtype == "float32" else 2
    rows = top_k * num_parts
    columns = 0 if sums_nothing(rows, dims) else tiles * rows * terms * hidden_size
    added = cost_rank_sum(dims.ranks, num_tokens, hidden_size * out_bytes)
    return KernelCost(read, num_tokens * hidden_size * out_bytes, columns) + added


def cost_folds(
    pairs_T: NDArray[np.int64], hidden_size: int, dims: FoldDims, num_cores: int
) -> KernelCost:
    """Predict the work of listing folds and adding them up.

    Args:
        pairs_T: [T] pairs of each token here.
        hidden_size: H.
        dims: C, P and the folds.
        num_cores: physical cores of the launch.
    """
    if not dims.tiles:
        return KernelCost(0, 0, 0)
    row, loops = 2 * hidden_size, dims.most - dims.columns
    tables = num_cores * 4 * (2 * PARTITIONS * dims.tiles * dims.most + loops)
    tiles = columns = 0
    for pairs in range(dims.most, dims.columns, -1):
        size, most = tiles_of_iteration(pairs), _most_of_a_partition(pairs_T >= pairs, num_cores)
        added = -(-max(0, most - tiles) // size) * size
        tiles += added
        columns += added * pairs * 2 * hidden_size
    columns += PARTITIONS + loops
    folded = int(pairs_T[pairs_T > dims.columns].sum())
    return KernelCost(
        folded * row + tables,
        num_cores * tiles * PARTITIONS * row + tables,
        num_cores * columns,
    )


def _most_of_a_partition(is_there_T: NDArray[np.bool_], num_cores: int) -> int:
    """Return on how many tokens of a partition something is true, at most."""
    found = 0
    for core in range(num_cores):
        tokens = split_tokens(len(is_there_T), core, num_cores)
        own = is_there_T[tokens.first : tokens.first + tokens.rows]
        places = np.arange(tokens.rows) // max(1, tokens.count)
        found = max(found, int(np.bincount(places, own, minlength=1).max()))
    return found
