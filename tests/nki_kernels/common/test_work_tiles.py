"""Work tiles: every row tile once, cores in lock step, no more room than any routing needs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_kernels.common.work_tiles import (
    LiveTiles,
    WorkTileDims,
    list_work_tiles,
    loops_of,
    max_work_tiles,
    no_tile,
    sizes_of,
)


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    lanes=st.sampled_from([1, 2]),
    largest=st.integers(1, 5),
    in_halves=st.booleans(),
)
def test_every_tile_is_visited_once(
    counts: list[int],
    lanes: int,
    largest: int,
    in_halves: bool,
) -> None:
    num_experts, num_tiles = len(counts), sum(counts) + 3
    num_work_tiles = max_work_tiles(num_tiles, num_experts, lanes, largest)
    expert = np.repeat(np.arange(num_experts, dtype=np.int32), counts)
    tile = np.arange(len(expert), dtype=np.int32)
    dims = WorkTileDims(lanes, largest, num_work_tiles, 128, in_halves, 0)
    tiles = LiveTiles(tile, expert)
    lists = list_work_tiles(tiles, dims, num_tiles=num_tiles, num_experts=num_experts)
    seen, step = [], 0
    for sizes, iterations in zip(
        loops_of(sizes_of(largest)), lists.class_iterations_1L[0].tolist(), strict=True
    ):
        for work_tile in range(step, step + 2 * iterations):
            size = sizes[(work_tile - step) % 2]
            for lane in range(lanes):
                places = lists.work_row_tiles_CVG[lane, work_tile]
                used = places[places != no_tile(num_tiles)]
                assert len(used) <= size
                assert (places[: len(used)] == used).all()
                assert (expert[used] == lists.work_expert_CV[lane, work_tile]).all()
                seen += used.tolist()
        step += 2 * iterations
    assert sorted(seen) == tile.tolist()
    # The kernel reads the plan two work tiles ahead.
    assert step + 2 <= lists.work_expert_CV.shape[1]
    assert (lists.work_expert_CV[:, step:] == num_experts).all()


def test_two_cores_share_a_hot_expert() -> None:
    expert = np.zeros(40, np.int32)
    dims = WorkTileDims(2, 4, max_work_tiles(48, 8, 2, 4), 128, False, 0)
    tiles = LiveTiles(np.arange(40, dtype=np.int32), expert)
    lists = list_work_tiles(tiles, dims, num_tiles=48, num_experts=8)
    per_lane = (lists.work_row_tiles_CVG < no_tile(48)).sum(axis=(1, 2))
    assert per_lane.tolist() == [20, 20]
