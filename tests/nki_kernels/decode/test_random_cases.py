"""Random steps of decode, and whole layers: the formula, bytes and instructions as recorded."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from nki_kernels.common.formula import limits
from nki_kernels.decode.cost import cost_decode_moe
from nki_kernels.decode.fit import sbuf_bytes
from tests.nki_kernels.decode.cases import Decode
from tests.nki_kernels.decode.layer_cases import (
    BF16,
    FAMILIES,
    Case,
    draw,
    expected,
    operands_of,
    run,
)
from tests.nki_kernels.decode.test_kernel import ROUTINGS
from tests.nki_kernels.decode.test_layer_kernel import E4M3, assert_close
from tests.nki_kernels.drawing import GPT_OSS, SITU, is_taken
from tests.nki_kernels.traces import measured_cost
from tests.rows import thinned

TOLERANCE = 0.02  # of the largest element: bfloat16 inside
FORMULAS: tuple[dict[str, Any], ...] = (
    {},
    {},
    GPT_OSS,
    {"activation": "gelu"},
    {"activation": "relu2"},
    {**SITU, "up_offset": 0.5},
    {"gate_limits": limits(0.25, None), "up_offset": 1.0},
    {"activation": "silu", "scale": 1.5},
)


def drawn(rng: random.Random) -> Decode:
    """Return a step that the kernel takes."""
    while True:
        options: dict[str, Any] = {
            "mode": rng.choice(("auto", "selective", "all")),
            "shard": rng.choice(("auto", "auto", "experts", "intermediate")),
            "layout": rng.choice(("ehi", "packed")),
            "format": rng.choice(("bfloat16", "bfloat16", "float8_e4m3", "float8_e5m2")),
            "scaling": rng.choice(("post", "post", "pre", "none")),
            "output_dtype": rng.choice(("float32", "bfloat16")),
            "chunks": rng.choice((0, 0, 1, 2, 4)),
            "parts": rng.choice((0, 0, 1, 2, 4)),
            "weight_buffers": rng.choice((0, 0, 1, 2, 4)),
        } | rng.choice(FORMULAS)
        if options["format"] != "bfloat16" and rng.random() < 0.7:
            # A scale of an expert is any power of two, and float8_e4m3 has few.
            scales = ("channel", "none", "none" if options["format"] == "float8_e4m3" else "expert")
            options |= {"has_scales": True, "down_scale": rng.choice(scales)}
        E, ranks = rng.choice((1, 2, 3, 5, 8)), rng.choice((1, 1, 2, 3))
        case = Decode(
            rng.choice((1, 1, 2, 3, 8, 17, 64, 100, 130)),
            rng.choice((64, 128, 192, 320, 512)),
            rng.choice((8, 20, 60, 64, 130, 256)),
            E,
            rng.randint(1, min(4, E * ranks)),
            ranks,
            rng.randrange(ranks),
            rng.choice(ROUTINGS if ranks > 1 else ROUTINGS[:-1]),
            rng.random() < 0.4,
            rng.choice((1, 2, 2)),
            options,
            rng.randrange(99),
        )
        if is_taken(case):
            return case


@pytest.mark.long
@pytest.mark.parametrize("seed", range(160))
def test_a_random_step_is_the_formula(seed: int) -> None:
    problem = drawn(random.Random(seed))
    run, config, expected = problem.launch(), problem.config(), problem.expected()
    error = np.abs(run.outputs.astype(np.float64) - expected).max()
    assert error <= TOLERANCE * np.abs(expected).max(), problem
    assert measured_cost(run.trace) == cost_decode_moe(config, problem.touched()), problem
    assert run.sbuf_peak_bytes <= sbuf_bytes(config), problem


def drawn_layer(rng: random.Random) -> Case:
    """Return a layer that the kernel takes."""
    while True:
        N, returns = rng.choice((16, 24, 32, 40)), rng.random() < 0.5
        first = rng.randrange(N)
        options: dict[str, Any] = {
            "layout": rng.choice(("ehi", "packed")),
            "has_residual": rng.random() < 0.5,
            "mode": rng.choice(("auto", "selective", "all")),
            "returns_routing": returns,
            "shared_width": rng.choice((0, 0, 16, 45, 128, 200)),
            "output_dtype": rng.choice(("float32", "bfloat16")),
        }
        options["has_shared_gate"] = options["shared_width"] > 0 and rng.random() < 0.5
        if rng.random() < 0.3:
            options |= {**E4M3, "down_scale": rng.choice(("channel", "expert"))}
        case = Case(
            rng.choice(list(FAMILIES)),
            rng.choice((1, 1, 2, 5, 9, 33, 100, 129, 200)),
            N,
            rng.randint(1, N - first),
            first,
            rng.choice((64, 128, 144, 320, 512)),
            rng.choice((8, 24, 100, 300)),
            rng.choice((BF16, np.float32)),
            rng.random() < 0.7,
            rng.choice((1, 2, 2)),
            options,
        )
        if is_taken(case):
            return case


@pytest.mark.parametrize("seed", thinned(range(100), 4))
def test_a_random_layer_is_the_formula(seed: int) -> None:
    case = drawn_layer(random.Random(seed))
    arrays, config = draw(case), case.config()
    outputs = run(config, operands_of(config, arrays, case.first)).outputs
    wanted = expected(case, arrays)
    if isinstance(outputs, tuple):
        output, _, index = outputs
        # float32 may round an element of x the other way than float64 does, and turn a choice.
        same = (index == wanted.index_TK).all(axis=1)
        assert same.mean() > 0.9
        assert_close(output[same], wanted.output_TH[same])
    else:
        error = np.abs(outputs.astype(np.float64) - wanted.output_TH).max(axis=1)
        assert (error <= TOLERANCE * np.abs(wanted.output_TH).max()).mean() > 0.9
