"""Rounding of float weights to bfloat16."""

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_float_weight(name: str, weight: Tensor) -> None:
    """Refuse anything but a float32, bfloat16 or float16 tensor.

    Raises:
        TypeError: naming the dtype found.
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name} is a {type(weight).__name__}: must be a torch.Tensor.")
    if weight.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{name}.dtype={weight.dtype}: must be float32, bfloat16 or float16. "
            f"Convert it first; codes of a quantised weight go through its own decoder."
        )


def is_finite(tensor: Tensor) -> bool:
    """Say whether a float tensor is free of NaN and infinity, in one pass and without a copy."""
    if tensor.numel() == 0:
        return True
    # Both extremes are NaN if any element is; this is far faster than a mask of the tensor's size.
    lowest, highest = torch.aminmax(tensor)
    return bool(torch.isfinite(lowest) & torch.isfinite(highest))


def round_to_bf16(weight: Tensor) -> Tensor:
    """Round to bfloat16, to nearest and ties to even; refuse values that bfloat16 cannot hold.

    Args:
        weight: any shape, float32, bfloat16 or float16.

    Returns:
        The weight in bfloat16; the tensor itself if it is bfloat16 already.

    Raises:
        TypeError: for another dtype.
        ValueError: for NaN, infinity, or a magnitude that rounds to infinity.
    """
    check_float_weight("weight", weight)
    rounded = weight.to(torch.bfloat16)
    if not is_finite(rounded):
        count = int((~torch.isfinite(rounded)).sum())
        raise ValueError(
            f"weight {list(weight.shape)} holds {count} values that are NaN, infinite or above "
            f"{torch.finfo(torch.bfloat16).max:.4g}: bfloat16 weights must be finite. Repair the "
            "weight, or keep float32."
        )
    return rounded
