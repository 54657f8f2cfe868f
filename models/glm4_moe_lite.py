"""GLM-4.7-Flash: DeepSeek-V3's layers under GLM's defaults, the first layer dense.

Source: transformers, `models/glm4_moe_lite/modular_glm4_moe_lite.py`; zai-org/GLM-4.7-Flash.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_moe.models import deepseek_v3
from neuron_moe.models.deepseek_v3 import DeepseekV3Config, read_rotated
from neuron_moe.models.hf_config import ConfigReader

DEFAULTS = {
    **dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group", "n_shared_experts"), 1),
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeLiteConfig(DeepseekV3Config):
    """Facts of one checkpoint; names are those of its config.json."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Glm4MoeLiteConfig":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        reader = ConfigReader.of_family(config, "glm4_moe_lite", *deepseek_v3.OTHER_KEYS)
        reader.require("first_k_dense_replace", 1)
        rope = read_rotated(reader, reader.get("rope_interleave", bool, True))
        return cls.read_latent(reader, rope=rope, defaults=DEFAULTS)


Config = Glm4MoeLiteConfig
Model = deepseek_v3.Model
weight_map = deepseek_v3.weight_map
