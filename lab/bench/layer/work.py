"""One case of the layer benchmark: plans and the vendor's chain, simulated, and their rows."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nki_sim
from lab.bench.comparison.attempts import Attempt
from lab.bench.layer.vendor import (
    ChainError,
    Times,
    around_times,
    chain_parts,
    rank_layer,
    whole_layer,
)
from lab.bench.prefill.vendor import Known, VendorSide, only_slowest_fits
from lab.check.vendor_cases.library import VendorLibrary
from neuron_moe.backends.nki.prefill_layer import PrefillLayerPlan
from neuron_moe.backends.nki.times import TIMES_ONLY, plan_runs, routed_choices, shared_run
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.plan import Plan
from neuron_moe.tools.models import read_model
from neuron_moe.tools.timing.pool import Task
from nki_sim.time.estimate import Estimate

AROUND = ("router_topk", "index_blocks")  # launches that are not the experts
COMPUTES = ("one kernel", "kernels")  # how the notes of a plan begin that say what it computes
RANKS = 8
OURS, VENDOR = "layer", "vendor's router"
SHARED = "shared experts"
VENDOR_FIELDS = (
    "vendor_us",
    "vendor_parts",
    "vendor_plan",
    "only_slowest_fits",
    "vendor_why",
    "vendor_by",
    "vendor_variants",
    "vendor_index",
)
OUR_FIELDS = (
    "layer_us",
    "experts_us",
    "outside",
    "apart_us",
    "launches",
    "parts",
    "sequence_us",
    "sequence_outside",
    "sequence_parts",
    "computes",
    "why",
)
Key = tuple[str, str, str, int, str]
SPLITS = {f"TP{RANKS}": (RANKS, 1), f"EP{RANKS}": (1, RANKS)}  # tp, ep


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the benchmark; times are simulated.

    Attributes:
        model, split, phase, T: the layer, the ranks it is on, and the tokens of a step.
        corner: order that the clock assumes.
        layer_us: of the plan that runs.
        experts_us: of the launches of experts, in a fused prefill the shared ones too, and of the
            sum over a token's experts, on their own.
        outside: share of layer_us beyond experts_us.
        apart_us: of the layer in several launches.
        launches: kernels of the plan that runs.
        parts: time of each launch of the layer in several.
        sequence_us: of a prefill's launches on a rank that holds a part of the sequence: norm and
            router of its own tokens, then index, experts and combine of all; no shared experts,
            which such a rank computes for its own tokens.
        sequence_outside: share of that beyond experts_us, the shared ones left out.
        sequence_parts: time of each of these launches.
        computes: what the launches of the plan compute.
        why: why there is no time, "" if there is one.
        vendor_us: of the vendor's chain of kernels for a prefill, once all variants that might be
            the fastest have run.
        vendor_parts: time of each of these.
        vendor_plan: the fastest variant.
        only_slowest_fits: of the vendor's prefill kernels none but the slowest runs with these
            sizes, so that nobody would deploy them with it.
        vendor_why: why there is no such time, "" if there is one.
        vendor_by: fingerprint of another simulator that timed some of it, "" if there is none.
        vendor_variants: what became of each.
        vendor_index: time of the launches that list tokens, by name and block size.
    """

    model: str
    split: str
    phase: str
    T: int
    corner: str
    layer_us: float | None = None
    experts_us: float | None = None
    outside: float | None = None
    apart_us: float | None = None
    launches: tuple[str, ...] = ()
    parts: dict[str, float] | None = None
    sequence_us: float | None = None
    sequence_outside: float | None = None
    sequence_parts: dict[str, float] | None = None
    computes: str = ""
    why: str = ""
    vendor_us: float | None = None
    vendor_parts: dict[str, float] | None = None
    vendor_plan: str = ""
    only_slowest_fits: bool = False
    vendor_why: str = ""
    vendor_by: str = ""
    vendor_variants: list[Attempt] = field(default_factory=list)
    vendor_index: dict[str, Estimate] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """What tells rows apart."""
        return (self.model, self.split, self.phase, self.T, self.corner)

    @property
    def name(self) -> str:
        """The same in words."""
        return f"{self.model} {self.split} {self.phase} T={self.T}, {self.corner}"


