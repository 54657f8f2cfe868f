"""DeepSeek-V4: layers, experts and checkpoint map.

What differs from other decoders: the residual is several streams (`hyper_connections`), most layers
attend to entries pooled of tokens too (`compressed_attention`), and in the first ones a table of
token ids chooses the experts. All layers have experts, and their gates and inputs are clamped.
Layers that predict further tokens (`mtp.`) are not read.
Source: transformers, `models/deepseek_v4/modular_deepseek_v4.py`; deepseek-ai/DeepSeek-V4-Flash.

Letters: those of `decoder`; N streams.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from neuron_moe.checkpoint import Rule, Transform, WeightMap, identity, whole_numbers
from neuron_moe.models.attention import KVCache
from neuron_moe.models.compressed_attention import CompressedAttention
from neuron_moe.models.compressed_entries import PooledView
from neuron_moe.models.decoder import DecoderModel, Tokens
from neuron_moe.models.deepseek_v4_config import HASH, SLIDING, SPARSE, Config, DeepseekV4Config
from neuron_moe.models.hyper_connections import HyperConnection, StreamHead
from neuron_moe.models.hyper_layer import HyperLayer
from neuron_moe.models.layers import build_shared, gated_moe
from neuron_moe.models.rope import rope_tables
from neuron_moe.models.weight_rules import decoder_map, either, expert_rules, with_modules
from neuron_moe.router import Router

__all__ = ["Config", "Model", "weight_map"]


class Model(DecoderModel):
    """DeepSeek-V4 for generation."""

    config: DeepseekV4Config
    runs_layers_alone = False

    def __init__(self, config: DeepseekV4Config, **options: Any) -> None:
        super().__init__(config, **options)
        self.hc_head = StreamHead(config.streams)

    def build_layer(self, layer: int, dtype: torch.dtype, backend: str) -> HyperLayer:
        """Return a layer."""
        config, act = self.config, self.config.formula
        size, inner = config.hidden_size, config.moe_intermediate_size
        shared = build_shared(size, inner, dtype, formula=act)
        router = Router(config.router_spec(layer))
        moe = gated_moe(router, inner, dtype, backend, shared, formula=act)
        attention = CompressedAttention(config, layer, dtype)
        pair = HyperConnection(config.streams), HyperConnection(config.streams)
        return HyperLayer(config, dtype, attention, moe, pair)

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """Return an empty cache of `capacity` positions a sequence, in the model's dtype."""
        return KVCache(
            [attention.cache_shape for attention in self.attentions],
            batch_size=batch_size,
            capacity=capacity,
            like=self.embed_tokens.weight,
            states=[attention.pool_shapes(capacity) for attention in self.attentions],
        )

    def _run(self, input_ids_US: Tensor, tokens: Tokens, views: Sequence[Any]) -> Tensor:
        """Return the one stream behind the last layer, [U, S, H]."""
        count, tokens = self.config.streams.num_streams, tokens._replace(ids_US=input_ids_US)
        streams_USNH = self.embed(input_ids_US).unsqueeze(2).expand(-1, -1, count, -1)
        for layer, view in zip(self.layers, views, strict=True):
            streams_USNH = layer(streams_USNH, tokens, view)
        out_USH: Tensor = self.hc_head(streams_USNH)
        return out_USH

    def describe_tokens(self, places_US: Tensor, real_US: Tensor | None) -> Tokens:
        """Return what all layers need to know of the new tokens."""
        config = self.config
        ropes = config.rope, config.entry_rope
        tables = [rope_tables(rope, config.rotated_of(rope), places_US) for rope in ropes]
        cos_USd, sin_USd = (torch.cat(parts, dim=-1) for parts in zip(*tables, strict=True))
        return Tokens(places_US, (cos_USd, sin_USd), real_US)

    def make_views(
        self, real_UC: Tensor, places_UC: Tensor, start: int, cache: KVCache | None
    ) -> list[Any]:
        """Return what the new tokens, at positions from `start` on, see in each layer."""
        windows: list[Any] = super().make_views(real_UC, places_UC, start, cache)
        seen_U, total_U = real_UC[:, :start].sum(dim=1), real_UC.sum(dim=1)
        states = [()] * len(windows) if cache is None else cache.states
        return [
            PooledView(window, kept, seen_U, total_U, real_UC.shape[1])
            for window, kept in zip(windows, states, strict=True)
        ]


