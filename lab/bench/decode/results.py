"""The decode benchmark's result file: rows, the vendor's times, the switch, and the targets.

The vendor's times do not depend on the routing, so they are kept once per kernel, model, B and
format. They hold while the layer, the chip's coefficients and the vendor's sources are the same;
ours while our kernels' sources are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lab.bench.averages import geometric_mean
from lab.bench.comparison.attempts import Attempt, against, read_ratio, read_time
from lab.bench.comparison.figures import by_layout, share_of
from lab.bench.comparison.options import LAYOUTS
from lab.bench.decode.cases import (
    FORMATS,
    KERNELS,
    ROUTINGS,
    DecodeCase,
    expert_bytes,
    hbm_bound_us,
    is_weight_bound,
)
from neuron_moe.tools.timing import runs
from neuron_moe.tools.timing.layers import MODELS
from neuron_moe.tools.timing.sources import Sources, read_result
from neuron_moe.tools.timing.timelines import overhead
from nki_sim.time.estimate import Estimate, Ratio

ROW_TARGET, SHARE_TARGET, FP8_TARGET, SWITCH_TARGET = 1.0, 0.75, 1.6, 0.03
IN_BF16 = " in bf16"  # behind the name of a mode of another format
SHARE_FROM = 16  # tokens from which on the share of the HBM bound is judged, in bf16
Key = tuple[str, str, int, str, str, str]
VendorKey = tuple[str, str, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; times in microseconds, of one layer on one rank (two cores).

    Attributes:
        kernel: decode_moe, or decode_block (norm and router in front).
        model, tp, B, routing, format: the case.
        layout: of our weights: packed when they are loaded, or plain, as NxD has them.
        touched: experts that some token chose.
        ours: simulated time of the mode that the cost model takes, as a program.
        ours_mode, ours_plan: that mode, and how it goes through the experts.
        ours_modes: likely times of the launch by mode; one whose bytes alone take longer is left
            out.
        switch_loss: the chosen mode's time over the better one's, less 1.
        theirs, vendor_plan: of the faster of the vendor's modes, as a program; of an fp8 row, in
            the faster of its formats.
        hbm_bound_us: computed.
        ratio: theirs over ours.
        bound_share: hbm_bound_us over our launch alone.
        fp8_gain: of an fp8 row, the launch of the bf16 row over its own.
        is_weight_bound: whether reading weights takes most of the time even in fp8 (computed).
        bottleneck: busiest engine, and the line with most of the critical path.
        deployed_us, deployed_plan: what NxD runs by default (computed, at least).
        kernels: fingerprint of our sources.
    """

    kernel: str
    model: str
    tp: int
    B: int
    routing: str
    format: str
    touched: int
    hbm_bound_us: float
    is_weight_bound: bool
    layout: str = "packed"
    ours: Estimate | None = None
    ours_mode: str = ""
    ours_plan: str = ""
    ours_modes: dict[str, float] = field(default_factory=dict)
    switch_loss: float | None = None
    theirs: Estimate | None = None
    vendor_plan: str = ""
    ratio: Ratio | None = None
    bound_share: float | None = None
    fp8_gain: float | None = None
    bottleneck: str = ""
    deployed_us: float | None = None
    deployed_plan: str = ""
    kernels: str = ""

    @property
    def label(self) -> str:
        """Layer and size."""
        return f"{self.model} TP{self.tp} B={self.B}"

    @property
    def key(self) -> Key:
        """What tells rows apart."""
        return self.kernel, self.model, self.B, self.routing, self.format, self.layout

    @property
    def name(self) -> str:
        """The row in words."""
        return f"{self.kernel} {self.model} TP{self.tp} B={self.B} {self.routing} {self.format}"


def row_of(case: DecodeCase, touched: int, layout: str = "packed") -> Row:
    """Return the row of a case before anything ran."""
    return Row(
        kernel=case.kernel,
        model=case.model.name,
        tp=case.model.tp,
        B=case.B,
        routing=case.routing,
        format=case.format,
        touched=touched,
        layout=layout,
        hbm_bound_us=hbm_bound_us(case, touched),
        is_weight_bound=is_weight_bound(case.model, case.B, touched),
    )


