"""Gemma 4: what its config.json says.

Source: transformers, `models/gemma4/configuration_gemma4.py`; google/gemma-4-26B-A4B-it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from neuron_moe.models.biased_routing import ATTENTION_TYPES
from neuron_moe.models.decoder import DecoderConfig, check_layer_types
from neuron_moe.models.hf_config import ConfigReader, read_text_section
from neuron_moe.models.rope import PROPORTIONAL, RopeConfig
from neuron_moe.spec import check_top_k

TEXT_TYPE = "gemma4_text"
SLIDING, FULL = ATTENTION_TYPES
STEP, FULL_HEAD, WINDOW, ACTIVATION = 6, 512, 512, "gelu_pytorch_tanh"  # if config.json is silent
ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
IMAGE_KEYS = (
    *("image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id"),
    *("boa_token_id", "eoa_token_index", "audio_config", "initializer_range"),
    *("vision_soft_tokens_per_image", "eos_token_id"),
)
OTHER_KEYS = ("vocab_size_per_layer_input", "use_double_wide_mlp", "hidden_activation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """Facts of one Gemma 4 checkpoint; names are those of the text section of its config.json.

    Attributes:
        head_dim: of layers that attend to a window, as `num_key_value_heads` and `rope`.
        full_head_dim: of the others, and so the next two.
        attention_k_eq_v: the others have no values of their own.
        num_vision_layers: of the vision tower beside the text model; None without one.
    """

    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    top_k_experts: int
    sliding_window: int
    layer_types: tuple[str, ...]
    full_head_dim: int
    full_key_value_heads: int
    full_rope: RopeConfig
    attention_bias: bool = False
    attention_k_eq_v: bool = False
    final_logit_softcapping: float | None
    num_vision_layers: int | None = None

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        check_top_k(self.top_k_experts, self.num_experts)
        check_layer_types(self.layer_types, self.num_hidden_layers, ATTENTION_TYPES)
        if self.final_logit_softcapping is not None and self.final_logit_softcapping <= 0:
            raise ValueError(
                f"final_logit_softcapping={self.final_logit_softcapping}: must be positive, or null"
                " for none. Correct config.json."
            )

    @property
    def rotated_size(self) -> int:
        """How much of each head is rotated; the rest of a proportional one by nothing."""
        return self.head_dim

    @property
    def kv_head_counts(self) -> set[int]:
        """How many key/value heads layers have."""
        return {self.of_kind(kind).num_key_value_heads for kind in self.layer_types}

    def of_kind(self, kind: str) -> "Gemma4Config":
        """Return the facts with the heads of one of ATTENTION_TYPES."""
        if kind == SLIDING:
            return self
        return replace(
            self,
            head_dim=self.full_head_dim,
            num_key_value_heads=self.full_key_value_heads,
            rope=self.full_rope,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Gemma4Config":
        """Read config.json as published, or as transformers 5.x writes it of the text model.

        Raises:
            ValueError: a missing, unknown or contradictory key, or a model without experts.
        """
        depth = "num_hidden_layers"
        text, vision_layers = read_text_section(config, "gemma4", depth, IMAGE_KEYS, is_tied=True)
        act = text.get("hidden_activation") or ACTIVATION
        reader = ConfigReader.of_family(
            {"tie_word_embeddings": True, **text, "hidden_act": act}, TEXT_TYPE, *OTHER_KEYS
        )
        _refuse_other_models(reader)
        num_layers = reader.get("num_hidden_layers", int)
        usual = [FULL if (layer + 1) % STEP == 0 else SLIDING for layer in range(num_layers)]
        kinds = (*(reader.get_strings("layer_types") or usual)[:-1], FULL)  # the last sees all
        head_dim, kv_heads = reader.get("head_dim", int), reader.get("num_key_value_heads", int)
        full_head_dim, full_kv_heads = _read_full_heads(reader, kinds, (head_dim, kv_heads))
        return cls.read(
            reader,
            head_dim=head_dim,
            rope=_read_rope(reader, SLIDING),
            full_rope=_read_rope(reader, FULL),
            sliding_window=reader.get_size("sliding_window", WINDOW),
            layer_types=kinds,
            full_head_dim=full_head_dim,
            full_key_value_heads=full_kv_heads,
            num_vision_layers=vision_layers,
        )


def _refuse_other_models(reader: ConfigReader) -> None:
    """Raise ValueError at what the models with experts do not have."""
    if not reader.get("enable_moe_block", bool, False):
        raise ValueError(
            "enable_moe_block=False: this Gemma 4 has no experts, and only models with experts are"
            " read here. Take google/gemma-4-26B-A4B-it."
        )
    per_layer = "hidden_size_per_layer_input"
    width = 256 if reader.is_absent(per_layer) else reader.get_optional(per_layer, int) or 0
    shared = reader.get("num_kv_shared_layers", int, 0)
    if width or shared:
        raise ValueError(
            f"{per_layer}={width}, num_kv_shared_layers={shared}: must be 0; embeddings of single"
            " layers and keys of earlier layers, which the smallest models have, are not computed"
            " here. Take google/gemma-4-26B-A4B-it."
        )
    if reader.get_optional("use_bidirectional_attention", str) not in (None, "vision"):
        raise ValueError(
            "use_bidirectional_attention: must be null or 'vision'; tokens of text see none behind"
            " them. Take a checkpoint that generates."
        )


def _read_full_heads(
    reader: ConfigReader, kinds: tuple[str, ...], sliding: tuple[int, int]
) -> tuple[int, int]:
    """Return size and number of key/value heads where layers attend to everything.

    Args:
        reader: of the text section; transformers writes the heads of each layer.
        kinds: of the layers.
        sliding: the same of the other layers.
    """
    published = (
        reader.get("global_head_dim", int, FULL_HEAD),
        reader.get("num_global_key_value_heads", int, sliding[1]),
    )
    if not reader.get("attention_k_eq_v", bool, False):
        published = published[0], sliding[1]
    if reader.is_absent("per_layer_config"):
        return published
    written = reader.get_section("per_layer_config")
    found: dict[str, set[tuple[int, int]]] = {SLIDING: {sliding}, FULL: set()}
    for layer, kind in enumerate(kinds):
        own = ConfigReader(written.get(str(layer)) or {}, f"per_layer_config[{layer}]")
        size = own.get("head_dim", int, sliding[0])
        found[kind].add((size, own.get("num_key_value_heads", int, sliding[1])))
        own.finish()
    if len(found[SLIDING]) > 1 or len(found[FULL]) > 1 or len(written) > len(kinds):
        raise ValueError(
            f"per_layer_config={dict(written)!r}: must give all layers of full_attention the same"
            " heads, and the others none of their own. Correct config.json."
        )
    return found[FULL].pop()


def _read_rope(reader: ConfigReader, kind: str) -> RopeConfig:
    """Return the rotary embedding of one of ATTENTION_TYPES."""
    section = dict((reader.get_section("rope_parameters") or ROPES).get(kind) or {})
    is_proportional = section.get("rope_type") == PROPORTIONAL
    if is_proportional:
        section = {"factor": 1.0, **section, "rope_type": "linear"}
    context = reader.get("max_position_embeddings", int)
    given = {"rope_parameters": section, "max_position_embeddings": context}
    rope = RopeConfig.from_hf(ConfigReader(given, f"rope_parameters.{kind}"), default_part=1.0)
    if is_proportional:
        return replace(rope, kind=PROPORTIONAL)
    if rope.kind != "default" and rope.part != 1:
        raise ValueError(
            f"rope_parameters.{kind}.partial_rotary_factor={rope.part}: must be 1 with"
            f" rope_type={rope.kind!r}. Correct config.json."
        )
    return replace(rope, part=1.0)  # transformers does not read it of a plain one
