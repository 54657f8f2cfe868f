"""Decode with MX weights on a trn3: against the formula with activations quantised, and without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_kernels.common.mx_reference import quantized_words
from nki_kernels.decode.config import DecodeSizes
from nki_kernels.decode.cost import cost_decode_moe
from nki_kernels.decode.options import make_decode_config
from nki_sim import SimOptions
from nki_sim.isa import mx_formats
from tests.nki_kernels.decode.cases import records
from tests.nki_kernels.decode.mx_cases import (
    MXFP4,
    MXFP8,
    MXFP8_WIDE,
    MxDecode,
    assert_close_to_words,
)
from tests.nki_kernels.drawing import GPT_OSS
from tests.nki_kernels.traces import measured_cost

SELECTIVE, ALL = {"mode": "selective"}, {"mode": "all"}
FOUR, EIGHT, WIDE = {"format": MXFP4}, {"format": MXFP8}, {"format": MXFP8_WIDE}
CASES = {
    "T1-H64-I24-E8-K2": MxDecode(1, 64, 24, 8, 2, options=FOUR),
    "T1-H512-I64-E4-K4-pre": MxDecode(1, 512, 64, 4, 4, options={**EIGHT, "scaling": "pre"}),
    "T2-H2880-I90-E4-K2-gpt-oss": MxDecode(
        2, 2880, 90, 4, 2, has_bias=True, options={**FOUR, **GPT_OSS, **SELECTIVE}
    ),
    "T5-H544-I180-E5-K2-one-of-2-ranks": MxDecode(
        5, 544, 180, 5, 2, ranks=2, rank=1, options={**EIGHT, **SELECTIVE}
    ),
    "T9-H256-I600-E3-K2-two-chunks-all-gpt-oss": MxDecode(
        9, 256, 600, 3, 2, has_bias=True, options={**FOUR, **GPT_OSS, **ALL}
    ),
    "T33-H128-I130-E1-K1-shared-expert": MxDecode(33, 128, 130, 1, 1, options={**WIDE, **ALL}),
    "T40-H608-I96-E4-K2-lnc1": MxDecode(
        40, 608, 96, 4, 2, num_cores=1, options={**FOUR, **SELECTIVE}
    ),
    "T64-H128-I32-E21-K8-none": MxDecode(
        64, 128, 32, 21, 8, options={**EIGHT, "scaling": "none", **SELECTIVE}
    ),
    "T200-H2048-I32-E3-K2-sums-in-sbuf": MxDecode(
        200, 2048, 32, 3, 2, has_bias=True, options={**FOUR, **GPT_OSS, **SELECTIVE}
    ),
    "T3-H128-I256-E2-K1-whole-quadrants": MxDecode(3, 128, 256, 2, 1, options={**EIGHT, **ALL}),
    "T6-H128-I1100-E4-K2-intermediate": MxDecode(
        6, 128, 1100, 4, 2, options={**FOUR, "shard": "intermediate", **SELECTIVE}
    ),
}


def check(problem: MxDecode, options: SimOptions | None = None) -> np.ndarray[Any, Any]:
    """Assert a result close to both formulas, and the cost as counted; return the result."""
    run, config = problem.launch(options), problem.config()
    actual = run.outputs.astype(np.float64)
    assert_close_to_words(actual, problem.expected(in_words=True), problem.expected())
    assert measured_cost(run.trace) == cost_decode_moe(config, problem.touched())
    return np.asarray(run.outputs)


@pytest.mark.parametrize("name", list(CASES))
def test_words_are_multiplied_as_they_are_stored(name: str) -> None:
    check(CASES[name])


@pytest.mark.long
@pytest.mark.parametrize("mode", ["selective", "all"])
@pytest.mark.parametrize("routing", ["balanced", "uniform", "zipf", "one-expert", "empty-experts"])
def test_every_routing_is_computed(routing: str, mode: str) -> None:
    options = {"format": MXFP4, "mode": mode}
    check(MxDecode(24, 128, 64, 7, 2, ranks=2, rank=1, routing=routing, options=options))


@pytest.mark.parametrize("mode", ["selective", "all"])
def test_the_order_of_the_cores_does_not_matter(mode: str) -> None:
    problem = MxDecode(11, 128, 64, 5, 2, has_bias=True, options={**FOUR, "mode": mode})
    outputs = [check(problem, SimOptions(start_core=core, preempt=0.2, seed=3)) for core in (0, 1)]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("H", [96, 544])  # partitions that no word fills
def test_unwritten_memory_does_not_matter(H: int) -> None:
    problem = MxDecode(5, H, 40, 3, 2, ranks=2, options={**EIGHT, **SELECTIVE})
    nan, zero = (problem.launch(SimOptions(fill=fill)).outputs for fill in (0xFF, 0x00))
    np.testing.assert_array_equal(nan, zero)


@pytest.mark.parametrize("mode", ["selective", "all"])
def test_a_token_that_is_not_a_number_stays_alone(mode: str) -> None:
    problem = MxDecode(6, 128, 32, 8, 2, options={**FOUR, "mode": mode})
    expected = problem.launch().outputs
    problem.affinities_TK[2] = np.nan
    problem.hidden_TH[4] = np.nan
    outputs = problem.launch().outputs
    others = [0, 1, 3, 5]
    np.testing.assert_array_equal(outputs[others], expected[others])
    assert np.isnan(outputs[[2, 4]]).all()


def test_a_rank_without_a_hit_writes_zeros() -> None:
    problem = MxDecode(3, 128, 64, 5, 2, ranks=2, routing="no-hit", options={**FOUR, **SELECTIVE})
    assert not problem.launch().outputs.any()


def test_quantised_activations_are_what_the_instruction_makes_of_them() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(5, 96)) * 2.0 ** rng.integers(-20, 20, (5, 3)).repeat(32, axis=1)
    values[1, 32:64], values[2, 0] = 0.0, 300.0
    as_read = values.astype("bfloat16").astype(np.float32)
    # 8 partitions x 4 neighbours a group: word w of a token on partition w.
    spread = as_read.reshape(5, 24, 4).transpose(1, 0, 2).reshape(24, 20)
    words, scales = mx_formats.quantize(spread, MXFP8)
    kept = mx_formats.dequantize(words, scales, MXFP8).reshape(24, 4, 5).transpose(2, 0, 1)
    np.testing.assert_array_equal(quantized_words(values), kept.reshape(5, 96))


REFUSED: dict[str, dict[str, Any]] = {
    r"format='float4_e2m1fn_x4': trn2 multiplies no MX words": {**FOUR, "chip": "trn2"},
    r"layout='ehi', .* are packed": {**FOUR, "layout": "ehi"},
    r"has_scales=True, .* scales of their own": {**EIGHT, "has_scales": True},
    r"chip='trn9': must be one of trn2, trn3": {**FOUR, "chip": "trn9"},
    r"H=144: must be a multiple of 32": FOUR,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_run_is_refused_by_name(message: str) -> None:
    sizes = DecodeSizes(4, 144 if message.startswith("H=144") else 128, 64, 4, 2, 4)
    options = {"layout": "packed", "chip": "trn3", **REFUSED[message]}
    with pytest.raises(ValueError, match=message):
        make_decode_config(sizes, *records(options))


@pytest.mark.parametrize("name", ["words_EXW", "scales_EXG"])
def test_weights_of_other_sizes_are_refused_by_name(name: str) -> None:
    problem = MxDecode(2, 128, 64, 3, 2, options=FOUR)
    words, scales, values = problem.in_words
    short = (words[:, :, :-8], scales) if name == "words_EXW" else (words, scales[:, :, :-1])
    problem.in_words = (*short, values)
    with pytest.raises(ValueError, match=rf"{name}: shape .* must be \[E, 128"):
        problem.launch()
