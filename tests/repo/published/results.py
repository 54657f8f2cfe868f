"""Committed results, and tables of them in Markdown."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from neuron_moe.tools.timing.condensed import expand
from tests.repo.source import ROOT

Row = Mapping[str, Any]
RESULTS = ROOT / "docs" / "results"
MODELS = {  # of the kernel benchmarks
    "gpt-oss-120b": "GPT-OSS-120B TP8",
    "gpt-oss-20b": "GPT-OSS-20B TP8",
    "llama4-scout": "Llama 4 Scout TP16",
    "llama4-maverick": "Llama 4 Maverick TP64",
    "qwen3-30b": "Qwen3-30B-A3B TP8",
    "deepseek-v3": "DeepSeek-V3 TP16",
    "mixtral-8x7b": "Mixtral 8x7B TP8",
}


@cache
def result(name: str) -> dict[str, Any]:
    """Return a committed result."""
    return expand(json.loads((RESULTS / f"{name}.json").read_text()))


def rows(name: str, /, **where: Any) -> list[Row]:
    """Return the rows of a result whose fields have the given values."""
    return [row for row in result(name)["rows"] if all(row[key] == where[key] for key in where)]


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    titles = list(head)
    return "\n".join(
        f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *map(list, lines))
    )


def span(values: Iterable[float], form: str = "{:.2f}") -> str:
    """Return the least and the largest value with a dash between, or one where they print alike."""
    found = list(values)
    return "-".join(dict.fromkeys(form.format(each) for each in (min(found), max(found))))


def ranged(time: Mapping[str, float]) -> str:
    """Return a likely time and its range in whole microseconds."""
    return f"{time['us']:,.0f} [{span((time['low_us'], time['high_us']), '{:,.0f}')}]"
