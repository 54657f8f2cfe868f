"""Qwen3-Next: configuration, attention, experts and checkpoint map.

Attention is that of Qwen3.5, whose linear attention here has two input projections instead of four;
routing is that of Qwen2-MoE. Published files hold a layer that predicts a further token, which is
not read.
Source: transformers, `models/qwen3_next/modular_qwen3_next.py`; Qwen/Qwen3-Next-80B-A3B-Instruct.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from neuron_moe.activations import activation_of
from neuron_moe.checkpoint import WeightMap
from neuron_moe.models.decoder import DecoderModel, check_layer_types
from neuron_moe.models.delta_net import DeltaNetSizes, GatedDeltaNet
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import OffsetRMSNorm
from neuron_moe.models.qwen2_moe import GatedSharedConfig, gated_shared_map
from neuron_moe.models.qwen3_5_moe import (
    LAYER_TYPES,
    ROTATED_PART,
    GatedAttention,
    attention_rules,
    prediction_names,
    read_delta_net,
    read_layer_types,
)
from neuron_moe.models.qwen3_moe import read_experts
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import decoder_rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3NextConfig(GatedSharedConfig):
    """Facts of one Qwen3-Next checkpoint; names are those of its config.json.

    Attributes:
        linear_attention: sizes of the layers that keep a memory of the sequence.
    """

    linear_attention: DeltaNetSizes

    def __post_init__(self) -> None:
        GatedSharedConfig.__post_init__(self)
        check_layer_types(self.layer_types, self.num_hidden_layers, LAYER_TYPES)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Qwen3NextConfig":
        """Read config.json as published, or as transformers 5.x writes it."""
        reader = ConfigReader.of_family(config, "qwen3_next")
        reader.require("attention_bias", False)
        reader.require("use_sliding_window", False)
        return cls.read(
            reader,
            head_dim=reader.get("head_dim", int),
            rope=RopeConfig.from_hf(reader, default_part=ROTATED_PART),
            attention_bias=False,
            sliding_window=None,
            layer_types=read_layer_types(reader),
            linear_attention=read_delta_net(reader),
            **read_experts(reader),
        )

    def make_norm(self, size: int, dtype: torch.dtype) -> OffsetRMSNorm:
        """Return a norm that scales by one plus its weight."""
        return OffsetRMSNorm(size, self.rms_norm_eps, dtype)


Config = Qwen3NextConfig


class Model(DecoderModel):
    """Qwen3-Next for generation."""

    config: Qwen3NextConfig

    def build_attention(self, layer: int, dtype: torch.dtype) -> GatedAttention | GatedDeltaNet:
        """Return the attention of a layer."""
        config = self.config
        if config.layer_types[layer] == "full_attention":
            return GatedAttention(config, dtype)
        sizes, eps = config.linear_attention, config.rms_norm_eps
        memory = GatedDeltaNet(sizes, eps, dtype, is_fused=True)
        memory.activation = activation_of(config.hidden_act)
        return memory


def weight_map(config: Qwen3NextConfig) -> WeightMap:
    """Map the published tensor names to ours, experts one by one or fused."""
    rules = decoder_rules([])
    for layer, kind in enumerate(config.layer_types):
        names = f"model.layers.{layer}.", f"layers.{layer}."
        rules += attention_rules(*names, kind, inputs=("qkvz", "ba"))
    return gated_shared_map(config, rules, prediction_names())
