"""Attention residuals: layers whose parts read a mixture of what blocks of layers before added up.

The embedding is the first source. Each block of layers adds what its parts give to a source of its
own; a part reads all sources, weighted by a softmax of how each answers a learned query.
Source: vLLM 0.32, `vllm/models/kimi_k3`; Kimi K3 technical report, arXiv 2607.24653, section 2.2.

Letters beside those of `decoder`: n sources, the last of which grows.
"""

import torch
from torch import Tensor, nn

from neuron_moe.models.attention import View
from neuron_moe.models.decoder import DecoderConfig, LayerParts, Tokens
from neuron_moe.models.layers import unit_rms


class AttentionResidual(nn.Module):
    """Mix sources with a softmax of what a learned query finds in each, in float32.

    Args:
        hidden_size: H.
        eps: of the norm of the sources.
        dtype: of the parameters.

    Attributes:
        norm_weight: [H], of the norm of the sources as keys.
        query: [1, H].
        whole: parameters that every rank holds whole.
    """

    whole = ("norm_weight", "query")

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.norm_weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.query = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, sources_USnH: Tensor) -> Tensor:
        """Return the mixture [U, S, H] of sources [U, S, n, H], in their dtype."""
        query_H = self.norm_weight.float() * self.query.float()[0]
        logits_USn = unit_rms(sources_USnH, self.eps) @ query_H
        weights_US1n = logits_USn.softmax(dim=-1).unsqueeze(-2)
        mixed_US1H = weights_US1n @ sources_USnH.float()
        return mixed_US1H.squeeze(-2).to(sources_USnH.dtype)


class ResidualLayer(LayerParts):
    """Parts of a layer, each behind a mixture of sources.

    Args:
        config, dtype, attention, feed_forward: as of `LayerParts`.
        begins_block: the layer is the first of a block, and closes the one before.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        attention: nn.Module,
        feed_forward: nn.Module,
        *,
        begins_block: bool,
    ) -> None:
        super().__init__(config, dtype, attention, feed_forward)
        self.begins_block = begins_block
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attn_res, self.mlp_res = (AttentionResidual(size, eps, dtype) for _ in range(2))

    def forward(self, hidden_USnH: Tensor, tokens: Tokens, view: View | None = None) -> Tensor:
        """Return the sources after the layer, one more where it begins a block.

        Args:
            hidden_USnH: [U, S, n, H], the last of which grows.
            tokens: as of `DecoderLayer`.
            view: as of `DecoderLayer`.
        """
        inner_USH = self.input_layernorm(self.attn_res(hidden_USnH))
        out_US1H: Tensor = self.self_attn(inner_USH, tokens, view).unsqueeze(2)
        if self.begins_block:
            hidden_USnH = torch.cat((hidden_USnH, out_US1H), dim=2)
        else:
            hidden_USnH = _grow(hidden_USnH, out_US1H)
        out_USH = self.feed(self.mlp_res(hidden_USnH), tokens)
        return _grow(hidden_USnH, out_USH.unsqueeze(2))


def _grow(sources_USnH: Tensor, out_US1H: Tensor) -> Tensor:
    """Return the sources with something added to the last."""
    return torch.cat((sources_USnH[:, :, :-1], sources_USnH[:, :, -1:] + out_US1H), dim=2)
