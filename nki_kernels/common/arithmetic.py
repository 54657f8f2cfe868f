"""Two operations in one instruction, exact integer arithmetic in float32, and running numbers.

Integers stay below 2^24, where float32 has all of them. A quotient is rounded by the conversion to
int32, which goes to the nearest: an offset of half a step less or more makes it a floor or ceiling.
"""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.chip import PARTITIONS


def apply_two(
    dst: nl.ndarray, data: nl.ndarray, op0: Any, first: Any, op1: Any, second: Any
) -> None:
    """Write (data op0 first) op1 second, each a number or a (P, 1) tile."""
    nisa.tensor_scalar(dst=dst, data=data, op0=op0, operand0=first, op1=op1, operand1=second)


def apply_with(
    dst: nl.ndarray, data: nl.ndarray, op0: Any, number: Any, op1: Any, other: nl.ndarray
) -> None:
    """Write (data op0 number) op1 other, a tile like data; the number may be a (P, 1) tile."""
    nisa.scalar_tensor_tensor(dst=dst, data=data, op0=op0, operand0=number, op1=op1, operand1=other)


def add(dst: nl.ndarray, data1: nl.ndarray, data2: nl.ndarray) -> None:
    """Write the sum of two tiles."""
    nisa.tensor_tensor(dst=dst, data1=data1, data2=data2, op=nl.add)


def subtract(dst: nl.ndarray, data1: nl.ndarray, data2: nl.ndarray) -> None:
    """Write the difference of two tiles."""
    nisa.tensor_tensor(dst=dst, data1=data1, data2=data2, op=nl.subtract)


def add_up(dst: nl.ndarray, data1: nl.ndarray, data2: nl.ndarray) -> None:
    """Write the running sums of two tiles along the free axis."""
    nisa.tensor_tensor_scan(dst, data1, data2, initial=0.0, op0=nl.add, op1=nl.add)


def count_up(width: int, dtype: nl.DType) -> nl.ndarray:
    """Return 0, 1, ... along the free axis of every partition, [128, width]."""
    numbers_sb = nl.ndarray((PARTITIONS, width), dtype, buffer=nl.sbuf)
    nisa.iota(dst=numbers_sb, pattern=[[1, width]], offset=0, channel_multiplier=0)
    return numbers_sb


def divide_down(dst: nl.ndarray, data: nl.ndarray, divisor: int) -> None:
    """Write floor(data / divisor) of integers >= -1 to an int32 tile.

    It is round((data - (divisor - 1) / 2) / divisor), 1 / (2 divisor) away from half-way at least.
    Three float32 roundings of a quotient q cost at most 3 q 2^-24: less, as q divisor <= 2^20.
    """
    half = -(divisor - 1) / (2.0 * divisor)
    apply_two(dst, data, nl.multiply, 1.0 / divisor, nl.add, half)


def divide_up(dst: nl.ndarray, data: nl.ndarray, divisor: int) -> None:
    """Write ceil(data / divisor) of integers >= 0 to an int32 tile; as exact as `divide_down`."""
    half = (divisor - 1) / (2.0 * divisor)
    apply_two(dst, data, nl.multiply, 1.0 / divisor, nl.add, half)
