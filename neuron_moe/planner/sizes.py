"""The sizes of a model that its cost depends on, read from a published config.json.

Keys differ between publishers; each line of `_KEYS` lists the names one size goes by.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_moe.errors import check_choice, check_positive_int
from neuron_moe.spec import check_top_k

# mxfp4: 32 codes and one scale
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "e5m2": 1.0, "mxfp4": 17 / 32}
_FORMATS = {"mxfp4": "e5m2", "fp8": "fp8"}  # by what a checkpoint is quantised with

_KEYS = {
    "hidden_size": ("hidden_size", "d_model"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": (
        *("num_experts_per_tok", "experts_per_token", "moe_k", "moe_top_k"),
        *("num_experts_per_token", "top_k_experts", "moe_topk"),
    ),
    "num_layers": ("num_hidden_layers", "n_layers"),
    "vocab_size": ("vocab_size",),
    "num_heads": ("num_attention_heads", "n_heads"),
    "num_kv_heads": ("num_key_value_heads", "kv_n_heads"),
    "intermediate_size": ("moe_intermediate_size", "intermediate_size", "ffn_hidden_size"),
}
# Parts of config.json with keys of their own: of models with a vision tower, and of DBRX.
_SECTIONS = ("text_config", "attn_config", "ffn_config")

_LARGEST_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of one model.

    Args:
        name: what reports call it.
        hidden_size: H.
        intermediate_size: I of one routed expert.
        num_experts: E.
        top_k: K.
        num_layers: all decoder layers.
        num_moe_layers: those with routed experts.
        shared_size: width of all shared experts together, 0 for none.
        dense_parameters: parameters outside the routed and shared experts.
        weight_format: of the routed experts in HBM, a key of WEIGHT_BYTES.
        latent_size: hidden size of the routed experts where they compute in a latent; 0: H.
        num_matrices: of an expert, 3 with a gate, 2 without.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_layers: int
    num_moe_layers: int
    shared_size: int
    dense_parameters: int
    weight_format: str
    latent_size: int = 0
    num_matrices: int = 3

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k", "num_moe_layers"):
            check_positive_int(name, getattr(self, name))
            if getattr(self, name) > _LARGEST_SIZE:
                raise ValueError(
                    f"{name}={getattr(self, name)}: must be at most {_LARGEST_SIZE}. Correct it."
                )
        check_top_k(self.top_k, self.num_experts)
        check_choice("weight_format", self.weight_format, WEIGHT_BYTES)

    @classmethod
    def from_config(
        cls, name: str, config: Mapping[str, Any], weight_format: str | None = None
    ) -> "ModelSizes":
        """Read a configuration by the keys that most families share.

        Every layer counts as one with attention; `neuron_moe.models.whole_model.plan_model` counts
        the layers of a model that is read here.

        Args:
            name: what reports call the model.
            config: the keys of config.json.
            weight_format: overrides the one that `weight_format_of` finds.

        Raises:
            ValueError: a size is missing.
        """
        stored = weight_format or weight_format_of(config)
        for section in _SECTIONS:
            config = {**config, **_section(config, section)}
        if _whole(config, "zero_expert_num"):
            raise ValueError(
                f"config: zero_expert_num={config['zero_expert_num']}: experts that give back what"
                " they are given are not planned. Take a model without them."
            )
        found = {size: _find(config, names, size) for size, names in _KEYS.items()}
        inner = found["intermediate_size"]
        dense_layers = _dense_layers(config, found["num_layers"])
        return cls(
            name=name,
            hidden_size=found["hidden_size"],
            intermediate_size=inner,
            num_experts=found["num_experts"],
            top_k=found["top_k"],
            num_layers=found["num_layers"],
            num_moe_layers=found["num_layers"] - dense_layers,
            shared_size=_shared_size(config, inner),
            dense_parameters=_dense_parameters(config, found, dense_layers),
            weight_format=stored,
            latent_size=_latent_size(config),
        )

    @property
    def expert_hidden_size(self) -> int:
        """Columns of what a routed expert is given."""
        return self.latent_size or self.hidden_size

    @property
    def expert_bytes(self) -> float:
        """Bytes of one routed expert of one layer."""
        weights = self.num_matrices * self.expert_hidden_size * self.intermediate_size
        return weights * WEIGHT_BYTES[self.weight_format]

    @property
    def shared_bytes(self) -> float:
        """Bytes of the shared experts of one layer, in bf16."""
        return self.num_matrices * self.hidden_size * self.shared_size * WEIGHT_BYTES["bf16"]


def weight_format_of(config: Mapping[str, Any]) -> str:
    """Return how the routed experts of a checkpoint are stored in HBM, a key of WEIGHT_BYTES.

    By the `quantization_config` of its config.json: fp8 for fp8, e5m2 for MXFP4 (which Trn2
    computes so, without loss), else bf16.
    """
    sections = (config, _section(config, "text_config"))
    methods = (_section(each, "quantization_config").get("quant_method") for each in sections)
    return next((_FORMATS[str(found)] for found in methods if str(found) in _FORMATS), "bf16")


def _find(config: Mapping[str, Any], names: tuple[str, ...], size: str) -> int:
    found = _whole(config, *names)
    if found is not None:
        return found
    raise ValueError(
        f"config: must hold {size} under one of the names {', '.join(names)}. Pass a MoE model's"
        " config.json."
    )


def _whole(config: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of some keys that is there and not null; None if none is.

    Raises:
        ValueError: it is no whole number, negative, or absurd.
    """
    key = next((name for name in names if config.get(name) is not None), None)
    if key is None:
        return None
    value = config[key]
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]  # Hunyuan's: the same for each layer
    if type(value) is not int or not 0 <= value <= _LARGEST_SIZE:
        is_long = type(value) is int and abs(value) >= 10**100
        shown = "a number of a hundred digits or more" if is_long else repr(value)
        raise ValueError(
            f"config: {key}={shown}: must be a whole number from 0 to {_LARGEST_SIZE}. Correct"
            " it in config.json, or in --model."
        )
    return value


