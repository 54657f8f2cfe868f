"""Hunyuan-A13B: configuration, attention, experts and checkpoint map.

What differs from other decoders: each head of queries and keys is normalised after it was rotated,
and a shared expert of the same width stands beside the routed ones, which a softmax chooses.
Source: transformers, `models/hunyuan_v1_moe/modular_hunyuan_v1_moe.py`;
tencent/Hunyuan-A13B-Instruct.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from neuron_moe.checkpoint import Rule, WeightMap
from neuron_moe.models.decoder import (
    PROJECTIONS,
    DecoderConfig,
    DecoderModel,
    Experts,
    GroupedAttention,
    Tokens,
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
BY_LAYER = ("moe_intermediate_size", "moe_topk", "num_experts", "num_shared_expert")
NAMES = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
ALPHA = ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # beside alpha, unread
# Of training, of what else Hunyuan models do, and sizes of what these do not have.
OTHER_KEYS = (
    *("add_classification_head", "capacity_factor", "cla_share_factor", "class_num", "dense_list"),
    *("eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "kv_lora_rank", "mask_init_id"),
    *("moe_drop_tokens", "moe_random_routing_dropped_token", "n_group", "num_media_embeds"),
    *("org_vocab_size", "pad_id", "pool_type", "position_embedding_xdrope", "pretraining_tp"),
    *("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "sep_token_id", "skip_cls_token"),
    *("text_end_id", "text_start_id", "topk_group", "use_mixed_mlp_moe", "v_head_dim"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HunyuanMoEConfig(DecoderConfig):
    """Facts of one Hunyuan checkpoint; names are those of its config.json.

    Attributes:
        intermediate_size: of each routed expert and of the shared one.
    """

    intermediate_size: int
    num_experts: int
    moe_topk: int
    attention_bias: bool = False

    @property
    def experts(self) -> Experts:
        """Experts in every layer, chosen by a softmax, and a shared one."""
        count, size = self.num_experts, self.intermediate_size
        router = router_spec(count, self.hidden_size, top_k=self.moe_topk, renormalize=True)
        return Experts(router, size, shared_size=size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "HunyuanMoEConfig":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        alike = {key: _the_same(key, config[key]) for key in BY_LAYER if key in config}
        reader = ConfigReader.of_family({**config, **alike}, "hunyuan_v1_moe", *OTHER_KEYS)
        for key in ("group_limited_greedy", "mlp_bias", "use_cla", "use_mla"):
            reader.require(key, False)
        for key in ("norm_topk_prob", "use_qk_norm", "use_rotary_pos_emb"):
            reader.require(key, True)
        reader.require("moe_layer_num_skipped", 0)
        reader.require("num_shared_expert", 1)
        reader.require("routed_scaling_factor", 1.0)
        if reader.get("norm_type", str, "rms") not in ("rms", "hf_rms", "fused"):
            reader.require("norm_type", "rms")
        size = reader.get("intermediate_size", int)
        reader.require("moe_intermediate_size", size)
        usual = reader.get("hidden_size", int) // max(reader.get("num_attention_heads", int), 1)
        head_dim = reader.get("head_dim", int, reader.get("attention_head_dim", int, usual))
        reader.require("attention_head_dim", head_dim)
        return cls.read(
            reader,
            head_dim=head_dim,
            rope=_read_rope(reader, head_dim),
            intermediate_size=size,
            num_experts=reader.get_renamed("num_experts", "num_local_experts", int),
            moe_topk=reader.get_renamed("moe_topk", "num_experts_per_tok", int),
        )


Config = HunyuanMoEConfig


def _the_same(key: str, value: Any) -> Any:
    """Return what a list says of every layer."""
    if not isinstance(value, list):
        return value
    if not value or any(item != value[0] for item in value):
        raise ValueError(
            f"{key}={value}: must be the same in every layer, as in all published models. Correct"
            " config.json."
        )
    return value[0]


def _read_rope(reader: ConfigReader, head_dim: int) -> RopeConfig:
    """Return the rotary embedding, whose base `alpha` stretches."""
    section = reader.get_section("rope_parameters") or reader.get_section("rope_scaling")
    alpha = ConfigReader(section, "rope_parameters").get_optional("alpha", float)
    is_stretched = "dynamic" in (section.get("rope_type"), section.get("type")) and bool(alpha)
    rope = RopeConfig.from_hf(
        reader, default_theta=ROPE_THETA, ignored=ALPHA if is_stretched else ()
    )
    if not is_stretched or alpha is None:
        return rope
    if alpha < 1 or head_dim <= 2:
        raise ValueError(f"alpha={alpha}: must be at least 1. Correct the rope section.")
    theta = rope.theta * alpha ** (head_dim / (head_dim - 2))
    return replace(rope, theta=theta, kind="default", factor=1.0)


class Attention(GroupedAttention):
    """Grouped-query attention with norms on rotated heads."""

    def project(self, hidden_USH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [U, S, heads * D] each, as they are."""
        return self.products(hidden_USH)

    def rotate(self, query_USQD: Tensor, key_USJD: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return queries and keys that know their places, normalised."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        query_USQD, key_USJD = super().rotate(query_USQD, key_USJD, tokens)
        return self.q_norm(query_USQD), self.k_norm(key_USJD)


class Model(DecoderModel):
    """Hunyuan-A13B for generation."""

    config: HunyuanMoEConfig

    def build_attention(self, layer: int, dtype: torch.dtype) -> Attention:
        """Return attention with norms on rotated heads."""
        bias = PROJECTIONS if self.config.attention_bias else ()
        return Attention(self.config, dtype, bias=bias, norms="by head")


def weight_map(config: HunyuanMoEConfig) -> WeightMap:
    """Map the published tensor names to ours, experts one by one or fused."""
    attention = "layers.{layer}.self_attn."
    mlp, moe = "model.layers.{layer}.mlp.", "layers.{layer}.moe."
    experts = both_expert_rules(mlp, moe)
    rules = [
        *decoder_rules(projection_names(has_bias=config.attention_bias)),
        *(
            Rule(f"model.{attention}{theirs}.weight", f"{attention}{ours}.weight")
            for theirs, ours in NAMES.items()
        ),
        *moe_rules(mlp, moe, experts, router="gate.wg.weight", shared="shared_mlp"),
    ]
    return decoder_map(config, rules, expert=config.num_experts)
