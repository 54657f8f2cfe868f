"""Laguna (XS.2, S): configuration, attention, experts and checkpoint map.

What differs from other decoders: sliding and whole layers have rotary embeddings and numbers of
heads of their own; each head of queries and keys is normalised; what heads attend to is gated by a
softplus of the layer's input, a number for each head or for each of its elements. Experts are
chosen as in DeepSeek-V3, in one group.
Source: transformers, `models/laguna/modular_laguna.py`; poolside/Laguna-XS.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuron_moe.checkpoint import Rule, WeightMap, transpose
from neuron_moe.models.attention import CacheView
from neuron_moe.models.biased_routing import (
    ATTENTION_TYPES,
    ONE_GROUP,
    biased_routing_map,
    read_feed_forward,
    read_sparse_layers,
)
from neuron_moe.models.decoder import PROJECTIONS, Tokens
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.two_ropes import TurnedAttention, TwoRopesConfig, TwoRopesModel, read_ropes
from neuron_moe.models.weight_rules import (
    either,
    expert_rules,
    fused_expert_rules,
    moe_rules,
    projection_names,
)
from neuron_moe.spec import RouterSpec

WINDOW, NUM_DENSE = 512, 1  # where config.json does not say
ROPES = {
    "sliding_attention": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    },
    "full_attention": {
        "rope_type": "default",
        "rope_theta": 500000.0,
        "partial_rotary_factor": 0.5,
    },
}
NAMES = {
    "n_routed_experts": "num_experts",
    "routed_scaling_factor": "moe_routed_scaling_factor",
}
GATES = (True, "per-head", "per-element", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LagunaConfig(TwoRopesConfig):
    """Facts of one checkpoint, under the names that `SlidingConfig` gives them.

    Attributes:
        shared_expert_intermediate_size: of the shared expert.
        heads: query heads of each layer.
        gates_elements: each element of a head has a gate of its own.
        router_softcap: logits of routers are capped by it; 0 for none.
    """

    heads_key: ClassVar[str] = "num_attention_heads_per_layer"
    shared_expert_intermediate_size: int
    heads: tuple[int, ...]
    gates_elements: bool
    router_softcap: float = 0.0

    def __post_init__(self) -> None:
        TwoRopesConfig.__post_init__(self)
        if len(self.heads) != self.num_hidden_layers or any(
            heads <= 0 or heads % self.num_key_value_heads for heads in self.heads
        ):
            raise ValueError(
                f"{self.heads_key}={list(self.heads)}: must name num_hidden_layers="
                f"{self.num_hidden_layers} layers, each a multiple of num_key_value_heads="
                f"{self.num_key_value_heads}. Correct config.json."
            )

    @property
    def router_spec(self) -> RouterSpec:
        """How experts are chosen; raises ValueError where that is not possible."""
        spec: RouterSpec = TwoRopesConfig.router_spec.__get__(self)
        return replace(spec, logit_softcap=self.router_softcap)

    @property
    def shared_size(self) -> int:
        """Columns of the shared expert."""
        return self.shared_expert_intermediate_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LagunaConfig":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        reader = ConfigReader.of_family(config, "laguna")
        reader.require("moe_apply_router_weight_on_input", False)
        gating = True if reader.is_absent("gating") else reader.get_raw("gating")
        if gating not in GATES:
            raise ValueError(f"gating={gating!r}: must be one of {GATES}. Correct config.json.")
        num_layers = reader.get("num_hidden_layers", int)
        usual = (reader.get("num_attention_heads", int),)
        return cls.read(
            reader,
            head_dim=reader.get("head_dim", int, 128),
            sliding_window=reader.get_size("sliding_window", WINDOW),
            layer_types=reader.get_strings("layer_types") or ATTENTION_TYPES[1:] * num_layers,
            heads=reader.get_ints("num_attention_heads_per_layer") or usual * num_layers,
            gates_elements=gating in (False, "per-element"),
            router_softcap=reader.get("moe_router_logit_softcapping", float, 0.0),
            **read_ropes(reader, ROPES),
            **read_feed_forward(
                reader,
                names=NAMES,
                defaults={"routed_scaling_factor": 1.0},
                n_shared_experts=None,
                sparse_layers=read_sparse_layers(reader, NUM_DENSE),
                prediction_layers=(),
                **ONE_GROUP,
            ),
        )


Config = LagunaConfig


class Attention(TurnedAttention):
    """Grouped-query attention whose result is gated."""

    def __init__(self, config: LagunaConfig, layer: int, dtype: torch.dtype) -> None:
        bias = PROJECTIONS if config.attention_bias else ()
        config = replace(config, num_attention_heads=config.heads[layer])
        super().__init__(config, layer, dtype, bias=bias, norms="by head")
        gates = self.o_proj.in_features if config.gates_elements else config.num_attention_heads
        self.q_gate_proj = nn.Linear(config.hidden_size, gates, bias=False, dtype=dtype)

    def forward(self, hidden_USH: Tensor, tokens: Tokens, view: CacheView | None) -> Tensor:
        """Return the attention output `[U, S, H]`; arguments as in `DecoderLayer`."""
        mixed = self.mix(self.project(hidden_USH), tokens, view)
        gate = self.gate(self.q_gate_proj(hidden_USH).float()).to(mixed.dtype)
        gated = mixed.reshape(*gate.shape, -1) * gate.unsqueeze(-1)
        out_USH: Tensor = self.o_proj(gated.flatten(-2))
        return out_USH

    def gate(self, logits: Tensor) -> Tensor:
        """Return what multiplies heads, or elements of heads."""
        return F.softplus(logits)


class Model(TwoRopesModel):
    """Laguna for generation."""

    config: LagunaConfig

    def build_attention(self, layer: int, dtype: torch.dtype) -> Attention:
        """Return the attention of a layer."""
        return Attention(self.config, layer, dtype)


def weight_map(config: LagunaConfig) -> WeightMap:
    """Map the published tensor names to ours, experts one by one or fused."""
    names = projection_names(has_bias=config.attention_bias, has_norms=True)
    gate = "layers.{layer}.self_attn.%sg%s_proj.weight"
    own = [Rule("model." + gate % ("", ""), gate % ("q_", "ate"))]
    return biased_routing_map(config, names, _sparse_rules, ignored=(), own=own)


def _sparse_rules(layer: str) -> list[Rule]:
    mlp, moe = f"model.layers.{layer}.mlp.", f"layers.{layer}.moe."
    pair, bias = (mlp + "experts", moe + "expert_mlps.mlp_op"), "e_score_correction_bias"
    published = {"bias": f"experts.{bias}", "shared": "shared_expert"}
    modules = {"bias": f"gate.{bias}", "shared": "shared_experts"}
    return either(
        separate=moe_rules(mlp, moe, expert_rules(*pair), **published),
        fused=moe_rules(mlp, moe, fused_expert_rules(*pair, transpose), **modules),
    )
