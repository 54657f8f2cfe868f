"""Independent hyper-connections: a layer between several residual streams.

Each part of a layer reads a weighted sum of the streams and adds its result to each of them with
another weight; both weights of a token are made of its streams.
Source: transformers, `models/hy_v4/modular_hy_v4.py`.

Letters beside those of `decoder`: n residual streams.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuron_moe.models.attention import View
from neuron_moe.models.decoder import DecoderConfig, Tokens
from neuron_moe.moe import MoE


class StreamSizes(NamedTuple):
    """Facts of the streams.

    Attributes:
        num_streams: n.
        hidden_size: H.
        magnitude: of what is added to them.
        eps: added to each weight.
        norm_eps: of the root mean square of all streams of a token.
    """

    num_streams: int
    hidden_size: int
    magnitude: float
    eps: float
    norm_eps: float


class StreamWeights(nn.Module):
    """Weights of the residual streams: sigmoids of the streams' own projection, in float32.

    Args:
        sizes: of the streams.
        uses: how many weights a stream gets.

    Attributes:
        fn: [uses * n, n * H].
        base: [uses * n].
        scale: [uses].
    """

    def __init__(self, sizes: StreamSizes, uses: int) -> None:
        super().__init__()
        self.sizes, n = sizes, sizes.num_streams
        size = n * sizes.hidden_size
        self.fn = nn.Parameter(torch.zeros(uses * n, size, dtype=torch.float32))
        self.base = nn.Parameter(torch.zeros(uses * n, dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(uses, dtype=torch.float32))

    def forward(self, hidden_USnH: Tensor) -> list[Tensor]:
        """Return the weights of each use, [U, S, n, 1] float32, without epsilon."""
        flat = hidden_USnH.flatten(2).float()
        root = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.sizes.norm_eps)
        mixes = F.linear(flat, self.fn) * root
        mixes = mixes.view(*mixes.shape[:-1], len(self.scale), -1)
        weights = (mixes * self.scale[:, None] + self.base.view(mixes.shape[-2:])).sigmoid()
        return [each.unsqueeze(-1) for each in weights.unbind(-2)]

    def collect(self, weights_USn1: Tensor, hidden_USnH: Tensor) -> Tensor:
        """Return the sum of the streams [U, S, H], each by its weight and epsilon."""
        summed_USH = ((weights_USn1 + self.sizes.eps) * hidden_USnH).sum(dim=2)
        return summed_USH.to(hidden_USnH.dtype)

    def spread(self, weights_USn1: Tensor, out_USH: Tensor, hidden_USnH: Tensor) -> Tensor:
        """Return the streams [U, S, n, H] after a part's result was added to each by its weight."""
        weights_USn1 = self.sizes.magnitude * weights_USn1 + self.sizes.eps
        summed_USnH = hidden_USnH.float() + weights_USn1 * out_USH.float().unsqueeze(2)
        return summed_USnH.to(hidden_USnH.dtype)


class HyperLayer(nn.Module):
    """Attention and a feed-forward part, each behind a norm, between streams.

    Args:
        config: makes the norms.
        sizes: of the streams.
        dtype: of the norms.
        attention: the first part.
        feed_forward: the second, a `MoE` or an MLP.
    """

    moe: nn.Module
    mlp: nn.Module

    def __init__(
        self,
        config: DecoderConfig,
        sizes: StreamSizes,
        dtype: torch.dtype,
        attention: nn.Module,
        feed_forward: nn.Module,
    ) -> None:
        super().__init__()
        self.attn_hc, self.ffn_hc = StreamWeights(sizes, 2), StreamWeights(sizes, 2)
        self.input_layernorm = config.make_norm(sizes.hidden_size, dtype)
        self.self_attn = attention
        self.post_attention_layernorm = config.make_norm(sizes.hidden_size, dtype)
        self.is_sparse = isinstance(feed_forward, MoE)
        self.add_module("moe" if self.is_sparse else "mlp", feed_forward)

    def forward(self, hidden_USnH: Tensor, tokens: Tokens, view: View | None = None) -> Tensor:
        """Return the streams after the layer `[U, S, n, H]`; arguments as of `DecoderLayer`."""
        before_USn1, after_USn1 = self.attn_hc(hidden_USnH)
        inner_USH = self.input_layernorm(self.attn_hc.collect(before_USn1, hidden_USnH))
        out_USH: Tensor = self.self_attn(inner_USH, tokens, view)
        hidden_USnH = self.attn_hc.spread(after_USn1, out_USH, hidden_USnH)
        before_USn1, after_USn1 = self.ffn_hc(hidden_USnH)
        inner_USH = self.post_attention_layernorm(self.ffn_hc.collect(before_USn1, hidden_USnH))
        if self.is_sparse:
            out_USH = self.moe(inner_USH, padding_mask=tokens.real_US)[0]
        else:
            out_USH = self.mlp(inner_USH)
        return self.ffn_hc.spread(after_USn1, out_USH, hidden_USnH)
