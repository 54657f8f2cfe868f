"""Gated DeltaNet: attention that keeps a memory of each sequence, not of each token.

Queries, keys and values of the last few tokens are mixed by a short convolution; keys and queries
of length one then go through the gated delta rule (`models/delta_rule.py`), and what it answers is
normalised and gated.
Source: transformers, `models/qwen3_5_moe/modeling_qwen3_5_moe.py`; arXiv 2412.06464.

Letters: U sequences, S new tokens of each, C channels of queries, keys and values together, W width
of the convolution, X = W - 1 + S, N value heads, D key size, V value size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuron_moe.activations import ACTIVATIONS
from neuron_moe.errors import check_positive_int
from neuron_moe.models.attention import CacheShape, StateShape, StateView, need_view
from neuron_moe.models.decoder import Tokens
from neuron_moe.models.delta_rule import update, update_by_channel, update_in_chunks
from neuron_moe.models.layers import unit_rms

UNIT_EPS = 1e-6  # under the root of the length of queries and keys; fla's and transformers'


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSizes:
    """Sizes of one layer; a key head serves `num_value_heads / num_key_heads` value heads."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_width: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check_positive_int(name, getattr(self, name))
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads={self.num_value_heads}: must be a multiple of"
                f" num_key_heads={self.num_key_heads}. Correct config.json."
            )

    @property
    def parts(self) -> list[int]:
        """Channels of queries, keys and values."""
        key_channels = self.num_key_heads * self.key_size
        return [key_channels, key_channels, self.num_value_heads * self.value_size]

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What a layer keeps of each sequence, see `State`."""
        memory = self.num_value_heads, self.key_size, self.value_size
        return (
            StateShape((self.conv_width - 1, sum(self.parts))),
            StateShape(memory, torch.float32),
        )

    def shared_by(self, ranks: int) -> "DeltaNetSizes":
        """Return the sizes on each of so many ranks, as `dense_parts` cuts a layer."""
        keys, group = ceil(self.num_key_heads / ranks), self.num_value_heads // self.num_key_heads
        values = keys * ceil(group / max(1, ranks // self.num_key_heads))
        return replace(self, num_key_heads=keys, num_value_heads=values)


class Inputs(NamedTuple):
    """What new tokens add to the memory.

    Attributes:
        mixed_USC: [U, S, C] queries, keys and values before the convolution.
        log_decay_USN: [U, S, N] float32, not above 0; [U, S, N, D] where each number of a key has
            its own.
        rate_USN: [U, S, N] float32, from 0 to 1.
        real_US: [U, S] bool, False at padding, which changes no memory; None: all are real.
    """

    mixed_USC: Tensor
    log_decay_USN: Tensor
    rate_USN: Tensor
    real_US: Tensor | None = None


State = tuple[Tensor, ...]
"""What a layer knows of the tokens before: [U, W - 1, C] what the last ones added to the
convolution, latest last; then the memory, [U, N, D, V] float32, where there is one."""


class Recurrent(nn.Module):
    """A layer that keeps a state of each sequence.

    Attributes:
        reach: None: no position is looked at again.
        cache_shape: nothing is kept of each token.
        core: see `Recurrence`.
        activation: of what the short convolution gives, one of `activations.ACTIVATIONS`.
    """

    reach = None
    activation = "silu"
    cache_shape: CacheShape = ()
    core: "Recurrence"

    def __init__(self) -> None:
        super().__init__()
        self.core = recur_cached

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What is kept of each sequence, `State`."""
        raise NotImplementedError

    @property
    def answer(self) -> tuple[int, int]:
        """N and V of what `recur` returns."""
        raise NotImplementedError

    @property
    def row_width(self) -> int:
        """How many numbers of a token its steps make, before and after the convolution."""
        raise NotImplementedError

    def empty_state(self, num_sequences: int, like: Tensor) -> State:
        """Return the state before any token, in the dtype and on the device of `like`."""
        return tuple(shape.zeros(num_sequences, like) for shape in self.state_shapes)

    def recur(self, inputs: Inputs, state: State) -> tuple[Tensor, State]:
        """Return what the layer answers, [U, S, N, V] float32, and the state after."""
        raise NotImplementedError


def bytes_of(shapes: Sequence[StateShape], dtype: torch.dtype) -> int:
    """Return the bytes of a sequence's states; `dtype` is that of states that name none."""
    return sum(prod(shape.sizes) * (shape.dtype or dtype).itemsize for shape in shapes)


