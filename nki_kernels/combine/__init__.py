"""Combine: each token's weighted sum over the slots of its experts."""

import nki_kernels.provided  # noqa: F401  answers to `import nki`
from nki_kernels.combine.config import CombineDims, check_combine, check_combined_ranks
from nki_kernels.combine.cost import cost_combine, cost_folds
from nki_kernels.combine.folds import FoldDims, add_folds, fold_dims, fold_rows, make_folds
from nki_kernels.combine.kernel import combine
from nki_kernels.combine.reference import combine_ref
from nki_kernels.common.slot_sums import best_sum_ns

__all__ = [
    "CombineDims",
    "FoldDims",
    "add_folds",
    "best_sum_ns",
    "check_combine",
    "check_combined_ranks",
    "combine",
    "combine_ref",
    "cost_combine",
    "cost_folds",
    "fold_dims",
    "fold_rows",
    "make_folds",
]
