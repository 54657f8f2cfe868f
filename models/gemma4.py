"""Gemma 4 with experts, the text model: configuration, layers, experts and checkpoint map.

What differs from other decoders: a dense MLP and the experts read the residual stream side by side,
each between norms of its own, and a norm of their sum comes before it is added; every sixth layer
attends to everything with other heads, a quarter of which is rotated, and whose values are its keys
before norm and rotation, the others to a window; values are normalised too, logits not scaled.
Router and experts read one vector, the stream divided by its root mean square: `weight_map` folds
the weights of their norms into their first matrices, and the scale of each expert into its last.
Models without experts, and parts for single layers of the smallest models, are refused.
Source: transformers, `models/gemma4/modeling_gemma4.py`; google/gemma-4-26B-A4B-it.
"""

import torch
from torch import Tensor, nn

from neuron_moe.checkpoint import Rule, WeightMap, chain, scale_along, transpose
from neuron_moe.models.attention import CacheView, Reach
from neuron_moe.models.decoder import PROJECTIONS, DecoderModel, GroupedAttention, Tokens
from neuron_moe.models.gemma4_config import SLIDING, TEXT_TYPE, Gemma4Config
from neuron_moe.models.layers import GatedMLP, build_router, gated_moe, unit_rms
from neuron_moe.models.rope import apply_rope, rope_tables
from neuron_moe.models.weight_rules import decoder_map, mlp_rules
from neuron_moe.moe import MoE
from neuron_moe.spec import RouterFormula

ALIASES = (TEXT_TYPE,)
NORMS = {  # of a layer, by ours
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "before_mlp_norm": "pre_feedforward_layernorm",
    "after_mlp_norm": "post_feedforward_layernorm_1",
    "after_moe_norm": "post_feedforward_layernorm_2",
    "last_norm": "post_feedforward_layernorm",
}
Config = Gemma4Config


