"""The picture of engines and memory: what its lanes hold, and that it is drawn to one scale."""

import dataclasses
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from lab.bench.decode.lanes import (
    CASE,
    ENGINES,
    LEFT,
    RIGHT,
    WIDTH,
    Panel,
    busy_spans,
    draw_lanes,
    memory_rates,
)
from lab.bench.decode.ours import decode_plan, launch_ours
from lab.bench.decode.work import OPTIONS
from nki_sim.time.timeline import Timeline


@pytest.fixture(scope="module")
def lines() -> list[Timeline]:
    """Return a small layer's step, and one of more tokens."""
    model = dataclasses.replace(CASE.model, H=256, I=64, E=16, K=2)
    cases = [dataclasses.replace(CASE, model=model, B=B) for B in (2, 16)]
    plans = [decode_plan(case, layout="plain") for case in cases]
    return [launch_ours(*each, OPTIONS).timeline for each in zip(cases, plans, strict=True)]


@pytest.mark.parametrize("bin_us", [0.05, 1.0])
def test_the_memory_lane_holds_every_byte(lines: list[Timeline], bin_us: float) -> None:
    for line in lines:
        rates = memory_rates(line, bin_us)
        assert rates.sum() * 1e3 * bin_us == pytest.approx(line.hbm_bytes)
        assert rates.min() >= 0


def test_spans_of_an_engine_are_apart_and_inside_the_run(lines: list[Timeline]) -> None:
    for line in lines:
        for lane in ENGINES:
            spans = busy_spans(line, lane, 0.1)
            assert spans
            ends = [end for span in spans for end in span]
            assert ends == sorted(ends)
            assert 0 <= ends[0] <= ends[-1] <= line.total_us
            assert all(b[0] - a[1] > 0.1 for a, b in pairwise(spans))


def test_both_panels_have_one_time_axis(lines: list[Timeline]) -> None:
    panels = [Panel(name, line) for name, line in zip(("few", "more"), lines, strict=True)]
    svg = draw_lanes(panels, "title", "note")
    texts = [each.text for each in ET.fromstring(svg).iter() if each.text and each.text.strip()]
    assert {"title", "note", "few", "more", "memory", *ENGINES} <= set(texts)
    ends = [float(x) for x in re.findall(r'd="M([\d.]+) [\d.]+V[\d.]+" stroke="#1f2937"', svg)]
    times = [line.total_us for line in lines]
    assert max(ends) == pytest.approx(WIDTH - RIGHT, abs=0.1)
    assert (ends[0] - LEFT) / (ends[1] - LEFT) == pytest.approx(times[0] / times[1], rel=1e-2)