class Case:
    """A layer on a rank with a step: a task for ours, then the vendor's, a row in each corner.

    Args:
        model: name of a shipped configuration.
        split: one of SPLITS.
        phase: prefill or decode.
        tokens: T.
        corners: of the clock.
        library: the vendor's, whose chain is timed beside a prefill; None times ours alone.
        known: rows of an earlier run, of which nothing is run again.
    """

    def __init__(
        self,
        model: str,
        split: str,
        phase: str,
        tokens: int,
        corners: Sequence[str],
        library: VendorLibrary | None = None,
        known: Mapping[Key, Row] = MappingProxyType({}),
    ) -> None:
        self.name = f"{model} {split} {phase} T={tokens}"
        self._blank = [
            Row(model=model, split=split, phase=phase, T=tokens, corner=corner)
            for corner in corners
        ]
        self.rows = [known.get(row.key, row) for row in self._blank]
        self._library = library
        self._side: VendorSide | None = None
        self._around: Times = {}
        self._waiting: list[Task] = []
        self._later: list[Task] = []
        if any(row.layer_us is None and not row.why for row in self.rows):
            self._waiting.append(Task(OURS, self._seconds, lambda: times_of(self._blank)))
        if library is not None and phase == "prefill" and not all(map(has_vendor, self.rows)):
            first = self._blank[0]
            around = partial(vendor_around, first, corners, library)
            self._later.append(Task(VENDOR, 0.5 * self._seconds, around))

    @property
    def size(self) -> float:
        """The seconds of what still waits, about (measured on one machine)."""
        waiting = sum(task.size for task in (*self._waiting, *self._later))
        return waiting + (self._side.size if self._side else 0.0)

    @property
    def _seconds(self) -> float:
        row = self._blank[0]
        return 6.0 + 0.01 * row.T * (2.0 if row.split.startswith("TP") else 1.0)

    def next_task(self) -> Task | None:
        """Hand out ours, and after `take_vendor` the vendor's router and then its variants."""
        if self._waiting:
            return self._waiting.pop(0)
        task = self._side.next_task() if self._side else None
        self._fill_vendor()  # with why the last variants were left out
        return task

    def take_vendor(self) -> None:
        """Let the vendor's tasks be handed out."""
        self._waiting, self._later = [*self._waiting, *self._later], []

    def take(self, task: Task, result: Any) -> None:
        """Keep what a task found."""
        if task.name == OURS:
            self.rows = [
                replace(row, **{name: getattr(found, name) for name in OUR_FIELDS})
                for row, found in zip(self.rows, result, strict=True)
            ]
        elif task.name == VENDOR:
            self._begin_vendor(result)
        elif self._side is not None:
            self._side.take(task, result)
        self._fill_vendor()

    def _begin_vendor(self, found: VendorAround) -> None:
        if found.why:
            self.rows = [replace(row, vendor_why=found.why) for row in self.rows]
            return
        self._around, first = found.times, self._blank[0]
        (row,) = self.rows
        known = Known({a.name: a for a in row.vendor_variants}, row.vendor_index)
        model = rank_layer(first.model, *SPLITS[first.split])
        self._side = VendorSide(
            self._library,
            model,
            found.index_TK,
            known,
            chip=nki_sim.hardware.find("trn2"),
            all_experts=whole_layer(first.model).E,
        )

    def _fill_vendor(self) -> None:
        """Fill in the vendor's side as far as it is known."""
        if self._side is not None:
            self.rows = [self._with_vendor(row, self._side) for row in self.rows]

    def _with_vendor(self, row: Row, side: VendorSide) -> Row:
        attempts, index = side.attempts(), side.index
        row = replace(row, vendor_variants=attempts, vendor_index=index)
        if not side.is_done:
            return row
        try:
            plan, parts = chain_parts(attempts, index)
        except ChainError as error:
            return replace(row, vendor_why=str(error))
        parts = {**self._around[row.corner], **parts}
        return replace(
            row,
            vendor_us=sum(parts.values()),
            vendor_parts=parts,
            vendor_plan=plan,
            only_slowest_fits=only_slowest_fits(attempts),
        )


