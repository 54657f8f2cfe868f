"""AFMoE (Trinity): configuration, layers, experts and checkpoint map.

What differs from other decoders: norms stand before and behind attention and experts; what heads
attend to is gated by a sigmoid of the layer's input; each head of queries and keys is normalised,
and rotated only where the layer slides. Experts are chosen as in DeepSeek-V3, in one group, and
embeddings may be scaled.
Source: transformers, `models/afmoe/modular_afmoe.py`; arcee-ai/Trinity-Mini.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.checkpoint import Rule, WeightMap
from neuron_moe.models.attention import CacheView
from neuron_moe.models.biased_routing import (
    ATTENTION_TYPES,
    ONE_GROUP,
    BiasedRoutingModel,
    SlidingConfig,
    read_feed_forward,
)
from neuron_moe.models.decoder import PROJECTIONS, GroupedAttention, Tokens
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    both_expert_rules,
    decoder_map,
    feed_forward_rules,
    moe_rules,
    projection_names,
)
from neuron_moe.models.wrapped import WrappedLayer, wrapped_rules

ROPE_THETA, WINDOW = 10000.0, 1024  # where config.json does not say
NAMES = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "route_scale",
    "first_k_dense_replace": "num_dense_layers",
}
DEFAULTS = {"routed_scaling_factor": 1.0, "first_k_dense_replace": 1}
NORMS = {
    "before_attention": "input_layernorm",
    "after_attention": "post_attention_layernorm",
    "before_feed_forward": "pre_mlp_layernorm",
    "after_feed_forward": "post_mlp_layernorm",
}
OTHER_KEYS = ("load_balance_coeff", "use_grouped_mm")


@dataclass(frozen=True, slots=True, kw_only=True)
class AfmoeConfig(SlidingConfig):
    """Facts of one AFMoE checkpoint, under the names that `SlidingConfig` gives them."""

    mup_enabled: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "AfmoeConfig":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        reader = ConfigReader.of_family(config, "afmoe", *OTHER_KEYS)
        reader.require("score_func", "sigmoid")
        reader.require("route_norm", True)
        for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
            reader.require(key, 1)
        num_layers = reader.get("num_hidden_layers", int)
        step = reader.get_size("global_attn_every_n_layers", 4)
        usual = tuple(ATTENTION_TYPES[(layer + 1) % step == 0] for layer in range(num_layers))
        return cls.read(
            reader,
            head_dim=reader.get("head_dim", int),
            rope=RopeConfig.from_hf(reader, default_theta=ROPE_THETA),
            **read_feed_forward(
                reader, names=NAMES, defaults=DEFAULTS, prediction_layers=(), **ONE_GROUP
            ),
            sliding_window=reader.get_size("sliding_window", WINDOW),
            layer_types=reader.get_strings("layer_types") or usual,
        )


Config = AfmoeConfig


class Attention(GroupedAttention):
    """Grouped-query attention that is gated; rotated and sliding, or neither."""

    def __init__(self, config: AfmoeConfig, layer: int, dtype: torch.dtype) -> None:
        bias = PROJECTIONS if config.attention_bias else ()
        reach, norms = config.reach(layer), "by head"
        rotates = reach.window is not None
        super().__init__(config, dtype, reach=reach, bias=bias, norms=norms, rotates=rotates)
        sizes = config.hidden_size, self.o_proj.in_features
        self.q_gate_proj = nn.Linear(*sizes, bias=False, dtype=dtype)

    def forward(self, hidden_USH: Tensor, tokens: Tokens, view: CacheView | None) -> Tensor:
        """Return the attention output `[U, S, H]`; arguments as in `DecoderLayer`."""
        mixed = self.mix(self.project(hidden_USH), tokens, view)
        out_USH: Tensor = self.o_proj(mixed * torch.sigmoid(self.q_gate_proj(hidden_USH)))
        return out_USH


class Model(BiasedRoutingModel):
    """AFMoE for generation."""

    config: AfmoeConfig

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the first hidden states `[.., H]` of token ids, scaled where config.json says."""
        embedded = super().embed(input_ids)
        return embedded * self.config.hidden_size**0.5 if self.config.mup_enabled else embedded

    def build_layer(self, layer: int, dtype: torch.dtype, backend: str) -> WrappedLayer:
        """Return a layer with norms around its parts."""
        config = self.config
        norms = {name: config.make_norm(config.hidden_size, dtype) for name in NORMS}
        feed_forward = self.build_feed_forward(layer, dtype, backend)
        return WrappedLayer(Attention(config, layer, dtype), feed_forward, **norms)


def weight_map(config: AfmoeConfig) -> WeightMap:
    """Map the published tensor names to ours, experts one by one or fused."""
    names = projection_names(has_bias=config.attention_bias, has_norms=True)
    gate = "layers.{layer}.self_attn.%sgate_proj.weight"
    rules = wrapped_rules("{layer}", NORMS)
    rules += [Rule(f"model.layers.{{layer}}.{name}", f"layers.{{layer}}.{name}") for name in names]
    rules.append(Rule("model." + gate % "", gate % "q_"))
    rules += feed_forward_rules(config.sparse_layers, config.num_hidden_layers, _sparse_rules)
    return decoder_map(config, rules, expert=config.n_routed_experts)


def _sparse_rules(mlp: str, moe: str) -> list[Rule]:
    names = {"router": "router.gate.weight", "bias": "expert_bias", "shared": "shared_experts"}
    return moe_rules(mlp, moe, both_expert_rules(mlp, moe), **names)
