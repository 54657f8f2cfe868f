"""Llama 4 Scout and Maverick, the text model: configuration, attention, experts, checkpoint map.

What differs from other decoders: rotary pairs are neighbours; three of four layers rotate queries
and keys, normalise them without weights (Scout) and see their chunk only, the fourth does neither,
sees everything, and scales queries by the logarithm of their place; one expert a token, whose input
is scaled by the sigmoid of its logit, beside a shared expert; in Maverick every other layer is
dense.
Published files hold a vision tower too, which is not read.
Source: transformers, `models/llama4/modeling_llama4.py`; meta-llama/llama-models, `models/llama4`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuron_moe.checkpoint import Rule, WeightMap, identity
from neuron_moe.models.attention import Reach
from neuron_moe.models.decoder import (
    PROJECTIONS,
    DecoderConfig,
    DecoderModel,
    Experts,
    GroupedAttention,
    Tokens,
    check_layer_types,
)
from neuron_moe.models.hf_config import ConfigReader, read_text_section
from neuron_moe.models.layers import router_spec, unit_rms
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    decoder_map,
    decoder_rules,
    either,
    expert_rules,
    feed_forward_rules,
    fused_expert_rules,
    moe_rules,
    projection_names,
)

ALIASES = ("llama4_text",)
IMAGE_TOKENS = ("boi_token_index", "eoi_token_index", "image_token_index")
LAYER_TYPES = ("chunked_attention", "full_attention")
# Choices of other software; the last one disturbs the router while training.
_CHOICES = "_attn_implementation_autoset", "cache_implementation", "for_llm_compressor"
OTHER_KEYS = (*_CHOICES, "router_jitter_noise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Config(DecoderConfig):
    """Facts of one Llama 4 checkpoint; names are those of the text section of its config.json.

    Attributes:
        no_rope_layers: for each layer 1 where it rotates queries and keys, 0 where not.
        num_vision_layers: of the vision tower beside the text model; None without one.
    """

    intermediate_size: int
    intermediate_size_mlp: int
    num_local_experts: int
    num_experts_per_tok: int
    moe_layers: tuple[int, ...]
    no_rope_layers: tuple[int, ...]
    layer_types: tuple[str, ...]
    attention_chunk_size: int
    use_qk_norm: bool
    attn_temperature_tuning: bool
    floor_scale: float = 8192.0
    attn_scale: float = 0.1
    attention_bias: bool = False
    num_vision_layers: int | None = None

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        if len(self.no_rope_layers) < self.num_hidden_layers:
            raise ValueError(
                f"no_rope_layers={list(self.no_rope_layers)}: must have one entry for each of"
                f" num_hidden_layers={self.num_hidden_layers}. Leave the key out for the usual."
            )
        check_layer_types(self.layer_types, self.num_hidden_layers, LAYER_TYPES)
        if not self.moe_layers or not set(self.moe_layers) <= set(range(self.num_hidden_layers)):
            raise ValueError(
                f"moe_layers={list(self.moe_layers)}: must be layers below num_hidden_layers="
                f"{self.num_hidden_layers}, at least one. Leave the key out for the usual ones."
            )

    @property
    def experts(self) -> Experts:
        """Experts of some layers, whose input is scaled, and a shared one."""
        count, top_k = self.num_local_experts, self.num_experts_per_tok
        return Experts(
            router_spec(count, self.hidden_size, top_k=top_k, act_fn="sigmoid"),
            self.intermediate_size,
            scales_input=True,
            shared_size=self.intermediate_size,
            layers=self.moe_layers,
            dense_size=self.intermediate_size_mlp,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Llama4Config":
        """Read config.json as transformers 4.51 to 5.x write it, with or without a vision tower."""
        text, vision_layers = read_text_section(config, "llama4", "num_hidden_layers", IMAGE_TOKENS)
        reader = ConfigReader.of_family(text, "llama4_text", *OTHER_KEYS)
        layers = range(1, reader.get("num_hidden_layers", int) + 1)
        interval = reader.get_size("no_rope_layer_interval", 4)
        step = reader.get_size("interleave_moe_layer_step", 1)
        moe_layers = tuple(layer - 1 for layer in layers if layer % step == 0)
        if reader.get_raw("moe_layers") is not None:
            moe_layers = reader.get_ints("moe_layers")
        rotates = tuple(int(layer % interval != 0) for layer in layers)
        rotates = reader.get_ints("no_rope_layers") or rotates  # some publish an empty list
        layer_types = (LAYER_TYPES[flag != 1] for flag in rotates[: len(layers)])
        return cls.read(
            reader,
            head_dim=reader.get("head_dim", int),
            rope=RopeConfig.from_hf(reader, is_interleaved=True),
            moe_layers=moe_layers,
            no_rope_layers=rotates,
            layer_types=reader.get_strings("layer_types") or tuple(layer_types),
            # A flag, published as 4 at first.
            # A number in published files, a switch that is on in transformers' class.
            attn_temperature_tuning=bool(reader.get_raw("attn_temperature_tuning"))
            or reader.is_absent("attn_temperature_tuning"),
            num_vision_layers=vision_layers,
        )


Config = Llama4Config


class Attention(GroupedAttention):
    """Attention of one layer: rotated and normalised, or scaled by place."""

    def __init__(self, config: Llama4Config, layer: int, dtype: torch.dtype) -> None:
        is_chunked = config.layer_types[layer] == "chunked_attention"
        super().__init__(
            config,
            dtype,
            reach=Reach(chunk=config.attention_chunk_size if is_chunked else None),
            bias=PROJECTIONS if config.attention_bias else (),
        )
        self.rotates = config.no_rope_layers[layer] == 1
        self.config = config

    def rotate(self, query_USQD: Tensor, key_USJD: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return queries and keys that know their places, or scaled queries."""
        config, dtype = self.config, query_USQD.dtype
        if self.rotates:
            query_USQD, key_USJD = super().rotate(query_USQD, key_USJD, tokens)
            if config.use_qk_norm:
                query_USQD = unit_rms(query_USQD, config.rms_norm_eps).to(dtype)
                key_USJD = unit_rms(key_USJD, config.rms_norm_eps).to(dtype)
        elif config.attn_temperature_tuning:
            floors_US = ((tokens.places_US.float() + 1.0) / config.floor_scale).floor()
            scale_US = floors_US.log1p() * config.attn_scale + 1.0
            query_USQD = (query_USQD * scale_US[..., None, None]).to(dtype)
        return query_USQD, key_USJD


