"""Entries of a sequence: what DeepSeek-V4 keeps of many tokens, pooled of each few of them.

An entry is a sum of values of `rate` tokens, with weights that are learned for each number of it;
where entries overlap, of as many tokens before these too. A token sees an entry once all tokens of
it are there. They are counted within each sequence; transformers counts padding too.
Source: transformers, `models/deepseek_v4/modular_deepseek_v4.py`.

Letters beside those of `decoder`: D entry size, R rank of a latent, P tokens of an entry, E entries
of a sequence, W entries that new tokens may complete, L latest tokens, X all tokens at hand, I
heads of the indexer.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuron_moe.models.attention import MAX_LOGITS, CacheView, StateShape
from neuron_moe.models.layers import RMSNorm
from neuron_moe.models.rope import RopeConfig, apply_rope, rope_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """How entries are pooled of tokens.

    Args:
        rate: tokens for which there is an entry.
        overlaps: an entry is of the tokens before these too, in another series of values.
        rope: rotates entries, by the place of the first of their own tokens.
        rotated_size: numbers at the end of an entry that are rotated.
        eps: of the entries' norm.
    """

    rate: int
    overlaps: bool
    rope: RopeConfig
    rotated_size: int
    eps: float


class PooledView(NamedTuple):
    """What a layer with entries sees of the cache.

    Attributes:
        window: the latest tokens.
        states: of each pool in turn its entries, [U, E + 1, D], of which the last is nobody's, and
            values and weights of the latest tokens, [U, ..], written in place; empty starts anew.
        seen_U: [U] tokens of each sequence before the new ones, without padding.
        total_U: [U] the new ones included.
        num_positions: C, of which sequences are no longer.
    """

    window: CacheView
    states: tuple[Tensor, ...]
    seen_U: Tensor
    total_U: Tensor
    num_positions: int

    def pool(self, number: int) -> "PooledView":
        """Return the same for one of the layer's pools."""
        return self._replace(states=self.states[2 * number : 2 * number + 2])


def turn_end(heads_USND: Tensor, cos_USd: Tensor, sin_USd: Tensor) -> Tensor:
    """Rotate the last 2d numbers of each head, in pairs of neighbours."""
    plain = heads_USND.shape[-1] - 2 * cos_USd.shape[-1]
    front, end = heads_USND.tensor_split((plain,), dim=-1)
    return torch.cat((front, apply_rope(end, cos_USd, sin_USd, is_interleaved=True)), dim=-1)


