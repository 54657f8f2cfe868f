"""GPT-OSS 20B and 120B: configuration, attention, experts and checkpoint map.

What differs from other decoders: a learned sink logit per query head, a sliding window on every
other layer, YaRN, biases everywhere, a router with bias whose softmax runs over the chosen experts,
and the clamped SwiGLU (up + 1) * gate * sigmoid(1.702 * gate), gate <= 7, -7 <= up <= 7.
Source: openai/gpt-oss, `gpt_oss/torch/model.py`, and the model card, arXiv 2508.10925.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from neuron_moe.checkpoint import Rule, WeightMap, chain, deinterleave_gate_up, mxfp4, transpose
from neuron_moe.experts import RoutedExperts
from neuron_moe.models.attention import Reach
from neuron_moe.models.decoder import (
    PROJECTIONS,
    DecoderConfig,
    DecoderModel,
    GroupedAttention,
    check_layer_types,
)
from neuron_moe.models.hf_config import BOOKKEEPING_KEYS, TRAINING_KEYS, ConfigReader
from neuron_moe.models.layers import build_router, expert_spec
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import decoder_map, decoder_rules, projection_names
from neuron_moe.moe import MoE
from neuron_moe.spec import ExpertFormula, RouterFormula, check_top_k, limits

LAYER_TYPES = ("sliding_attention", "full_attention")
# Fixed by the architecture; checkpoints written before transformers 5 do not repeat them.
SWIGLU_ALPHA, SWIGLU_LIMIT, ROPE_THETA = 1.702, 7.0, 150000.0
ROPE_SCALING = {  # of transformers' class
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """Facts of one GPT-OSS checkpoint; names are those of its config.json."""

    intermediate_size: int
    num_local_experts: int
    num_experts_per_tok: int
    sliding_window: int
    layer_types: tuple[str, ...]
    attention_bias: bool = True
    swiglu_alpha: float = SWIGLU_ALPHA
    swiglu_limit: float = SWIGLU_LIMIT

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        check_top_k(self.num_experts_per_tok, self.num_local_experts)
        check_layer_types(self.layer_types, self.num_hidden_layers, LAYER_TYPES)
        if self.swiglu_limit <= 0:
            raise ValueError(
                f"swiglu_limit={self.swiglu_limit}: must be positive. Correct config.json."
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "GptOssConfig":
        """Read config.json as transformers 4.55 to 5.x write it."""
        reader = ConfigReader(config, "config.json (gpt_oss)")
        reader.require("model_type", "gpt_oss")
        reader.require_quantization("mxfp4")
        # The last repeats original_max_position_embeddings of the rope section.
        reader.ignore(*BOOKKEEPING_KEYS, *TRAINING_KEYS, "initial_context_length")
        num_layers = reader.get("num_hidden_layers", int)
        usual_types = (LAYER_TYPES * num_layers)[:num_layers]
        return cls.read(
            reader,
            head_dim=reader.get("head_dim", int),
            rope=RopeConfig.from_hf(reader, default_theta=ROPE_THETA, default_section=ROPE_SCALING),
            num_experts_per_tok=reader.get_renamed("num_experts_per_tok", "experts_per_token", int),
            layer_types=reader.get_strings("layer_types") or usual_types,
        )

    def window(self, layer: int) -> int | None:
        """Return how many tokens this layer sees back, itself included; None for all."""
        sliding = self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if sliding else None


Config = GptOssConfig


class Model(DecoderModel):
    """GPT-OSS for generation."""

    config: GptOssConfig

    def build_attention(self, layer: int, dtype: torch.dtype) -> GroupedAttention:
        """Return grouped-query attention with sinks, sliding on every other layer."""
        return GroupedAttention(
            self.config,
            dtype,
            reach=Reach(window=self.config.window(layer)),
            bias=PROJECTIONS if self.config.attention_bias else (),
            has_sinks=True,
        )

    def build_feed_forward(self, layer: int, dtype: torch.dtype, backend: str) -> MoE:
        """Return one MoE layer: float32 router, softmax over the chosen k, clamped SwiGLU."""
        config = self.config
        router = build_router(
            config.num_local_experts,
            config.hidden_size,
            RouterFormula(top_k=config.num_experts_per_tok, act_over_topk=True, has_bias=True),
        )
        limit = config.swiglu_limit
        formula = ExpertFormula(
            "sigmoid",
            scale=config.swiglu_alpha,
            gates_itself=True,
            gate_limits=limits(None, limit),
            up_limits=limits(-limit, limit),
            up_offset=1.0,
            has_gate_up_bias=True,
            has_down_bias=True,
        )
        spec = expert_spec(router, config.intermediate_size, formula)
        return MoE(router, RoutedExperts(spec, dtype=dtype, backend=backend))


def weight_map(config: GptOssConfig) -> WeightMap:
    """Map the published tensor names to ours, experts in MXFP4 or in bf16."""
    projections = projection_names(has_bias=config.attention_bias)
    mlp, moe = "model.layers.{layer}.mlp.", "layers.{layer}.moe."
    gate_up, down = (f"{mlp}experts.{name}_proj" for name in ("gate_up", "down"))
    our_gate_up, our_down = (f"{moe}expert_mlps.mlp_op.{name}_proj" for name in ("gate_up", "down"))
    packed_gate_up, packed_down = ((n + "_blocks", n + "_scales") for n in (gate_up, down))
    unpack_down = chain(mxfp4, transpose)
    unpack_gate_up = chain(mxfp4, transpose, deinterleave_gate_up)
    rules = [
        *decoder_rules([*projections, "self_attn.sinks"]),
        Rule(mlp + "router.weight", moe + "router.linear_router.weight"),
        Rule(mlp + "router.bias", moe + "router.linear_router.bias"),
        Rule(packed_gate_up, our_gate_up + ".weight", unpack_gate_up, variant="mxfp4"),
        Rule(gate_up, our_gate_up + ".weight", deinterleave_gate_up, variant="bf16"),
        Rule(gate_up + "_bias", our_gate_up + ".bias", deinterleave_gate_up),
        Rule(packed_down, our_down + ".weight", unpack_down, variant="mxfp4"),
        Rule(down, our_down + ".weight", variant="bf16"),
        Rule(down + "_bias", our_down + ".bias"),
    ]
    return decoder_map(config, rules)
