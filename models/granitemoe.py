"""Granite 3 MoE and Granite 4 (Tiny, Small): configuration, layers, experts and checkpoint map.

What differs from other decoders: embeddings, attention's logits, residuals and the last logits are
each scaled by a number of config.json; a softmax is over the K chosen experts. Granite 4 has a
shared expert and layers with a Mamba-2 memory, and then attention need not rotate anything.
Source: transformers, `models/granitemoe`, `models/granitemoeshared`, `models/granitemoehybrid`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.activations import activation_of
from neuron_moe.checkpoint import Rule, WeightMap, transpose
from neuron_moe.models.decoder import (
    PROJECTIONS,
    DecoderConfig,
    DecoderModel,
    Experts,
    GroupedAttention,
    check_layer_types,
)
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import router_spec
from neuron_moe.models.mamba2 import Mamba2, Mamba2Sizes, mamba_rules
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import decoder_map, either, projection_names
from neuron_moe.models.wrapped import Scale, WrappedLayer, wrapped_rules

ALIASES = ("granitemoeshared", "granitemoehybrid")
ROPE_THETA = 10000.0  # where config.json does not say
LAYER_TYPES = ("linear_attention", "full_attention")
OLD_TYPES = {"mamba": LAYER_TYPES[0], "attention": LAYER_TYPES[1]}
NORMS = {"before_attention": "input_layernorm", "before_feed_forward": "post_attention_layernorm"}
OTHER_KEYS = ("init_method", "mamba_chunk_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteMoeConfig(DecoderConfig):
    """Facts of one Granite checkpoint; names are those of its config.json.

    Attributes:
        attention_multiplier: of logits; None: one over the root of a head's size.
        shared_intermediate_size: of the shared expert; None: there is none.
        layer_types: one of LAYER_TYPES a layer.
        mamba: sizes of the layers with a memory; None: there are none.
        is_rotated: queries and keys know their places.
    """

    intermediate_size: int
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None
    shared_intermediate_size: int | None
    layer_types: tuple[str, ...]
    mamba: Mamba2Sizes | None
    mamba_conv_bias: bool
    is_rotated: bool

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        check_layer_types(self.layer_types, self.num_hidden_layers, LAYER_TYPES)
        if not self.logits_scaling:
            raise ValueError("logits_scaling=0: logits are divided by it. Correct config.json.")

    @property
    def experts(self) -> Experts:
        """Experts in every layer, chosen by their logits, and perhaps a shared one."""
        fields = {"top_k": self.num_experts_per_tok, "act_over_topk": True}
        return Experts(
            router_spec(self.num_local_experts, self.hidden_size, **fields),
            self.intermediate_size,
            shared_size=self.shared_intermediate_size,
            is_fused=True,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "GraniteMoeConfig":
        """Read config.json as published with the models, or as transformers 5.x writes it."""
        reader = ConfigReader.of_family(config, "granitemoe", *OTHER_KEYS, aliases=ALIASES)
        kind = reader.get("model_type", str, "granitemoe")
        scale = reader.get_optional("attention_multiplier", float)
        scale = 1.0 if reader.is_absent("attention_multiplier") else scale
        is_hybrid = kind == ALIASES[1]
        shared = 0
        if kind in ALIASES:
            shared = reader.get("shared_intermediate_size", int, 1024 if is_hybrid else 0)
        types: tuple[str, ...] = LAYER_TYPES[1:] * reader.get("num_hidden_layers", int)
        if is_hybrid:
            types = _read_layer_types(reader)
        has_memory = LAYER_TYPES[0] in types
        return cls.read(
            reader,
            rope=RopeConfig.from_hf(reader, default_theta=ROPE_THETA),
            attention_multiplier=scale,
            shared_intermediate_size=shared or None,
            layer_types=types,
            mamba=_read_mamba(reader) if is_hybrid and has_memory else None,
            mamba_conv_bias=reader.get("mamba_conv_bias", bool, True) if is_hybrid else False,
            is_rotated=_is_rotated(reader) if is_hybrid else True,
        )


Config = GraniteMoeConfig


def _read_layer_types(reader: ConfigReader) -> tuple[str, ...]:
    """Return the kind of each layer under today's names; read or ignore what memories have."""
    kinds = reader.get_strings("layer_types") or reader.get_strings("layers_block_type")
    usual = LAYER_TYPES[:1] * reader.get("num_hidden_layers", int)
    types = tuple(OLD_TYPES.get(kind, kind) for kind in kinds or usual)
    reader.require("normalization_function", "rmsnorm")
    reader.require("mamba_proj_bias", False)
    reader.ignore(*(f"mamba_{name}" for name in ("n_heads", "n_groups", "d_state", "d_head")))
    reader.ignore("mamba_d_conv", "mamba_expand")
    return types