def vendor_key(case: DecodeCase) -> VendorKey:
    """Return what the vendor's times belong to: everything but the routing and our layout."""
    return case.kernel, case.model.name, case.B, case.format


def place(key: Key) -> tuple[int, ...]:
    """Return where a row stands in the table."""
    kernel, model, B, routing, format, layout = key
    names = [entry.name for entry in MODELS]
    return (
        KERNELS.index(kernel),
        FORMATS.index(format),
        names.index(model),
        B,
        ROUTINGS.index(routing),
        LAYOUTS.index(layout),
    )


@dataclass(slots=True, kw_only=True)
class Book:
    """Everything of a result file.

    Attributes:
        rows: by key.
        vendor: attempts by kernel, model, B and format.
        layers: bytes of an expert by vendor key, to tell whether a layer is still the same.
        switch: points of the picture, as they are in the file.
        library: fingerprint of the vendor's sources that its times are of.
    """

    rows: dict[Key, Row] = field(default_factory=dict)
    vendor: dict[VendorKey, list[Attempt]] = field(default_factory=dict)
    layers: dict[VendorKey, list[int]] = field(default_factory=dict)
    switch: list[dict[str, Any]] = field(default_factory=list)
    library: str = ""

    def keep_vendor(self, case: DecodeCase, attempts: list[Attempt]) -> None:
        """Keep the vendor's times of a case."""
        self.vendor[vendor_key(case)] = attempts
        self.layers[vendor_key(case)] = _layer(case)

    def known_vendor(self, case: DecodeCase) -> list[Attempt]:
        """Return the vendor's times of a case, none if they are of another layer."""
        key = vendor_key(case)
        return self.vendor[key] if self.layers.get(key) == _layer(case) else []

    def rivals(self, case: DecodeCase) -> list[Attempt]:
        """Return what our time of a case stands beside: in fp8 the vendor may stay with bf16."""
        found = self.known_vendor(case)
        if case.format == "bf16" or not found:
            return found
        others = self.known_vendor(replace(case, format="bf16"))
        return found + [replace(a, name=a.name + IN_BF16) for a in others if a.us is not None]


def _layer(case: DecodeCase) -> list[int]:
    model = case.model
    return [model.H, model.I, model.E, model.K, expert_bytes(model, case.format)]


def read(path: Path, sources: Sources, option: str) -> Book:
    """Return what an earlier run found.

    Raises:
        ValueError: it is no result of this benchmark, or was made with other coefficients or
            another library.
    """
    content = read_result(path, option, ("sources", "rows", "vendor"))
    made_with = content["sources"]
    for name in ("coefficients", "library"):
        now = getattr(sources, name)
        if now and made_with[name] and made_with[name] != now:
            raise ValueError(
                f"{option} {path}: was simulated with another {name} ({made_with[name]}, now "
                f"{now}). Run it again without {option}."
            )
    book = Book(switch=content.get("switch", []), library=made_with["library"])
    known = {entry.name for entry in fields(Row)}
    for entry in content["rows"]:
        kept = {name: value for name, value in entry.items() if name in known}
        kept |= {"ours": read_time(entry["ours"]), "theirs": read_time(entry["theirs"])}
        row = Row(**kept | {"ratio": read_ratio(entry["ratio"])})
        book.rows[row.key] = row
    for entry in content["vendor"]:
        key = (entry["kernel"], entry["model"], entry["B"], entry["format"])
        book.vendor[key] = [Attempt.of(attempt) for attempt in entry["attempts"]]
        book.layers[key] = entry["layer"]
    return book


def compared(row: Row, attempts: Sequence[Attempt]) -> Row:
    """Return a row with all that follows from both sides' times."""
    least = min(row.ours_modes.values(), default=None)
    return replace(
        row,
        bound_share=share_of(row.hbm_bound_us, row.ours),
        switch_loss=row.ours_modes[row.ours_mode] / least - 1.0 if least else None,
        **against(row.ours, attempts),
    )


