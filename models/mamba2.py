"""Mamba-2: a layer that keeps a memory of each sequence, which fades and to which tokens add.

What the last few tokens add is mixed by a short convolution; a token then writes its value, as
much as its step says, at its key, and its query reads:

    memory = exp(-rate * step) * memory + key (step * value)^T;  out = memory^T query + skip * value

Source: transformers, `models/nemotron_h/modeling_nemotron_h.py`; arXiv 2405.21060.

Letters: U sequences, S new tokens of each, C channels of values, keys and queries together, N
heads, D key size, V value size, G groups of heads that share keys and queries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuron_moe.activations import ACTIVATIONS
from neuron_moe.checkpoint import Rule
from neuron_moe.errors import check_positive_int
from neuron_moe.models.attention import StateShape, StateView
from neuron_moe.models.decoder import Tokens
from neuron_moe.models.delta_net import Inputs, Recurrent, State, convolve
from neuron_moe.models.layers import unit_rms

_CHUNK = 64  # tokens that are compared with each other at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Sizes:
    """Sizes of one layer."""

    hidden_size: int
    num_heads: int
    value_size: int
    key_size: int
    num_groups: int
    conv_width: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check_positive_int(name, getattr(self, name))
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"mamba_num_heads={self.num_heads}: must be a multiple of"
                f" n_groups={self.num_groups}. Correct config.json."
            )

    @property
    def parts(self) -> list[int]:
        """Channels of values, keys and queries."""
        keys = self.num_groups * self.key_size
        return [self.num_heads * self.value_size, keys, keys]


class Mamba2(Recurrent):
    """Projections, gate and norm around an exchangeable recurrence, see `delta_net.Recurrence`.

    Args:
        sizes: of the layer.
        eps: of the norm, which is of each group by itself.
        least_step: of a token.
        dtype: of the parameters.
        has_conv_bias: of the convolution.
    """

    def __init__(
        self,
        sizes: Mamba2Sizes,
        eps: float,
        least_step: float,
        dtype: torch.dtype,
        *,
        has_conv_bias: bool,
    ) -> None:
        super().__init__()
        self.sizes, self.eps, self.least_step = sizes, eps, least_step
        heads, channels, inner = sizes.num_heads, sum(sizes.parts), sizes.parts[0]
        width = inner + channels + heads
        self.in_proj = nn.Linear(sizes.hidden_size, width, bias=False, dtype=dtype)
        self.out_proj = nn.Linear(inner, sizes.hidden_size, bias=False, dtype=dtype)
        self.conv_weight = nn.Parameter(torch.zeros(channels, 1, sizes.conv_width, dtype=dtype))
        bias_C = torch.zeros(channels, dtype=dtype) if has_conv_bias else None
        self.conv_bias = None if bias_C is None else nn.Parameter(bias_C)
        self.dt_bias, self.D = (nn.Parameter(torch.zeros(heads, dtype=dtype)) for _ in range(2))
        self.A_log = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.norm_weight = nn.Parameter(torch.ones(inner, dtype=dtype))

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What is kept of each sequence, `State`."""
        sizes = self.sizes
        return (
            StateShape((sizes.conv_width - 1, sum(sizes.parts))),
            StateShape((sizes.num_heads, sizes.key_size, sizes.value_size), torch.float32),
        )

    @property
    def answer(self) -> tuple[int, int]:
        """N and V of what `recur` returns."""
        return self.sizes.num_heads, self.sizes.value_size

    @property
    def row_width(self) -> int:
        """Numbers of a token, values, keys and queries before and after the convolution."""
        return 2 * sum(self.sizes.parts)

    def forward(self, hidden_USH: Tensor, tokens: Tokens, view: StateView | None) -> Tensor:
        """Return the layer's output `[U, S, H]`; arguments as in `DecoderLayer`."""
        sizes = self.sizes
        inner, channels = sizes.parts[0], sum(sizes.parts)
        if tokens.real_US is not None:
            hidden_USH = hidden_USH * tokens.real_US.unsqueeze(2)
        gate, mixed_USC, step = self.in_proj(hidden_USH).split(
            [inner, channels, sizes.num_heads], dim=-1
        )
        step_USN = F.softplus(step.float() + self.dt_bias.float()).clamp(min=self.least_step)
        decay_USN = -self.A_log.exp() * step_USN
        out = self.core(self, Inputs(mixed_USC, decay_USN, step_USN, tokens.real_US), view)
        gated = out.flatten(2) * F.silu(gate.float())
        normed = unit_rms(gated.reshape(*gated.shape[:2], sizes.num_groups, -1), self.eps).flatten(
            2
        )
        scaled = self.norm_weight * normed.to(hidden_USH.dtype)
        out_USH: Tensor = self.out_proj(scaled.to(hidden_USH.dtype))
        return out_USH

    def recur(self, inputs: Inputs, state: State) -> tuple[Tensor, State]:
        """Return what the memory answers, [U, S, N, V] float32; rates are steps; and the state."""
        sizes, num_new = self.sizes, inputs.mixed_USC.shape[1]
        last_UwC, memory_UNDV = state
        mixed_USC, last_UwC = convolve(inputs, last_UwC, self.conv_weight, self.conv_bias)
        mixed_USC = ACTIVATIONS[self.activation](mixed_USC)
        value, key, query = torch.split(mixed_USC, sizes.parts, dim=-1)
        group = sizes.num_heads // sizes.num_groups
        value_UNSV = value.reshape(*value.shape[:2], -1, sizes.value_size).transpose(1, 2)
        key_UNSD, query_UNSD = (
            part.reshape(*part.shape[:2], -1, sizes.key_size)
            .transpose(1, 2)
            .repeat_interleave(group, dim=1)
            for part in (key, query)
        )
        decay, step = inputs.log_decay_USN, inputs.rate_USN
        if inputs.real_US is not None:  # padding neither fades the memory nor writes
            decay, step = (part * inputs.real_US[..., None] for part in (decay, step))
        decay_UNS, written_UNSV = (
            decay.transpose(1, 2),
            value_UNSV * step.transpose(1, 2)[..., None],
        )
        outputs = []
        for first in range(0, num_new, _CHUNK):
            chunk = slice(first, first + _CHUNK)
            out, memory_UNDV = _scan(
                query_UNSD[:, :, chunk],
                key_UNSD[:, :, chunk],
                written_UNSV[:, :, chunk],
                decay_UNS[:, :, chunk].cumsum(-1),
                memory_UNDV,
            )
            outputs.append(out)
        out_UNSV = torch.cat(outputs, dim=2) + self.D.float()[:, None, None] * value_UNSV
        return out_UNSV.transpose(1, 2), (last_UwC, memory_UNDV)


