"""Element types: names, NumPy interplay, and the rounding rules."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest
import torch

from nki_sim import dtypes
from nki_sim.dtypes import ALL, DType, as_dtype, convert

FLOATS = [d for d in ALL if d.kind == "f" and d.itemsize < 4 and d is not dtypes.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_type_is_its_name(dtype: DType) -> None:
    assert as_dtype(str(dtype)) is dtype
    assert dtype == str(dtype)
    assert {dtype: 1}[str(dtype)] == 1
    assert pickle.loads(pickle.dumps(dtype)) is dtype
    assert dtype.itemsize == dtype.numpy.itemsize


@pytest.mark.parametrize("dtype", [d for d in ALL if d.kind != "x" and d != "tfloat32"], ids=str)
def test_numpy_takes_a_type(dtype: DType) -> None:
    assert np.zeros(3, dtype).dtype == dtype.numpy
    assert np.ones(3).astype(dtype).dtype == dtype.numpy
    assert as_dtype(np.dtype(dtype.numpy)) is dtype
    assert as_dtype(np.zeros(1, dtype).dtype.type) is dtype


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        ("float8e4", dtypes.float8_e4m3),
        (torch.bfloat16, dtypes.bfloat16),
        (torch.float8_e4m3fn, dtypes.float8_e4m3fn),
        (torch.int32, dtypes.int32),
        (np.float32, dtypes.float32),
        (ml_dtypes.bfloat16, dtypes.bfloat16),
        ("bool_", dtypes.bool_),
    ],
    ids=str,
)
def test_other_spellings_are_understood(spelling: object, dtype: DType) -> None:
    assert as_dtype(spelling) is dtype


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(TypeError, match="complex"):
        as_dtype(np.complex64)
    with pytest.raises(TypeError, match="float7"):
        as_dtype("float7")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_value_half_way_rounds_to_the_even_neighbour(dtype: DType) -> None:
    """1 + eps / 2 goes to 1, 1 + 3 eps / 2 to 1 + 2 eps."""
    eps = float(ml_dtypes.finfo(dtype.numpy).eps)
    values = np.array([1 + eps / 2, 1 + 3 * eps / 2, -1 - eps / 2], np.float32)
    rounded = convert(values, dtype).astype(np.float64)
    assert rounded.tolist() == [1, 1 + 2 * eps, -1]


@pytest.mark.parametrize(
    ("dtype", "largest", "overflow"),
    [
        (dtypes.float8_e4m3, 240.0, np.inf),
        (dtypes.float8_e5m2, 57344.0, np.inf),
        (dtypes.float8_e4m3fn, 448.0, np.nan),
        (dtypes.float16, 65504.0, np.inf),
        (dtypes.bfloat16, 3.3895313892515355e38, np.inf),
    ],
    ids=str,
)
def test_overflow_does_not_saturate(dtype: DType, largest: float, overflow: float) -> None:
    with np.errstate(over="ignore"):
        values = np.array([largest, largest * 1.2, -largest * 1.2], np.float32)
        rounded = convert(values, dtype).astype(np.float64)
    assert rounded[0] == largest
    assert np.array_equal(rounded[1:], [overflow, -overflow], equal_nan=True)


@pytest.mark.parametrize("dtype", [d for d in ALL if d.kind in "iu" and d.itemsize <= 4], ids=str)
def test_a_float_becomes_an_integer_by_rounding_to_even_and_saturating(dtype: DType) -> None:
    bounds = np.iinfo(dtype.numpy)
    values = np.array([0.5, 1.5, 2.5, 126.5, 1e30, -1e30, np.inf, -np.inf], np.float32)
    top, bottom = int(bounds.max), int(bounds.min)
    expected = [0, 2, 2, 126, top, bottom, top, bottom]
    assert convert(values, dtype).astype(np.int64).tolist() == expected
    signed = convert(np.array([-1.5, -0.5], np.float32), dtype).astype(np.int64).tolist()
    assert signed == ([-2, 0] if bottom < 0 else [0, 0])


def test_integers_convert_exactly_and_saturate() -> None:
    values = np.array([2**31 - 1, -(2**31), 300, -5], np.int32)
    assert convert(values, dtypes.uint8).tolist() == [255, 0, 255, 0]
    assert convert(values, dtypes.int32) is values


def test_tfloat32_keeps_ten_bits_of_the_mantissa() -> None:
    eps = 2.0**-10
    values = np.array([1 + eps, 1 + eps / 2, 1 + 3 * eps / 2, np.inf, 3.0e38], np.float32)
    rounded = convert(values, dtypes.tfloat32)
    assert rounded[:4].tolist() == [1 + eps, 1, 1 + 2 * eps, np.inf]
    assert (rounded.view(np.uint32) & np.uint32(0x1FFF)).max() == 0
    assert np.isnan(convert(np.array([np.nan], np.float32), dtypes.tfloat32)[0])


@pytest.mark.parametrize("dtype", [d for d in ALL if d.kind == "f" and d.itemsize < 4], ids=str)
def test_widening_keeps_every_value(dtype: DType) -> None:
    bits = np.arange(256 if dtype.itemsize == 1 else 65536, dtype=f"u{dtype.itemsize}")
    values = bits.view(dtype.numpy).reshape(-1, 64)[:, ::2]  # strided, as slices of tiles are
    widened = dtypes.to_float32(values)
    assert widened.dtype == np.float32
    assert np.array_equal(widened, values.astype(np.float32), equal_nan=True)


def test_anything_but_zero_is_true() -> None:
    values = np.array([0.0, -0.0, 1e-30, -2.0], np.float32)
    assert convert(values, dtypes.bool_).tolist() == [False, False, True, True]
