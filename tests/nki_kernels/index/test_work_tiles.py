"""The work tiles that index_blocks lists on the device against those of the host, bit for bit."""

from typing import Any

import numpy as np
import pytest

import nki_sim
from neuron_moe.blocks import num_blocks
from nki_kernels.common.work_tiles import (
    WorkTileDims,
    list_work_tiles,
    live_tiles,
    max_work_tiles,
)
from nki_kernels.index import (
    BlockDims,
    check_index_blocks,
    cost_index_blocks,
    index_blocks,
    index_blocks_ref,
)
from nki_kernels.index.memory import sbuf_bytes
from nki_kernels.prefill import work_tile_dims, work_tiles_of
from nki_sim import SimOptions, TensorSpec
from tests.nki_kernels.index.test_kernel import draw
from tests.nki_kernels.prefill.cases import config_of
from tests.nki_kernels.traces import measured_cost

nki_sim.provide()


# name: (T, K, E, B, share of choices without an expert, routing)
ROUTED: dict[str, tuple[int, int, int, int, float, str]] = {
    "one-token": (1, 1, 1, 32, 0.0, "uniform"),
    "nobody": (40, 2, 8, 32, 1.0, "uniform"),
    "few-of-many": (60, 4, 64, 32, 0.5, "uniform"),
    "zipf": (500, 2, 7, 32, 0.1, "zipf"),
    "one-expert": (700, 2, 5, 64, 0.0, "one-expert"),
    "large-blocks": (900, 3, 6, 256, 0.0, "zipf"),
}
PLANS: dict[str, dict[str, Any]] = {
    "balanced": {},
    "balanced-work-tiles-of-3": {"largest_work_tile": 3},
    "intermediate": {"shard_plan": "intermediate", "largest_work_tile": 2},
    "one-core": {"num_cores": 1},
    "sorted-skip": {"skip_weights": True, "largest_work_tile": 2},
    "dynamic": {"loop_plan": "dynamic"},
    "dynamic-skip": {"loop_plan": "dynamic", "skip_weights": True},
    "block": {"shard_plan": "block", "loop_plan": "static"},
    "halves": {"shard_plan": "block", "in_halves": True, "loop_plan": "dynamic"},
    "halves-skip": {
        "shard_plan": "block",
        "in_halves": True,
        "loop_plan": "dynamic",
        "skip_weights": True,
    },
}


def check(index: np.ndarray, E: int, B: int, options: dict[str, Any]) -> None:
    T, K = index.shape
    B = options.get("block_size", B)
    dims = BlockDims(E, B, num_blocks(T, K, E, B))
    config = config_of(
        H=128,
        I=64,
        E=E,
        num_slots=B * dims.num_blocks,
        num_tokens=T,
        **{"block_size": B, **options},
    )
    work_tiles = work_tile_dims(config)
    check_index_blocks(T, K, dims, config.num_cores, work_tiles)
    run = nki_sim.run(index_blocks, index, dims, work_tiles, lnc=config.num_cores)
    wanted = index_blocks_ref(index, E, B, dims.num_blocks)
    for got, want in zip(run.outputs[:6], wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    lists = work_tiles_of(config, wanted.token_position_to_id, wanted.block_to_expert)
    for got, want in zip(run.outputs[6:], lists, strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == np.int32
    assert not run.findings
    assert measured_cost(run.trace) == cost_index_blocks(T, K, dims, config.num_cores, work_tiles)


@pytest.mark.parametrize("routing", ROUTED)
@pytest.mark.parametrize("plan", PLANS)
def test_the_device_lists_the_work_tiles_of_the_host(plan: str, routing: str) -> None:
    T, K, E, B, none, name = ROUTED[routing]
    check(draw(T, K, E, none, name), E, B, PLANS[plan])


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("largest", [1, 2, 4, 5])
def test_any_counts_are_grouped_alike(largest: int, lanes: int) -> None:
    rng = np.random.default_rng(largest)
    E, R = 9, 4
    for trial in range(6):
        tiles = rng.integers(0, (1, 3, 6, 30, 3, 12)[trial], E)
        tokens = np.maximum(0, tiles * R - rng.integers(0, R, E))
        index = np.repeat(np.arange(E, dtype=np.int32), tokens)[:, None]
        index = np.concatenate((index, np.full((3, 1), -1, np.int32)))
        blocks = int(tiles.sum()) + 3
        num_work_tiles = max_work_tiles(blocks, E, lanes, largest)
        work_tiles = WorkTileDims(lanes, largest, num_work_tiles, R, False, 2)
        run = nki_sim.run(index_blocks, index, BlockDims(E, R, blocks), work_tiles, lnc=lanes)
        live = live_tiles(run.outputs[0], run.outputs[2], R)
        lists = list_work_tiles(live, work_tiles, num_tiles=blocks, num_experts=E)
        for got, want in zip(run.outputs[6:], lists, strict=True):
            np.testing.assert_array_equal(got, want)


def test_what_the_check_counts_covers_what_is_alive() -> None:
    T, K, E, B = 8192, 4, 512, 32
    dims = BlockDims(E, B, num_blocks(T, K, E, B))
    config = config_of(H=128, I=64, E=E, block_size=B, num_slots=B * dims.num_blocks, num_tokens=T)
    work_tiles = work_tile_dims(config)
    options = SimOptions(mode="indices")
    run = nki_sim.run(
        index_blocks, TensorSpec((T, K), "int32"), dims, work_tiles, lnc=2, options=options
    )
    assert run.sbuf_peak_bytes <= sbuf_bytes(T, K, dims, 2, work_tiles)


def test_row_tiles_that_do_not_fill_a_block_are_refused() -> None:
    with pytest.raises(ValueError, match="tile_rows=48: must divide block_size=64"):
        check_index_blocks(4, 2, BlockDims(8, 64, 8), 2, WorkTileDims(2, 4, 8, 48, False, 0))
