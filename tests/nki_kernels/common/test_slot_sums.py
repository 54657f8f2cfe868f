"""The estimate of the sum over a token's slots, held against simulated launches."""

import numpy as np
import pytest

import nki_sim
from nki_kernels.combine import CombineDims, combine
from nki_kernels.common.slot_sums import sum_ns
from nki_sim import SimOptions, TensorSpec
from nki_sim.language import api as nl

OPTIONS = SimOptions(mode="indices", uninitialized="off", races="off", capacity="reorder")
CASES = {  # T, K, H, P, share of choices with an expert
    "bytes": (1024, 4, 2880, 1, 1.0),
    "descriptors": (1024, 8, 1024, 1, 1.0),
    "products": (1024, 8, 7168, 1, 0.125),
    "descriptors-of-pieces": (512, 8, 7168, 2, 0.125),
}
CLOSE = 1.2


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_about_the_simulated_time(name: str) -> None:
    T, K, H, P, share = CASES[name]
    rng = np.random.default_rng(0)
    slot_of_pair = np.arange(T * K, dtype=np.int32).reshape(T, K)
    is_here = rng.random((T, K)) < share
    run = nki_sim.run(
        combine,
        TensorSpec((P, T * K, H), "bfloat16"),
        np.where(is_here, slot_of_pair, -1),
        TensorSpec((T, K), "float32"),
        CombineDims(nl.bfloat16, share < 1.0),
        lnc=2,
        options=OPTIONS,
    )
    spread = np.bincount(is_here.sum(1), minlength=K + 1).tolist()
    estimated_ns = sum_ns(spread, K, H, P, 2)
    assert run.timeline.total_ns / CLOSE <= estimated_ns <= run.timeline.total_ns * CLOSE
