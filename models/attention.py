"""The core of attention: what a token may see, the cache of keys and values, softmax with sinks.

An attention module makes queries, keys and values of its new tokens and hands them to its `core`,
here `attend_cached`. A server that keeps keys and values in its own pages puts another one there.

Letters: U sequences, S new tokens of each, C cached positions, Q query heads, J key/value heads,
G = Q / J, D head size. A position is a column of the left-padded batch: all sequences write the
same positions, so decode needs no index per sequence. A token's place is counted within its own
sequence; rotary embedding rotates by it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from neuron_moe.device import is_captured
from neuron_moe.errors import check_positive_int

# Attention logits held at once (64 MiB in float32); longer prompts go in chunks of queries.
MAX_LOGITS = 1 << 24
# Queries of one fused operation: each part leaves out the keys that none of its queries sees.
_FUSED_QUERIES = 128

CacheShape = tuple[tuple[int, int], ...]
"""Heads and size of each tensor that a layer keeps of a token."""


class Reach(NamedTuple):
    """How far back a token sees; None is no limit.

    Attributes:
        window: it sees this many of the latest tokens, itself included.
        chunk: it sees the tokens since the last place that is a multiple of this.
    """

    window: int | None = None
    chunk: int | None = None

    def first_position(self, start: int) -> int:
        """Return the first position that a token at position `start` or later can see."""
        limits = [limit for limit in self if limit is not None]
        return max(0, start - min(limits) + 1) if limits else 0


EVERYTHING = Reach()


class CoreSizes(NamedTuple):
    """What the core of an attention computes with in a step.

    Attributes:
        query_heads: Q.
        kv_heads: J.
        key_size: D of queries and keys.
        value_size: D of values.
    """

    query_heads: int
    kv_heads: int
    key_size: int
    value_size: int


class CacheView(NamedTuple):
    """What the attention of one layer may see in this step, and where it writes.

    Attributes:
        mask_USC: [U, S, C] bool, True where a token sees a position.
        tensors: [U, heads, C, size] each, what the layer keeps, written in place; empty attends to
            the new tokens alone, and C = S.
        positions_S: [S] int64, where the new tokens are among the C positions.
    """

    mask_USC: Tensor
    tensors: tuple[Tensor, ...]
    positions_S: Tensor

    def extend(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Write what the new tokens add, [U, heads, S, size] each, and return all positions."""
        if not self.tensors:
            return new
        pairs = zip(self.tensors, new, strict=True)
        return tuple(kept.index_copy_(2, self.positions_S, part) for kept, part in pairs)


