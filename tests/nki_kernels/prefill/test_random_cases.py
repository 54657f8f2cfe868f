"""Random prefills: the formula, and the instructions as recorded."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from nki_kernels.common.formula import limits
from tests.nki_kernels.drawing import GPT_OSS, SITU, is_taken
from tests.nki_kernels.prefill.cases import Prefill

TOLERANCE = 0.02  # of the largest element: bfloat16 inside
ROUTINGS = ("balanced", "uniform", "zipf", "one-expert", "empty-experts")
FORMULAS: tuple[dict[str, Any], ...] = (
    {},
    {},
    GPT_OSS,
    {"activation": "gelu"},
    {"activation": "relu", "has_gate": False},
    {"activation": "relu2", "has_gate": False},
    {**SITU, "up_offset": 0.5},
    {"gate_limits": limits(0.25, None), "up_offset": 1.0},
    {"up_limits": limits(-0.5, 0.5)},
)


def drawn(rng: random.Random) -> Prefill:
    """Return a prefill that the kernel takes."""
    while True:
        options: dict[str, Any] = {
            "shard_plan": rng.choice(("balanced", "balanced", "block", "intermediate", "hidden")),
            "loop_plan": rng.choice(("sorted", "sorted", "dynamic", "static")),
            "in_halves": rng.random() < 0.2,
            "skip_weights": rng.random() < 0.2,
            "largest_work_tile": rng.choice((1, 2, 4)),
            "stores": rng.choice(("rows", "rows", "tiles")),
            "missing": rng.choice(("skip", "skip", "spare")),
            "num_cores": rng.choice((1, 2, 2)),
            "scaling": rng.choice(("none", "none", "pre", "post")),
            "weight_format": rng.choice(("bfloat16", "bfloat16", "float8_e4m3", "float8_e5m2")),
            "iterations": rng.choice(("ahead", "alone")),
        } | rng.choice(FORMULAS)
        options["has_scales"] = options["weight_format"] != "bfloat16" and rng.random() < 0.7
        E = rng.choice((1, 2, 3, 5, 9))
        choices = rng.randint(1, min(3, E))
        case = Prefill(
            rng.choice((1, 17, 130, 257, 300)),
            rng.choice((64, 128, 192, 320)),
            rng.choice((8, 60, 64, 130, 256)),
            E,
            choices,
            rng.choice((32, 64, 128, 256)),
            rng.choice(ROUTINGS),
            rng.random() < 0.4,
            options,
            seed=rng.randrange(99),
        )
        if is_taken(case):
            return case


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_a_random_prefill_is_the_formula(seed: int) -> None:
    problem = drawn(random.Random(seed))
    expected = problem.expected_slots()
    error = np.abs(problem.slots_of(problem.launch()) - expected).max()
    assert error <= TOLERANCE * np.abs(expected).max(), problem
