"""MiMo-V2-Flash: configuration, attention, experts and checkpoint map.

What differs from other decoders: sliding layers have twice as many key/value heads as whole ones,
learned sinks, and a rotary embedding of their own; values are shorter than keys and are multiplied
by a number of config.json. Experts are chosen as in DeepSeek-V3, without shared ones.
A published window of `sliding_window_size` counts the tokens before a token, not itself, as
transformers and SGLang read it; vLLM counts the token too. Layers that predict further tokens
(`model.mtp.`) are not read.
Source: transformers, `models/mimo_v2_flash/modular_mimo_v2_flash.py`; XiaomiMiMo/MiMo-V2-Flash.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from neuron_moe.checkpoint import Rule, WeightMap
from neuron_moe.models.biased_routing import (
    ATTENTION_TYPES,
    BIASED,
    biased_routing_map,
    read_feed_forward,
    read_sparse_layers,
)
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.two_ropes import TurnedAttention, TwoRopesConfig, TwoRopesModel, read_ropes
from neuron_moe.models.weight_rules import either, projection_names

WINDOW, VALUE_SCALE, PART = 129, 0.707, 0.334  # where config.json does not say
THETAS = {"sliding_attention": ("swa_rope_theta", 1e4), "full_attention": ("rope_theta", 5e6)}
DEFAULTS = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
# Of software, and what is said elsewhere.
OTHER_KEYS = ("attention_chunk_size", "hybrid_block_size", "layernorm_epsilon")


@dataclass(frozen=True, slots=True, kw_only=True)
class MiMoV2FlashConfig(TwoRopesConfig):
    """Facts of one checkpoint, under the names that `SlidingConfig` gives them.

    Attributes:
        num_key_value_heads: of whole layers; sliding ones have twice as many.
        v_head_dim: of values.
        attention_value_scale: by which they are multiplied.
    """

    v_head_dim: int
    attention_value_scale: float

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "MiMoV2FlashConfig":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        eps = config.get("rms_norm_eps", config.get("layernorm_epsilon", 1e-5))
        reader = ConfigReader.of_family(
            {**config, "rms_norm_eps": eps}, "mimo_v2_flash", *OTHER_KEYS
        )
        reader.require("scoring_func", "sigmoid")
        reader.require("topk_method", "noaux_tc")
        before = reader.get_optional("sliding_window_size", int)
        window = reader.get_size("sliding_window", WINDOW)
        sizes = {
            "head_dim": reader.get("head_dim", int, 192),
            "v_head_dim": reader.get("v_head_dim", int, 128),
        }
        _check_sliding(reader, sizes)
        part = reader.get("partial_rotary_factor", float, PART)
        ropes = {
            kind: {"rope_theta": reader.get(key, float, theta), "partial_rotary_factor": part}
            for kind, (key, theta) in THETAS.items()
        }
        return cls.read(
            reader,
            **sizes,
            attention_value_scale=_scale(reader),
            sliding_window=window if before is None else before + 1,
            layer_types=reader.get_strings("layer_types") or _usual_types(reader),
            **read_ropes(reader, ropes),
            **read_feed_forward(
                reader,
                defaults=DEFAULTS,
                n_shared_experts=None,
                sparse_layers=_read_sparse(reader),
                prediction_layers=(),
            ),
        )


def _check_sliding(reader: ConfigReader, sizes: Mapping[str, int]) -> None:
    """Raise ValueError unless sliding layers are as the architecture has them."""
    for key, size in sizes.items():
        reader.require(f"swa_{key}", size)
    reader.require("swa_num_attention_heads", reader.get("num_attention_heads", int))
    reader.require("swa_num_key_value_heads", 2 * reader.get("num_key_value_heads", int))
    reader.require("add_swa_attention_sink_bias", True)
    reader.require("add_full_attention_sink_bias", False)
    reader.require("n_shared_experts", 0)


def _usual_types(reader: ConfigReader) -> tuple[str, ...]:
    """Return the kind of each layer by `hybrid_layer_pattern`, 1 where it slides, or as usual."""
    numbers = range(reader.get("num_hidden_layers", int))
    usual = tuple(int(layer > 0 and (layer + 1) % 6 > 0) for layer in numbers)
    pattern = reader.get_ints("hybrid_layer_pattern") or usual
    return tuple(ATTENTION_TYPES[slides == 0] for slides in pattern)


def _read_sparse(reader: ConfigReader) -> tuple[int, ...]:
    """Return the layers with experts, by `moe_layer_freq`, 1 for each, or all but the first."""
    flags = reader.get_ints("moe_layer_freq")
    sparse = tuple(layer for layer, flag in enumerate(flags) if flag)
    return sparse or read_sparse_layers(reader, 1)


def _scale(reader: ConfigReader) -> float:
    """Return what values are multiplied with: 1 where it is null, the usual where it is absent."""
    if reader.is_absent("attention_value_scale"):
        return VALUE_SCALE
    return reader.get("attention_value_scale", float, 1.0)


Config = MiMoV2FlashConfig


class Attention(TurnedAttention):
    """Grouped-query attention with scaled values, and sinks where it slides."""

    def __init__(self, config: MiMoV2FlashConfig, layer: int, dtype: torch.dtype) -> None:
        slides = config.layer_types[layer] == ATTENTION_TYPES[0]
        heads = config.num_key_value_heads * (2 if slides else 1)
        super().__init__(
            replace(config, num_key_value_heads=heads),
            layer,
            dtype,
            bias=BIASED if config.attention_bias else (),
            has_sinks=slides,
            value_dim=config.v_head_dim,
        )
        self.value_scale = config.attention_value_scale

    def project(self, hidden_USH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and scaled values, [U, S, heads * size] each."""
        query, key, value = super().project(hidden_USH)
        return query, key, value * self.value_scale


class Model(TwoRopesModel):
    """MiMo-V2-Flash for generation."""

    config: MiMoV2FlashConfig

    def build_attention(self, layer: int, dtype: torch.dtype) -> Attention:
        """Return the attention of a layer."""
        return Attention(self.config, layer, dtype)


def weight_map(config: MiMoV2FlashConfig) -> WeightMap:
    """Map the published tensor names to ours, experts one by one or fused."""
    names = projection_names(has_bias=config.attention_bias, biased=BIASED)
    own = [
        rule
        for layer, kind in enumerate(config.layer_types)
        if kind == ATTENTION_TYPES[0]
        for rule in _sink_rules(f"layers.{layer}.self_attn.")
    ]
    return biased_routing_map(config, names, ignored=_prediction_names(), own=own)


def _prediction_names() -> list[str]:
    """Return the tensors of the layers that predict further tokens, all dense."""
    names = ["enorm", "hnorm", "eh_proj", "input_layernorm", "pre_mlp_layernorm"]
    names += ["final_layernorm", *(f"self_attn.{name}_proj" for name in "qkvo")]
    names += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    ends = [f"{name}.weight" for name in names] + ["self_attn.attention_sink_bias"]
    return [f"model.mtp.layers.{{layer}}.{end}" for end in ends]


def _sink_rules(attention: str) -> list[Rule]:
    theirs = {"separate": "attention_sink_bias", "fused": "sinks"}
    return either(
        **{
            form: [Rule(f"model.{attention}{name}", attention + "sinks")]
            for form, name in theirs.items()
        }
    )
