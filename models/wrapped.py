"""Layers whose attention and experts stand between two modules.

Letters: those of `decoder`.
"""

from torch import Tensor, nn

from neuron_moe.checkpoint import Rule
from neuron_moe.models.attention import View
from neuron_moe.models.decoder import Tokens
from neuron_moe.moe import MoE

_AROUND = ("before_attention", "after_attention", "before_feed_forward", "after_feed_forward")


class WrappedLayer(nn.Module):
    """A decoder layer of two steps, each hidden + after(part(before(hidden))).

    Args:
        attention: the first part.
        feed_forward: the second, a `MoE` or an MLP.
        around: what stands before and after them, by the names in `_AROUND`; else nothing does.
    """

    moe: nn.Module
    mlp: nn.Module
    before_attention: nn.Module
    after_attention: nn.Module
    before_feed_forward: nn.Module
    after_feed_forward: nn.Module

    def __init__(
        self, attention: nn.Module, feed_forward: nn.Module, **around: nn.Module | None
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.is_sparse = isinstance(feed_forward, MoE)
        self.add_module("moe" if self.is_sparse else "mlp", feed_forward)
        for name in _AROUND:
            self.add_module(name, around.get(name) or nn.Identity())

    def forward(self, hidden_USH: Tensor, tokens: Tokens, view: View | None = None) -> Tensor:
        """Return the layer's output `[U, S, H]`; arguments as of `DecoderLayer`."""
        attended_USH = self.self_attn(self.before_attention(hidden_USH), tokens, view)
        hidden_USH = hidden_USH + self.after_attention(attended_USH)
        inner_USH = self.before_feed_forward(hidden_USH)
        if self.is_sparse:
            fed_USH = self.moe(inner_USH, padding_mask=tokens.real_US)[0]
        else:
            fed_USH = self.mlp(inner_USH)
        out_USH: Tensor = hidden_USH + self.after_feed_forward(fed_USH)
        return out_USH


class Scale(nn.Module):
    """Multiply by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the product, in the dtype of the input."""
        return hidden * self.factor


def wrapped_rules(layer: str, names: dict[str, str]) -> list[Rule]:
    """Return the rules of embedding, last norm, head, and the norms of the layers.

    Args:
        layer: number of a layer, or `{layer}`.
        names: how published tensors call what stands around the parts, by ours.
    """
    block = f"layers.{layer}."
    return [
        *(Rule(f"model.{name}.weight", f"{name}.weight") for name in ("embed_tokens", "norm")),
        Rule("lm_head.weight", "lm_head.weight"),
        *(
            Rule(f"model.{block}{theirs}.weight", f"{block}{ours}.weight")
            for ours, theirs in names.items()
        ),
    ]
