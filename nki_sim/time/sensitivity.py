"""Does a conclusion hang on a guess?

Some coefficients of the timeline are assumptions, because nothing public says better. `compare(a,
b)` plays two runs again with each of them halved and doubled, and tells whether the faster one
stays the faster one. Coefficients err together, too: `GROUPS` names those that would, measured ones
among them, and `Knobs.of(ours).spread(Knobs.of(theirs))` looks for the combinations that hurt and
help a comparison most; `worst_case(ours, theirs)` searches longer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from nki_sim.hardware import SWITCHES, Hardware, Kind
from nki_sim.time.attribution import CriticalPath
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
    }
)

# Sizes and counts: they decide what a kernel may do, not how long it takes.
FIXED: Final = frozenset(
    {
        "array_columns",
        "array_rows",
        "cores_per_chip",
        "dma_engines",
        "dma_rings",
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
    "DMA runs": ("dma_run_ns", "dma_single_queue_run_ns", "dma_skipped_row_share"),
    "DMA transposes": ("dma_transpose_4byte_share",),
    "DMA ends": ("dma_first_byte_ns", "dma_done_ns", "dma_register_ns", "semaphore_ns"),
    "launch": ("launch_ns", "launch_pair_ns"),
    "exchange": ("sendrecv_ns", "gpsimd_sendrecv_ns", "core_barrier_ns"),
    "collectives": ("collective_base_ns", "collective_hop_ns", "collective_bytes_per_ns"),
    "Tensor": (
        "matmul_drain_ns",
        "psum_accumulate_factor",
        "stationary_load_floor_cycles",
        "tile_issue_cycles",
        "tile_streams",
    ),
    "Vector": ("vector_overhead_cycles", "accumulator_read_cycles"),
    "Vector rates": ("two_input_16bit_share", "fast_copy_fp8_speedup", "wide_stride_share"),
    "Scalar": ("scalar_overhead_cycles", "scalar_issue_cycles", "table_load_ns"),
    "GpSimd": (
        "gpsimd_overhead_cycles",
        "gpsimd_simple_overhead_cycles",
        "gpsimd_two_input_cycles_per_element",
        "gpsimd_power_cycles_per_element",
        "gpsimd_nonzero_cycles_per_element",
        "gpsimd_gather_block_cycles",
        "gpsimd_gather_cycles_per_element",
        "gpsimd_partition_reduce_cycles_per_element",
        "gpsimd_other_cycles_per_element",
    ),
    "loops and registers": (
        "loop_trip_ns",
        "register_load_sbuf_ns",
        "register_load_hbm_ns",
        "register_store_ns",
        "register_move_ns",
        "register_offset_factor",
    ),
}
"""Coefficients that would be wrong together, whatever the kind of their source.