# Of a layer's tensors: names as published, and here.
NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.attn_sink": "self_attn.sinks",
    "ffn.gate.weight": "moe.router.linear_router.weight",
    "ffn.shared_experts.w1.weight": "moe.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "moe.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "moe.shared_experts.down_proj.weight",
    **{
        f"hc_{block}_{part}": f"{block}_hc.{part}"
        for block in ("attn", "ffn")
        for part in StreamHead.whole
    },
}
POOL_NAMES = {
    "wkv.weight": "kv_proj.weight",
    "wgate.weight": "gate_proj.weight",
    "norm.weight": "norm.weight",
    "ape": "position_bias",
}
INDEX_NAMES = {"wq_b.weight": "q_b_proj.weight", "weights_proj.weight": "weights_proj.weight"}
TOP_NAMES = {"embed": "embed_tokens", "norm": "norm"}
MODULES = {  # what transformers' modules call parts of our names
    "expert_table": "tid2eid",
    "hc_head.": "hc_head.hc_",
    "compressor.norm.": "compressor.kv_norm.",
    "indexer.compressor.": "compressor.indexer.",
    "attn.indexer.weights_proj.": "attn.compressor.indexer.scorer.weights_proj.",
    "attn.indexer.q_b_proj.": "attn.compressor.indexer.q_b_proj.",
}
# Stored in float32: ends of published names.
EXACT = ("sink", "ape", "bias", *(f"_{part}" for part in StreamHead.whole))


def weight_map(config: DeepseekV4Config) -> WeightMap:
    """Map the published tensor names to ours; transformers writes some otherwise."""
    top = {f"{name}.weight": f"{ours}.weight" for name, ours in TOP_NAMES.items()}
    top |= {f"hc_head_{part}": f"hc_head.{part}" for part in StreamHead.whole}
    layers = range(config.num_hidden_layers)
    names = top | {
        f"layers.{layer}.{name}": f"layers.{layer}.{ours}"
        for layer in layers
        for name, ours in _layer_names(config, layer).items()
    }
    published = [*_rules(names), *_expert_rules("")]
    saved = {_as_saved(name, ours): ours for name, ours in names.items()}
    rules = [
        Rule("head.weight", "lm_head.weight"),
        *either(published=published, transformers=[*_rules(saved), *_expert_rules("model.")]),
    ]
    sizes = {"expert": config.n_routed_experts, "block": max(1, config.prediction_layers)}
    return with_modules(decoder_map(config, rules, _prediction_names(), **sizes), MODULES)


def _layer_names(config: DeepseekV4Config, layer: int) -> dict[str, str]:
    """Return what a layer has, under published names and ours, but routed experts."""
    pool, index, kind = "attn.compressor.", "attn.indexer.", config.layer_types[layer]
    is_hash = config.mlp_layer_types[layer] == HASH
    choice = ("tid2eid", "expert_table") if is_hash else ("bias", "e_score_correction_bias")
    names = NAMES | {f"ffn.gate.{choice[0]}": f"moe.router.{choice[1]}"}
    if kind != SLIDING:
        names |= {pool + name: f"self_attn.compressor.{our}" for name, our in POOL_NAMES.items()}
    if kind == SPARSE:
        pool = index + "compressor."
        names |= {index + name: f"self_attn.indexer.{our}" for name, our in INDEX_NAMES.items()}
        names |= {
            pool + name: f"self_attn.indexer.compressor.{our}" for name, our in POOL_NAMES.items()
        }
    return names


def _as_saved(name: str, ours: str) -> str:
    """Return how transformers writes a published name."""
    if ours.startswith("hc_head."):
        return f"model.hc_head.hc_{ours.removeprefix('hc_head.')}"
    if "." not in ours.removesuffix(".weight"):
        return "model." + ours
    return "model." + name.replace(".kv_norm.", ".norm.")


def _rules(names: Mapping[str, str]) -> list[Rule]:
    return [
        Rule(name, ours, _transform(ours), is_exact=name.endswith(EXACT))
        for name, ours in names.items()
    ]


def _transform(ours: str) -> Transform:
    return whole_numbers if ours.endswith(".expert_table") else identity


def _expert_rules(source: str) -> list[Rule]:
    target = "layers.{layer}.moe.expert_mlps.mlp_op"
    return expert_rules(f"{source}layers.{{layer}}.ffn.experts", target, ("w1", "w3", "w2"))


def _prediction_names() -> list[str]:
    """Return the tensors of layers that predict further tokens."""
    names = [f"{name}.weight" for name in ("e_proj", "h_proj", "enorm", "hnorm", "norm")]
    names += [f"hc_head_{part}" for part in StreamHead.whole]
    names += [*NAMES, "ffn.gate.bias"]
    names += [f"ffn.experts.{{expert}}.{name}.weight" for name in ("w1", "w2", "w3")]
    return [f"mtp.{{block}}.{name}" for name in names]
