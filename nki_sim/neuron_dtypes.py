"""The vendor's module `neuron_dtypes`, which the references of its kernel library convert types
with, where it is missing.

Packed mx data are four elements in one word. An array of them carries its type in the metadata of
its NumPy type (`for_kernel`), or as the one field of a structured type (`for_reference`), whose
printed form holds the "x4" that the vendor's references look for. `run` takes both.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from nki_sim import dtypes

PACK = 4


class Format(NamedTuple):
    """A packed type: its word, its element, the largest finite element and that element's
    exponent.
    """

    word: type[np.unsignedinteger[Any]]
    element: Any
    bits: int
    largest: float
    exponent: int


FORMATS = {
    "float4_e2m1fn_x4": Format(np.uint16, ml_dtypes.float4_e2m1fn, 4, 6.0, 2),
    "float8_e4m3fn_x4": Format(np.uint32, ml_dtypes.float8_e4m3fn, 8, 448.0, 8),
    "float8_e5m2_x4": Format(np.uint32, ml_dtypes.float8_e5m2, 8, 57344.0, 15),
}


def for_kernel(words: np.ndarray, name: str) -> np.ndarray:
    """Return packed words as an input tensor of type `name`."""
    return words.view(np.dtype(FORMATS[name].word, metadata={"nki": name}))


def for_reference(words: np.ndarray, name: str) -> np.ndarray:
    """Return packed words as an array whose printed dtype names the packed type."""
    return np.ascontiguousarray(words).view(np.dtype([(name, FORMATS[name].word)]))


def pack(values: np.ndarray, name: str) -> np.ndarray:
    """Round float32 [..., 4n] to the element type and pack four neighbours: [..., n] words."""
    form = FORMATS[name]
    codes = (
        values.astype(form.element)
        .view(np.uint8)
        .reshape(*values.shape[:-1], -1, PACK)
        .astype(form.word)
    )
    words: np.ndarray = codes[..., 0].copy()
    for slot in range(1, PACK):
        words |= codes[..., slot] << form.word(form.bits * slot)
    return words


def unpack(words: np.ndarray, name: str) -> np.ndarray:
    """Widen packed [..., n] words to float32 [..., 4n]."""
    form = FORMATS[name]
    raw = words.view(form.word)
    mask = form.word((1 << form.bits) - 1)
    codes = np.stack([(raw >> form.word(form.bits * slot)) & mask for slot in range(PACK)], axis=-1)
    values = codes.astype(np.uint8).view(form.element).astype(np.float32)
    widened: np.ndarray = values.reshape(*words.shape[:-1], -1)
    return widened


def provide_neuron_dtypes() -> None:
    """Answer to `import neuron_dtypes` where it is missing, and let NumPy know the packed types by
    name, as it does with the vendor's.
    """
    if "neuron_dtypes" in sys.modules:
        return
    try:
        importlib.import_module("neuron_dtypes")
    except ImportError:
        module = types.ModuleType("neuron_dtypes")
        for name in (
            "bfloat16",
            "float16",
            "float32",
            "float8_e4m3",
            "float8_e4m3fn",
            "float8_e5m2",
            *FORMATS,
        ):
            setattr(module, name, getattr(dtypes, name))
        for function in (static_cast, sizeinbytes, finfo, is_float_type):
            setattr(module, function.__name__, function)
        sys.modules["neuron_dtypes"] = module
        for name, form in FORMATS.items():
            np.sctypeDict[name] = np.dtype([(name, form.word)])  # type: ignore[assignment]


def static_cast(value: Any, dtype: Any) -> np.ndarray:
    """Convert an array or a number; packed types are packed, or widened to float32, along the last
    axis.
    """
    array = value if hasattr(value, "dtype") else np.asarray(value)
    source = (
        array.dtype.names[0] if array.dtype.names else dict(array.dtype.metadata or {}).get("nki")
    )
    if source in FORMATS:
        return unpack(array, source).astype(np.dtype(dtype))
    name = str(dtype)
    if name in FORMATS:
        return for_reference(pack(np.asarray(array, dtype=np.float32), name), name)
    return array.astype(np.dtype(dtype))


def sizeinbytes(dtype: Any) -> int:
    """Return the bytes of one element."""
    return (
        FORMATS[str(dtype)].word().itemsize if str(dtype) in FORMATS else np.dtype(dtype).itemsize
    )


def is_float_type(dtype: Any) -> bool:
    """Return whether a type is a floating-point type."""
    return np.dtype(dtype).kind in "fV"


def finfo(dtype: Any) -> Any:
    """Return the limits of a floating-point type."""
    return ml_dtypes.finfo(np.dtype(dtype))  # type: ignore[no-untyped-call]
