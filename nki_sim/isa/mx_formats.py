"""Packed x4 elements and shared power-of-two scales of the MX formats, as pure functions.

Slot j of a packed fp8 element is byte j, little endian; a packed fp4 element holds slots 0 and 1 in
the low and high nibble of byte 0, slots 2 and 3 in byte 1 (aws-neuron-sdk, nki/deep-dives/
mxfp-matmul.rst). A scale byte s means 2^(s - 127), 255 means NaN (OCP Microscaling 1.0).
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

GROUP_PARTITIONS: Final = 8
GROUP_SLOTS: Final = 4
_SCALE_BIAS: Final = 127
_SCALE_NAN: Final = 255
FP8_OF_PACKED: Final[dict[str, np.dtype[Any]]] = {
    "float8_e4m3fn_x4": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2_x4": np.dtype(ml_dtypes.float8_e5m2),
}
_LOW_HALF: Final = 0 if sys.byteorder == "little" else 1
_LARGEST_EXPONENT: Final = {"float8_e4m3fn_x4": 8, "float8_e5m2_x4": 15}
_LARGEST_FINITE: Final = {"float8_e4m3fn_x4": 448.0, "float8_e5m2_x4": 57344.0}
_FP4_VALUES: Final = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_FP8_VALUES: Final = {
    name: np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    for name, dtype in FP8_OF_PACKED.items()
}


def unpack(packed_PC: Array, dtype: str) -> Array:
    """Decode packed elements [P, C] to float32 values [P, 4, C], one row per slot."""
    partitions, columns = packed_PC.shape
    values = np.empty((partitions, GROUP_SLOTS, columns), np.float32)
    as_bytes = np.ascontiguousarray(packed_PC).view(np.uint8)
    as_bytes = as_bytes.reshape(partitions, columns, packed_PC.dtype.itemsize)
    for slot in range(GROUP_SLOTS):
        table = _FP8_VALUES.get(dtype, _FP4_VALUES)
        codes: Array = as_bytes[:, :, slot if dtype in _FP8_VALUES else slot // 2]
        if dtype not in _FP8_VALUES:
            codes = (codes >> (4 * (slot % 2))) & 15
        np.take(table, codes, out=values[:, slot], mode="clip")
    return values


def pack_fp8(values: Array, dtype: str) -> Array:
    """Encode float32 values [..., 4] as packed fp8 elements [...]: nearest even, saturating."""
    contiguous = np.ascontiguousarray(values, np.float32)
    halves = contiguous.view(np.uint16).reshape(*contiguous.shape, 2)
    if halves[..., _LOW_HALF].any():
        codes = _encode_fp8(contiguous, dtype)
    else:  # bfloat16 in disguise: 2^16 different values
        codes = np.take(_fp8_codes(dtype), halves[..., 1 - _LOW_HALF])
    return np.ascontiguousarray(codes).view(np.uint32)[..., 0]


def _encode_fp8(values: Array, dtype: str) -> Array:
    limit = np.float32(_LARGEST_FINITE[dtype])
    return np.clip(values, -limit, limit).astype(FP8_OF_PACKED[dtype]).view(np.uint8)


@functools.cache
def _fp8_codes(dtype: str) -> Array:
    """The fp8 code of every bfloat16 bit pattern."""
    halves = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):
        return _encode_fp8(halves.view(np.float32), dtype)


def dequantize(packed_PC: Array, scale_bytes: Array, dtype: str) -> Array:
    """Decode packed elements and apply their scales.

    Args:
        packed_PC: [P, C] packed elements.
        scale_bytes: [P / 8, C], one per group of 8 partitions x 4 slots.
        dtype: name of a packed type.

    Returns:
        [4 P, C] float32, packed slot inside partition.
    """
    values = unpack(packed_PC, dtype)
    values *= np.repeat(scale_factors(scale_bytes), GROUP_PARTITIONS, axis=0)[:, None, :]
    return values.reshape(GROUP_SLOTS * packed_PC.shape[0], packed_PC.shape[1])


def scale_factors(scale_bytes: Array) -> Array:
    """Decode scale bytes to float32 powers of two; 255 gives NaN."""
    exponents = scale_bytes.astype(np.int32) - _SCALE_BIAS
    factors = np.ldexp(np.float32(1), exponents).astype(np.float32)
    return np.where(scale_bytes == _SCALE_NAN, np.float32(np.nan), factors)


def quantize(values_PF: Array, dtype: str, headroom: int = 1) -> tuple[Array, Array]:
    """Quantize groups of 8 partitions x 4 neighbours with one shared power of two each.

    The exponent is floor(log2(largest magnitude)) - (largest exponent of the format - headroom).
    Without headroom (before NKI 0.5) magnitudes above the largest finite number saturate.

    Args:
        values_PF: [P, F] float32; P a multiple of 8, F of 4.
        dtype: name of a packed fp8 type.
        headroom: powers of two left free above the largest magnitude, 1 or 0.

    Returns:
        packed elements [P, F / 4] uint32 and scale bytes [P / 8, F / 4] uint8.
    """
    partitions, elements = values_PF.shape
    columns = elements // GROUP_SLOTS
    slots = [
        values_PF.reshape(partitions, columns, GROUP_SLOTS)[:, :, k] for k in range(GROUP_SLOTS)
    ]
    magnitudes = np.abs(slots[0])
    for slot in slots[1:]:
        np.maximum(magnitudes, np.abs(slot), out=magnitudes)
    largest = magnitudes.reshape(-1, GROUP_PARTITIONS, columns).max(axis=1)
    _, exponent = np.frexp(largest)  # largest = m * 2^exponent with 0.5 <= m < 1
    shared = exponent - 1 - (_LARGEST_EXPONENT[dtype] - headroom)
    scale = np.maximum(shared + _SCALE_BIAS, 0)  # far below NaN: no float32 is so large
    scale = np.where(largest == 0, 0, scale)
    is_finite = np.isfinite(largest)
    factors = np.ldexp(np.float32(1), _SCALE_BIAS - scale).astype(np.float32)  # exact
    factors = np.repeat(factors, GROUP_PARTITIONS, axis=0)
    scaled = np.empty((partitions, columns, GROUP_SLOTS), np.float32)
    for k, slot in enumerate(slots):
        np.multiply(slot, factors, out=scaled[:, :, k])
    packed = pack_fp8(scaled, dtype)
    return packed, np.where(is_finite, scale, _SCALE_NAN).astype(np.uint8)
