"""Visits: every row tile once, cores in lock step, no more room than any routing needs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_kernels.common.visits import VisitDims, list_visits, loops_of, max_visits, no_tile


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
    lists = list_visits(tile, expert, dims, num_tiles=num_tiles, num_experts=num_experts)
    seen, step = [], 0
    for sizes, trips in zip(loops_of(classes), lists.class_trips_1L[0].tolist(), strict=True):
        for visit in range(step, step + 2 * trips):
            size = sizes[(visit - step) % 2]
            for lane in range(lanes):
                tiles = lists.visit_tile_CVG[lane, visit]
                used = tiles[tiles != no_tile(num_tiles)]
                assert len(used) <= size
                assert (tiles[: len(used)] == used).all()
                assert (expert[used] == lists.visit_expert_CV[lane, visit]).all()
                seen += used.tolist()
        step += 2 * trips
    assert sorted(seen) == tile.tolist()
    # The kernel reads the plan two visits ahead.
    assert step + 2 <= lists.visit_expert_CV.shape[1]
    assert (lists.visit_expert_CV[:, step:] == num_experts).all()


def test_two_cores_share_a_hot_expert() -> None:
    expert = np.zeros(40, np.int32)
    dims = VisitDims(2, 4, max_visits(48, 8, 2, (4, 3, 2, 1)), 128, False, 0)
    tile = np.arange(40, dtype=np.int32)
    lists = list_visits(tile, expert, dims, num_tiles=48, num_experts=8)
    per_lane = (lists.visit_tile_CVG < no_tile(48)).sum(axis=(1, 2))
    assert per_lane.tolist() == [20, 20]
