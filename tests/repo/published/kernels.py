"""Tables of our own kernels in docs."""

from statistics import geometric_mean

from tests.repo.published.results import CORNERS, MODELS, Row, result, rows, table


def tables() -> dict[str, str]:
    """Return each table by the name in its mark."""
    return {
        "ranks": _ranks(),
        "decode-times": _decode_times(),
        "ep": _expert_parallel(),
        "profile": _profile(),
    }


def _expert_parallel() -> str:
    """Return times in bounds by form, a column for each number of ranks."""
    found = {
        (row["model"], row["T"], row["form"], row["ep"], row["corner"]): row
        for row in rows("ep_trn2")
    }
    ranks = sorted({row["ep"] for row in rows("ep_trn2")})
    lines = [
        (f"{model}, T = {T:,}, {form.replace('_', '-')}", *cells)
        for model, T, form in dict.fromkeys(key[:3] for key in found)
        for cells in [[_ep_cell(found, (model, T, form, ep)) for ep in ranks]]
    ]
    return table(("experts of a rank", *(f"EP{ep}" for ep in ranks)), lines)


def _ep_cell(
    found: dict[tuple[str, int, str, int, str], Row], key: tuple[str, int, str, int]
) -> str:
    vendor, in_order = (found[*key, corner] for corner in ("vendor", "in-order"))
    ratio = (vendor["us"] - vendor["launch_us"]) / vendor["bound_us"]
    above = "*" if vendor["limit"] and ratio > vendor["limit"] else ""
    return f"{vendor['us']:,.0f}-{in_order['us']:,.0f} ({ratio:.2f}{above})"


def _ranks() -> str:
    """Return times at the assumed rate of links, a column a collective."""
    by_layer: dict[str, dict[str, Row]] = {}
    for row in rows("ranks_trn2", corner="vendor", link_rate=128):
        name = f"{row['model']} {row['split']} {row['phase']}, T = {row['T']:,}"
        by_layer.setdefault(name, {})[row["collective"]] = row
    lines = []
    for name, by_collective in by_layer.items():
        cells = [
            f"{row['launch_us'] + row['collective_us']:,.0f}; {min(row['inside_us'].values()):,.0f}"
            for row in by_collective.values()
        ]
        lines.append((name, f"{next(iter(by_collective.values()))['launch_us']:,.0f}", *cells))
    return table(("layer", "launch", *next(iter(by_layer.values()))), lines)


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
    return f"{us:.{1 if us < 100 else 0}f} ({row['bound_share']:.0%})"


def _profile() -> str:
    """Return how much longer the safe profile takes than the default before it."""
    lines = []
    for step, key in _KEYS.items():
        now = {tuple(row[name] for name in key): row["ours_us"] for row in rows(f"{step}_trn2")}
        ratios: dict[str, list[float]] = {corner: [] for corner in CORNERS}
        for row in result("before_trn2")[step]:
            ratios[row["corner"]].append(now[tuple(row[name] for name in key)] / row["us"])
        cells = [f"x{geometric_mean(each):.2f} (x{max(each):.2f})" for each in ratios.values()]
        lines.append((step, str(len(ratios[CORNERS[0]])), *cells))
    return table(("experts", "rows", "reordering clock", "source-order clock"), lines)


_KEYS = {
    "prefill": ("model", "T", "routing", "corner", "layout"),
    "decode": ("kernel", "model", "B", "routing", "format", "corner", "layout"),
}
