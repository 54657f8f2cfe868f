"""Sums of the K rows of each token, through combine."""

import ml_dtypes
import nki.language as nl
import numpy as np
import torch

from lab.check.kernel_cases.verdict import Verdict, judge
from lab.check.launcher import launch
from lab.check.vendor_cases.case import Case, Limits, seed_of
from lab.check.vendor_cases.inputs import Draw
from nki_kernels.combine import CombineDims, check_combine, combine, reference


def run(case: Case, limits: Limits) -> Verdict:
    """Add the rows of each token; the vendor's kernel finds them first, ours is given places."""
    T, K, H = case.need("tokens"), case.need("top_k"), case.need("hidden")
    num_rows = T * case.get("src_ranks", K)
    draw = Draw(seed_of(case))
    slots_1SH = draw.normal((1, num_rows, H), ml_dtypes.bfloat16)
    place_TK = draw.rng.permutation(num_rows)[: T * K].reshape(T, K).astype(np.int32)
    ones_TK = np.ones((T, K), np.float32)
    check_combine(T, K, H, num_rows)
    launched = launch(
        combine, slots_1SH, place_TK, ones_TK, CombineDims(nl.bfloat16, False), lnc=case.cores()
    )
    exact = reference.combine_ref(slots_1SH, place_TK, ones_TK)
    rows_TKH = torch.from_numpy(slots_1SH[0].astype(np.float32))[torch.from_numpy(place_TK).long()]
    peer = rows_TKH.sum(1).to(torch.bfloat16).float().numpy()
    return Verdict(
        failure=judge("out", launched.outputs, exact, peer, case),
        note="the places of the rows are given",
        simulated_us=launched.us,
    )
