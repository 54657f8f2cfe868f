"""DeepSeek-V4's attention: to the latest tokens, and to entries pooled of all tokens.

One key, which is the value too, serves all heads. It and queries are rotated at their end, and what
is summed of the values is rotated back, by the place of the query. Beside the latest tokens a layer
attends to entries of overlapping runs of few tokens, of which an indexer picks some ("compressed
sparse"), or of runs of many ("heavily compressed"). They are there from the first complete run on,
so no plain attention is the same, but for the shortest sequences. Outputs go through a latent for
each group of heads.
Source: transformers, `models/deepseek_v4/modular_deepseek_v4.py`.

Letters beside those of `decoder`: R rank of a latent, E entries of a sequence, G groups of heads.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.models.attention import CacheShape, CoreSizes, StateShape, attend, need_view
from neuron_moe.models.compressed_entries import Compressor, Indexer, PooledView, PoolSpec, turn_end
from neuron_moe.models.decoder import Tokens
from neuron_moe.models.deepseek_v4_config import SLIDING, SPARSE, DeepseekV4Config
from neuron_moe.models.layers import unit_rms


def attend_pooled(
    layer: "CompressedAttention", hidden_USH: Tensor, tokens: Tokens, view: PooledView | None
) -> Tensor:
    """Compute a layer with what the view has of each sequence: [U, S, H]."""
    return layer.compute(hidden_USH, tokens, need_view(view))


class CompressedAttention(nn.Module):
    """Attention of a layer; attributes are those of `GroupedAttention`.

    Args:
        config: sizes.
        layer: number of the layer.
        dtype: of the parameters, but of `sinks` and what `Compressor` says.

    Attributes:
        core: called as `attend_pooled`; a server's finds the view of each sequence itself. The
            leading axes are [1, T] in prefill and [T, 1] in decode then.
        whole: modules that every rank holds whole, for they make what heads share.
        read_weights: projections whose weights are read here, so that they stay plain.
    """

    core: Callable[["CompressedAttention", Tensor, Tokens, Any], Tensor]

    whole = ("q_a_proj", "kv_proj", "compressor", "indexer")
    read_weights = ("o_a_proj",)

    def __init__(self, config: DeepseekV4Config, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.reach, self.scale = config, config.reach(layer), config.head_dim**-0.5
        self.core = attend_pooled
        size, head_dim, heads = config.hidden_size, config.head_dim, config.num_attention_heads
        latent, inner = config.q_lora_rank, config.o_groups * config.o_lora_rank
        self.cache_shape: CacheShape = ((1, head_dim),)

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype)

        self.q_a_proj, self.q_a_norm = linear(size, latent), config.make_norm(latent, dtype)
        self.q_b_proj = linear(latent, heads * head_dim)
        self.kv_proj, self.kv_norm = linear(size, head_dim), config.make_norm(head_dim, dtype)
        self.o_a_proj = linear(heads * head_dim // config.o_groups, inner)
        self.o_b_proj = linear(inner, size)
        self.sinks = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        kind = config.layer_types[layer]
        count = config.rotated_of(config.rope) // 2
        self.columns = slice(count) if kind == SLIDING else slice(count, None)
        self.compressor = self.indexer = None
        if kind == SLIDING:
            return
        pool = PoolSpec(
            rate=config.rates[kind],
            overlaps=kind == SPARSE,
            rope=config.entry_rope,
            rotated_size=config.rotated_of(config.entry_rope),
            eps=config.rms_norm_eps,
        )
        self.compressor = Compressor(size, head_dim, pool, dtype)
        if kind == SPARSE:
            self.indexer = Indexer(
                *(size, latent),
                heads=config.index_n_heads,
                size=config.index_head_dim,
                top_k=config.index_topk,
                spec=pool,
                dtype=dtype,
            )

    @property
    def pools(self) -> list[Compressor]:
        """What pools entries."""
        found = [] if self.compressor is None else [self.compressor]
        return found if self.indexer is None else [*found, self.indexer.compressor]

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What is kept of each sequence beside tokens and entries."""
        return tuple(pool.latest for pool in self.pools)

    def pool_shapes(self, context: int) -> list[StateShape]:
        """Return what pools keep of a sequence of up to so many tokens."""
        return [shape for pool in self.pools for shape in (pool.entries(context), pool.latest)]

    def sequence_shapes(self, context: int) -> list[StateShape]:
        """Return all that a layer needs of a sequence: the latest keys, [W - 1, D], then pools."""
        latest = StateShape((self.config.sliding_window - 1, self.config.head_dim))
        return [latest, *self.pool_shapes(context)]

    def entries(self, context: int) -> tuple[int, int]:
        """Return how many entries a token attends to after so many, and how many are scored."""
        if self.compressor is None:
            return 0, 0
        there = context // self.compressor.spec.rate
        if self.indexer is None or there <= self.indexer.top_k:
            return there, 0
        return self.indexer.top_k, there

    def core_sizes(self, new_tokens: int) -> CoreSizes:
        """Return what is computed with, however many tokens of a sequence are new."""
        size = self.config.head_dim
        return CoreSizes(self.config.num_attention_heads, 1, size, size)

    def forward(self, hidden_USH: Tensor, tokens: Tokens, view: PooledView | None) -> Tensor:
        """Return the attention output `[U, S, H]`; arguments as in `DecoderLayer`."""
        return self.core(self, hidden_USH, tokens, view)

    def compute(self, hidden_USH: Tensor, tokens: Tokens, view: PooledView) -> Tensor:
        """Return the same of sequences of which each has S new tokens."""
        config, leading = self.config, hidden_USH.shape[:2]
        heads = (*leading, -1, config.head_dim)
        cos_USd, sin_USd = (table[..., self.columns] for table in tokens.rope)
        latent_USR = self.q_a_norm(self.q_a_proj(hidden_USH))
        query_USQD = unit_rms(self.q_b_proj(latent_USR).view(heads), config.rms_norm_eps)
        query_USQD = turn_end(query_USQD.to(hidden_USH.dtype), cos_USd, sin_USd)
        key_US1D = turn_end(self.kv_norm(self.kv_proj(hidden_USH)).view(heads), cos_USd, sin_USd)
        (key_U1CD,) = view.window.extend(key_US1D.transpose(1, 2))
        mask_USC = view.window.mask_USC
        if self.compressor is not None:
            entries_UED = self.compressor(hidden_USH, view.pool(0))
            seen_USE = self.compressor.visible(tokens.places_US, view.num_positions)
            if self.indexer is not None:
                own = hidden_USH, latent_USR, (cos_USd, sin_USd), seen_USE, view.pool(1)
                seen_USE = self.indexer(*own)
            key_U1CD = torch.cat((key_U1CD, entries_UED.unsqueeze(1)), dim=2)
            mask_USC = torch.cat((mask_USC, seen_USE), dim=2)
        out = attend(query_USQD, key_U1CD, key_U1CD, mask_USC, self.sinks, self.scale)
        out_USQD = turn_end(out.view(heads), cos_USd, -sin_USd)
        made = (config.o_groups, config.o_lora_rank, -1)
        parts_USGi = out_USQD.view(*leading, config.o_groups, -1)
        latents = torch.einsum("usgi,gri->usgr", parts_USGi, self.o_a_proj.weight.view(made))
        out_USH: Tensor = self.o_b_proj(latents.flatten(2))
        return out_USH
