"""What callers may leave out, and the constants that files share.

    python -m tests.golden.signatures --write     after a default or constant is meant to move

One text for each public function, class and method of the rooms where results are computed that has
parameters with defaults; and one for each public constant that is a plain value.
"""

import argparse
import enum
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lab.mutants.places import ROOMS, ROOT

FILE = Path(__file__).with_suffix(".json")


def modules() -> Iterator[ModuleType]:
    """Give the modules of the rooms."""
    for room in ROOMS:
        whole = ROOT / room
        for file in sorted(whole.rglob("*.py")) if whole.is_dir() else [whole]:
            parts = file.relative_to(ROOT).with_suffix("").parts
            yield importlib.import_module(".".join(part for part in parts if part != "__init__"))


def is_plain(value: Any) -> bool:
    """Say whether a value's text says all of it."""
    if isinstance(value, tuple | list):
        return all(is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(is_plain(each) for pair in value.items() for each in pair)
    if is_dataclass(value) and not isinstance(value, type):
        return all(is_plain(getattr(value, each.name)) for each in fields(value))
    return isinstance(value, (bool, int, float, str, type(None), enum.Enum))


def defaults(function: Any) -> str:
    """Return the parameters that have a default, with it."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # made by a library
        return ""
    shown = [f"{each.name}={each.default!r}" for each in found if each.default is not each.empty]
    return ", ".join(shown)


def texts(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Give names and texts of what a module defines in public."""
    for name in re.findall(r"^(?:def |class )?([A-Za-z]\w*)", inspect.getsource(module), re.M):
        value = vars(module).get(name)
        if name not in vars(module) or isinstance(value, enum.EnumType):
            continue  # a word of a text, or what the library says
        if callable(value):
            yield name, defaults(value)
            for inner, method in vars(value).items() if inspect.isclass(value) else ():
                if inspect.isfunction(method) and not inner.startswith("_"):
                    yield f"{name}.{inner}", defaults(method)
        elif name.isupper() and is_plain(value):
            yield name, repr(value).replace(str(ROOT), "")


def signatures() -> dict[str, dict[str, str]]:
    """Return the texts of every module that has any."""
    found = {
        module.__name__: {name: text for name, text in texts(module) if text}
        for module in modules()
    }
    return {name: texts for name, texts in found.items() if texts}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.signatures", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write every default and constant")
    if parser.parse_args().write:
        FILE.write_text(json.dumps(signatures(), indent=0) + "\n")


if __name__ == "__main__":
    main()
