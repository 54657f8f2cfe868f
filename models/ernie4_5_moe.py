"""ERNIE 4.5 (21B-A3B, 300B-A47B): configuration, attention, experts and checkpoint map.

What differs from other decoders: rotary pairs are neighbours; experts are chosen by a softmax and a
bias that is no part of their weight, weights are divided by their sum; shared experts may stand
beside them, and some layers are dense; the vocabulary projection may be the embedding.
Source: transformers, `models/ernie4_5_moe/modeling_ernie4_5_moe.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from neuron_moe.checkpoint import Rule, WeightMap, only_row
from neuron_moe.models.decoder import DecoderConfig, DecoderModel, Experts
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import biased_spec
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import (
    both_expert_rules,
    decoder_map,
    decoder_rules,
    exact_in_either,
    feed_forward_rules,
    moe_rules,
    projection_names,
)

ROPE_THETA = 500000.0  # where config.json does not say
# Of training, and of a block that predicts a further token.
OTHER_KEYS = ("moe_capacity", "compression_ratio", "num_nextn_predict_layers", "mtp_loss_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ernie45MoeConfig(DecoderConfig):
    """Facts of one ERNIE 4.5 checkpoint; names are those of its config.json.

    Attributes:
        shared_size: width of all shared experts together; None without them.
        sparse_layers: the layers with experts.
    """

    intermediate_size: int
    moe_intermediate_size: int
    moe_num_experts: int
    moe_k: int
    shared_size: int | None
    sparse_layers: tuple[int, ...]

    @property
    def experts(self) -> Experts:
        """Experts of the sparse layers, whose choice is biased, and perhaps shared ones."""
        fields = {"top_k": self.moe_k, "act_fn": "softmax"}
        return Experts(
            biased_spec(self.moe_num_experts, self.hidden_size, **fields),
            self.moe_intermediate_size,
            shared_size=self.shared_size,
            layers=self.sparse_layers,
            dense_size=self.intermediate_size,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Ernie45MoeConfig":
        """Read config.json as transformers 4.54 to 5.x write it."""
        reader = ConfigReader.of_family(config, "ernie4_5_moe", *OTHER_KEYS)
        reader.require("use_bias", False)
        reader.require("use_rmsnorm", True)
        reader.require("moe_gate", "topk")
        reader.require("moe_use_aux_free", True)
        reader.require("moe_norm_min", 1e-12)  # far below any sum of weights
        inner = reader.get("moe_intermediate_size", int)
        return cls.read(
            reader,
            rope=RopeConfig.from_hf(reader, default_theta=ROPE_THETA, is_interleaved=True),
            tie_word_embeddings=reader.get("tie_word_embeddings", bool, True),
            moe_intermediate_size=inner,
            shared_size=inner * reader.get("moe_num_shared_experts", int) or None,
            sparse_layers=_read_sparse_layers(reader),
        )


def _read_sparse_layers(reader: ConfigReader) -> tuple[int, ...]:
    """Return the layers with experts: every so many, from a first to a last one."""
    num_layers = reader.get("num_hidden_layers", int)
    first = reader.get("moe_layer_start_index", int)
    last = reader.get("moe_layer_end_index", int, -1)
    last = num_layers - 1 if last == -1 else last
    step = reader.get_size("moe_layer_interval", 1)
    layers = range(max(first, 0), min(last + 1, num_layers))
    sparse = tuple(layer for layer in layers if (layer + 1) % step == 0)
    if not sparse:
        raise ValueError(
            f"moe_layer_start_index={first}, moe_layer_end_index={last}, moe_layer_interval={step}:"
            f" must leave a layer with experts of num_hidden_layers={num_layers}. Correct them."
        )
    return sparse


Config = Ernie45MoeConfig


class Model(DecoderModel):
    """ERNIE 4.5 for generation."""

    config: Ernie45MoeConfig


def weight_map(config: Ernie45MoeConfig) -> WeightMap:
    """Map the published tensor names to ours, experts one by one or fused."""
    names = projection_names(has_bias=False)
    shared = "" if config.shared_size is None else "shared_experts"
    rules = decoder_rules(names)
    of_sparse = partial(_sparse_rules, shared=shared)
    rules += feed_forward_rules(config.sparse_layers, config.num_hidden_layers, of_sparse)
    ignored = _prediction_names(names)
    return decoder_map(config, rules, ignored, expert=config.moe_num_experts)


def _sparse_rules(mlp: str, moe: str, shared: str) -> list[Rule]:
    bias = "e_score_correction_bias"
    biases = exact_in_either(
        f"{moe}router.{bias}",
        only_row,
        separate=f"{mlp}moe_statics.{bias}",
        fused=f"{mlp}gate.moe_statics.{bias}",
    )
    return moe_rules(mlp, moe, [*biases, *both_expert_rules(mlp, moe)], shared=shared)


def _prediction_names(projections: list[str]) -> list[str]:
    """Return the tensors of the block that predicts a further token."""
    layer = ["input_layernorm.weight", "post_attention_layernorm.weight", *projections]
    layer += [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    frame = ("emb_norm", "hidden_norm", "linear_proj")
    return [
        *(f"model.mtp_block.0.{name}" for name in layer),
        *(f"model.mtp_{name}.0.weight" for name in frame),
    ]
