"""GPT-OSS 20B and 120B: configuration, model and checkpoint map.

What differs from other decoders: a learned sink logit per query head, a sliding window on every
other layer, YaRN, biases everywhere, a router with bias whose softmax runs over the chosen experts,
and the clamped SwiGLU (up + 1) * gate * sigmoid(1.702 * gate), gate <= 7, -7 <= up <= 7.
Source: openai/gpt-oss, `gpt_oss/torch/model.py`, and the model card, arXiv 2508.10925.

Letters: U sequences, S new tokens, C cached slots, H hidden, V vocabulary, Q query heads, J
key/value heads, D head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.checkpoint import Rule, WeightMap, chain, deinterleave_gate_up, mxfp4, transpose
from neuron_moe.spec import check_top_k
from neuron_moe.errors import check_positive_int
from neuron_moe.models.hf_config import BOOKKEEPING_KEYS, ConfigReader
from neuron_moe.models.layers import KVCache, RMSNorm, attend, attention_mask
from neuron_moe.models.rope import RopeConfig, apply_rope, rope_tables
from neuron_moe import (
    BlockwiseMatmulConfig,
    ExpertMLPsV2,
    MoE,
    RoutedExpertsMLPOpsConfig,
    RouterTopK,
)

LAYER_TYPES = ("sliding_attention", "full_attention")
# Fixed by the architecture; checkpoints written before transformers 5 do not repeat them.
SWIGLU_ALPHA, SWIGLU_LIMIT, ROPE_THETA = 1.702, 7.0, 150000.0
IGNORED_KEYS = (
    *BOOKKEEPING_KEYS,
    "attention_dropout",  # training only, as the next three
    "initializer_range",
    "output_router_logits",
    "router_aux_loss_coef",
    "initial_context_length",  # repeats original_max_position_embeddings of the rope section
    "bos_token_id",  # the tokenizer's business
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig:
    """Facts of one GPT-OSS checkpoint; names are those of its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int
    num_experts_per_tok: int
    sliding_window: int
    layer_types: tuple[str, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool = True
    swiglu_alpha: float = SWIGLU_ALPHA
    swiglu_limit: float = SWIGLU_LIMIT
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is int:
                check_positive_int(field.name, getattr(self, field.name))
        check_top_k(self.num_experts_per_tok, self.num_local_experts)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads}: must be a multiple of"
                f" num_key_value_heads={self.num_key_value_heads}. Correct config.json."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim}: must be even. Rotary embedding turns pairs."
            )
        known = set(self.layer_types) <= set(LAYER_TYPES)
        if not known or len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types={list(self.layer_types)}: must name num_hidden_layers="
                f"{self.num_hidden_layers} layers, each {' or '.join(LAYER_TYPES)}. Leave the key"
                " out for the usual alternation."
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "GptOssConfig":
        """Read config.json as transformers 4.55 to 5.x write it.

        Raises:
            ValueError: a missing, unknown or contradictory key, or a variant nobody published.
        """
        reader = ConfigReader(config, "config.json (gpt_oss)")
        reader.ignore(*IGNORED_KEYS)
        reader.require("model_type", "gpt_oss")
        reader.require("hidden_act", "silu")
        reader.require("tie_word_embeddings", False)
        reader.require_quantization("mxfp4")
        num_layers = reader.get("num_hidden_layers", int)
        usual_types = (LAYER_TYPES * num_layers)[:num_layers]
        old_top_k = reader.get_optional("experts_per_token", int)
        top_k = reader.get("num_experts_per_tok", int, old_top_k)
        if old_top_k not in (None, top_k):
            raise ValueError(
                f"num_experts_per_tok={top_k}, experts_per_token={old_top_k}: must agree."
                " Keep one of them."
            )
        facts = cls(
            vocab_size=reader.get("vocab_size", int),
            hidden_size=reader.get("hidden_size", int),
            intermediate_size=reader.get("intermediate_size", int),
            num_hidden_layers=num_layers,
            num_attention_heads=reader.get("num_attention_heads", int),
            num_key_value_heads=reader.get("num_key_value_heads", int),
            head_dim=reader.get("head_dim", int),
            num_local_experts=reader.get("num_local_experts", int),
            num_experts_per_tok=top_k,
            sliding_window=reader.get("sliding_window", int),
            layer_types=tuple(reader.get_raw("layer_types") or usual_types),
            max_position_embeddings=reader.get("max_position_embeddings", int),
            rms_norm_eps=reader.get("rms_norm_eps", float),
            rope=RopeConfig.from_hf(reader, default_theta=ROPE_THETA),
            attention_bias=reader.get("attention_bias", bool, True),
            swiglu_alpha=reader.get("swiglu_alpha", float, SWIGLU_ALPHA),
            swiglu_limit=reader.get("swiglu_limit", float, SWIGLU_LIMIT),
            eos_token_ids=reader.get_token_ids("eos_token_id"),
            pad_token_id=reader.get_optional("pad_token_id", int),
        )
        reader.finish()
        return facts

    def window(self, layer: int) -> int | None:
        """Return how many tokens this layer sees back, itself included; None for all."""
        sliding = self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if sliding else None


