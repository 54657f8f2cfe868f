"""Activations as MX words of 8 bits: the values that are left, as a formula; NumPy.

Each 32 consecutive elements of the last axis share 2^(floor(log2(largest magnitude)) - 7), so that
the largest is in the upper half of float8_e4m3fn, and are rounded to nearest in that type (OCP
Microscaling 1.0; the exponent is that of nki.isa.quantize_mx since NKI 0.5).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from nki_kernels.common.expert_reference import Array
from nki_kernels.common.weight_formats import MX_GROUP

_LARGEST_EXPONENT, _HEADROOM = 8, 1  # of float8_e4m3fn; binades left free above the largest
_LEAST_EXPONENT = -127  # of a scale


def quantized_words(values: Array) -> Array:
    """Return [.., X] values as MX words of float8_e4m3fn hold them.

    Args:
        values: finite numbers; they are rounded to bfloat16 first, as the instruction reads them.
    """
    width = values.shape[-1]
    padded = np.zeros((*values.shape[:-1], -(-width // MX_GROUP) * MX_GROUP), np.float64)
    padded[..., :width] = values.astype(ml_dtypes.bfloat16)
    groups = padded.reshape(*values.shape[:-1], -1, MX_GROUP)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    exponent = np.frexp(largest)[1] - 1 - (_LARGEST_EXPONENT - _HEADROOM)
    scale = np.ldexp(1.0, np.maximum(exponent, _LEAST_EXPONENT))
    codes = (groups / scale).astype(ml_dtypes.float8_e4m3fn)
    kept = codes.astype(np.float64) * scale
    return np.asarray(kept.reshape(padded.shape)[..., :width].astype(values.dtype))
