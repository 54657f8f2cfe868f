"""Independent hyper-connections: a layer between residual streams that are not mixed.

Each part of a layer reads a weighted sum of the streams and adds its result to each of them by
another weight, as in `hyper_connections`; the streams themselves stay.
Source: transformers, `models/hy_v4/modular_hy_v4.py`.

Letters: those of `hyper_connections`.
"""

import torch
from torch import Tensor, nn

from neuron_moe.models.attention import View
from neuron_moe.models.decoder import DecoderConfig, Tokens
from neuron_moe.models.hyper_connections import Block, StreamSpec, StreamWeights
from neuron_moe.moe import MoE


class IndependentConnection(StreamWeights):
    """What stands between the streams and one block of a layer.

    Args:
        spec: sizes; `iterations` has no meaning here.
        magnitude: of what is added to the streams.
    """

    def __init__(self, spec: StreamSpec, magnitude: float) -> None:
        super().__init__(spec, (spec.num_streams,) * 2)
        self.magnitude = magnitude

    def forward(self, streams_USNH: Tensor, block: Block) -> Tensor:
        """Return the streams after a block, [U, S, N, H] in their dtype.

        Args:
            streams_USNH: the streams before it.
            block: gets their sum [U, S, H], and returns what is added.
        """
        enter_USN, leave_USN = self.weigh(streams_USNH)
        out_USH = block(self.collapse(enter_USN, streams_USNH))
        weight_USN = self.magnitude * leave_USN.sigmoid() + self.spec.eps
        added_USNH = weight_USN.unsqueeze(-1) * out_USH.float().unsqueeze(-2)
        return (streams_USNH.float() + added_USNH).to(streams_USNH.dtype)


class HyperLayer(nn.Module):
    """Attention and a feed-forward part, each behind a norm, between streams.

    Args:
        config: makes the norms.
        dtype: of the norms.
        attention: the first part.
        feed_forward: the second, a `MoE` or an MLP.
        connections: of the two.
    """

    moe: nn.Module
    mlp: nn.Module

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        attention: nn.Module,
        feed_forward: nn.Module,
        connections: tuple[nn.Module, nn.Module],
    ) -> None:
        super().__init__()
        self.attn_hc, self.ffn_hc = connections
        self.input_layernorm = config.make_norm(config.hidden_size, dtype)
        self.self_attn = attention
        self.post_attention_layernorm = config.make_norm(config.hidden_size, dtype)
        self.is_sparse = isinstance(feed_forward, MoE)
        self.add_module("moe" if self.is_sparse else "mlp", feed_forward)

    def forward(self, hidden_USNH: Tensor, tokens: Tokens, view: View | None = None) -> Tensor:
        """Return the streams after the layer `[U, S, N, H]`; arguments as of `DecoderLayer`."""

        def attend(inner_USH: Tensor) -> Tensor:
            out: Tensor = self.self_attn(self.input_layernorm(inner_USH), tokens, view)
            return out

        def feed(inner_USH: Tensor) -> Tensor:
            normed_USH = self.post_attention_layernorm(inner_USH)
            if not self.is_sparse:
                return self.mlp(normed_USH)  # type: ignore[no-any-return]
            return self.moe(normed_USH, padding_mask=tokens.real_US)[0]  # type: ignore[no-any-return]

        hidden_USNH = self.attn_hc(hidden_USNH, attend)
        out_USNH: Tensor = self.ffn_hc(hidden_USNH, feed)
        return out_USNH
