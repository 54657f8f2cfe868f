"""Prefill: every slot's row through its expert, many tokens at a time.

    config = make_config(formula, sizes, work, request)      # or the request of best_candidate()
    blockwise_moe(hidden, gate_up, down, slots, *work tiles, config, ...)

`index_blocks` places the slots and lists the work tiles; `combine` adds up the slots of a token.
"""

import nki_kernels.provided  # noqa: F401  answers to `import nki`
from nki_kernels.prefill.candidates import (
    Candidate,
    Expected,
    Search,
    best_candidate,
    expect_tokens,
    rank_candidates,
)
from nki_kernels.prefill.config import (
    BLOCK_SIZES,
    ExpertSizes,
    LoopFit,
    PlanRequest,
    PrefillConfig,
    PrefillWork,
    largest_work_tile_of,
    mx_form,
    output_tiles,
    stored_parts,
    work_tile_dims,
)
from nki_kernels.prefill.cost import cost_blockwise_moe
from nki_kernels.prefill.kernel import blockwise_moe
from nki_kernels.prefill.operands import check_blockwise_moe, matrix_shapes
from nki_kernels.prefill.options import best_parts, make_config, work_tiles_of
from nki_kernels.prefill.reference import blockwise_moe_ref
from nki_kernels.prefill.roofline import best_sum, estimate_us

__all__ = [
    "BLOCK_SIZES",
    "Candidate",
    "Expected",
    "ExpertSizes",
    "LoopFit",
    "PlanRequest",
    "PrefillConfig",
    "PrefillWork",
    "Search",
    "best_candidate",
    "best_parts",
    "best_sum",
    "blockwise_moe",
    "blockwise_moe_ref",
    "check_blockwise_moe",
    "cost_blockwise_moe",
    "estimate_us",
    "expect_tokens",
    "largest_work_tile_of",
    "make_config",
    "matrix_shapes",
    "mx_form",
    "output_tiles",
    "rank_candidates",
    "stored_parts",
    "work_tile_dims",
    "work_tiles_of",
]
