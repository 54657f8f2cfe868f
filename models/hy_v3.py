"""Hy3: configuration, attention, experts and checkpoint map.

What differs from other decoders: each head of queries and keys is normalised before it is rotated;
routing is DeepSeek-V3's without groups, under names of its own, and the first layers are dense.
Source: transformers, `models/hy_v3/modular_hy_v3.py`; tencent/Hy3-preview.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_moe.checkpoint import Rule, WeightMap, transpose
from neuron_moe.models.biased_routing import (
    ONE_GROUP,
    BiasedRoutingConfig,
    BiasedRoutingModel,
    biased_routing_map,
    read_feed_forward,
    read_sparse_layers,
)
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    either,
    expert_rules,
    fused_expert_rules,
    moe_rules,
    projection_names,
)

ROPE_THETA = 11158840.0  # where config.json does not say
NAMES = {
    "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "router_scaling_factor",
}
NUM_DENSE = 1  # layers before those with experts, the same


@dataclass(frozen=True, slots=True, kw_only=True)
class HYV3Config(BiasedRoutingConfig):
    """Facts of one Hy3 checkpoint, under the names that `BiasedRoutingConfig` gives them."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "HYV3Config":
        """Read config.json as transformers 5.x writes it."""
        # The last says where a sum is rounded, which is once here.
        reader = ConfigReader.of_family(config, "hy_v3", "enable_moe_fp32_combine")
        reader.require("mlp_bias", False)
        reader.require("route_norm", True)
        reader.require("expert_hidden_dim", reader.get("moe_intermediate_size", int))
        return cls.read(
            reader,
            head_dim=reader.get("head_dim", int),
            rope=RopeConfig.from_hf(reader, default_theta=ROPE_THETA),
            **read_feed_forward(
                reader,
                names=NAMES,
                n_routed_experts=reader.get_renamed("num_experts", "num_local_experts", int),
                sparse_layers=read_sparse_layers(reader, NUM_DENSE),
                **ONE_GROUP,
            ),
        )


Config = HYV3Config


class Model(BiasedRoutingModel):
    """Hy3 for generation."""

    config: HYV3Config
    norms = "by head"


def weight_map(config: HYV3Config) -> WeightMap:
    """Map the published tensor names to ours, experts one by one or fused."""
    names = projection_names(has_bias=config.attention_bias, has_norms=True)
    return biased_routing_map(config, names, _sparse_rules, ignored=())


def _sparse_rules(layer: str) -> list[Rule]:
    mlp, moe = f"model.layers.{layer}.mlp.", f"layers.{layer}.moe."
    pair = mlp + "experts", moe + "expert_mlps.mlp_op"
    published = {"router": "router.gate.weight", "bias": "expert_bias", "shared": "shared_mlp"}
    modules = {"bias": "e_score_correction_bias", "shared": "shared_experts"}
    return either(  # as published, and as transformers' modules are called
        separate=moe_rules(mlp, moe, expert_rules(*pair), **published),
        fused=moe_rules(mlp, moe, fused_expert_rules(*pair, transpose), **modules),
    )
