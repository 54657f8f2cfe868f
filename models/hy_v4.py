"""Hy4: configuration, hyper-connections, attention, experts and checkpoint map.

What differs from other decoders: a layer reads a weighted sum of several residual streams and adds
its results to each of them with a weight (independent hyper-connections); both weights are made of
the streams. Attention is DeepSeek-V3.2's with sinks and a gate on what heads attend to, up to
`index_topk` tokens, where the indexer chooses all; routed experts are clamped, shared and dense
MLPs are not. Sinks, hyper-connections and the head are float32, as transformers keeps them.
Layers that predict further tokens (`model.mtp_layers`) are not read.
Source: transformers, `models/hy_v4/modular_hy_v4.py`; tencent/Hy4-preview.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from neuron_moe.checkpoint import Rule, WeightMap, transpose
from neuron_moe.errors import check_positive_int
from neuron_moe.models.attention import View
from neuron_moe.models.biased_routing import BiasedRoutingModel, prediction_blocks
from neuron_moe.models.decoder import Tokens
from neuron_moe.models.deepseek_v3 import LatentAttention, latent_names, read_rotated
from neuron_moe.models.deepseek_v32 import INDEXER, OTHER_KEYS, DeepseekV32Config
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.hyper_connections import StreamHead, StreamSpec
from neuron_moe.models.hyper_layer import HyperLayer, IndependentConnection
from neuron_moe.models.layers import clamped_silu
from neuron_moe.models.weight_rules import (
    decoder_map,
    decoder_rules,
    either,
    fused_expert_rules,
    mlp_rules,
    split_layers,
    with_modules,
)
from neuron_moe.spec import ExpertFormula

# Of vLLM's configuration: parts that transformers has without asking.
SWITCHES = "enable_ihc", "enable_lm_head_fp32", "gated_mla", "learnable_sink"
HYPER = {  # what hyper-connections of attention, feed-forward part and head are called, up to names
    "published": (
        "layers.{layer}.hc_attn_layer.hc_pre.hc_",
        "layers.{layer}.hc_mlp_layer.hc_pre.hc_",
        "hc_head.hc_head_",
    ),
    "transformers": (  # as it saves them
        "layers.{layer}.hc_pre.hc_attn_layer.hc_",
        "layers.{layer}.hc_pre.hc_mlp_layer.hc_",
        "hc_pre.hc_head.hc_head_",
    ),
}
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts", "n_group", "topk_group"), 1),
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HYV4Config(DeepseekV32Config):
    """Facts of one Hy4 checkpoint; names are those of its config.json.

    Attributes:
        hc_mult: residual streams.
        hc_magnitude: of what is added to them.
        hc_eps: added to each weight of a stream.
        swiglu_limit: clamps gate and up projections of routed experts.
    """

    hc_mult: int = 4
    hc_magnitude: float = 2.0
    hc_eps: float = 1e-6
    swiglu_limit: float = 10.0

    def __post_init__(self) -> None:
        DeepseekV32Config.__post_init__(self)
        if self.swiglu_limit <= 0:
            raise ValueError(
                f"swiglu_limit={self.swiglu_limit}: must be positive. Correct config.json."
            )

    @property
    def streams(self) -> StreamSpec:
        """What the hyper-connections are."""
        return StreamSpec(
            hidden_size=self.hidden_size,
            num_streams=self.hc_mult,
            iterations=1,  # of nothing
            eps=self.hc_eps,
            norm_eps=self.rms_norm_eps,
        )

    @property
    def routed_formula(self) -> ExpertFormula:
        """What a routed expert computes, whatever hidden_act is."""
        return clamped_silu(self.swiglu_limit, is_before=True)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "HYV4Config":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        # Every head has a key and a value; head_dim is not what its name says.
        given = {**config, "num_key_value_heads": config.get("num_attention_heads")}
        given.pop("head_dim", None)
        ignored = *OTHER_KEYS, "learnable_sink_init", "mtp_loss_factor"
        reader = ConfigReader.of_family(given, "hy_v4", *ignored)
        for switch in SWITCHES:
            reader.require(switch, True)
        reader.require("gating_type", "elementwise")
        reader.require("first_k_dense_replace", 1)
        longest, reach = reader.get("max_position_embeddings", int), reader.get("index_topk", int)
        return cls.read_latent(
            reader,
            defaults=DEFAULTS,
            rope=read_rotated(reader, False),
            max_position_embeddings=min(longest, check_positive_int("index_topk", reach)),
            n_routed_experts=reader.get_renamed("n_routed_experts", "num_local_experts", int),
        )


Config = HYV4Config


class Model(BiasedRoutingModel):
    """Hy4 for generation."""

    config: HYV4Config
    runs_layers_alone = False

    def __init__(self, config: HYV4Config, **options: Any) -> None:
        super().__init__(config, **options)
        self.head_hc = StreamHead(config.streams)
        if not config.tie_word_embeddings:
            self.lm_head.float()
        self.head_dtype = self.lm_head.weight.dtype

    def build_layer(self, layer: int, dtype: torch.dtype, backend: str) -> HyperLayer:
        """Return a layer between streams."""
        config, attention = self.config, self.build_attention(layer, dtype)
        feed_forward = self.build_feed_forward(layer, dtype, backend)
        pair = [IndependentConnection(config.streams, config.hc_magnitude) for _ in range(2)]
        return HyperLayer(config, dtype, attention, feed_forward, (pair[0], pair[1]))

    def build_attention(self, layer: int, dtype: torch.dtype) -> LatentAttention:
        """Return latent attention with sinks and a gate."""
        return LatentAttention(self.config, dtype, has_sinks=True, gates=self.config.v_head_dim)

    def _run(self, input_ids_US: Tensor, tokens: Tokens, views: Sequence[View | None]) -> Tensor:
        """Return the sum of the streams after the last layer, [U, S, H]."""
        embedded_US1H = self.embed(input_ids_US).unsqueeze(2)
        hidden_USNH = embedded_US1H.expand(-1, -1, self.config.hc_mult, -1)
        for layer, view in zip(self.layers, views, strict=True):
            hidden_USNH = layer(hidden_USNH, tokens, view)
        summed_USH: Tensor = self.head_hc(hidden_USNH)
        return summed_USH

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[.., V]` of the last hidden states `[.., H]`."""
        logits: Tensor = self.lm_head(self.norm(hidden).to(self.head_dtype))
        return logits