Recurrence = Callable[[Recurrent, Inputs, StateView | None], Tensor]
"""The core: given the module, the new tokens and the view, returns [U, S, N, V] as `recur` does;
the leading axes are [1, T] in prefill and [T, 1] in decode where a server calls."""


def recur_cached(layer: Recurrent, inputs: Inputs, view: StateView | None) -> Tensor:
    """Go on from the state in the cache, and keep the new one there; without one, from nothing."""
    kept, mixed_USC = need_view(view).tensors, inputs.mixed_USC
    out, new = layer.recur(inputs, kept or layer.empty_state(len(mixed_USC), mixed_USC))
    for old, tensor in zip(kept, new, strict=bool(kept)):
        old.copy_(tensor)
    return out


class DeltaLayer(Recurrent):
    """A layer whose memory follows the delta rule.

    Attributes:
        sizes: of this rank's part.
        conv_weight: [C, 1, W], of the short convolution.
    """

    sizes: DeltaNetSizes
    conv_weight: Tensor

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What is kept of each sequence, see `State`."""
        return self.sizes.state_shapes

    @property
    def answer(self) -> tuple[int, int]:
        """N and V of what `recur` returns."""
        return self.sizes.num_value_heads, self.sizes.value_size

    @property
    def row_width(self) -> int:
        """Numbers of a token, queries, keys and values before and after the convolution."""
        return 2 * sum(self.sizes.parts)

    def recur(self, inputs: Inputs, state: State) -> tuple[Tensor, State]:
        """Return what the memory answers, [U, S, N, V] float32, and the state after."""
        sizes, (num_sequences, num_new) = self.sizes, inputs.mixed_USC.shape[:2]
        last_UwC, memory_UNDV = state
        mixed_USC, last_UwC = convolve(inputs, last_UwC, self.conv_weight)
        mixed_USC = ACTIVATIONS[self.activation](mixed_USC)
        parts = torch.split(mixed_USC, sizes.parts, dim=-1)
        heads = num_sequences, num_new, -1
        query, key = (_unit(part.view(*heads, sizes.key_size)) for part in parts[:2])
        value_UNSV = parts[2].view(*heads, sizes.value_size).transpose(1, 2)
        group = sizes.num_value_heads // sizes.num_key_heads
        query_UNSD = (query * sizes.key_size**-0.5).transpose(1, 2).repeat_interleave(group, dim=1)
        key_UNSD = key.transpose(1, 2).repeat_interleave(group, dim=1)
        log_decay, rate = inputs.log_decay_USN, inputs.rate_USN
        if inputs.real_US is not None:  # padding neither fades the memory nor writes
            is_real_US1 = inputs.real_US[..., None]
            rate = rate * is_real_US1
            log_decay = log_decay * (is_real_US1 if log_decay.ndim == 3 else is_real_US1[..., None])
        in_chunks = update_in_chunks if log_decay.ndim == 3 else update_by_channel
        form = update if num_new == 1 else in_chunks
        out_UNSV, memory_UNDV = form(
            query_UNSD,
            key_UNSD,
            value_UNSV,
            log_decay.transpose(1, 2),
            rate.transpose(1, 2),
            memory_UNDV,
        )
        return out_UNSV.transpose(1, 2), (last_UwC, memory_UNDV)


class GatedDeltaNet(DeltaLayer):
    """Projections, gates and norm around an exchangeable recurrence.

    Args:
        sizes: of the layer.
        eps: of the norm.
        dtype: of the parameters.
        is_fused: the inputs' projections are two, `in_proj_qkvz` and `in_proj_ba`, whose outputs
            are together by key head, as in Qwen3-Next.

    Attributes:
        sizes: of this rank's part.
    """

    in_proj_qkv: nn.Linear
    in_proj_z: nn.Linear
    in_proj_b: nn.Linear
    in_proj_a: nn.Linear
    in_proj_qkvz: nn.Linear
    in_proj_ba: nn.Linear

    def __init__(
        self, sizes: DeltaNetSizes, eps: float, dtype: torch.dtype, *, is_fused: bool = False
    ) -> None:
        super().__init__()
        self.sizes, self.eps = sizes, eps
        size, heads, channels = sizes.hidden_size, sizes.num_value_heads, sum(sizes.parts)
        value_channels = sizes.parts[-1]

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype)

        outputs = {"qkv": channels, "z": value_channels, "b": heads, "a": heads}
        if is_fused:
            outputs = {"qkvz": channels + value_channels, "ba": 2 * heads}
        for name, width in outputs.items():
            self.add_module(f"in_proj_{name}", linear(size, width))
        self.is_fused = is_fused
        self.out_proj = linear(value_channels, size)
        self.conv_weight = nn.Parameter(torch.zeros(channels, 1, sizes.conv_width, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.ones(heads, dtype=dtype))
        # Published in float32 beside bfloat16 weights.
        self.A_log = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.norm_weight = nn.Parameter(torch.ones(sizes.value_size, dtype=torch.float32))

    def forward(self, hidden_USH: Tensor, tokens: Tokens, view: StateView | None) -> Tensor:
        """Return the attention output `[U, S, H]`; arguments as in `DecoderLayer`."""
        mixed_USC, gate, rate_USN, step_USN = self._project(hidden_USH)
        step_USN = F.softplus(step_USN.float() + self.dt_bias.float())
        inputs = Inputs(
            mixed_USC,
            -self.A_log.exp() * step_USN,
            rate_USN.float().sigmoid(),
            tokens.real_US,
        )
        out_USNV = self.core(self, inputs, view)
        gate_USNV = gate.float().reshape(out_USNV.shape)
        normed_USNV = unit_rms(out_USNV, self.eps) * self.norm_weight * F.silu(gate_USNV)
        out_USH: Tensor = self.out_proj(normed_USNV.flatten(2).to(hidden_USH.dtype))
        return out_USH

    def _project(self, hidden_USH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what is mixed, [U, S, C], the gate [U, S, N * V], rate and step, [U, S, N]."""
        if not self.is_fused:
            parts = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
            mixed_USC, gate, rate_USN, step_USN = (part(hidden_USH) for part in parts)
            return mixed_USC, gate, rate_USN, step_USN
        sizes = self.sizes
        heads = sizes.num_key_heads
        group = sizes.num_value_heads // heads
        values = group * sizes.value_size
        widths = [sizes.key_size, sizes.key_size, values, values]
        wide = self.in_proj_qkvz(hidden_USH).unflatten(-1, (heads, -1)).split(widths, dim=-1)
        *mixed, gate = (part.flatten(-2) for part in wide)
        both = self.in_proj_ba(hidden_USH).unflatten(-1, (heads, 2, group))
        rate_USN, step_USN = (part.flatten(-2) for part in both.unbind(-2))
        return torch.cat(mixed, dim=-1), gate, rate_USN, step_USN


