"""Solar-Open (100B): configuration, attention, experts and checkpoint map.

Plain grouped-query attention, and DeepSeek-V3's routing with one group in every layer.
Source: transformers, `models/solar_open/modular_solar_open.py`; upstage/Solar-Open-100B.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_moe.checkpoint import WeightMap
from neuron_moe.models.biased_routing import (
    BIASED,
    BiasedRoutingConfig,
    BiasedRoutingModel,
    biased_routing_map,
    read_feed_forward,
)
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import projection_names

ROPE_THETA, ROTATED_PART = 1000000.0, 1.0  # where config.json does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class SolarOpenConfig(BiasedRoutingConfig):
    """Facts of one Solar-Open checkpoint; names are those of its config.json."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "SolarOpenConfig":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
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
    biased = BIASED


def weight_map(config: SolarOpenConfig) -> WeightMap:
    """Map the published tensor names to ours."""
    names = projection_names(has_bias=config.attention_bias, biased=BIASED)
    return biased_routing_map(config, names)
