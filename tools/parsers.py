"""How every command reads its arguments and describes itself: one screen, with an example."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any, NoReturn

from neuron_moe.errors import did_you_mean
from neuron_moe.verdicts import opened_by

PRINTED = Path("-")  # what --json without a file means
DETAILS = "\v"  # in a help text: what follows is in --help-all alone
_MOST_LINES = 12  # of what stands above the options
_MANY_CHOICES = 60  # characters; longer lists are in --help-all alone
_LONG_CHOICES = 20  # characters; longer lists stand behind the help, not in front of it
DESCRIBE = "\0"  # as the only argument, which nobody can type: raise Described
EXIT_STATUS = "exit status: 0 done, 1 failed, 2 wrong call, 130 interrupted"


class Described(Exception):
    """A command's parser, for whoever asked with DESCRIBE.

    Attributes:
        parser: of the command.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__("help was requested")
        self.parser = parser


def read_features(word: str) -> str | frozenset[str]:
    """Return a value of `Tuning.features` from a word, or from a file of verdicts."""
    if word in ("safe", "open"):
        return word
    try:
        return opened_by(Path(word))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{word!r}: is not safe, open or verdicts: {error}"
        ) from None


class _Formatter(argparse.HelpFormatter):
    """Fills paragraphs, keeps examples as they are, and leaves long details to docs/."""

    is_whole = False

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
        text, _, details = super()._expand_help(action).partition(DETAILS)
        if action.choices is not None and self._are_many(action):
            text, details = f"{text}: ", ", ".join(map(str, action.choices))
            if not self.is_whole and len(details) > _MANY_CHOICES:
                details = "see --help-all"
            return text + details
        return text + details if self.is_whole else text

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
            filled = paragraph if is_example else _filled(paragraph, width)
            lines += filled.count("\n") + 2
            if number and not is_example and lines > _MOST_LINES:
                continue
            parts.append(filled)
        return "\n\n".join(parts)


def _filled(text: str, width: int) -> str:
    return textwrap.fill(" ".join(text.split()), width, break_on_hyphens=False)


class _AllFormatter(_Formatter):
    is_whole = True


class _HelpAll(argparse.Action):
    """Tells every option."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        assert isinstance(parser, Parser)
        parser.formatter_class = _AllFormatter
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser whose help fits a screen of 80 columns.

    Options of the group `more` are named in --help and explained in --help-all.

    Args:
        command: e.g. "bench cpu".
        description: the docstring of its file: what it does, an indented example, details.
        exits: exit statuses, where they mean more than elsewhere.
    """

    def __init__(self, command: str, description: str | None, exits: str = EXIT_STATUS) -> None:
        prog = f"neuron-moe {command}"
        text = (description or "").removeprefix(f"{prog}: ")
        super().__init__(prog=prog, description=text, epilog=exits, formatter_class=_Formatter)
        self.more = self.add_argument_group("more options")
        self.more.add_argument("--help-all", action=_HelpAll, nargs=0, help="list every option")
        if command.startswith("bench "):  # written by the menu, see tools/commands/bench.py
            self.add_argument("--report", type=Path, metavar="FILE.html", help="write a page")

    def add_json_option(self, more: str = "") -> None:
        """Add --json [FILE]; `tell_json` of console.py obeys it."""
        text = f"end with one line of JSON, or write it to a file{more}"
        self.add_argument("--json", nargs="?", type=Path, const=PRINTED, metavar="FILE", help=text)

    def add_args_option(self) -> None:
        """Add --args, what a kernel of the user's is called with; read by `nki_sim.own_kernel`."""
        text = "of the kernel: [NAME=]128x512:float32, FILE.npy, or a value"
        self.add_argument("--args", nargs="*", default=[], metavar="A", help=text)

    def add_features_option(self, text: str = "what plans may use; docs/open_features.md") -> None:
        """Add --features, a value of `Tuning.features`."""
        text += ": safe (default), open, or a file of verdicts"
        self.more.add_argument("--features", type=read_features, default="safe", help=text)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as `argparse` does, or raise Described."""
        if args == [DESCRIBE]:
            raise Described(self)
        self._words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with status 2 and a sentence, which names the option nearest to an unknown one."""
        words = [word.partition("=")[0] for word in self._words if word.startswith("--")]
        known = list(self._option_string_actions)
        wrong = [word for word in words if not any(name.startswith(word) for name in known)]
        for word in wrong:
            unknown = "" if word in message else f" {word} is unknown."
            message = f"{message}.{unknown}{did_you_mean(word, known)}".rstrip(".")
        super().error(message)

    def format_usage(self) -> str:
        """Return the command with what it must be given."""
        return f"usage: {self._short_usage()}\n"

    def format_help(self) -> str:
        """Return everything; options that may be left out are not listed twice."""
        self.usage = self._short_usage()
        if self.formatter_class is _AllFormatter:
            return super().format_help()
        # argparse has no public way to leave a group out of the help.
        groups, exits = self._action_groups, self.epilog
        self._action_groups = [group for group in groups if group is not self.more]
        names = [action.option_strings[-1] for action in self.more._group_actions[1:]]
        if names or any(DETAILS in (action.help or "") for action in self._actions):
            self.epilog = f"--help-all: more on these{''.join(f', {n}' for n in names)}\n\n{exits}"
        try:
            return super().format_help()
        finally:
            self._action_groups, self.epilog = groups, exits

    def _short_usage(self) -> str:
        needed = [
            f"{action.option_strings[-1]} {action.metavar or action.dest.upper()}"
            for action in self._actions
            if action.required and action.option_strings
        ]
        return " ".join([self.prog, *needed, "[options]"])
