"""Small layers that decoder models share.

Letters: H hidden.
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Divide by the root mean square and scale; float32 inside, output in the input's dtype."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.eps = eps

    def forward(self, hidden_USH: Tensor) -> Tensor:
        """Return the normalised hidden states `[..., H]`."""
        wide = hidden_USH.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * (wide * scale)).to(hidden_USH.dtype)
