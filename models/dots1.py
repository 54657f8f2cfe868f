"""dots.llm1: configuration, attention, experts and checkpoint map.

Queries and keys are normalised by head before they are rotated, as in Qwen3; experts are chosen as
in DeepSeek-V3. From `max_window_layers` on, attention slides where a window is given.
Source: transformers, `models/dots1/modular_dots1.py`; rednote-hilab/dots.llm1.inst.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_moe.checkpoint import WeightMap
from neuron_moe.models.biased_routing import (
    ATTENTION_TYPES,
    BiasedRoutingModel,
    SlidingConfig,
    biased_routing_map,
    read_feed_forward,
    read_window,
)
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import projection_names

OTHER_KEYS = ("moe_layer_freq", "pretraining_tp", "scoring_func", "use_sliding_window")  # unread
GROUPS = {"n_group": 1, "topk_group": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dots1Config(SlidingConfig):
    """Facts of one dots.llm1 checkpoint; names are those of its config.json."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Dots1Config":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        reader = ConfigReader.of_family(config, "dots1", *OTHER_KEYS)
        window = read_window(reader)
        first = reader.get("max_window_layers", int, 62)
        usual = (
            ATTENTION_TYPES[window is None or layer < first]
            for layer in range(reader.get("num_hidden_layers", int))
        )
        return cls.read(
            reader,
            rope=RopeConfig.from_hf(reader),
            sliding_window=window,
            layer_types=reader.get_strings("layer_types") or tuple(usual),
            **read_feed_forward(reader, defaults=GROUPS),
        )


Config = Dots1Config


class Model(BiasedRoutingModel):
    """dots.llm1 for generation."""

    config: Dots1Config
    norms = "by head"


def weight_map(config: Dots1Config) -> WeightMap:
    """Map the published tensor names to ours."""
    names = projection_names(has_bias=config.attention_bias, has_norms=True)
    return biased_routing_map(config, names)
