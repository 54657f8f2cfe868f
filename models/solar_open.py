"""Solar-Open (100B): configuration, attention, experts and checkpoint map.

Plain grouped-query attention, and DeepSeek-V3's routing with one group in every layer.
Source: transformers, `models/solar_open/modular_solar_open.py`; upstage/Solar-Open-100B.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from neuron_moe.checkpoint import WeightMap
from neuron_moe.models.biased_routing import (
    BiasedRoutingConfig,
    BiasedRoutingModel,
    biased_routing_map,
    read_feed_forward,
)
from neuron_moe.models.decoder import GroupedAttention
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import PROJECTIONS

ROPE_THETA, ROTATED_PART = 1000000.0, 1.0  # where config.json does not say
BIASED = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class SolarOpenConfig(BiasedRoutingConfig):
    """Facts of one Solar-Open checkpoint; names are those of its config.json."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "SolarOpenConfig":
        """Read config.json as published with the model, or as transformers 5.x writes it.

        Raises:
            ValueError: a missing, unknown or contradictory key, or a variant nobody published.
        """
        reader = ConfigReader.of_family(config, "solar_open")
        reader.require("use_qk_norm", False)
        reader.require("first_k_dense_replace", 0)
        inner, part = reader.get("moe_intermediate_size", int), ROTATED_PART
        return cls.read(
            reader,
            head_dim=reader.get("head_dim", int),
            rope=RopeConfig.from_hf(reader, default_theta=ROPE_THETA, default_part=part),
            **read_feed_forward(
                reader, defaults={"first_k_dense_replace": 0, "intermediate_size": inner}
            ),
        )


Config = SolarOpenConfig


class Model(BiasedRoutingModel):
    """Solar-Open for generation."""

    config: SolarOpenConfig

    def build_attention(self, layer: int, dtype: torch.dtype) -> GroupedAttention:
        """Return grouped-query attention."""
        return GroupedAttention(
            self.config, dtype, bias=BIASED if self.config.attention_bias else ()
        )


def weight_map(config: SolarOpenConfig) -> WeightMap:
    """Map the published tensor names to ours."""
    names = [f"{name}.weight" for name in PROJECTIONS]
    if config.attention_bias:
        names += [f"{name}.bias" for name in BIASED]
    return biased_routing_map(config, [f"self_attn.{name}" for name in names])
