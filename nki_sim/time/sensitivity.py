"""Does a conclusion hang on a guess?

Some coefficients of the timeline are assumptions, because nothing public says better. `compare(a,
b)` plays two runs again with each of them halved and doubled, and says whether the faster one
stays the faster one. Coefficients err together, too: `GROUPS` names those that would, measured ones
among them; `alone_ns` scales each group.
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
        "matmul_floor_cycles",
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
        "loop_iteration_ns",
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
        """Whether no single change of a coefficient reverses the outcome."""
        return all(variation.survives for variation in self.variations)

    @property
    def survives_placement(self) -> bool:
        """Whether the outcome is the same with tensors placed the other way."""
        first, second = self.placed_otherwise_ns
        return (first < second) == (self.a_ns < self.b_ns)

    def table(self) -> str:
        """Return the report as text, the most influential coefficients first."""
        base = self.b_ns / self.a_ns
        rows = [(f"{'as they are':<44} {'':>6}", self.a_ns, self.b_ns, "")]
        for one in sorted(self.variations, key=lambda v: -abs(v.b_ns / v.a_ns / base - 1)):
            factor = f"x{one.factor:g}" if one.factor else "flip"
            mark = "" if one.survives else "  flips"
            rows.append((f"{one.field:<44} {factor:>6}", one.a_ns, one.b_ns, mark))
        first, second = self.names
        lines = [f"{'coefficient':<44} {'factor':>6} {first:>14} {second:>14} {'ratio':>7}"]
        for label, a_ns, b_ns, mark in rows:
            times = f"{a_ns / 1e3:>11,.2f} us {b_ns / 1e3:>11,.2f} us"
            lines.append(f"{label} {times} {b_ns / a_ns:>7.3f}{mark}")
        if not self.survives:
            verdict = "depends on an assumed coefficient"
        elif not self.survives_placement:
            verdict = "survives every coefficient, depends on where tensors are"
        else:
            verdict = "survives every change"
        lines.append(f"{self.unaffected} more changes move neither run.")
        first_ns, second_ns = self.placed_otherwise_ns
        mark = "" if self.survives_placement else "  flips"
        lines.append(
            f"{'tensors placed the other way':<51} {first_ns / 1e3:>11,.2f} us "
            f"{second_ns / 1e3:>11,.2f} us {second_ns / first_ns:>7.3f}{mark}"
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


def alone_ns(
    run: Timeline, factors: Sequence[float] = (0.5, 2.0)
) -> dict[tuple[str, float], float]:
    """Return the total time of a run by knob and factor, of each that can move it, one at a time.

    A flipped switch has the factor 0.
    """
    return {
        (knob, factor): with_factors_ns(run, {knob: factor})
        for knob, choices in choices_of(run, factors).items()
        for factor in choices
        if _can_move(run, knob, factor)
    }


def with_factors(run: Timeline, factors: Mapping[str, float]) -> tuple[Hardware, TimelineOptions]:
    """Return the chip and the options of a run with some knobs scaled.

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
    """Return the total time of a run with some knobs scaled, or that of its first nodes."""
    chip, options = with_factors(run, factors)
    return play(run.prepared, chip, options, nodes).total_ns


def choices_of(run: Timeline, factors: Sequence[float]) -> dict[str, Sequence[float]]:
    """Return what each knob of a run may be multiplied with."""
    found: dict[str, Sequence[float]] = dict.fromkeys(GROUPS, factors)
    found |= dict.fromkeys(SWITCHES, (0.0,))
    if run.options.model.order == "list":
        found[WINDOW] = factors
    return found


def _can_move(run: Timeline, knob: str, factor: float) -> bool:
    """Tell whether a knob can move a run at all."""
    if knob == WINDOW or not _PLAYED.isdisjoint(GROUPS.get(knob, (knob,))):
        return True
    chip, _ = with_factors(run, {knob: factor})
    return prices_of(run.prepared, chip) != run.result.prices
