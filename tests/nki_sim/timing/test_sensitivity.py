"""A comparison tells whether it hangs on an assumption."""

from collections.abc import Callable
from typing import Any

import pytest

from nki_sim.hardware import SWITCHES, TRN2, TRN3
from nki_sim.time.schedule_model import COMPILER_WINDOW, ScheduleModel
from nki_sim.time.sensitivity import (
    FIXED,
    GROUPS,
    PEAKS,
    WINDOW,
    alone_ns,
    compare,
    with_factors,
    with_factors_ns,
)
from nki_sim.time.timeline import Timeline, TimelineOptions, schedule
from nki_sim.trace import GPSIMD

Make = Callable[..., Any]


def on_gpsimd(make: Make, count: int) -> Timeline:
    """Work whose price is assumed."""
    b = make()
    for _ in range(count):
        b.compute("nonzero_with_count", b.tile(512, "float32"), engine=GPSIMD)
    return schedule(b.trace)


def on_vector(make: Make, count: int) -> Timeline:
    """Work whose price is measured."""
    b = make()
    for _ in range(count):
        b.compute("max8", b.tile(512, "float32"), b.tile(512, "float32"))
    return schedule(b.trace)


def test_a_clear_difference_survives(make_builder: Make) -> None:
    report = compare(on_vector(make_builder, 1), on_gpsimd(make_builder, 10), ("vector", "gpsimd"))
    assert report.faster == "vector"
    assert report.survives
    assert {one.field for one in report.variations} == {"gpsimd_nonzero_cycles_per_element"}
    assert "vector is faster: survives every change" in report.table()


def test_a_difference_that_rests_on_a_guess_is_found_out(make_builder: Make) -> None:
    gpsimd = on_gpsimd(make_builder, 4)
    vector = on_vector(make_builder, round(gpsimd.total_ns / 683.3 * 0.8))
    report = compare(vector, gpsimd, ("vector", "gpsimd"))
    assert report.faster == "vector"
    assert not report.survives
    flips = [(one.field, one.factor) for one in report.variations if not one.survives]
    assert flips == [("gpsimd_nonzero_cycles_per_element", 0.5)]
    assert "depends on an assumed coefficient" in report.table()
    assert "flips" in report.table()


def test_measured_numbers_vary_only_on_request(make_builder: Make) -> None:
    pair = on_vector(make_builder, 3), on_gpsimd(make_builder, 1)
    assumed = {one.field for one in compare(*pair).variations}
    assert assumed == {"gpsimd_nonzero_cycles_per_element"}
    more = compare(*pair, kinds=("measured", "documented")).variations
    assert {"vector_overhead_cycles", "vector_clock_ghz"} <= {one.field for one in more}


def test_a_doubled_cost_shows_its_full_effect(make_builder: Make) -> None:
    gpsimd = on_gpsimd(make_builder, 1)
    report = compare(on_vector(make_builder, 1), gpsimd)
    doubled = next(one for one in report.variations if one.factor == 2.0)
    assert doubled.b_ns - gpsimd.total_ns == pytest.approx(8 * 512 / 1.2)
    assert doubled.a_ns == report.a_ns


def in_tiles(make: Make, count: int) -> Timeline:
    """Load, use and store 4,096 columns in pieces."""
    b = make()
    source, result = b.hbm(128, 4096), b.hbm(128, 4096)
    width = 4096 // count
    for index in range(count):
        tile, columns = b.tile(width), slice(index * width, (index + 1) * width)
        b.load(tile, source, slice(0, 128), columns)
        b.compute("reciprocal", tile, tile)
        b.store(result, slice(0, 128), columns, tile)
    return schedule(b.trace)


def test_the_other_placement_of_tensors_is_reported(make_builder: Make) -> None:
    report = compare(in_tiles(make_builder, 4), in_tiles(make_builder, 1), ("tiles", "whole"))
    assert report.faster == "tiles"
    assert report.survives
    assert not report.survives_placement
    assert report.placed_otherwise_ns[0] > report.placed_otherwise_ns[1] == report.b_ns
    assert "tensors placed the other way" in report.table()
    assert "tiles is faster: survives every coefficient, depends on where" in report.table()


def test_runs_on_different_chips_are_not_compared(make_builder: Make) -> None:
    one = on_vector(make_builder, 1)
    other = schedule(one.trace, TRN3)
    with pytest.raises(ValueError, match="chip='trn3': must be 'trn2' as for a"):
        compare(one, other)


def test_measured_numbers_move_with_their_group(make_builder: Make) -> None:
    run = in_tiles(make_builder, 4)
    changed, _ = with_factors(run, {"DMA runs": 2.0})
    assert changed.dma_run_ns == 2 * run.chip.dma_run_ns
    assert changed.provenance("dma_run_ns").kind == "measured"
    assert with_factors_ns(run, {"DMA runs": 2.0}) > run.total_ns


def test_the_window_of_the_compiler_is_a_knob(make_builder: Make) -> None:
    trace = in_tiles(make_builder, 4).trace
    run = schedule(trace, options=TimelineOptions(model=ScheduleModel(order="list")))
    _, options = with_factors(run, {WINDOW: 0.5})
    assert options.model.window == COMPILER_WINDOW // 2
    assert {(WINDOW, 0.5), (WINDOW, 2.0)} <= set(alone_ns(run))


def test_every_guess_and_every_measurement_is_in_one_group() -> None:
    grouped = [name for fields in GROUPS.values() for name in fields]
    assert len(grouped) == len(set(grouped))
    uncertain = {*TRN2.fields_of_kind("assumed"), *TRN2.fields_of_kind("measured")}
    assert uncertain - set(grouped) == {*PEAKS, *SWITCHES}
    assert FIXED.isdisjoint(grouped)
    assert all(isinstance(getattr(TRN2, name), int | float) for name in grouped)
