"""One case of the prefill benchmark: what is to be simulated, and the rows that come of it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import nki_sim
from lab.bench.comparison.deployed import nxd_default
from lab.bench.comparison.options import LAYOUTS
from lab.bench.prefill.cases import roofline_us
from lab.bench.prefill.ours import OurTime, prefill_plan, time_ours
from lab.bench.prefill.results import Key, Row, case_of, check_case, compared
from lab.bench.prefill.vendor import (
    DEPLOYED,
    OPTIONS,
    VARIANTS,
    Known,
    VendorSide,
    launch_vendor,
    seconds_of,
)
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.timing.layers import BF16_BYTES, Model, choose_experts
from neuron_moe.tools.timing.pool import Task
from neuron_moe.tools.timing.sources import Sources
from neuron_moe.tools.timing.timelines import overhead

OURS, DEFAULT = "ours", "deployed"


class Case:
    """A layer with a routing: tasks of both sides, and a row for each layout.

    What the earlier rows have and still holds is not run again.

    Args:
        model: the layer.
        tokens: T.
        routing: how they choose experts.
        library: the vendor's; None runs our side only.
        sources: what times are simulated with.
        options: of the command line.
        earlier: rows of an earlier run, by key.

    Raises:
        ValueError: an earlier row is of another case or library.
    """

    def __init__(
        self,
        model: Model,
        tokens: int,
        routing: str,
        library: VendorLibrary | None,
        sources: Sources,
        options: argparse.Namespace,
        earlier: Mapping[Key, Row],
    ) -> None:
        self._model, self._sources, self._library = model, sources, library
        self._index_TK = choose_experts(routing, tokens, model.E, model.K)
        self._ours_seconds = (
            len(options.layout) / 2 * seconds_of(model, self._index_TK, VARIANTS[0])
        )
        case = case_of(model, self._index_TK)
        blank = Row(
            model=model.name,
            tp=model.tp,
            T=tokens,
            routing=routing,
            case=case,
            roofline_us=roofline_us(model, self._index_TK),
        )
        self.name = f"{model.name} TP{model.tp} T={tokens} {routing}"
        self._asked = [replace(blank, layout=layout) for layout in options.layout]
        places = [replace(blank, layout=layout).key for layout in LAYOUTS]
        old = [earlier[key] for key in places if key in earlier]
        for row in old:
            check_case(row, case, sources)
        self._by_key = {row.key: earlier.get(row.key, row) for row in self._asked}
        self._ours_waits = options.only != "vendor" and not all(map(self._is_current, self.rows()))
        known = Known()
        for row in old:
            known = Known({a.name: a for a in row.vendor_variants}, row.vendor_index)
        self._timed_by = old[0].simulator if old else ""
        self._deployed_waits = options.deployed and self._note_deployed(tokens)
        self._vendor = VendorSide(
            library if options.only != "ours" else None,
            model,
            self._index_TK,
            known,
            chip=nki_sim.hardware.find("trn2"),
            kernels=options.vendor_kernels,
        )

    def _is_current(self, row: Row) -> bool:
        return row.kernels == self._sources.kernels

    def _note_deployed(self, tokens: int) -> bool:
        """Note what NxD runs by default; return whether that is a kernel to be simulated."""
        default = nxd_default(self._model, "prefill", tokens)
        if default.is_kernel:
            return self._library is not None and any(r.deployed_us is None for r in self.rows())
        bound_us = default.bound_us(self._model, BF16_BYTES)
        for key, row in self._by_key.items():
            self._by_key[key] = replace(row, deployed_us=bound_us, deployed_plan=default.plan)
        return False

    def rows(self) -> list[Row]:
        """Return the rows as far as they are known."""
        return list(self._by_key.values())

    @property
    def size(self) -> float:
        """The seconds of what still waits, about."""
        waiting = (self._ours_waits, self._ours_seconds), (self._deployed_waits, self._deployed_s)
        return self._vendor.size + sum(seconds for waits, seconds in waiting if waits)

    @property
    def _deployed_s(self) -> float:
        return seconds_of(self._model, self._index_TK, DEPLOYED)

    def next_task(self) -> Task | None:
        """Hand out our side, what is deployed, then the vendor's variants."""
        if self._ours_waits:
            self._ours_waits = False
            return Task(OURS, self._ours_seconds, self._run_ours)
        if self._deployed_waits:
            self._deployed_waits = False
            return Task(DEFAULT, self._deployed_s, self._run_deployed)
        return self._vendor.next_task()

    def take(self, task: Task, result: Any) -> None:
        """Keep what a task found."""
        if task.name == OURS:
            for key, time in result.items():
                fields = {name: getattr(time, name) for name in OurTime.__slots__}
                before = self._by_key[key]
                self._by_key[key] = replace(before, kernels=self._sources.kernels, **fields)
        elif task.name == DEFAULT:
            for key, row in self._by_key.items():
                self._by_key[key] = replace(row, deployed_us=result, deployed_plan=DEPLOYED.name)
        else:
            self._vendor.take(task, result)
            self._timed_by = self._sources.simulator
        self.compare()

    def compare(self) -> None:
        """Fill in what follows from both sides as far as they are known."""
        attempts, index = self._vendor.attempts(), self._vendor.index
        library = self._sources.library if attempts else ""
        for key, row in self._by_key.items():
            self._by_key[key] = compared(
                replace(
                    row,
                    vendor_variants=attempts,
                    library=library or row.library,
                    simulator=self._timed_by,
                    vendor_index=index,
                )
            )

    def _run_ours(self) -> dict[Key, OurTime]:
        """Simulate our launches once for every plan."""
        found: dict[Key, OurTime] = {}
        times = dict[str, OurTime]()  # layouts may come to the same plan
        for row in self._asked:
            plan = prefill_plan(self._model, len(self._index_TK), row.layout)
            compiled = repr([launch.records for launch in plan.launches()])
            if compiled not in times:
                times[compiled] = time_ours(plan, self._index_TK)
            found[row.key] = times[compiled]
        return found

    def _run_deployed(self) -> float:
        """Simulate NxD's default kernel."""
        assert self._library is not None
        run = launch_vendor(self._library, self._model, self._index_TK, DEPLOYED, OPTIONS)
        return float(run.timeline.total_us) + overhead().us