Config = GptOssConfig


class Attention(nn.Module):
    """Grouped-query attention with sinks; writes keys and values into the slots it is given."""

    def __init__(self, config: GptOssConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=bias, dtype=dtype)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=bias, dtype=dtype)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=bias, dtype=dtype)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=bias, dtype=dtype)
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads, dtype=dtype))

    def forward(
        self,
        hidden_USH: Tensor,
        rope: tuple[Tensor, Tensor],
        mask_USC: Tensor,
        cache: tuple[Tensor, Tensor, Tensor] | None,
    ) -> Tensor:
        """Return the attention output `[U, S, H]`; arguments as in `DecoderLayer`."""
        heads = (*hidden_USH.shape[:2], -1, self.head_dim)
        query_USQD = apply_rope(self.q_proj(hidden_USH).view(heads), *rope)
        key_UJCD = apply_rope(self.k_proj(hidden_USH).view(heads), *rope).transpose(1, 2)
        value_UJCD = self.v_proj(hidden_USH).view(heads).transpose(1, 2)
        if cache is not None:
            old_key_UJCD, old_value_UJCD, slots_S = cache
            key_UJCD = old_key_UJCD.index_copy_(2, slots_S, key_UJCD)
            value_UJCD = old_value_UJCD.index_copy_(2, slots_S, value_UJCD)
        out_USQD = attend(query_USQD, key_UJCD, value_UJCD, mask_USC, self.sinks)
        out_USH: Tensor = self.o_proj(out_USQD)
        return out_USH


