"""Hy3: configuration, attention, experts and checkpoint map.

What differs from other decoders: each head of queries and keys is normalised before it is rotated;
routing is DeepSeek-V3's without groups, under names of its own, and the first layers are dense.
Source: transformers, `models/hy_v3/modular_hy_v3.py`; tencent/Hy3-preview.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from neuron_moe.checkpoint import Rule, WeightMap, transpose
from neuron_moe.models.biased_routing import (
    BiasedRoutingConfig,
    biased_routing_map,
    build_feed_forward,
    read_sparse_layers,
)
from neuron_moe.models.decoder import DecoderModel, GroupedAttention
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import GatedMLP
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    PROJECTIONS,
    either,
    expert_rules,
    fused_expert_rules,
    mlp_rules,
    projection_names,
)
from neuron_moe.moe import MoE

ROPE_THETA = 11158840.0  # where config.json does not say
NUM_DENSE = 1  # layers before those with experts, the same


@dataclass(frozen=True, slots=True, kw_only=True)
class HYV3Config(BiasedRoutingConfig):
    """Facts of one Hy3 checkpoint, under the names that `BiasedRoutingConfig` gives them."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "HYV3Config":
        """Read config.json as transformers 5.x writes it.

        Raises:
            ValueError: a missing, unknown or contradictory key, or a variant nobody published.
        """
        # The last says where a sum is rounded, which is once here.
        reader = ConfigReader.of_family(config, "hy_v3", "enable_moe_fp32_combine")
        reader.require("mlp_bias", False)
        reader.require("route_norm", True)
        num_layers = reader.get("num_hidden_layers", int)
        inner = reader.get("moe_intermediate_size", int)
        reader.require("expert_hidden_dim", inner)
        more = reader.get("num_nextn_predict_layers", int, 0)
        return cls.read(
            reader,
            head_dim=reader.get("head_dim", int),
            rope=RopeConfig.from_hf(reader, default_theta=ROPE_THETA),
            intermediate_size=reader.get("intermediate_size", int),
            moe_intermediate_size=inner,
            n_routed_experts=reader.get_renamed("num_experts", "num_local_experts", int),
            n_shared_experts=reader.get("num_shared_experts", int),
            num_experts_per_tok=reader.get("num_experts_per_tok", int),
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=reader.get("router_scaling_factor", float),
            attention_bias=reader.get("attention_bias", bool, False),
            sparse_layers=read_sparse_layers(reader, NUM_DENSE),
            prediction_layers=tuple(range(num_layers, num_layers + more)),
        )


Config = HYV3Config


class Model(DecoderModel):
    """Hy3 for generation."""

    config: HYV3Config

    def build_attention(self, layer: int, dtype: torch.dtype) -> GroupedAttention:
        """Return grouped-query attention with norms on heads."""
        bias = PROJECTIONS if self.config.attention_bias else ()
        return GroupedAttention(self.config, dtype, bias=bias, norms="by head")

    def build_feed_forward(self, layer: int, dtype: torch.dtype, backend: str) -> MoE | GatedMLP:
        """Return a MoE, or an MLP where the layer is dense."""
        return build_feed_forward(self.config, layer, dtype, backend)


def weight_map(config: HYV3Config) -> WeightMap:
    """Map the published tensor names to ours, experts one by one or fused."""
    names = projection_names(has_bias=config.attention_bias)
    names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    return biased_routing_map(config, names, _sparse_rules, ignored=())


def _sparse_rules(layer: str) -> list[Rule]:
    mlp, moe = f"model.layers.{layer}.mlp.", f"layers.{layer}.moe."
    pair = mlp + "experts", moe + "expert_mlps.mlp_op"
    bias = moe + "router.e_score_correction_bias"
    return [
        Rule(mlp + "router.gate.weight", moe + "router.linear_router.weight"),
        Rule(mlp + "expert_bias", bias, is_exact=True),
        *mlp_rules(mlp + "shared_mlp", moe + "shared_experts"),
        *either(separate=expert_rules(*pair), fused=fused_expert_rules(*pair, transpose)),
    ]
