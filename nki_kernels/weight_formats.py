"""Host-side forms of weights that the kernels take beside plain bfloat16."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


def three_terms(scale_EH: NDArray[Any]) -> NDArray[Any]:
    """Return [E, 3, H] bfloat16 numbers whose sum over axis 1 is the float32 input, exactly.

    Three times 8 bits of mantissa hold the 24 of float32; each rest is exact in float32.

    Args:
        scale_EH: [E, H] float32, magnitudes above 2**-100.

    Raises:
        ValueError: a scale is not finite or too small to be split.
    """
    rest = np.asarray(scale_EH, np.float32)
    if not np.isfinite(rest).all() or (np.abs(rest[rest != 0]) < 2.0**-100).any():
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
