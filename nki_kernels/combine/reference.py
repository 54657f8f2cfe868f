"""Reference of combine: the weighted sum."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def combine_ref(slots_PSH: Array, slot_of_pair_TK: Array, affinities_TK: Array) -> Array:
    """Return [T, H] float64: the sum of affinity * slot over choices that have one (not -1)."""
    slots_SH = slots_PSH.astype(np.float64).sum(0)
    rows_TKH = slots_SH[np.maximum(slot_of_pair_TK, 0)]
    has_slot_TK1 = (slot_of_pair_TK >= 0)[..., None]
    weighted_TKH = affinities_TK.astype(np.float64)[..., None] * rows_TKH
    return np.asarray(np.where(has_slot_TK1, weighted_TKH, 0.0).sum(1))
