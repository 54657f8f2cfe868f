"""Ling-3.0-Flash and tiny: configuration, attention, experts and checkpoint map.

Five of six layers keep a memory of the sequence as Kimi-Linear's do, with whole projections for
their gates and a decay that may have a lower bound. The sixth attends to latents as DeepSeek-V3
does, and a sigmoid of its input gates each head. Experts are DeepSeek-V3's. The last layers clamp:
routed experts gate and up before silu, shared ones silu and up (`clamped_silu`), as vLLM computes
it; transformers and the code that is published with the files leave the limits out.
The layer that predicts a further token is not read.
Source: transformers, `models/bailing_hybrid/modular_bailing_hybrid.py`; inclusionAI/Ling-3.0-Flash.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from neuron_moe.activations import activation_of
from neuron_moe.checkpoint import Rule, WeightMap, concat_mixed
from neuron_moe.models.biased_routing import BiasedRoutingModel, prediction_blocks, read_limits
from neuron_moe.models.channel_delta import MIXED, MODULES, ChannelDeltaAttention
from neuron_moe.models.deepseek_v3 import LatentAttention, latent_names
from neuron_moe.models.delta_net import DeltaNetSizes
from neuron_moe.models.hf_config import ConfigReader, respell
from neuron_moe.models.kimi_linear import DEFAULTS, LAYER_TYPES, NAMES, KimiLinearConfig
from neuron_moe.models.layers import GatedMLP, build_shared, clamped_silu, gated, gated_moe
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    decoder_map,
    decoder_rules,
    expert_rules,
    mlp_rules,
    moe_rules,
    with_modules,
)
from neuron_moe.moe import MoE
from neuron_moe.router import Router

THETA, LOWEST, PERIOD = 6000000.0, -5.0, 6  # where config.json does not say
CONTEXT = "original_max_position_embeddings"
GROUPS = {"first_k_dense_replace": 2, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
FIXED: dict[str, Any] = {  # what no published model has otherwise
    **dict.fromkeys(("linear_silu", "no_kda_lora", "use_qk_norm", "rope_interleave"), True),
    **dict.fromkeys(("use_kda_lora", "use_mla_nope", "use_nGPT", "value_norm"), False),
    **dict.fromkeys(("up_proj_norm", "scale_router_input", "use_bias", "use_qkv_bias"), False),
    "tie_word_embeddings": False,  # transformers leaves them apart
    "moe_router_enable_expert_bias": True,
    "num_kv_heads_for_linear_attn": 0,
    "score_function": "sigmoid",
    "gated_attention_proj_granularity_type": "head_wise",
}
SPELLINGS = {**NAMES, "linear_conv_kernel_dim": "short_conv_kernel_size"}
# Of software, of the layer that predicts; and a part of heads that is said elsewhere.
OTHER_KEYS = (
    *("embedding_dropout", "output_dropout", "max_window_layers", "pretraining_tp", "seq_aux"),
    *("mtp_loss_scaling_factor", "mtp_use_kda", "router_dtype", "partial_rotary_factor"),
    "group_norm_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BailingHybridConfig(KimiLinearConfig):
    """Facts of one Ling checkpoint, under DeepSeek-V3's names.

    Attributes:
        lowest_decay: what the logarithm of a decay is above; None for no such bound.
        expert_limits: of the routed experts of each layer; 0 for none.
        shared_limits: the same of the shared experts.
    """

    lowest_decay: float | None
    expert_limits: tuple[float, ...]
    shared_limits: tuple[float, ...]

    def __post_init__(self) -> None:
        KimiLinearConfig.__post_init__(self)
        if self.hidden_act != "silu" and any((*self.expert_limits, *self.shared_limits)):
            raise ValueError(
                f"hidden_act={self.hidden_act!r}: must be 'silu', of which expert_swiglu_limit_list"
                " and share_expert_swiglu_limit_list are limits. Correct config.json."
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "BailingHybridConfig":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
        # As published head_dim is that of the layers with a memory; transformers writes both.
        given = {"linear_head_dim": config.get("head_dim"), **respell(config, SPELLINGS)}
        given |= {"num_key_value_heads": heads, "head_dim": None}
        reader = ConfigReader.of_family(given, "bailing_hybrid", *OTHER_KEYS)
        for key, value in FIXED.items():
            reader.require(key, value)
        reader.require("rotary_dim", reader.get("qk_rope_head_dim", int))
        width = "moe_shared_expert_intermediate_size"
        reader.require(width, reader.get("moe_intermediate_size", int))
        rope = RopeConfig.from_hf(
            reader,
            default_theta=THETA,
            is_interleaved=True,
            ignored=("partial_rotary_factor",),  # all of qk_rope_head_dim is rotated
        )
        section = given.get("rope_parameters") or given.get("rope_scaling") or {}
        if rope.kind in ("yarn", "llama3") and CONTEXT not in section:
            raise ValueError(
                f"rope_parameters: {CONTEXT} is missing, for transformers and others take different"
                " ones in its place. Add it to config.json."
            )
        kinds, delta = _read_linear(reader)
        lowest = reader.get("kda_lower_bound", float, LOWEST)
        if lowest >= 0:
            raise ValueError(f"kda_lower_bound={lowest}: must be below 0. Correct config.json.")
        return cls.read_latent(
            reader,
            defaults=DEFAULTS | GROUPS,
            rope=rope,
            layer_types=kinds,
            delta=delta,
            lowest_decay=lowest if reader.get("kda_safe_gate", bool, True) else None,
            expert_limits=read_limits(reader, "expert_swiglu_limit_list"),
            shared_limits=read_limits(reader, "share_expert_swiglu_limit_list"),
        )


def _read_linear(reader: ConfigReader) -> tuple[tuple[str, ...], DeltaNetSizes]:
    """Return the kind of each layer, and the sizes of those that keep a memory."""
    num_layers = reader.get("num_hidden_layers", int)
    period, written = reader.get_size("layer_group_size", PERIOD), reader.get_strings("layer_types")
    if not written and num_layers % period:
        raise ValueError(
            f"layer_group_size={period}: must divide num_hidden_layers={num_layers}, for programs"
            " do not agree on the layers of a shorter group. Name all of them in layer_types."
        )
    usual = tuple(LAYER_TYPES[(layer + 1) % period == 0] for layer in range(num_layers))
    heads = reader.get("linear_num_heads", int, reader.get("num_attention_heads", int))
    size = reader.get("linear_head_dim", int)
    hidden, width = reader.get("hidden_size", int), reader.get_size("linear_conv_kernel_dim", 4)
    both = {"num_key_heads": heads, "num_value_heads": heads, "key_size": size, "value_size": size}
    return written or usual, DeltaNetSizes(hidden_size=hidden, conv_width=width, **both)


Config = BailingHybridConfig


class BoundedDeltaAttention(ChannelDeltaAttention):
    """Kimi Delta Attention with whole projections for its gates."""

    def __init__(self, config: BailingHybridConfig, dtype: torch.dtype) -> None:
        sizes = config.delta
        shape = (sizes.num_key_heads,)
        super().__init__(sizes, config.rms_norm_eps, dtype, torch.float32, shape)
        self.lowest_decay = config.lowest_decay
        width = sizes.num_key_heads * sizes.key_size
        self.f_proj = nn.Linear(sizes.hidden_size, width, bias=False, dtype=dtype)
        self.g_proj = nn.Linear(sizes.hidden_size, width, bias=False, dtype=dtype)


class Model(BiasedRoutingModel):
    """Ling 3.0 for generation."""

    config: BailingHybridConfig

    def build_attention(self, layer: int, dtype: torch.dtype) -> nn.Module:
        """Return the attention of a layer."""
        if self.config.layer_types[layer] == LAYER_TYPES[1]:
            return LatentAttention(self.config, dtype, gates=1)
        memory = BoundedDeltaAttention(self.config, dtype)
        memory.activation = activation_of(self.config.hidden_act)
        return memory

    def build_feed_forward(self, layer: int, dtype: torch.dtype, backend: str) -> MoE | GatedMLP:
        """Return a MoE with a float32 router, or an MLP where the layer is dense."""
        config, size, act = self.config, self.config.hidden_size, self.config.hidden_act
        if layer not in config.sparse_layers:
            return GatedMLP(size, config.intermediate_size, dtype, act)
        limit = config.shared_limits[layer]
        formula = clamped_silu(limit) if limit else gated(act)
        shared = build_shared(size, config.shared_size or 0, dtype, formula=formula)
        router, inner = Router(config.router_spec), config.moe_intermediate_size
        limit = config.expert_limits[layer]
        routed = clamped_silu(limit, is_before=True) if limit else gated(act)
        return gated_moe(router, inner, dtype, backend, shared, formula=routed)


def weight_map(config: BailingHybridConfig) -> WeightMap:
    """Map the published tensor names to ours; transformers calls one of them otherwise."""
    _, *others = decoder_rules([])  # the first is of another name of the embedding
    rules = [Rule("model.word_embeddings.weight", "embed_tokens.weight"), *others]
    predicting = [*rules, *_latent_rules(config, "{layer}")]
    blocks = prediction_blocks(predicting, _sparse_rules, config.prediction_layers)
    for layer, kind in enumerate(config.layer_types):
        attends, number = kind == LAYER_TYPES[1], str(layer)
        rules += _latent_rules(config, number) if attends else _delta_rules(number)
        dense = mlp_rules(f"model.layers.{layer}.mlp", f"layers.{layer}.mlp")
        rules += _sparse_rules(number) if layer in config.sparse_layers else dense
    published = decoder_map(config, rules, (), blocks, expert=config.n_routed_experts)
    return with_modules(published, {"q_gate_proj": "g_proj", **MODULES})


def _latent_rules(config: BailingHybridConfig, layer: str) -> list[Rule]:
    """Return the rules of a layer that attends to latents."""
    theirs, ours = f"model.layers.{layer}.attention.", f"layers.{layer}.self_attn."
    names = [name.removeprefix("self_attn.") for name in latent_names(config)]
    pairs = {name.replace("o_proj", "dense"): name for name in names}
    pairs |= {"g_proj.weight": "q_gate_proj.weight"}
    return [Rule(theirs + their, ours + our) for their, our in pairs.items()]


def _delta_rules(layer: str) -> list[Rule]:
    """Return the rules of a layer that keeps a memory."""
    theirs, ours = f"model.layers.{layer}.attention.", f"layers.{layer}.self_attn."
    pairs = {f"{name}_proj.weight": f"{name}_proj.weight" for name in "fgb"}
    pairs["o_norm.weight"] = "norm_weight"
    exact = {name: name for name in ("dt_bias", "A_log")}
    pairs |= {f"{name[0]}_proj.weight": f"{name}_proj.weight" for name in MIXED}
    taps = tuple(f"{theirs}{name[0]}_conv1d.weight" for name in MIXED)
    out = ours + "out_proj.weight"
    return [
        *(Rule(theirs + their, ours + our) for their, our in pairs.items()),
        *(Rule(theirs + their, ours + our, is_exact=True) for their, our in exact.items()),
        Rule(taps, ours + "conv_weight", concat_mixed, is_exact=True),
        Rule(theirs + "o_proj.weight", out, variant="published"),
        Rule(theirs + "dense.weight", out, variant="transformers"),
    ]


def _sparse_rules(layer: str) -> list[Rule]:
    """Return the rules of the experts of a layer."""
    mlp, moe = f"model.layers.{layer}.mlp.", f"layers.{layer}.moe."
    experts = expert_rules(mlp + "experts", moe + "expert_mlps.mlp_op")
    return moe_rules(mlp, moe, experts, bias="gate.expert_bias", shared="shared_experts")
