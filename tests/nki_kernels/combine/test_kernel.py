"""combine against the weighted sum in float64."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_sim
from nki_kernels.combine import (
    CombineDims,
    check_combine,
    combine,
    combine_ref,
    cost_combine,
)
from nki_kernels.combine.kernel import piece_size
from nki_kernels.common.chip import SBUF_BYTES
from nki_sim import SimOptions, TensorSpec
from nki_sim.language import api as nl
from tests.nki_kernels.no_skips import forbid_skips
from tests.nki_kernels.traces import measured_cost

BF16 = ml_dtypes.bfloat16
# name: (T, K, H, parts, share of choices without an expert, slots dtype, output dtype)
CASES: dict[str, tuple[int, int, int, int, float, Any, Any]] = {
    "gpt-oss": (130, 4, 320, 1, 0.0, BF16, nl.bfloat16),
    "one-token": (1, 1, 64, 1, 0.0, BF16, nl.bfloat16),
    "expert-parallel": (70, 8, 128, 1, 0.6, BF16, nl.bfloat16),
    "two-parts": (40, 2, 192, 2, 0.0, BF16, nl.float32),
    "two-parts-expert-parallel": (300, 3, 64, 2, 0.5, BF16, nl.bfloat16),
    "float32": (33, 4, 128, 2, 0.3, np.float32, nl.float32),
    "K16-in-pieces": (20, 16, 4160, 1, 0.0, BF16, nl.bfloat16),
    "no-token-here": (9, 2, 64, 1, 1.0, BF16, nl.float32),
}
OPTIONS = {
    "core-1-first": SimOptions(start_core=1),
    "preempted": SimOptions(preempt=0.3, seed=4),
    "zero-filled": SimOptions(fill=0),
}


def draw(T: int, K: int, H: int, P: int, none: float, dtype: Any) -> tuple[Any, Any, Any]:
    """Slots whose padding holds NaN, the slot of each pair, affinities."""
    rng = np.random.default_rng(T + K + H)
    num_slots = T * K + 50
    places = rng.permutation(num_slots)[: T * K].reshape(T, K).astype(np.int32)
    slots = np.full((P, num_slots, H), np.nan, dtype)
    slots[:, places.reshape(-1)] = rng.normal(size=(P, T * K, H)).astype(dtype)
    places[rng.random((T, K)) < none] = -1
    return slots, places, rng.random((T, K)).astype(np.float32)


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_output_is_the_weighted_sum(case: str, num_cores: int) -> None:
    T, K, H, P, none, dtype, out_dtype = CASES[case]
    arrays = draw(T, K, H, P, none, dtype)
    check_combine(T, K, H, arrays[0].shape[1], P, np.dtype(dtype).name)
    dims = CombineDims(out_dtype, none > 0)
    run = nki_sim.run(combine, *arrays, dims, lnc=num_cores)
    wanted = combine_ref(*arrays)
    error = np.abs(run.outputs.astype(np.float64) - wanted)
    # The affinity is off by 2^-17 beside bfloat16 slots; the output is rounded once.
    magnitude = combine_ref(np.abs(np.nan_to_num(arrays[0])), *arrays[1:])
    rounding = 2.0**-8 if out_dtype == nl.bfloat16 else 2.0**-23
    weight = 2.0**-17 if dtype is BF16 else 2.0**-22
    assert (error <= np.abs(wanted) * rounding + magnitude * weight).all()
    assert not run.findings
    pairs = int((arrays[1] >= 0).sum())
    names = np.dtype(dtype).name, str(out_dtype)
    assert measured_cost(run.trace) == cost_combine(T, K, H, P, *names, pairs, num_cores)


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case[4] > 0])
def test_the_last_slot_stands_for_those_without_an_expert(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    T, K, H, P, none, dtype, out_dtype = CASES[case]
    slots, places, affinities = draw(T, K, H, P, none, dtype)
    skipped = nki_sim.run(
        combine, slots, places, affinities, CombineDims(out_dtype, True), lnc=2
    ).outputs
    forbid_skips(monkeypatch)
    with_zeros = np.concatenate([slots, np.zeros((P, 1, H), dtype)], axis=1)
    dims = CombineDims(out_dtype, True, "spare")
    spare = nki_sim.run(combine, with_zeros, places, affinities, dims, lnc=2).outputs
    np.testing.assert_array_equal(spare, skipped)


@pytest.mark.parametrize("option", OPTIONS)
def test_neither_unset_memory_nor_the_order_of_the_cores_matters(option: str) -> None:
    arrays = draw(150, 3, 64, 2, 0.5, BF16)
    dims = CombineDims(nl.float32, True)
    usual = nki_sim.run(combine, *arrays, dims, lnc=2).outputs
    other = nki_sim.run(combine, *arrays, dims, lnc=2, options=OPTIONS[option]).outputs
    np.testing.assert_array_equal(usual, other)


@pytest.mark.parametrize(("H", "K"), [(2880, 4), (8192, 16), (7168, 8), (64, 1)])
def test_the_largest_rows_fit_in_memory(H: int, K: int) -> None:
    assert piece_size(H, K, 2) % 64 == 0
    shapes = (
        TensorSpec((1, 2048, H), "bfloat16"),
        np.arange(300 * K, dtype=np.int32).reshape(300, K) % 2048,
        TensorSpec((300, K), "float32"),
    )
    options = SimOptions(mode="indices")
    run = nki_sim.run(combine, *shapes, CombineDims(nl.bfloat16, False), lnc=2, options=options)
    assert 0 < run.sbuf_peak_bytes <= SBUF_BYTES


# T, K, H, slots and parts of a sum, and the type of the slots.
REFUSED: dict[str, tuple[Any, ...]] = {
    "num_tokens=0": (0, 1, 64, 1, 1),
    "top_k=0": (1, 0, 64, 1, 1),
    "top_k=33: must be 1 to 32": (1, 33, 64, 1, 1),
    "hidden_size=0": (1, 1, 0, 1, 1),
    "hidden_size=63: must be a multiple of 64": (1, 1, 63, 1, 1),
    "hidden_size=65: must be a multiple of 64": (1, 1, 65, 1, 1),
    "num_slots=0": (1, 1, 64, 0, 1),
    "num_parts=0": (1, 1, 64, 1, 0),
    "num_parts=9: must be 1 to 8": (1, 1, 64, 1, 9),
    "num_slots=16777216": (1, 1, 64, 1 << 24, 1),
    "num_slots=2097152": (1, 1, 64, 1 << 21, 8),
    "slots_dtype='float16'": (4, 2, 64, 8, 1, "float16"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_limits_are_refused_by_name(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_combine(*REFUSED[message])


@pytest.mark.parametrize(
    "sizes",  # T, K, H, slots and parts
    [
        (1, 1, 64, 1, 1),
        (1, 16, 64, 1, 1),
        (1, 1, 128, 1, 1),
        (1, 1, 64, 1, 8),
        (1, 16, 64, (1 << 21) - 1, 8),
        (1, 1, 64, (1 << 24) - 1, 1),
    ],
)
def test_limits_are_reached(sizes: tuple[int, ...]) -> None:
    check_combine(*sizes)
