"""Facts of a Step-3.5 or Step-3.7 checkpoint, and how its config.json is read.

Published files have lists with a number for each layer, those that predict included, where
transformers has one for each kind of layer; what the lists say of one kind must agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from neuron_moe.models.biased_routing import (
    ATTENTION_TYPES,
    ONE_GROUP,
    read_feed_forward,
    read_limits,
    read_sparse_layers,
)
from neuron_moe.models.decoder import check_layer_types
from neuron_moe.models.hf_config import ConfigReader, read_text_section, respell
from neuron_moe.models.laguna import LagunaConfig
from neuron_moe.models.layers import OffsetRMSNorm
from neuron_moe.models.rope import RopeConfig
from neuron_moe.models.two_ropes import read_ropes

TEXT_TYPE = "step3p5"
SLIDING, FULL = ATTENTION_TYPES
NUM_DENSE, THETA = 3, 10000.0  # where config.json does not say
NAMES = {  # how published files spell keys of transformers
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "num_key_value_heads": "num_attention_groups",
    "share_expert_dim": "share_expert_dims",
}
PER_LAYER = (  # lists that go on with the layers that predict
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors"),
)
FIXED: dict[str, Any] = {  # what no published model has otherwise
    **dict.fromkeys(("gating", "norm_expert_weight", "use_head_wise_attn_gate"), True),
    **dict.fromkeys(("use_moe", "use_moe_router_bias", "zero_centered"), True),
    **dict.fromkeys(("mlp_bias", "sink", "use_bidirectional_attention", "use_mfa"), False),
    "att_impl_type": "GQA",
    "hidden_act": "silu",
    "moe_router_activation": "sigmoid",
}
IMAGE_KEYS = (
    *("image_token_id", "image_token_len", "patch_token_len", "projector_bias"),
    *("understand_projector_stride", "bos_token_id", "eos_token_id"),
)
# Of software, of the layers that predict, and what is said elsewhere.
OTHER_KEYS = (
    *("max_seq_len", "moe_every_n_layer", "moe_layer_offset", "mtp_layer_types"),
    *("mtp_mlp_layer_types", "need_fp32_gate", "use_qk_norm"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step3p7Config(LagunaConfig):
    """Facts of one checkpoint, under the names that `LagunaConfig` gives them.

    Attributes:
        expert_limits: of the routed experts of each layer; 0 for none.
        mlp_limits: the same of shared experts and dense MLPs.
        num_vision_layers: of the vision tower beside the text model; None without one.
    """

    heads_key: ClassVar[str] = "num_sliding_attention_heads: num_attention_heads"
    expert_limits: tuple[float, ...]
    mlp_limits: tuple[float, ...]
    num_vision_layers: int | None = None

    def make_norm(self, size: int, dtype: torch.dtype) -> OffsetRMSNorm:
        """Return a norm that scales by one plus its weight."""
        return OffsetRMSNorm(size, self.rms_norm_eps, dtype)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Step3p7Config":
        """Read config.json as published with either model, or as transformers 5.x writes it."""
        vision = ConfigReader(config, "config.json").get_section("vision_config")
        depth = "layers" if "layers" in vision else "num_hidden_layers"
        text, vision_layers = read_text_section(config, "step3p7", depth, IMAGE_KEYS)
        given = {"rms_norm_eps": 1e-5, **_cut(respell(text, NAMES))}
        reader = ConfigReader.of_family(given, TEXT_TYPE, *OTHER_KEYS)
        for key, value in FIXED.items():
            reader.require(key, value)
        num_layers, head_dim = reader.get("num_hidden_layers", int), reader.get("head_dim", int)
        reader.require("query_pre_attn_scalar", head_dim)
        kinds = reader.get_strings("layer_types") or (FULL,) * num_layers
        check_layer_types(kinds, num_layers, ATTENTION_TYPES)
        window = "sliding_window"
        slides = SLIDING in kinds
        return cls.read(
            reader,
            router_softcap=0.0,  # Laguna's
            head_dim=head_dim,
            sliding_window=reader.get(window, int) if slides else reader.get_optional(window, int),
            layer_types=kinds,
            shared_expert_intermediate_size=reader.get("share_expert_dim", int),
            heads=_read_heads(reader, kinds),
            gates_elements=False,
            expert_limits=read_limits(reader, "swiglu_limits"),
            mlp_limits=read_limits(reader, "swiglu_limits_shared"),
            num_vision_layers=vision_layers,
            **_read_ropes(reader, kinds),
            **read_feed_forward(
                reader,
                names={"routed_scaling_factor": "moe_router_scaling_factor"},
                defaults={"routed_scaling_factor": 1.0},
                n_shared_experts=None,
                sparse_layers=_read_sparse(reader),
                **ONE_GROUP,
            ),
        )


def _cut(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json without what its lists say of the layers that predict."""
    reader = ConfigReader(config, f"config.json ({TEXT_TYPE})")
    num_layers = reader.get("num_hidden_layers", int)
    published = num_layers + reader.get("num_nextn_predict_layers", int, 0)
    lists = {key: config[key] for key in PER_LAYER if isinstance(config.get(key), list)}
    return config | {
        key: values[:num_layers] for key, values in lists.items() if len(values) == published
    }