Every assumed or measured one is in a group, but for `PEAKS` and switches.
"""

PEAKS: Final = frozenset({"matmul_calibration_factor", "hbm_bytes_per_ns"})
"""Measured coefficients that a document states too, as the peak of the array and of the stacks."""

WINDOW: Final = "compiler window"
"""The knob of `ScheduleModel.window`."""

TRIED_NODES: Final = 6_000
"""Of a run, on which a knob is tried of which the critical path does not tell."""

ROUNDS: Final = 4
LONG_NODES, LONG_ROUNDS = 20_000, 2
"""How often the paths of two runs are asked what moves their ratio furthest; and of long runs."""

_TRIED: Final = (WINDOW, "stationary_reuse_skips_load")
_LEAST_GAIN: Final = 1e-3
_LEAST_PROMISE: Final = 0.01  # of the ratio: for less no run is played again


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
            if not isinstance(getattr(run.chip, name), int | float) or name in FIXED:
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
    return play(run.prepared, chip, run.options).total_ns


@dataclass(frozen=True, slots=True)
class Extreme:
    """The combination of factors that moves the ratio of two runs furthest, as far as was found.

    `factors` holds what each knob is multiplied with, those left alone excluded; 0 marks a flipped
    switch. A more extreme combination may exist. Times in ns, played with these factors.
    """

    ours_ns: float
    theirs_ns: float
    factors: dict[str, float]

    @property
    def ratio(self) -> float:
        """Their time over ours."""
        return self.theirs_ns / self.ours_ns

    def text(self) -> str:
        """Return ratio, times and factors as one line."""
        return (
            f"{self.ratio:.2f}x ({self.theirs_ns / 1e3:,.0f} over {self.ours_ns / 1e3:,.0f} us)"
            f" with {in_words(self.factors) or 'nothing changed'} (simulated)"
        )


class Spread(NamedTuple):
    """What their time over ours is at least and at most, as far as was found."""

    low: Extreme
    high: Extreme


def in_words(factors: Mapping[str, float]) -> str:
    """Return knobs and factors as text."""
    return ", ".join(f"{knob} x{by:g}" if by else f"{knob} flipped" for knob, by in factors.items())


class Knobs:
    """A run whose knobs can be turned: a group of `GROUPS`, a switch, or the compiler's window.

    Several runs are launches one after the other, whose times add up. What a knob does is read off
    the critical path (attribution.py), but for those that act by the order in which things happen:
    these are tried on the nodes that start first.

    Args:
        runs: as they are, on one chip.
        factors: what a knob may be multiplied with, beside 1.
        nodes: so many are played for each knob that has to be tried.
    """

    def __init__(
        self, *runs: Timeline, factors: Sequence[float] = (0.5, 2.0), nodes: int = TRIED_NODES
    ) -> None:
        self.runs = runs
        self.choices = {knob: by for run in runs for knob, by in _choices(run, factors).items()}
        self._paths = {
            frozenset[tuple[str, float]](): tuple(
                CriticalPath.of(run.prepared, run.result, run.chip) for run in runs
            )
        }
        self._tried = [self._try(run, nodes) for run in runs]

    def paths(self, factors: Mapping[str, float]) -> tuple[CriticalPath, ...]:
        """Return the critical path of each run with some knobs turned, played once."""
        key = frozenset(factors.items())
        if key not in self._paths:
            found = []
            for run in self.runs:
                chip, options = with_factors(run, factors)
                result = play(run.prepared, chip, options)
                found.append(CriticalPath.of(run.prepared, result, chip))
            self._paths[key] = tuple(found)
        return self._paths[key]

    def total_ns(self, factors: Mapping[str, float]) -> float:
        """Return the total time with some knobs turned, played."""
        return sum(path.total_ns for path in self.paths(factors))

    def estimated_ns(self, at: Mapping[str, float], knob: str, factor: float) -> float:
        """Return the total time with one more knob turned, by the paths with those before.

        Args:
            at: knobs and factors that were played.
            knob: one of `choices`.
            factor: what it is multiplied with instead; 1 leaves it alone.
        """
        if knob in _TRIED:
            return sum(
                path.total_ns
                * tried.get((knob, factor), 1.0)
                / tried.get((knob, at.get(knob, 1.0)), 1.0)
                for path, tried in zip(self.paths(at), self._tried, strict=True)
            )
        turned = _turned(at, knob, factor)
        return sum(
            path.total_on_ns(with_factors(run, turned)[0])
            for path, run in zip(self.paths(at), self.runs, strict=True)
        )

    def spread(self, theirs: Knobs) -> Spread:
        """Return the least and the largest ratio of their time over ours that is found.

        All knobs are turned to where the paths say that the ratio moves furthest; both runs are
        played, and their new paths asked again, until these promise little, `ROUNDS` times at most.
        """
        return Spread(self._extreme(theirs, -1.0), self._extreme(theirs, 1.0))

    def _try(self, run: Timeline, nodes: int) -> dict[tuple[str, float], float]:
        """Return what knobs that no path tells of do to the time of the first nodes, as factors."""
        asked = {(knob, by): {knob: by} for knob in _TRIED for by in self.choices.get(knob, ())}
        if not asked:
            return {}
        base_ns = with_factors_ns(run, {}, nodes)
        times = {key: with_factors_ns(run, factors, nodes) for key, factors in asked.items()}
        return {key: time / base_ns for key, time in times.items()} if base_ns else {}

    def _extreme(self, theirs: Knobs, sign: float) -> Extreme:
        """Follow the paths of both runs to a small or a large ratio."""
        found = [Extreme(self.total_ns({}), theirs.total_ns({}), {})]
        nodes = max(len(run.result.start) for run in (*self.runs, *theirs.runs))
        for _ in range(ROUNDS if nodes < LONG_NODES else LONG_ROUNDS):
            factors, promise = self._furthest(theirs, found[-1], sign)
            if promise < _LEAST_PROMISE * found[-1].ratio or factors in [f.factors for f in found]:
                break
            found.append(Extreme(self.total_ns(factors), theirs.total_ns(factors), factors))
        return max(found, key=lambda one: sign * one.ratio)

    def _furthest(self, theirs: Knobs, at: Extreme, sign: float) -> tuple[dict[str, float], float]:
        """Return every knob where it moves the ratio furthest by the paths of both runs.

        The second value is by how much they move it alone, summed.
        """
        factors, promise = dict(at.factors), 0.0
        for knob, choices in (self.choices | theirs.choices).items():
            moved = {
                factor: sign
                * theirs.estimated_ns(at.factors, knob, factor)
                / self.estimated_ns(at.factors, knob, factor)
                for factor in (1.0, *choices)
            }
            best = max(moved, key=moved.__getitem__)
            gain = moved[best] - moved[at.factors.get(knob, 1.0)]
            if gain > _LEAST_GAIN * at.ratio:
                factors, promise = _turned(factors, knob, best), promise + gain
        return factors, promise


def worst_case(
    ours: Timeline, theirs: Timeline, factors: Sequence[float] = (0.5, 2.0), rounds: int = 3
) -> Extreme:
    """Look longer for the combination of factors that hurts one run against another most.

    Starts from what `Knobs.spread` finds, then turns one knob at a time to what lowers their time
    over ours most, and goes round until nothing does.

    Args:
        ours: the run to hurt.
        theirs: the other one, on the same chip.
        factors: what a knob may be multiplied with, beside 1.
        rounds: at most so many times through all knobs.
    """
    own, other = Knobs(ours, factors=factors), Knobs(theirs, factors=factors)
    best = own.spread(other).low
    choices = own.choices | other.choices
    for _ in range(rounds):
        before = best
        for knob, choice in choices.items():
            for factor in (*choice, 1.0):
                trial = _turned(best.factors, knob, factor)
                if trial != best.factors:
                    found = _both(ours, theirs, trial)
                    if found.ratio < best.ratio * (1.0 - _LEAST_GAIN):
                        best = found
        if best is before:
            break
    return best


def alone_ns(
    run: Timeline, factors: Sequence[float] = (0.5, 2.0)
) -> dict[tuple[str, float], float]:
    """Return the total time of a run by knob and factor, of each that can move it, one at a time.

    A flipped switch has the factor 0.
    """
    return {
        (knob, factor): with_factors_ns(run, {knob: factor})
        for knob, choices in _choices(run, factors).items()
        for factor in choices
        if _can_move(run, knob, factor)
    }


def with_factors(run: Timeline, factors: Mapping[str, float]) -> tuple[Hardware, TimelineOptions]:
    """Return the chip and the options of a run with some knobs turned.

    Args:
        run: the run.
        factors: by knob, of `GROUPS`, `WINDOW`, or a field of the chip; a switch is flipped.
    """
    options, fields = run.options, dict[str, float]()
    for knob, factor in factors.items():
        if knob == WINDOW:
            window = max(1, round(options.model.window * factor))
            model = dataclasses.replace(options.model, window=window)
            options = dataclasses.replace(options, model=model)
        else:
            fields |= dict.fromkeys(GROUPS.get(knob, (knob,)), factor)
    return run.chip.varied_together(fields), options


def with_factors_ns(run: Timeline, factors: Mapping[str, float], nodes: int | None = None) -> float:
    """Return the total time of a run with some knobs turned, or that of its first nodes."""
    chip, options = with_factors(run, factors)
    return play(run.prepared, chip, options, nodes).total_ns


def _choices(run: Timeline, factors: Sequence[float]) -> dict[str, Sequence[float]]:
    """Return what each knob of a run may be multiplied with."""
    found: dict[str, Sequence[float]] = dict.fromkeys(GROUPS, factors)
    found |= dict.fromkeys(SWITCHES, (0.0,))
    if run.options.model.order == "list":
        found[WINDOW] = factors
    return found


def _turned(factors: Mapping[str, float], knob: str, factor: float) -> dict[str, float]:
    """Return factors with that of one knob changed; 1 leaves it alone."""
    others = {name: by for name, by in factors.items() if name != knob}
    return others if factor == 1.0 else {**others, knob: factor}


def _can_move(run: Timeline, knob: str, factor: float) -> bool:
    """Tell whether a knob can move a run at all."""
    if knob == WINDOW or not _PLAYED.isdisjoint(GROUPS.get(knob, (knob,))):
        return True
    chip, _ = with_factors(run, {knob: factor})
    return prices_of(run.prepared, chip) != run.result.prices


def _both(ours: Timeline, theirs: Timeline, factors: dict[str, float]) -> Extreme:
    return Extreme(with_factors_ns(ours, factors), with_factors_ns(theirs, factors), factors)
