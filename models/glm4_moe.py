"""GLM-4.5 to 4.7 and their Air models: configuration, attention, experts and checkpoint map.

What differs from other decoders: the first half of each head is rotated and the rest left as it is,
queries, keys and values have biases, the larger models normalise each head of queries and keys,
and routing is DeepSeek-V3's with one group.
Source: transformers, `models/glm4_moe/modeling_glm4_moe.py`; arXiv 2508.06471.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from neuron_moe.checkpoint import WeightMap
from neuron_moe.models.biased_routing import (
    BIASED,
    BiasedRoutingConfig,
    BiasedRoutingModel,
    biased_routing_map,
    read_feed_forward,
)
from neuron_moe.models.decoder import GroupedAttention
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import projection_names

ROTATED_PART = 0.5  # of a head, where config.json does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeConfig(BiasedRoutingConfig):
    """Facts of one GLM-4 MoE checkpoint; names are those of its config.json."""

    use_qk_norm: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Glm4MoeConfig":
        """Read config.json as transformers 4.54 to 5.x write it."""
        reader = ConfigReader.of_family(config, "glm4_moe")
        return cls.read(
            reader,
            rope=RopeConfig.from_hf(reader, default_part=ROTATED_PART),
            **read_feed_forward(reader),
        )


Config = Glm4MoeConfig


class Model(BiasedRoutingModel):
    """GLM-4 MoE for generation."""

    config: Glm4MoeConfig

    def build_attention(self, layer: int, dtype: torch.dtype) -> GroupedAttention:
        """Return grouped-query attention, partly rotated."""
        return GroupedAttention(
            self.config,
            dtype,
            bias=BIASED if self.config.attention_bias else (),
            norms="by head" if self.config.use_qk_norm else "",
        )


def weight_map(config: Glm4MoeConfig) -> WeightMap:
    """Map the published tensor names to ours."""
    norms = config.use_qk_norm
    names = projection_names(has_bias=config.attention_bias, has_norms=norms, biased=BIASED)
    return biased_routing_map(config, names)
