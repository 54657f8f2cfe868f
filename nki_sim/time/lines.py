"""Source lines of a kernel: their text, and what each costs, as a table that prints itself."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, overload

from nki_sim.trace import Callers

_WIDTH: Final = 80
_PLACE: Final = 32  # of it for file and line
_MOST_LINES: Final = 12


class LineTime(NamedTuple):
    """What the instructions of one source line cost, summed over cores.

    Attributes:
        file, line: where the kernel calls the instruction.
        op: its name.
        lane: where it runs, one of `timeline.LANES` or exchange.
        instructions: how many.
        busy_ns: time they keep their lane at work.
        path_ns: time by which they hold up the whole; over all lines it sums to the total time.
        callers: from where the line was called, nearest first, if the simulation kept that.
        callers_id: their position in the trace's `callers`.
    """

    file: str
    line: int
    op: str
    lane: str
    instructions: int
    busy_ns: float
    path_ns: float
    callers: Callers = ()
    callers_id: int = 0

    @property
    def place(self) -> str:
        """File and line, without folders."""
        return _place(self.file, self.line)

    @property
    def origin(self) -> str:
        """The nearest callers in words; '' where there are none."""
        places = ", ".join(_place(*one) for one in self.callers)
        return places and f"from {places}"

    @property
    def source(self) -> str:
        """The statement on one line; '' where the file cannot be read."""
        return statement_at(self.file, self.line)


@dataclass(frozen=True, slots=True)
class LineTable(Sequence[LineTime]):
    """Source lines of a run; printing it gives a table of the largest.

    Attributes:
        entries: in the order requested.
        total_ns: of the run.
    """

    entries: tuple[LineTime, ...]
    total_ns: float

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> LineTime: ...

    @overload
    def __getitem__(self, index: slice) -> LineTable: ...

    def __getitem__(self, index: int | slice) -> LineTime | LineTable:
        if isinstance(index, slice):
            return LineTable(self.entries[index], self.total_ns)
        return self.entries[index]

    def __repr__(self) -> str:
        """Return a table of at most 12 lines, the source cut to 80 columns."""
        rows = [f"{'held up':>10} {'share':>6} {'busy':>10} {'lane':>8} {'count':>7}  line"]
        for one in self.entries[:_MOST_LINES]:
            share = one.path_ns / self.total_ns if self.total_ns else 0.0
            rows.append(
                f"{one.path_ns / 1e3:>7,.2f} us {share:>6.1%} {one.busy_ns / 1e3:>7,.2f} us"
                f" {one.lane:>8} {one.instructions:>7,}  {_tail(one.place)}"
            )
            rows.append(_cut(f"{'':>12}{one.source or one.op}"))
            if one.callers:
                rows.append(_cut(f"{'':>12}{one.origin}"))
        left = len(self) - _MOST_LINES
        return "\n".join([*rows, f"{left} more lines"] if left > 0 else rows)


def _place(file: str, line: int) -> str:
    return f"{Path(file).name}:{line}"


def _tail(place: str) -> str:
    """Return a place, the file's name cut in front to what is left beside the numbers."""
    return place if len(place) <= _PLACE else f"...{place[3 - _PLACE :]}"


def _cut(text: str) -> str:
    """Return a line of at most the width of a table."""
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def statement_at(file: str, line: int) -> str:
    """Return the statement that stands at a line of a file, without line breaks.

    Where several do, it is the shortest; of a loop or a condition only the head. Files that a
    notebook keeps in memory are found, too.
    """
    text, spans = _statements(file)
    found = [span for span in spans if span[0] <= line <= span[1]]
    if not found:
        return " ".join(linecache.getline(file, line).split())
    first, last = min(found, key=lambda span: span[1] - span[0])
    joined = " ".join(" ".join(text[first - 1 : last]).split())
    return re.sub(r",? (?=[)\]}])", "", re.sub(r"(?<=[(\[{]) ", "", joined))


@functools.cache
def _statements(file: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the lines of a file, and first and last line of each statement in it."""
    text = linecache.getlines(file)
    try:
        tree = ast.parse("".join(text))
    except SyntaxError:
        return text, []
    spans = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = node.end_lineno if not body else max(node.lineno, body[0].lineno - 1)
            spans.append((node.lineno, last or node.lineno))
    return text, spans
