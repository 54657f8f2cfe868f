"""What the subcommands share: progress bars on standard error, tables, JSON if requested."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from neuron_moe import __version__
from neuron_moe.tools.parsers import PRINTED

SMALL_CHECKPOINT_BYTES = 256 << 20


@contextmanager
def progress_bar(description: str, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """Show a bar while the context lasts; call what it gives with (done, total).

    Nothing is shown where standard error is not a terminal, so that logs stay readable.

    Args:
        description: what is done.
        unit: "bytes" shows how many are done as well.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True) if unit == "bytes" else TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def fitting_threads(folder: Path) -> Iterator[None]:
    """Compute a small checkpoint on one thread while the context lasts.

    Its matrices gain nothing from a second thread, and where other work shares the cores, threads
    that wait for each other lose much (measured, the demo on 2 cores with a load of 9: 18 s with
    one thread, 131 s with two).
    """
    before = torch.get_num_threads()
    if weight_file_bytes(folder) <= SMALL_CHECKPOINT_BYTES:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def weight_file_bytes(folder: Path) -> int:
    """Return the size of the weight files of a checkpoint."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def tell_json(asked: Path | None, command: str, **values: Any) -> None:
    """End a command with its results for programs, where that was requested.

    Args:
        asked: of `add_json_option`: PRINTED for a line, a file, or None for nothing.
        command: its name.
        values: the results.
    """
    if asked == PRINTED:
        print_json_line(command, **values)
    elif asked is not None:
        record = {"command": command, "version": __version__, **values}
        asked.write_text(json.dumps(record, allow_nan=False, indent=1) + "\n")
        print(f"written: {asked}")


def print_json_line(command: str, **values: Any) -> None:
    """Print one JSON object on one line, for programs; it is the last line of a command."""
    record = {"command": command, "version": __version__, **values}
    sys.stdout.write(json.dumps(record, allow_nan=False) + "\n")
    sys.stdout.flush()


def format_table(rows: Sequence[Sequence[str]], *, numbers_from: int = 1) -> str:
    """Return rows as aligned columns; those from `numbers_from` on are set flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < numbers_from else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_bytes(count: float) -> str:
    """Return a number of bytes with a binary unit and four digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
