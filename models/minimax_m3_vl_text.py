"""MiniMax-M3, the text model: configuration, attention, experts and checkpoint map.

What differs from other decoders: norms scale by one plus their weight, each head of queries and
keys is normalised, and routed, shared and dense MLPs compute GPT-OSS's clamped SwiGLU. Of the later
layers each token attends to `index_topk_blocks` blocks of keys; up to as many tokens as these hold
that is attention to all, exactly; longer sequences are refused by `max_position_embeddings`, and
the indexer's tensors are not read. The logits of the router are float32, as vLLM has them.
Source: transformers, `models/minimax_m3_vl/modeling_minimax_m3_vl.py`; MiniMaxAI/MiniMax-M3.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from neuron_moe.checkpoint import Rule, WeightMap, concat_gate_up
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
    expert_rules,
    moe_rules,
    projection_names,
    split_layers,
    with_modules,
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
    *("num_mtp_modules", "mtp_transformer_layers", "use_mtp"),
)
IMAGE_KEYS = (
    *(f"{kind}_token_{end}" for kind in ("image", "video") for end in ("id", "index")),
    *("merged_hidden_size", "projector_hidden_size"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxM3Config(DecoderConfig):
    """Facts of one MiniMax-M3 checkpoint; names are those of its config.json.

    Attributes:
        max_position_embeddings: at most the keys that a token attends to in every layer.
        sparse_layers: those with experts.
        num_vision_layers: of the vision tower beside the text model; None without one.
    """

    length_reason: ClassVar[str] = (
        ", the keys of config.json's index_topk_blocks: the longest sequence whose attention is"
        " computed here"
    )
    intermediate_size: int
    dense_intermediate_size: int = 12288
    shared_intermediate_size: int = 3072
    num_local_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float = 2.0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    sparse_layers: tuple[int, ...]
    num_vision_layers: int | None = None

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
        ignored = *OTHER_KEYS, *IMAGE_KEYS
        text, vision_layers = read_text_section(config, ALIASES[0], "num_hidden_layers", ignored)
        reader = ConfigReader.of_family(text, "minimax_m3_vl_text", *ignored)
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
            num_vision_layers=vision_layers,
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
    """Map the published tensor names to ours, and those of transformers' modules."""
    source = "language_model.model."
    names = projection_names(has_bias=False, has_norms=True)
    rules = decoder_rules(names, source=source, head="language_model.lm_head.weight")
    sparse, dense = split_layers(config.sparse_layers, config.num_hidden_layers)
    for layer in dense:
        rules += _mlp_rules(f"{source}layers.{layer}.mlp", f"layers.{layer}.mlp")
    for layer in sparse:
        rules += _sparse_rules(f"{source}layers.{layer}.block_sparse_moe.", f"layers.{layer}.moe.")
    sizes, ignored = {"expert": config.num_local_experts}, []
    modules = "model."  # of the text model
    if config.num_vision_layers is not None:
        modules = "model.language_model."
        sizes["vision_layer"] = config.num_vision_layers
        ignored += _vision_names()
    ignored += [
        f"{start}layers.{{layer}}.self_attn.{index}{part}_{kind}.weight"
        for start, index in ((source, "index_"), (modules, "indexer."))
        for part in "qk"
        for kind in ("proj", "norm")
    ]
    both = with_modules(decoder_map(config, rules, ignored, **sizes), {}, modules)
    if config.num_vision_layers is not None:
        return both
    # Of the text model alone transformers saves modules.
    return replace(both, rules=sorted(both.rules, key=lambda rule: rule.variant != "modules"))


def _mlp_rules(theirs: str, ours: str) -> list[Rule]:
    """Return the rules of an MLP whose gate and up projections are one here."""
    pair = tuple(f"{theirs}.{name}_proj.weight" for name in ("gate", "up"))
    return [
        Rule(pair, f"{ours}.gate_up_proj.weight", concat_gate_up),
        Rule(f"{theirs}.down_proj.weight", f"{ours}.down_proj.weight"),
    ]


def _sparse_rules(theirs: str, moe: str) -> list[Rule]:
    """Return the rules of the experts of a layer."""
    experts = [
        *_mlp_rules(theirs + "shared_experts", moe + "shared_experts"),
        *expert_rules(theirs + "experts", moe + "expert_mlps.mlp_op", ("w1", "w3", "w2")),
    ]
    return moe_rules(theirs, moe, experts, bias="e_score_correction_bias")


def _vision_names() -> list[str]:
    """Return the tensors of the vision tower, which is no part of this model, in both forms."""
    parts = ["layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2"]
    parts += [f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")]
    towers = ("vision_tower.vision_model.", "encoder."), ("model.vision_tower.", "")
    stems = [
        tower + part
        for tower, encoder in towers
        for part in ("pre_layrnorm", *(f"{encoder}layers.{{vision_layer}}.{it}" for it in parts))
    ]
    projector, own = "multi_modal_projector.", "model.multi_modal_projector."
    projectors = projector, own, "patch_merge_mlp.", own + "merge_"
    stems += [f"{name}linear_{number}" for name in projectors for number in (1, 2)]
    return [
        *(f"{stem}.{kind}" for stem in stems for kind in ("weight", "bias")),
        "vision_tower.vision_model.embeddings.patch_embedding.weight",
        "model.vision_tower.embeddings.proj.weight",
    ]
