"""Qwen3.5 and Qwen3.6 MoE, the text model: configuration, attention, experts and checkpoint map.

What differs from other decoders: three of four layers keep a memory of the sequence instead of keys
and values (`models/delta_net.py`); the fourth is grouped-query attention whose output a sigmoid
gates, with a norm on each head and the first quarter of it rotated; norms scale by one plus their
weight; a shared expert, gated for each token, stands beside the routed ones.
Published files hold a vision tower and a layer that predicts a further token, which are not read.
Source: transformers, `models/qwen3_5_moe/modeling_qwen3_5_moe.py`; Qwen/Qwen3.5-35B-A3B.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.activations import activation_of
from neuron_moe.checkpoint import Rule, WeightMap
from neuron_moe.models.attention import CacheView
from neuron_moe.models.decoder import (
    DecoderConfig,
    DecoderModel,
    Experts,
    GroupedAttention,
    Tokens,
    check_layer_types,
    normalise,
)
from neuron_moe.models.delta_net import DeltaNetSizes, GatedDeltaNet
from neuron_moe.models.hf_config import ConfigReader, read_text_section
from neuron_moe.models.layers import OffsetRMSNorm, router_spec
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    decoder_map,
    decoder_rules,
    projection_names,
    shared_sparse_rules,
)

ALIASES = ("qwen3_5_moe_text",)
LAYER_TYPES = ("linear_attention", "full_attention")
ROTATED_PART = 0.25  # of a head, where config.json does not say
# Of images, whose places have three axes; those of text are alike on all of them.
IMAGE_ROPE_KEYS = ("mrope_interleaved", "mrope_section")
IMAGE_KEYS = (
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    "language_model_only",
)
# Of the layer that predicts a further token; and one that the architecture does not read.
OTHER_KEYS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35MoeConfig(DecoderConfig):
    """Facts of one Qwen3.5 MoE checkpoint; names are those of the text section of its config.json.

    Attributes:
        linear_attention: sizes of the layers that keep a memory of the sequence.
        num_vision_layers: of the vision tower beside the text model; None without one.
    """

    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    layer_types: tuple[str, ...]
    linear_attention: DeltaNetSizes
    num_vision_layers: int | None = None

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        check_layer_types(self.layer_types, self.num_hidden_layers, LAYER_TYPES)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Qwen35MoeConfig":
        """Read config.json as published, or as transformers 5.x writes it of the text model."""
        text, vision_layers = read_text_section(config, "qwen3_5_moe", "depth", IMAGE_KEYS)
        reader = ConfigReader.of_family(text, "qwen3_5_moe_text", *OTHER_KEYS)
        reader.require("attention_bias", False)
        reader.require("attn_output_gate", True)
        reader.require("mamba_ssm_dtype", "float32")
        reader.require("output_gate_type", "swish")
        part = ROTATED_PART
        rope = RopeConfig.from_hf(reader, default_part=part, ignored=IMAGE_ROPE_KEYS)
        return cls.read(
            reader,
            head_dim=reader.get("head_dim", int),
            rope=rope,
            layer_types=read_layer_types(reader),
            linear_attention=read_delta_net(reader),
            num_vision_layers=vision_layers,
        )

    @property
    def experts(self) -> Experts:
        """Experts in every layer, chosen by a softmax, and a gated shared one."""
        top_k = self.num_experts_per_tok
        return Experts(
            router_spec(self.num_experts, self.hidden_size, top_k=top_k, renormalize=True),
            self.moe_intermediate_size,
            shared_size=self.shared_expert_intermediate_size,
            is_gated=True,
        )

    def make_norm(self, size: int, dtype: torch.dtype) -> OffsetRMSNorm:
        """Return a norm that scales by one plus its weight."""
        return OffsetRMSNorm(size, self.rms_norm_eps, dtype)


def read_layer_types(reader: ConfigReader) -> tuple[str, ...]:
    """Read the kind of each layer: every so many layers attention is full, if nothing else."""
    interval = reader.get_size("full_attention_interval", 4)
    layers = range(1, reader.get("num_hidden_layers", int) + 1)
    usual = tuple(LAYER_TYPES[layer % interval == 0] for layer in layers)
    return reader.get_strings("layer_types") or usual


def read_delta_net(reader: ConfigReader) -> DeltaNetSizes:
    """Read the sizes of linear attention."""
    return DeltaNetSizes(
        hidden_size=reader.get("hidden_size", int),
        num_key_heads=reader.get("linear_num_key_heads", int),
        num_value_heads=reader.get("linear_num_value_heads", int),
        key_size=reader.get("linear_key_head_dim", int),
        value_size=reader.get("linear_value_head_dim", int),
        conv_width=reader.get("linear_conv_kernel_dim", int),
    )


Config = Qwen35MoeConfig


class GatedAttention(GroupedAttention):
    """Grouped-query attention whose output is gated; query and gate of a head are neighbours."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype, norms="by head")
        width = 2 * config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False, dtype=dtype)

    def forward(self, hidden_USH: Tensor, tokens: Tokens, view: CacheView | None) -> Tensor:
        """Return the attention output `[U, S, H]`; arguments as in `DecoderLayer`."""
        both = self.q_proj(hidden_USH).unflatten(-1, (-1, 2, self.head_dim))
        query, gate = (both[..., half, :].flatten(2) for half in (0, 1))
        projected = (
            normalise(query, self.q_norm),
            normalise(self.k_proj(hidden_USH), self.k_norm),
            self.v_proj(hidden_USH),
        )
        mixed = self.mix(projected, tokens, view).float() * gate.float().sigmoid()
        out_USH: Tensor = self.o_proj(mixed.to(hidden_USH.dtype))
        return out_USH


