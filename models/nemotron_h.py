"""Nemotron-3 (Nano, Super) and Nemotron-H: configuration, layers, experts and checkpoint map.

What differs from other decoders: a layer is one thing behind one norm, a Mamba-2 memory, attention
without rotary embedding, experts or an MLP. Experts have no gate and square a relu; routing is
DeepSeek-V3's; in the larger models experts compute in a latent. Layers that predict further tokens
(`mtp.`) are not read.
Source: transformers, `models/nemotron_h/modeling_nemotron_h.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.checkpoint import Rule, WeightMap, transpose
from neuron_moe.latent import Latent
from neuron_moe.models.attention import CacheShape, View
from neuron_moe.models.decoder import DecoderConfig, DecoderModel, GroupedAttention, Tokens
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import GatedMLP, biased_spec, build_shared, gated_moe
from neuron_moe.models.mamba2 import Mamba2, Mamba2Sizes, mamba_rules
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import decoder_map, either
from neuron_moe.moe import MoE
from neuron_moe.router import Router
from neuron_moe.spec import ExpertFormula, LatentSpec, RouterSpec

LAYER_TYPES = ("linear_attention", "full_attention", "moe", "mlp")
PATTERN = dict(zip("M*E-", LAYER_TYPES, strict=True))
RELU2 = ExpertFormula("relu2", has_gate=False)
OTHER_KEYS = (
    *("chunk_size", "expand", "hidden_dropout", "mamba_ssm_cache_dtype", "mtp_layers_block_type"),
    *("moe_shared_expert_overlap", "n_shared_experts", "num_logits_to_keep", "time_step_floor"),
    *("num_nextn_predict_layers", "rescale_prenorm_residual", "residual_in_fp32", "time_step_max"),
    *("time_step_limit", "use_mamba_kernels", "sliding_window", "mtp_hybrid_override_pattern"),
    *("mamba_proj_bias", "norm_eps", "rope_theta", "partial_rotary_factor", "num_hidden_layers"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig(DecoderConfig):
    """Facts of one checkpoint; names are those of its config.json.

    Attributes:
        layer_types: one of LAYER_TYPES a layer.
        mamba: sizes of the layers that keep a memory of the sequence.
        latent_size: of the experts; None: that of the layer.
    """

    layer_types: tuple[str, ...]
    mamba: Mamba2Sizes
    use_conv_bias: bool = True
    time_step_min: float = 0.001
    intermediate_size: int = 21504
    moe_intermediate_size: int = 7688
    shared_intermediate_size: int
    latent_size: int | None
    router: RouterSpec

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "NemotronHConfig":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        pattern = config.get("hybrid_override_pattern") or ""
        kinds = config.get("layers_block_type") or [PATTERN.get(name, name) for name in pattern]
        eps = config.get("layer_norm_epsilon", 1e-5)  # of all norms
        reader = ConfigReader.of_family(
            # What counts the layers is their list.
            {**config, "num_hidden_layers": len(kinds) or None, "rms_norm_eps": eps},
            "nemotron_h",
            *(*OTHER_KEYS, "hybrid_override_pattern", "layers_block_type", "layer_norm_epsilon"),
        )
        if not kinds or set(kinds) - set(LAYER_TYPES):
            raise ValueError(
                f"layers_block_type={list(kinds)}: must name each layer, {', '.join(LAYER_TYPES)},"
                " as hybrid_override_pattern does by M, *, E and -. Correct config.json."
            )
        for key in ("attention_bias", "mlp_bias", "use_bias"):
            reader.require(key, False)
        reader.require("mlp_hidden_act", "relu2")
        reader.require("tie_word_embeddings", False)  # which transformers does not do
        reader.require("mamba_hidden_act", "silu")
        size = reader.get("hidden_size", int)
        router = biased_spec(
            reader.get("n_routed_experts", int, 8),
            size,
            top_k=reader.get("num_experts_per_tok", int, 2),
            n_group=reader.get("n_group", int, 1),
            topk_group=reader.get("topk_group", int, 1),
            renormalize=reader.get("norm_topk_prob", bool, True),
            routed_scaling_factor=reader.get("routed_scaling_factor", float, 1.0),
        )
        return cls.read(
            reader,
            head_dim=reader.get("head_dim", int, 128),
            rope=RopeConfig(theta=10000.0),  # by which nothing rotates
            layer_types=tuple(kinds),
            mamba=Mamba2Sizes(
                hidden_size=size,
                num_heads=reader.get("mamba_num_heads", int, 128),
                value_size=reader.get("mamba_head_dim", int, 64),
                key_size=reader.get("ssm_state_size", int, 128),
                num_groups=reader.get("n_groups", int, 8),
                conv_width=reader.get("conv_kernel", int, 4),
            ),
            shared_intermediate_size=reader.get("moe_shared_expert_intermediate_size", int, 7688),
            latent_size=reader.get_optional("moe_latent_size", int),
            router=router,
        )


Config = NemotronHConfig


class Nothing(nn.Module):
    """Where a layer has no attention: it keeps nothing of any token."""

    reach, core = None, None
    cache_shape: CacheShape = ()
    row_width = 0


class MixerLayer(nn.Module):
    """One thing behind a norm, and a residual around both.

    Attributes:
        self_attn: attention, a memory, or nothing.
        moe: or experts, which compute norm and residual too.
        mlp: or an MLP.
    """

    def __init__(self, config: NemotronHConfig, dtype: torch.dtype, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = config.make_norm(config.hidden_size, dtype)
        is_part = isinstance(mixer, MoE | GatedMLP)
        self.self_attn = Nothing() if is_part else mixer
        self.is_sparse = isinstance(mixer, MoE)
        self.kind = "self_attn" if not is_part else "moe" if self.is_sparse else "mlp"
        self.add_module(self.kind, mixer)
        if isinstance(mixer, MoE):
            mixer.take_frame(self.norm)

    def forward(self, hidden_USH: Tensor, tokens: Tokens, view: View | None = None) -> Tensor:
        """Return the layer's output `[U, S, H]`; arguments as of `DecoderLayer`."""
        mixer = getattr(self, self.kind)
        if self.is_sparse:
            out_USH: Tensor = mixer(hidden_USH, padding_mask=tokens.real_US)[0]
            return out_USH
        given = (self.norm(hidden_USH),) + ((tokens, view) if self.kind == "self_attn" else ())
        mixed_USH: Tensor = mixer(*given)
        return hidden_USH + mixed_USH