def times_of(blank: Sequence[Row]) -> list[Row]:
    """Simulate a layer as it is planned and in several launches; return its rows.

    Args:
        blank: a row for each corner, of one case.
    """
    first, corners = blank[0], [row.corner for row in blank]
    try:
        together, apart = _plans(first)
        parts = _simulate(apart, corners)
        for corner, us in _shared(together, corners).items():
            parts[corner][SHARED] = us
        in_sequence = _in_sequence(first, corners)
        whole = parts if together is apart else _simulate(together, corners)
    except ValueError as error:  # sizes that the kernels do not take
        return [replace(row, why=str(error)) for row in blank]
    computes = "; ".join(note for note in together.notes() if note.startswith(COMPUTES))
    return [
        _filled(
            replace(row, computes=computes, sequence_parts=in_sequence.get(row.corner)),
            whole[row.corner],
            parts[row.corner],
        )
        for row in blank
    ]


def has_vendor(row: Row) -> bool:
    """Say whether a row has the time of the vendor's chain, or why there is none."""
    return bool(row.vendor_us or row.vendor_why)


@dataclass(frozen=True, slots=True)
class VendorAround:
    """What lies around the vendor's experts, or why it does not run.

    Attributes:
        index_TK: the choices that our launches make, [T, K].
        times: microseconds of each launch by corner.
        why: "" if it runs.
    """

    index_TK: NDArray[np.int32]
    times: Times
    why: str = ""


def vendor_around(first: Row, corners: Sequence[str], library: VendorLibrary) -> VendorAround:
    """Simulate what lies around the vendor's experts.

    Args:
        first: of the rows of a case.
        corners: of the clock.
        library: the user's checkout.
    """
    try:
        plan = _plan(first, in_one=False)
        whole, shared = whole_layer(first.model), plan.parts.shared
        times = around_times(library, whole, first.T, shared, corners)
    except ValueError as error:
        return VendorAround(np.zeros((0, 1), np.int32), {}, str(error))
    return VendorAround(routed_choices(plan), times)


def _plans(row: Row) -> tuple[Plan, Plan]:
    """Return the plan of a step, and one in several launches: the same if that is the plan."""
    together = _plan(row)
    if not together.is_fused:
        return together, together
    return together, _plan(row, in_one=False)


def _in_sequence(row: Row, corners: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return for each corner the launches of a prefill on a rank with a part of the sequence."""
    if row.phase != "prefill":
        return {}
    return _simulate(_plan(row, is_part=True), corners, own_tokens=-(-row.T // RANKS))


def _plan(row: Row, *, in_one: bool = True, is_part: bool = False) -> Plan:
    raw_config, _ = read_model(row.model)
    tp, ep = SPLITS[row.split]
    layer = RankLayer(raw_config, row.model, tp=tp, ep=ep, backend="nki")
    return layer.plan(row.phase, row.T, in_one=in_one, is_part=is_part)


def _simulate(
    plan: Plan, corners: Sequence[str], own_tokens: int | None = None
) -> dict[str, dict[str, float]]:
    """Return for each corner the microseconds of each launch of a plan."""
    chosen_TK = routed_choices(plan)  # the same, whether the launch routes or not
    found: dict[str, dict[str, float]] = {corner: {} for corner in corners}
    for name, run in plan_runs(plan, chosen_TK, own_tokens, options=TIMES_ONLY):
        for corner in corners:
            found[corner][name] = run.timeline.total_us
        gc.collect()
    return found


def _shared(plan: Plan, corners: Sequence[str]) -> dict[str, float]:
    """Return the microseconds of a prefill's shared experts in a launch of their own."""
    run = shared_run(plan) if isinstance(plan, PrefillLayerPlan) else None
    if run is None:
        return {}
    return dict.fromkeys(corners, run.timeline.total_us)


def _filled(row: Row, whole: dict[str, float], parts: dict[str, float]) -> Row:
    layer_us = sum(whole.values())
    experts_us = sum(us for name, us in parts.items() if name not in AROUND)
    if row.sequence_parts is not None:
        sequence_us, shared_us = sum(row.sequence_parts.values()), parts.get(SHARED, 0.0)
        outside = 1.0 - (experts_us - shared_us) / sequence_us
        row = replace(row, sequence_us=sequence_us, sequence_outside=outside)
    return replace(
        row,
        layer_us=layer_us,
        experts_us=experts_us,
        outside=1.0 - experts_us / layer_us,
        apart_us=sum(parts.values()),
        launches=tuple(whole),
        parts=parts,
    )
