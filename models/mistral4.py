"""Mistral Small 4, the text model: configuration, attention, router and checkpoint map.

What differs from DeepSeek-V3, whose layers these are: a softmax over all experts gives scores,
which no bias corrects, and queries grow with the logarithm of their place beyond the original
context. Published inside `mistral3`, beside a vision tower, which is not read.
Source: transformers, `models/mistral4/modular_mistral4.py`, `models/mistral3`.
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
from neuron_moe.models.hf_config import ConfigReader, read_text_section
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import beside_tower

ALIASES = ("mistral3",)
IMAGE_KEYS = (
    *("image_token_id", "image_token_index", "projector_hidden_act", "vision_feature_layer"),
    *("multimodal_projector_bias", "spatial_merge_size"),
)

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
        num_vision_layers: of the vision tower beside the text model; None without one.
    """

    router_fields: ClassVar[Mapping[str, Any]] = {
        "act_fn": "softmax",
        "has_selection_bias": False,
        "out_of_group_fill": 0.0,
    }
    scaling_beta: float
    scaling_context: int
    num_vision_layers: int | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Mistral4Config":
        """Read config.json as transformers 5.x writes it, with or without a vision tower."""
        depth = "num_hidden_layers"
        text, layers = read_text_section(config, ALIASES[0], depth, IMAGE_KEYS, is_tied=True)
        if layers is not None and text.get("model_type") != "mistral4":
            raise ValueError(
                f"model_type={text.get('model_type')!r} in text_config: a dense model, for of those"
                " in mistral3 only mistral4 has experts. Run it with transformers or vLLM, or take"
                " Mistral Small 4."
            )
        reader = ConfigReader.of_family(text, "mistral4", *deepseek_v3.OTHER_KEYS)
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
            num_vision_layers=layers,
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
    text = deepseek_v3.weight_map(config, rules_of_sparse=_sparse_rules)
    if config.num_vision_layers is None:
        return text
    return beside_tower(text, config.num_vision_layers, _vision_names())


def _sparse_rules(layer: str) -> list[Rule]:
    return sparse_rules(layer, bias="")


def _vision_names() -> list[str]:
    """Return the tensors of the vision tower and of what leads from it to the text, both forms."""
    block = "vision_tower.transformer.layers.{vision_layer}."
    parts = [f"attention.{name}_proj" for name in "qkvo"]
    parts += [f"feed_forward.{name}_proj" for name in ("gate", "up", "down")]
    parts += ["attention_norm", "ffn_norm"]
    names = [f"{block}{part}.weight" for part in parts]
    names += ["vision_tower.patch_conv.weight", "vision_tower.ln_pre.weight"]
    projector = "multi_modal_projector."
    names += [f"{projector}{part}.weight" for part in ("norm", "patch_merger.merging_layer")]
    names += [f"{projector}linear_{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")]
    return [form + name for form in ("", "model.") for name in names]
