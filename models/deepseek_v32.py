"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with an indexer, of which nothing is needed up to its reach.

The indexer lets each token attend to `index_topk` others, 2,048 as published. Up to that length it
chooses them all, so attention is DeepSeek-V3's, exactly; longer sequences are refused by
`max_position_embeddings`, which is set to that length, and the indexer's tensors are not read.
Source: transformers, `models/deepseek_v32/modular_deepseek_v32.py`, `models/glm_moe_dsa`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from neuron_moe.checkpoint import WeightMap
from neuron_moe.models import deepseek_v3
from neuron_moe.models.deepseek_v3 import DeepseekV3Config, read_rotated
from neuron_moe.models.hf_config import ConfigReader

ALIASES = ("glm_moe_dsa",)
# Of the indexer, and which layers have one of their own.
OTHER_KEYS = (
    *("index_head_dim", "index_n_heads", "index_skip_topk_offset", "index_topk_freq"),
    *("index_topk_pattern", "indexer_rope_interleave", "indexer_types", "layer_types"),
    *("mlp_bias", "rope_interleave"),  # which transformers does not read
)
# What follows `layers.N.` in the names of an indexer's tensors.
INDEXER = tuple(
    f"self_attn.indexer.{name}"
    for name in ("wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV32Config(DeepseekV3Config):
    """Facts of one checkpoint; names are those of its config.json.

    Attributes:
        max_position_embeddings: at most `index_topk`.
    """

    length_reason: ClassVar[str] = (
        ", config.json's index_topk: the longest sequence whose attention is computed here"
    )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DeepseekV32Config":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        ignored = *deepseek_v3.OTHER_KEYS, *OTHER_KEYS
        reader = ConfigReader.of_family(config, "deepseek_v32", *ignored, aliases=ALIASES)
        longest = reader.get("max_position_embeddings", int)
        reach = reader.get_size("index_topk", 2048)
        rope = read_rotated(reader, True)
        return cls.read_latent(reader, rope=rope, max_position_embeddings=min(longest, reach))


Config = DeepseekV32Config
Model = deepseek_v3.Model


def weight_map(config: DeepseekV32Config) -> WeightMap:
    """Map the published tensor names to ours."""
    return deepseek_v3.weight_map(config, [f"model.layers.{{layer}}.{name}" for name in INDEXER])