class Model(DecoderModel):
    """Llama 4 for generation of text."""

    config: Llama4Config

    def build_attention(self, layer: int, dtype: torch.dtype) -> Attention:
        """Return the attention of a layer."""
        return Attention(self.config, layer, dtype)


def weight_map(config: Llama4Config) -> WeightMap:
    """Map the published tensor names to ours, experts fused or one by one."""
    prefix = "" if config.num_vision_layers is None else "language_model."
    names, source = projection_names(has_bias=config.attention_bias), prefix + "model."
    rules = decoder_rules(names, source=source, head=prefix + "lm_head.weight")
    layers = config.moe_layers, config.num_hidden_layers
    rules += feed_forward_rules(*layers, _sparse_rules, source + "layers.{layer}.feed_forward")
    sizes = {"expert": config.num_local_experts}
    ignored = []
    if config.num_vision_layers is not None:
        sizes["vision_layer"] = config.num_vision_layers
        ignored = _vision_names()
    return decoder_map(config, rules, ignored, **sizes)


def _sparse_rules(theirs: str, moe: str) -> list[Rule]:
    pair = theirs + "experts", moe + "expert_mlps.mlp_op"
    experts = either(fused=fused_expert_rules(*pair, identity), separate=expert_rules(*pair))
    return moe_rules(theirs, moe, experts, router="router.weight", shared="shared_expert")


def _vision_names() -> list[str]:
    """Return the tensors of the vision tower, which is no part of this model."""
    block = "vision_model.model.layers.{vision_layer}."
    parts = [*(f"self_attn.{name}" for name in PROJECTIONS), "mlp.fc1", "mlp.fc2"]
    parts += ["input_layernorm", "post_attention_layernorm"]
    stems = [block + part for part in parts]
    stems += ["vision_model.layernorm_pre", "vision_model.layernorm_post"]
    return [
        *(f"{stem}.{kind}" for stem in stems for kind in ("weight", "bias")),
        "vision_model.class_embedding",
        "vision_model.positional_embedding_vlm",
        "vision_model.patch_embedding.linear.weight",
        "vision_model.vision_adapter.mlp.fc1.weight",
        "vision_model.vision_adapter.mlp.fc2.weight",
        "multi_modal_projector.linear_1.weight",
    ]