class StateShape(NamedTuple):
    """One tensor that a layer keeps of a whole sequence, for models with recurrent layers.

    Attributes:
        sizes: without the axis of sequences.
        dtype: None is that of the cache.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype | None = None

    def zeros(self, num_sequences: int, like: Tensor) -> Tensor:
        """Return the tensor before any token, [U, ..], on the device of `like`."""
        return like.new_zeros((num_sequences, *self.sizes), dtype=self.dtype or like.dtype)


class StateView(NamedTuple):
    """What a recurrent layer knows of the tokens before; written in place.

    Attributes:
        tensors: [U, ..] each; empty starts from nothing and keeps nothing.
    """

    tensors: tuple[Tensor, ...]


View = CacheView | StateView
ViewT = TypeVar("ViewT")


class AttentionFacts(Protocol):
    """What a core may ask of the attention module it computes for."""

    reach: Reach
    scale: float
    sinks: Tensor | None
    cache_shape: CacheShape

    def core_sizes(self, new_tokens: int) -> CoreSizes:
        """Return what the core computes with for so many new tokens of a sequence."""


Core = Callable[[AttentionFacts, Tensor, Tensor, Tensor, CacheView | None], Tensor]
"""Given the module, queries [.., Q, D], keys and values [.., J, D] of the new tokens and the view,
returns [.., Q * D]; the leading axes are [U, S], or [T] where a server calls."""


class KVCache:
    """What every layer keeps of the tokens so far, for a fixed number of sequences and positions.

    Attributes:
        layers: the tensors of each layer, [U, heads, C, size], in the dtype and on the device of
            `like`; keys and values, for most.
        states: what each layer keeps of a whole sequence, [U, ..]; nothing, for most. It cannot go
            back to an earlier token.
        real_UC: [U, C] bool, True where a position holds a token and not padding.
        length: positions in use.
    """

    def __init__(
        self,
        shapes: Sequence[CacheShape],
        *,
        batch_size: int,
        capacity: int,
        like: Tensor,
        states: Sequence[Sequence[StateShape]] = (),
    ) -> None:
        check_positive_int("batch_size", batch_size)
        check_positive_int("capacity", capacity)
        self.layers = [
            tuple(like.new_zeros(batch_size, heads, capacity, size) for heads, size in shape)
            for shape in shapes
        ]
        self.states = [tuple(part.zeros(batch_size, like) for part in state) for state in states]
        self.real_UC = like.new_zeros((batch_size, capacity), dtype=torch.bool)
        self.length = 0

    @property
    def capacity(self) -> int:
        """Positions of every sequence."""
        return self.real_UC.shape[1]

    def reserve(self, real_US: Tensor) -> tuple[int, int]:
        """Take the next S positions, mark those with tokens, return (first, one past the last).

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
                f"capacity={self.capacity}: {start} positions are in use and {num_new} more are"
                " requested. Make the cache as long as prompt and answer together."
            )
        self.real_UC[:, start:end] = real_US
        self.length = end
        return start, end

    def view(self, layer: int, first: int, end: int) -> tuple[Tensor, ...]:
        """Return the tensors of one layer at positions first..end-1, to read and write."""
        return tuple(kept[:, :, first:end] for kept in self.layers[layer])


def count_places(real_UC: Tensor) -> Tensor:
    """Return the place of every position within its sequence, [U, C] int64; 0 at left padding."""
    return (real_UC.long().cumsum(dim=1) - 1).clamp_min(0)


def attention_mask(
    real_UC: Tensor, positions_S: Tensor, first: int, reach: Reach, places_UC: Tensor | None = None
) -> Tensor:
    """Say which keys a query may see: real ones, not later than itself, within its reach.

    Args:
        real_UC: [U, C] bool, True where a key is a token.
        positions_S: [S] integer, positions of the queries.
        first: position of the first column of `real_UC`.
        reach: how far back.
        places_UC: [U, C] integer, places of the keys; needed where `reach` has a chunk.

    Returns:
        mask_USC: [U, S, C] bool.
    """
    keys_C = torch.arange(first, first + real_UC.shape[1], device=real_UC.device)
    visible_SC = keys_C[None, :] <= positions_S[:, None]
    if reach.window is not None:
        visible_SC = visible_SC & (keys_C[None, :] > positions_S[:, None] - reach.window)
    mask_USC = visible_SC[None] & real_UC[:, None, :]
    if reach.chunk is not None and places_UC is not None:
        chunk_UC = places_UC // reach.chunk
        mask_USC = mask_USC & (chunk_UC[:, positions_S - first, None] == chunk_UC[:, None, :])
    return mask_USC


def need_view(view: ViewT | None) -> ViewT:
    """Return the view; raise ValueError where there is none."""
    if view is None:
        raise ValueError(
            "view=None: the core that comes with the model needs a view of the cache. Pass one, or"
            " put a core in place that finds keys and values itself."
        )
    return view


def attend_cached(
    layer: AttentionFacts,
    query_USQD: Tensor,
    key_USJD: Tensor,
    value_USJD: Tensor,
    view: CacheView | None,
) -> Tensor:
    """Keep the new keys and values, then attend to all that the view shows: [U, S, Q * D]."""
    view = need_view(view)
    key_UJCD, value_UJCD = view.extend(key_USJD.transpose(1, 2), value_USJD.transpose(1, 2))
    return attend(query_USQD, key_UJCD, value_UJCD, view.mask_USC, layer.sinks, layer.scale)


