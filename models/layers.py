"""Parts that decoder models share: RMSNorm, the key/value cache, masks and attention with sinks.

Letters: U sequences, S new tokens of each, C cached slots, H hidden, Q query heads, J key/value
heads, G = Q / J, D head size. A slot is a column of the left-padded batch: all sequences write the
same slots, so decode needs no index per sequence; a token's rotary position is counted within its
own sequence.
"""

import torch
from torch import Tensor, nn

from neuron_moe.errors import check_positive_int

# Attention logits held at once (64 MiB in float32); longer prompts go in chunks of queries.
MAX_LOGITS = 1 << 24


class RMSNorm(nn.Module):
    """Divide by the root mean square and scale; float32 inside, output in the input's dtype."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.eps = eps

    def forward(self, hidden_USH: Tensor) -> Tensor:
        """Return the normalised hidden states `[..., H]`."""
        wide = hidden_USH.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * (wide * scale)).to(hidden_USH.dtype)


class KVCache:
    """Keys and values of every layer for a fixed number of sequences and slots.

    Attributes:
        keys: one [U, J, C, D] tensor a layer, in the dtype and on the device of `like`.
        values: as keys.
        real_UC: [U, C] bool, True where a slot holds a token and not padding.
        length: slots in use.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        batch_size: int,
        capacity: int,
        num_heads: int,
        head_size: int,
        like: Tensor,
    ) -> None:
        check_positive_int("batch_size", batch_size)
        check_positive_int("capacity", capacity)
        shape = (batch_size, num_heads, capacity, head_size)
        self.keys = [like.new_zeros(shape) for _ in range(num_layers)]
        self.values = [like.new_zeros(shape) for _ in range(num_layers)]
        self.real_UC = like.new_zeros((batch_size, capacity), dtype=torch.bool)
        self.length = 0

    @property
    def capacity(self) -> int:
        """Slots of every sequence."""
        return self.real_UC.shape[1]

    def reserve(self, real_US: Tensor) -> tuple[int, int]:
        """Take the next S slots, mark which hold tokens, and return (first, one past the last).

        Raises:
            ValueError: another number of sequences than the cache has, or no room.
        """
        num_sequences, num_new = real_US.shape
        if num_sequences != self.real_UC.shape[0]:
            raise ValueError(
                f"input_ids has {num_sequences} sequences: the cache was made for"
                f" {self.real_UC.shape[0]}. Make another cache, or keep the batch."
            )
        start, end = self.length, self.length + num_new
        if end > self.capacity:
            raise ValueError(
                f"capacity={self.capacity}: {start} slots are in use and {num_new} more are asked"
                " for. Make the cache as long as prompt and answer together."
            )
        self.real_UC[:, start:end] = real_US
        self.length = end
        return start, end

    def view(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one layer in slots first..end-1, to read and write."""
        return self.keys[layer][:, :, first:end], self.values[layer][:, :, first:end]


def attention_mask(
    real_UC: Tensor, query_slots_S: Tensor, first_slot: int, window: int | None
) -> Tensor:
    """Say which keys a query may see: real ones, not later than itself, within the window.

    Args:
        real_UC: [U, C] bool, True where a key slot holds a token.
        query_slots_S: [S] integer, slots of the queries, counted as the cache does.
        first_slot: slot of the first column of `real_UC`.
        window: how many of the latest tokens a query sees, itself included; None for all.

    Returns:
        mask_USC: [U, S, C] bool.
    """
    key_slots_C = torch.arange(first_slot, first_slot + real_UC.shape[1], device=real_UC.device)
    visible_SC = key_slots_C[None, :] <= query_slots_S[:, None]
    if window is not None:
        visible_SC = visible_SC & (key_slots_C[None, :] > query_slots_S[:, None] - window)
    return visible_SC[None] & real_UC[:, None, :]


def attend(
    query_USQD: Tensor,
    key_UJCD: Tensor,
    value_UJCD: Tensor,
    mask_USC: Tensor,
    sinks_Q: Tensor | None = None,
) -> Tensor:
    """Attend with grouped heads and one learned sink logit a head; softmax in float32.

    A sink takes part in the softmax like one more key whose value is zero (gpt-oss model card,
    section 2), so a head can look at nothing. A query that sees no key at all (padding) gives
    finite numbers that nobody reads.

    Args:
        query_USQD: [U, S, Q, D].
        key_UJCD: [U, J, C, D], as `value_UJCD`; head q reads key head q // (Q / J).
        mask_USC: [U, S, C] bool, True where the query sees the key.
        sinks_Q: [Q] sink logits, or None for plain attention.

    Returns:
        [U, S, Q * D] in the dtype of `value_UJCD`.
    """
    num_sequences, num_queries, num_heads, head_size = query_USQD.shape
    num_kv_heads, num_keys = key_UJCD.shape[1:3]
    query_UJGSD = query_USQD.view(num_sequences, num_queries, num_kv_heads, -1, head_size).permute(
        0, 2, 3, 1, 4
    )
    rows = max(1, MAX_LOGITS // (num_sequences * num_heads * num_keys))
    chunks = [
        _attend_rows(
            query_UJGSD[:, :, :, first : first + rows],
            key_UJCD,
            value_UJCD,
            mask_USC[:, first : first + rows],
            sinks_Q,
        )
        for first in range(0, num_queries, rows)
    ]
    out_UJGSD = chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=3)
    return out_UJGSD.permute(0, 3, 1, 2, 4).reshape(
        num_sequences, num_queries, num_heads * head_size
    )


def _attend_rows(
    query_UJGSD: Tensor,
    key_UJCD: Tensor,
    value_UJCD: Tensor,
    mask_USC: Tensor,
    sinks_Q: Tensor | None,
) -> Tensor:
    """Attention of some query rows: [U, J, G, S, D]."""
    num_sequences, num_kv_heads, group_size, num_queries, head_size = query_UJGSD.shape
    rows = (num_sequences, num_kv_heads, group_size * num_queries, head_size)
    logits = (query_UJGSD * head_size**-0.5).reshape(rows) @ key_UJCD.transpose(2, 3)
    logits_UJGSC = logits.float().view(num_sequences, num_kv_heads, group_size, num_queries, -1)
    logits_UJGSC = logits_UJGSC.masked_fill(
        ~mask_USC[:, None, None], torch.finfo(torch.float32).min
    )
    peak = logits_UJGSC.amax(dim=-1, keepdim=True)
    if sinks_Q is not None:
        sinks_JG11 = sinks_Q.float().view(num_kv_heads, group_size, 1, 1)
        peak = torch.maximum(peak, sinks_JG11)
    weights_UJGSC = (logits_UJGSC - peak).exp()
    total = weights_UJGSC.sum(dim=-1, keepdim=True)
    if sinks_Q is not None:
        total = total + (sinks_JG11 - peak).exp()
    weights = (weights_UJGSC / total).to(value_UJCD.dtype)
    weights = weights.view(num_sequences, num_kv_heads, group_size * num_queries, -1)
    out: Tensor = weights @ value_UJCD
    return out.view(query_UJGSD.shape)
