"""Mistral Small 4 (text): configuration, attention, router and checkpoint map.

What differs from DeepSeek-V3, whose layers these are: a softmax over all experts gives scores,
which no bias corrects, and queries grow with the logarithm of their place beyond the original
context.
Source: transformers, `models/mistral4/modular_mistral4.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from neuron_moe.checkpoint import Rule, WeightMap
from neuron_moe.models import deepseek_v3
from neuron_moe.models.biased_routing import sparse_rules
from neuron_moe.models.decoder import Tokens
from neuron_moe.models.deepseek_v3 import DeepseekV3Config, LatentAttention
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.rope import RopeConfig

DEFAULTS = {
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
BETA, CONTEXT = "llama_4_scaling_beta", "original_max_position_embeddings"
ROPE = {  # where config.json does not say
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    CONTEXT: 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistral4Config(DeepseekV3Config):
    """Facts of one checkpoint; names are those of its config.json.

    Attributes:
        scaling_beta: by how much queries grow; 0: they do not.
        scaling_context: the number of places that count as one.
    """

    router_fields: ClassVar[Mapping[str, Any]] = {
        "act_fn": "softmax",
        "has_selection_bias": False,
        "out_of_group_fill": 0.0,
    }
    scaling_beta: float
    scaling_context: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Mistral4Config":
        """Read config.json as transformers 5.x writes it."""
        reader = ConfigReader.of_family(config, "mistral4", *deepseek_v3.OTHER_KEYS)
        rotated, plain = (reader.get(f"qk_{kind}_head_dim", int) for kind in ("rope", "nope"))
        reader.require("head_dim", rotated + plain)
        section = reader.get_section("rope_parameters") or reader.get_section("rope_scaling")
        growth = ConfigReader(section or ROPE, "rope_parameters")
        part = rotated / max(rotated + plain, 1)
        rope = RopeConfig.from_hf(
            reader,
            is_interleaved=reader.get("rope_interleave", bool, True),
            default_part=part,
            default_section=ROPE,
            ignored=(BETA, "max_position_embeddings"),
        )
        if rope.part != part:
            raise ValueError(
                f"partial_rotary_factor={rope.part}: must be {part}: qk_rope_head_dim says how much"
                " of a head is rotated. Correct config.json."
            )
        return cls.read_latent(
            reader,
            rope=rope,
            scores="softmax",
            defaults=DEFAULTS,
            scaling_beta=growth.get(BETA, float, 0.0),
            scaling_context=growth.get_size(CONTEXT, 8192),
        )


Config = Mistral4Config


class Attention(LatentAttention):
    """Latent attention whose queries grow with their places."""

    config: Mistral4Config

    def _queries(self, hidden_USH: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return the plain and the rotated part of each head, [U, S, Q, N] and [U, S, Q, D]."""
        config, (plain, rotated) = self.config, super()._queries(hidden_USH, tokens)
        blocks_US = torch.floor(tokens.places_US / config.scaling_context)
        growth_US11 = (1 + config.scaling_beta * torch.log(1 + blocks_US))[..., None, None]
        return plain * growth_US11.to(plain.dtype), rotated * growth_US11.to(rotated.dtype)


class Model(deepseek_v3.Model):
    """Mistral Small 4 for generation."""

    config: Mistral4Config

    def build_attention(self, layer: int, dtype: torch.dtype) -> Attention:
        """Return latent attention."""
        return Attention(self.config, dtype)


def weight_map(config: Mistral4Config) -> WeightMap:
    """Map the tensor names of transformers to ours, experts one by one or fused."""
    return deepseek_v3.weight_map(config, rules_of_sparse=_sparse_rules)


def _sparse_rules(layer: str) -> list[Rule]:
    return sparse_rules(layer, bias="")
