"""Visits: every row tile once, cores in lock step, no more room than any routing needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_kernels.common.axes import tile_axis, tile_axis_evenly
from nki_kernels.common.chip import FITTED_SBUF_BYTES
from nki_kernels.common.visits import VisitDims, list_visits, loops_of, max_visits, no_tile
from nki_kernels.prefill.fit import sbuf_bytes
from nki_kernels.prefill.options import make_config

MODELS = {  # hidden, intermediate, experts: of the published configurations
    "gpt-oss-120b": (2880, 2880, 128),
    "gpt-oss-20b": (2880, 2880, 32),
    "llama4-scout": (5120, 8192, 16),
    "llama4-maverick": (5120, 8192, 128),
    "qwen3-30b-a3b": (2048, 768, 128),
    "qwen3-235b-a22b": (4096, 1536, 128),
    "deepseek-v3": (7168, 2048, 256),
    "mixtral-8x7b": (4096, 14336, 8),
}


@given(st.integers(1, 20_000))
def test_an_axis_is_covered_once(size: int) -> None:
    axis = tile_axis(size)
    assert axis.rows <= 128
    assert (axis.count - 1) * axis.rows + axis.tail == size
    assert axis.count <= max(1, 17 * -(-size // 128) // 16)


def test_even_tiles_hold_consecutive_elements() -> None:
    axis = tile_axis_evenly(2880)
    assert (axis.rows, axis.count, axis.tail, axis.is_strided) == (120, 24, 120, False)


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    lanes=st.sampled_from([1, 2]),
    largest=st.integers(1, 5),
    in_halves=st.booleans(),
)
def test_every_tile_is_visited_once(
    counts: list[int], lanes: int, largest: int, in_halves: bool
) -> None:
    num_experts, num_tiles = len(counts), sum(counts) + 3
    classes = tuple(range(largest, 0, -1))
    num_visits = max_visits(num_tiles, num_experts, lanes, classes)
    expert = np.repeat(np.arange(num_experts, dtype=np.int32), counts)
    tile = np.arange(len(expert), dtype=np.int32)
    dims = VisitDims(lanes, largest, num_visits, 128, in_halves, 0)
    plan = list_visits(tile, expert, dims, num_tiles=num_tiles, num_experts=num_experts)
    seen, step = [], 0
    for sizes, trips in zip(loops_of(classes), plan.class_trips_1L[0].tolist(), strict=True):
        for visit in range(step, step + 2 * trips):
            size = sizes[(visit - step) % 2]
            for lane in range(lanes):
                tiles = plan.visit_tile_CVG[lane, visit]
                used = tiles[tiles != no_tile(num_tiles)]
                assert len(used) <= size
                assert (tiles[: len(used)] == used).all()
                assert (expert[used] == plan.visit_expert_CV[lane, visit]).all()
                seen += used.tolist()
        step += 2 * trips
    assert sorted(seen) == tile.tolist()
    # The kernel reads the plan two visits ahead.
    assert step + 2 <= plan.visit_expert_CV.shape[1]
    assert (plan.visit_expert_CV[:, step:] == num_experts).all()


def test_two_cores_share_a_hot_expert() -> None:
    expert = np.zeros(40, np.int32)
    dims = VisitDims(2, 4, max_visits(48, 8, 2, (4, 3, 2, 1)), 128, False, 0)
    tile = np.arange(40, dtype=np.int32)
    plan = list_visits(tile, expert, dims, num_tiles=48, num_experts=8)
    per_lane = (plan.visit_tile_CVG < no_tile(48)).sum(axis=(1, 2))
    assert per_lane.tolist() == [20, 20]


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_fits_at_every_degree(name: str, tp: int) -> None:
    hidden, intermediate, experts = MODELS[name]
    for weight_format in ("bfloat16", "float8_e5m2"):
        config = make_config(
            H=hidden, I=intermediate // tp, E=experts, block_size=128,
            num_slots=128 * (256 + experts), num_tokens=8192, weight_format=weight_format,
            has_gate_up_bias=True, has_down_bias=True, has_scales=weight_format != "bfloat16",
        )  # fmt: skip
        assert sbuf_bytes(config) <= FITTED_SBUF_BYTES
