"""The benchmark's result file: rows, what they were measured with, and what a later run may keep.

A time is kept only if nothing it depends on has changed: the chip's coefficients, the case, and the
sources of the kernels in question. Rows whose vendor times are by other sources of the simulator
are kept and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lab.bench.comparison.attempts import Attempt, against, read_ratio, read_time
from lab.bench.comparison.figures import by_layout, share_of
from lab.bench.prefill.vendor import VARIANTS, only_slowest_fits, with_lists
from neuron_moe.tools.timing import runs
from neuron_moe.tools.timing.layers import Model
from neuron_moe.tools.timing.sources import Sources, digest, read_result
from neuron_moe.tools.timing.timelines import overhead
from nki_sim.time.estimate import Estimate, Ratio

Key = tuple[str, int, str, str]
TIMES = ("ours", "ours_given", "theirs", "theirs_given")
RATIOS = ("ratio", "given_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; times in microseconds, of one layer on one rank (two cores).

    `format` is that of the weights, `layout` how ours are stored. `ours` is of the launches of the
    product's plan, `theirs` of the fastest variant with the launches in front that list its tokens,
    `vendor_index`; `given` of both sides with these lists given. All of them are programs
    (`neuron_moe.tools.timing.timelines.program`). A time is None where that side did not run.
    `roofline_share` is that of the launches alone. `deployed_us` and `deployed_plan` are what NxD
    runs by default, computed where the plan says "at least". `case`, `kernels`, `library` and
    `simulator` are fingerprints, the last of what timed the vendor's side.
    """

    model: str
    tp: int
    T: int
    routing: str
    format: str = "bf16"
    layout: str = "packed"
    ours: Estimate | None = None
    ours_given: Estimate | None = None
    theirs: Estimate | None = None
    theirs_given: Estimate | None = None
    roofline_us: float
    ratio: Ratio | None = None
    given_ratio: Ratio | None = None
    roofline_share: float | None = None
    ours_plan: str = ""
    vendor_plan: str = ""
    vendor_given_plan: str = ""
    bottleneck: str = ""
    deployed_us: float | None = None
    deployed_plan: str = ""
    vendor_variants: list[Attempt] = field(default_factory=list)
    vendor_index: dict[str, Estimate] = field(default_factory=dict)
    case: str = ""
    kernels: str = ""
    library: str = ""
    simulator: str = ""

    @property
    def label(self) -> str:
        """Layer and size."""
        return f"{self.model} TP{self.tp} T={self.T}"

    @property
    def key(self) -> Key:
        """What tells rows apart."""
        return self.model, self.T, self.routing, self.layout


def case_of(model: Model, expert_index_TK: Any) -> str:
    """Return the fingerprint of a layer with a routing."""
    return digest(repr(sorted(asdict(model).items())), expert_index_TK.tobytes())


def read(path: Path, sources: Sources, option: str) -> list[Row]:
    """Return the rows of a result file.

    Raises:
        ValueError: it is no result of this benchmark, or was made with other coefficients.
    """
    content = read_result(path, option, ("rows", "sources"))
    entries, made_with = content["rows"], content["sources"]
    if made_with["coefficients"] != sources.coefficients:
        raise ValueError(
            f"{option} {path}: was simulated with other coefficients ({made_with['coefficients']},"
            f" now {sources.coefficients}). Run it again without {option}."
        )
    known = {entry.name for entry in fields(Row)}
    rows = []
    for entry in entries:
        kept = {name: value for name, value in entry.items() if name in known}
        kept |= {name: read_time(entry[name]) for name in TIMES}
        kept |= {name: read_ratio(entry[name]) for name in RATIOS}
        kept["vendor_variants"] = [Attempt.of(attempt) for attempt in entry["vendor_variants"]]
        kept["vendor_index"] = {
            name: Estimate(**time) for name, time in entry["vendor_index"].items()
        }
        rows.append(Row(**kept))
    return rows


def check_case(row: Row, case: str, sources: Sources) -> None:
    """Refuse a row of an earlier run whose vendor times do not belong to this case.

    Raises:
        ValueError: the layer, the routing or the vendor's library is another one.
    """
    name = f"{row.model} T={row.T} {row.routing}"
    if row.case != case:
        raise ValueError(
            f"{name}: the earlier result is of another case ({row.case}, now {case}). Run it again "
            "without --vendor-from and --resume."
        )
    if row.vendor_variants and sources.library not in ("", row.library):
        raise ValueError(
            f"{name}: the earlier result is of another library ({row.library}, now "
            f"{sources.library}). Run it again without --vendor-from and --resume."
        )


def without_ours(row: Row) -> Row:
    """Return a row with the vendor's side alone."""
    return replace(row, ours=None, ours_given=None, ours_plan="", bottleneck="", kernels="")


def compared(row: Row) -> Row:
    """Return a row with all that follows from both sides' times."""
    given = against(row.ours_given, row.vendor_variants)
    return replace(
        row,
        roofline_share=share_of(row.roofline_us, row.ours),
        theirs_given=given["theirs"],
        vendor_given_plan=given["vendor_plan"],
        given_ratio=given["ratio"],
        **against(row.ours, with_lists(row.vendor_variants, row.vendor_index)),
    )


def summarise(rows: Sequence[Row], sources: Sources) -> dict[str, Any]:
    """Return the whole result: figures, what misses the target, then the rows."""
    result: dict[str, Any] = {
        "chip": "trn2",
        "kind": runs.kind(),
        "overhead": asdict(overhead()),
        "misses": _misses(rows),
        "sources": asdict(sources),
        "vendor_rows_by_another_simulator": sum(
            row.theirs is not None and row.simulator != sources.simulator for row in rows
        ),
    }
    if any(0 < len(row.vendor_variants) < len(VARIANTS) for row in rows):
        result["vendor_variants_not_run"] = sum(
            len(VARIANTS) - len(row.vendor_variants) for row in rows if row.vendor_variants
        )
    fair = [row for row in rows if not only_slowest_fits(row.vendor_variants)]
    result["only_slowest_fits"] = [row.label for row in rows if row not in fair]
    result["by_layout"] = by_layout(fair)
    result["by_layout_given"] = by_layout([with_given(row) for row in fair])
    return {**result, "rows": [asdict(row) for row in rows]}


def with_given(row: Row) -> Row:
    """Return a row whose times are those with lists given, of both sides."""
    return replace(
        row,
        ours=row.ours_given,
        theirs=row.theirs_given,
        ratio=row.given_ratio,
        deployed_us=None,
    )


def _misses(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows in which the vendor's kernels may be faster, and what holds ours up."""
    return [
        {
            "target": "no case below 1.0x",
            "row": f"{row.model} TP{row.tp} T={row.T} {row.routing}",
            "layout": row.layout,
            "value": row.ratio.low,
            "bottleneck": row.bottleneck,
        }
        for row in rows
        if row.ratio is not None and row.ratio.low < 1.0
    ]
