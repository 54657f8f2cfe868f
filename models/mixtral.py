"""Mixtral 8x7B and 8x22B: configuration, attention, experts and checkpoint map.

The plainest of the families: grouped-query attention, in all layers sliding or in none, and a
softmax over all experts whose two largest weights are divided by their sum.
Source: transformers, `models/mixtral/modeling_mixtral.py`; arXiv 2401.04088.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_moe.checkpoint import WeightMap
from neuron_moe.models.decoder import DecoderConfig, DecoderModel, Experts
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import router_spec
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    block_sparse_rules,
    decoder_map,
    decoder_rules,
    projection_names,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    """Facts of one Mixtral checkpoint; names are those of its config.json."""

    intermediate_size: int
    num_local_experts: int
    num_experts_per_tok: int
    sliding_window: int | None

    @property
    def experts(self) -> Experts:
        """Experts in every layer, chosen by a softmax."""
        count, top_k = self.num_local_experts, self.num_experts_per_tok
        router = router_spec(count, self.hidden_size, top_k=top_k, renormalize=True)
        return Experts(router, self.intermediate_size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "MixtralConfig":
        """Read config.json as transformers 4.36 to 5.x write it."""
        # The last one disturbs the router while training.
        reader = ConfigReader.of_family(config, "mixtral", "router_jitter_noise")
        return cls.read(
            reader,
            rope=RopeConfig.from_hf(reader),
        )


Config = MixtralConfig


class Model(DecoderModel):
    """Mixtral for generation."""

    config: MixtralConfig


def weight_map(config: MixtralConfig) -> WeightMap:
    """Map the published tensor names to ours, and those of transformers' modules."""
    rules = [*decoder_rules(projection_names(has_bias=False)), *block_sparse_rules()]
    return decoder_map(config, rules, expert=config.num_local_experts)
