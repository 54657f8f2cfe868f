"""What a command prints, kept, so that a report says the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from neuron_moe.tools.console import format_table
from neuron_moe.tools.pages.page import Block, Listing, Page, Section, Table, write_page


class Screen:
    """Prints and keeps.

    Example:
        screen = Screen()
        screen.say("median of 9 runs")
        screen.show_table([["layer", "ms"], ["first", "1.2"]])
        screen.write(Path("out.html"), "A benchmark", remarks=["measured on this machine"])
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    def say(self, text: str) -> None:
        """Print lines."""
        print(text)
        self._blocks.append(Listing(text.strip("\n")))

    def show_table(self, rows: Sequence[Sequence[str]], *, numbers_from: int = 1) -> None:
        """Print a table; the first row is its heading."""
        print(format_table(rows, numbers_from=numbers_from))
        self._blocks.append(Table(rows, numbers_from))

    def keep(self, block: Block) -> None:
        """Put something into the report alone."""
        self._blocks.append(block)

    def write(
        self, path: Path | None, title: str, *, answer: str = "", remarks: Sequence[str] = ()
    ) -> None:
        """Write the report and say where it is; nothing without a path."""
        if path is None:
            return
        page = Page(title, answer, [Section("", self._blocks)], remarks)
        print(f"report: {write_page(page, path)}")
