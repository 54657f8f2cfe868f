"""Result files, and the fingerprints of what their times were simulated with."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import nki_kernels
import nki_sim
from neuron_moe.tools.parsers import PRINTED
from neuron_moe.tools.timing.condensed import expand
from nki_sim.hardware import NEUTRAL, Hardware

DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Fingerprints of what times depend on, beside the case."""

    coefficients: str
    simulator: str
    kernels: str
    library: str

    @classmethod
    def now(cls, chip: Hardware, library: Path | None, ours: Sequence[str]) -> Sources:
        """Return those of this run; `ours` are patterns of our kernels' files."""
        return cls(
            coefficients=_coefficients(chip),
            simulator=_tree(Path(nki_sim.__file__).parent),
            kernels=_tree(Path(nki_kernels.__file__).parent, ours),
            library="" if library is None else _tree(library / "src" / "nkilib_src" / "nkilib"),
        )


def _coefficients(chip: Hardware) -> str:
    values = asdict(chip).items()
    return digest(repr(sorted(item for item in values if item not in NEUTRAL.items())))


def _tree(folder: Path, patterns: Sequence[str] = ("*.py",)) -> str:
    files = sorted(file for pattern in patterns for file in folder.rglob(pattern))
    return digest(*(part for file in files for part in (file.name, file.read_bytes())))


def digest(*parts: str | bytes) -> str:
    """Return the fingerprint of some texts or bytes."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else part)
    return found.hexdigest()[:DIGITS]


def read_result(path: Path, option: str, parts: Sequence[str]) -> dict[str, Any]:
    """Return the content of a result file, also of a condensed one.

    Args:
        path: of the file.
        option: that named it, for messages.
        parts: keys that the content must have.

    Raises:
        ValueError: it is no result of this benchmark.
    """
    try:
        content: dict[str, Any] = expand(json.loads(path.read_text()))
        for part in parts:
            content[part]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{option} {path}: not a result of this benchmark ({type(error).__name__}: {error}). "
            "Give a file that --json wrote."
        ) from None
    return content


def write_result(path: Path | None, result: dict[str, Any]) -> None:
    """Write the file that --json names, if it does, in one step: whoever is interrupted leaves the
    one before.
    """
    if path is None or path == PRINTED:
        return
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)


class Writer:
    """Writes a growing result file after every step, but for a tenth of the time at most.

    Args:
        path: of the file; None and PRINTED write nothing.
        result: returns its content.
    """

    def __init__(self, path: Path | None, result: Callable[[], dict[str, Any]]) -> None:
        self._path = None if path == PRINTED else path
        self._result = result
        self._next_s = 0.0

    def write(self, at_once: bool = False) -> None:
        """Write the file, unless the last time is too short ago and it is not requested at once."""
        started = time.monotonic()
        if self._path is None or (started < self._next_s and not at_once):
            return
        write_result(self._path, self._result())
        ended = time.monotonic()
        self._next_s = ended + 9 * (ended - started)