def mamba_rules(theirs: str, ours: str, *, has_bias: bool) -> list[Rule]:
    """Return the rules of a Mamba-2 memory, under transformers' names."""
    plain = ("in_proj.weight", "out_proj.weight", "dt_bias", "A_log", "D")
    renamed = {"norm.weight": "norm_weight", "conv1d.weight": "conv_weight"}
    renamed |= {"conv1d.bias": "conv_bias"} if has_bias else {}
    pairs = {**{name: name for name in plain}, **renamed}
    return [Rule(theirs + old, ours + new, is_exact=old == "A_log") for old, new in pairs.items()]


def _scan(
    query_UNsD: Tensor, key_UNsD: Tensor, written_UNsV: Tensor, faded_UNs: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what a chunk of tokens reads, and the memory [U, N, D, V] after it.

    Args:
        query_UNsD: of the chunk.
        key_UNsD: likewise.
        written_UNsV: what tokens write.
        faded_UNs: sums of the logarithms of the decay, up to each token and with it.
        memory: before the chunk.
    """
    apart = faded_UNs[..., :, None] - faded_UNs[..., None, :]
    seen = torch.ones_like(apart, dtype=torch.bool).tril()
    share = apart.masked_fill(~seen, -torch.inf).exp()
    read = (query_UNsD @ key_UNsD.mT * share) @ written_UNsV
    read = read + faded_UNs.exp()[..., None] * (query_UNsD @ memory)
    last = faded_UNs[..., -1:]
    added = (key_UNsD * (last - faded_UNs).exp()[..., None]).mT @ written_UNsV
    return read, last.exp()[..., None] * memory + added
