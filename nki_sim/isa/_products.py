"""Matrix products whose bits depend on the operands alone.

A BLAS adds in an order of its own, which hangs on the instruction set of the processor, on the
shape of the whole product and on where an array is. So each element here is the exact sum of its
products, rounded to float64 and from there to float32. Products of float32 numbers are exact in
float64. With narrow types all their sums mostly are, too: no order matters then. Else a BLAS is off
by less than a bound that follows from the lengths of the two columns, and the elements that
may round either way inside that bound are summed exactly.

K: contraction; M, N: columns of the left and of the right operand.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from nki_sim.dtypes import Array

_EXACT: Final = 2.0**53  # float64 holds all whole numbers up to here
_ROUNDING: Final = 2.0**-52  # twice the largest relative error of one rounding
# A float32 as bits.
_MANTISSA_BITS: Final = 23
_LAST, _IMPLIED, _MAGNITUDE = np.uint32(1), np.uint32(1 << _MANTISSA_BITS), np.uint32(0x7FFFFFFF)
_NOT_FINITE: Final = 0xFF  # exponent


def matrix_product(left_KM: Array, right_KN: Array) -> Array:
    """Return ``left_KM.T @ right_KN`` of float32 arrays, every element rounded from its exact sum.

    A sum beyond float32 becomes infinite, zero is 0.0, what is no number the positive quiet NaN.
    """
    wide_KM, wide_KN = left_KM.astype(np.float64), right_KN.astype(np.float64)
    sum_MN = wide_KM.T @ wide_KN
    product_MN: Array = sum_MN.astype(np.float32)
    product_MN += np.float32(0)  # turns -0.0, with which some BLAS begin, into 0.0
    most = _EXACT / len(left_KM)
    reach_M, reach_N = _reach(left_KM), _reach(right_KN)
    most_M, most_N = reach_M.max(), reach_N.max()
    if most_M * most_N <= most:
        return product_MN
    # Only these columns have sums that a BLAS may round.
    rows, columns = (np.flatnonzero(r > most) for r in (reach_M * most_N, reach_N * most_M))
    if rows.size * columns.size < product_MN.size:
        wide_KM, wide_KN = wide_KM[:, rows], wide_KN[:, columns]
        sum_MN = sum_MN[rows][:, columns]
    length_M, length_N = _lengths(wide_KM), _lengths(wide_KN)
    bound_MN = np.multiply.outer(length_M * (len(wide_KM) + 2) * _ROUNDING, length_N)
    low_MN = np.subtract(sum_MN, bound_MN).astype(np.float32)
    high_MN = np.add(sum_MN, bound_MN, out=bound_MN).astype(np.float32)
    at_M, at_N = np.divmod(np.flatnonzero(low_MN < high_MN), columns.size)
    is_rounded = reach_M[rows[at_M]] * reach_N[columns[at_N]] > most
    for row, column in zip(at_M[is_rounded], at_N[is_rounded], strict=True):
        terms_K = wide_KM[:, row] * wide_KN[:, column]
        product_MN[rows[row], columns[column]] = math.fsum(terms_K.tolist())
    if not (np.isfinite(length_M).all() and np.isfinite(length_N).all()):
        product_MN[np.isnan(product_MN)] = np.nan
    return product_MN


def _lengths(wide_KM: Array) -> Array:
    """Return the Euclidean length of each column; two of them bound all sums of products."""
    return np.asarray(np.sqrt(np.einsum("km,km->m", wide_KM, wide_KM)))


def _reach(values_KM: Array) -> Any:
    """Return a bound of each column in steps: in a power of two that divides all of it."""
    bits_KM = np.ascontiguousarray(values_KM).view(np.uint32) & _MAGNITUDE
    used = np.bitwise_or.reduce(bits_KM, axis=0) & (_IMPLIED - _LAST) | _IMPLIED
    largest = np.maximum.reduce(bits_KM, axis=0) >> _MANTISSA_BITS
    bits_KM -= _LAST  # zeros, which every step divides, become the largest
    smallest = (np.minimum.reduce(bits_KM, axis=0) + _LAST) >> _MANTISSA_BITS
    octaves = (largest - smallest).astype(np.int32)
    steps = np.ldexp(2.0 * _IMPLIED / (used & (~used + _LAST)), octaves)
    return np.where(largest == _NOT_FINITE, np.inf, steps)
