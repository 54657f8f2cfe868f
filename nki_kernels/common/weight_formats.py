"""Formats of weights, and host-side forms that the kernels take beside plain bfloat16."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

WEIGHT_FORMATS = ("bfloat16", "float8_e4m3", "float8_e5m2")
ITEM_BYTES = {"bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1}
# Four elements a word, a power of two for each 8 words of 8 partitions: Trainium 3 and later.
MX_WORD_BYTES = {"float4_e2m1fn_x4": 2, "float8_e4m3fn_x4": 4, "float8_e5m2_x4": 4}
MX_GROUP = 32  # elements that share a power of two
_SMALLEST = 2.0**-100  # of a number whose three terms are normal bfloat16 numbers


def split_parts(weight_EXY: NDArray[Any], parts: int, halves: int = 1) -> NDArray[Any]:
    """Return [E, parts, X, Y / parts], the columns of every matrix cut into parts.

    Where an expert does not fit on chip, its weights are loaded in parts of their columns, whose
    rows are short; laid out like this, the rows of a part follow each other.

    Args:
        weight_EXY: [E, X, Y] weights, as gate and up [E, H, 2I] or down [E, I, H].
        parts: a divisor of the columns of a half.
        halves: 2 for gate and up, each of which gives a part its share; else 1.

    Raises:
        ValueError: the parts are not equal.
    """
    E, X, Y = weight_EXY.shape
    if Y % (parts * halves):
        raise ValueError(
            f"parts={parts}: must divide the {Y // halves} columns of weight_EXY "
            f"{[E, X, Y]}. Use best_parts()."
        )
    cut = weight_EXY.reshape(E, X, halves, parts, Y // halves // parts)
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 2, 4)).reshape(E, parts, X, Y // parts)


def bias_terms(bias_EH: NDArray[Any], scale_EH: NDArray[Any]) -> NDArray[Any]:
    """Return [E, 3, H] bfloat16 terms of a down bias in units of the accumulator.

    The scale of an output channel multiplies the accumulator, to which the bias was added.

    Args:
        bias_EH: [E, H], finite.
        scale_EH: [E, H] or [E, 1], finite; where it is 0, so must the bias be.
    """
    scale = np.asarray(scale_EH, np.float32)
    quotient = np.asarray(bias_EH, np.float32) / np.where(scale == 0, np.float32(1), scale)
    return three_terms(np.where(np.abs(quotient) < _SMALLEST, np.float32(0), quotient))


def three_terms(scale_EH: NDArray[Any]) -> NDArray[Any]:
    """Return [E, 3, H] bfloat16 numbers whose sum over axis 1 is the float32 input, exactly.

    Three times 8 bits of mantissa hold the 24 of float32; each rest is exact in float32.

    Args:
        scale_EH: [E, H] float32, magnitudes above 2**-100.

    Raises:
        ValueError: a scale is not finite or too small to be split.
    """
    rest = np.asarray(scale_EH, np.float32)
    if not np.isfinite(rest).all() or (np.abs(rest[rest != 0]) < _SMALLEST).any():
        raise ValueError(
            f"scale_EH {list(rest.shape)}: must be finite, with magnitudes above 2**-100. "
            "Quantise the weights again."
        )
    terms = []
    for _ in range(3):
        term = rest.astype(ml_dtypes.bfloat16)
        terms.append(term)
        rest = rest - term.astype(np.float32)
    return np.stack(terms, axis=1)