def with_gains(rows: Mapping[Key, Row]) -> list[Row]:
    """Return the rows in order, the fp8 ones with their gain over bf16."""
    found = []
    for key in sorted(rows, key=place):
        row = rows[key]
        other = rows.get((*key[:4], "bf16", *key[5:]))
        if row.format == "fp8" and row.ours_modes and other is not None and other.ours_modes:
            gain = other.ours_modes[other.ours_mode] / row.ours_modes[row.ours_mode]
            row = replace(row, fp8_gain=gain)
        found.append(row)
    return found


def summarise(rows: Sequence[Row], book: Book, sources: Sources) -> dict[str, Any]:
    """Return the whole result: the targets' figures, what misses them, then everything."""
    result: dict[str, Any] = {
        "chip": "trn2",
        "kind": runs.kind(),
        "overhead": asdict(overhead()),
        "least_bound_share_bf16_from_16": min(
            (row.bound_share for row in rows if asks_share(row) and row.bound_share), default=None
        ),
        "least_fp8_gain_weight_bound": min(
            (row.fp8_gain for row in rows if asks_gain(row) and row.fp8_gain), default=None
        ),
        "switch_loss": max(
            (
                *(row.switch_loss for row in rows if row.switch_loss is not None),
                *(point["loss"] for point in book.switch),
            ),
            default=None,
        ),
        "by_kernel": {name: _figures([r for r in rows if r.kernel == name]) for name in KERNELS},
        "by_layout": by_layout(rows),
        "misses": misses(rows),
        "sources": asdict(sources) | {"library": sources.library or book.library},
    }
    vendor = [
        dict(zip(("kernel", "model", "B", "format"), key, strict=True))
        | {"layer": book.layers[key], "attempts": [asdict(attempt) for attempt in attempts]}
        for key, attempts in book.vendor.items()
    ]
    as_dicts = [asdict(row) for row in rows]
    return {**result, "switch": book.switch, "vendor": vendor, "rows": as_dicts}


def _figures(rows: Sequence[Row]) -> dict[str, Any]:
    ratios = [row.ratio for row in rows if row.ratio is not None]
    shares = [row.bound_share for row in rows if asks_share(row) and row.bound_share]
    gains = [row.fp8_gain for row in rows if asks_gain(row) and row.fp8_gain]
    return {
        "rows": len(rows),
        "geometric_mean": geometric_mean([one.likely for one in ratios]),
        "least_low": min((one.low for one in ratios), default=None),
        "rows_below_1_at_low": sum(one.low < ROW_TARGET for one in ratios),
        "least_bound_share_bf16_from_16": min(shares, default=None),
        "shares_at_target": f"{sum(s >= SHARE_TARGET for s in shares)} of {len(shares)}",
        "least_fp8_gain_weight_bound": min(gains, default=None),
        "gains_at_target": f"{sum(g >= FP8_TARGET for g in gains)} of {len(gains)}",
    }


def asks_share(row: Row) -> bool:
    """Whether the share of the HBM bound is asked of a row."""
    return row.format == "bf16" and row.B >= SHARE_FROM


def asks_gain(row: Row) -> bool:
    """Whether the gain of fp8 is asked of a row."""
    return row.format == "fp8" and row.is_weight_bound


def misses(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return every row that misses a target, with its bottleneck."""
    found = []
    for row in rows:
        least = None if row.ratio is None else row.ratio.low
        for target, value, is_missed in (
            ("times as fast", least, least is not None and least < ROW_TARGET),
            (
                "bound_share",
                row.bound_share,
                asks_share(row) and row.bound_share is not None and row.bound_share < SHARE_TARGET,
            ),
            (
                "fp8_gain",
                row.fp8_gain,
                asks_gain(row) and row.fp8_gain is not None and row.fp8_gain < FP8_TARGET,
            ),
            (
                "switch_loss",
                row.switch_loss,
                row.switch_loss is not None and row.switch_loss > SWITCH_TARGET,
            ),
        ):
            if is_missed:
                found.append(
                    {
                        "target": target,
                        "row": row.name,
                        "layout": row.layout,
                        "value": value,
                        "bottleneck": row.bottleneck,
                    }
                )
    return found
