"""A list of names on the command line, each a module with `main(argv) -> int`."""

import importlib
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import neuron_moe
from neuron_moe.errors import did_you_mean
from neuron_moe.tools.interrupts import ends_at_once
from neuron_moe.tools.parsers import EXIT_STATUS

_MOST_COLUMNS = 100


@dataclass(frozen=True, slots=True)
class Menu:
    """Names to choose from; the module of one is imported only when it is called.

    Attributes:
        program: what stands in front of a name, e.g. neuron-moe bench.
        noun: what a name is called, command or target.
        entries: module, see `load`, and one line of explanation, by name.
        others: the same of names that the overview lists in one line; those of `lab` apart.
    """

    program: str
    noun: str
    entries: Mapping[str, tuple[str, str]]
    others: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def usage(self) -> str:
        """Return the overview of all names."""
        width = max(len(name) for name in self.entries)
        columns = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
        rows = [
            textwrap.fill(
                text,
                columns,
                initial_indent=f"  {name:<{width}}  ",
                subsequent_indent=" " * (width + 4),
            )
            for name, (_, text) in self.entries.items()
        ]
        lab = {name for name, (module, _) in self.others.items() if module.startswith("lab.")}
        rows += [
            textwrap.fill(f"{heading}: {', '.join(names)}", columns, subsequent_indent="  ")
            for heading, names in (
                ("also", [name for name in self.others if name not in lab]),
                ("in a checkout, for maintainers", [name for name in self.others if name in lab]),
            )
            if names
        ]
        head = f"usage: {self.program} {self.noun.upper()} [options]"
        tail = f"{self.noun.upper()} --help lists its options.\n{EXIT_STATUS}"
        return "\n".join([head, "", *rows, "", tail])

    def main(self, argv: list[str] | None = None) -> int:
        """Run what the first argument names with the others; return its exit status.

        It is 2 for a missing or unknown name, 0 for --help.
        """
        args = sys.argv[1:] if argv is None else argv
        if not args or args[0] in ("-h", "--help", "help"):
            print(self.usage())
            return 0 if args else 2
        name, rest = args[0], args[1:]
        known = {**self.entries, **self.others}
        if name not in known:
            hint = did_you_mean(name, known)
            print(
                f"{self.program}: no {self.noun} {name!r}.{hint}\n\n{self.usage()}", file=sys.stderr
            )
            return 2
        with ends_at_once():
            module = load(known[name][0])
        return int(module.main(rest))


def load(entry: str) -> Any:
    """Return the module of an entry.

    Args:
        entry: below `neuron_moe.tools`, or of `lab`, which is beside the package in a checkout.

    Raises:
        ValueError: one of `lab`, and there is no checkout.
    """
    if not entry.startswith("lab."):
        return importlib.import_module(f"neuron_moe.tools.{entry}")
    checkout = Path(neuron_moe.__file__).parents[1]
    if not (checkout / "lab" / "__init__.py").is_file():
        raise ValueError(
            "is for maintainers and not in the wheel: it needs the checkout. Install from there,"
            " `pip install -e .`."
        )
    if str(checkout) not in sys.path:
        sys.path.append(str(checkout))
    return importlib.import_module(entry)
