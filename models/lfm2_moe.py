"""LFM2-MoE (8B-A1B): configuration, short convolutions, experts and checkpoint map.

What differs from other decoders: most layers mix each token with the two before it, each channel by
itself, between two gates, and keep those two tokens only; the others attend, with a norm for each
head of queries and keys. Experts are chosen as in DeepSeek-V3, in one group and without shared
ones. Norms, projections and MLPs are published under names of their own.
Source: transformers, `models/lfm2_moe/modular_lfm2_moe.py`; LiquidAI/LFM2-8B-A1B.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.checkpoint import Rule, WeightMap
from neuron_moe.models.attention import StateShape, StateView
from neuron_moe.models.biased_routing import (
    BiasedRoutingConfig,
    BiasedRoutingModel,
    read_feed_forward,
)
from neuron_moe.models.decoder import GroupedAttention, Tokens, check_layer_types
from neuron_moe.models.delta_net import Inputs, Recurrent, State, convolve
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import biased_spec
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    both_expert_rules,
    decoder_map,
    feed_forward_rules,
    moe_rules,
)
from neuron_moe.spec import RouterSpec

ROPE_THETA, EPS = 1000000.0, 1e-6  # where config.json does not say; beside a sum of weights
LAYER_TYPES = ("conv", "full_attention")
NAMES = {"n_routed_experts": "num_experts", "first_k_dense_replace": "num_dense_layers"}
DEFAULTS = {"first_k_dense_replace": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
OTHER_KEYS = ("conv_dim", "conv_use_xavier_init", "use_pos_enc", "norm_eps", "tie_embedding")
MLP = ("w1", "w3", "w2")  # gate, up and down
CONVOLUTION = {"in_proj": "in_proj.", "out_proj": "out_proj.", "conv": "conv_"}  # ours of theirs
ATTENTION = {  # theirs of ours
    **{f"{name}_proj": f"{name}_proj" for name in "qkv"},
    "o_proj": "out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2MoeConfig(BiasedRoutingConfig):
    """Facts of one checkpoint, under the names that `BiasedRoutingConfig` gives them.

    Attributes:
        layer_types: one of LAYER_TYPES a layer.
        conv_width: tokens that a convolution mixes.
        conv_bias: of the convolution and the projections around it.
        use_expert_bias: a bias helps to choose.
    """

    layer_types: tuple[str, ...]
    conv_width: int
    conv_bias: bool = False
    use_expert_bias: bool = True

    def __post_init__(self) -> None:
        BiasedRoutingConfig.__post_init__(self)
        check_layer_types(self.layer_types, self.num_hidden_layers, LAYER_TYPES)

    @property
    def router_spec(self) -> RouterSpec:
        """How experts are chosen; raises ValueError where that is not possible."""
        return biased_spec(
            self.n_routed_experts,
            self.hidden_size,
            top_k=self.num_experts_per_tok,
            has_selection_bias=self.use_expert_bias,
            renormalize=self.norm_topk_prob,
            renormalize_eps=EPS,
            routed_scaling_factor=self.routed_scaling_factor,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Lfm2MoeConfig":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        given = {**config, "rms_norm_eps": config.get("norm_eps", 1e-5)}
        reader = ConfigReader.of_family(given, "lfm2_moe", *OTHER_KEYS)
        reader.require("hidden_act", "silu")
        is_tied = reader.get("tie_embedding", bool, reader.get("tie_word_embeddings", bool, True))
        return cls.read(
            reader,
            rope=RopeConfig.from_hf(reader, default_theta=ROPE_THETA),
            tie_word_embeddings=is_tied,
            layer_types=reader.get_strings("layer_types"),
            conv_width=reader.get_size("conv_L_cache", 3),
            **read_feed_forward(
                reader,
                names=NAMES,
                defaults=DEFAULTS,
                n_shared_experts=None,
                n_group=1,
                topk_group=1,
                attention_bias=False,
                prediction_layers=(),
            ),
        )


Config = Lfm2MoeConfig


class ShortConvolution(Recurrent):
    """out(gate * convolution(other gate * x)), all three of one projection of the layer's input."""

    def __init__(self, config: Lfm2MoeConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size, width, bias = config.hidden_size, config.conv_width, config.conv_bias
        self.in_proj = nn.Linear(size, 3 * size, bias=bias, dtype=dtype)
        self.out_proj = nn.Linear(size, size, bias=bias, dtype=dtype)
        self.conv_weight = nn.Parameter(torch.zeros(size, 1, width, dtype=dtype))
        bias_C = torch.zeros(size, dtype=dtype) if bias else None
        self.conv_bias = None if bias_C is None else nn.Parameter(bias_C)

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What is kept of each sequence, `State`, without a memory."""
        size, _, width = self.conv_weight.shape
        return (StateShape((width - 1, size)),)

    @property
    def answer(self) -> tuple[int, int]:
        """N and V of what `recur` returns."""
        return 1, self.conv_weight.shape[0]

    @property
    def row_width(self) -> int:
        """Numbers of a token: both gates, what they gate, and what the convolution makes."""
        return 4 * self.conv_weight.shape[0]

    def forward(self, hidden_USH: Tensor, tokens: Tokens, view: StateView | None) -> Tensor:
        """Return the layer's output `[U, S, H]`; arguments as in `DecoderLayer`."""
        before_USH, after_USH, x_USH = self.in_proj(hidden_USH).chunk(3, dim=-1)
        no_heads_US0 = x_USH[..., :0]
        inputs = Inputs(before_USH * x_USH, no_heads_US0, no_heads_US0, tokens.real_US)
        mixed_USH = self.core(self, inputs, view).squeeze(2).to(hidden_USH.dtype)
        out_USH: Tensor = self.out_proj(after_USH * mixed_USH)
        return out_USH

    def recur(self, inputs: Inputs, state: State) -> tuple[Tensor, State]:
        """Return what the convolution makes of new tokens, [U, S, 1, H] float32, and the state."""
        mixed_USH, last_UwH = convolve(inputs, state[0], self.conv_weight, self.conv_bias)
        return mixed_USH.unsqueeze(2), (last_UwH,)


class Model(BiasedRoutingModel):
    """LFM2-MoE for generation."""

    config: Lfm2MoeConfig

    def build_attention(self, layer: int, dtype: torch.dtype) -> nn.Module:
        """Return a short convolution, or grouped-query attention with norms on heads."""
        if self.config.layer_types[layer] == LAYER_TYPES[0]:
            return ShortConvolution(self.config, dtype)
        return GroupedAttention(self.config, dtype, norms="by head")


def weight_map(config: Lfm2MoeConfig) -> WeightMap:
    """Map the published tensor names to ours, experts one by one or fused."""
    theirs, ours = "model.layers.{layer}.", "layers.{layer}."
    rules = [
        Rule("model.embed_tokens.weight", "embed_tokens.weight"),
        Rule("model.embedding_norm.weight", "norm.weight"),
        Rule("lm_head.weight", "lm_head.weight"),
        Rule(theirs + "operator_norm.weight", ours + "input_layernorm.weight"),
        Rule(theirs + "ffn_norm.weight", ours + "post_attention_layernorm.weight"),
    ]
    for layer, kind in enumerate(config.layer_types):
        block, attention = f"model.layers.{layer}.", f"layers.{layer}.self_attn."
        if kind == LAYER_TYPES[0]:
            rules += [
                Rule(f"{block}conv.{name}.{end}", f"{attention}{new}{end}")
                for name, new in CONVOLUTION.items()
                for end in (("weight", "bias") if config.conv_bias else ("weight",))
            ]
        else:
            rules += [
                Rule(f"{block}self_attn.{old}.weight", f"{attention}{new}.weight")
                for new, old in ATTENTION.items()
            ]
    bias = "expert_bias" if config.use_expert_bias else ""

    def of_sparse(fed: str, moe: str) -> list[Rule]:
        return moe_rules(fed, moe, both_expert_rules(fed, moe, MLP), bias=bias)

    layers = config.sparse_layers, config.num_hidden_layers
    rules += feed_forward_rules(*layers, of_sparse, theirs + "feed_forward", MLP)
    return decoder_map(config, rules, expert=config.n_routed_experts)
