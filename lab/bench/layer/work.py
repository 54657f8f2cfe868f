"""One case of the layer benchmark: our plan and the vendor's chains, simulated, and their row."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.bench.layer.layouts import Split, machine
from lab.bench.layer.vendor import Chain, Layer, VendorSide, only_slowest_fits
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.backends.nki.times import TIMES_ONLY, plan_runs, routed_choices
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.plan import LayerParts, Step
from neuron_moe.planner.collective_times import around_experts
from neuron_moe.tools.models import read_model
from neuron_moe.tools.timing.plans import plan_of
from neuron_moe.tools.timing.pool import Task
from neuron_moe.tools.timing.timelines import program, time_of
from neuron_moe.tools.timing.useful_work import UsefulWork, layer_work
from nki_sim.time.estimate import Estimate

OURS = "ours"  # the task
Key = tuple[str, int, int, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the benchmark: the busiest rank; times in microseconds.

    Attributes:
        model, phase, T: the layer, and the tokens of a step.
        layout: names of the split.
        tp, ep: ranks that split each expert, and that share the experts.
        ours_us: simulated, of our plan, with its ends.
        launches: kernels of the plan.
        why: why there is no such time, "" if there is one.
        bound_us: least time of the work (computed), by `bound`: HBM or flops.
        collective_us: of what ranks exchange (computed), in no other time.
        vendor_us: simulated, of the vendor's fastest chain, once all that might be the fastest have
            run; at an end, of the one that is the fastest there.
        vendor_plan: the first.
        only_slowest_fits: of the vendor's prefill kernels none but the slowest runs with these
            sizes, so that nobody would deploy them with it.
        vendor_why: why there is no such time, "" if there is one.
        chains: what became of each.
    """

    model: str
    layout: str
    tp: int
    ep: int
    phase: str
    T: int
    ours_us: float | None = None
    ours_low_us: float | None = None
    ours_high_us: float | None = None
    launches: tuple[str, ...] = ()
    why: str = ""
    bound_us: float | None = None
    bound: str = ""
    collective_us: float | None = None
    vendor_us: float | None = None
    vendor_low_us: float | None = None
    vendor_high_us: float | None = None
    vendor_plan: str = ""
    only_slowest_fits: bool = False
    vendor_why: str = ""
    chains: tuple[Chain, ...] = field(default=())

    @property
    def key(self) -> Key:
        """What tells rows apart."""
        return (self.model, self.tp, self.ep, self.phase, self.T)

    @property
    def name(self) -> str:
        """The same in words."""
        return f"{self.model} TP{self.tp} EP{self.ep} {self.phase} T={self.T}"

    @property
    def ratios(self) -> tuple[float, float, float] | None:
        """Theirs over ours: the least, the likely and the largest of both at the same end."""
        times = (self.ours_low_us, self.ours_us, self.ours_high_us)
        theirs = (self.vendor_low_us, self.vendor_us, self.vendor_high_us)
        ends = [us / own for us, own in zip(theirs, times, strict=True) if us and own]
        return (min(ends), ends[1], max(ends)) if len(ends) == len(times) else None