class Compressor(nn.Module):
    """Pools tokens into entries.

    Args:
        hidden_size: H.
        size: D of an entry.
        spec: how.
        dtype: of the parameters but `position_bias` [rate, D or 2 D], which is float32.
    """

    def __init__(self, hidden_size: int, size: int, spec: PoolSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.size, self.width = spec, size, size * (1 + spec.overlaps)

        def linear() -> nn.Linear:
            return nn.Linear(hidden_size, self.width, bias=False, dtype=dtype)

        self.kv_proj, self.gate_proj = linear(), linear()
        bias = torch.zeros(spec.rate, self.width, dtype=torch.float32)
        self.position_bias = nn.Parameter(bias)
        self.norm = RMSNorm(size, spec.eps, dtype)

    @property
    def latest(self) -> StateShape:
        """Values and weights of the latest tokens of a sequence, which entries may still need."""
        return StateShape((self.spec.rate * (1 + self.spec.overlaps) - 1, 2 * self.width))

    def entries(self, num_positions: int) -> StateShape:
        """Return the shape of a sequence's entries, and of one that is nobody's."""
        return StateShape((num_positions // self.spec.rate + 1, self.size))

    def visible(self, places_US: Tensor, num_positions: int) -> Tensor:
        """Say which entries a token at a place sees, [U, S, E] bool."""
        numbers_E = torch.arange(num_positions // self.spec.rate, device=places_US.device)
        return numbers_E < ((places_US + 1) // self.spec.rate).unsqueeze(-1)

    def forward(self, hidden_USH: Tensor, view: PooledView) -> Tensor:
        """Return all entries of each sequence [U, E, D], those of new tokens included."""
        new_USw = torch.cat((self.kv_proj(hidden_USH), self.gate_proj(hidden_USH)), dim=-1)
        num_sequences, num_new = hidden_USH.shape[:2]
        shapes = self.entries(view.num_positions), self.latest
        kept = view.states or [shape.zeros(num_sequences, new_USw) for shape in shapes]
        entries_UED, latest_ULw = kept
        all_UXw = torch.cat((latest_ULw, new_USw), dim=1)
        number_UW, pooled_UWD = self._pool(all_UXw, view, num_new)
        is_done_UW = (number_UW + 1) * self.spec.rate <= view.total_U.unsqueeze(-1)
        slot_UW = number_UW.where(is_done_UW, entries_UED.shape[1] - 1)
        entries_UED.scatter_(1, slot_UW.unsqueeze(-1).expand_as(pooled_UWD), pooled_UWD)
        latest_ULw.copy_(all_UXw[:, num_new:])
        return entries_UED[:, : view.num_positions // self.spec.rate]

    def _pool(self, all_UXw: Tensor, view: PooledView, num_new: int) -> tuple[Tensor, Tensor]:
        """Return the numbers of entries that new tokens may complete, [U, W], and these."""
        rate, device = self.spec.rate, all_UXw.device
        count = num_new // rate + 1
        windows_W = torch.arange(-self.spec.overlaps, count, device=device)
        first_UW = (view.seen_U // rate).unsqueeze(-1) + windows_W  # and the one before
        place_UWP = first_UW.unsqueeze(-1) * rate + torch.arange(rate, device=device)
        column_UWP = all_UXw.shape[1] - view.total_U[:, None, None] + place_UWP
        column_UX1 = column_UWP.clamp(0, all_UXw.shape[1] - 1).flatten(1).unsqueeze(-1)
        found = all_UXw.gather(1, column_UX1.expand(-1, -1, all_UXw.shape[-1]))
        rows = *place_UWP.shape, -1
        value_UWPw, gate_UWPw = found.view(rows).float().chunk(2, dim=-1)
        gate_UWPw = gate_UWPw + self.position_bias
        gate_UWPw = gate_UWPw.masked_fill((place_UWP < 0).unsqueeze(-1), -torch.inf)
        if self.spec.overlaps:
            value_UWPw, gate_UWPw = map(self._join, (value_UWPw, gate_UWPw))
        summed_UWD = (value_UWPw * gate_UWPw.softmax(dim=2)).sum(dim=2)
        number_UW = first_UW[:, self.spec.overlaps :]
        tables = rope_tables(self.spec.rope, self.spec.rotated_size, number_UW * rate)
        normed_UW1D = self.norm(summed_UWD.to(all_UXw.dtype)).unsqueeze(2)
        return number_UW, turn_end(normed_UW1D, *tables).squeeze(2)

    def _join(self, parts_UWPw: Tensor) -> Tensor:
        """Return the first series of the tokens before an entry's, and the second of its own."""
        before, own = parts_UWPw[:, :-1], parts_UWPw[:, 1:]
        return torch.cat((before[..., : self.size], own[..., self.size :]), dim=2)


class Indexer(nn.Module):
    """Picks the entries that a token attends to, by entries of its own.

    Args:
        hidden_size: H.
        latent_size: R of the queries' latent.
        heads: I.
        size: of the entries.
        top_k: how many are picked.
        spec: how entries are pooled.
        dtype: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        latent_size: int,
        *,
        heads: int,
        size: int,
        top_k: int,
        spec: PoolSpec,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.heads, self.size, self.top_k = heads, size, top_k
        self.q_b_proj = nn.Linear(latent_size, heads * size, bias=False, dtype=dtype)
        self.weights_proj = nn.Linear(hidden_size, heads, bias=False, dtype=dtype)
        self.compressor = Compressor(hidden_size, size, spec, dtype)

    def forward(
        self,
        hidden_USH: Tensor,
        latent_USR: Tensor,
        rope: tuple[Tensor, Tensor],
        visible_USE: Tensor,
        view: PooledView,
    ) -> Tensor:
        """Say which of the entries that a token sees are picked, [U, S, E] bool."""
        entries_UED = self.compressor(hidden_USH, view).float()
        if visible_USE.shape[-1] <= self.top_k:
            return visible_USE
        heads = *hidden_USH.shape[:2], self.heads, self.size
        query_USID = turn_end(self.q_b_proj(latent_USR).view(heads), *rope).float()
        weight_USI = self.weights_proj(hidden_USH).float() * self.heads**-0.5
        rows = max(1, MAX_LOGITS // (len(entries_UED) * self.heads * visible_USE.shape[-1]))
        whole = query_USID, weight_USI
        parts = zip(*(torch.split(each, rows, dim=1) for each in whole), strict=True)
        scores = [self._score(query, weight, entries_UED) for query, weight in parts]
        score_USE = torch.cat(scores, dim=1).masked_fill(~visible_USE, -torch.inf)
        picked_USK = score_USE.topk(self.top_k, dim=-1).indices
        is_picked_USE = torch.zeros_like(visible_USE).scatter_(-1, picked_USK, True)
        return visible_USE & is_picked_USE

    def _score(self, query_USID: Tensor, weight_USI: Tensor, entries_UED: Tensor) -> Tensor:
        """Return the scores of entries for each token, [U, S, E]."""
        match_USIE = F.relu(query_USID @ entries_UED.mT.unsqueeze(1)) * self.size**-0.5
        score_USE: Tensor = (match_USIE * weight_USI.unsqueeze(-1)).sum(dim=2)
        return score_USE
