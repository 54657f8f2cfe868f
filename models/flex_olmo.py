"""FlexOlmo: OLMoE whose norms stand behind attention and experts, not before them.

Source: transformers, `models/flex_olmo/modular_flex_olmo.py`; allenai/FlexOlmo-7x7B-1T.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from neuron_moe.checkpoint import WeightMap
from neuron_moe.models import olmoe
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.olmoe import OlmoeConfig
from neuron_moe.models.weight_rules import decoder_map
from neuron_moe.models.wrapped import WrappedLayer, wrapped_rules

ROPE_THETA = 500000.0  # where config.json does not say
NORMS = {
    "after_attention": "post_attention_layernorm",
    "after_feed_forward": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexOlmoConfig(OlmoeConfig):
    """Facts of one FlexOlmo checkpoint; names are those of its config.json."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "FlexOlmoConfig":
        """Read config.json as transformers 5.x writes it."""
        reader = ConfigReader.of_family(config, "flex_olmo")
        return cls.read_olmoe(reader, ROPE_THETA, clip_qkv=None)


Config = FlexOlmoConfig


class Model(olmoe.Model):
    """FlexOlmo for generation."""

    def build_layer(self, layer: int, dtype: torch.dtype, backend: str) -> WrappedLayer:
        """Return a layer with norms behind its parts."""
        norms = {name: self.config.make_norm(self.config.hidden_size, dtype) for name in NORMS}
        attention = self.build_attention(layer, dtype)
        return WrappedLayer(attention, self.build_feed_forward(layer, dtype, backend), **norms)


def weight_map(config: FlexOlmoConfig) -> WeightMap:
    """Map the published tensor names to ours, experts one by one or fused."""
    rules = [*wrapped_rules("{layer}", NORMS), *olmoe.part_rules(config)]
    return decoder_map(config, rules, expert=config.num_experts)
