"""Keep NumPy's matrix product on one thread while a kernel runs.

The products of a kernel are small (128 x 128 x 512). Sharing one between threads gains little on an
idle machine and, where other processes want the processors, loses a lot, because the threads of
OpenBLAS spin while they wait for each other (measured on two busy cores: 40 s on one thread, over
300 s on two). It also makes results independent of the number of processors.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

# Names in the wheels of NumPy, then those of OpenBLAS itself.
_SUFFIXES: Final = (
    ("scipy_openblas_", "64_"),
    ("scipy_openblas_", ""),
    ("openblas_", "64_"),
    ("openblas_", ""),
)


@functools.cache
def _thread_functions() -> tuple[Callable[[], int], Callable[[int], Any]] | None:
    """Return OpenBLAS's functions to get and set its number of threads, if it is loaded."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "openblas" in line}
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        for prefix, suffix in _SUFFIXES:
            getter = getattr(library, f"{prefix}get_num_threads{suffix}", None)
            setter = getattr(library, f"{prefix}set_num_threads{suffix}", None)
            if getter is not None and setter is not None:
                return getter, setter
    return None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Run the body with one thread in NumPy's OpenBLAS; changes nothing with another library."""
    functions = _thread_functions()
    if functions is None:
        yield
        return
    getter, setter = functions
    before = getter()
    setter(1)
    try:
        yield
    finally:
        setter(before)