def _read_mamba(reader: ConfigReader) -> Mamba2Sizes:
    """Return the sizes of a memory."""
    heads, size = reader.get("mamba_n_heads", int, 128), reader.get("hidden_size", int)
    inner = reader.get("mamba_expand", int, 2) * size
    head = inner // max(heads, 1)
    if reader.get_raw("mamba_d_head") != "auto":
        reader.require("mamba_d_head", head)
    limits = reader.get_raw("time_step_limit")
    least = limits[0] if isinstance(limits, list | tuple) and limits else 0.0
    most = limits[-1] if isinstance(limits, list | tuple) and limits else float("inf")
    if least != 0.0 or (isinstance(most, int | float) and most != float("inf")):
        raise ValueError(f"time_step_limit={limits}: must be 0 to infinity. Correct config.json.")
    return Mamba2Sizes(
        hidden_size=size,
        num_heads=heads,
        value_size=head,
        key_size=reader.get("mamba_d_state", int, 256),
        num_groups=reader.get("mamba_n_groups", int, 1),
        conv_width=reader.get("mamba_d_conv", int, 4),
    )


def _is_rotated(reader: ConfigReader) -> bool:
    """Say whether queries and keys are rotated, as `position_embedding_type` does."""
    kind = reader.get_optional("position_embedding_type", str)
    if kind not in (None, "nope", "rope"):
        raise ValueError(
            f"position_embedding_type={kind!r}: must be 'rope', 'nope' or null. Correct it."
        )
    return kind == "rope"


class Model(DecoderModel):
    """Granite for generation."""

    config: GraniteMoeConfig

    def build_layer(self, layer: int, dtype: torch.dtype, backend: str) -> WrappedLayer:
        """Return a layer whose residuals are multiplied."""
        config = self.config
        norms = {name: config.make_norm(config.hidden_size, dtype) for name in NORMS}
        scales = {
            name: Scale(config.residual_multiplier)
            for name in ("after_attention", "after_feed_forward")
        }
        attention = self.build_attention(layer, dtype)
        experts = self.build_feed_forward(layer, dtype, backend)
        return WrappedLayer(attention, experts, **norms, **scales)

    def build_attention(self, layer: int, dtype: torch.dtype) -> nn.Module:
        """Return grouped-query attention, or a memory."""
        config = self.config
        if config.layer_types[layer] == LAYER_TYPES[0] and config.mamba is not None:
            has_bias = config.mamba_conv_bias
            eps = config.rms_norm_eps
            memory = Mamba2(config.mamba, eps, 0.0, dtype, has_conv_bias=has_bias)
            memory.activation = activation_of(config.hidden_act)
            return memory
        bias = PROJECTIONS if config.attention_bias else ()
        attention = GroupedAttention(config, dtype, bias=bias, rotates=config.is_rotated)
        if config.attention_multiplier is not None:
            attention.scale = config.attention_multiplier
        return attention

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the first hidden states `[.., H]` of token ids `[..]`."""
        return super().embed(input_ids) * self.config.embedding_multiplier

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[.., V]` of the last hidden states `[.., H]`."""
        return super().compute_logits(hidden) / self.config.logits_scaling


def weight_map(config: GraniteMoeConfig) -> WeightMap:
    """Map the published tensor names to ours."""
    rules = wrapped_rules("{layer}", NORMS)
    theirs, ours = "model.layers.{layer}.", "layers.{layer}.moe."
    published, op = theirs + "block_sparse_moe.", ours + "expert_mlps.mlp_op."
    pairs = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}
    if config.shared_intermediate_size is not None:
        rules += [
            Rule(f"{theirs}shared_mlp.{old}.weight", f"{ours}shared_experts.{new}.weight")
            for old, new in pairs.items()
        ]
    router = ours + "router.linear_router.weight"
    rules += either(
        published=[
            Rule(published + "router.layer.weight", router),
            *(
                Rule(f"{published}{old}.weight", f"{op}{new}.weight", transpose)
                for old, new in pairs.items()
            ),
        ],
        fused=[
            Rule(published + "router.weight", router),
            *(
                Rule(f"{published}experts.{new}", f"{op}{new}.weight", transpose)
                for new in pairs.values()
            ),
        ],
    )
    for layer, kind in enumerate(config.layer_types):
        block = f"layers.{layer}."
        if kind == LAYER_TYPES[0]:
            memory = f"model.{block}mamba.", f"{block}self_attn."
            rules += mamba_rules(*memory, has_bias=config.mamba_conv_bias)
        else:
            names = projection_names(has_bias=config.attention_bias)
            rules += [Rule(f"model.{block}{name}", block + name) for name in names]
    return decoder_map(config, rules, expert=config.num_local_experts)
