"""OLMoE (1B-7B): configuration, attention, experts and checkpoint map.

What differs from other decoders: all heads of queries, and all of keys, are normalised together
before they are rotated, and may be limited then; the weights that a softmax over all experts gives
the chosen ones are not divided by their sum.
Source: transformers, `models/olmoe/modeling_olmoe.py`; arXiv 2409.02060.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuron_moe.checkpoint import Rule, WeightMap
from neuron_moe.models.decoder import (
    PROJECTIONS,
    ConfigT,
    DecoderConfig,
    DecoderModel,
    Experts,
    GroupedAttention,
)
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import router_spec
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    both_expert_rules,
    decoder_map,
    decoder_rules,
    moe_rules,
    projection_names,
)

ROPE_THETA = 10000.0  # where config.json does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoeConfig(DecoderConfig):
    """Facts of one OLMoE checkpoint; names are those of its config.json.

    Attributes:
        clip_qkv: largest magnitude of a query, key or value; None for no limit.
    """

    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = False
    attention_bias: bool = False
    clip_qkv: float | None

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        if self.clip_qkv is not None and not self.clip_qkv > 0:
            raise ValueError(f"clip_qkv={self.clip_qkv}: must be positive. Correct config.json.")

    @property
    def experts(self) -> Experts:
        """Experts in every layer, chosen by a softmax."""
        top_k, renormalize = self.num_experts_per_tok, self.norm_topk_prob
        router = router_spec(
            self.num_experts, self.hidden_size, top_k=top_k, renormalize=renormalize
        )
        return Experts(router, self.intermediate_size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "OlmoeConfig":
        """Read config.json as transformers 4.45 to 5.x write it."""
        reader = ConfigReader.of_family(config, "olmoe")
        limit = reader.get_optional("clip_qkv", float)
        return cls.read_olmoe(reader, ROPE_THETA, clip_qkv=limit)

    @classmethod
    def read_olmoe(
        cls: type[ConfigT], reader: ConfigReader, default_theta: float, *, clip_qkv: float | None
    ) -> ConfigT:
        """Read what FlexOlmo spells alike; `default_theta` is for where config.json has none."""
        return cls.read(
            reader,
            rope=RopeConfig.from_hf(reader, default_theta=default_theta),
            num_experts=reader.get_renamed("num_experts", "num_local_experts", int),
            clip_qkv=clip_qkv,
        )


Config = OlmoeConfig


class Attention(GroupedAttention):
    """Grouped-query attention with one norm for all heads, limited behind it."""

    def __init__(self, config: OlmoeConfig, dtype: torch.dtype) -> None:
        bias = PROJECTIONS if config.attention_bias else ()
        super().__init__(config, dtype, bias=bias, norms="jointly")
        self.limit = config.clip_qkv

    def project(self, hidden_USH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [U, S, heads * D] each, normalised and limited."""
        parts = super().project(hidden_USH)
        if self.limit is None:
            return parts
        query, key, value = (part.clamp(-self.limit, self.limit) for part in parts)
        return query, key, value


class Model(DecoderModel):
    """OLMoE for generation."""

    config: OlmoeConfig

    def build_attention(self, layer: int, dtype: torch.dtype) -> Attention:
        """Return attention whose queries and keys are normalised."""
        return Attention(self.config, dtype)


def weight_map(config: OlmoeConfig) -> WeightMap:
    """Map the published tensor names to ours, experts one by one or fused."""
    rules = [*decoder_rules(()), *part_rules(config)]
    return decoder_map(config, rules, expert=config.num_experts)


def part_rules(config: OlmoeConfig) -> list[Rule]:
    """Return the rules of attention and experts."""
    names = projection_names(has_bias=config.attention_bias, has_norms=True)
    mlp, moe = "model.layers.{layer}.mlp.", "layers.{layer}.moe."
    return [
        *(Rule(f"model.layers.{{layer}}.{name}", f"layers.{{layer}}.{name}") for name in names),
        *moe_rules(mlp, moe, both_expert_rules(mlp, moe)),
    ]
