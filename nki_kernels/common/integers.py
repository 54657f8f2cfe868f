"""Exact integer arithmetic in float32, and numbers along the free axis, for index kernels.

Integers stay below 2^24, where float32 has all of them. A quotient is rounded by the conversion to
int32, which goes to the nearest: an offset of half a step less or more makes it a floor or ceiling.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.chip import PARTITIONS


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
    nisa.tensor_scalar(
        dst=dst,
        data=data,
        op0=nl.multiply,
        operand0=1.0 / divisor,
        op1=nl.add,
        operand1=-(divisor - 1) / (2.0 * divisor),
    )


def divide_up(dst: nl.ndarray, data: nl.ndarray, divisor: int) -> None:
    """Write ceil(data / divisor) of integers >= 0 to an int32 tile; as exact as `divide_down`."""
    nisa.tensor_scalar(
        dst=dst,
        data=data,
        op0=nl.multiply,
        operand0=1.0 / divisor,
        op1=nl.add,
        operand1=(divisor - 1) / (2.0 * divisor),
    )
