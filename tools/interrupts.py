"""Ctrl-C while modules are imported: torch needs seconds for that, and may abort in the middle."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def ends_at_once() -> Iterator[None]:
    """End the process with one sentence and status 130 at Ctrl-C; nothing was begun yet.

    Where Ctrl-C is ignored or handled otherwise, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"\nneuron-moe: interrupted before it began\n")
    os._exit(130)
