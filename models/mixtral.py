"""Mixtral 8x7B and 8x22B: configuration, attention, experts and checkpoint map.

The plainest of the families: grouped-query attention, in all layers sliding or in none, and a
softmax over all experts whose two largest weights are divided by their sum.
Source: transformers, `models/mixtral/modeling_mixtral.py`; arXiv 2401.04088.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from neuron_moe.checkpoint import WeightMap
from neuron_moe.models.attention import Reach
from neuron_moe.models.decoder import DecoderConfig, DecoderModel, GroupedAttention
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import build_router, gated_moe
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    block_sparse_rules,
    decoder_map,
    decoder_rules,
    projection_names,
)
from neuron_moe.moe import MoE
from neuron_moe.spec import RouterFormula, check_top_k


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    """Facts of one Mixtral checkpoint; names are those of its config.json."""

    intermediate_size: int
    num_local_experts: int
    num_experts_per_tok: int
    sliding_window: int | None

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        check_top_k(self.num_experts_per_tok, self.num_local_experts)

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

    def build_attention(self, layer: int, dtype: torch.dtype) -> GroupedAttention:
        """Return plain grouped-query attention."""
        return GroupedAttention(self.config, dtype, reach=Reach(window=self.config.sliding_window))

    def build_feed_forward(self, layer: int, dtype: torch.dtype, backend: str) -> MoE:
        """Return a MoE with a float32 softmax router."""
        config = self.config
        router = build_router(
            config.num_local_experts,
            config.hidden_size,
            RouterFormula(top_k=config.num_experts_per_tok, renormalize=True),
        )
        return gated_moe(
            router, config.intermediate_size, dtype, backend, hidden_act=config.hidden_act
        )


def weight_map(config: MixtralConfig) -> WeightMap:
    """Map the published tensor names to ours, and those of transformers' modules."""
    rules = [*decoder_rules(projection_names(has_bias=False)), *block_sparse_rules()]
    return decoder_map(config, rules, expert=config.num_local_experts)
