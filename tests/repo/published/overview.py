"""Tables of README and docs/benchmarks.md, and of docs/results/README.md by model."""

from collections.abc import Iterable, Sequence

from tests.repo.published.results import MODELS, Row, result, rows, span, table

KERNELS = {"decode": "decode of 1 to 128 tokens", "prefill": "prefill of 128 to 8,192 tokens"}
LAYOUTS = {"plain": "as in the checkpoint", "packed": "packed at load time"}
PREFILL_SIZES = (128, 1024, 8192)
BATCHES = (1, 16, 128)
SIMULATED = "simulated, Trn2"
PLAIN = {"routing": "uniform", "format": "bf16", "layout": "plain"}


def tables() -> dict[str, str]:
    """Return each table by the name in its mark."""
    sections = {row["section"] for row in rows("measured")}
    return {
        "headlines": _headlines(),
        "beside": _beside(),
        "decode-by-model": _by_model("decode_trn2", "B", BATCHES, kernel="decode_block", **PLAIN),
        "prefill-by-model": _by_model("prefill_trn2", "T", PREFILL_SIZES, **PLAIN),
        "shares": _shares(),
        "narrow": _narrow(),
        "anchors": _anchors(),
        **{section: _measured(section) for section in sections},
    }


def _headlines() -> str:
    """Return what README shows: at most four lines."""
    lines = [
        ("decode step of 1 to 128 tokens, beside nki-library", *_speedups("decode")),
        ("prefill of 128 to 8,192 tokens, beside nki-library", *_speedups("prefill")),
        ("outputs equal to those of NxD's MoE", *_headline("NxD")),
        ("simulated beside published Trn2 times, 54 points", *_headline("clock")),
    ]
    return table(("what", "result", "range", "kind"), lines)


def _speedups(name: str) -> tuple[str, str, str]:
    found = _figures(f"{name}_trn2", "plain")
    ends = f"{found['least_low']:.2f} to {found['largest_high']:.1f} x in {found['rows']} cases"
    means = f"{found['geometric_mean']:.1f} x as fast, {found['geometric_mean_low']:.1f} x at worst"
    return means, ends, SIMULATED


def _headline(name: str) -> tuple[str, str, str]:
    (row,) = rows("measured", name=name)
    return row["result"], row["range"], f"{row['kind']}, {row['machine']}"


def _figures(name: str, layout: str, key: str = "by_layout") -> Row:
    (found,) = (one for one in result(name)[key] if one["layout"] == layout)
    return dict(found)


def _beside() -> str:
    """Return the ratios over all cases, by kernel and layout of our weights."""
    asked = [
        (f"{what}, weights {shown}", f"{name}_trn2", layout, "by_layout")
        for name, what in KERNELS.items()
        for layout, shown in LAYOUTS.items()
    ]
    asked += [
        (f"the same, lists given, weights {shown}", "prefill_trn2", layout, "by_layout_given")
        for layout, shown in LAYOUTS.items()
    ]
    lines = []
    for what, *where in asked:
        found = _figures(*where)
        likely = f"{found['geometric_mean']:.2f} ({span((found['least'], found['largest']))})"
        worst = f"{found['geometric_mean_low']:.2f} ({found['least_low']:.2f})"
        lines.append((what, str(found["rows"]), likely, worst, str(found["rows_below_1_at_low"])))
    return table(("step", "cases", "likely", "at worst", "below 1 at worst"), lines)


def _by_model(name: str, axis: str, sizes: Iterable[int], **where: str) -> str:
    """Return a line a model and a column a number of tokens."""
    lines = [
        (title, *(_both_sides(rows(name, model=model, **where, **{axis: T})) for T in sizes))
        for model, title in MODELS.items()
        if rows(name, model=model, **where)
    ]
    return table(("model", *(f"{T:,}" for T in sizes)), lines)


def _both_sides(found: Sequence[Row]) -> str:
    """Return our likely time, theirs, the ratio and its range."""
    if not found or found[0]["ratio"] is None:
        return "-"
    ((ours, theirs, ratio),) = ((row["ours"], row["theirs"], row["ratio"]) for row in found)
    ends = span((ratio["low"], ratio["high"]))
    return f"{ours['us']:,.0f}; {theirs['us']:,.0f} ({ratio['likely']:.2f} [{ends}])"


def _shares() -> str:
    """Return the shares of the bounds: roofline in prefill, HBM in decode from 16 tokens."""
    prefill = [row["roofline_share"] for row in rows("prefill_trn2", T=8192, layout="packed")]
    lines = [("experts, prefill of 8,192 tokens, roofline", _percent(prefill))]
    steps = {"decode_moe": "experts", "decode_block": "norm, router and experts"}
    for kernel, what in steps.items():
        found = rows("decode_trn2", kernel=kernel, format="bf16", layout="packed")
        shares = [row["bound_share"] for row in found if row["B"] >= 16]
        lines.append((f"{what}, decode of 16 to 128 tokens, HBM", _percent(shares)))
    return table(("step and bound", "share"), lines)


def _narrow() -> str:
    found = rows("decode_trn2", layout="packed", format="fp8")
    gains = [row["fp8_gain"] for row in found if row["is_weight_bound"]]
    enough = str(sum(gain >= 1.6 for gain in gains))
    return table(
        ("cases bound by weights", "times as fast", "of these 1.6 or more"),
        [(str(len(gains)), f"{span(gains)} x", enough)],
    )


def _measured(section: str) -> str:
    lines = [
        (
            row["what"],
            row["result"],
            row["range"],
            f"{row['kind']}, {row['machine']}",
            f"`{row['command']}`",
        )
        for row in rows("measured", section=section)
    ]
    return table(("what", "result", "range", "kind", "command"), lines)


def _anchors() -> str:
    """Return how far estimates are from strangers' chip times, by family and half."""
    lines = [
        (
            row["name"].replace("_", " ", 1) if row["name"].startswith("held") else row["name"],
            str(row["points"]),
            f"{row['median_ratio']:.2f}",
            *(_percent([row[share]]) for share in ("median_error", "near_share", "inside_share")),
            f"{row['median_spread']:.2f}",
        )
        for row in rows("anchors_trn2")
    ]
    head = ("half: family", "points", "simulated / chip", "median error", "within 30 %")
    return table((*head, "inside the range", "high / low"), lines)


def _percent(shares: Iterable[float]) -> str:
    return f"{span((100 * share for share in shares), '{:.0f}')} %"