class DecoderLayer(nn.Module):
    """Attention and MoE, each behind a norm and with a residual; static shapes throughout."""

    def __init__(self, config: GptOssConfig, dtype: torch.dtype, backend: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.moe = build_moe(config, dtype, backend)

    def forward(
        self,
        hidden_USH: Tensor,
        rope: tuple[Tensor, Tensor],
        mask_USC: Tensor,
        cache: tuple[Tensor, Tensor, Tensor] | None = None,
        real_US: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output `[U, S, H]`.

        Args:
            hidden_USH: [U, S, H] residual stream.
            rope: cos and sin of the new tokens, each [U, S, D / 2] float32.
            mask_USC: [U, S, C] bool, True where a token sees a slot (C = S without a cache).
            cache: keys and values [U, J, C, D], written in place, and the slots [S] int64 of the
                new tokens; None attends to the new tokens alone.
            real_US: [U, S] bool, False at padding, which goes to no expert; None: all are real.
        """
        attention_in_USH = self.input_layernorm(hidden_USH)
        hidden_USH = hidden_USH + self.self_attn(attention_in_USH, rope, mask_USC, cache)
        moe_in_USH = self.post_attention_layernorm(hidden_USH)
        moe_out_USH: Tensor = self.moe(moe_in_USH, padding_mask=real_US)[0]
        return hidden_USH + moe_out_USH


class Model(nn.Module):
    """GPT-OSS for generation: token ids in, logits out, keys and values in a cache."""

    def __init__(
        self,
        config: GptOssConfig,
        *,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "torch",
    ) -> None:
        super().__init__()
        self.config = config
        layers = (DecoderLayer(config, dtype, backend) for _ in range(config.num_hidden_layers))
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """Return an empty cache of `capacity` slots a sequence, in the model's dtype."""
        return KVCache(
            num_layers=self.config.num_hidden_layers,
            batch_size=batch_size,
            capacity=capacity,
            num_heads=self.config.num_key_value_heads,
            head_size=self.config.head_dim,
            like=self.embed_tokens.weight,
        )

    def forward(
        self,
        input_ids_US: Tensor,
        *,
        real_US: Tensor | None = None,
        cache: KVCache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Return logits `[U, S, V]`, or `[U, 1, V]` with `last_only`.

        Args:
            input_ids_US: [U, S] integer token ids, padded on the left where lengths differ.
            real_US: [U, S] bool, False at padding; None where all tokens are real.
            cache: keys and values of the tokens before; extended in place.
            last_only: compute the vocabulary projection of the last token only.
        """
        real_UC = torch.ones_like(input_ids_US, dtype=torch.bool) if real_US is None else real_US
        start, end = 0, input_ids_US.shape[1]
        if cache is not None:
            start, end = cache.reserve(real_UC)
            real_UC = cache.real_UC[:, :end]
        positions_US = (real_UC.long().cumsum(dim=1) - 1).clamp_min(0)[:, start:]
        rope = rope_tables(self.config.rope, self.config.head_dim, positions_US)
        slots_S = torch.arange(start, end, device=input_ids_US.device)
        masks = {}
        for window in (None, self.config.sliding_window):
            # The first slot that any of the new tokens can see; no layer reads the slots before.
            first = 0 if window is None else max(0, start - window + 1)
            masks[window] = first, attention_mask(real_UC[:, first:], slots_S, first, window)
        hidden_USH = self.embed_tokens(input_ids_US)
        for index, layer in enumerate(self.layers):
            first, mask_USC = masks[self.config.window(index)]
            layer_cache = None
            if cache is not None:
                layer_cache = (*cache.view(index, first, end), slots_S - first)
            hidden_USH = layer(hidden_USH, rope, mask_USC, layer_cache, real_US)
        hidden_USH = self.norm(hidden_USH[:, -1:] if last_only else hidden_USH)
        logits_USV: Tensor = self.lm_head(hidden_USH)
        return logits_USV


def build_moe(config: GptOssConfig, dtype: torch.dtype, backend: str = "torch") -> MoE:
    """Return one MoE layer: float32 router, softmax over the chosen k, clamped SwiGLU, biases."""
    router = RouterTopK(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        hidden_size=config.hidden_size,
        act_fn="softmax",
        apply_act_fn_over_topk=True,
        bias=True,
        dtype=torch.float32,
    )
    experts_config = RoutedExpertsMLPOpsConfig(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        hidden_act="sigmoid",
        glu_mlp=True,
        glu_type="swiglu",
        hidden_act_scaling_factor=config.swiglu_alpha,
        hidden_act_bias=1.0,
        gate_clamp_upper_limit=config.swiglu_limit,
        up_clamp_upper_limit=config.swiglu_limit,
        up_clamp_lower_limit=-config.swiglu_limit,
        bias=True,
    )
    experts = ExpertMLPsV2(
        routed_experts_mlp_config=experts_config,
        blockwise_matmul_config=BlockwiseMatmulConfig.default(),
        dtype=dtype,
        backend=backend,
    )
    return MoE(router=router, expert_mlps=experts)


def weight_map(config: GptOssConfig) -> WeightMap:
    """Map the published tensor names to ours, experts in MXFP4 or in bf16."""
    block, layer = "model.layers.{layer}.", "layers.{layer}."
    kinds = ("weight", "bias") if config.attention_bias else ("weight",)
    projections = [f"self_attn.{name}_proj.{kind}" for name in "qkvo" for kind in kinds]
    norms = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    router, ours = layer + "moe.router.linear_router.", layer + "moe.expert_mlps.mlp_op."
    gate_up, down = (f"{block}mlp.experts.{name}_proj" for name in ("gate_up", "down"))
    our_gate_up, our_down = (f"{ours}{name}_proj" for name in ("gate_up", "down"))
    packed_gate_up, packed_down = ((n + "_blocks", n + "_scales") for n in (gate_up, down))
    unpack_down = chain(mxfp4, transpose)
    unpack_gate_up = chain(mxfp4, transpose, deinterleave_gate_up)
    rules = [
        Rule("model.embed_tokens.weight", "embed_tokens.weight"),
        Rule("model.norm.weight", "norm.weight"),
        Rule("lm_head.weight", "lm_head.weight"),
        *(Rule(block + name, layer + name) for name in (*norms, *projections, "self_attn.sinks")),
        *(Rule(f"{block}mlp.router.{kind}", router + kind) for kind in ("weight", "bias")),
        Rule(packed_gate_up, our_gate_up + ".weight", unpack_gate_up, variant="mxfp4"),
        Rule(gate_up, our_gate_up + ".weight", deinterleave_gate_up, variant="bf16"),
        Rule(gate_up + "_bias", our_gate_up + ".bias", deinterleave_gate_up),
        Rule(packed_down, our_down + ".weight", unpack_down, variant="mxfp4"),
        Rule(down, our_down + ".weight", variant="bf16"),
        Rule(down + "_bias", our_down + ".bias"),
    ]
    return WeightMap(rules, sizes={"layer": config.num_hidden_layers})
