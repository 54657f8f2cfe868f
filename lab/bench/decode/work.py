"""Our side of one case of the decode benchmark: what is to be simulated, and the rows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from lab.bench.comparison.deployed import nxd_default
from lab.bench.decode.cases import WEIGHT_BYTES, DecodeCase, hbm_bound_us
from lab.bench.decode.ours import config_of, decode_plan, launch_ours
from lab.bench.decode.results import Key, Row, row_of
from neuron_moe.tools.timing.pool import Task
from neuron_moe.tools.timing.sources import Sources
from neuron_moe.tools.timing.timelines import bottleneck, program, time_of
from nki_sim import SimOptions

MODES = ("selective", "all")
# The block's router must choose real experts: its hidden states and weights keep their values.
OPTIONS = SimOptions(
    mode="indices", uninitialized="off", races="off", capacity="reorder", small_elements=1 << 22
)


class OurSide:
    """Our kernel on a case: a task and a row for every layout.

    Args:
        case: what to compute.
        layouts: of our weights.
        sources: what times are simulated with.
        earlier: rows of an earlier run, by key; what of them still holds is not run again.
    """

    def __init__(
        self,
        case: DecodeCase,
        layouts: Sequence[str],
        sources: Sources,
        earlier: Mapping[Key, Row],
    ) -> None:
        self.case, self.name = case, case.name
        self._sources = sources
        touched = len(np.unique(case.expert_index()))
        self.rows: dict[Key, Row] = {}
        self._waiting = []
        for layout in layouts:
            row = row_of(case, touched, layout)
            if self._holds(earlier, row.key):
                row = earlier[row.key]
            else:
                self._waiting.append(layout)
            self.rows[row.key] = row

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

    def skip(self) -> None:
        """Run nothing."""
        self._waiting.clear()

    @property
    def size(self) -> float:
        """The seconds of what still waits, about."""
        return len(self._waiting) * self.seconds

    @property
    def seconds(self) -> float:
        """The seconds of a layout, about (measured on one machine)."""
        model = self.case.model
        return 1.0 + 0.004 * min(model.E, self.case.B * model.K) * (model.H / 2048)

    def next_task(self) -> Task | None:
        """Hand out the next layout."""
        if not self._waiting:
            return None
        layout = self._waiting.pop(0)
        return Task(f"ours {layout}", self.seconds, partial(self._run, layout))

    def take(self, task: Task, result: Row) -> None:
        """Keep the row that a task filled in."""
        self.rows[result.key] = result

    def _run(self, layout: str) -> Row:
        """Simulate our kernel in one layout; return its row."""
        plan = decode_plan(self.case, layout=layout)
        run, config = launch_ours(self.case, plan, OPTIONS), config_of(plan)
        (blank,) = [row for row in self.rows.values() if row.layout == layout]
        us = run.timeline.total_us
        row = replace(
            blank,
            ours=program([time_of(run.timeline)]),
            ours_mode=config.mode,
            ours_plan=plan.notes()[0].removeprefix("plan: "),
            ours_modes={config.mode: us},
            bottleneck=bottleneck(run.timeline),
            kernels=self._sources.kernels,
        )
        del run
        other = MODES[1 - MODES.index(config.mode)]
        least_us = 0.0 if other == "selective" else hbm_bound_us(self.case, self.case.model.E)
        if least_us >= us:  # it cannot win
            return row
        run = launch_ours(self.case, decode_plan(self.case, other, layout), OPTIONS)
        return replace(row, ours_modes={**row.ours_modes, other: run.timeline.total_us})
