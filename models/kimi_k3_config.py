"""What config.json says of a Kimi-K3 checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_moe.models.hf_config import ConfigReader, read_text_section
from neuron_moe.models.kimi_linear import KimiLinearConfig, open_config, read_linear
from neuron_moe.models.layers import gated
from neuron_moe.spec import ExpertFormula

DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
OTHER_KEYS = (  # of the whole model, for images and text
    *("ignore_index", "media_placeholder_token_id", "image_placeholder", "pad_token_id"),
    *("bos_token_id", "eos_token_id", "use_unified_vision_chunk", "video_placeholder"),
)
SITU_KEYS = "activation_situ_beta", "activation_situ_linear_beta"


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK3Config(KimiLinearConfig):
    """Facts of one Kimi-K3 checkpoint, under DeepSeek-V3's names where it has one.

    Attributes:
        routed_expert_hidden_size: of the latent in which experts compute.
        latent_moe_use_norm: their sum is normalised.
        soft_caps: of gate and up projections; the second is 0 for none; None: plain silu.
        attn_res_block_size: layers of a block.
        gate_lower_bound: below 0, of the logarithm of how much a memory keeps; None: there is none.
        vision_layers: of the vision tower beside it, which is not read.
    """

    routed_expert_hidden_size: int
    latent_moe_use_norm: bool = False
    soft_caps: tuple[float, float] | None
    attn_res_block_size: int
    gate_lower_bound: float | None
    vision_layers: int

    def __post_init__(self) -> None:
        KimiLinearConfig.__post_init__(self)
        if self.gate_lower_bound is not None and self.gate_lower_bound >= 0:
            raise ValueError(
                f"gate_lower_bound={self.gate_lower_bound}: must be below 0. Correct config.json."
            )

    @property
    def routed_formula(self) -> ExpertFormula:
        """What routed, shared and dense MLPs compute."""
        if self.soft_caps is None:
            return gated(self.hidden_act)
        gate, up = self.soft_caps
        return ExpertFormula("sigmoid", gates_itself=True, gate_softcap=gate, up_softcap=up)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "KimiK3Config":
        """Read config.json as published with the model."""
        text, vision = read_text_section(config, "kimi_k3", "vt_num_hidden_layers", OTHER_KEYS)
        caps = _read_caps(text)
        if text.get("hidden_act") == "situ":
            text = {**text, "hidden_act": "silu"}
        reader = open_config(text, *SITU_KEYS)
        reader.require("hidden_act", "silu")
        section = ConfigReader(reader.get_section("linear_attn_config"), "linear_attn_config")
        section.require("use_full_rank_gate", True)
        bound = section.get_optional("gate_lower_bound", float)
        facts = read_linear(reader, section)
        section.finish()
        reader.require("mla_use_output_gate", True)
        reader.require("attention_bias", False)
        return cls.read_latent(
            reader,
            defaults=DEFAULTS,
            soft_caps=caps,
            gate_lower_bound=bound,
            vision_layers=vision or 0,
            **facts,
        )


def _read_caps(text: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the soft caps of gate and up projections, where the activation is SiTU."""
    if text.get("hidden_act") != "situ":
        return None
    reader = ConfigReader(text, "text_config")
    gate, up = (reader.get_optional(key, float) for key in SITU_KEYS)
    for key, value in zip(SITU_KEYS, (gate, up), strict=True):
        if value is not None and value <= 0:
            raise ValueError(f"{key}={value}: must be positive. Leave it out, or correct it.")
    return gate or 1.0, up or 0.0
