"""K-EXAONE: configuration, attention, experts and checkpoint map.

Queries and keys are normalised by head; three of four layers slide and rotate them, the fourth sees
everything and does not rotate. Experts are chosen as in DeepSeek-V3.
Published files hold a layer that predicts a further token, which is not read.
Source: transformers, `models/exaone_moe/modular_exaone_moe.py`; LGAI-EXAONE/K-EXAONE-236B-A23B.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from neuron_moe.checkpoint import Rule, WeightMap
from neuron_moe.models.biased_routing import (
    ATTENTION_TYPES,
    BiasedRoutingModel,
    SlidingConfig,
    biased_routing_map,
    read_feed_forward,
    read_window,
    sparse_rules,
)
from neuron_moe.models.decoder import GroupedAttention
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.weight_rules import exact_in_either, mlp_rules, projection_names

NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
DEFAULTS = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
# Other spellings of what is read, and keys of the layer that predicts.
OTHER_KEYS = (  # unread: no projection has a bias
    *("attention_bias", "is_moe_layer", "mtp_loss_type", "mtp_share_layers"),
    "num_nextn_predict_layers",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaoneMoeConfig(SlidingConfig):
    """Facts of one K-EXAONE checkpoint, under the names that `SlidingConfig` gives them."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ExaoneMoeConfig":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        reader = ConfigReader.of_family(config, "exaone_moe", *OTHER_KEYS)
        reader.require("scoring_func", "sigmoid")
        reader.require("topk_method", "noaux_tc")
        window = read_window(reader)
        usual = _layer_types(reader, window)
        return cls.read(
            reader,
            rope=RopeConfig.from_hf(reader),
            sliding_window=window,
            layer_types=reader.get_strings("layer_types") or usual,
            # No projection has a bias; what predicts has a name of its own, and no number.
            **read_feed_forward(
                reader,
                names=NAMES,
                defaults=DEFAULTS,
                attention_bias=False,
                prediction_layers=(),
            ),
        )


Config = ExaoneMoeConfig


def _layer_types(reader: ConfigReader, window: int | None) -> tuple[str, ...]:
    """Return the kind of each layer by `sliding_window_pattern`, such as 4 or "LLLG"."""
    pattern = reader.get_raw("sliding_window_pattern")
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        pattern = "L" * (pattern - 1) + "G"
    if reader.is_absent("sliding_window_pattern"):
        pattern = "LLLG"
    if window is None or pattern in (None, 0):
        pattern = "G"
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("LG"):
        raise ValueError(
            f"sliding_window_pattern={pattern!r}: must be a positive number or letters L and G."
            " Correct config.json, or name all layers in layer_types."
        )
    num_layers = reader.get("num_hidden_layers", int)
    return tuple(
        ATTENTION_TYPES[pattern[layer % len(pattern)] == "G"] for layer in range(num_layers)
    )


class Model(BiasedRoutingModel):
    """K-EXAONE for generation."""

    config: ExaoneMoeConfig

    def build_attention(self, layer: int, dtype: torch.dtype) -> GroupedAttention:
        """Return attention that is rotated and sliding, or neither."""
        config, reach = self.config, self.config.reach(layer)
        rotates = config.sliding_window is None or reach.window is not None
        return GroupedAttention(config, dtype, reach=reach, norms="by head", rotates=rotates)


def weight_map(config: ExaoneMoeConfig) -> WeightMap:
    """Map the published tensor names to ours."""
    names = projection_names(has_bias=False, has_norms=True)
    return biased_routing_map(config, names, _sparse_rules, _prediction_names(names))


def _sparse_rules(layer: str) -> list[Rule]:
    mlp, bias = f"model.layers.{layer}.mlp.", "e_score_correction_bias"
    biases = exact_in_either(  # as published, and in transformers' modules
        f"layers.{layer}.moe.router.{bias}", separate=mlp + bias, fused=f"{mlp}gate.{bias}"
    )
    return [*sparse_rules(layer, bias=""), *biases]


def _prediction_names(attention: list[str]) -> list[str]:
    """Return the tensors of the layer that predicts a further token, dense or sparse."""
    frame, layer = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"), "mtp.layers.0."
    rules = [*mlp_rules(layer + "mlp", ""), *_sparse_rules("0")]
    return [
        *(f"mtp.{name}.weight" for name in frame),
        *(f"{layer}{name}_layernorm.weight" for name in ("input", "post_attention")),
        *(layer + name for name in attention),
        *(pattern.replace("model.layers.0.", layer) for rule in rules for pattern in rule.patterns),
    ]
