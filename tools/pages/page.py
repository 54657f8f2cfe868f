"""What a report is made of, and how it becomes one HTML file.

    page = Page("Qwen3-30B", "Blocks of 64 are the fastest.", [Section("Times", [Table(rows)])])
    write_page(page, Path("out.html"))

The file requests nothing: its style and script stand inside, pictures are SVG, and its content
security policy forbids every request. Tables sort at a click on a heading.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from neuron_moe import __version__

_UNITS = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "ms": 1e3, "s": 1e6}
_NUMBER = re.compile(r"([-+]?[\d,]*\.?\d+(?:[eE][-+]?\d+)?)\s*(\w*)")


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph.

    Attributes:
        text: plain.
        style: "", "good", "bad" or "soft".
    """

    text: str
    style: str = ""
    kind: ClassVar[str] = "text"


@dataclass(frozen=True, slots=True)
class Items:
    """A list of sentences."""

    items: Sequence[str]
    kind: ClassVar[str] = "items"


@dataclass(frozen=True, slots=True)
class Listing:
    """Text in a fixed pitch, as a terminal shows it."""

    text: str
    kind: ClassVar[str] = "listing"


@dataclass(frozen=True, slots=True)
class Table:
    """A table that sorts by any column.

    Attributes:
        rows: cells; the first row is the heading.
        numbers_from: the columns from this one on are set flush right.
        caption: what the rows are.
    """

    rows: Sequence[Sequence[str]]
    numbers_from: int = 1
    caption: str = ""
    kind: ClassVar[str] = "table"


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing; `picture_of` makes one of a figure.

    Attributes:
        svg: the element, whose colours are those of the page's style.
        caption: what is seen.
        width: of the drawing as it is meant, in CSS pixels; narrower than 70 % of it, it scrolls.
    """

    svg: str
    caption: str
    width: int
    kind: ClassVar[str] = "picture"


@dataclass(frozen=True, slots=True)
class Row:
    """Pictures side by side where there is room."""

    pictures: Sequence[Picture]
    kind: ClassVar[str] = "row"


@dataclass(frozen=True, slots=True)
class Bar:
    """Shares of a whole.

    Attributes:
        parts: name in words, and share of the whole from 0 to 1.
        caption: what the whole is.
    """

    parts: Sequence[tuple[str, float]]
    caption: str
    kind: ClassVar[str] = "bar"


@dataclass(frozen=True, slots=True)
class Details:
    """Blocks that unfold; open on paper.

    Attributes:
        summary: what is always seen.
        blocks: the rest.
    """

    summary: str
    blocks: Sequence[Block]
    kind: ClassVar[str] = "details"


Block = Text | Items | Listing | Table | Picture | Row | Bar | Details


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with what stands under it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Page:
    """A report.

    Attributes:
        title: what it is about.
        answer: the answer in a sentence or two, each on a line.
        sections: in order.
        remarks: what the numbers are: measured, simulated or computed, and on what.
    """

    title: str
    answer: str
    sections: Sequence[Section]
    remarks: Sequence[str] = field(default=())


def add_report_option(parser: argparse.ArgumentParser) -> None:
    """Add `--report FILE.html`."""
    parser.add_argument(
        "--report", type=Path, metavar="FILE.html", help="write a page with tables and pictures"
    )


def render(page: Page) -> str:
    """Return the page as HTML."""
    return _template().render(page=page, version=__version__, sort_value=sort_value)


def write_page(page: Page, path: Path) -> Path:
    """Write the page as one HTML file; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(render(page), encoding="utf-8")
    part.replace(path)
    return path


def sort_value(cell: str) -> str:
    """Return the number a cell is sorted by, '' if it does not begin with one.

    Example:
        >>> sort_value("1.5 GiB"), sort_value("1,234 ± 5"), sort_value("-")
        ('1610612736.0', '1234.0', '')
    """
    found = _NUMBER.match(cell.strip())
    if found is None:
        return ""
    return str(float(found[1].replace(",", "")) * _UNITS.get(found[2], 1.0))


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("neuron_moe.tools", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja")
