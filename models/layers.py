"""Small layers that decoder models share.

Letters: H hidden, I intermediate.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def unit_rms(hidden: Tensor, eps: float) -> Tensor:
    """Return `[..., H]` divided by the root mean square of each row, in float32."""
    wide = hidden.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """Divide by the root mean square and scale; float32 inside, output in the input's dtype."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.eps = eps

    def forward(self, hidden_USH: Tensor) -> Tensor:
        """Return the normalised hidden states `[..., H]`."""
        return (self.weight.float() * unit_rms(hidden_USH, self.eps)).to(hidden_USH.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) without biases, of a dense layer; whole on every rank."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [..., H]; the product is computed in float32."""
        product = F.silu(self.gate_proj(hidden).float()) * self.up_proj(hidden).float()
        out: Tensor = self.down_proj(product.to(hidden.dtype))
        return out