def _read_sparse(reader: ConfigReader) -> tuple[int, ...]:
    """Return the layers with experts: of `moe_layers_enum`, such as "3,4,5", where it is there."""
    listed = reader.get_raw("moe_layers_enum")
    if listed is None or reader.get_strings("mlp_layer_types"):
        return read_sparse_layers(reader, NUM_DENSE)
    items = [item for item in listed.split(",") if item.strip()] if isinstance(listed, str) else []
    try:
        found = [int(item) for item in items] or reader.get_ints("moe_layers_enum", "layer")
    except ValueError:
        found = []
    num_layers = reader.get("num_hidden_layers", int)
    sparse = tuple(sorted({layer for layer in found if layer < num_layers}))
    if not sparse or sparse[0] < 0:
        raise ValueError(
            f"moe_layers_enum={listed!r}: must name layers below num_hidden_layers={num_layers},"
            " with commas between or as a list. Correct config.json."
        )
    return sparse


def _read_heads(reader: ConfigReader, kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the query heads of each layer; sliding ones may have a number of their own."""
    full = reader.get("num_attention_heads", int)
    other = ConfigReader(reader.get_section("attention_other_setting"), "attention_other_setting")
    other.require("attention_type", SLIDING)
    other.require("num_attention_groups", reader.get("num_key_value_heads", int))
    for key in ("head_dim", "true_head_dim"):
        other.require(key, reader.get("head_dim", int))
    usual = other.get("num_attention_heads", int, full)
    other.finish()
    sliding = reader.get("num_sliding_attention_heads", int, usual)
    if reader.get_raw("per_layer_config") is None:
        return tuple(sliding if kind == SLIDING else full for kind in kinds)
    written = reader.get_section("per_layer_config")  # as transformers writes the same
    layers = ConfigReader(written, "per_layer_config")
    heads = []
    for layer in range(len(kinds)):
        own = ConfigReader(layers.get_section(str(layer)), f"per_layer_config[{layer}]")
        heads.append(own.get("num_attention_heads", int, full))
        own.finish()
    layers.finish()
    return tuple(heads)


def _read_ropes(reader: ConfigReader, kinds: Sequence[str]) -> dict[str, RopeConfig]:
    """Return both embeddings: of `rope_parameters`, or of lists with an entry a layer."""
    usual = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 1.0}
    scaling = reader.get_section("rope_scaling")
    if scaling and reader.get_strings("yarn_only_types") != (FULL,):
        raise ValueError(
            f"yarn_only_types={reader.get_raw('yarn_only_types')!r}: must be [{FULL!r}], the layers"
            " that rope_scaling is of. Correct config.json."
        )
    reader.ignore("yarn_only_types")
    if reader.get_ints("use_rope_layers"):
        raise ValueError("use_rope_layers: must be empty, for every layer rotates. Remove it.")
    sections = dict(reader.get_section("rope_parameters"))
    for kind in ATTENTION_TYPES if not sections else ():
        sections[kind] = {
            **(scaling if kind == FULL else {}),
            "rope_theta": _of_kind(reader, "rope_theta", kinds, kind, THETA),
            "partial_rotary_factor": _of_kind(reader, "partial_rotary_factors", kinds, kind, 1.0),
        }
    for key in ("rope_theta", "partial_rotary_factors"):
        reader.ignore(key)
    unused = {kind: usual for kind in ATTENTION_TYPES if kind not in kinds}
    longest = reader.get("max_position_embeddings", int)
    given = {"rope_parameters": unused | sections, "max_position_embeddings": longest}
    return read_ropes(ConfigReader(given, "config.json"), dict.fromkeys(ATTENTION_TYPES, usual))


def _of_kind(
    reader: ConfigReader, key: str, kinds: Sequence[str], kind: str, usual: float
) -> float:
    """Return a number for all layers of a kind, of which a list has one for each layer."""
    value = reader.get_raw(key)
    if isinstance(value, list):
        own = {number for number, each in zip(value, kinds, strict=False) if each == kind}
        if len(own) > 1:
            raise ValueError(
                f"{key}={value}: must be the same in all layers of {kind}. Correct config.json."
            )
        value = next(iter(own), None)
    return ConfigReader({key: value}, f"config.json ({TEXT_TYPE})").get(key, float, usual)
