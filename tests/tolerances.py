"""How far results may differ, argued once.

float32: two orders of summation over n terms differ by about sqrt(n) * 2^-24; with n up to a few
thousand that is below
1e-5 of the largest output.
bfloat16: whoever rounds intermediate results to 8 bits is wrong by some percent. Our layer may be
wrong by at most 1.5 times
as much as the peer's own bfloat16 layer is against its float32 one (root mean square).
"""

import torch
from torch import Tensor

FLOAT32_RELATIVE = 1e-5
BFLOAT16_FACTOR = 1.5


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return max |actual - expected| / max |expected|."""
    scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float((actual.double() - expected.double()).abs().max() / scale)


def rms_error(actual: Tensor, expected: Tensor) -> float:
    """Return the root mean square difference."""
    return float((actual.double() - expected.double()).square().mean().sqrt())