class Attention(GroupedAttention):
    """Grouped-query attention with heads of two kinds, whose logits are not scaled."""

    def __init__(self, config: Gemma4Config, kind: str, dtype: torch.dtype) -> None:
        reach = Reach(window=config.sliding_window if kind == SLIDING else None)
        bias = PROJECTIONS if config.attention_bias else ()
        super().__init__(config.of_kind(kind), dtype, reach=reach, bias=bias, norms="by head")
        self.scale, self.eps = 1.0, config.rms_norm_eps
        self.has_values = kind == SLIDING or not config.attention_k_eq_v
        if not self.has_values:
            del self.v_proj
        # Tables of both kinds are behind each other.
        half, other = config.head_dim // 2, config.full_head_dim // 2
        self.columns = slice(half) if kind == SLIDING else slice(half, half + other)

    def products(self, hidden_USH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the projections, [U, S, heads * D] each."""
        key = self.k_proj(hidden_USH)
        value = self.v_proj(hidden_USH) if self.has_values else key
        return self.q_proj(hidden_USH), key, value

    def project(self, hidden_USH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [U, S, heads * D] each, normalised."""
        query, key, value = super().project(hidden_USH)
        unit = unit_rms(value.view(*value.shape[:-1], -1, self.head_dim), self.eps)
        return query, key, unit.flatten(-2).to(value.dtype)

    def rotate(self, query_USQD: Tensor, key_USJD: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return queries and keys that know their places."""
        cos, sin = (table[..., self.columns] for table in tokens.rope)
        return apply_rope(query_USQD, cos, sin), apply_rope(key_USJD, cos, sin)


class Layer(nn.Module):
    """Attention, then an MLP beside experts, each part between norms; all of it is scaled."""

    is_sparse = True
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    before_mlp_norm: nn.Module
    after_mlp_norm: nn.Module
    after_moe_norm: nn.Module
    last_norm: nn.Module

    def __init__(self, config: Gemma4Config, kind: str, dtype: torch.dtype, backend: str) -> None:
        super().__init__()
        size, act = config.hidden_size, config.hidden_act
        self.eps = config.rms_norm_eps
        self.self_attn = Attention(config, kind, dtype)
        for name in NORMS:
            self.add_module(name, config.make_norm(size, dtype))
        self.mlp = GatedMLP(size, config.intermediate_size, dtype, act)
        formula = RouterFormula(top_k=config.top_k_experts, renormalize=True)
        router, width = (
            build_router(config.num_experts, size, formula),
            config.moe_intermediate_size,
        )
        self.moe: MoE = gated_moe(router, width, dtype, backend, hidden_act=act)
        self.layer_scalar = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, hidden_USH: Tensor, tokens: Tokens, view: CacheView | None) -> Tensor:
        """Return the layer's output `[U, S, H]`; arguments as of `DecoderLayer`."""
        attended_USH = self.self_attn(self.input_layernorm(hidden_USH), tokens, view)
        hidden_USH = hidden_USH + self.post_attention_layernorm(attended_USH)
        dense_USH = self.after_mlp_norm(self.mlp(self.before_mlp_norm(hidden_USH)))
        unit_USH = unit_rms(hidden_USH, self.eps).to(hidden_USH.dtype)
        routed_USH = self.moe(unit_USH, padding_mask=tokens.real_US)[0]
        fed_USH = self.last_norm(dense_USH + self.after_moe_norm(routed_USH))
        out_USH: Tensor = (hidden_USH + fed_USH) * self.layer_scalar
        return out_USH


class Model(DecoderModel):
    """Gemma 4 for generation of text."""

    config: Gemma4Config

    def build_layer(self, layer: int, dtype: torch.dtype, backend: str) -> Layer:
        """Return a layer."""
        return Layer(self.config, self.config.layer_types[layer], dtype, backend)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the first hidden states `[.., H]` of token ids, scaled in their dtype."""
        embedded = super().embed(input_ids)
        return embedded * torch.tensor(self.config.hidden_size**0.5).to(embedded)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[.., V]` of the last hidden states `[.., H]`, capped where said."""
        logits, cap = super().compute_logits(hidden), self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def describe_tokens(self, places_US: Tensor, real_US: Tensor | None) -> Tokens:
        """Return what all layers need to know of the new tokens."""
        config = self.config
        kinds = (config.rope, config.head_dim), (config.full_rope, config.full_head_dim)
        cos, sin = zip(*(rope_tables(*kind, places_US) for kind in kinds), strict=True)
        return Tokens(places_US, (torch.cat(cos, -1), torch.cat(sin, -1)), real_US)


def weight_map(config: Gemma4Config) -> WeightMap:
    """Map the published tensor names to ours."""
    has_vision = config.num_vision_layers is not None
    source = "model.language_model." if has_vision else "model."
    theirs, ours = source + "layers.{layer}.", "layers.{layer}."
    moe, experts = ours + "moe.", ours + "moe.expert_mlps.mlp_op."
    scale, columns = scale_along(-1, config.hidden_size**-0.5), chain(scale_along(-1), transpose)
    proj, scaled = (theirs + f"router.{name}" for name in ("proj.weight", "scale"))
    before = theirs + "pre_feedforward_layernorm_2.weight"
    rules = [
        *(Rule(f"{source}{name}.weight", f"{name}.weight") for name in ("embed_tokens", "norm")),
        Rule("lm_head.weight", "lm_head.weight"),
        *(Rule(f"{theirs}{their}.weight", f"{ours}{our}.weight") for our, their in NORMS.items()),
        Rule(theirs + "layer_scalar", ours + "layer_scalar"),
        *mlp_rules(theirs + "mlp", ours + "mlp"),
        Rule((proj, scaled), moe + "router.linear_router.weight", scale, is_exact=True),
        Rule((theirs + "experts.gate_up_proj", before), experts + "gate_up_proj.weight", columns),
        Rule(
            (theirs + "experts.down_proj", theirs + "router.per_expert_scale"),
            experts + "down_proj.weight",
            chain(scale_along(0), transpose),
        ),
    ]
    for layer, kind in enumerate(config.layer_types):
        kept = ["q_norm.weight", "k_norm.weight"]
        for name in PROJECTIONS:
            if name != "v_proj" or kind == SLIDING or not config.attention_k_eq_v:
                kept += [f"{name}.weight", *([f"{name}.bias"] if config.attention_bias else [])]
        block = f"layers.{layer}.self_attn."
        rules += [Rule(source + block + name, block + name) for name in kept]
    if config.num_vision_layers is None:
        return decoder_map(config, rules)
    return decoder_map(config, rules, _vision_names(), vision_layer=config.num_vision_layers)


def _vision_names() -> list[str]:
    """Return the tensors of the vision tower, which is no part of this model."""
    tower = "model.vision_tower."
    block = tower + "encoder.layers.{vision_layer}."
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    stems = [f"{name}_layernorm" for name in norms]
    stems += [f"self_attn.{name}.linear" for name in PROJECTIONS]
    stems += [f"self_attn.{name}_norm" for name in "qk"]
    stems += [f"mlp.{name}_proj.linear" for name in ("gate", "up", "down")]
    others = ("patch_embedder.input_proj.weight", "patch_embedder.position_embedding_table")
    return [
        "model.embed_vision.embedding_projection.weight",
        *(f"{block}{stem}.weight" for stem in stems),
        *(tower + name for name in (*others, "std_bias", "std_scale")),
    ]
