"""Does a conclusion hang on a guess?

Some coefficients of the timeline are assumptions, because nothing public says better. `compare(a,
b)` plays two runs again with each of them halved and doubled, and tells whether the faster one
stays the faster one. Coefficients err together, too: `GROUPS` names those that would, measured ones
among them, and `worst_case(ours, theirs)` looks for the combination that hurts a comparison most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from nki_sim.hardware import SWITCHES, Hardware, Kind
from nki_sim.time.prepare import Prepared, TimelineOptions, prices_of
from nki_sim.time.reorder import play
from nki_sim.time.timeline import Timeline, schedule

# Coefficients that act while playing, not through the price of an instruction.
_PLAYED: Final = frozenset(
    {
        "dma_done_ns",
        "dma_first_byte_ns",
        "hbm_bytes_per_ns",
        "ramp_ns",
        "ramp_start_share",
        "semaphore_ns",
        "stationary_reuse_skips_load",
        "table_load_ns",
        "tensor_clock_ghz",
        "tile_issue_cycles",
    }
)

# Sizes and counts: they decide what a kernel may do, not how long it takes.
_FIXED: Final = frozenset(
    {
        "array_columns",
        "array_rows",
        "cores_per_chip",
        "dma_engines",
        "generation",
        "hbm_bytes_per_core",
        "partitions",
        "psum_bank_bytes",
        "psum_banks",
        "sbuf_bytes_per_partition",
        "sbuf_usable_bytes_per_partition",
    }
)


GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "software DGE": ("swdge_ns", "swdge_index_ns"),
    "hardware DGE": ("hwdge_ns", "dma_auto_issue_ns", "dma_static_issue_ns"),
    "DMA runs": ("dma_run_ns", "dma_single_queue_run_ns"),
    "DMA ends": ("dma_first_byte_ns", "dma_done_ns", "dma_register_ns"),
    "exchange": ("sendrecv_ns", "gpsimd_sendrecv_ns", "core_barrier_ns"),
    "Vector": ("vector_overhead_cycles", "accumulator_read_cycles"),
    "Scalar": ("scalar_overhead_cycles", "scalar_issue_cycles", "table_load_ns"),
    "loops and registers": (
        "loop_trip_ns",
        "register_load_sbuf_ns",
        "register_load_hbm_ns",
        "register_store_ns",
        "register_move_ns",
        "register_offset_cycles",
    ),
}
"""Coefficients that would be wrong together, whatever the kind of their source."""

WINDOW: Final = "compiler window"
"""The knob of `ScheduleModel.window`."""

_LEAST_GAIN: Final = 1e-4


class Variation(NamedTuple):
    """Both runs with one thing changed; a switch is flipped and has the factor 0."""

    field: str
    factor: float
    a_ns: float
    b_ns: float
    survives: bool


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The outcome of a comparison and how it fares when coefficients change.

    `variations` holds only changes that moved one of the two runs; `unaffected` counts the others.
    `placed_otherwise_ns` are both times with tensors placed the other way.
    """

    names: tuple[str, str]
    a_ns: float
    b_ns: float
    variations: tuple[Variation, ...] = field(default=())
    unaffected: int = 0
    placed_otherwise_ns: tuple[float, float] = (0.0, 0.0)

    @property
    def faster(self) -> str:
        """Name of the run that is faster with the coefficients as they are."""
        return self.names[0] if self.a_ns < self.b_ns else self.names[1]

    @property
    def survives(self) -> bool:
        """Whether no single change of a coefficient turns the outcome around."""
        return all(variation.survives for variation in self.variations)

    @property
    def survives_placement(self) -> bool:
        """Whether the outcome is the same with tensors placed the other way."""
        first, second = self.placed_otherwise_ns
        return (first < second) == (self.a_ns < self.b_ns)

    def fragile(self) -> tuple[Variation, ...]:
        """Return the changes that turn the outcome around."""
        return tuple(variation for variation in self.variations if not variation.survives)

    def table(self) -> str:
        """Return the report as text, the most influential coefficients first."""
        base = self.b_ns / self.a_ns
        rows = [(f"{'as they are':<44} {'':>6}", self.a_ns, self.b_ns, "")]
        for one in sorted(self.variations, key=lambda v: -abs(v.b_ns / v.a_ns / base - 1)):
            factor = f"x{one.factor:g}" if one.factor else "flip"
            mark = "" if one.survives else "  turns"
            rows.append((f"{one.field:<44} {factor:>6}", one.a_ns, one.b_ns, mark))
        first, second = self.names
        lines = [f"{'coefficient':<44} {'factor':>6} {first:>14} {second:>14} {'ratio':>7}"]
        for label, a_ns, b_ns, mark in rows:
            times = f"{a_ns / 1e3:>11,.2f} us {b_ns / 1e3:>11,.2f} us"
            lines.append(f"{label} {times} {b_ns / a_ns:>7.3f}{mark}")
        if not self.survives:
            verdict = "depends on an assumed coefficient"
        elif not self.survives_placement:
            verdict = "survives every coefficient, depends on where tensors lie"
        else:
            verdict = "survives every change"
        lines.append(f"{self.unaffected} more changes move neither run.")
        first_ns, second_ns = self.placed_otherwise_ns
        turned = "" if self.survives_placement else "  turns"
        lines.append(
            f"{'tensors placed the other way':<51} {first_ns / 1e3:>11,.2f} us "
            f"{second_ns / 1e3:>11,.2f} us {second_ns / first_ns:>7.3f}{turned}"
        )
        lines.append(f"{self.faster} is faster: {verdict} (simulated).")
        return "\n".join(lines)


