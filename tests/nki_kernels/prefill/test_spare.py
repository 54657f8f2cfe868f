"""Spare rows, tiles and experts instead of skipped ones: right, and nothing is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_kernels.prefill import cost_blockwise_moe, output_tiles
from tests.nki_kernels.drawing import GPT_OSS
from tests.nki_kernels.no_skips import SkipUsedError, forbid_skips
from tests.nki_kernels.prefill.cases import Prefill
from tests.nki_kernels.prefill.test_kernel import assert_exact


def spare(*sizes: int, has_bias: bool = False, **options: Any) -> Prefill:
    return Prefill(*sizes, has_bias=has_bias, options={**options, "missing": "spare"})


CASES = {
    "balanced": spare(200, 256, 96, 8, 2),
    "gpt-oss-intermediate": spare(
        130, 192, 90, 4, 2, 64, has_bias=True, shard_plan="intermediate", **GPT_OSS
    ),
    "hidden": spare(140, 192, 60, 4, 2, 64, shard_plan="hidden"),
    "static-by-block": spare(100, 128, 64, 4, 2, 64, loop_plan="static", shard_plan="block"),
    "post-scaled": spare(
        90, 128, 64, 4, 2, 64, weight_format="float8_e4m3", has_scales=True, scaling="post"
    ),
    "one-core": spare(100, 128, 64, 4, 2, 64, num_cores=1),
    "one-token": spare(1, 128, 64, 8, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_right_and_nothing_is_skipped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = CASES[name]
    forbid_skips(monkeypatch)
    run, config = problem.launch(), problem.config()
    assert_exact(problem, run)
    assert run.outputs.shape[1] == output_tiles(config) * config.tile_rows
    assert not run.outputs[:, -1].astype(np.float32).any()
    assert {finding.kind for finding in run.findings} <= {"output"}


def test_a_kernel_that_skips_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_skips(monkeypatch)
    with pytest.raises(SkipUsedError):
        Prefill(100, 128, 64, 4, 2).launch()


def test_the_cost_of_spare_transfers_is_not_guessed() -> None:
    problem = CASES["one-token"]
    config = problem.config()
    with pytest.raises(ValueError, match="missing='spare': is counted by the trace"):
        cost_blockwise_moe(config, problem.work_tiles(config), problem.slots)
