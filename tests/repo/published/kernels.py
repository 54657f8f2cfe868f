"""Tables of our own kernels in docs."""

from tests.repo.published.results import MODELS, Row, ranged, rows, table


def tables() -> dict[str, str]:
    """Return each table by the name in its mark."""
    return {
        "ranks": _ranks(),
        "decode-times": _decode_times(),
        "ep": _expert_parallel(),
    }


def _expert_parallel() -> str:
    """Return times, and how many bounds, by form, a column for each number of ranks."""
    found = {(row["model"], row["T"], row["form"], row["ep"]): row for row in rows("ep_trn2")}
    ranks = sorted({row["ep"] for row in rows("ep_trn2")})
    lines = [
        (f"{model}, T = {T:,}, {form.replace('_', '-')}", *cells)
        for model, T, form in dict.fromkeys(key[:3] for key in found)
        for cells in [[_ep_cell(found.get((model, T, form, ep))) for ep in ranks]]
    ]
    return table(("experts of a rank", *(f"EP{ep}" for ep in ranks)), lines)


def _ep_cell(row: Row | None) -> str:
    if row is None:
        return "-"
    above = "*" if row["limit"] and row["x_bound"] > row["limit"] else ""
    return f"{ranged(row['time'])} ({row['x_bound']:.2f}{above})"


def _ranks() -> str:
    """Return times at the assumed rate of links, a column a collective."""
    by_layer: dict[str, dict[str, Row]] = {}
    for row in rows("ranks_trn2", link_rate=128):
        name = f"{row['model']} {row['split']} {row['phase']}, T = {row['T']:,}"
        by_layer.setdefault(name, {})[row["collective"]] = row
    lines = []
    for name, by_collective in by_layer.items():
        cells = [
            f"{row['launch']['us'] + row['collective_us']:,.0f}; {_inside_us(row):,.0f}"
            for row in by_collective.values()
        ]
        lines.append((name, ranged(next(iter(by_collective.values()))["launch"]), *cells))
    return table(("layer", "launch", *next(iter(by_layer.values()))), lines)


def _inside_us(row: Row) -> float:
    """Return the likely time with the sum in the launch, on the best number of portions."""
    return float(min(time["us"] for time in row["inside"].values()))


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
                layout="packed",
            )
        }
        if found:
            lines.append([name, *(_share_cell(found.get(each)) for each in _decode_columns())])
    return table(["model", *head], lines)


def _decode_columns() -> list[tuple[int, str]]:
    return [(B, format) for B in (1, 16, 64, 128) for format in ("bf16", "fp8")]


def _share_cell(row: Row | None) -> str:
    """Return the launch alone, and its share of the bound."""
    if row is None:
        return "-"
    us = row["ours_modes"][row["ours_mode"]]
    return f"{us:.{1 if us < 100 else 0}f} ({row['bound_share']:.0%})"
