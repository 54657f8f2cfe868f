"""Step-3.5-Flash and the text model of Step-3.7-Flash: configuration, attention, checkpoint map.

What differs from other decoders: sliding layers have more query heads than whole ones and a rotary
embedding of their own; norms scale by one plus their weight, those of single heads too; a sigmoid
of the layer's input gates each head. Experts are chosen as in DeepSeek-V3, in one group. The last
layers clamp what silu gives, and up, each part of a layer by a limit of its own: `clamped_silu`.
Layers that predict further tokens, and the vision tower of Step-3.7, are not read. The logits of
the router are float32, as vLLM has them.
Source: transformers, `models/step3p7/modular_step3p7.py`; stepfun-ai/Step-3.5-Flash.
"""

import torch
from torch import Tensor

from neuron_moe.checkpoint import Rule, WeightMap, chain, concat_gate_up, transpose
from neuron_moe.models import laguna
from neuron_moe.models.biased_routing import biased_routing_map
from neuron_moe.models.layers import GatedMLP, build_shared, clamped_silu, gated_moe
from neuron_moe.models.step3p7_config import TEXT_TYPE, Step3p7Config
from neuron_moe.models.two_ropes import TwoRopesModel
from neuron_moe.models.weight_rules import mlp_rules, projection_names, with_modules
from neuron_moe.moe import MoE
from neuron_moe.router import Router

ALIASES = (TEXT_TYPE,)
Config = Step3p7Config


class Attention(laguna.Attention):
    """Grouped-query attention whose heads are gated."""

    def gate(self, logits: Tensor) -> Tensor:
        """Return what multiplies heads."""
        return logits.sigmoid()


class Model(TwoRopesModel):
    """Step-3.5-Flash and Step-3.7-Flash for generation of text."""

    config: Step3p7Config

    def build_attention(self, layer: int, dtype: torch.dtype) -> Attention:
        """Return the attention of a layer."""
        return Attention(self.config, layer, dtype)

    def build_feed_forward(self, layer: int, dtype: torch.dtype, backend: str) -> MoE | GatedMLP:
        """Return a MoE with a float32 router, or an MLP where the layer is dense."""
        config, size = self.config, self.config.hidden_size
        formula = clamped_silu(config.mlp_limits[layer])
        if layer not in config.sparse_layers:
            return GatedMLP(size, config.intermediate_size, dtype, formula=formula)
        shared = build_shared(size, config.shared_size, dtype, formula=formula)
        router, width = Router(config.router_spec), config.moe_intermediate_size
        routed = clamped_silu(config.expert_limits[layer])
        return gated_moe(router, width, dtype, backend, shared, formula=routed)


def weight_map(config: Step3p7Config) -> WeightMap:
    """Map the published tensor names to ours, and those of transformers' modules."""
    names = projection_names(has_bias=config.attention_bias, has_norms=True)
    gate = "layers.{layer}.self_attn.%s_proj.weight"
    own = [Rule("model." + gate % "g", gate % "q_gate")]
    layers = config.num_vision_layers
    ignored = [*_vision_names(layers), *_vision_modules(layers)]
    published = biased_routing_map(config, names, _sparse_rules, ignored, own)
    return with_modules(published, {"q_gate_proj": "g_proj"}, "model.language_model.")


def _sparse_rules(layer: str) -> list[Rule]:
    block, moe = f"model.layers.{layer}.", f"layers.{layer}.moe."
    theirs, experts = block + "moe.", moe + "expert_mlps.mlp_op."
    pair = theirs + "gate_proj.weight", theirs + "up_proj.weight"
    return [
        Rule(theirs + "gate.weight", moe + "router.linear_router.weight"),
        Rule(theirs + "router_bias", moe + "router.e_score_correction_bias", is_exact=True),
        Rule(pair, experts + "gate_up_proj.weight", chain(concat_gate_up, transpose)),
        Rule(theirs + "down_proj.weight", experts + "down_proj.weight", transpose),
        *mlp_rules(block + "share_expert", moe + "shared_experts"),
    ]


def _vision_names(num_layers: int | None) -> list[str]:
    """Return the tensors of a vision tower of so many layers, which is no part of this model."""
    if num_layers is None:
        return []
    tower = "vision_model."
    parts = ("attn.out_proj", "ln_1", "ln_2", "mlp.c_fc", "mlp.c_proj")
    alone = ("attn.in_proj_weight", "attn.in_proj_bias", "ls_1.gamma", "ls_2.gamma")
    blocks = [f"{tower}transformer.resblocks.{layer}." for layer in range(num_layers)]
    stems = [block + part for block in blocks for part in parts]
    stems += [tower + name for name in ("ln_pre", "vit_downsampler1", "vit_downsampler2")]
    pairs = (
        f"{stem}.{kind}" for stem in (*stems, "vit_large_projector") for kind in ("weight", "bias")
    )
    names = [*pairs, *(block + name for block in blocks for name in alone)]
    return [*names, *(tower + name for name in ("conv1.weight", "positional_embedding"))]


def _vision_modules(num_layers: int | None) -> list[str]:
    """Return the same as transformers' modules are called."""
    if num_layers is None:
        return []
    tower = "model.vision_model."
    parts = ["layernorm_before", "layernorm_after", "mlp.fc1", "mlp.fc2"]
    parts += [f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")]
    blocks = [f"{tower}layers.{layer}." for layer in range(num_layers)]
    stems = [block + part for block in blocks for part in parts]
    stems += [tower + name for name in ("pre_layernorm", "downsampler1", "downsampler2")]
    places = [f"{tower}embeddings.{name}_embedding.weight" for name in ("patch", "position")]
    return [
        *places,
        *(f"{block}lambda_{number}" for block in blocks for number in (1, 2)),
        *(
            f"{stem}.{kind}"
            for stem in (*stems, "model.multi_modal_projector")
            for kind in ("weight", "bias")
        ),
    ]
