"""What a critical path tells of other coefficients, beside the run played again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lab.bench.comparison.critical_path import CriticalPath
from lab.bench.comparison.knobs import Knobs
from nki_sim.hardware import TRN2
from nki_sim.time.prepare import TimelineOptions
from nki_sim.time.schedule_model import CORNERS, VENDOR
from nki_sim.time.sensitivity import GROUPS, alone_ns, with_factors, with_factors_ns
from nki_sim.time.timeline import Timeline, schedule
from nki_sim.trace import GPSIMD, SCALAR
from tests.nki_sim.timing.random_traces import RandomTrace

Make = Callable[..., Any]
CHAINED = {  # the knobs that move the chain
    "DMA runs",
    "DMA ends",
    "Tensor",
    "Vector",
    "Scalar",
    "GpSimd",
    "software DGE",
}


def chain(make: Make) -> Timeline:
    """A load, work of every engine on its result, and a store: nothing overlaps."""
    b = make()
    source, result = b.hbm(128, 512), b.hbm(128, 512)
    tile, other, psum = b.tile(512), b.tile(512), b.psum()
    everything = slice(0, 128), slice(0, 512)
    b.load(tile, source, *everything, indirect_rows=128)
    b.matmul(psum, tile[0:128], tile)
    b.compute("tensor_tensor", other, psum, tile, function="add")
    b.compute("activation", other, other, engine=SCALAR)
    b.compute("nonzero_with_count", other, other, engine=GPSIMD)
    b.store(result, *everything, other)
    return schedule(b.trace)


def test_of_a_chain_the_path_tells_every_coefficient(make_builder: Make) -> None:
    run = chain(make_builder)
    path = CriticalPath.of(run.prepared, run.result, run.chip)
    assert path.priced_ns == pytest.approx(
        run.total_ns, rel=0.03
    )  # the array starts at half its clock
    moved = set()
    for knob in GROUPS:
        for factor in (0.5, 2.0):
            chip, _ = with_factors(run, {knob: factor})
            played_ns = with_factors_ns(run, {knob: factor})
            assert path.total_on_ns(chip) == pytest.approx(played_ns, rel=1e-3), knob
            moved |= {knob} if played_ns != run.total_ns else set()
    assert moved >= CHAINED


def test_transfers_that_wait_for_the_engines_hold_them_for_their_bytes(make_builder: Make) -> None:
    b = make_builder()
    source = b.hbm(128, 64 * 2048)
    for index in range(64):
        columns = slice(index * 2048, (index + 1) * 2048)
        b.load(b.tile(2048), source, slice(0, 128), columns)
    run = schedule(b.trace)
    path = CriticalPath.of(run.prepared, run.result, run.chip)
    slower = replace(TRN2, dma_run_ns=2 * TRN2.dma_run_ns)
    assert path.total_on_ns(slower) == pytest.approx(schedule(b.trace, slower).total_ns, rel=0.01)
    later = replace(TRN2, dma_first_byte_ns=2 * TRN2.dma_first_byte_ns)
    assert path.total_on_ns(later) == pytest.approx(schedule(b.trace, later).total_ns, rel=0.01)


@pytest.mark.parametrize("corner", CORNERS)
def test_another_path_may_be_longer_and_none_is_shorter(make_builder: Make, corner: str) -> None:
    for seed in range(4):
        trace = RandomTrace(make_builder, seed, cores=2).trace
        run = schedule(trace, options=TimelineOptions(model=CORNERS[corner]))
        knobs, played_ns = Knobs(run), alone_ns(run)
        estimated_ns = {turned: knobs.estimated_ns({}, *turned) for turned in played_ns}
        for turned, time_ns in played_ns.items():
            assert time_ns > estimated_ns[turned] - 0.06 * run.total_ns, turned
        furthest = max(played_ns, key=played_ns.__getitem__)
        assert furthest in sorted(estimated_ns, key=estimated_ns.__getitem__)[-2:]


def test_knobs_that_act_by_order_are_tried(make_builder: Make) -> None:
    trace = RandomTrace(make_builder, 1, length=400, kinds="compute").trace
    run = schedule(trace, options=TimelineOptions(model=replace(VENDOR, window=4)))
    knobs = Knobs(run)
    played_ns = with_factors_ns(run, {"compiler window": 0.5})
    assert knobs.estimated_ns({}, "compiler window", 0.5) == pytest.approx(played_ns)
    turned = {"compiler window": 0.5}
    assert knobs.estimated_ns(turned, "compiler window", 0.5) == pytest.approx(played_ns)
    assert knobs.estimated_ns(turned, "compiler window", 1.0) == pytest.approx(run.total_ns)
