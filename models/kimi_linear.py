"""Kimi-Linear: configuration, attention, experts and checkpoint map.

Three of four layers keep a memory of the sequence (Kimi Delta Attention): that of
`models/delta_net.py` with a decay for each number of a key, and gates made of small latents. The
fourth attends to latents as DeepSeek-V3 does, but rotates nothing. Experts are DeepSeek-V3's.
Source: transformers, `models/kimi_linear/modular_kimi_linear.py`; arXiv 2510.26692;
moonshotai/Kimi-Linear-48B-A3B-Instruct.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.activations import activation_of
from neuron_moe.checkpoint import Rule, WeightMap
from neuron_moe.models.biased_routing import BiasedRoutingModel
from neuron_moe.models.channel_delta import MODULES
from neuron_moe.models.decoder import Tokens, check_layer_types
from neuron_moe.models.deepseek_v3 import DeepseekV3Config, LatentAttention, latent_names
from neuron_moe.models.delta_net import DeltaNetSizes
from neuron_moe.models.hf_config import ConfigReader, respell
from neuron_moe.models.kimi_delta import KimiDeltaAttention, delta_rules
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    decoder_map,
    decoder_rules,
    either,
    expert_rules,
    mlp_rules,
    moe_rules,
    with_modules,
)

LAYER_TYPES = ("linear_attention", "full_attention")
PERIOD = 4  # of the kinds of layers, where config.json does not say
NAMES = {  # how Kimi-Linear spells DeepSeek-V3's keys
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts", "n_group", "topk_group"), 1),
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
}
# Nothing is rotated, and head_dim is not what its name says.
OTHER_KEYS = (
    *("head_dim", "rope_theta", "rope_scaling", "rope_parameters"),
    *("pretraining_tp", "use_grouped_topk"),
)
SIZES = {  # of linear attention: within the published section, as transformers writes it, usual
    "head_dim": ("linear_head_dim", 128),
    "num_heads": ("linear_num_heads", 32),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", 4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiLinearConfig(DeepseekV3Config):
    """Facts of one Kimi-Linear checkpoint, under DeepSeek-V3's names.

    Attributes:
        layer_types: one of LAYER_TYPES a layer.
        delta: sizes of the layers that keep a memory of the sequence.
    """

    layer_types: tuple[str, ...]
    delta: DeltaNetSizes

    def __post_init__(self) -> None:
        DeepseekV3Config.__post_init__(self)
        check_layer_types(self.layer_types, self.num_hidden_layers, LAYER_TYPES)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "KimiLinearConfig":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        reader = open_config(config)
        section = ConfigReader(reader.get_section("linear_attn_config"), "linear_attn_config")
        facts = read_linear(reader, section)
        section.finish()
        return cls.read_latent(reader, defaults=DEFAULTS, **facts)


def open_config(config: Mapping[str, Any], *ignored: str) -> ConfigReader:
    """Return a reader under DeepSeek-V3's names, which refused what no such model has.

    Args:
        config: the text model's config.json.
        ignored: further keys that change nothing.

    Raises:
        ValueError: a contradictory key, or a variant nobody published.
    """
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    given = {**respell(config, NAMES), "num_key_value_heads": heads}
    reader = ConfigReader.of_family(given, "kimi_linear", *OTHER_KEYS, *ignored)
    reader.require("tie_word_embeddings", False)  # transformers leaves them apart
    reader.require("mla_use_nope", True)
    reader.require("moe_router_activation_func", "sigmoid")
    reader.require("num_nextn_predict_layers", 0)
    return reader


def read_linear(reader: ConfigReader, section: ConfigReader) -> dict[str, Any]:
    """Return fields of `KimiLinearConfig`: kinds of layers, sizes of memories, what rotates.

    Args:
        reader: of config.json.
        section: of its section on linear attention.

    Raises:
        ValueError: a missing or contradictory key.
    """
    num_layers = reader.get("num_hidden_layers", int)
    size, heads, width = (
        section.get(name, int, reader.get(other, int, usual))
        for name, (other, usual) in SIZES.items()
    )
    full, linear = (section.get_ints(f"{kind}_layers") for kind in ("full_attn", "kda"))
    attends = {layer for layer in range(1, num_layers) if layer % PERIOD == 0}
    if full or linear:  # counted from 1
        attends = {layer - 1 for layer in full}
        if sorted((*full, *linear)) != list(range(1, num_layers + 1)):
            raise ValueError(
                f"full_attn_layers={list(full)}, kda_layers={list(linear)}: must name each of"
                f" num_hidden_layers={num_layers} layers once, from 1. Correct config.json."
            )
    kinds = tuple(LAYER_TYPES[layer in attends] for layer in range(num_layers))
    sizes = DeltaNetSizes(
        hidden_size=reader.get("hidden_size", int),
        num_key_heads=heads,
        num_value_heads=heads,
        key_size=size,
        value_size=size,
        conv_width=width,
    )
    return {
        "layer_types": reader.get_strings("layer_types") or kinds,
        "delta": sizes,
        "rope": RopeConfig(theta=10000.0),  # rotates nothing
    }


Config = KimiLinearConfig


class PlainLatentAttention(LatentAttention):
    """DeepSeek-V3's attention without rotation."""

    def _turn(self, heads: Tensor, tokens: Tokens) -> Tensor:
        return heads


class Model(BiasedRoutingModel):
    """Kimi-Linear for generation."""

    config: KimiLinearConfig

    def build_attention(self, layer: int, dtype: torch.dtype) -> nn.Module:
        """Return the attention of a layer."""
        config = self.config
        if config.layer_types[layer] == "full_attention":
            return PlainLatentAttention(config, dtype)
        memory = KimiDeltaAttention(config.delta, config.rms_norm_eps, dtype)
        memory.activation = activation_of(config.hidden_act)
        return memory


def weight_map(config: KimiLinearConfig) -> WeightMap:
    """Map the published tensor names to ours; transformers calls dense MLPs as it calls experts."""
    rules = decoder_rules([])
    for layer, kind in enumerate(config.layer_types):
        theirs, ours = f"model.layers.{layer}.", f"layers.{layer}."
        if kind == "full_attention":
            names = latent_names(config)
            rules += [Rule(f"{theirs}{name}", f"{ours}{name}") for name in names]
        else:
            rules += delta_rules(theirs + "self_attn.", ours + "self_attn.")
        sparse = theirs + "block_sparse_moe"
        if layer not in config.sparse_layers:
            dense = (mlp_rules(name, ours + "mlp") for name in (theirs + "mlp", sparse))
            rules += either(**dict(zip(("published", "transformers"), dense, strict=True)))
            continue
        rules += biased_moe_rules(sparse + ".", ours + "moe.")
    published = decoder_map(config, rules, expert=config.n_routed_experts)
    return with_modules(published, MODULES)


def biased_moe_rules(sparse: str, moe: str, own: Sequence[Rule] = ()) -> list[Rule]:
    """Return the rules of a layer with experts, and what else it has."""
    experts = expert_rules(sparse + "experts", moe + "expert_mlps.mlp_op", ("w1", "w3", "w2"))
    bias, shared = "gate.e_score_correction_bias", "shared_experts"
    return moe_rules(sparse, moe, [*own, *experts], bias=bias, shared=shared)