def compare(
    a: Timeline,
    b: Timeline,
    names: tuple[str, str] = ("A", "B"),
    factors: Sequence[float] = (0.5, 2.0),
    kinds: Sequence[Kind] = ("assumed",),
) -> Sensitivity:
    """Vary the coefficients of two runs and see whether the faster one stays the faster one.

    Args:
        a: one run.
        b: the other run, on the same chip.
        names: what to call them.
        factors: what each coefficient is multiplied with, one at a time.
        kinds: which coefficients to vary, by their source.

    Raises:
        ValueError: the runs are on different chips.
    """
    if a.chip.name != b.chip.name:
        raise ValueError(
            f"b.chip={b.chip.name!r}: must be {a.chip.name!r} as for a. Time both runs on one chip."
        )
    before, after = varied_ns(a, factors, kinds), varied_ns(b, factors, kinds)
    a_faster = a.total_ns < b.total_ns
    variations = []
    for (name, factor), a_ns in before.items():
        b_ns = after[name, factor]
        if (a_ns, b_ns) != (a.total_ns, b.total_ns):
            variations.append(Variation(name, factor, a_ns, b_ns, (a_ns < b_ns) == a_faster))
    placed_otherwise = placed_otherwise_ns(a), placed_otherwise_ns(b)
    return Sensitivity(
        names,
        a.total_ns,
        b.total_ns,
        tuple(variations),
        len(before) - len(variations),
        placed_otherwise,
    )


def varied_ns(
    run: Timeline, factors: Sequence[float] = (0.5, 2.0), kinds: Sequence[Kind] = ("assumed",)
) -> dict[tuple[str, float], float]:
    """Return the total time of a run with one coefficient at a time changed.

    Args:
        run: the run.
        factors: what each coefficient is multiplied with; a switch is flipped, as factor 0.
        kinds: which coefficients to vary, by their source.

    Returns:
        Nanoseconds by coefficient and factor, of every change, whether it moves the run or not.
    """
    times = {}
    for kind in kinds:
        for name in run.chip.fields_of_kind(kind):
            if not isinstance(getattr(run.chip, name), int | float) or name in _FIXED:
                continue
            for factor in (0.0,) if name in SWITCHES else factors:
                changed = run.chip.varied(name, factor)
                is_moved = _matters(run, changed, name)
                times[name, factor] = _total_ns(run, changed) if is_moved else run.total_ns
    return times


def placed_otherwise_ns(run: Timeline) -> float:
    """Return the total time with tensors placed the other way."""
    other: Literal["late", "early"] = "early" if run.options.reuse == "late" else "late"
    options = dataclasses.replace(run.options, reuse=other)
    return schedule(run.trace, run.chip, options).total_ns


def _matters(run: Timeline, changed: Hardware, name: str) -> bool:
    """Tell whether a change can move a run at all."""
    prepared: Prepared = run.prepared
    return name in _PLAYED or prices_of(prepared, changed) != run.result.prices


def _total_ns(run: Timeline, chip: Hardware) -> float:
    """Return the total time of a run on a changed chip."""
    return max(play(run.prepared, chip, run.options).visible, default=0.0)


