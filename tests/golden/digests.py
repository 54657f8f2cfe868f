"""Files of outcomes: for each name, four characters of every outcome, a hundred to a line."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

DIGITS, IN_LINE = 4, 100


def digits(text: str) -> str:
    """Return what is kept of an outcome."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def write(file: Path, outcomes: dict[str, list[str]]) -> None:
    """Write the digits of all outcomes."""
    lines = {name: _pieces("".join(kept), DIGITS * IN_LINE) for name, kept in outcomes.items()}
    file.write_text(json.dumps(lines, indent=0) + "\n")


def read(file: Path) -> dict[str, list[str]]:
    """Return the digits of all outcomes."""
    lines = json.loads(file.read_text())
    return {name: _pieces("".join(kept), DIGITS) for name, kept in lines.items()}


def _pieces(text: str, length: int) -> list[str]:
    return [text[begin : begin + length] for begin in range(0, len(text), length)]


def others(found: Iterable[str], written: list[str], first: int) -> list[int]:
    """Return the numbers of outcomes, from `first` on, that are not the ones written down."""
    return [number for number, kept in enumerate(found, first) if kept != written[number]]
