"""Sparse layers as DeepSeek-V3 introduced them, for the families that took them over.

An expert's score is a sigmoid. A learned bias, which is no part of the weight, helps to choose K
experts within the best groups; weights are divided by their sum and scaled. A shared expert stands
beside the routed ones, the first layers are dense, and layers published after the last one, which
predict further tokens, are left out.
Source: DeepSeek-V3 technical report, arXiv 2412.19437, sections 2.1.2 and 2.2.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from neuron_moe.checkpoint import Rule, WeightMap
from neuron_moe.models.attention import Reach
from neuron_moe.models.decoder import DecoderConfig, DecoderModel, Experts, check_layer_types
from neuron_moe.models.hf_config import ConfigReader
from neuron_moe.models.layers import biased_spec, gated
from neuron_moe.models.weight_rules import (
    both_expert_rules,
    decoder_map,
    decoder_rules,
    mlp_rules,
    moe_rules,
    split_layers,
)
from neuron_moe.spec import ExpertFormula, RouterSpec

LAYER_TYPES = ("dense", "sparse")
ONE_GROUP: dict[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}  # of families without groups
WINDOW = 4096  # where config.json does not say
BIASED = ("q_proj", "k_proj", "v_proj")  # what else a family may give a bias
ATTENTION_TYPES = ("sliding_attention", "full_attention")
FREQUENCIES = "model.layers.{layer}.self_attn.rotary_emb.inv_freq"  # computed; some publish them


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasedRoutingConfig(DecoderConfig):
    """Facts of the feed-forward parts; names are those of config.json.

    Attributes:
        n_shared_experts: None for none.
        n_group: 1 where the architecture has no groups, and so the next.
        sparse_layers: the layers with experts.
        prediction_layers: numbers of the published layers that predict further tokens.
        router_fields: of `RouterFormula`, where the architecture differs.
    """

    router_fields: ClassVar[Mapping[str, Any]] = {}
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int | None = None
    num_experts_per_tok: int
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float
    attention_bias: bool = False
    sparse_layers: tuple[int, ...]
    prediction_layers: tuple[int, ...] = ()

    @property
    def experts(self) -> Experts:
        """The feed-forward parts."""
        return Experts(
            self.router_spec,
            self.moe_intermediate_size,
            self.routed_formula,
            shared_size=self.shared_size,
            layers=self.sparse_layers,
            dense_size=self.intermediate_size,
        )

    @property
    def router_spec(self) -> RouterSpec:
        """How experts are chosen; raises ValueError where that is not possible."""
        return biased_spec(
            self.n_routed_experts,
            self.hidden_size,
            top_k=self.num_experts_per_tok,
            n_group=self.n_group,
            topk_group=self.topk_group,
            renormalize=self.norm_topk_prob,
            routed_scaling_factor=self.routed_scaling_factor,
            **self.router_fields,
        )

    @property
    def routed_formula(self) -> ExpertFormula:
        """What a routed expert computes."""
        return gated(self.hidden_act)

    @property
    def shared_size(self) -> int | None:
        """Columns of the shared experts together; None: there are none."""
        shared = self.n_shared_experts
        return None if shared is None else shared * self.moe_intermediate_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingConfig(BiasedRoutingConfig):
    """The same, where some layers attend to a window only.

    Attributes:
        layer_types: one of ATTENTION_TYPES a layer.
    """

    sliding_window: int | None
    layer_types: tuple[str, ...]

    def __post_init__(self) -> None:
        BiasedRoutingConfig.__post_init__(self)
        check_layer_types(self.layer_types, self.num_hidden_layers, ATTENTION_TYPES)

    def reach(self, layer: int) -> Reach:
        """Return how far back a token sees in a layer."""
        slides = self.layer_types[layer] == ATTENTION_TYPES[0]
        return Reach(window=self.sliding_window if slides else None)


def read_feed_forward(
    reader: ConfigReader,
    *,
    names: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Read the fields that `BiasedRoutingConfig` adds.

    Args:
        reader: of config.json.
        names: how the family spells a field, where not as DeepSeek-V3 does.
        defaults: of fields that may be absent, by DeepSeek-V3's names.
        facts: fields that the architecture fixes, whatever config.json says, or that were read.

    Raises:
        ValueError: a missing or contradictory key.
    """
    names = names or {}
    usual = {"attention_bias": False, **(defaults or {})}

    def read(name: str, kind: type[Any]) -> Any:
        key = names.get(name, name)
        return facts.get(name) if name in facts else reader.get(key, kind, usual.get(name))

    num_layers, dense = reader.get("num_hidden_layers", int), "first_k_dense_replace"
    if "sparse_layers" not in facts:
        num_dense = read(dense, int)
        is_all = num_dense >= num_layers and not reader.get_strings("mlp_layer_types")
        if num_dense < 0 or is_all:
            raise ValueError(
                f"{names.get(dense, dense)}={num_dense}: must not be negative, and below"
                f" num_hidden_layers={num_layers}. Correct it."
            )
        facts["sparse_layers"] = read_sparse_layers(reader, num_dense)
    if "prediction_layers" not in facts:
        num_predictions = reader.get("num_nextn_predict_layers", int, 0)
        if num_predictions < 0:
            raise ValueError(
                f"num_nextn_predict_layers={num_predictions}: must not be negative. Correct it."
            )
        facts["prediction_layers"] = tuple(range(num_layers, num_layers + num_predictions))
    whole = ("intermediate_size", "moe_intermediate_size", "n_routed_experts", "n_shared_experts")
    kinds: dict[str, type] = {
        **dict.fromkeys((*whole, "num_experts_per_tok", "n_group", "topk_group"), int),
        "norm_topk_prob": bool,
        "routed_scaling_factor": float,
        "attention_bias": bool,
    }
    return {**{name: read(name, kind) for name, kind in kinds.items()}, **facts}


