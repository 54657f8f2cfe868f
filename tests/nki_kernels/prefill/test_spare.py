"""Spare rows, tiles and experts instead of skipped ones: right, and nothing is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_kernels.prefill import cost_blockwise_moe, output_tiles
from nki_kernels.prefill.memory import sbuf_bytes
from tests.nki_kernels.drawing import GPT_OSS
from tests.nki_kernels.no_skips import SkipUsedError, forbid_skips
from tests.nki_kernels.prefill.cases import Prefill
from tests.nki_kernels.prefill.test_kernel import RMS_FACTOR, WORST_FACTOR

CASES: dict[str, tuple[int, int, int, int, int, int, bool, dict[str, Any]]] = {
    "balanced": (200, 256, 96, 8, 2, 128, False, {}),
    "gpt-oss-intermediate": (
        130,
        192,
        90,
        4,
        2,
        64,
        True,
        {**GPT_OSS, "shard_plan": "intermediate"},
    ),
    "hidden": (140, 192, 60, 4, 2, 64, False, {"shard_plan": "hidden"}),
    "static-by-block": (
        100,
        128,
        64,
        4,
        2,
        64,
        False,
        {"loop_plan": "static", "shard_plan": "block"},
    ),
    "post-scaled": (
        90,
        128,
        64,
        4,
        2,
        64,
        False,
        {"weight_format": "float8_e4m3", "has_scales": True, "scaling": "post"},
    ),
    "one-core": (100, 128, 64, 4, 2, 64, False, {"num_cores": 1}),
    "one-token": (1, 128, 64, 8, 4, 128, False, {}),
}


def problem_of(name: str) -> Prefill:
    *sizes, has_bias, options = CASES[name]
    return Prefill(*sizes, has_bias=has_bias, options={**options, "missing": "spare"})


@pytest.mark.parametrize("name", CASES)
def test_results_are_right_and_nothing_is_skipped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(name)
    forbid_skips(monkeypatch)
    run, config = problem.launch(), problem.config()
    expected = problem.expected_slots()
    error = np.abs(problem.slots_of(run) - expected)
    allowed = np.abs(problem.torch_slots() - expected)
    assert error.max() <= WORST_FACTOR * allowed.max()
    assert np.sqrt((error**2).mean()) <= RMS_FACTOR * np.sqrt((allowed**2).mean())
    assert run.sbuf_peak_bytes <= sbuf_bytes(config)
    assert run.outputs.shape[1] == output_tiles(config) * config.tile_rows
    assert not run.outputs[:, -1].astype(np.float32).any()
    assert {finding.kind for finding in run.findings} <= {"output"}


def test_a_kernel_that_skips_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_skips(monkeypatch)
    with pytest.raises(SkipUsedError):
        Prefill(100, 128, 64, 4, 2).launch()


def test_the_cost_of_spare_transfers_is_not_guessed() -> None:
    problem = problem_of("one-token")
    config = problem.config()
    with pytest.raises(ValueError, match="missing='spare': is counted by the trace"):
        cost_blockwise_moe(config, problem.work_tiles(config), problem.slots)
