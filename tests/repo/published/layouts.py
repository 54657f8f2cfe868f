"""Tables of whole layers in deployed layouts: docs/layouts.md, and a line a model in README."""

from lab.bench.layer.command import MODELS
from lab.bench.layer.published import PUBLISHED
from tests.repo.published.results import Row, result, rows, table

NAMES = dict(
    zip(
        MODELS,
        (
            "GPT-OSS-120B",
            "GPT-OSS-20B",
            "Llama 4 Scout",
            "Llama 4 Maverick",
            "Qwen3-30B-A3B",
            "DeepSeek-V3",
            "Mixtral 8x7B",
        ),
        strict=True,
    )
)
README_STEPS = (("prefill", 8192), ("decode", 64))
README_LAYOUT = "TP 8"


def tables() -> dict[str, str]:
    """Return each table by the name in its mark."""
    return {
        "layouts": _short(),
        "layouts-means": _means(),
        "layouts-published": _published(),
        **{f"layouts-{model}": _of_model(model) for model in MODELS},
    }


def _short() -> str:
    """Return a line a model."""
    lines = [
        (name, *(_short_cell(_find(model, *step)) for step in README_STEPS))
        for model, name in NAMES.items()
    ]
    steps = (f"{phase} of {tokens:,}" for phase, tokens in README_STEPS)
    return table((f"{README_LAYOUT}: us, share of bound, times as fast", *steps), lines)


def _short_cell(row: Row | None) -> str:
    return f"{_us(row, 'ours')}, {_share(row)}, {_ratio(row)}" if row else "-"


def _of_model(model: str) -> str:
    """Return a line a step and layout."""
    lines = [
        (
            f"{row['phase']} {row['T']:,}",
            f"TP {row['tp']} x EP {row['ep']}: {row['layout']}",
            _with_range(row, "ours"),
            _with_range(row, "vendor"),
            _ratio(row, with_range=True),
            f"{row['bound_us']:,.0f} {row['bound']}" if row["bound_us"] else "-",
            _share(row),
            f"{row['collective_us']:,.0f}" if row["collective_us"] else "-",
        )
        for row in rows("layer_trn2", model=model)
        if row["layout"] != "published"
    ]
    head = ("tokens", "layout", "ours", "theirs", "times as fast", "bound", "share", "exchange")
    return table(head, lines)


def _means() -> str:
    """Return means of theirs over ours, by step."""
    lines = [
        (
            f"{one['phase']} of {one['T']:,}"
            + (", where only their slowest kernel fits" if one["only_slowest_fits"] else ""),
            str(one["rows"]),
            f"{one['mean']:.2f} ({one['mean_low']:.2f}-{one['mean_high']:.2f})",
            f"{one['least']:.2f} ({one['least_low']:.2f})",
            f"{one['largest']:.2f}",
        )
        for one in result("layer_trn2")["beside_vendor"]
    ]
    head = ("step", "layers", "mean (range)", "least (at the ends)", "largest")
    return table(head, lines)


def _published() -> str:
    """Return published times beside the simulated layer, and over its times."""
    lines = []
    for one in PUBLISHED:
        found = rows("layer_trn2", model=one.model, tp=one.tp, ep=1, phase="decode", T=1)
        row = found[0] if found else None
        sides = [_published_cell(one.us, row, side) for side in ("ours", "vendor")]
        lines.append((one.what, one.machine, f"{one.us:,.1f}", *sides, _share(row), one.source))
    head = ("published", "machine", "us", "ours: us (published over it)", "theirs", "our share")
    return table((*head, "source"), lines)


def _published_cell(us: float, row: Row | None, side: str) -> str:
    simulated = row and row[f"{side}_us"]
    return f"{_with_range(row, side)} ({us / simulated:.2f})" if row and simulated else "-"


def _find(model: str, phase: str, tokens: int) -> Row | None:
    found = rows("layer_trn2", model=model, phase=phase, T=tokens)
    return next((row for row in found if README_LAYOUT in row["layout"].split(", ")), None)


def _us(row: Row | None, side: str) -> str:
    us = row and row[f"{side}_us"]
    return f"{us:,.0f}" if us else "-"


def _with_range(row: Row, side: str) -> str:
    low, high = row[f"{side}_low_us"], row[f"{side}_high_us"]
    return f"{_us(row, side)} ({low:,.0f}-{high:,.0f})" if low and high else "-"


def _share(row: Row | None) -> str:
    return f"{row['bound_us'] / row['ours_us']:.0%}" if row and row["ours_us"] else "-"


def _ratio(row: Row | None, *, with_range: bool = False) -> str:
    """Return theirs over ours; a star where only their slowest kernel fits."""
    if row is None or not row["ours_us"] or not row["vendor_us"]:
        return "-"
    ends = [row[f"vendor_{end}us"] / row[f"ours_{end}us"] for end in ("low_", "", "high_")]
    star = "*" if row["only_slowest_fits"] else ""
    span = f" ({min(ends):.2f}-{max(ends):.2f})" if with_range else ""
    return f"{ends[1]:.{2 if with_range else 1}f}{star}{span}"
