"""A kernel from a user's file, and its arguments from words."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from nki_sim.dtypes import as_dtype
from nki_sim.errors import NkiValidationError, UnknownValue
from nki_sim.launch import Kernel, Run, Simulation, TensorSpec
from nki_sim.machine.system import PACKAGE_DIR
from nki_sim.options import SimOptions
from nki_sim.provide import provide

# Results that nobody looks at need no values, and rules that other runs check may be broken.
TIMES_ONLY: Final = SimOptions(
    mode="indices",
    uninitialized="off",
    races="off",
    capacity="reorder",
    accumulate="off",
    callers=True,
)
_SHAPE: Final = re.compile(r"\d+(x\d+)+")
_TENSOR: Final = re.compile(r"(\d+(?:x\d+)*):([a-z]\w*)")
_NAMED: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def load_kernel(place: str) -> Any:
    """Import a kernel from FILE.py:NAME; a file of a package is imported as part of it.

    Raises:
        ValueError: no such file, or nothing of that name in it.
    """
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not file or not path.is_file() or path.suffix != ".py":
        raise ValueError(
            f"kernel {place}: no such file. Give FILE.py:NAME, as in my_kernels.py:exp."
        )
    provide()
    with _as_their_error(f"kernel {place}"):
        module = _import(path.resolve())
    if not callable(getattr(module, name, None)):
        kernels = [known for known, value in vars(module).items() if isinstance(value, Kernel)]
        near = difflib.get_close_matches(name, kernels, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"It has {', '.join(kernels) or 'none'}."
        raise ValueError(f"kernel {place}: {path.name} has no kernel {name!r}. {hint}")
    return getattr(module, name)


def _import(path: Path) -> ModuleType:
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if len(parts) > 1:
        return importlib.import_module(".".join(parts))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _as_their_error(what: str, texts: Sequence[str] = ()) -> Iterator[None]:
    """Turn whatever a user's code raises into one sentence with the place in that code.

    Args:
        what: the code.
        texts: arguments that it was given as text, of which a tensor may have been meant.

    Raises:
        ValueError: instead of it.
    """
    try:
        yield
    except NkiValidationError as error:
        raise ValueError(f"{what} breaks a rule: {error}") from error
    except Exception as error:  # their code may raise anything
        own = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename != __file__ and PACKAGE_DIR not in frame.filename
        ]
        place = f", {own[-1].filename}:{own[-1].lineno}" if own else ""
        message = f"{what} fails: {type(error).__name__}: {error}{place}"
        if texts:
            given = ", ".join(map(repr, texts))
            message += f". Given as text: {given}; a tensor is written 128x4096:bfloat16"
        raise ValueError(message) from error


def read_arguments(words: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments by position and by name.

    Each word is a value or NAME=value: a tensor as 128x4096:bfloat16, an array as FILE.npy, a
    number, True, False, None, a tuple, or any other text. Integer tensors hold zeros.

    Raises:
        ValueError: no dtype, one that is none, or a value by position behind one by name.
    """
    by_position: list[Any] = []
    by_name: dict[str, Any] = {}
    for word in words:
        named = _NAMED.fullmatch(word)
        if named is not None:
            by_name[named[1]] = _value(named[2])
        elif by_name:
            raise ValueError(f"argument {word}: stands behind a named one. Name it: NAME={word}.")
        else:
            by_position.append(_value(word))
    return by_position, by_name


def _value(text: str) -> Any:
    """Return what a word means."""
    tensor = _TENSOR.fullmatch(text)
    if tensor is not None:
        shape = tuple(map(int, tensor[1].split("x")))
        try:
            dtype = as_dtype(tensor[2])
        except (TypeError, ValueError):
            raise ValueError(
                f"argument {text}: {tensor[2]!r} is no dtype. Use float32, bfloat16, float16, "
                "int32, uint8, ..."
            ) from None
        if np.issubdtype(dtype.numpy, np.integer):
            return np.zeros(shape, dtype.numpy)
        return TensorSpec(shape, dtype)
    if text.endswith(".npy"):
        return np.load(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if _SHAPE.fullmatch(text):
            raise ValueError(f"argument {text}: has no dtype. Write {text}:float32.") from None
        return text


def simulate(
    kernel: Any,
    arguments: tuple[list[Any], dict[str, Any]],
    lnc: int | None,
    options: SimOptions,
) -> Run:
    """Run a kernel.

    Floating-point tensors have no values in mode "indices", unless instructions depend on them; in
    mode "full" they are drawn.

    Args:
        kernel: of `nki.jit`, or a function.
        arguments: by position and by name.
        lnc: cores; None: as many as the kernel's brackets say.
        options: how to simulate.

    Raises:
        ValueError: arguments that the kernel does not take, or whatever goes wrong in it.
    """
    by_position, by_name = arguments
    function = getattr(kernel, "func", kernel)
    signature = inspect.signature(function)
    try:
        signature.bind(*by_position, **by_name)
    except TypeError as error:
        raise ValueError(f"arguments: {error}. It is {function.__name__}{signature}.") from None
    texts = [value for value in (*by_position, *by_name.values()) if isinstance(value, str)]
    with _as_their_error(function.__name__, texts):
        if options.mode == "indices":
            with suppress(UnknownValue):
                return _start(kernel, by_position, by_name, lnc, options)
        drawn = {name: _draw(value) for name, value in by_name.items()}
        full = replace(options, mode="full")
        return _start(kernel, [_draw(value) for value in by_position], drawn, lnc, full)


def _start(
    kernel: Any,
    by_position: list[Any],
    by_name: dict[str, Any],
    lnc: int | None,
    options: SimOptions,
) -> Run:
    """Run a kernel whose parameters may have any name."""
    launched = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    launched = launched if lnc is None else launched[lnc]
    simulation = Simulation(launched, options)
    simulation(*by_position, **by_name)
    assert simulation.last_run is not None
    return simulation.last_run


def _draw(value: Any) -> Any:
    """Return an array of normal numbers in place of a tensor without values."""
    if not isinstance(value, TensorSpec):
        return value
    numbers = np.random.default_rng(0).standard_normal(value.shape).astype(np.float32)
    return numbers.astype(as_dtype(value.dtype).numpy)
