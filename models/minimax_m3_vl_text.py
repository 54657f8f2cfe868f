"""MiniMax-M3, the text model: configuration, attention, experts and checkpoint map.

What differs from other decoders: norms scale by one plus their weight, each head of queries and
keys is normalised, and routed, shared and dense MLPs compute GPT-OSS's clamped SwiGLU. Of the later
layers each token attends to `index_topk_blocks` blocks of keys; up to as many tokens as these hold
that is attention to all, exactly; longer sequences are refused by `max_position_embeddings`, and
the indexer's tensors are not read. The logits of the router are float32, as vLLM has them.
Source: transformers, `models/minimax_m3_vl/modeling_minimax_m3_vl.py`; MiniMaxAI/MiniMax-M3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from neuron_moe.checkpoint import Rule, WeightMap, concat_gate_up, transpose
from neuron_moe.models.biased_routing import read_sparse_layers
from neuron_moe.models.decoder import DecoderConfig, DecoderModel, GroupedAttention
from neuron_moe.models.hf_config import ConfigReader, read_text_section
from neuron_moe.models.layers import (
    GatedMLP,
    OffsetRMSNorm,
    biased_spec,
    build_shared,
    gated_moe,
)
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    decoder_map,
    decoder_rules,
    either,
    expert_rules,
    fused_expert_rules,
    projection_names,
    split_layers,
)
from neuron_moe.moe import MoE
from neuron_moe.router import Router
from neuron_moe.spec import ExpertFormula, RouterSpec, limits

ALIASES = ("minimax_m3_vl",)
ROPE_THETA = 5000000.0
ATTENTION_TYPES = ("full_attention", "minimax_m3_sparse")
INDEX_KEYS = {  # of the indexer: in a section as published, and as transformers writes them
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_block_size": "index_block_size",
}
OTHER_KEYS = (
    *("index_head_dim", "index_n_heads", "index_local_blocks", "hidden_act", "router_jitter_noise"),
    *("num_mtp_modules", "mtp_transformer_layers", "use_mtp", "image_token_id", "video_token_id"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxM3Config(DecoderConfig):
    """Facts of one MiniMax-M3 checkpoint; names are those of its config.json.

    Attributes:
        max_position_embeddings: at most the keys that a token attends to in every layer.
        sparse_layers: those with experts.
    """

    length_reason: ClassVar[str] = (
        ", the keys of config.json's index_topk_blocks: the longest sequence whose attention is"
        " computed here"
    )
    intermediate_size: int
    dense_intermediate_size: int
    shared_intermediate_size: int
    num_local_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_alpha: float
    swiglu_limit: float
    sparse_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        _ = self.router_spec

    @property
    def router_spec(self) -> RouterSpec:
        """How experts are chosen; raises ValueError where that is not possible."""
        return biased_spec(
            self.num_local_experts,
            self.hidden_size,
            top_k=self.num_experts_per_tok,
            routed_scaling_factor=self.routed_scaling_factor,
        )

    @property
    def formula(self) -> ExpertFormula:
        """What routed, shared and dense MLPs compute."""
        return ExpertFormula(
            "sigmoid",
            self.swiglu_alpha,
            gates_itself=True,
            gate_limits=limits(None, self.swiglu_limit),
            up_limits=limits(-self.swiglu_limit, self.swiglu_limit),
            up_offset=1.0,
        )

    def make_norm(self, size: int, dtype: torch.dtype) -> OffsetRMSNorm:
        """Return the norm for rows of `size` numbers."""
        return OffsetRMSNorm(size, self.rms_norm_eps, dtype)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "MiniMaxM3Config":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        config, _ = read_text_section(config, ALIASES[0], "num_hidden_layers", OTHER_KEYS)
        reader = ConfigReader.of_family(config, "minimax_m3_vl_text", *OTHER_KEYS)
        num_layers, head_dim = reader.get("num_hidden_layers", int), reader.get("head_dim", int)
        index = ConfigReader(reader.get_section("sparse_attention_config"), "sparse_attention")
        published = index.get_ints("sparse_attention_freq") or (0,) * num_layers
        kinds = reader.get_strings("layer_types")
        kinds = kinds or tuple(ATTENTION_TYPES[bool(flag)] for flag in published)
        if set(kinds) - set(ATTENTION_TYPES) or len(kinds) != num_layers:
            raise ValueError(
                f"layer_types={list(kinds)}: must name num_hidden_layers={num_layers} layers, each"
                f" {' or '.join(ATTENTION_TYPES)}. Correct it, or leave it out."
            )
        is_indexed = any(kind != ATTENTION_TYPES[0] for kind in kinds)
        blocks, size = (
            reader.get_size(key, index.get_size(old, default))
            for (old, key), default in zip(INDEX_KEYS.items(), (16, 128), strict=True)
        )
        longest = reader.get("max_position_embeddings", int)
        # transformers rotates whole heads unless partial_rotary_factor says not; vLLM rotary_dim.
        rotated = reader.get("rotary_dim", int, head_dim)
        has_rope = bool(reader.get_section("rope_parameters"))
        freq = reader.get_ints("moe_layer_freq")
        sparse = tuple(layer for layer, flag in enumerate(freq) if flag)
        return cls.read(
            reader,
            head_dim=head_dim,
            rope=RopeConfig.from_hf(
                reader,
                default_theta=ROPE_THETA,
                default_part=1.0 if has_rope else rotated / max(head_dim, 1),
            ),
            max_position_embeddings=min(longest, blocks * size) if is_indexed else longest,
            sparse_layers=sparse or read_sparse_layers(reader, 0),
            **{
                name: reader.get(name, int)
                for name in ("intermediate_size", "num_local_experts", "num_experts_per_tok")
            },
            **{
                name: reader.get(name, int, default)
                for name, default in (
                    ("dense_intermediate_size", 12288),
                    ("shared_intermediate_size", 3072),
                )
            },
            routed_scaling_factor=reader.get("routed_scaling_factor", float, 2.0),
            swiglu_alpha=reader.get("swiglu_alpha", float, 1.702),
            swiglu_limit=reader.get("swiglu_limit", float, 7.0),
        )


Config = MiniMaxM3Config


class Model(DecoderModel):
    """MiniMax-M3 for generation."""

    config: MiniMaxM3Config

    def build_attention(self, layer: int, dtype: torch.dtype) -> GroupedAttention:
        """Return grouped-query attention with a norm for each head."""
        return GroupedAttention(self.config, dtype, norms="by head")

    def build_feed_forward(self, layer: int, dtype: torch.dtype, backend: str) -> MoE | GatedMLP:
        """Return a MoE with a float32 router, or an MLP where the layer is dense."""
        config, formula = self.config, self.config.formula
        if layer not in config.sparse_layers:
            width = config.dense_intermediate_size
            return GatedMLP(config.hidden_size, width, dtype, formula=formula, is_fused=True)
        width = config.shared_intermediate_size
        shared = build_shared(config.hidden_size, width, dtype, formula=formula, is_fused=True)
        size = config.intermediate_size
        return gated_moe(Router(config.router_spec), size, dtype, backend, shared, formula=formula)


def weight_map(config: MiniMaxM3Config) -> WeightMap:
    """Map the published tensor names, and those of transformers' text model, to ours."""
    names = projection_names(has_bias=False, has_norms=True)
    sources = {"transformers": "model.", "published": "language_model.model."}
    heads = {"transformers": "lm_head.weight", "published": "language_model.lm_head.weight"}
    sparse, dense = split_layers(config.sparse_layers, config.num_hidden_layers)
    rules = either(
        **{
            form: [
                *decoder_rules(names, source=source, head=heads[form]),
                *_layer_rules(form, source + "layers.", sparse, dense),
            ]
            for form, source in sources.items()
        }
    )
    ignored = [
        f"{source}layers.{{layer}}.self_attn.{prefix}{part}.weight"
        for source, prefix in zip(sources.values(), ("indexer.", "index_"), strict=True)
        for part in ("q_proj", "k_proj", "q_norm", "k_norm")
    ]
    return decoder_map(config, rules, ignored, expert=config.num_local_experts)


