"""What combine is compiled for, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl

from nki_kernels.common.rank_sums import ALONE, RankSum, check_rank_sum
from nki_kernels.common.token_tiles import whole_tiles

_MAX_TOP_K = 32
_MAX_PARTS = 8
_MAX_ROWS = 1 << 24  # row numbers are exact in float32


@dataclass(frozen=True)
class CombineDims(nl.NKIObject):
    """What the kernel must know at compile time.

    Attributes:
        out_dtype: element type of the output, one of nl.
        has_no_expert: some choices may have no expert (slot -1).
        missing: what a choice without an expert adds: a row that the gather leaves out (skip), or
            the last slot, which must hold zeros (spare).
        has_spoils: something is added to each token, whose choices have no expert where it is NaN.
        has_residual: a row is added to each token.
        has_shared: so is a row of shared experts.
        has_gate: which is multiplied by a number of the token, NaN for one to be NaN.
        ranks: what becomes of the sums where several ranks have computed a part of each.
    """

    out_dtype: nl.DType
    has_no_expert: bool
    missing: str = "skip"
    has_spoils: bool = False
    has_residual: bool = False
    has_shared: bool = False
    has_gate: bool = False
    ranks: RankSum = ALONE


def sums_nothing(rows_of_token: int, dims: CombineDims) -> bool:
    """Whether a token's output is one row times a number."""
    return rows_of_token == 1 and not dims.has_residual and not dims.has_shared


def check_combine(
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    num_slots: int,
    num_parts: int = 1,
    slots_dtype: str = "bfloat16",
) -> None:
    """Raise ValueError unless the kernel takes these sizes.

    Args:
        num_tokens, top_k, hidden_size: T, K, H.
        num_slots, num_parts: S, P.
        slots_dtype: element type of slots_PSH.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens={num_tokens}: must be at least 1.")
    if not 1 <= top_k <= _MAX_TOP_K:
        raise ValueError(f"top_k={top_k}: must be 1 to {_MAX_TOP_K}.")
    if hidden_size < 64 or hidden_size % 64:
        raise ValueError(f"hidden_size={hidden_size}: must be a multiple of 64. Pad the slots.")
    if not 1 <= num_parts <= _MAX_PARTS:
        raise ValueError(f"num_parts={num_parts}: must be 1 to {_MAX_PARTS}. Add some up before.")
    if num_slots < 1 or num_slots * num_parts >= _MAX_ROWS:
        raise ValueError(
            f"num_slots={num_slots}: must be at least 1, and num_parts * num_slots below"
            f" {_MAX_ROWS}. Combine the tokens in parts."
        )
    if slots_dtype not in ("bfloat16", "float32"):
        raise ValueError(f"slots_dtype={slots_dtype!r}: must be bfloat16 or float32.")


def check_combined_ranks(dims: CombineDims, num_tokens: int, num_cores: int = 2) -> None:
    """Raise ValueError unless the launch can end in the sum over its ranks.

    Args:
        dims: what the kernel is compiled for.
        num_tokens: T.
        num_cores: physical cores of the launch.
    """
    tiles = whole_tiles(num_tokens, num_cores)
    check_rank_sum(dims.ranks, num_tokens, dims.has_residual, tiles)
