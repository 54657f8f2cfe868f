"""What the mission names is right with public precedents alone, and saves what it should."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from nki_kernels.prefill.config import core_depth, core_width
from nki_sim.precedent import Table, recording
from nki_sim.trace import CORE, ControlFacts, DmaFacts, Trace
from tests.nki_kernels.prefill.cases import Prefill

T, H, I, E, K, B = 300, 256, 128, 6, 2, 64  # noqa: E741  the axis letter
ROW_BYTES, EXPERT_BYTES = 2 * H, 2 * 3 * H * I
BY_BLOCK = {"shard_plan": "block", "loop_plan": "dynamic", "in_halves": True}


@cache
def table() -> Table:
    return Table.read()


def run(**options: Any) -> tuple[Prefill, Trace]:
    """Run experts in iterations that load for themselves; check result and precedents."""
    problem = Prefill(T, H, I, E, K, B, "skewed", options={"iterations": "alone", **options})
    with recording() as recorder:
        found = problem.launch()
    assert [one.what for one in table().without(recorder)] == []
    error = np.abs(problem.slots_of(found) - problem.expected_slots())
    assert error.max() <= 0.02 * np.abs(problem.expected_slots()).max()
    return problem, found.trace


def read_bytes(trace: Trace, core: int | None = None) -> int:
    """Return the bytes that transfers read, those of one core or of both."""
    rows = trace.columns()
    facts = (one.facts for one, row in zip(trace, rows, strict=True) if core in (None, row[CORE]))
    return sum(each.hbm_read_bytes for each in facts if isinstance(each, DmaFacts))


def iterations(trace: Trace) -> int:
    """Return the iterations of all dynamic loops of all cores."""
    kinds = [one.facts.kind for one in trace if isinstance(one.facts, ControlFacts)]
    return kinds.count("loop_iteration")


def test_skipped_tokens_move_no_bytes() -> None:
    problem, skipped = run()
    _, moved = run(missing="spare")
    padding = int((problem.slots[problem.slots.reshape(-1, B).max(1).repeat(B) >= 0] < 0).sum())
    assert padding > 0
    assert read_bytes(moved) - read_bytes(skipped) >= padding * ROW_BYTES


def test_skipped_weights_are_read_once_per_expert_and_core() -> None:
    problem, skipped = run(**BY_BLOCK, skip_weights=True)
    _, loaded = run(**BY_BLOCK)
    blocks = int((problem.slots.reshape(-1, B).max(1) >= 0).sum())
    saved = read_bytes(loaded) - read_bytes(skipped)
    # An iteration does not know what the one before has left; the halves may share an expert.
    least = blocks - E - 1 - iterations(skipped)
    assert least > 0
    assert saved >= least * EXPERT_BYTES


@pytest.mark.parametrize("shard_plan", ["block", "intermediate"])
def test_a_dynamic_while_ends_with_the_blocks_that_are_there(shard_plan: str) -> None:
    problem, dynamic = run(shard_plan=shard_plan, loop_plan="dynamic")
    _, static = run(shard_plan=shard_plan, loop_plan="static")
    blocks = int((problem.slots.reshape(-1, B).max(1) >= 0).sum())
    assert 0 < iterations(dynamic) <= 2 * blocks  # of both cores
    assert iterations(static) == 0  # written out, for any routing
    assert len(dynamic) < 0.85 * len(static)


@pytest.mark.parametrize("shard_plan", ["intermediate", "hidden", "block"])
def test_a_core_reads_its_shard_of_the_weights(shard_plan: str) -> None:
    loop = {"loop_plan": "dynamic"} if shard_plan == "block" else {}
    problem, two = run(shard_plan=shard_plan, **loop)
    _, one = run(num_cores=1, **({"shard_plan": "block", **loop} if loop else {}))
    config = problem.config()
    assert core_width(config) * core_depth(config) == H * I // (1 if loop else 2)
    for core in (0, 1):
        assert read_bytes(two, core) <= 0.65 * read_bytes(one)