def _layer_rules(form: str, source: str, sparse: list[str], dense: list[str]) -> list[Rule]:
    """Return the rules of the feed-forward parts, as one of both forms has them."""
    rules, is_fused = [], form == "transformers"

    def mlp_rules(theirs: str, ours: str) -> list[Rule]:
        pair = tuple(f"{theirs}.{name}_proj.weight" for name in ("gate", "up"))
        fused = f"{theirs}.gate_up_proj.weight"
        first = Rule(fused if is_fused else pair, f"{ours}.gate_up_proj.weight")
        first = first if is_fused else Rule(pair, first.target, concat_gate_up)
        return [first, Rule(f"{theirs}.down_proj.weight", f"{ours}.down_proj.weight")]

    for layer in dense:
        rules += mlp_rules(f"{source}{layer}.mlp", f"layers.{layer}.mlp")
    for layer in sparse:
        theirs = f"{source}{layer}." + ("mlp." if is_fused else "block_sparse_moe.")
        moe, bias = f"layers.{layer}.moe.", "e_score_correction_bias"
        pair = (theirs + "experts", moe + "expert_mlps.mlp_op")
        rules += [
            Rule(theirs + "gate.weight", moe + "router.linear_router.weight"),
            Rule(
                theirs + ("gate." if is_fused else "") + bias, f"{moe}router.{bias}", is_exact=True
            ),
            *mlp_rules(theirs + "shared_experts", moe + "shared_experts"),
            *(
                fused_expert_rules(*pair, transpose)
                if is_fused
                else expert_rules(*pair, ("w1", "w3", "w2"))
            ),
        ]
    return rules
