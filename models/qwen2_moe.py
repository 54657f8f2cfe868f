"""Qwen1.5-MoE and Qwen2-MoE (A2.7B, 57B-A14B): configuration, attention, experts, checkpoint map.

What differs from Qwen3-MoE, whose keys these are: queries, keys and values have biases and no
norms, a shared expert, gated for each token, stands beside the routed ones, whose weights are not
divided by their sum, and where a window is used every other layer slides.
Source: transformers, `models/qwen2_moe/modeling_qwen2_moe.py`; arXiv 2407.10671.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neuron_moe.checkpoint import Rule, WeightMap
from neuron_moe.models.attention import Reach
from neuron_moe.models.decoder import DecoderModel, Experts, check_layer_types
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.qwen3_moe import Qwen3MoeConfig, read_experts
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    decoder_map,
    decoder_rules,
    feed_forward_rules,
    shared_sparse_rules,
)

ROPE_THETA = 10000.0  # where config.json does not say
LAYER_TYPES = ("sliding_attention", "full_attention")
BIASED = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedSharedConfig(Qwen3MoeConfig):
    """Facts of a Qwen model with a gated shared expert; names are those of config.json."""

    shared_expert_intermediate_size: int
    layer_types: tuple[str, ...]

    @property
    def experts(self) -> Experts:
        """Experts of the sparse layers, and a gated shared one."""
        routed: Experts = Qwen3MoeConfig.experts.__get__(self)
        return routed._replace(shared_size=self.shared_expert_intermediate_size, is_gated=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2MoeConfig(GatedSharedConfig):
    """Facts of one Qwen2-MoE checkpoint; names are those of its config.json."""

    def __post_init__(self) -> None:
        Qwen3MoeConfig.__post_init__(self)
        check_layer_types(self.layer_types, self.num_hidden_layers, LAYER_TYPES)
        if LAYER_TYPES[0] in self.layer_types and self.sliding_window is None:
            raise ValueError(
                "layer_types: sliding_attention needs use_sliding_window and a sliding_window."
                " Correct config.json."
            )

    def reach(self, layer: int) -> Reach:
        """Return how far back a token sees in a layer."""
        slides = self.layer_types[layer] == LAYER_TYPES[0]
        return Reach(window=self.sliding_window if slides else None)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Qwen2MoeConfig":
        """Read config.json as transformers 4.40 to 5.x write it."""
        reader = ConfigReader.of_family(config, "qwen2_moe")
        slides = reader.get("use_sliding_window", bool, False)
        last = reader.get("max_window_layers", int, 28)
        usual = (
            LAYER_TYPES[not (slides and layer % 2 == 0 and layer < last)]
            for layer in range(reader.get("num_hidden_layers", int))
        )
        window = reader.get_optional("sliding_window", int)
        return cls.read(
            reader,
            rope=RopeConfig.from_hf(reader, default_theta=ROPE_THETA),
            attention_bias=reader.get("qkv_bias", bool, True),
            sliding_window=window if slides else None,
            layer_types=reader.get_strings("layer_types") or tuple(usual),
            **read_experts(reader),
        )


Config = Qwen2MoeConfig


class Model(DecoderModel):
    """Qwen2-MoE for generation."""

    config: Qwen2MoeConfig
    biased = BIASED


def weight_map(config: Qwen2MoeConfig) -> WeightMap:
    """Map the published tensor names to ours, experts one by one or fused."""
    names = [*(f"{name}.weight" for name in BIASED), "o_proj.weight"]
    names += [f"{name}.bias" for name in BIASED] if config.attention_bias else []
    rules = decoder_rules(f"self_attn.{name}" for name in names)
    return gated_shared_map(config, rules)


def gated_shared_map(
    config: GatedSharedConfig, rules: list[Rule], ignored: Sequence[str] = ()
) -> WeightMap:
    """Map the feed-forward parts to ours, experts one by one or fused, beside what `rules` map."""
    rules += feed_forward_rules(config.sparse_layers, config.num_hidden_layers, shared_sparse_rules)
    return decoder_map(config, rules, ignored, expert=config.num_experts)
