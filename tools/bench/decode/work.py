"""Our side of one case of the decode benchmark: what is to be simulated, and the rows of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from neuron_moe.tools.bench.comparison.pool import Task
from neuron_moe.tools.bench.comparison.sources import Sources
from neuron_moe.tools.bench.comparison.timelines import bottleneck, corner_timelines, varied_us
from neuron_moe.tools.bench.decode.cases import DecodeCase, hbm_bound_us
from neuron_moe.tools.bench.decode.ours import launch_ours
from neuron_moe.tools.bench.decode.results import Key, Row, row_of
from nki_kernels.decode import DecodeConfig
from nki_sim import SimOptions

KERNEL_LAYOUTS = {"plain": "ehi", "packed": "packed"}  # the kernels' names
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
        with_varied: whether to also time with changed coefficients.
    """

    def __init__(
        self,
        case: DecodeCase,
        layouts: Sequence[str],
        corners: Sequence[str],
        sources: Sources,
        earlier: Mapping[Key, Row],
        *,
        with_varied: bool,
    ) -> None:
        self.case, self.name = case, case.name
        self._sources, self._corners, self._with_varied = sources, corners, with_varied
        touched = len(np.unique(case.expert_index()))
        self.rows: dict[Key, Row] = {}
        self._waiting = []
        for layout in layouts:
            blank = [row_of(case, touched, layout, corner) for corner in corners]
            kept = {row.key: earlier[row.key] for row in blank if self._holds(earlier, row.key)}
            self.rows |= {row.key: kept.get(row.key, row) for row in blank}
            if len(kept) < len(blank):
                self._waiting.append(layout)

    def _holds(self, earlier: Mapping[Key, Row], key: Key) -> bool:
        row = earlier.get(key)
        return (
            row is not None
            and row.kernels == self._sources.kernels
            and bool(row.ours_varied or not self._with_varied)
        )

    def skip(self) -> None:
        """Run nothing."""
        self._waiting.clear()

    @property
    def size(self) -> float:
        """The seconds of what still waits, about."""
        return len(self._waiting) * self._seconds

    @property
    def _seconds(self) -> float:
        model = self.case.model
        return 1.0 + 0.004 * min(model.E, self.case.B * model.K) * (model.H / 2048)

    def next_task(self) -> Task | None:
        """Hand out the next layout."""
        if not self._waiting:
            return None
        layout = self._waiting.pop(0)
        return Task(f"ours {layout}", self._seconds, functools.partial(self._run, layout))

    def take(self, task: Task, result: Sequence[Row]) -> None:
        """Keep the rows that a task filled in."""
        self.rows |= {row.key: row for row in result}

    def _run(self, layout: str) -> list[Row]:
        """Simulate our kernel in one layout; return its rows."""
        run, config = launch_ours(self.case, OPTIONS, layout=KERNEL_LAYOUTS[layout])
        rows: dict[str, Row] = {}
        for corner, timeline in corner_timelines(run, self._corners):
            (blank,) = [r for r in self.rows.values() if (r.layout, r.corner) == (layout, corner)]
            rows[corner] = replace(
                blank,
                ours_us=timeline.total_us,
                ours_mode=config.mode,
                ours_plan=config.reason,
                ours_modes={config.mode: timeline.total_us},
                bottleneck=bottleneck(timeline),
                ours_varied=varied_us(timeline) if self._with_varied else {},
                kernels=self._sources.kernels,
            )
        del run
        for corner, us in self._other_mode(config, rows).items():
            other = MODES[1 - MODES.index(config.mode)]
            modes = {**rows[corner].ours_modes, other: us}
            rows[corner] = replace(rows[corner], ours_modes=modes)
        return list(rows.values())

    def _other_mode(self, config: DecodeConfig, rows: Mapping[str, Row]) -> dict[str, float]:
        """Return the time of the mode that was not chosen, in the corners where it may win."""
        other = MODES[1 - MODES.index(config.mode)]
        least = 0.0 if other == "selective" else hbm_bound_us(self.case, self.case.model.E)
        corners = [corner for corner, row in rows.items() if least < (row.ours_us or 0.0)]
        if not corners:
            return {}
        run: Any = launch_ours(self.case, OPTIONS, other, config.weights.layout)[0]
        return {corner: timed.total_us for corner, timed in corner_timelines(run, corners)}
