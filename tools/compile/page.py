"""The plan on one page: one HTML file without requests, light and dark, readable on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from neuron_moe.tools.console import format_bytes

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#59636e;--line:#d5dae0;--back:#ffffff;
--card:#f6f8fa;--good:#1a7f37;--bad:#b3261e;
--c0:#2a6fb0;--c1:#c8501e;--c2:#6f4fb0;--c3:#3a8f3a;--c4:#9a9a9a}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa4af;--line:#363d46;--back:#14171b;
--card:#1d2228;--good:#4ac26b;--bad:#ff7b72;--c0:#6cb0ee;--c1:#f0905f;--c2:#b095ec;--c3:#74c774;
--c4:#7d858e}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.2rem;max-width:64rem;background:var(--back);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0 0 .3rem}h2{font-size:1.15rem;margin:2rem 0 .5rem}
p,li{max-width:46rem}.soft{color:var(--soft)}.good{color:var(--good)}.bad{color:var(--bad)}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:6px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:.35rem .6rem;text-align:right;white-space:nowrap;border-top:1px solid var(--line)}
tr:first-child th{border-top:0;background:var(--card)}
th:first-child,td:first-child,.detail :is(th,td):nth-child(2){text-align:left}
th{white-space:normal;vertical-align:bottom}
@media(max-width:34rem){body{padding:.8rem}table{font-size:.78rem}th,td{padding:.3rem .35rem}
td:first-child,.detail td:nth-child(2){white-space:normal;min-width:6rem}}
.bar{display:flex;height:1.6rem;border-radius:6px;overflow:hidden;background:var(--card);
border:1px solid var(--line)}
.bar span{display:block;height:100%}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1rem;margin:.5rem 0;padding:0;list-style:none}
.legend i{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.4rem;
vertical-align:-1px}
details{margin:.6rem 0;border:1px solid var(--line);border-radius:6px;padding:.5rem .8rem}
summary{cursor:pointer;font-weight:600}
pre{overflow-x:auto;background:var(--card);padding:.7rem;border-radius:6px;font-size:.82rem}
@media print{details{border:0}body{max-width:none}}
"""
_COLOURS = 5


def render(report: dict[str, Any]) -> str:
    """Return the page of a report of `neuron-moe compile`."""
    title = f"{report['model']} on {report['instance']}"
    body = "\n".join(
        (
            _head(report, title),
            _memory(report["memory_bytes"]),
            _buckets(report["buckets"]),
            *(_details(bucket) for bucket in report["buckets"]),
            _missing(report),
            _labels(report),
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _head(report: dict[str, Any], title: str) -> str:
    deployment = report["deployment"]
    facts = (
        f"{report['ranks']} ranks, LNC {deployment['lnc']}: experts TP {deployment['tp']} x EP"
        f" {deployment['ep']} in {deployment['quantization']}, the rest TP {report['ranks']};"
        f" {deployment['batch']} sequences of up to {deployment['max_length']} tokens"
    )
    return (
        f"<h1>{escape(title)}</h1>\n<p>{escape(facts)}</p>\n"
        '<p class="good">It fits: a rank needs '
        f"{format_bytes(report['memory_bytes']['needed'])} of"
        f" {format_bytes(report['memory_bytes']['hbm'])}.</p>"
    )


def _memory(memory: dict[str, Any]) -> str:
    parts = {**memory["weights_by_group"], "KV cache": memory["kv_cache"]}
    parts |= {"states": memory["state"], "scratch": memory["scratch"]}
    parts["reserve [assumed]"] = memory["reserve"]
    shown = [(name, size) for name, size in parts.items() if size]
    spans, items = [], []
    for number, (name, size) in enumerate(shown):
        share = size / memory["hbm"]
        colour = f"var(--c{number % _COLOURS})"
        fade = 1.0 if number < _COLOURS else 0.55
        style = f"background:{colour};opacity:{fade}"
        label = f"{name}: {format_bytes(size)}, {share:.1%}"
        spans.append(
            f'<span style="width:{100 * share:.3f}%;{style}" title="{escape(label)}"></span>'
        )
        items.append(f'<li><i style="{style}"></i>{escape(label)}</li>')
    return (
        "<h2>Memory of a rank [computed]</h2>\n"
        f'<div class="bar" role="img" aria-label="memory of a rank">{"".join(spans)}</div>\n'
        f'<ul class="legend">{"".join(items)}</ul>'
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>"]
    lines += [
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    ]
    return f'<div class="scroll{style}"><table>{"".join(lines)}</table></div>'


def _buckets(buckets: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            _name(bucket),
            f"{bucket['us'] / 1e3:.2f}",
            f"{bucket['us_simulated'] / 1e3:.2f}",
            f"{bucket['us_computed'] / 1e3:.2f}",
            f"{bucket['instructions'] / 1e6:.2f}",
        )
        for bucket in buckets
    ]
    header = (
        "step",
        "ms",
        "kernels, simulated",
        "rest, computed",
        "millions of instruc\u00adtions, estimated",
    )
    return f"<h2>Steps</h2>\n{_table(header, rows)}"


def _name(bucket: dict[str, Any]) -> str:
    if bucket["phase"] == "prefill":
        return f"context encoding, {bucket['tokens']} tokens"
    return f"token generation, {bucket['tokens']} sequences at {bucket['context']} tokens"


def _details(bucket: dict[str, Any]) -> str:
    rows = [
        (each["kernel"], each["layers"], str(each["count"]), f"{each['us']:.1f}", each["kind"])
        for each in bucket["kernels"]
    ]
    rows += [
        (each["name"], each["layers"] or "-", str(each["count"]), f"{each['us']:.1f}",
         f"{each['kind']}, {each['bound']}")
        for each in bucket["parts"]
    ]  # fmt: skip
    rows += [
        (f"{each['name']}, {each['part']}", each["layers"] or "-", str(each["count"]),
         f"{each['us']:.1f}", f"{each['kind']}, {format_bytes(each['total_bytes'])}")
        for each in bucket["collectives"]
    ]  # fmt: skip
    header = ("what", "layers", "how often", "us each", "kind")
    why = "".join(
        f"<p>{escape(layers)}</p><pre>{escape(text)}</pre>"
        for layers, text in bucket["why"].items()
    )
    return (
        f"<details><summary>{escape(_name(bucket))}: {bucket['us'] / 1e3:.2f} ms</summary>\n"
        f"{_table(header, rows, ' detail')}\n{why}</details>"
    )


def _missing(report: dict[str, Any]) -> str:
    if not report["missing"]:
        return ""
    items = "".join(f"<li>{escape(each)}</li>" for each in report["missing"])
    return (
        '<h2>Missing for the chip</h2>\n<p class="bad">Nothing was compiled for the chip.</p>\n'
        f"<ul>{items}</ul>"
    )


def _labels(report: dict[str, Any]) -> str:
    remarks = "".join(f"<li>{escape(each)}</li>" for each in report["remarks"])
    return (
        "<h2>What the numbers are</h2>\n<ul><li>simulated: our kernels on nki_sim, with its clock"
        " of the source order; routing drawn, all experts alike</li><li>computed: by formula from"
        " the peaks of the chip and assumed rates of collectives; bounds from below</li><li>Nothing"
        f" here ran on a chip.</li>{remarks}</ul>\n"
        f'<p class="soft">neuron-moe {escape(report["version"])}</p>'
    )
