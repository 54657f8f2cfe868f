"""What the subcommands share: progress bars on standard error, and the JSON line at the end."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from neuron_moe import __version__


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while the context lasts; call what it gives with (done, total).

    Nothing is shown where standard error is not a terminal, so that logs stay readable.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def print_json_line(command: str, **values: Any) -> None:
    """Print one JSON object on one line, for machines; it is the last line of a command."""
    record = {"command": command, "version": __version__, **values}
    sys.stdout.write(json.dumps(record, allow_nan=False) + "\n")
    sys.stdout.flush()
