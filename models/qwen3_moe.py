"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder): configuration, attention, experts and checkpoint map.

What differs from other decoders: an RMSNorm on each head of queries and keys before they are
rotated, and a softmax over all experts whose K largest weights are divided by their sum. A layer
may be dense (`mlp_only_layers`, `decoder_sparse_step`); no published checkpoint has such layers.
Source: transformers, `models/qwen3_moe/modeling_qwen3_moe.py`; arXiv 2505.09388.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_moe.checkpoint import Rule, WeightMap
from neuron_moe.models.decoder import DecoderConfig, DecoderModel, Experts
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import router_spec
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    both_expert_rules,
    decoder_map,
    decoder_rules,
    feed_forward_rules,
    moe_rules,
    projection_names,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """Facts of one Qwen3-MoE checkpoint; names are those of its config.json."""

    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...]
    attention_bias: bool = False
    sliding_window: int | None

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        if not self.sparse_layers:
            raise ValueError(
                f"decoder_sparse_step={self.decoder_sparse_step}, mlp_only_layers="
                f"{list(self.mlp_only_layers)}: must leave a layer with experts. Correct them."
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Qwen3MoeConfig":
        """Read config.json as transformers 4.51 to 5.x write it."""
        # The last one is not read by the architecture: all layers slide, or none.
        reader = ConfigReader.of_family(config, "qwen3_moe", "max_window_layers")
        slides = reader.get("use_sliding_window", bool, False)
        window = reader.get_optional("sliding_window", int)
        return cls.read(
            reader,
            rope=RopeConfig.from_hf(reader),
            sliding_window=window if slides else None,
            **read_experts(reader),
        )

    @property
    def experts(self) -> Experts:
        """Experts of the sparse layers, chosen by a softmax."""
        top_k, renormalize = self.num_experts_per_tok, self.norm_topk_prob
        return Experts(
            router_spec(self.num_experts, self.hidden_size, top_k=top_k, renormalize=renormalize),
            self.moe_intermediate_size,
            layers=self.sparse_layers,
            dense_size=self.intermediate_size,
        )

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers with experts."""
        step = self.decoder_sparse_step
        every = range(step - 1, self.num_hidden_layers, step)
        return tuple(layer for layer in every if layer not in self.mlp_only_layers)


def read_experts(reader: ConfigReader) -> dict[str, Any]:
    """Return fields of the feed-forward parts, which Qwen2-MoE spells alike."""
    return {
        "num_experts": reader.get_renamed("num_experts", "num_local_experts", int),
        "mlp_only_layers": reader.get_ints("mlp_only_layers"),
    }


Config = Qwen3MoeConfig


class Model(DecoderModel):
    """Qwen3-MoE for generation."""

    config: Qwen3MoeConfig
    norms = "by head"


def weight_map(config: Qwen3MoeConfig) -> WeightMap:
    """Map the published tensor names to ours, experts one by one or fused."""
    rules = decoder_rules(projection_names(has_bias=config.attention_bias, has_norms=True))
    rules += feed_forward_rules(config.sparse_layers, config.num_hidden_layers, _sparse_rules)
    return decoder_map(config, rules, expert=config.num_experts)


def _sparse_rules(mlp: str, moe: str) -> list[Rule]:
    return moe_rules(mlp, moe, both_expert_rules(mlp, moe))
