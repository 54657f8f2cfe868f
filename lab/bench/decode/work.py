"""Our side of one case of the decode benchmark: what is to be simulated, and the rows of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from lab.bench.comparison.attempts import fastest
from lab.bench.comparison.deployed import nxd_default
from lab.bench.comparison.spread import (
    Pairing,
    Side,
    SpeedupRange,
    SpreadWork,
    kept_range,
)
from lab.bench.decode.cases import WEIGHT_BYTES, DecodeCase, hbm_bound_us
from lab.bench.decode.ours import config_of, decode_plan, launch_ours
from lab.bench.decode.results import IN_BF16, Book, Key, Row, row_of
from lab.bench.decode.vendor import launch_vendor, seconds_of
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.timing.pool import Task
from neuron_moe.tools.timing.sources import Sources
from neuron_moe.tools.timing.timelines import bottleneck, corner_timelines
from nki_sim import Run, SimOptions

MODES = ("selective", "all")
# The block's router must choose real experts: its hidden states and weights keep their values.
OPTIONS = SimOptions(
    mode="indices", uninitialized="off", races="off", capacity="reorder", small_elements=1 << 22
)


class OurSide:
    """Our kernel on a case: a task and a row in each corner for every layout.

    Args:
        case: what to compute.
        layouts: of our weights.
        corners: of the clock.
        sources: what times are simulated with.
        earlier: rows of an earlier run, by key; what of them still holds is not run again.
    """

    def __init__(
        self,
        case: DecodeCase,
        layouts: Sequence[str],
        corners: Sequence[str],
        sources: Sources,
        earlier: Mapping[Key, Row],
    ) -> None:
        self.case, self.name = case, case.name
        self._sources, self._corners = sources, corners
        touched = len(np.unique(case.expert_index()))
        self.rows: dict[Key, Row] = {}
        self._earlier: dict[Key, Row] = {}
        self._waiting = []
        for layout in layouts:
            blank = [row_of(case, touched, layout, corner) for corner in corners]
            kept = {row.key: earlier[row.key] for row in blank if self._holds(earlier, row.key)}
            self.rows |= {row.key: kept.get(row.key, row) for row in blank}
            self._earlier |= {row.key: earlier[row.key] for row in blank if row.key in earlier}
            if len(kept) < len(blank):
                self._waiting.append(layout)

    def _holds(self, earlier: Mapping[Key, Row], key: Key) -> bool:
        row = earlier.get(key)
        return row is not None and row.kernels == self._sources.kernels

    def note_deployed(self) -> None:
        """Note what NxD runs by default, and a time below which that cannot be (computed)."""
        default = nxd_default(self.case.model, "decode", self.case.B)
        bound_us = default.bound_us(self.case.model, WEIGHT_BYTES[self.case.format])
        self.rows = {
            key: replace(row, deployed_us=bound_us, deployed_plan=default.plan)
            for key, row in self.rows.items()
        }

    def keep_range(self, key: Key, found: SpeedupRange) -> None:
        """Keep how far the ratio of a row may move."""
        fields = {name: getattr(found, name) for name in SpeedupRange.__slots__}
        self.rows[key] = replace(self.rows[key], **fields)

    def launches(self, corner: str) -> Iterator[tuple[list[Key], Side]]:
        """Yield what simulates the rows of a corner that ran and lack a range."""
        for key, row in self.rows.items():
            if row.corner == corner and row.ours_us and row.speedup_low is None:
                launch = partial(_launch, self.case, row.layout)
                yield [key], Side((self.name, row.layout), launch)

    def skip(self) -> None:
        """Run nothing."""
        self._waiting.clear()

    @property
    def size(self) -> float:
        """The seconds of what still waits, about."""
        return len(self._waiting) * self.seconds

    @property
    def seconds(self) -> float:
        """The seconds of a layout in both corners, about (measured on one machine)."""
        model = self.case.model
        return 1.0 + 0.004 * min(model.E, self.case.B * model.K) * (model.H / 2048)

    def next_task(self) -> Task | None:
        """Hand out the next layout."""
        if not self._waiting:
            return None
        layout = self._waiting.pop(0)
        return Task(f"ours {layout}", self.seconds, partial(self._run, layout))

    def take(self, task: Task, result: Sequence[Row]) -> None:
        """Keep the rows that a task filled in."""
        for row in result:
            before = self._earlier.get(row.key)
            self.rows[row.key] = replace(row, **kept_range(before, row.ours_us))

    def _run(self, layout: str) -> list[Row]:
        """Simulate our kernel in one layout; return its rows."""
        plan = decode_plan(self.case, layout=layout)
        run, config = launch_ours(self.case, plan, OPTIONS), config_of(plan)
        rows: dict[str, Row] = {}
        for corner, timeline in corner_timelines(run, self._corners):
            (blank,) = [r for r in self.rows.values() if (r.layout, r.corner) == (layout, corner)]
            rows[corner] = replace(
                blank,
                ours_us=timeline.total_us,
                ours_mode=config.mode,
                ours_plan=plan.notes()[0].removeprefix("plan: "),
                ours_modes={config.mode: timeline.total_us},
                bottleneck=bottleneck(timeline),
                kernels=self._sources.kernels,
            )
        del run
        for corner, us in self._other_mode(config.mode, layout, rows).items():
            other = MODES[1 - MODES.index(config.mode)]
            modes = {**rows[corner].ours_modes, other: us}
            rows[corner] = replace(rows[corner], ours_modes=modes)
        return list(rows.values())

    def _other_mode(self, mode: str, layout: str, rows: Mapping[str, Row]) -> dict[str, float]:
        """Return the time of the mode that was not chosen, in the corners where it may win."""
        other = MODES[1 - MODES.index(mode)]
        least = 0.0 if other == "selective" else hbm_bound_us(self.case, self.case.model.E)
        corners = [corner for corner, row in rows.items() if least < (row.ours_us or 0.0)]
        if not corners:
            return {}
        run = launch_ours(self.case, decode_plan(self.case, other, layout), OPTIONS)
        return {corner: timed.total_us for corner, timed in corner_timelines(run, corners)}


def _launch(case: DecodeCase, layout: str) -> list[Run]:
    return [launch_ours(case, decode_plan(case, layout=layout), OPTIONS)]


def _launch_vendor(library: VendorLibrary, case: DecodeCase, mode: str) -> list[Run]:
    return [launch_vendor(library, case, mode, OPTIONS)]


def spreads_of(
    sides: Sequence[OurSide], book: Book, library: VendorLibrary, corners: Sequence[str]
) -> Iterator[SpreadWork]:
    """Yield what finds the ranges of some sides' rows, if any lacks one.

    Args:
        sides: cases that differ in their routing alone, which the vendor's times do not know.
        book: has the vendor's times.
        library: the vendor's.
        corners: of the clock.
    """
    case = sides[0].case
    owners = {key: side for side in sides for key in side.rows}

    def keep(found: Mapping[Key, SpeedupRange]) -> None:
        for key, one in found.items():
            owners[key].keep_range(key, one)

    pairings, seconds = [], dict[Side, float]()
    for corner in corners:
        best = fastest(book.rivals(case, corner))
        ours = [pair for side in sides for pair in side.launches(corner)]
        if best is None or not ours:
            continue
        mode = best.name.removesuffix(IN_BF16)
        rival = case if mode == best.name else replace(case, format="bf16")
        theirs = Side(best.name, partial(_launch_vendor, library, rival, mode))
        seconds[theirs] = seconds_of(rival, mode)
        pairings.append(Pairing(corner, ours, theirs))
    name = f"{case.kernel} {case.model.name} TP{case.model.tp} B={case.B} {case.format}"
    yield from SpreadWork.of(name, pairings, lambda side: seconds.get(side, sides[0].seconds), keep)
