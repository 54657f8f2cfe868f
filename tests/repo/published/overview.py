"""Tables of README and docs/benchmarks.md, and of docs/results/README.md by model."""

from collections.abc import Iterable, Sequence
from statistics import geometric_mean

from tests.repo.published.results import CORNERS, MODELS, Row, result, rows, span, table

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
        "mx": _mx(),
        "anchors": _anchors(),
        **{section: _measured(section) for section in sections},
    }


def _headlines() -> str:
    """Return what README shows: at most eight lines."""
    lines = [
        ("decode step of 1 to 128 tokens, beside nki-library", *_speedups("decode")),
        ("prefill of 128 to 8,192 tokens, beside nki-library", *_speedups("prefill")),
        ("whole layer with router, prefill of 1,024, beside theirs", *_layers(1024)),
        ("prefill of 8,192 tokens: share of the chip's peak", *_roofline()),
        ("layer on a CPU, beside transformers", *_headline("layer on a CPU")),
        ("outputs equal to those of NxD's MoE", *_headline("NxD")),
        ("NxDI models with our layer: greedy tokens equal", *_headline("NxDI")),
        ("simulated beside published Trn2 times, 54 points", *_headline("clock")),
    ]
    return table(("what", "result", "range", "kind"), lines)


def _speedups(name: str) -> tuple[str, str, str]:
    both = [_figures(name, corner, "plain") for corner in CORNERS]
    least = min(each["least_speedup"] for each in both)
    most = max(each["largest_speedup"] for each in both)
    means = span((each["geometric_mean_speedup"] for each in both), "{:.1f}")
    ends = f"{least:.2f} to {most:.1f} x in {both[0]['rows']} cases"
    if ranges := [each for each in both if "least_low" in each]:
        worst, tried = min((each["least_low"], each["rows_with_range"]) for each in ranges)
        of = "" if tried == both[0]["rows"] else f" (tried in {tried})"
        ends += f"; {worst:.2f} x if the clock is off twofold{of}"
    return f"{means} x as fast", ends, SIMULATED


def _layers(tokens: int) -> tuple[str, str, str]:
    found = [_layer_speedups(tokens, corner) for corner in CORNERS]
    means = span(map(geometric_mean, found), "{:.1f}")
    least, most = min(map(min, found)), max(map(max, found))
    ends = f"{least:.2f} to {most:.1f} x in {len(found[0])} cases"
    return f"{means} x as fast", ends, SIMULATED


def _layer_speedups(tokens: int, corner: str, *, is_apart: bool = False) -> list[float]:
    """Return the speed-ups of layers; those for which only the slowest of theirs fits are apart."""
    found = rows("layer_trn2", phase="prefill", T=tokens, corner=corner, only_slowest_fits=is_apart)
    return [row["vendor_us"] / row["layer_us"] for row in found if row["vendor_us"]]


def _roofline() -> tuple[str, str, str]:
    shares = [row["roofline_share"] for row in rows("prefill_trn2", T=8192, layout="packed")]
    middle = sorted(shares)[len(shares) // 2]
    return f"median {_percent([middle])}", _percent(shares), SIMULATED


def _headline(name: str) -> tuple[str, str, str]:
    (row,) = rows("measured", name=name)
    return row["result"], row["range"], f"{row['kind']}, {row['machine']}"


def _figures(name: str, corner: str, layout: str, key: str = "by_corner") -> Row:
    (found,) = (
        one
        for one in result(f"{name}_trn2")[key]
        if (one["corner"], one["layout"]) == (corner, layout)
    )
    return dict(found)


def _beside() -> str:
    """Return the speed-ups over all cases, by kernel and layout of our weights."""
    lines = []
    for name, what in KERNELS.items():
        for layout, told in LAYOUTS.items():
            both = [_figures(name, corner, layout) for corner in CORNERS]
            cells = [_mean_and_span(each) for each in both]
            lines.append([f"{what}, weights {told}", str(both[0]["rows"]), *cells])
    for layout, told in LAYOUTS.items():
        both = [_figures("prefill", corner, layout, "by_corner_given") for corner in CORNERS]
        cells = [_mean_and_span(each) for each in both]
        lines.append([f"the same, lists given, weights {told}", str(both[0]["rows"]), *cells])
    for is_apart, told in ((False, ""), (True, ", where only their slowest kernel fits")):
        for tokens in PREFILL_SIZES:
            found = [_layer_speedups(tokens, corner, is_apart=is_apart) for corner in CORNERS]
            if not all(found):
                continue
            cells = [f"{geometric_mean(each):.2f} ({span(each)})" for each in found]
            what = f"whole layer, prefill of {tokens:,} tokens{told}"
            lines.append([what, str(len(found[0])), *cells])
    return table(("step", "cases", "reordering clock", "source-order clock"), lines)


def _mean_and_span(figures: Row) -> str:
    ends = (figures["least_speedup"], figures["largest_speedup"])
    return f"{figures['geometric_mean_speedup']:.2f} ({span(ends)})"


def _by_model(name: str, axis: str, sizes: Iterable[int], **where: str) -> str:
    """Return a line a model and a column a number of tokens."""
    lines = [
        (title, *(_both_sides(rows(name, model=model, **where, **{axis: T})) for T in sizes))
        for model, title in MODELS.items()
    ]
    return table(("model", *(f"{T:,}" for T in sizes)), lines)


def _both_sides(found: Sequence[Row]) -> str:
    """Return our time, theirs and the ratio, over both clock models."""
    ours, theirs = (
        span((row[side] for row in found), "{:,.0f}") for side in ("ours_us", "vendor_us")
    )
    return f"{ours}; {theirs} ({span(row['speedup'] for row in found)})"


def _shares() -> str:
    """Return the shares of the bounds: roofline in prefill, HBM in decode from 16 tokens."""
    prefill = [
        [
            row["roofline_share"]
            for row in rows("prefill_trn2", T=8192, layout="packed", corner=corner)
        ]
        for corner in CORNERS
    ]
    lines = [("experts, prefill of 8,192 tokens, roofline", *map(_percent, prefill))]
    steps = {"decode_moe": "experts", "decode_block": "norm, router and experts"}
    for kernel, what in steps.items():
        found = rows("decode_trn2", kernel=kernel, format="bf16", layout="packed")
        cells = [
            _percent(r["bound_share"] for r in found if r["B"] >= 16 and r["corner"] == corner)
            for corner in CORNERS
        ]
        lines.append((f"{what}, decode of 16 to 128 tokens, HBM", *cells))
    return table(("step and bound", "reordering clock", "source-order clock"), lines)


def _narrow() -> str:
    lines = []
    for corner, name in zip(CORNERS, ("reordering", "source order"), strict=True):
        found = rows("decode_trn2", corner=corner, layout="packed", format="fp8")
        gains = [row["fp8_gain"] for row in found if row["is_weight_bound"]]
        enough = sum(gain >= 1.6 for gain in gains)
        lines.append((name, str(len(gains)), f"{span(gains)} x", str(enough)))
    return table(
        ("clock", "cases bound by weights", "times as fast", "of these 1.6 or more"), lines
    )


def _mx() -> str:
    found = result("mx_decode_trn3")
    lines = []
    for corner, name in zip(CORNERS, ("reordering", "source order"), strict=True):
        of = found["by_corner"][corner]
        cells = (str(of["compared"]), f"{of['geometric_mean']:.2f}", f"{of['least']:.2f}")
        lines.append((name, *cells))
    return table(("clock", "cases", "times as fast, geometric mean", "least"), lines)


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