class Case:
    """A layer on a rank with a step: a task for ours, then the vendor's.

    Args:
        blank: the row, nothing of it timed.
        library: the vendor's; None times ours alone.
        known: rows of an earlier run, of which nothing is run again.
    """

    def __init__(
        self,
        blank: Row,
        library: VendorLibrary | None = None,
        known: Mapping[Key, Row] = MappingProxyType({}),
    ) -> None:
        self.name, self._library = blank.name, library
        self.row = replace(known.get(blank.key, blank), layout=blank.layout)
        has_ours = self.row.ours_us is not None or self.row.why
        has_theirs = library is None or self.row.vendor_us or self.row.vendor_why
        self._waits = not (has_ours and has_theirs)
        self._side: VendorSide | None = None

    @property
    def size(self) -> float:
        """The seconds of what still waits, about (measured on one machine)."""
        if self._side is not None:
            return self._side.size
        sides = 1 if self._library is None else 10
        return sides * self._seconds if self._waits else 0.0

    @property
    def _seconds(self) -> float:
        """The seconds of ours."""
        wide = 4.0 if self.row.model == "deepseek_v3" else 1.0
        return 2.0 + wide * self.row.T / 2048

    def next_task(self) -> Task | None:
        """Hand out ours, and then the vendor's."""
        if self._waits:
            self._waits = False
            return Task(OURS, self._seconds, partial(time_ours, self.row))
        task = self._side.next_task() if self._side else None
        self._fill_vendor()  # with why the last chains were left out
        return task

    def take(self, task: Task, result: Any) -> None:
        """Keep what a task found."""
        if task.name == OURS:
            self.row, layer = result
            if self._library is not None and not (self.row.vendor_us or self.row.vendor_why):
                self._side = VendorSide(self._library, layer, self.row.chains)
        elif self._side is not None:
            self._side.take(task, result)
        self._fill_vendor()

    def _fill_vendor(self) -> None:
        """Fill in the vendor's side as far as it is known."""
        if self._side is None:
            return
        chains = self._side.chains
        self.row = replace(self.row, chains=tuple(chains))
        if not self._side.is_done:
            return
        if chains[0].us is None:  # not even the fastest ran
            why = "; ".join(f"{chain.name}: {chain.why}" for chain in chains)
            self.row = replace(self.row, vendor_why=why)
            return
        self.row = replace(
            self.row,
            vendor_us=chains[0].us,
            vendor_low_us=min(chain.low_us for chain in chains if chain.low_us is not None),
            vendor_high_us=min(chain.high_us for chain in chains if chain.high_us is not None),
            vendor_plan=chains[0].name,
            only_slowest_fits=only_slowest_fits(chains),
        )


def time_ours(row: Row) -> tuple[Row, Layer]:
    """Simulate a layer as it is planned on its busiest rank, unless the row has that already.

    Args:
        row: of a case.

    Returns:
        The row with our side, and the layer for the vendor's.
    """
    step = Step(row.phase, row.T)
    rank = RankLayer(read_model(row.model)[0], row.model, tp=row.tp, ep=row.ep, backend="nki")
    parts = rank.parts(step)
    index_TK = routed_choices(plan_of(parts, step))
    parts = busiest(parts, index_TK, row.ep)
    layer = Layer.of(row.model, row.phase, parts, index_TK)
    if row.ours_us is not None or row.why:
        return row, layer
    work = layer_work(parts, index_TK)
    bytes_us = UsefulWork(0, work.hbm_bytes).roofline_us()
    row = replace(
        row,
        bound_us=work.roofline_us(),
        bound="flops" if work.roofline_us() > bytes_us else "HBM",
        collective_us=_collective_us(row, parts),
    )
    times, names = list[Estimate](), list[str]()
    try:
        for name, run in plan_runs(plan_of(parts, step), index_TK, options=TIMES_ONLY):
            names.append(name)
            times.append(time_of(run.timeline))
            gc.collect()
    except ValueError as error:  # sizes that the kernels do not take
        return replace(row, why=str(error)), layer
    total = program(times)
    row = replace(
        row,
        ours_us=total.us,
        ours_low_us=total.low_us,
        ours_high_us=total.high_us,
        launches=tuple(names),
    )
    return row, layer


def busiest(parts: LayerParts, index_TK: NDArray[np.int32], ep: int) -> LayerParts:
    """Return the layer on the rank whose work takes the longest.

    Args:
        parts: of any rank.
        index_TK: [T, K] choices among the experts of all ranks.
        ep: ranks that share the experts.
    """
    held = parts.weights.num_experts
    ranks = [replace(parts, first_expert=rank * held) for rank in range(ep)]
    return max(ranks, key=lambda each: layer_work(each, index_TK).roofline_us())


def _collective_us(row: Row, parts: LayerParts) -> float:
    """Return what the planner expects of the exchange around the layer."""
    spec, ranks = parts.spec, row.tp * row.ep
    is_split = row.phase == "prefill"
    found = around_experts(machine(), row.T, spec.hidden_size, spec.top_k, ranks, is_split=is_split)
    return sum(each.us for each in found)


def blank_row(model: str, layout: str, split: Split, phase: str, tokens: int) -> Row:
    """Return the row of a case before anything has run."""
    return Row(model=model, layout=layout, tp=split[0], ep=split[1], phase=phase, T=tokens)
