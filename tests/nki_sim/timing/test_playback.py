"""Who waits for whom, and for how long."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nki_sim.hardware import TRN2
from nki_sim.time.placement import Ring
from nki_sim.time.schedule_model import ScheduleModel
from nki_sim.time.timeline import Timeline, TimelineOptions, schedule
from nki_sim.trace import (
    ALL,
    DMA,
    GPSIMD,
    HBM,
    PSUM,
    SBUF,
    SCALAR,
    SYNC,
    VECTOR,
    ControlFacts,
    DmaFacts,
    MemoryRange,
    SyncFacts,
)

Make = Callable[..., Any]
ROWS = slice(0, 128)
STATIC = TimelineOptions(dma_rule="runs")


def start(timeline: Timeline, index: int) -> float:
    return timeline.result.start[index]


def visible(timeline: Timeline, index: int) -> float:
    return timeline.result.visible[index]


def test_a_reader_waits_for_the_load(builder: Any) -> None:
    tile, source = builder.tile(256), builder.hbm(128, 256)
    load = builder.load(tile, source, ROWS, slice(0, 256))
    use = builder.compute("tensor_copy", builder.tile(256), tile)
    timeline = schedule(builder.trace)
    assert start(timeline, use) == visible(timeline, load)
    assert visible(timeline, load) == timeline.result.data_end[load] + TRN2.dma_done_ns


def test_independent_engines_run_at_once(builder: Any) -> None:
    first = builder.compute("tensor_copy", builder.tile(512), builder.tile(512))
    second = builder.compute("iota", builder.tile(512), engine=GPSIMD)
    timeline = schedule(builder.trace)
    assert start(timeline, first) == start(timeline, second) == 0.0


def test_one_engine_runs_in_program_order(builder: Any) -> None:
    slow = builder.compute("reciprocal", builder.tile(4096), builder.tile(4096))
    quick = builder.compute("memset", builder.tile(8))
    timeline = schedule(builder.trace)
    assert start(timeline, quick) == timeline.result.busy_end[slow]


def test_another_engine_learns_of_a_result_by_semaphore(builder: Any) -> None:
    tile = builder.tile(512)
    write = builder.compute("memset", tile)
    read = builder.compute("activation", builder.tile(512), tile, engine=SCALAR)
    timeline = schedule(builder.trace)
    assert start(timeline, read) == pytest.approx(visible(timeline, write) + TRN2.semaphore_ns)


def test_overwriting_waits_for_the_readers(builder: Any) -> None:
    tile = builder.tile(2048)
    builder.compute("memset", tile)
    read = builder.compute("iota", builder.tile(8), tile, engine=GPSIMD)
    overwrite = builder.compute("memset", tile)
    timeline = schedule(builder.trace)
    assert start(timeline, overwrite) >= timeline.result.busy_end[read]


@pytest.mark.parametrize(("columns", "waits"), [(slice(256, 512), False), (slice(255, 511), True)])
def test_only_overlapping_parts_of_a_tile_wait(builder: Any, columns: slice, waits: bool) -> None:
    tile = builder.tile(512)
    write = builder.compute("memset", tile[0:256])
    read = builder.compute("activation", builder.tile(256), tile[columns], engine=SCALAR)
    timeline = schedule(builder.trace)
    assert (start(timeline, read) > visible(timeline, write)) == waits


@pytest.mark.parametrize(("column", "waits"), [(256, False), (255, True)])
def test_column_tiles_of_a_matrix_in_hbm_are_told_apart(
    builder: Any, column: int, waits: bool
) -> None:
    matrix = builder.hbm(128, 1024)
    store = builder.store(matrix, ROWS, slice(0, 256), builder.tile(256))
    load = builder.load(builder.tile(256), matrix, ROWS, slice(column, column + 256))
    timeline = schedule(builder.trace)
    assert (start(timeline, load) >= visible(timeline, store)) == waits


def test_a_gather_waits_for_any_write_to_its_tensor(builder: Any) -> None:
    matrix = builder.hbm(1024, 256)
    store = builder.store(matrix, slice(0, 128), slice(0, 256), builder.tile(256))
    rows = np.arange(900, 1000, dtype=np.int64) * 512
    part = MemoryRange(matrix.storage, 0, 1, 900 * 512, 1000 * 512, 512, (), rows.tobytes())
    facts = DmaFacts(51200, 100, 100, 100, HBM, SBUF, 51200, 0, indirect_rows=100)
    tile = builder.tile(256, partitions=100)
    gather = builder.emit(
        "dma_copy", DMA, facts, [builder.trace.range_id(part)], [builder.id_of(tile)]
    )
    timeline = schedule(builder.trace)
    assert start(timeline, gather) >= visible(timeline, store)


def test_a_store_that_waits_does_not_hold_up_the_loads_behind_it(builder: Any) -> None:
    result, source = builder.hbm(128, 512), builder.hbm(128, 512)
    tile = builder.tile(512)
    builder.compute("reciprocal", tile, builder.tile(512))
    store = builder.store(result, ROWS, slice(0, 512), tile)
    load = builder.load(builder.tile(512), source, ROWS, slice(0, 512))
    timeline = schedule(builder.trace)
    assert start(timeline, load) < start(timeline, store)


def test_explicit_dependencies_are_kept(builder: Any) -> None:
    slow = builder.compute("reciprocal", builder.tile(512), builder.tile(512))
    other = builder.compute("iota", builder.tile(8), engine=GPSIMD)
    builder.trace.after[other] = (slow,)
    timeline = schedule(builder.trace)
    assert start(timeline, other) >= visible(timeline, slow)


def test_two_small_transfers_use_different_dma_engines(builder: Any) -> None:
    source = builder.hbm(16, 512)
    for index in range(2):
        tile = builder.tile(512, partitions=8)
        builder.load(tile, source, slice(8 * index, 8 * index + 8), slice(0, 512), dge="none")
    result = schedule(builder.trace, TRN2, STATIC).result
    assert result.data_start[1] < result.data_end[0]


def test_two_large_transfers_queue_for_the_dma_engines(builder: Any) -> None:
    source = builder.hbm(128, 1024)
    for index in range(2):
        columns = slice(512 * index, 512 * index + 512)
        builder.load(builder.tile(512), source, ROWS, columns, dge="none")
    result = schedule(builder.trace, TRN2, STATIC).result
    assert result.data_start[1] == pytest.approx(result.data_end[0])


def stream(make: Make, *places: tuple[int, int]) -> float:
    """Load 64 tiles of 128 x 32 KiB on each core of a rank; return GB/s."""
    first = make()
    for core, rank in places:
        b = make(trace=first.trace, core=core, rank=rank)
        source, tiles = b.hbm(128, 16384), [b.tile(16384) for _ in range(4)]
        for k in range(64):
            b.load(tiles[k % 4], source, ROWS, slice(0, 16384), dge="none")
    return schedule(first.trace, TRN2, STATIC).hbm_bytes_per_s / 1e9


def test_cores_share_the_bandwidth_of_their_stack_and_ranks_do_not(make_builder: Make) -> None:
    assert stream(make_builder, (0, 0)) == pytest.approx(16 * 27.2, rel=0.05)
    assert stream(make_builder, (0, 0), (1, 0)) == pytest.approx(716, rel=0.02)
    assert stream(make_builder, (0, 0), (0, 1)) == pytest.approx(2 * 16 * 27.2, rel=0.05)


def test_the_array_warms_up_and_cools_down(builder: Any) -> None:
    stationary, moving, psum = builder.tile(128), builder.tile(512), builder.psum()
    for _ in range(20):
        builder.matmul(psum, stationary, moving)
    out = builder.tile(512)
    pause = builder.compute("reciprocal", out, psum)
    builder.compute("tensor_copy", moving, out)
    again = builder.matmul(psum, stationary, moving)
    result = schedule(builder.trace).result
    lengths = [result.busy_end[i] - result.start[i] for i in (0, 19, again)]
    full = 512 / 2.4 * 1.019
    assert lengths[0] == pytest.approx(2 * full, rel=0.08)
    assert lengths[1] == pytest.approx(full, rel=1e-3)
    assert lengths[2] == pytest.approx(lengths[0], rel=0.08)
    assert result.busy_end[pause] - result.start[pause] > TRN2.ramp_ns
    cold = schedule(builder.trace, TRN2, TimelineOptions(clock_ramp=False)).result
    assert cold.busy_end[0] - cold.start[0] == pytest.approx(full + 32 / 2.4)


def test_a_stationary_tile_in_use_again_is_not_loaded_again(builder: Any) -> None:
    one, two, moving, psum = (
        builder.tile(128),
        builder.tile(128),
        builder.tile(64),
        builder.psum(64),
    )
    for stationary in (one, one, two, one):
        builder.matmul(psum, stationary, moving)
    builder.compute("memset", one)
    builder.matmul(psum, one, moving)
    timeline = schedule(builder.trace)
    assert list(timeline.result.graph.keeps_stationary) == [0, 1, 0, 0, 0, 0]


def test_disjoint_parts_of_the_array_run_at_once(builder: Any) -> None:
    stationary, moving = builder.tile(32), builder.tile(512)
    for column in (0, 32, 64, 96):
        builder.matmul(builder.psum(), stationary, moving, tile=(0, column, 128, 32))
    tiled = schedule(builder.trace, TRN2, TimelineOptions(clock_ramp=False))
    two_at_once_ns = 2 * 512 / 2.4 * 1.019 + 512 / 2.4 / 2
    assert 2 * 512 / 2.4 < tiled.busy_ns("tensor") < two_at_once_ns + 300


def test_changing_the_activation_function_loads_a_table(builder: Any) -> None:
    tile = builder.tile(64)
    for function in ("exp", "exp", "copy", "gelu", "exp"):
        builder.compute("activation", tile, tile, engine=SCALAR, function=function)
    result = schedule(builder.trace).result
    assert result.table_loads == [3]
    same, switched = result.start[1] - result.visible[0], result.start[3] - result.visible[2]
    assert same == 0.0
    assert switched == pytest.approx(
        TRN2.table_load_ns - (result.visible[2] - result.busy_end[2]), abs=1e-6
    )


def test_building_descriptors_keeps_gpsimd_busy(builder: Any) -> None:
    builder.load(builder.tile(512), builder.hbm(128, 512), ROWS, slice(0, 512), dge="swdge")
    iota = builder.compute("iota", builder.tile(8), engine=GPSIMD)
    timeline = schedule(builder.trace)
    assert start(timeline, iota) == TRN2.swdge_ns
    assert timeline.busy_ns("gpsimd") > TRN2.swdge_ns


def test_transfers_of_one_named_queue_follow_the_single_queue_rule(builder: Any) -> None:
    source = builder.hbm(128, 512)
    for _ in range(2):
        builder.load(builder.tile(512), source, ROWS, slice(0, 512), dge="hwdge", queue="sync")
    alone = schedule(builder.trace).result
    several = schedule(builder.trace, TRN2, STATIC).result
    assert alone.data_end[0] - alone.data_start[0] == pytest.approx(850)
    assert several.data_end[0] - several.data_start[0] == pytest.approx(8 * 32 + 8192 / 27.2)


def test_nine_psum_tiles_do_not_fit_eight_banks(builder: Any) -> None:
    stationary, moving = builder.tile(128), builder.tile(512)
    copies, matmuls = [], []
    for _ in range(9):
        psum = builder.psum()
        matmuls.append(builder.matmul(psum, stationary, moving))
        copies.append(builder.compute("tensor_copy", builder.tile(512), psum))
    timeline = schedule(builder.trace)
    assert start(timeline, matmuls[8]) >= timeline.result.busy_end[copies[0]]
    assert start(timeline, matmuls[7]) < timeline.result.busy_end[copies[0]] + 1e4


def test_tensors_placed_on_the_same_bytes_wait_for_each_other(builder: Any) -> None:
    first, second = builder.tile(512, address=(0, 0)), builder.tile(512, address=(0, 512))
    apart = builder.tile(512, address=(0, 4096))
    builder.compute("memset", first)
    read = builder.compute("iota", builder.tile(8), first, engine=GPSIMD)
    free = builder.compute("memset", apart)
    overwrite = builder.compute("memset", second)
    timeline = schedule(builder.trace)
    assert start(timeline, overwrite) >= timeline.result.busy_end[read]
    assert start(timeline, free) < timeline.result.busy_end[read]


def barrier(b: Any, key: str, cores: int = 2) -> int:
    return int(b.emit("core_barrier", GPSIMD, SyncFacts("core_barrier", (key,), cores), [], []))


def test_a_barrier_ends_after_the_later_core(make_builder: Make) -> None:
    one = make_builder()
    two = make_builder(trace=one.trace, core=1)
    slow = one.compute("iota", one.tile(4096), engine=GPSIMD)
    first, second = barrier(one, "a"), barrier(two, "a")
    after = two.compute("iota", two.tile(8), engine=GPSIMD)
    timeline = schedule(one.trace)
    meeting = timeline.result.busy_end[slow] + TRN2.core_barrier_ns
    assert visible(timeline, first) == visible(timeline, second) == meeting
    assert start(timeline, after) >= meeting


def test_cores_are_ordered_by_barriers_only(make_builder: Make) -> None:
    one = make_builder()
    two = make_builder(trace=one.trace, core=1)
    shared, tile, other = one.hbm(128, 512), one.tile(512), two.tile(512)
    one.compute("reciprocal", tile, one.tile(512))
    store = one.store(shared, ROWS, slice(0, 512), tile)
    load = two.load(other, shared, ROWS, slice(0, 512))
    timeline = schedule(one.trace)
    assert start(timeline, load) < start(timeline, store)


def test_a_missing_partner_is_reported(make_builder: Make) -> None:
    one = make_builder()
    barrier(one, "lonely")
    with pytest.raises(ValueError, match=r"meeting \('lonely',\): 1 of 2 partners take part"):
        schedule(one.trace)


def test_meetings_in_different_order_are_reported(make_builder: Make) -> None:
    one = make_builder()
    two = make_builder(trace=one.trace, core=1)
    for b, keys in ((one, "ab"), (two, "ba")):
        for key in keys:
            barrier(b, key)
    with pytest.raises(ValueError, match="4 instructions wait in a circle"):
        schedule(one.trace)


def test_a_dynamic_loop_costs_every_engine_its_iteration(builder: Any) -> None:
    tile = builder.tile(8)
    builder.compute("memset", tile)
    builder.compute("iota", builder.tile(8), engine=GPSIMD)
    for _ in range(3):
        builder.emit("loop_iteration", ALL, ControlFacts("loop_iteration"), [], [])
    last = builder.compute("iota", builder.tile(8), engine=GPSIMD)
    free = TimelineOptions(model=ScheduleModel(loop_edge="free"))
    timeline = schedule(builder.trace, options=free)
    engine_ns = (150 + 8) / 1.2
    assert start(timeline, last) == pytest.approx(engine_ns + 3 * TRN2.loop_iteration_ns)


def test_a_loop_waits_for_its_register(builder: Any) -> None:
    bound = builder.tile(1, "int32", partitions=1)
    builder.compute("memset", bound)
    load = builder.emit(
        "register_load", SYNC, ControlFacts("register_load", SBUF), [builder.id_of(bound)], []
    )
    builder.emit("loop_begin", ALL, ControlFacts("loop_begin"), [], [])
    body = builder.load(builder.tile(8), builder.hbm(128, 8), ROWS, slice(0, 8))
    timeline = schedule(builder.trace)
    assert start(timeline, body) >= visible(timeline, load)


def test_memory_that_is_reused_must_be_free(builder: Any) -> None:
    """Each tile takes 40 % of SBUF, so every third one has to wait for the first."""
    columns = int(0.4 * TRN2.sbuf_usable_bytes_per_partition) // 2
    source = builder.hbm(128, columns)
    loads, uses = [], []
    for _ in range(3):
        tile = builder.tile(columns)
        loads.append(builder.load(tile, source, ROWS, slice(0, columns), dge="none"))
        uses.append(builder.compute("max8", builder.tile(8, "float32"), tile))
    timeline = schedule(builder.trace, TRN2, STATIC)
    assert start(timeline, loads[1]) < visible(timeline, loads[0])
    assert start(timeline, loads[2]) >= timeline.result.busy_end[uses[0]]


@pytest.mark.parametrize(("reuse", "waits"), [("late", False), ("early", True)])
def test_early_reuse_makes_a_new_tile_wait_for_the_last(
    builder: Any, reuse: Any, waits: bool
) -> None:
    source = builder.hbm(128, 1024)
    loads, uses = [], []
    for _ in range(2):
        tile = builder.tile(1024)
        loads.append(builder.load(tile, source, ROWS, slice(0, 1024), dge="none"))
        uses.append(builder.compute("max8", builder.tile(8, "float32"), tile))
    timeline = schedule(builder.trace, TRN2, TimelineOptions(dma_rule="runs", reuse=reuse))
    assert (start(timeline, loads[1]) >= timeline.result.busy_end[uses[0]]) == waits


def test_the_ring_never_hands_out_living_bytes() -> None:
    ring = Ring(100, granule=10)
    assert ring.place(0, 35, now=0, last_use=50) == []
    assert ring.place(1, 40, now=1, last_use=5) == []
    assert ring.place(2, 30, now=2, last_use=9) is None
    assert ring.place(3, 30, now=6, last_use=9) == [1]
    assert ring.place(4, 60, now=60, last_use=70) == [0, 3]
    assert ring.place(5, 200, now=60, last_use=70) is None


@pytest.mark.parametrize("seed", range(5))
def test_the_ring_agrees_with_a_byte_map(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ring, owner_of = Ring(64), np.full(64, -1)
    last: dict[int, int] = {}
    for now in range(200):
        size, until = int(rng.integers(1, 20)), now + int(rng.integers(0, 6))
        taken = ring.place(now, size, now, until)
        if taken is None:
            continue
        begin = ring._starts[ring._owners.index(now)]
        previous = set(owner_of[begin : begin + size].tolist()) - {-1}
        assert previous == set(taken)
        assert all(last[other] < now for other in previous)
        owner_of[begin : begin + size] = now
        last[now] = until


def test_psum_and_sbuf_are_placed_apart(builder: Any) -> None:
    tile = builder.tile(4096, "float32", PSUM)
    builder.compute("memset", tile, engine=VECTOR)
    assert schedule(builder.trace).result.graph.unplaced == 0
    builder.compute("memset", builder.tile(4097, "float32", PSUM))
    assert schedule(builder.trace).result.graph.unplaced == 1
