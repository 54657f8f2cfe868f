"""What a timeline reports agrees with itself, and its files can be opened."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nki_sim.hardware import TRN2
from nki_sim.time.perfetto import chrome_events
from nki_sim.time.timeline import LANES, Timeline, schedule
from nki_sim.trace import GPSIMD, SCALAR, SyncFacts, Trace

Make = Callable[..., Any]


def small_matmul(b: Any, tiles: int = 6) -> None:
    """A few accumulated matmuls with loads, an activation and a store."""
    lhs, rhs, result = b.hbm(128 * tiles, 128), b.hbm(128 * tiles, 512), b.hbm(128, 512)
    psum = b.psum()
    for step in range(tiles):
        rows = slice(128 * step, 128 * step + 128)
        stationary, moving = b.tile(128), b.tile(512)
        b.load(stationary, lhs, rows, slice(0, 128), line=1)
        b.load(moving, rhs, rows, slice(0, 512), line=2)
        b.matmul(psum, stationary, moving, line=3)
    out = b.tile(512)
    b.compute("activation", out, psum, engine=SCALAR, function="exp", line=4)
    b.compute("tensor_scalar", out, out, function="multiply", line=5)
    b.store(result, slice(0, 128), slice(0, 512), out, line=6)


@pytest.fixture
def timeline(builder: Any) -> Timeline:
    small_matmul(builder)
    return schedule(builder.trace)


@pytest.fixture
def two_cores(make_builder: Make) -> Timeline:
    first = make_builder()
    for core in range(2):
        b = make_builder(trace=first.trace, core=core)
        small_matmul(b, tiles=3 + 3 * core)
        meeting = SyncFacts("core_barrier", ("end",), 2)
        b.emit("core_barrier", GPSIMD, meeting, [], [], line=9)
        small_matmul(b, tiles=1)
    return schedule(first.trace)


def test_the_critical_path_sums_to_the_total(timeline: Timeline, two_cores: Timeline) -> None:
    for one in (timeline, two_cores):
        assert sum(one.path_ns.values()) == pytest.approx(one.total_ns)
        assert sum(step.ns for step in one.critical_path()) == pytest.approx(one.total_ns)
        assert sum(step.share for step in one.critical_path()) == pytest.approx(1.0)
        assert min(one.path_ns.values()) >= 0.0


def test_the_critical_path_names_source_lines_largest_first(timeline: Timeline) -> None:
    steps = timeline.critical_path()
    assert steps == sorted(steps, key=lambda step: -step.ns)
    assert {step.file for step in steps} == {"kernel.py"}
    assert {"dma_copy", "nc_matmul", "activation", "tensor_scalar"} == {step.op for step in steps}


def test_the_critical_path_of_a_barrier_runs_through_the_later_core(two_cores: Timeline) -> None:
    later = max(
        (index for index in two_cores.path_ns if two_cores.trace[index].line <= 6),
        key=lambda index: two_cores.path_ns[index] * (two_cores.result.visible[index] < 2e4),
    )
    assert two_cores.trace[later].core == 1


def test_no_lane_is_busy_for_longer_than_the_run(two_cores: Timeline) -> None:
    for core in range(2):
        busy = two_cores.engine_busy_ns(core)
        assert {"tensor", "vector", "scalar", "dma"} <= set(busy)
        assert all(0.0 < time <= two_cores.total_ns for time in busy.values())


def test_totals_count_what_the_trace_holds(timeline: Timeline) -> None:
    assert timeline.flops == 6 * 2 * 128 * 128 * 512
    assert timeline.hbm_bytes == 2 * 128 * (6 * (128 + 512) + 512)
    assert timeline.hbm_bytes_per_s == pytest.approx(timeline.hbm_bytes / timeline.total_ns * 1e9)
    assert timeline.pe_utilisation == pytest.approx(6 * 512 / 2.4 / timeline.total_ns)
    assert timeline.pe_utilisation * TRN2.bf16_flops_per_ns * timeline.total_ns == pytest.approx(
        timeline.flops
    )


def test_the_roofline_is_the_larger_bound_and_never_beaten(
    timeline: Timeline, two_cores: Timeline
) -> None:
    for one in (timeline, two_cores):
        assert one.roofline_ns == max(one.compute_bound_ns, one.memory_bound_ns)
        assert 0.0 < one.roofline_share < 1.0
        assert one.roofline_share == pytest.approx(one.roofline_ns / one.total_ns)


def test_source_lines_are_charged_for_their_engines(timeline: Timeline) -> None:
    lines = {(entry.line, entry.op): entry for entry in timeline.line_times()}
    assert {key: entry.instructions for key, entry in lines.items()} == {
        (1, "dma_copy"): 6,
        (2, "dma_copy"): 6,
        (3, "nc_matmul"): 6,
        (4, "activation"): 1,
        (5, "tensor_scalar"): 1,
        (6, "dma_copy"): 1,
    }
    assert lines[5, "tensor_scalar"].busy_ns == pytest.approx(timeline.busy_ns("vector"))


def test_the_summary_shows_the_numbers_of_the_timeline(timeline: Timeline) -> None:
    text = timeline.summary()
    assert f"{timeline.total_us:,.2f} us" in text
    assert f"{timeline.pe_utilisation:.1%}" in text
    assert f"{timeline.hbm_bytes_per_s / 1e9:,.1f} GB/s" in text
    assert f"{timeline.roofline_share:.1%}" in text
    assert "trn2, simulated" in text
    assert "kernel.py:2  dma_copy" in text
    for lane in timeline.engine_busy_ns():
        assert f"    {lane:<17}" in text


def test_every_core_has_a_column(two_cores: Timeline) -> None:
    assert "core 0      core 1" in two_cores.summary()


def test_an_empty_trace_takes_no_time() -> None:
    timeline = schedule(Trace())
    assert timeline.total_ns == 0.0
    assert timeline.critical_path() == []
    assert "0.00 us" in timeline.summary()


def test_lanes_do_not_overlap_except_transfers(two_cores: Timeline) -> None:
    lanes: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for box in two_cores.intervals():
        assert box.lane in (*LANES, "exchange")
        assert box.end_ns >= box.start_ns
        lanes.setdefault((box.core, box.lane), []).append((box.start_ns, box.end_ns))
    assert sum(map(len, lanes.values())) == len(two_cores.trace)
    for (_, lane), boxes in lanes.items():
        if lane != "dma":
            boxes.sort()
            ends = [end for _, end in boxes[:-1]]
            assert all(begin >= end - 1e-6 for end, (begin, _) in zip(ends, boxes[1:], strict=True))


def test_the_chrome_trace_is_valid_and_complete(two_cores: Timeline, tmp_path: Path) -> None:
    path = two_cores.save_perfetto(tmp_path / "run.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    events = document["traceEvents"]
    boxes = [event for event in events if event["ph"] == "X"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert len(boxes) == len(two_cores.trace)
    assert {event["ph"] for event in events} == {"X", "M"}
    assert {(box["pid"], box["tid"]) for box in boxes} == set(names)
    assert all(box["ts"] >= 0 and box["dur"] >= 0 for box in boxes)
    assert max(box["ts"] + box["dur"] for box in boxes) <= two_cores.total_us + 1e-6
    for pid in (0, 1):
        vector = sum(
            box["dur"] for box in boxes if box["pid"] == pid and names[pid, box["tid"]] == "vector"
        )
        assert vector == pytest.approx(two_cores.busy_ns("vector", pid) / 1e3)


def test_transfers_that_overlap_get_lanes_of_their_own(timeline: Timeline) -> None:
    lanes: dict[tuple[int, int], float] = {}
    for event in chrome_events(timeline):
        if event["ph"] == "X" and event["cat"] == "dma":
            lane = event["pid"], event["tid"]
            assert event["ts"] >= lanes.get(lane, 0.0) - 1e-6
            lanes[lane] = event["ts"] + event["dur"]


def test_the_picture_is_a_png_of_some_size(two_cores: Timeline, tmp_path: Path) -> None:
    path = two_cores.save_picture(tmp_path / "run.png")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width == 1680
    assert height > 300


def test_a_window_that_is_empty_is_refused(timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"start_ns=5000.0: must be before end_ns=10"):
        timeline.save_picture(tmp_path / "run.png", 5000.0, 10.0)
