"""LongCat-Flash: configuration, layers, experts and checkpoint map.

What differs from other decoders: a layer is two attentions and two MLPs one after the other, beside
which the experts go from behind the first attention to the layer's end; some of the experts that a
token chooses among give the token itself. Attention is DeepSeek-V3's, with latents that are scaled.
transformers writes first matrices of identities too, which are nobody's and are not read.
Source: transformers, `models/longcat_flash/modeling_longcat_flash.py`; arXiv 2509.01322.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.checkpoint import Rule, WeightMap, chain, first_of, transpose
from neuron_moe.models.attention import View
from neuron_moe.models.decoder import DecoderConfig, DecoderModel, Tokens
from neuron_moe.models.deepseek_v3 import LATENT_EPS, LatentAttention, latent_logit_scale
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import GatedMLP, RMSNorm, biased_spec, gated_moe
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    decoder_map,
    either,
    expert_rules,
    fused_expert_rules,
    mlp_rules,
)
from neuron_moe.moe import MoE
from neuron_moe.router import Router
from neuron_moe.spec import RouterSpec

ROPE_THETA = 10000000.0
OTHER_KEYS = ("num_layers", "num_hidden_layers", "zero_expert_type", "attention_method")
HALVES = (0, 1)  # of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LongcatFlashConfig(DecoderConfig):
    """Facts of one LongCat-Flash checkpoint; names are those of its config.json.

    Attributes:
        head_dim: of queries and keys.
        zero_expert_num: identities that a token chooses among, beside the experts.
    """

    attention_bias: bool = False
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    ffn_hidden_size: int
    expert_ffn_hidden_size: int
    n_routed_experts: int
    zero_expert_num: Any
    moe_topk: int
    routed_scaling_factor: float = 6.0

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        _ = self.router_spec

    @property
    def router_spec(self) -> RouterSpec:
        """How experts are chosen; raises ValueError where that is not possible."""
        return biased_spec(
            self.n_routed_experts,
            self.hidden_size,
            top_k=self.moe_topk,
            act_fn="softmax",
            renormalize=False,
            routed_scaling_factor=self.routed_scaling_factor,
            num_identity=self.zero_expert_num,
        )

    @property
    def rotated_size(self) -> int:
        """How much of each head is rotated."""
        return self.qk_rope_head_dim

    @property
    def logit_scale(self) -> float:
        """What logits are multiplied with."""
        return latent_logit_scale(self.head_dim, self.rope)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LongcatFlashConfig":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
        layers = config.get("num_layers")
        given = {**config, "num_key_value_heads": heads, "num_hidden_layers": layers}
        reader = ConfigReader.of_family(given, "longcat_flash", *OTHER_KEYS)
        reader.require("router_bias", False)  # which transformers allocates and does not add
        rotated = reader.get("qk_rope_head_dim", int)
        head_dim = reader.get("qk_nope_head_dim", int) + rotated
        reader.require("qk_head_dim", head_dim)
        reader.require("head_dim", rotated)
        for key in ("mla_scale_q_lora", "mla_scale_kv_lora"):
            reader.require(key, True)
        reader.require("hidden_act", "silu")
        return cls.read(
            reader,
            head_dim=head_dim,
            rope=RopeConfig.from_hf(reader, default_theta=ROPE_THETA, is_interleaved=True),
            q_lora_rank=reader.get("q_lora_rank", int),
            zero_expert_num=reader.get_optional("zero_expert_num", int) or 0,
        )


Config = LongcatFlashConfig


class ScaledRMSNorm(RMSNorm):
    """The norm of a latent of `size` numbers, which stand for H of them: times sqrt(H / size)."""

    def __init__(self, size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(size, LATENT_EPS, dtype)
        self.factor = (hidden_size / size) ** 0.5

    def forward(self, hidden_USH: Tensor) -> Tensor:
        """Return the normalised latents `[..., size]`."""
        scaled: Tensor = super().forward(hidden_USH) * self.factor
        return scaled


class ScaledAttention(LatentAttention):
    """DeepSeek-V3's attention with scaled latents."""

    def __init__(self, config: LongcatFlashConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        if config.q_lora_rank is not None:
            self.q_a_layernorm = ScaledRMSNorm(config.q_lora_rank, config.hidden_size, dtype)
        self.kv_a_layernorm = ScaledRMSNorm(config.kv_lora_rank, config.hidden_size, dtype)


class ShortcutLayer(nn.Module):
    """Two attentions and two MLPs in turn, and experts beside the last three of them."""

    def __init__(self, config: LongcatFlashConfig, dtype: torch.dtype, backend: str) -> None:
        super().__init__()
        size, is_here = config.hidden_size, HALVES

        def norms() -> nn.ModuleList:
            return nn.ModuleList(config.make_norm(size, dtype) for _ in is_here)

        self.input_layernorm, self.post_attention_layernorm = norms(), norms()
        self.self_attn = nn.ModuleList(ScaledAttention(config, dtype) for _ in is_here)
        self.mlps = nn.ModuleList(GatedMLP(size, config.ffn_hidden_size, dtype) for _ in is_here)
        router = Router(config.router_spec)
        self.moe: MoE = gated_moe(router, config.expert_ffn_hidden_size, dtype, backend)

    def forward(self, hidden_USH: Tensor, tokens: Tokens, views: Sequence[View | None]) -> Tensor:
        """Return the layer's output `[U, S, H]`; arguments as of `DecoderLayer`, two views."""
        shortcut_USH = torch.zeros_like(hidden_USH)
        for half, view in enumerate(views):
            normed_USH = self.input_layernorm[half](hidden_USH)
            hidden_USH = hidden_USH + self.self_attn[half](normed_USH, tokens, view)
            normed_USH = self.post_attention_layernorm[half](hidden_USH)
            if half == 0:
                shortcut_USH = self.moe(normed_USH, padding_mask=tokens.real_US)[0]
            hidden_USH = hidden_USH + self.mlps[half](normed_USH)
        return hidden_USH + shortcut_USH


class Model(DecoderModel):
    """LongCat-Flash for generation."""

    config: LongcatFlashConfig
    runs_layers_alone = False

    def build_layer(self, layer: int, dtype: torch.dtype, backend: str) -> ShortcutLayer:
        """Return a layer."""
        return ShortcutLayer(self.config, dtype, backend)

    @property
    def attentions(self) -> list[Any]:
        """Both attentions of each layer."""
        pairs: list[Any] = [layer.self_attn for layer in self.layers]
        return [attention for pair in pairs for attention in pair]

    def _run(self, input_ids_US: Tensor, tokens: Tokens, views: Sequence[View | None]) -> Tensor:
        """Return the residual stream after the last layer, [U, S, H]."""
        hidden_USH: Tensor = self.embed_tokens(input_ids_US)
        for number, layer in enumerate(self.layers):
            hidden_USH = layer(hidden_USH, tokens, views[2 * number : 2 * number + 2])
        return hidden_USH


def weight_map(config: LongcatFlashConfig) -> WeightMap:
    """Map the published tensor names to ours, and those of transformers' modules."""
    names = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm"]
    attention = [f"{name}.weight" for name in (*names, "kv_b_proj", "o_proj")]
    if config.attention_bias:
        attention += ["q_a_proj.bias", "kv_a_proj_with_mqa.bias", "o_proj.bias"]
    theirs, ours = "model.layers.{layer}.", "layers.{layer}."
    moe, bias = ours + "moe.", "router.e_score_correction_bias"
    pair = theirs + "mlp.experts", moe + "expert_mlps.mlp_op"
    first, second = fused_expert_rules(*pair, transpose)  # the first of identities, too
    sizes = config.n_routed_experts, config.router_spec.num_classes
    first = replace(first, transform=chain(first_of(*sizes), transpose))
    rules = [
        *(Rule(f"model.{name}.weight", f"{name}.weight") for name in ("embed_tokens", "norm")),
        Rule("lm_head.weight", "lm_head.weight"),
        Rule(theirs + "mlp.router.classifier.weight", moe + "router.linear_router.weight"),
        Rule(f"{theirs}mlp.{bias}", moe + bias, is_exact=True),
        *either(separate=expert_rules(*pair), fused=[first, second]),
    ]
    for half in HALVES:
        kept = [f"{norm}.{half}.weight" for norm in ("input_layernorm", "post_attention_layernorm")]
        kept += [f"self_attn.{half}.{name}" for name in attention]
        rules += [Rule(theirs + name, ours + name) for name in kept]
        rules += mlp_rules(f"{theirs}mlps.{half}", f"{ours}mlps.{half}")
    ignored = [
        f"{theirs}mlp.experts.{expert}.{name}_proj.weight"
        for expert in range(*sizes)
        for name in ("gate", "up")
    ]
    return decoder_map(config, rules, ignored, expert=config.n_routed_experts)
