"""Hyper-connections: a residual of several streams, which learned weights of each token mix.

A block reads a weighted sum of the streams. What it makes is added to each of them by another
weight, and the streams themselves are mixed by a matrix whose rows and columns sum to one, so that
they do not grow. All these weights are computed from the streams, in float32.
Source: arXiv 2512.24880 (manifold-constrained hyper-connections); transformers,
`models/deepseek_v4/modular_deepseek_v4.py`.

Letters: U sequences, S tokens of each, N streams, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuron_moe.errors import check_positive_int
from neuron_moe.models.layers import unit_rms

Block = Callable[[Tensor], Tensor]
"""What stands between streams: from [U, S, H] to [U, S, H]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """What the hyper-connections of a model are.

    Args:
        hidden_size: H.
        num_streams: N.
        iterations: how often rows and columns of the mixing matrix are scaled (Sinkhorn-Knopp).
        eps: what weights have added, so that none is zero.
        norm_eps: of the norm that streams go through before weights are made of them.

    Raises:
        ValueError: a size that is not positive, or a negative eps.
    """

    hidden_size: int
    num_streams: int
    iterations: int
    eps: float
    norm_eps: float

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_streams", "iterations"):
            check_positive_int(name, getattr(self, name))
        if not 0 <= self.eps < 1:
            raise ValueError(f"eps={self.eps}: must be at least 0 and below 1. Correct it.")


class StreamWeights(nn.Module):
    """A linear layer from all streams of a token to numbers that weigh them.

    Parameters are float32, as published: `fn` [W, N * H], `base` [W] and `scale`, one for each kind
    of weight.

    Args:
        spec: sizes.
        sizes: how many numbers there are of each kind; W is their sum.

    Attributes:
        whole: parameters that every rank holds whole.
    """

    whole = ("fn", "base", "scale")

    def __init__(self, spec: StreamSpec, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.spec, self.sizes = spec, list(sizes)
        width = spec.num_streams * spec.hidden_size

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=torch.float32))

        self.fn, self.base, self.scale = (
            zeros(sum(sizes), width),
            zeros(sum(sizes)),
            zeros(len(sizes)),
        )

    def weigh(self, streams_USNH: Tensor) -> list[Tensor]:
        """Return the numbers of each kind, [U, S, size] float32."""
        normed = unit_rms(streams_USNH.flatten(-2), self.spec.norm_eps)
        made = torch.split(F.linear(normed, self.fn.float()), self.sizes, dim=-1)
        bases = torch.split(self.base.float(), self.sizes)
        scales = self.scale.float().unbind()
        return [part * scale + base for part, scale, base in zip(made, scales, bases, strict=True)]

    def collapse(self, weight_USN: Tensor, streams_USNH: Tensor) -> Tensor:
        """Return the weighted sum of the streams, [U, S, H] in their dtype."""
        positive_USN = weight_USN.sigmoid() + self.spec.eps
        summed_US1H = positive_USN.unsqueeze(-2) @ streams_USNH.float()
        return summed_US1H.squeeze(-2).to(streams_USNH.dtype)


class HyperConnection(StreamWeights):
    """What stands between the streams and one block of a layer.

    Args:
        spec: sizes.
    """

    def __init__(self, spec: StreamSpec) -> None:
        count = spec.num_streams
        super().__init__(spec, (count, count, count * count))

    def forward(self, streams_USNH: Tensor, block: Block) -> Tensor:
        """Return the streams after a block, [U, S, N, H] in their dtype.

        Args:
            streams_USNH: the streams before it.
            block: gets their sum [U, S, H], and returns what is added.
        """
        enter_USN, leave_USN, mix = self.weigh(streams_USNH)
        out_USH = block(self.collapse(enter_USN, streams_USNH))
        mix_USNN = self._balance(mix.view(*mix.shape[:-1], *(self.spec.num_streams,) * 2))
        added_USNH = (2 * leave_USN.sigmoid()).unsqueeze(-1) * out_USH.float().unsqueeze(-2)
        mixed_USNH = mix_USNN.mT @ streams_USNH.float()
        return (added_USNH + mixed_USNH).to(streams_USNH.dtype)

    def _balance(self, mix_USNN: Tensor) -> Tensor:
        """Return positive matrices whose columns sum to one, and whose rows nearly do."""
        eps = self.spec.eps
        mix_USNN = mix_USNN.softmax(dim=-1) + eps
        for iteration in range(self.spec.iterations):
            if iteration:
                mix_USNN = mix_USNN / (mix_USNN.sum(dim=-1, keepdim=True) + eps)
            mix_USNN = mix_USNN / (mix_USNN.sum(dim=-2, keepdim=True) + eps)
        return mix_USNN


class StreamHead(StreamWeights):
    """What makes one stream of all behind the last layer.

    Args:
        spec: sizes.
    """

    def __init__(self, spec: StreamSpec) -> None:
        super().__init__(spec, (spec.num_streams,))

    def forward(self, streams_USNH: Tensor) -> Tensor:
        """Return [U, S, H] in the dtype of the streams."""
        (weight_USN,) = self.weigh(streams_USNH)
        return self.collapse(weight_USN, streams_USNH)
