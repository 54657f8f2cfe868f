"""Kimi Delta Attention: the delta rule with a decay for each number of a key.

Queries, keys and values are mixed by short convolutions of their own; what the memory answers is
normalised head by head and gated by a sigmoid. How decays and gates are made of the hidden state is
the family's.
Source: Kimi Linear, arXiv 2510.26692.

Letters: those of `delta_net`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuron_moe.models.attention import StateView
from neuron_moe.models.decoder import Tokens
from neuron_moe.models.delta_net import DeltaLayer, DeltaNetSizes, Inputs
from neuron_moe.models.layers import unit_rms

MIXED = ("query", "key", "value")  # by the short convolution
# What transformers' modules call our parameters of such a layer.
MODULES = {
    **{f"{name}_proj": f"{name[0]}_proj" for name in (*MIXED, "out")},
    "conv_weight": "conv1d.weight",
    "norm_weight": "o_norm.weight",
    **{f"self_attn.{name}": f"self_attn.forget_gate.{name}" for name in ("f_", "A_log", "dt_bias")},
}


class ChannelDeltaAttention(DeltaLayer):
    """Projections, gates and a norm around an exchangeable recurrence.

    Args:
        sizes: of the layer.
        eps: of the norm.
        dtype: of the projections.
        conv_dtype: of the short convolution.
        decay_shape: of what is learned of the decay of each head.

    Attributes:
        f_proj: makes what decays are made of, in families that have no other `steps`.
        g_proj: makes the gates of what is answered, in families that have no other `gates`.
        lowest_decay: what the logarithm of a decay is above; None for no such bound.
    """

    f_proj: nn.Linear
    g_proj: nn.Linear
    lowest_decay: float | None = None

    def __init__(
        self,
        sizes: DeltaNetSizes,
        eps: float,
        dtype: torch.dtype,
        conv_dtype: torch.dtype,
        decay_shape: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.sizes, self.eps = sizes, eps
        size, heads = sizes.hidden_size, sizes.num_key_heads
        width = heads * sizes.key_size
        self.query_proj, self.key_proj, self.value_proj = (
            nn.Linear(size, width, bias=False, dtype=dtype) for _ in range(3)
        )
        self.b_proj = nn.Linear(size, heads, bias=False, dtype=dtype)
        self.out_proj = nn.Linear(width, size, bias=False, dtype=dtype)
        taps_C1W = torch.zeros(3 * width, 1, sizes.conv_width, dtype=conv_dtype)
        self.conv_weight = nn.Parameter(taps_C1W)
        self.dt_bias = nn.Parameter(torch.zeros(width, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.zeros(decay_shape, dtype=torch.float32))
        self.norm_weight = nn.Parameter(torch.ones(sizes.key_size, dtype=dtype))

    def steps(self, hidden_USH: Tensor) -> Tensor:
        """Return what decays are made of, [U, S, N * D]."""
        made: Tensor = self.f_proj(hidden_USH)
        return made

    def gates(self, hidden_USH: Tensor) -> Tensor:
        """Return the logits of the gates of what is answered, [U, S, N * V]."""
        made: Tensor = self.g_proj(hidden_USH)
        return made

    def log_decay(self, step_USND: Tensor) -> Tensor:
        """Return the logarithm of the decay of each number of a key, [U, S, N, D] float32."""
        speed_N1 = self.A_log.exp().view(-1, 1)
        if self.lowest_decay is None:
            return -speed_N1 * F.softplus(step_USND)
        return self.lowest_decay * (speed_N1 * step_USND).sigmoid()

    def forward(self, hidden_USH: Tensor, tokens: Tokens, view: StateView | None) -> Tensor:
        """Return the attention output `[U, S, H]`; arguments as in `DecoderLayer`."""
        parts = (self.query_proj, self.key_proj, self.value_proj)
        mixed_USC = torch.cat([part(hidden_USH) for part in parts], dim=-1)
        step = self.steps(hidden_USH).float() + self.dt_bias
        heads = (*hidden_USH.shape[:2], -1, self.sizes.key_size)
        rate_USN = self.b_proj(hidden_USH).float().sigmoid()
        inputs = Inputs(mixed_USC, self.log_decay(step.view(heads)), rate_USN, tokens.real_US)
        normed_USNV = unit_rms(self.core(self, inputs, view), self.eps) * self.norm_weight.float()
        gate_USNV = self.gates(hidden_USH).float().view(heads).sigmoid()
        out_USH: Tensor = self.out_proj((normed_USNV * gate_USNV).flatten(2).to(hidden_USH.dtype))
        return out_USH