def _needed(config: Mapping[str, Any], *keys: str) -> tuple[int, ...]:
    return tuple(_find(config, (key,), key) for key in keys)


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object in the config; an empty one where it is absent or null."""
    section = config.get(key)
    if section is not None and not isinstance(section, Mapping):
        raise ValueError(
            f"config: {key}={section!r}: must be an object with keys of its own, or null. Correct"
            " it in config.json."
        )
    return section or {}


def _dense_layers(config: Mapping[str, Any], num_layers: int) -> int:
    """Return how many layers have no experts: the first ones, or those between (Llama 4)."""
    step = _whole(config, "interleave_moe_layer_step") or 1
    first = _whole(config, "first_k_dense_replace", "moe_layer_start_index") or 0
    return num_layers - num_layers // step if step > 1 else first


def _shared_size(config: Mapping[str, Any], inner: int) -> int:
    """Return the width of all shared experts together."""
    own_width = _whole(config, "shared_expert_intermediate_size")
    if own_width is not None:
        return own_width
    is_llama4 = "interleave_moe_layer_step" in config  # has one without a key for it
    names = "n_shared_experts", "moe_num_shared_experts", "num_shared_experts", "num_shared_expert"
    count = _whole(config, *names) or is_llama4
    return int(count) * inner


def _latent_size(config: Mapping[str, Any]) -> int:
    """Return the hidden size of experts that compute in a latent; 0 where they do not."""
    return _whole(config, "routed_expert_hidden_size", "moe_latent_size") or 0


def _dense_parameters(config: Mapping[str, Any], found: dict[str, int], dense_layers: int) -> int:
    """Count attention, router, embedding and dense layers; norms and biases are left out."""
    hidden, heads = found["hidden_size"], found["num_heads"]
    if "kv_lora_rank" in config:  # multi-head latent attention
        query = _whole(config, "q_lora_rank")
        latent, rope, nope, value = _needed(
            config, "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"
        )
        wide = heads * (nope + rope)
        attention = hidden * wide if query is None else query * (hidden + wide)
        attention += hidden * (latent + rope)
        attention += latent * heads * (nope + value) + heads * value * hidden
    else:
        head = _whole(config, "head_dim") or hidden // max(heads, 1)
        attention = hidden * head * 2 * (heads + found["num_kv_heads"])
    router = hidden * found["num_experts"] * (found["num_layers"] - dense_layers)
    width = _whole(config, "intermediate_size_mlp", "intermediate_size") or 0
    dense = 3 * hidden * width * dense_layers
    tied = 1 if config.get("tie_word_embeddings") else 2
    vocabulary = tied * hidden * found["vocab_size"]
    latents = 2 * hidden * _latent_size(config) * (found["num_layers"] - dense_layers)
    return found["num_layers"] * attention + router + dense + vocabulary + latents