class Model(DecoderModel):
    """Qwen3.5 MoE for generation of text."""

    config: Qwen35MoeConfig

    def build_attention(self, layer: int, dtype: torch.dtype) -> GatedAttention | GatedDeltaNet:
        """Return the attention of a layer."""
        config = self.config
        if config.layer_types[layer] == "full_attention":
            return GatedAttention(config, dtype)
        memory = GatedDeltaNet(config.linear_attention, config.rms_norm_eps, dtype)
        memory.activation = activation_of(config.hidden_act)
        return memory


def weight_map(config: Qwen35MoeConfig) -> WeightMap:
    """Map the published tensor names to ours, experts fused or one by one."""
    has_vision = config.num_vision_layers is not None
    source = "model.language_model." if has_vision else "model."
    rules = decoder_rules([], source=source)
    for layer, kind in enumerate(config.layer_types):
        rules += attention_rules(f"{source}layers.{layer}.", f"layers.{layer}.", kind)
        rules += shared_sparse_rules(f"{source}layers.{layer}.mlp.", f"layers.{layer}.moe.")
    sizes = {"expert": config.num_experts}
    ignored = prediction_names()
    if config.num_vision_layers is not None:
        sizes["vision_layer"] = config.num_vision_layers
        ignored += _vision_names()
    return decoder_map(config, rules, ignored, **sizes)


def attention_rules(
    theirs: str, ours: str, kind: str, inputs: Sequence[str] = ("qkv", "z", "b", "a")
) -> list[Rule]:
    """Return the rules of one layer's attention.

    Args:
        theirs: what published names of the layer begin with.
        ours: the same of our names.
        kind: one of LAYER_TYPES.
        inputs: the input projections of linear attention.
    """
    if kind == "full_attention":
        names = projection_names(has_bias=False, has_norms=True)
        return [Rule(theirs + name, ours + name) for name in names]
    source, target = theirs + "linear_attn.", ours + "self_attn."
    plain = [f"in_proj_{name}.weight" for name in inputs]
    return [
        *(Rule(source + name, target + name) for name in (*plain, "out_proj.weight", "dt_bias")),
        Rule(source + "conv1d.weight", target + "conv_weight"),
        Rule(source + "A_log", target + "A_log", is_exact=True),
        Rule(source + "norm.weight", target + "norm_weight", is_exact=True),
    ]


def prediction_names() -> list[str]:
    """Return the tensors of the layer that predicts a further token."""
    frame, layer = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"), "mtp.layers.0."
    rules = [
        *attention_rules(layer, "", "full_attention"),
        *shared_sparse_rules(layer + "mlp.", ""),
    ]
    return [
        *(f"mtp.{name}.weight" for name in frame),
        *(f"{layer}{name}_layernorm.weight" for name in ("input", "post_attention")),
        *(pattern for rule in rules for pattern in rule.patterns),
    ]


def _vision_names() -> list[str]:
    """Return the tensors of the vision tower, which is no part of this model."""
    block, merger = "model.visual.blocks.{vision_layer}.", "model.visual.merger."
    parts = ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
    stems = [*(block + part for part in parts), "model.visual.patch_embed.proj"]
    stems += [merger + part for part in ("norm", "linear_fc1", "linear_fc2")]
    pairs = (f"{stem}.{kind}" for stem in stems for kind in ("weight", "bias"))
    return [*pairs, "model.visual.pos_embed.weight"]
