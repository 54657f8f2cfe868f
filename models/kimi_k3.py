"""Kimi-K3, the text model: configuration, attention residuals, experts and checkpoint map.

Kimi-Linear, and more: each part of a layer reads a mixture of what whole blocks of layers before it
added up and of what its own block did (attention residuals); memories fade by a bounded rate and,
as attention to latents, are gated by a whole projection; experts compute in a latent whose sum is
normalised; gate and up projections go through soft caps (SiTU).
Norms of attention's latents have an epsilon of 1e-6, as in the publisher's classes; vLLM gives them
`rms_norm_eps`.
Source: vLLM 0.32, `vllm/models/kimi_k3`; moonshotai/Kimi-K3.

Letters: those of `attention_residuals`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from neuron_moe.checkpoint import Rule, WeightMap, first_of
from neuron_moe.latent import Latent
from neuron_moe.models.attention import View
from neuron_moe.models.attention_residuals import AttentionResidual, ResidualLayer
from neuron_moe.models.channel_delta import ChannelDeltaAttention
from neuron_moe.models.decoder import DecoderModel, Tokens
from neuron_moe.models.deepseek_v3 import latent_names
from neuron_moe.models.delta_net import DeltaNetSizes
from neuron_moe.models.kimi_delta import delta_rules
from neuron_moe.models.kimi_k3_config import KimiK3Config
from neuron_moe.models.kimi_linear import PlainLatentAttention, biased_moe_rules
from neuron_moe.models.layers import GatedMLP, build_shared, gated_moe
from neuron_moe.models.weight_rules import decoder_map, decoder_rules, mlp_rules
from neuron_moe.moe import MoE
from neuron_moe.router import Router
from neuron_moe.spec import LatentSpec

RESIDUALS = {"self_attention_res": "attn_res", "mlp_res": "mlp_res"}
EXACT = ("conv_weight", "dt_bias", "norm_weight")  # of a memory

Config = KimiK3Config


class BoundedDelta(ChannelDeltaAttention):
    """Kimi Delta Attention with a bounded decay and a gate that is no latent.

    Args:
        config: sizes.
        dtype: of the projections; the rest is float32, as published.
    """

    whole = ("f_a_proj",)

    def __init__(self, config: KimiK3Config, dtype: torch.dtype) -> None:
        sizes = config.delta
        heads, latent, size = sizes.num_key_heads, sizes.key_size, sizes.hidden_size
        super().__init__(sizes, config.rms_norm_eps, dtype, torch.float32, (heads,))
        self.lowest_decay = config.gate_lower_bound
        self.norm_weight = nn.Parameter(self.norm_weight.float())
        self.f_a_proj = nn.Linear(size, latent, bias=False, dtype=dtype)
        self.f_b_proj = nn.Linear(latent, heads * latent, bias=False, dtype=dtype)
        self.g_proj = nn.Linear(size, heads * latent, bias=False, dtype=dtype)

    def steps(self, hidden_USH: Tensor) -> Tensor:
        """Return what decays are made of, [U, S, N * D]."""
        made: Tensor = self.f_b_proj(self.f_a_proj(hidden_USH))
        return made


class Model(DecoderModel):
    """Kimi-K3 for generation."""

    config: KimiK3Config
    runs_layers_alone = False

    def __init__(
        self, config: KimiK3Config, *, dtype: torch.dtype = torch.bfloat16, **options: Any
    ):
        super().__init__(config, dtype=dtype, **options)
        self.output_res = AttentionResidual(config.hidden_size, config.rms_norm_eps, dtype)

    def build_layer(self, layer: int, dtype: torch.dtype, backend: str) -> ResidualLayer:
        """Return a layer that reads all sources."""
        attention = self.build_attention(layer, dtype)
        feed_forward = self.build_feed_forward(layer, dtype, backend)
        begins = layer % self.config.attn_res_block_size == 0
        return ResidualLayer(self.config, dtype, attention, feed_forward, begins_block=begins)

    def build_attention(self, layer: int, dtype: torch.dtype) -> nn.Module:
        """Return the attention of a layer."""
        config = self.config
        if config.layer_types[layer] == "full_attention":
            return PlainLatentAttention(config, dtype, gates=config.v_head_dim)
        return BoundedDelta(config, dtype)

    def build_feed_forward(self, layer: int, dtype: torch.dtype, backend: str) -> MoE | GatedMLP:
        """Return a MoE inside a latent, with a float32 router, or an MLP of a dense layer."""
        config, formula, size = self.config, self.config.routed_formula, self.config.hidden_size
        if layer not in config.sparse_layers:
            return GatedMLP(size, config.intermediate_size, dtype, formula=formula)
        space = LatentSpec(
            hidden_size=size,
            latent_size=config.routed_expert_hidden_size,
            norm_eps=config.rms_norm_eps if config.latent_moe_use_norm else None,
        )
        return gated_moe(
            Router(config.router_spec),
            config.moe_intermediate_size,
            dtype,
            backend,
            build_shared(size, config.shared_size or 0, dtype, formula=formula),
            formula=formula,
            latent=Latent(space, dtype=dtype),
        )

    def _run(self, input_ids_US: Tensor, tokens: Tokens, views: Sequence[View | None]) -> Tensor:
        """Return the mixture of all sources after the last layer, [U, S, H]."""
        hidden_USnH = self.embed(input_ids_US).unsqueeze(2)
        for layer, view in zip(self.layers, views, strict=True):
            hidden_USnH = layer(hidden_USnH, tokens, view)
        mixed_USH: Tensor = self.output_res(hidden_USnH)
        return mixed_USH


def weight_map(config: KimiK3Config) -> WeightMap:
    """Map the published tensor names to ours."""
    source, head = "language_model.model.", "language_model.lm_head.weight"
    rules = decoder_rules([], source=source, head=head)
    rules += _residual_rules(source + "output_attn_res", "output_res")
    for layer, kind in enumerate(config.layer_types):
        theirs, ours = f"{source}layers.{layer}.", f"layers.{layer}."
        for name, own in RESIDUALS.items():
            rules += _residual_rules(theirs + name, ours + own)
        if kind == "full_attention":
            names = latent_names(config)
            rules += [Rule(f"{theirs}{name}", f"{ours}{name}") for name in names]
            gate = f"{ours}self_attn.q_gate_proj.weight"
            rules += [Rule(f"{theirs}self_attn.g_proj.weight", gate)]
        else:
            rules += _bounded_rules(config.delta, theirs + "self_attn.", ours + "self_attn.")
        if layer in config.sparse_layers:
            rules += _sparse_rules(config, theirs + "block_sparse_moe.", ours + "moe.")
        else:
            rules += mlp_rules(theirs + "mlp", ours + "mlp")
    sizes = {"expert": config.n_routed_experts}
    sizes |= {"vision_layer": config.vision_layers} if config.vision_layers else {}
    ignored = _vision_names() if config.vision_layers else ()
    return decoder_map(config, rules, ignored, **sizes)


def _residual_rules(theirs: str, ours: str) -> list[Rule]:
    pairs = {"_norm.weight": ".norm_weight", "_proj.weight": ".query"}
    return [Rule(theirs + old, ours + new) for old, new in pairs.items()]


def _bounded_rules(sizes: DeltaNetSizes, theirs: str, ours: str) -> list[Rule]:
    """Return the rules of a memory; decay speeds are filled up with zeros to a head's size."""
    heads = sizes.num_key_heads
    speeds = first_of(heads, max(heads, sizes.key_size))
    left_out = f"{theirs}g_a_proj.weight", f"{theirs}g_b_proj.weight", f"{theirs}A_log"
    rules = [rule for rule in delta_rules(theirs, ours) if rule.sources not in left_out]
    return [
        *(replace(rule, is_exact=rule.target.endswith(EXACT)) for rule in rules),
        Rule(theirs + "g_proj.weight", ours + "g_proj.weight"),
        Rule(theirs + "A_log", ours + "A_log", speeds, is_exact=True),
    ]


def _sparse_rules(config: KimiK3Config, theirs: str, ours: str) -> list[Rule]:
    latent = ours + "latent."
    names = {"down_proj.weight": "into.weight", "up_proj.weight": "out_of.weight"}
    names |= {"norm.weight": "norm_weight"} if config.latent_moe_use_norm else {}
    own = [Rule(f"{theirs}routed_expert_{old}", latent + new) for old, new in names.items()]
    return biased_moe_rules(theirs, ours, own)


def _vision_names() -> list[str]:
    """Return the tensors of the vision tower and of what leads from it to the text model."""
    parts = ("wqkv", "wo", "mlp.fc0", "mlp.fc1", "norm0", "norm1")
    names = [f"vision_tower.encoder.blocks.{{vision_layer}}.{part}" for part in parts]
    names += ["vision_tower.encoder.final_layernorm", "vision_tower.patch_embed.proj"]
    names += ["vision_tower.patch_embed.pos_emb"]
    names += [f"mm_projector.{part}" for part in ("post_norm", "proj.0", "proj.2")]
    return [f"{name}.weight" for name in names]
