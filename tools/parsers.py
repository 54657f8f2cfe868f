"""How every command reads its arguments and tells about itself: one screen, with an example."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any

_MOST_LINES = 12  # of what stands above the options
_LONG_CHOICES = 20  # characters; longer lists stand behind the help, not in front of it
EXIT_STATUS = "exit status: 0 done, 1 failed, 2 wrong call, 130 interrupted"


class _Formatter(argparse.HelpFormatter):
    """Fills paragraphs, keeps examples as they are, and leaves long details to docs/."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"max_help_position": 26, **options})

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        kinds: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}
        name = str(action.metavar or kinds.get(action.type, "NAME"))
        if action.choices is not None and action.metavar is None and not self._are_many(action):
            name = f"{{{','.join(map(str, action.choices))}}}"
        if action.nargs in ("+", "*"):
            return f"{name} ..."
        return f"[{name}]" if action.nargs == "?" else name

    def _format_action(self, action: argparse.Action) -> str:
        if action.choices is not None and self._are_many(action):
            action.help = action.help or "one or more"
        return super()._format_action(action)

    def _expand_help(self, action: argparse.Action) -> str:
        told = super()._expand_help(action)
        if action.choices is not None and self._are_many(action):
            told = f"{told}: {', '.join(map(str, action.choices))}"
        return told

    @staticmethod
    def _are_many(action: argparse.Action) -> bool:
        return len("".join(map(str, action.choices or ()))) > _LONG_CHOICES

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts: list[str] = []
        lines = 0
        for number, paragraph in enumerate(text.strip("\n").split("\n\n")):
            is_example = paragraph.startswith("    neuron-moe ")
            if not is_example and paragraph.startswith("    "):
                continue
            filled = paragraph if is_example else textwrap.fill(" ".join(paragraph.split()), width)
            lines += filled.count("\n") + 2
            if number and not is_example and lines > _MOST_LINES:
                continue
            parts.append(filled)
        return "\n\n".join(parts)


class Parser(argparse.ArgumentParser):
    """A parser whose help fits a screen of 80 columns.

    Args:
        command: e.g. "bench cpu".
        description: the docstring of its file: what it does, an indented example, details.
        exits: exit statuses, where they mean more than elsewhere.
    """

    def __init__(self, command: str, description: str | None, exits: str = EXIT_STATUS) -> None:
        prog = f"neuron-moe {command}"
        text = (description or "").removeprefix(f"{prog}: ")
        super().__init__(prog=prog, description=text, epilog=exits, formatter_class=_Formatter)
        if command.startswith("bench "):  # written by the menu, see tools/commands/bench.py
            self.add_argument("--report", type=Path, metavar="FILE.html", help="write a page")

    def format_usage(self) -> str:
        """Return the command with what it must be given."""
        return f"usage: {self._short_usage()}\n"

    def format_help(self) -> str:
        """Return everything; options that may be left out are not listed twice."""
        self.usage = self._short_usage()
        return super().format_help()

    def _short_usage(self) -> str:
        needed = [
            f"{action.option_strings[-1]} {action.metavar or action.dest.upper()}"
            for action in self._actions
            if action.required and action.option_strings
        ]
        return " ".join([self.prog, *needed, "[options]"])
