"""What a benchmark printed, as a page: its tables, its lines, and a picture of its rows."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, TextIO

from matplotlib.figure import Figure

from neuron_moe.tools.pages.page import Block, Details, Listing, Page, Picture, Section, Table
from neuron_moe.tools.pages.pictures import picture_of

_SECTION = "== "
_BOUNDS = ("roofline_us", "hbm_bound_us")
_LONG = 40  # rows or lines of what is shown when it is requested
_NARROW = 4.0  # largest over least of an axis with numbers between powers of ten


class Tee(io.TextIOBase):
    """Writes on, and keeps what was written in `text`.

    Args:
        stream: to write to.
        keeps_json: lines of JSON are kept alone, as nobody requested them.
    """

    def __init__(self, stream: TextIO, *, keeps_json: bool = False) -> None:
        self._stream, self._keeps_json = stream, keeps_json
        self.text = ""

    def write(self, text: str) -> int:
        """Write and keep."""
        self.text += text
        if self._keeps_json and text.startswith('{"command"'):
            return len(text)
        return self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def page_of_text(title: str, text: str) -> Page:
    """Return a page of printed text.

    Args:
        title: of the page.
        text: lines; those in columns become tables, "== NAME" begins a section, a last line of JSON
            gives the picture. What the last section says in one line is the answer.
    """
    lines = text.strip().splitlines()
    result: dict[str, Any] = {}
    if lines and lines[-1].startswith("{"):
        result = json.loads(lines.pop())
    sections = list(sections_of(lines))
    rows = result.get("rows", ())
    picture = picture_of_times(rows)
    if picture is not None:
        sections.insert(0, Section("Times against their bound", [picture]))
    remarks = [f"{result['kind']} times" if "kind" in result else "kinds stand beside the numbers"]
    answer = share_in_words(rows) or _last_words([line for line in lines if line.strip()])
    return Page(title, answer, sections, remarks)


def _last_words(lines: Sequence[str]) -> str:
    """Return the last section in a line, where it has no more."""
    if len(lines) < 2 or not lines[-2].startswith(_SECTION):
        return ""
    return f"{lines[-2].removeprefix(_SECTION)}: {lines[-1]}"


def sections_of(lines: Sequence[str]) -> Iterator[Section]:
    """Yield what stands before the first line that begins a section, and each section; long tables
    and runs of lines are shown when they are requested.
    """
    starts = [number for number, line in enumerate(lines) if line.startswith(_SECTION)]
    for first, end in pairwise([-1, *starts, len(lines)]):
        title = "" if first < 0 else lines[first].removeprefix(_SECTION)
        blocks = [_folded(block) for block in blocks_of(lines[first + 1 : end])]
        if title or blocks:
            yield Section(title, blocks)


def _folded(block: Block) -> Block:
    if isinstance(block, Table) and len(block.rows) > _LONG:
        return Details(f"{len(block.rows) - 1} rows", [block])
    if isinstance(block, Listing) and (count := len(block.text.splitlines())) > _LONG:
        return Details(f"{count} lines", [block])
    return block


def blocks_of(lines: Sequence[str]) -> list[Block]:
    """Return runs of lines with as many cells as tables, all others as they are."""
    found: list[Block] = []
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    for count, group in groupby(zip(cells, lines, strict=True), key=lambda each: len(each[0])):
        rows, texts = zip(*group, strict=True)
        if count > 2 and len(rows) > 1:
            found.append(Table(rows))
        elif found and isinstance(found[-1], Listing):
            found[-1] = Listing("\n".join([found[-1].text, *texts]))
        elif any(text.strip() for text in texts):
            found.append(Listing("\n".join(texts)))
    return found


def _bound_of(rows: Sequence[dict[str, Any]]) -> str | None:
    return next((name for name in _BOUNDS if rows and name in rows[0]), None)


def _words_of(bound: str) -> str:
    return bound.removesuffix("_us").replace("_", " ")


def share_in_words(rows: Sequence[dict[str, Any]]) -> str:
    """Say how near to their bound our times are; nothing of rows without one."""
    name = _bound_of(rows)
    shares = [row[name] / row["ours_us"] for row in rows if name and row.get("ours_us")]
    if not shares:
        return ""
    assert name is not None
    return f"Ours reaches {min(shares):.0%} to {max(shares):.0%} of the {_words_of(name)}."


def picture_of_times(rows: Sequence[dict[str, Any]]) -> Picture | None:
    """Return times of ours and the vendor's against the bound; None without different bounds."""
    name = _bound_of(rows)
    if name is None or len({row[name] for row in rows}) < 2:
        return None
    figure = Figure(figsize=(6.0, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for key, colour, label in (("vendor_us", "#9a9a9a", "vendor"), ("ours_us", "#2a6fb0", "ours")):
        points = [(row[name], row[key]) for row in rows if row.get(key)]
        if points:
            axes.loglog(*zip(*points, strict=True), "o", color=colour, markersize=4, label=label)
    ends = [min(row[name] for row in rows), max(row[name] for row in rows)]
    axes.loglog(ends, ends, "-", color="#333333", linewidth=1, label="the bound itself")
    for axis, (least, most) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_major_formatter("{x:,.0f}")
        axis.set_minor_formatter("{x:,.0f}" if most < _NARROW * least else "")
    axes.set_xlabel(f"{_words_of(name)}, us [computed]")
    axes.set_ylabel("us")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.legend(fontsize=8)
    return picture_of(figure, "each point is a row of the table")
