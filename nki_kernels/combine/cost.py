"""What a launch of combine moves and multiplies."""

from __future__ import annotations

from nki_kernels.common.costs import KernelCost
from nki_kernels.common.rank_sums import ALONE, RankSum, cost_rank_sum
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
    ranks: RankSum = ALONE,
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
        ranks: what becomes of the sums.
    """
    pairs = num_tokens * top_k if num_pairs is None else num_pairs
    slots_bytes = 4 if slots_dtype == "float32" else 2
    out_bytes = 4 if out_dtype == "float32" else 2
    read = pairs * num_parts * hidden_size * slots_bytes + num_tokens * top_k * 8
    tiles = sum(split_tokens(num_tokens, core, num_cores).count for core in range(num_cores))
    terms = 1 if slots_dtype == "float32" else 2
    columns = tiles * top_k * num_parts * terms * hidden_size
    added = cost_rank_sum(ranks, num_tokens, hidden_size * out_bytes)
    return KernelCost(read, num_tokens * hidden_size * out_bytes, columns) + added
