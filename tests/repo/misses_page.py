"""Tables of docs/misses.md and docs/kernels.md, from the results that are published.

python -m tests.repo.misses_page writes them anew, between the marks of the pages.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "misses.md", ROOT / "docs" / "kernels.md")
RESULTS = ROOT / "docs" / "results"
AT_8192, BELOW = 0.80, 0.70  # shares of the roofline, in order, packed
BOUND = {"packed": 0.85, "plain": 0.75}  # of the HBM bound, vendor's corner, bf16, B from 16
Row = Mapping[str, Any]


def tables() -> dict[str, str]:
    """Return each table by the name in its mark."""
    return {
        "prefill": _prefill(), "decode": _decode(), "layer": _layer(), "layers": _layers(),
        "sequence": _sequence(), "ranks": _ranks(),
    }  # fmt: skip


def written() -> dict[str, str]:
    """Return the tables that the pages have, by name."""
    text = "".join(page.read_text() for page in PAGES)
    return dict(re.findall(r"<!-- (\w+) -->\n(.*?)\n<!-- end -->", text, re.DOTALL))


def write() -> None:
    """Put the tables into the pages."""
    for page in PAGES:
        text = page.read_text()
        for name, table in tables().items():
            before, mark, rest = text.partition(f"<!-- {name} -->\n")
            if mark:
                after = rest[rest.index("<!-- end -->") :]
                text = f"{before}{mark}{table}\n{after}"
        page.write_text(text)


def _rows(name: str) -> list[Row]:
    rows: list[Row] = json.loads((RESULTS / f"{name}_trn2.json").read_text())["rows"]
    return rows


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    rows = [list(head), ["---"] * len(list(head)), *map(list, lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _busiest(row: Row) -> str:
    return str(row["bottleneck"]).split(";")[0].replace("%", " %")


def _prefill() -> str:
    head = ("model", "T", "routing", "share of the roofline", "busiest engine")
    lines = [
        (f"{row['model']} TP{row['tp']}", f"{row['T']:,}", row["routing"], f"{share:.1%}",
         _busiest(row))
        for row in _rows("prefill")
        if (row["corner"], row["layout"]) == ("in-order", "packed")
        and (share := row["roofline_us"] / row["ours_us"])
        < (AT_8192 if row["T"] == 8192 else BELOW)
    ]  # fmt: skip
    return _table(head, lines)


def _decode() -> str:
    head = ("kernel", "model", "B", "routing", "weights", "share of the HBM bound", "busiest")
    lines = [
        (row["kernel"], f"{row['model']} TP{row['tp']}", str(row["B"]), row["routing"],
         row["layout"], f"{row['bound_share']:.1%}", _busiest(row))
        for row in _rows("decode")
        if (row["corner"], row["format"]) == ("vendor", "bf16")
        and row["B"] >= 16
        and row["bound_share"] < BOUND[row["layout"]]
    ]  # fmt: skip
    return _table(head, lines)


def _layer() -> str:
    head = ("layer", "corner", "layer us", "outside", "may be")
    limits = {8192: 0.08, 128: 0.15}
    lines = [
        (f"{row['model']} {row['split']}{how} T = {row['T']:,}", row["corner"],
         f"{row[us]:,.0f}", f"{row[outside]:.1%}", f"{limits[row['T']]:.0%}")
        for row in _rows("layer")
        for how, us, outside in (
            ("", "layer_us", "outside"), (", in parts,", "sequence_us", "sequence_outside")
        )
        if row["phase"] == "prefill" and (row[outside] or 0.0) > limits.get(row["T"], 1.0)
    ]  # fmt: skip
    return _table(head, lines)


def _layers() -> str:
    sizes = (128, 1024, 8192)
    found = {
        (row["model"], row["split"], row["T"]): row
        for row in _rows("layer")
        if (row["phase"], row["corner"]) == ("prefill", "vendor") and row["layer_us"]
    }
    layers = dict.fromkeys((model, split) for model, split, _ in found)
    lines = [
        (f"{model} {split}", *(_layer_cell(found.get((model, split, T))) for T in sizes))
        for model, split in layers
    ]
    return _table(("layer", *(f"T = {T:,}" for T in sizes)), lines)


def _sequence() -> str:
    corners = ("vendor", "in-order")
    found = {
        (row["model"], row["split"], row["corner"]): row
        for row in _rows("layer")
        if (row["phase"], row["T"]) == ("prefill", 8192) and row["sequence_us"]
    }
    layers = dict.fromkeys((model, split) for model, split, _ in found)
    lines = [
        (f"{model} {split}", *(_sequence_cell(found[model, split, corner]) for corner in corners))
        for model, split in layers
    ]
    return _table(("layer", "vendor's corner", "in order"), lines)


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
    for row in _rows("ranks"):
        if row["corner"] == "vendor":
            name = f"{row['model']} {row['split']} {row['phase']}, T = {row['T']:,}"
            by_layer.setdefault((name, row["collective"]), {})[row["link_rate"]] = row
    lines = []
    for names, by_rate in by_layer.items():
        rows = [by_rate[rate] for rate in (128, 64, 256)]
        after = [row["launch_us"] + row["collective_us"] for row in rows]
        inside = [min(row["inside_us"].values()) for row in rows]
        times = ("{:,.0f} ({:,.0f}, {:,.0f})".format(*each) for each in (after, inside))
        usual = rows[0]["inside_us"]
        best = min(usual, key=usual.__getitem__)
        lines.append((*names, f"{rows[0]['launch_us']:,.0f}", *times, best))
    return _table(head, lines)


if __name__ == "__main__":
    write()