def _unit(rows: Tensor) -> Tensor:
    """Return rows of length one."""
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + UNIT_EPS)


def convolve(
    inputs: Inputs, last_UwC: Tensor, weight_C1W: Tensor, bias_C: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mix each token with those before it, each channel by itself, and add the bias.

    Padding may stand anywhere: it is moved in front of all tokens, the earlier ones included.

    Returns:
        [U, S, C] float32, and the last W - 1 tokens, as in `State`.
    """
    width, num_new = weight_C1W.shape[-1], inputs.mixed_USC.shape[1]
    all_UXC = torch.cat((last_UwC, inputs.mixed_USC), dim=1)
    place_UX = None
    if inputs.real_US is not None:
        is_real_UX = F.pad(inputs.real_US, (width - 1, 0), value=True)
        order_UX = is_real_UX.long().argsort(dim=1, stable=True)
        place_UX = order_UX.argsort(dim=1)
        all_UXC = all_UXC.gather(1, order_UX[..., None].expand_as(all_UXC))
    wide_UXC = F.pad(all_UXC, (0, 0, width - 1, 0)).float()
    num_all = all_UXC.shape[1]
    taps_WC = weight_C1W[:, 0].float().t()
    summed_UXC = torch.zeros_like(wide_UXC[:, :num_all])
    for tap in range(width):
        summed_UXC += wide_UXC[:, tap : tap + num_all] * taps_WC[tap]
    if place_UX is not None:
        summed_UXC = summed_UXC.gather(1, place_UX[..., None].expand_as(summed_UXC))
    if bias_C is not None:
        summed_UXC = summed_UXC + bias_C.float()
    return summed_UXC[:, -num_new:], all_UXC[:, num_all - width + 1 :]