def read_window(reader: ConfigReader) -> int | None:
    """Return `sliding_window`: None where it is null, the classes' default where it is absent."""
    if reader.is_absent("sliding_window"):
        return WINDOW
    return reader.get_optional("sliding_window", int)


def read_limits(reader: ConfigReader, key: str) -> tuple[float, ...]:
    """Return a list of limits with an entry a layer, 0 for none; there null is none as well.

    Raises:
        ValueError: it is no list of as many numbers, or one is below 0.
    """
    num_layers = reader.get("num_hidden_layers", int)
    values = reader.get_raw(key) or [0.0] * num_layers
    values = [value or 0.0 for value in values] if isinstance(values, list) else []
    are_numbers = all(isinstance(value, int | float) and 0 <= value < 1e30 for value in values)
    if len(values) != num_layers or not are_numbers:
        raise ValueError(
            f"{key}={reader.get_raw(key)!r}: must be a list of num_hidden_layers={num_layers}"
            " limits, none below 0; null or 0 for none. Correct config.json."
        )
    return tuple(map(float, values))


def read_sparse_layers(reader: ConfigReader, num_dense: int) -> tuple[int, ...]:
    """Return the layers with experts: as `mlp_layer_types` says, else all after the first ones.

    Raises:
        ValueError: it does not name every layer, or none has experts.
    """
    num_layers = reader.get("num_hidden_layers", int)
    usual = tuple(LAYER_TYPES[layer >= num_dense] for layer in range(num_layers))
    kinds = reader.get_strings("mlp_layer_types") or usual
    if set(kinds) - set(LAYER_TYPES) or len(kinds) != num_layers or "sparse" not in kinds:
        raise ValueError(
            f"mlp_layer_types={list(kinds)}: must name num_hidden_layers={num_layers} layers,"
            " each dense or sparse, at least one of these. Correct it, or leave it out."
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")


class BiasedRoutingModel(DecoderModel):
    """A model with these feed-forward parts."""

    config: BiasedRoutingConfig


def biased_routing_map(
    config: BiasedRoutingConfig,
    attention_names: Iterable[str],
    rules_of_sparse: Callable[[str], list[Rule]] | None = None,
    ignored: Sequence[str] = (FREQUENCIES,),
    own: Sequence[Rule] = (),
) -> WeightMap:
    """Map the published tensor names to ours, experts one by one or fused.

    Args:
        config: of the checkpoint.
        attention_names: what follows `layers.N.` in the names of the attention's tensors.
        rules_of_sparse: those of a layer with experts; default: under DeepSeek-V3's names.
        ignored: patterns of tensors that are left out.
        own: rules of what the family has beside these.
    """
    has_shared = config.shared_size is not None
    of_sparse = rules_of_sparse or partial(sparse_rules, has_shared=has_shared)
    rules = [*decoder_rules(attention_names), *own]
    sparse, dense = split_layers(config.sparse_layers, config.num_hidden_layers)
    for layer in dense:
        rules += mlp_rules(f"model.layers.{layer}.mlp", f"layers.{layer}.mlp")
    blocks = prediction_blocks(rules, of_sparse, config.prediction_layers, ignored)
    for layer in sparse:
        rules += of_sparse(layer)
    return decoder_map(config, rules, ignored, blocks, expert=config.n_routed_experts)


def sparse_rules(
    layer: str, bias: str = "gate.e_score_correction_bias", *, has_shared: bool = True
) -> list[Rule]:
    """Return the rules of a layer with experts under DeepSeek-V3's names.

    Args:
        layer: its number, or `{layer}`.
        bias: name of the bias that helps to choose, within the MLP; "" for none.
        has_shared: there are shared experts.
    """
    mlp, moe = f"model.layers.{layer}.mlp.", f"layers.{layer}.moe."
    shared = "shared_experts" if has_shared else ""
    return moe_rules(mlp, moe, both_expert_rules(mlp, moe), bias=bias, shared=shared)


def prediction_blocks(
    decoder: Sequence[Rule],
    of_sparse: Callable[[str], list[Rule]],
    layers: Sequence[int],
    ignored: Sequence[str] = (),
) -> dict[str, list[str]]:
    """Return the tensors of layers that predict further tokens: a layer and its frame.

    Args:
        decoder: rules of what all layers have.
        of_sparse: returns those of a sparse layer, whose number or `{layer}` it is given.
        layers: numbers of those that predict.
        ignored: patterns of further tensors that a layer may have.

    A norm of the frame, which no other layer has, tells such a layer from one of the model that
    config.json does not count.
    """
    frame = ["embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"]
    frame += ["final_layernorm"]  # of Hy3
    frame += [f"transformer.shared_head.{name}" for name in ("norm", "output")]  # of Step
    patterns = [f"model.layers.{{layer}}.{name}.weight" for name in frame]
    patterns += [pattern for pattern in ignored if "{layer}" in pattern]
    patterns += [
        pattern
        for rule in (*decoder, *of_sparse("{layer}"), *mlp_rules("model.layers.{layer}.mlp", ""))
        for pattern in rule.patterns
        if "{layer}" in pattern
    ]
    return {
        f"model.layers.{layer}.enorm.weight": [
            pattern.replace("{layer}", str(layer)) for pattern in patterns
        ]
        for layer in layers
    }
