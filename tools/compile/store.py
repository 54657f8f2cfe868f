"""Files of a compilation: written whole or not at all, known by their content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import neuron_moe
import nki_kernels
import nki_sim

Progress = Callable[[int, int], None]
_CHUNK = 1 << 24
_DIGITS = 32


def digest(*parts: str | bytes) -> str:
    """Return the content hash of some texts or bytes (SHA-256, shortened)."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "big") + data)
    return found.hexdigest()[:_DIGITS]


def digest_sources() -> str:
    """Return the content hash of the code that plans, kernels and times are made by."""
    folders = [Path(str(each.__file__)).parent for each in (neuron_moe, nki_kernels, nki_sim)]
    skipped = {"tools", "configs"}
    files = sorted(
        (file.relative_to(folder).as_posix(), file)
        for folder in folders
        for file in folder.rglob("*.py")
        if not skipped & set(file.relative_to(folder).parts)
    )
    return digest(*(part for name, file in files for part in (name, file.read_bytes())))


def digest_file(path: Path, known: Mapping[str, Any] | None, progress: Progress) -> dict[str, Any]:
    """Return size, time and content hash of a file; what is known of an unchanged one is kept.

    Args:
        path: the file.
        known: what this returned before, or None.
        progress: called with the bytes read and all.
    """
    status = path.stat()
    seen = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    if known is not None and all(known.get(key) == value for key, value in seen.items()):
        return dict(known)
    found, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
            done += len(chunk)
            progress(done, status.st_size)
    return {**seen, "sha256": found.hexdigest()}


def write_text(path: Path, text: str) -> None:
    """Write a file under another name first, so that nobody sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: Path, values: Any) -> None:
    """Write values as JSON, whole or not at all."""
    write_text(path, json.dumps(values, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; None where there is none, or half of one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