@dataclass(frozen=True, slots=True)
class WorstCase:
    """The combination of factors that was found to hurt `ours` against `theirs` most.

    `factors` holds what each knob is multiplied with, those left alone excluded; 0 marks a flipped
    switch. The search changes one knob at a time until nothing helps, so that a worse combination
    may exist. Times in ns.
    """

    ours_ns: float
    theirs_ns: float
    worst_ours_ns: float
    worst_theirs_ns: float
    factors: dict[str, float]

    @property
    def ratio(self) -> float:
        """Their time over ours with the coefficients as they are."""
        return self.theirs_ns / self.ours_ns

    @property
    def worst_ratio(self) -> float:
        """Their time over ours with the changed ones."""
        return self.worst_theirs_ns / self.worst_ours_ns

    def text(self) -> str:
        """Return the outcome as one line."""
        words = [
            f"{knob} x{by:g}" if by else f"{knob} flipped" for knob, by in self.factors.items()
        ]
        return (
            f"{self.ratio:.2f}x as they are, {self.worst_ratio:.2f}x at worst "
            f"({self.ours_ns / 1e3:,.0f} -> {self.worst_ours_ns / 1e3:,.0f} us and "
            f"{self.theirs_ns / 1e3:,.0f} -> {self.worst_theirs_ns / 1e3:,.0f} us) with "
            f"{', '.join(words) or 'nothing changed'} (simulated)."
        )


def with_factors(run: Timeline, factors: Mapping[str, float]) -> tuple[Hardware, TimelineOptions]:
    """Return the chip and the options of a run with some knobs turned.

    Args:
        run: the run.
        factors: by knob, of `GROUPS`, `WINDOW`, or a field of the chip; a switch is flipped.
    """
    chip, options = run.chip, run.options
    for knob, factor in factors.items():
        if knob == WINDOW:
            window = max(1, round(options.model.window * factor))
            model = dataclasses.replace(options.model, window=window)
            options = dataclasses.replace(options, model=model)
            continue
        for name in GROUPS.get(knob, (knob,)):
            chip = chip.varied(name, factor)
    return chip, options


def with_factors_ns(run: Timeline, factors: Mapping[str, float]) -> float:
    """Return the total time of a run with some knobs turned."""
    chip, options = with_factors(run, factors)
    return max(play(run.prepared, chip, options).visible, default=0.0)


def grouped_ns(
    run: Timeline, factors: Sequence[float] = (0.5, 2.0)
) -> dict[tuple[str, float], float]:
    """Return the total time of a run with one group of coefficients at a time changed together."""
    return {
        (knob, factor): with_factors_ns(run, {knob: factor})
        for knob in GROUPS
        for factor in factors
    }


def worst_case(
    ours: Timeline, theirs: Timeline, factors: Sequence[float] = (0.5, 2.0), rounds: int = 3
) -> WorstCase:
    """Look for the combination of factors that hurts one run against another most.

    Turns one knob at a time to what lowers their time over ours most, and goes round until nothing
    does: every group of `GROUPS`, the switch of the Vector engine, and the window of the compiler
    where a run has one. A few seconds for a hundred thousand instructions.

    Args:
        ours: the run to hurt.
        theirs: the other one, on the same chip.
        factors: what a knob may be multiplied with, beside 1.
        rounds: at most so many times through all knobs.
    """
    knobs: dict[str, Sequence[float]] = dict.fromkeys(GROUPS, factors)
    knobs |= dict.fromkeys(SWITCHES, (0.0,))
    if "list" in (ours.options.model.order, theirs.options.model.order):
        knobs[WINDOW] = factors
    found: dict[str, float] = {}
    best = (ours.total_ns, theirs.total_ns)
    for _ in range(rounds):
        before = dict(found)
        for knob, choices in knobs.items():
            for factor in (*choices, None):
                trial = {name: by for name, by in found.items() if name != knob}
                if factor is not None:
                    trial[knob] = factor
                if trial == found:
                    continue
                times = (with_factors_ns(ours, trial), with_factors_ns(theirs, trial))
                if times[1] / times[0] < best[1] / best[0] * (1.0 - _LEAST_GAIN):
                    best, found = times, trial
        if found == before:
            break
    return WorstCase(ours.total_ns, theirs.total_ns, *best, found)
