"""Tables of docs/kernels.md and docs/decode.md."""

from typing import Any

from tests.repo.published.results import CORNERS, MODELS, Row, rows, table


def tables() -> dict[str, str]:
    """Return each table by the name in its mark."""
    return {
        "layers": _layers(),
        "sequence": _sequence(),
        "ranks": _ranks(),
        "decode-times": _decode_times(),
    }


def _layers() -> str:
    sizes = (128, 1024, 8192)
    found = {
        (row["model"], row["split"], row["T"]): row
        for row in rows("layer_trn2")
        if (row["phase"], row["corner"]) == ("prefill", "vendor") and row["layer_us"]
    }
    layers = dict.fromkeys((model, split) for model, split, _ in found)
    lines = [
        (f"{model} {split}", *(_layer_cell(found.get((model, split, T))) for T in sizes))
        for model, split in layers
    ]
    return table(("layer", *(f"T = {T:,}" for T in sizes)), lines)


def _sequence() -> str:
    found = {
        (row["model"], row["split"], row["corner"]): row
        for row in rows("layer_trn2")
        if (row["phase"], row["T"]) == ("prefill", 8192) and row["sequence_us"]
    }
    layers = dict.fromkeys((model, split) for model, split, _ in found)
    lines = [
        (f"{model} {split}", *(_sequence_cell(found[model, split, corner]) for corner in CORNERS))
        for model, split in layers
    ]
    return table(("layer", "reordering clock", "source-order clock"), lines)


def _sequence_cell(row: Row) -> str:
    router_us, experts_us = row["sequence_parts"].values()
    return f"{router_us:,.0f} + {experts_us:,.0f} ({row['sequence_outside']:.1%})"


def _layer_cell(row: Row | None) -> str:
    if row is None:
        return "-"
    us, vendor_us = row["layer_us"], row["vendor_us"]
    beside = f"{vendor_us / us:.2f}" if vendor_us else "-"
    return f"{us:,.0f} ({row['outside']:.0%}; {row['apart_us'] / us:.2f}; {beside})"


def _ranks() -> str:
    head = ("layer", "collective", "launch", "after", "inside", "portions")
    by_layer: dict[tuple[Any, ...], dict[float, Row]] = {}
    for row in rows("ranks_trn2"):
        if row["corner"] == "vendor":
            name = f"{row['model']} {row['split']} {row['phase']}, T = {row['T']:,}"
            by_layer.setdefault((name, row["collective"]), {})[row["link_rate"]] = row
    lines = []
    for names, by_rate in by_layer.items():
        at = [by_rate[rate] for rate in (128, 64, 256)]
        after = [row["launch_us"] + row["collective_us"] for row in at]
        inside = [min(row["inside_us"].values()) for row in at]
        times = ("{:,.0f} ({:,.0f}, {:,.0f})".format(*each) for each in (after, inside))
        usual = at[0]["inside_us"]
        best = min(usual, key=usual.__getitem__)
        lines.append((*names, f"{at[0]['launch_us']:,.0f}", *times, best))
    return table(head, lines)


def _decode_times() -> str:
    head = [f"B = {B} {format}" if format == "bf16" else format for B, format in _decode_columns()]
    lines = []
    for model, name in MODELS.items():
        found = {
            (row["B"], row["format"]): row
            for row in rows(
                "decode_trn2",
                kernel="decode_moe",
                model=model,
                routing="uniform",
                corner="in-order",
                layout="packed",
            )
        }
        lines.append([name, *(_share_cell(found[column]) for column in _decode_columns())])
    return table(["model", *head], lines)


def _decode_columns() -> list[tuple[int, str]]:
    return [(B, format) for B in (1, 16, 64, 128) for format in ("bf16", "fp8")]


def _share_cell(row: Row) -> str:
    us = row["ours_us"]
    return f"{us:.{1 if us < 100 else 0}f} ({100 * row['bound_share']:.0f} %)"
