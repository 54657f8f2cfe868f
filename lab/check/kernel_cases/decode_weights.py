"""What a decode case says of its weights, in the words of a prefill case."""

import dataclasses

import numpy as np

from lab.check.kernel_cases.prefill_weights import Weights
from lab.check.vendor_cases.case import Case, Skipped

CLAMPS = (None, 7.0), (-6.0, 8.0)  # what `clamp` stands for in the vendor's cases
Limits = tuple[float | None, float | None]


def weights_case(case: Case) -> Case:
    """Return the case with its weight format under the prefill cases' name."""
    quant = case.get("quant_dtype") or case.get("weight_dtype") or "bfloat16"
    params = {**case.params, "weight_dtype": "bfloat16" if quant == "float16" else quant}
    return dataclasses.replace(case, params=params)


def fill_clamps(case: Case) -> tuple[Limits, Limits]:
    """Return (lower, upper) clamps of gate and up: named ones, else those of `clamp`."""
    if case.get("clamp"):
        return CLAMPS
    sides = []
    for side in ("gate", "up"):
        bounds = (case.get(f"{side}_clamp_{bound}") for bound in ("lower", "upper"))
        lower, upper = (None if bound is None else float(bound) for bound in bounds)
        sides.append((lower, upper))
    return sides[0], sides[1]


def narrow_down_scale(weights: Weights, wanted: str) -> str:
    """Return what the scales of the down projection belong to; make one per expert if wanted.

    The codes take up the difference, which must be exact.
    """
    if weights.down_scale is None:
        return "none"
    if wanted not in ("channel", "expert"):
        raise Skipped(f"down_scale {wanted!r}: must be channel or expert")
    if wanted == "expert":
        for expert in weights.touched:
            one = weights.down_scale[expert].max()
            codes = weights.down[expert]
            moved = codes.astype(np.float32) * (weights.down_scale[expert] / one)
            narrow = moved.astype(codes.dtype)
            if not np.array_equal(narrow.astype(np.float32), moved):
                raise Skipped("down_scale 'expert': the channels' scales are too far apart")
            weights.down[expert] = narrow
            weights.down_scale[expert] = one
    return wanted