def weight_map(config: HYV4Config) -> WeightMap:
    """Map the published tensor names to ours, and those that transformers 5.23 saves."""
    rules = decoder_rules(latent_names(config))
    rules = [replace(rule, is_exact=rule.target == "lm_head.weight") for rule in rules]
    theirs, ours = "model.layers.{layer}.self_attn.", "layers.{layer}.self_attn."
    rules += [
        Rule(theirs + "linear_gate.weight", ours + "q_gate_proj.weight"),
        Rule(theirs + "learnable_sink_param", ours + "sinks", is_exact=True),
    ]
    sparse, dense = split_layers(config.sparse_layers, config.num_hidden_layers)
    indexer = [f"model.layers.{{layer}}.{name}" for name in INDEXER]
    layers = (0, *config.prediction_layers)
    first, *others = prediction_blocks(rules, _sparse_rules, layers, indexer).items()
    ahead = [name.replace("layers.0.", "mtp_layers.{layer}.") for name in first[1]]
    mlps = [mlp_rules(f"model.layers.{layer}.mlp", f"layers.{layer}.mlp") for layer in dense]
    mlps += [_shared_rules(layer) for layer in sparse]
    gates = [mlp[0] for mlp in mlps]
    rules += [rule for mlp in mlps for rule in mlp[1:]]
    rules += [rule for layer in sparse for rule in _sparse_rules(layer)[3:]]
    rules += either(**{form: [*_hyper_rules(form), *_gate_rules(form, gates)] for form in HYPER})
    ignored = [*indexer, *ahead]
    saved = decoder_map(config, rules, ignored, dict(others), expert=config.n_routed_experts)
    return with_modules(saved, {"q_gate_proj": "gate_proj", "head_hc.": "hc_head.hc_"})


def _shared_rules(layer: str) -> list[Rule]:
    """Return the rules of the shared expert: gate, up and down."""
    return mlp_rules(
        f"model.layers.{layer}.mlp.shared_experts", f"layers.{layer}.moe.shared_experts"
    )


def _sparse_rules(layer: str) -> list[Rule]:
    """Return the rules of a layer with experts, those of the shared one first."""
    mlp, moe = f"model.layers.{layer}.mlp.", f"layers.{layer}.moe."
    bias = "e_score_correction_bias"
    return [
        *_shared_rules(layer),
        Rule(mlp + "gate.weight", moe + "router.linear_router.weight"),
        Rule(f"{mlp}gate.{bias}", f"{moe}router.{bias}", is_exact=True),
        *fused_expert_rules(mlp + "experts", moe + "expert_mlps.mlp_op", transpose),
    ]


def _hyper_rules(form: str) -> list[Rule]:
    """Return the rules of hyper-connections, as a storage form calls them."""
    own = "layers.{layer}.attn_hc.", "layers.{layer}.ffn_hc.", "head_hc."
    return [
        Rule(f"model.{theirs}{name}", ours + name, is_exact=True)
        for theirs, ours in zip(HYPER[form], own, strict=True)
        for name in ("fn", "base", "scale")
    ]


def _gate_rules(form: str, gates: Sequence[Rule]) -> list[Rule]:
    """Return the rules of the MLPs' gates, which transformers saves as it does attention's."""
    if form == "published":
        return [*gates]
    names = [gate.patterns[0].replace("gate_proj", "linear_gate") for gate in gates]
    return [replace(gate, sources=name) for gate, name in zip(gates, names, strict=True)]
