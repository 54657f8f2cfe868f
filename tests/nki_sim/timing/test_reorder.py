"""Queues that reorder break no dependency, and lose at most what their window can cost."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from nki_sim.hardware import TRN2, Hardware
from nki_sim.time.reorder import play
from nki_sim.time.schedule_model import COMPILER_WINDOW, LIKELY, ScheduleModel
from nki_sim.time.timeline import Timeline, TimelineOptions, schedule
from nki_sim.trace import ALL, DMA, GPSIMD, SCALAR, VECTOR, ControlFacts, SyncFacts
from tests.nki_sim.timing.random_traces import RandomTrace

Make = Callable[..., Any]
WINDOWS = (1, 2, 7, COMPILER_WINDOW)
SEEDS = range(8)
MODELS = (LIKELY, ScheduleModel(order="list"))


OVERLAPPING = dataclasses.replace(TRN2, vector_issue_cycles=0)


def played(trace: Any, chip: Any = TRN2, clock_ramp: bool = True, **model: Any) -> Timeline:
    options = TimelineOptions(model=ScheduleModel(**model), clock_ramp=clock_ramp)
    return schedule(trace, chip, options)


def times(timeline: Timeline) -> tuple[list[float], ...]:
    result = timeline.result
    return result.start, result.busy_end, result.visible, result.data_start, result.data_end


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chip", [TRN2, OVERLAPPING], ids=["", "overlap"])
def test_no_dependency_is_violated(
    make_builder: Make, seed: int, window: int, chip: Hardware
) -> None:
    random = RandomTrace(make_builder, seed)
    run = played(random.trace, chip, order="list", window=window).result
    queue = run.graph.queue
    for before, after, kind in random.waits():
        if queue[before] != queue[after]:
            moved = run.data_end[before] > 0.0
            done = run.visible[before] if moved or kind != "WAR" else run.busy_end[before]
        elif kind == "RAW" and run.graph.queues[queue[before]].name != "tensor":
            done = run.visible[before]
        else:
            done = run.start[before]
        assert run.start[after] >= done, (before, after, kind)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_edge_of_the_graph_is_respected(make_builder: Make, seed: int) -> None:
    """With so little memory that tiles take the place of dead ones."""
    chip = dataclasses.replace(TRN2, sbuf_usable_bytes_per_partition=4096)
    random = RandomTrace(make_builder, seed)
    builder = random.builders[0]
    for number in range(40):
        tile = builder.tile(256)
        builder.load(tile, builder.hbm(128, 256), slice(0, 128), slice(0, 256))
        engine = (VECTOR, SCALAR, GPSIMD)[number % 3]
        builder.compute("tensor_copy", builder.tile(256), tile, engine=engine)
    run = played(random.trace, chip, order="list", window=16).result
    graph = run.graph
    reused = 0
    for node in range(len(graph.instruction)):
        for edge in graph.targets[graph.first[node] : graph.first[node + 1]]:
            target = edge >> 1
            same = graph.queue[node] == graph.queue[target]
            early = run.start[node] if same else run.busy_end[node]
            assert run.start[target] >= (early if edge & 1 else run.visible[node])
            reused += graph.instruction[node] > 120
    assert reused


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("loop_edge", ["free", "engines", "drain"])
def test_a_window_of_one_is_in_order(
    make_builder: Make, seed: int, cores: int, loop_edge: str
) -> None:
    trace = RandomTrace(make_builder, seed, cores=cores).trace
    listed = played(trace, order="list", window=1, loop_edge=loop_edge)
    # Edges inside a queue keep the order of issue only, so that all times are the same.
    assert times(listed) == times(played(trace, loop_edge=loop_edge))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chip", [TRN2, OVERLAPPING], ids=["", "overlap"])
def test_the_greed_of_the_window_bounds_the_loss(
    make_builder: Make, seed: int, window: int, chip: Hardware
) -> None:
    """Each node of a chain loses at most the longest occupancy among the W - 1 behind it."""
    trace = RandomTrace(make_builder, seed, kinds="compute").trace
    chip = dataclasses.replace(chip, table_load_ns=0.0)
    in_order = played(trace, chip).result
    listed = played(trace, chip, order="list", window=window).result
    graph = listed.graph
    lost = [0.0] * len(graph.instruction)
    greed = dict[int, float]()
    for queue in graph.queues:
        for place, node in enumerate(queue.nodes):
            behind = queue.nodes[place + 1 : place + window]
            occupied = [listed.busy_end[other] - listed.start[other] for other in behind]
            greed[node] = max(occupied, default=0.0)
    before = {
        node: queue.nodes[place - 1]
        for queue in graph.queues
        for place, node in enumerate(queue.nodes)
        if place
    }
    # In the order of their start in order, so that all a node waits for comes before it.
    for node in sorted(range(len(lost)), key=lambda n: (in_order.start[n], graph.instruction[n])):
        if node in before:
            lost[node] = max(lost[node], lost[before[node]])
        lost[node] += greed[node]
        assert listed.start[node] <= in_order.start[node] + lost[node] + 1e-6
        for edge in graph.targets[graph.first[node] : graph.first[node + 1]]:
            lost[edge >> 1] = max(lost[edge >> 1], lost[node])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_whole_run_loses_at_most_one_time_per_queue(make_builder: Make, seed: int) -> None:
    """Where costs have a history: some queue works, or some latency of a chain runs, always."""
    trace = RandomTrace(make_builder, seed, cores=2).trace
    in_order = played(trace)
    bound = (1 + len(in_order.result.graph.queues)) * in_order.total_ns
    assert played(trace, order="list").total_ns <= bound


@pytest.mark.parametrize("model", MODELS, ids=["in order", "list"])
@pytest.mark.parametrize("nodes", [1, 20])
def test_the_first_nodes_of_a_run_have_the_times_of_the_whole(
    make_builder: Make, model: ScheduleModel, nodes: int
) -> None:
    whole = schedule(RandomTrace(make_builder, 3).trace, options=TimelineOptions(model=model))
    part = play(whole.prepared, whole.chip, whole.options, nodes)
    ended = [node for node, time in enumerate(part.visible) if time > 0.0]
    assert nodes - 1 <= len(ended) < len(part.visible)  # a loop may begin, and end that, at 0
    assert [part.visible[node] for node in ended] == [whole.result.visible[n] for n in ended]
    assert 0.0 <= part.total_ns < whole.total_ns


@pytest.mark.parametrize("model", MODELS, ids=["in order", "list"])
def test_the_same_trace_takes_the_same_time(make_builder: Make, model: ScheduleModel) -> None:
    trace = RandomTrace(make_builder, 3, cores=2).trace
    options = TimelineOptions(model=model)
    assert times(schedule(trace, TRN2, options)) == times(schedule(trace, TRN2, options))


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_passes_the_edge_of_a_loop(make_builder: Make, seed: int) -> None:
    run = played(RandomTrace(make_builder, seed).trace, order="list").result
    facts = RandomTrace(make_builder, seed).trace
    for queue in run.graph.queues:
        edges = [n for n in queue.nodes if facts[run.graph.instruction[n]].op.startswith("loop")]
        assert edges
        for edge in edges:
            place = queue.nodes.index(edge)
            assert all(run.start[n] <= run.start[edge] for n in queue.nodes[:place])
            assert all(run.start[n] >= run.start[edge] for n in queue.nodes[place + 1 :])


def test_a_ready_instruction_passes_one_that_waits(builder: Any) -> None:
    tile, source = builder.tile(256), builder.hbm(128, 256)
    builder.load(tile, source, slice(0, 128), slice(0, 256))
    waits = builder.compute("tensor_copy", builder.tile(256), tile)
    ready = builder.compute("memset", builder.tile(256))
    assert played(builder.trace).result.start[ready] > played(builder.trace).result.start[waits]
    assert played(builder.trace, order="list").result.start[ready] == 0.0
    assert played(builder.trace, order="list", window=1).result.start[ready] > 0.0


def test_matmuls_into_the_same_sums_stay_in_order(builder: Any) -> None:
    late, early, sums = builder.tile(128), builder.tile(128), builder.psum()
    builder.load(late, builder.hbm(128, 128), slice(0, 128), slice(0, 128))
    moving = builder.tile(512)
    first = builder.matmul(sums, late, moving)
    same = builder.matmul(sums, early, moving)
    other = builder.matmul(builder.psum(), early, moving)
    run = played(builder.trace, order="list").result
    assert run.start[other] < run.start[first] < run.start[same]


def test_what_follows_a_meeting_may_go_first_and_what_precedes_may_not_follow(
    make_builder: Make,
) -> None:
    one = make_builder()
    two = make_builder(trace=one.trace, core=1)
    slow = two.compute("reciprocal", two.tile(4096), two.tile(4096))
    meeting = SyncFacts("core_barrier", ("b",), 2)
    here = one.emit("core_barrier", VECTOR, meeting, [], [])
    two.emit("core_barrier", VECTOR, meeting, [], [])
    later = one.compute("memset", one.tile(8))
    run = played(one.trace, order="list").result
    assert run.start[here] >= run.busy_end[slow]
    assert run.start[later] >= run.visible[here]  # it had arrived, and holds its engine


def exchange(make: Make, **model: Any) -> Timeline:
    """Two exchanges of small tiles, one after the other."""
    one = make()
    two = make(trace=one.trace, core=1)
    for key in ("a", "b"):
        facts = SyncFacts("sendrecv", (key,), 2, 1024, 128, "dma")
        for core in (one, two):
            core.emit("sendrecv", DMA, facts, [core.id_of(core.tile(8))], [])
    return played(one.trace, **model)


def test_pipelined_exchanges_overlap_their_latencies(make_builder: Make) -> None:
    blocking = exchange(make_builder).total_ns
    pipelined = exchange(make_builder, sendrecv="pipelined").total_ns
    assert blocking > 2 * TRN2.sendrecv_ns
    assert TRN2.sendrecv_ns < pipelined < 1.3 * TRN2.sendrecv_ns


def loop(make: Make, **model: Any) -> Timeline:
    """Two iterations: a slow instruction of Vector, a quick one of GpSimd, a load nobody needs."""
    b = make()
    for iteration in ("loop_begin", "loop_iteration", "loop_iteration", "loop_end"):
        b.emit(iteration, ALL, ControlFacts(iteration), [], [])
        if iteration == "loop_iteration":
            b.compute("reciprocal", b.tile(512), b.tile(512))
            b.compute("iota", b.tile(8), engine=GPSIMD)
            b.load(b.tile(8192), b.hbm(128, 8192), slice(0, 128), slice(0, 8192))
    return played(b.trace, **model)


def test_the_edge_of_a_loop_is_free_or_a_barrier_or_drains(make_builder: Make) -> None:
    runs = {
        edge: loop(make_builder, loop_edge=edge).result for edge in ("free", "engines", "drain")
    }
    slow_end = {edge: run.visible[2] for edge, run in runs.items()}
    second = {edge: run.start[7] for edge, run in runs.items()}
    assert second["free"] < slow_end["free"]
    assert slow_end["engines"] <= second["engines"] < runs["engines"].visible[4]
    assert second["drain"] >= runs["drain"].visible[4]


def test_a_window_holds_at_least_one_instruction() -> None:
    with pytest.raises(ValueError, match=r"window=0: must be positive"):
        ScheduleModel(window=0)
