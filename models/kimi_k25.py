"""Kimi-K2.5 and K2.6, the text model: Kimi-K2, which is DeepSeek-V3, beside a vision tower.

Source: transformers, `models/kimi_k25`; vLLM 0.32, `model_executor/models/kimi_k25.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_moe.checkpoint import WeightMap
from neuron_moe.models import deepseek_v3
from neuron_moe.models.deepseek_v3 import DeepseekV3Config, read_rotated
from neuron_moe.models.hf_config import ConfigReader, read_text_section
from neuron_moe.models.weight_rules import beside_tower

OTHER_KEYS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "ignore_index", "use_unified_vision_chunk"),
    *("image_token_id", "video_token_id", "media_placeholder_token_id", "video_placeholder"),
    *("vision_start_token_id", "vision_end_token_id", "auto_map"),
    *("projection_hidden_size", "projection_layer_norm_eps"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK25Config(DeepseekV3Config):
    """Facts of one checkpoint's text model.

    Attributes:
        vision_layers: of the vision tower beside it, which is not read.
    """

    vision_layers: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "KimiK25Config":
        """Read config.json as published with the model, or as transformers 5.x writes it."""
        tower = config.get("vision_config")
        is_published = isinstance(tower, Mapping) and "vt_num_hidden_layers" in tower
        depth = "vt_num_hidden_layers" if is_published else "num_hidden_layers"
        text, layers = read_text_section(config, "kimi_k25", depth, OTHER_KEYS, is_tied=True)
        ignored, aliases = deepseek_v3.OTHER_KEYS, deepseek_v3.ALIASES
        reader = ConfigReader.of_family(text, "deepseek_v3", *ignored, aliases=aliases)
        rope = read_rotated(reader, reader.get("rope_interleave", bool, True))
        return cls.read_latent(reader, rope=rope, vision_layers=layers)


Config = KimiK25Config
Model = deepseek_v3.Model


def weight_map(config: KimiK25Config) -> WeightMap:
    """Map the published tensor names to ours, and those of transformers' modules."""
    text = deepseek_v3.weight_map(config)
    return beside_tower(text, config.vision_layers, _vision_names())


def _vision_names() -> list[str]:
    """Return the tensors of the vision tower and of what leads from it to the text, both forms."""
    block, own = "vision_tower.encoder.blocks.{vision_layer}.", "model.vision_tower."
    stems = [block + part for part in ("wqkv", "wo", "mlp.fc0", "mlp.fc1", "norm0", "norm1")]
    stems += ["vision_tower.encoder.final_layernorm", "vision_tower.patch_embed.proj"]
    stems += [f"mm_projector.{part}" for part in ("pre_norm", "proj.0", "proj.2")]
    parts = ["norm1", "norm2", "mlp.fc1", "mlp.fc2", "attn.proj"]
    parts += [f"attn.{name}_proj" for name in "qkv"]
    stems += [f"{own}layers.{{vision_layer}}.{part}" for part in parts]
    stems += [own + "final_layernorm", own + "patch_embed.proj"]
    stems += [f"model.mm_projector.{part}" for part in ("pre_norm", "in_proj", "out_proj")]
    return [
        *(f"{stem}.{kind}" for stem in stems for kind in ("weight", "bias")),
        "vision_tower.patch_embed.pos_emb.weight",
        own + "patch_embed.pos_emb.position_embeddings",
    ]