class Model(DecoderModel):
    """Nemotron-3 for generation."""

    config: NemotronHConfig

    def build_layer(self, layer: int, dtype: torch.dtype, backend: str) -> MixerLayer:
        """Return a layer of its kind."""
        config, kind = self.config, self.config.layer_types[layer]
        if kind == "linear_attention":
            eps, least = config.rms_norm_eps, config.time_step_min
            has_bias = config.use_conv_bias
            mixer: nn.Module = Mamba2(config.mamba, eps, least, dtype, has_conv_bias=has_bias)
        elif kind == "full_attention":
            mixer = GroupedAttention(config, dtype, rotates=False)
        elif kind == "mlp":
            mixer = GatedMLP(config.hidden_size, config.intermediate_size, dtype, formula=RELU2)
        else:
            mixer = self._build_experts(dtype, backend)
        return MixerLayer(config, dtype, mixer)

    def _build_experts(self, dtype: torch.dtype, backend: str) -> MoE:
        """Return a MoE with a float32 router."""
        config, size = self.config, self.config.hidden_size
        width = config.shared_intermediate_size
        shared = build_shared(size, width, dtype, formula=RELU2)
        latent = None
        if config.latent_size is not None:
            space = LatentSpec(hidden_size=size, latent_size=config.latent_size)
            latent = Latent(space, dtype=dtype)
        return gated_moe(
            *(Router(config.router), config.moe_intermediate_size, dtype, backend, shared),
            formula=RELU2,
            latent=latent,
        )


def weight_map(config: NemotronHConfig) -> WeightMap:
    """Map the published tensor names to ours, and those of transformers' modules."""
    rules = either(separate=_rules(config, "backbone."), fused=_rules(config, "model."))
    head = Rule("lm_head.weight", "lm_head.weight")
    return decoder_map(config, [head, *rules], expert=config.router.num_experts)


def _rules(config: NemotronHConfig, source: str) -> list[Rule]:
    """Return the rules of all but the head, experts one by one where they are of the backbone."""
    rules = [
        Rule(source + "embeddings.weight", "embed_tokens.weight"),
        Rule(source + "norm_f.weight", "norm.weight"),
        Rule(source + "layers.{layer}.norm.weight", "layers.{layer}.norm.weight"),
    ]
    for layer, kind in enumerate(config.layer_types):
        theirs, ours = f"{source}layers.{layer}.mixer.", f"layers.{layer}."
        if kind == "linear_attention":
            rules += mamba_rules(theirs, ours + "self_attn.", has_bias=config.use_conv_bias)
        elif kind == "full_attention":
            names = (f"{name}_proj.weight" for name in "qkvo")
            rules += [Rule(theirs + name, f"{ours}self_attn.{name}") for name in names]
        elif kind == "mlp":
            rules += _mlp_rules(theirs, ours + "mlp.")
        else:
            rules += _expert_rules(theirs, ours + "moe.", has_latent=config.latent_size is not None)
    return rules


def _mlp_rules(theirs: str, ours: str) -> list[Rule]:
    names = ("up_proj.weight", "down_proj.weight")
    return [Rule(theirs + name, ours + name) for name in names]


def _expert_rules(theirs: str, moe: str, *, has_latent: bool) -> list[Rule]:
    names, bias = ("up_proj", "down_proj"), "e_score_correction_bias"
    place = "{{expert}}.{}.weight" if theirs.startswith("backbone.") else "{}"
    op, latent = f"{moe}expert_mlps.mlp_op.", {"fc1": "into", "fc2": "out_of"} if has_latent else {}
    return [
        Rule(theirs + "gate.weight", moe + "router.linear_router.weight"),
        Rule(f"{theirs}gate.{bias}", f"{moe}router.{bias}", is_exact=True),
        *_mlp_rules(theirs + "shared_experts.", moe + "shared_experts."),
        *(
            Rule(f"{theirs}{old}_latent_proj.weight", f"{moe}latent.{new}.weight")
            for old, new in latent.items()
        ),
        *(
            Rule(f"{theirs}experts.{place.format(name)}", f"{op}{name}.weight", transpose)
            for name in names
        ),
    ]
