"""MiniMax-M2, M2.1 and M2.5: configuration, attention, experts and checkpoint map.

What differs from other decoders: all heads of queries, and all of keys, are normalised together
before they are rotated, and only the first part of each head is rotated; experts are scored by a
sigmoid and chosen with a bias that is no part of their weight.
Source: transformers, `models/minimax_m2/modeling_minimax_m2.py`; MiniMaxAI/MiniMax-M2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_moe.checkpoint import WeightMap
from neuron_moe.models.decoder import DecoderConfig, DecoderModel, Experts
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import biased_spec
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    block_sparse_rules,
    decoder_map,
    decoder_rules,
    exact_in_either,
    projection_names,
)

# Of layers that predict further tokens, whose tensors are not published, and of training.
OTHER_KEYS = (
    *("auto_map", "mtp_transformer_layers", "num_mtp_modules", "use_mtp"),
    *("shared_moe_mode", "router_jitter_noise"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxM2Config(DecoderConfig):
    """Facts of one MiniMax-M2 checkpoint; names are those of its config.json."""

    intermediate_size: int
    num_local_experts: int
    num_experts_per_tok: int

    @property
    def experts(self) -> Experts:
        """Experts in every layer, whose choice is biased."""
        count, top_k = self.num_local_experts, self.num_experts_per_tok
        return Experts(biased_spec(count, self.hidden_size, top_k=top_k), self.intermediate_size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "MiniMaxM2Config":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        reader = ConfigReader.of_family(config, "minimax_m2", *OTHER_KEYS)
        reader.require("scoring_func", "sigmoid")
        reader.require("qk_norm_type", "per_layer")
        for key in ("use_qk_norm", "use_routing_bias"):
            reader.require(key, True)
        for key in ("shared_intermediate_size", "sliding_window"):
            reader.require(key, 0)
        if not set(reader.get_ints("attn_type_list")) <= {1}:
            raise ValueError(
                f"attn_type_list={config['attn_type_list']}: must be 1 for each layer, full"
                " attention; nothing else is implemented. Correct it."
            )
        head_dim = reader.get("head_dim", int)
        return cls.read(
            reader,
            head_dim=head_dim,
            rope=_read_rope(reader, head_dim),
        )


def _read_rope(reader: ConfigReader, head_dim: int) -> RopeConfig:
    """Return the rotary embedding, whose part of a head has two spellings."""
    rotated_size = reader.get("rotary_dim", int, head_dim)
    part = rotated_size / max(head_dim, 1)
    rope = RopeConfig.from_hf(reader, default_part=part)
    if reader.get_raw("rotary_dim") is not None and rope.part != part:
        raise ValueError(
            f"rotary_dim={rotated_size}, partial_rotary_factor={rope.part}: must be the same part"
            f" of head_dim={head_dim}. Keep one of them."
        )
    return rope


Config = MiniMaxM2Config


class Model(DecoderModel):
    """MiniMax-M2 for generation."""

    config: MiniMaxM2Config
    norms = "jointly"


def weight_map(config: MiniMaxM2Config) -> WeightMap:
    """Map the published tensor names to ours, and those of transformers' modules."""
    names, bias = projection_names(has_bias=False, has_norms=True), "e_score_correction_bias"
    layer = "model.layers.{layer}."
    biases = exact_in_either(
        f"layers.{{layer}}.moe.router.{bias}",
        separate=f"{layer}block_sparse_moe.{bias}",
        fused=f"{layer}mlp.{bias}",
    )
    rules = [*decoder_rules(names), *biases, *block_sparse_rules()]
    return decoder_map(config, rules, expert=config.num_local_experts)
