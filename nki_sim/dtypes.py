"""Element types: names, storage, and the rounding rules between them.

A `DType` is a string, so it hashes, compares and prints as its name and NumPy accepts it; the NumPy
type it is stored in is its `numpy` attribute. The packed x4 types hold four elements in one
unsigned integer and take no part in arithmetic.

Rounding rules (language guide and NKI 0.6 release notes): float to narrower float rounds to nearest
even and overflows to infinity, or NaN where the format has none; float to integer rounds to nearest
even and saturates.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class DType(str):
    """An element type of the language.

    Attributes:
        numpy: the NumPy type it is stored in.
        itemsize: bytes of one element.
        kind: "f" float, "i" signed, "u" unsigned, "b" bool, "x" packed x4.
    """

    __slots__ = ("itemsize", "kind", "numpy")

    numpy: np.dtype[Any]
    itemsize: int
    kind: str

    def __new__(cls, name: str, storage: Any = None, kind: str = "") -> DType:
        """Return the type called `name`; `storage` and `kind` only define a new one."""
        if storage is None:
            return as_dtype(name)
        self = super().__new__(cls, name)
        self.numpy = np.dtype(storage)
        self.itemsize = self.numpy.itemsize
        self.kind = kind
        return self

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type, under the name that NumPy requests."""
        return self.numpy

    @property
    def is_float(self) -> bool:
        """Whether arithmetic on it is floating point."""
        return self.kind == "f"

    @property
    def is_integer(self) -> bool:
        """Whether it is a signed or unsigned integer (bool left out)."""
        return self.kind in "iu"

    def __reduce__(self) -> tuple[Any, ...]:
        return as_dtype, (str(self),)


bool_: Final = DType("bool", np.bool_, "b")
int8: Final = DType("int8", np.int8, "i")
int16: Final = DType("int16", np.int16, "i")
int32: Final = DType("int32", np.int32, "i")
uint8: Final = DType("uint8", np.uint8, "u")
uint16: Final = DType("uint16", np.uint16, "u")
uint32: Final = DType("uint32", np.uint32, "u")
float16: Final = DType("float16", np.float16, "f")
float32: Final = DType("float32", np.float32, "f")
bfloat16: Final = DType("bfloat16", ml_dtypes.bfloat16, "f")
tfloat32: Final = DType("tfloat32", np.float32, "f")
float8_e4m3: Final = DType("float8_e4m3", ml_dtypes.float8_e4m3, "f")
float8_e4m3fn: Final = DType("float8_e4m3fn", ml_dtypes.float8_e4m3fn, "f")
float8_e5m2: Final = DType("float8_e5m2", ml_dtypes.float8_e5m2, "f")
float8_e8m0fnu: Final = DType("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu, "f")
float8_e4m3fn_x4: Final = DType("float8_e4m3fn_x4", np.uint32, "x")
float8_e5m2_x4: Final = DType("float8_e5m2_x4", np.uint32, "x")
float4_e2m1fn_x4: Final = DType("float4_e2m1fn_x4", np.uint16, "x")
# Tensors of the host only: no engine computes in them.
int64: Final = DType("int64", np.int64, "i")
uint64: Final = DType("uint64", np.uint64, "u")
float64: Final = DType("float64", np.float64, "f")

ALL: Final = tuple([each for each in tuple(globals().values()) if isinstance(each, DType)])
FP8: Final = frozenset((float8_e4m3, float8_e4m3fn, float8_e5m2))
_BY_NAME: Final[dict[str, DType]] = {str(d): d for d in ALL} | {
    "bool_": bool_,
    "float8e4": float8_e4m3,  # spelling of tensors that come from a framework
    "float8e5": float8_e5m2,
    "float8_e4m3_x4": float8_e4m3fn_x4,
}
_BY_NUMPY: Final[dict[Any, DType]] = {}
for _dtype in ALL:
    if _dtype.kind != "x":
        _BY_NUMPY.setdefault(_dtype.numpy, _dtype)


# All 256 values of each 8-bit float: looking them up is three times as fast as converting.
_BYTE_TABLES: Final[dict[Any, Array]] = {
    dtype.numpy: np.arange(256, dtype=np.uint8).view(dtype.numpy).astype(np.float32)
    for dtype in ALL
    if dtype.kind == "f" and dtype.itemsize == 1
}


def as_dtype(value: Any) -> DType:
    """Return the `DType` for a name, a NumPy or torch type, or a `DType`.

    Raises:
        TypeError: no such element type.
    """
    if type(value) is DType:
        return value
    if isinstance(value, str) and value in _BY_NAME:
        return _BY_NAME[value]
    if isinstance(value, np.dtype) and value.metadata is not None and "nki" in value.metadata:
        return _BY_NAME[value.metadata["nki"]]
    if isinstance(value, np.dtype) and value.names is not None and len(value.names) == 1:
        packed = _BY_NAME.get(value.names[0])  # as the vendor's references name packed arrays
        if packed is not None and packed.kind == "x" and packed.itemsize == value.itemsize:
            return packed
    name = str(value).removeprefix("torch.")
    if name in _BY_NAME:
        return _BY_NAME[name]
    try:
        numpy_dtype = np.dtype(value)
    except TypeError:
        raise TypeError(f"dtype={value!r}: must be an element type of nki.language.") from None
    if numpy_dtype in _BY_NUMPY:
        return _BY_NUMPY[numpy_dtype]
    raise TypeError(f"dtype={value!r}: must be an element type of nki.language.")


def to_float32(array: Array) -> Array:
    """Widen to float32; returns the input itself where it is float32."""
    if array.dtype == np.float32:
        return array
    table = _BYTE_TABLES.get(array.dtype)
    if table is not None:
        return table[array.view(np.uint8)]
    return array.astype(np.float32)


def is_cast(source: np.dtype[Any], dtype: DType) -> bool:
    """Tell whether assigning elements of NumPy's `source` rounds them as `convert` does."""
    if dtype is tfloat32:
        return False
    return source == dtype.numpy or (source == np.float32 and dtype.kind == "f")


def convert(values: Array, dtype: DType) -> Array:
    """Round an array of any arithmetic type to `dtype`, by the rules of the module docstring."""
    target = dtype.numpy
    if dtype is tfloat32:
        return _round_to_tfloat32(to_float32(values))
    if values.dtype == target:
        return values
    if dtype.kind in "iu" and values.dtype.kind not in "iub":
        return _saturate(values, target)
    if dtype.kind in "iu" and values.dtype.kind in "iu":
        bounds = np.iinfo(target)
        return np.clip(values.astype(np.int64), bounds.min, bounds.max).astype(target)
    if dtype.kind == "b":
        return np.asarray(values != 0)
    if values.dtype.kind in "iu" and target.itemsize < 4:
        return values.astype(np.float32).astype(target)
    return values.astype(target)


def _saturate(values: Array, target: np.dtype[Any]) -> Array:
    """Float to integer: nearest even, saturating; NaN becomes 0 (undocumented)."""
    bounds = np.iinfo(target)
    rounded = np.nan_to_num(np.rint(values.astype(np.float64)), posinf=np.inf, neginf=-np.inf)
    result: Array = np.clip(rounded, bounds.min, bounds.max).astype(target)
    return result


def _round_to_tfloat32(values: Array) -> Array:
    """Keep 10 mantissa bits of a float32 array, rounding to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(13)) & np.uint32(1)
    rounded = (bits + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000)
    finite = (bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    return np.where(finite, rounded, bits).view(np.float32)