def attend(
    query_USQD: Tensor,
    key_UJCD: Tensor,
    value_UJCD: Tensor,
    mask_USC: Tensor,
    sinks_Q: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend with grouped heads and one learned sink logit a head; softmax in float32.

    A sink takes part in the softmax like one more key whose value is zero (gpt-oss model card,
    section 2), so a head can look at nothing. A query that sees no key at all (padding) gives
    finite numbers that nobody reads.

    Args:
        query_USQD: [U, S, Q, D].
        key_UJCD: [U, J, C, D]; head q reads key head q // (Q / J).
        value_UJCD: [U, J, C, D], or of another head size.
        mask_USC: [U, S, C] bool, True where the query sees the key.
        sinks_Q: [Q] sink logits, or None for plain attention.
        scale: of the logits; None is D^-1/2.

    Returns:
        [U, S, Q * D] in the dtype of `value_UJCD`.
    """
    num_sequences, num_queries, num_heads, head_size = query_USQD.shape
    num_kv_heads, num_keys = key_UJCD.shape[1:3]
    if sinks_Q is None and value_UJCD.shape[-1] == head_size:
        return _attend_fused(query_USQD, key_UJCD, value_UJCD, mask_USC, scale)
    scaled_USQD = query_USQD * (head_size**-0.5 if scale is None else scale)
    query_UJGSD = scaled_USQD.view(num_sequences, num_queries, num_kv_heads, -1, head_size).permute(
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
    return out_UJGSD.permute(0, 3, 1, 2, 4).reshape(num_sequences, num_queries, -1)


def _attend_fused(
    query_USQD: Tensor,
    key_UJCD: Tensor,
    value_UJCD: Tensor,
    mask_USC: Tensor,
    scale: float | None,
) -> Tensor:
    """Attention as torch has it in one operation, which knows no sinks: [U, S, Q * D].

    It reads the cache as it is, several times as fast as the separate steps below (measured). Long
    prompts go in runs of queries: torch multiplies with the keys behind a query as well.
    """
    num_sequences, num_queries, num_heads, head_size = query_USQD.shape
    mask_U1SC = mask_USC.unsqueeze(1)
    if num_queries == 1:  # heads of a group become rows: torch would copy the keys for each
        rows = (num_sequences, key_UJCD.shape[1], -1, head_size)
        out = functional.scaled_dot_product_attention(
            query_USQD.reshape(rows), key_UJCD, value_UJCD, attn_mask=mask_U1SC, scale=scale
        )
    else:
        parts = [
            functional.scaled_dot_product_attention(
                query_USQD[:, queries].transpose(1, 2),
                key_UJCD[:, :, keys],
                value_UJCD[:, :, keys],
                attn_mask=mask_U1SC[:, :, queries, keys],
                scale=scale,
                enable_gqa=key_UJCD.shape[1] != num_heads,
            )
            for queries, keys in _parts_of(mask_USC)
        ]
        out = torch.cat(parts, dim=2).transpose(1, 2)
    return out.reshape(num_sequences, num_queries, -1)


def _parts_of(mask_USC: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield runs of queries, and the run of keys that they see: all of both in a graph."""
    num_queries, num_keys = mask_USC.shape[1:]
    if num_queries <= _FUSED_QUERIES or is_captured():
        yield slice(num_queries), slice(num_keys)
        return
    for first in range(0, num_queries, _FUSED_QUERIES):
        queries = slice(first, min(first + _FUSED_QUERIES, num_queries))
        seen = mask_USC[:, queries].any(dim=1).any(dim=0).nonzero()
        is_any = seen.numel() > 0  # padding sees nothing, and gives numbers that nobody reads
        yield queries, slice(int(seen[0]), int(seen[-1]) + 1) if is_any else slice(1)


def _attend_rows(
    query_UJGSD: Tensor,
    key_UJCD: Tensor,
    value_UJCD: Tensor,
    mask_USC: Tensor,
    sinks_Q: Tensor | None,
) -> Tensor:
    """Attention of some query rows, already scaled: [U, J, G, S, D]."""
    num_sequences, num_kv_heads, group_size, num_queries, head_size = query_UJGSD.shape
    rows = (num_sequences, num_kv_heads, group_size * num_queries, head_size)
    logits = query_UJGSD.reshape(rows) @ key_UJCD.transpose(2, 3)
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
    return out.view(*query_UJGSD.shape[:-1], value_UJCD.shape[-1])
