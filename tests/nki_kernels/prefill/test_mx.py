"""Prefill with MX weights on a trn3, against the formula with activations quantised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_kernels.prefill.cost import cost_blockwise_moe
from nki_sim import SimOptions
from tests.nki_kernels.decode.mx_cases import MXFP4, MXFP8, MXFP8_WIDE, assert_close_to_words
from tests.nki_kernels.drawing import GPT_OSS
from tests.nki_kernels.prefill.cases import config_of
from tests.nki_kernels.prefill.mx_cases import MxPrefill
from tests.nki_kernels.traces import measured_cost

FOUR, EIGHT = {"weight_format": MXFP4}, {"weight_format": MXFP8}
WIDE = {"weight_format": MXFP8_WIDE}
CASES = {
    "T40-H128-I64": MxPrefill(40, 128, 64, 4, 2, B=32, options=FOUR),
    "T60-H576-I90-gpt-oss-post": MxPrefill(
        60, 576, 90, 4, 2, B=64, has_bias=True, options={**EIGHT, **GPT_OSS, "scaling": "post"}
    ),
    "T200-H256-I600-two-parts-gpt-oss": MxPrefill(
        200, 256, 600, 3, 2, has_bias=True, options={**FOUR, **GPT_OSS}
    ),
    "T100-H128-I64-pre-by-blocks": MxPrefill(
        100,
        128,
        64,
        5,
        2,
        B=64,
        options={**WIDE, "scaling": "pre", "shard_plan": "block", "loop_plan": "dynamic"},
    ),
    "T100-H192-I48-tiles-static": MxPrefill(
        100, 192, 48, 5, 2, B=64, options={**FOUR, "stores": "tiles", "loop_plan": "static"}
    ),
    "T90-H128-I64-one-expert-lnc1": MxPrefill(
        90, 128, 64, 4, 2, B=32, routing="one-expert", options={**FOUR, "num_cores": 1}
    ),
    "T40-H320-I64-one-output-tile": MxPrefill(
        40,
        320,
        64,
        2,
        1,
        B=32,
        has_bias=True,
        options={**WIDE, "loop_plan": "static", "shard_plan": "block"},
        loop={"outer_buffers": 1},
    ),
    "T50-H1088-I40-K1-to-tokens": MxPrefill(50, 1088, 40, 3, 1, B=32, options=EIGHT),
}


def check(problem: MxPrefill, options: SimOptions | None = None) -> np.ndarray[Any, Any]:
    """Assert a result close to both formulas, and the cost as counted; return the result."""
    run, config = problem.launch(options), problem.config()
    actual = problem.slots_of(run)
    quantized = problem.expected_slots(in_words=True)
    assert_close_to_words(actual, quantized, problem.expected_slots())
    cost = cost_blockwise_moe(config, problem.work_tiles(config), problem.slots)
    assert measured_cost(run.trace) == cost
    return np.asarray(actual)


@pytest.mark.parametrize("name", list(CASES))
def test_words_are_multiplied_as_they_are_stored(name: str) -> None:
    check(CASES[name])


def test_the_order_of_the_cores_does_not_matter() -> None:
    problem = MxPrefill(70, 128, 64, 4, 2, B=32, has_bias=True, options=FOUR)
    outputs = [check(problem, SimOptions(start_core=core, preempt=0.2, seed=3)) for core in (0, 1)]
    np.testing.assert_array_equal(*outputs)


def test_unwritten_memory_does_not_matter() -> None:
    problem = MxPrefill(50, 576, 90, 4, 2, B=32, has_bias=True, options=EIGHT)
    outputs = [problem.slots_of(problem.launch(SimOptions(fill=fill))) for fill in (0xFF, 0x00)]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.long
def test_wide_words_leave_room_for_one_output_tile() -> None:
    options = {**WIDE, "loop_plan": "static", "shard_plan": "block"}
    problem = MxPrefill(40, 7168, 1024, 2, 1, B=128, has_bias=True, options=options)
    assert problem.config().loop.outer_buffers == 1
    problem.launch(SimOptions(mode="indices"))  # raises where memory is too small


REFUSED: dict[str, dict[str, Any]] = {
    r"weight_format='float4_e2m1fn_x4': trn2 multiplies no MX words": {"chip": "trn2"},
    r"shard_plan='intermediate': .*whole experts": {"shard_plan": "intermediate"},
    r"has_gate=False, .* their experts a gate": {"has_gate": False},
    r"has_scales=True: words have scales of their own": {"has_scales": True},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_run_is_refused_by_name(message: str) -> None:
    sizes = {"H": 128, "I": 64, "E": 4, "block_size": 32, "num_slots": 320, "num_tokens": 64}
    with pytest.raises(ValueError, match=message):
        config_of(**sizes, **{**FOUR, "chip": "trn3", **REFUSED[message]})
