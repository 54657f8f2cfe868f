"""A layer between residual streams, and connections that do not mix these.

Each part of a layer reads a weighted sum of the streams and adds its result to each of them by
another weight, as in `hyper_connections`; of independent connections the streams themselves stay.
Source: transformers, `models/hy_v4/modular_hy_v4.py`.

Letters: those of `hyper_connections`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.models.decoder import DecoderConfig, LayerParts, Tokens
from neuron_moe.models.hyper_connections import Block, StreamSpec, StreamWeights


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


class HyperLayer(LayerParts):
    """Parts of a layer between streams.

    Args:
        config, dtype, attention, feed_forward: as of `LayerParts`.
        connections: of the two parts.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        attention: nn.Module,
        feed_forward: nn.Module,
        connections: tuple[nn.Module, nn.Module],
    ) -> None:
        super().__init__(config, dtype, attention, feed_forward)
        self.attn_hc, self.ffn_hc = connections

    def forward(self, hidden_USNH: Tensor, tokens: Tokens, view: Any = None) -> Tensor:
        """Return the streams after the layer `[U, S, N, H]`; arguments as of `DecoderLayer`."""

        def attend(inner_USH: Tensor) -> Tensor:
            out: Tensor = self.self_attn(self.input_layernorm(inner_USH), tokens, view)
            return out

        hidden_USNH = self.attn_hc(hidden_USNH, attend)
        out_USNH: Tensor = self.ffn_hc(hidden_USNH, lambda inner_USH: self.feed(inner_USH, tokens))
        return out_USNH
