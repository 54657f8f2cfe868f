"""Models with a vision tower, as transformers saves them: their text model is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from neuron_moe.models.loader import load_model, parse_config
from tests.models.families import FAMILIES

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {  # model type: text model, tower
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
        | {"out_hidden_size": 64, "num_position_embeddings": 16, "patch_size": 4},
    ),
    "llama4": (
        "llama4-scout",
        {**SMALL, "vision_output_dim": 64, "projector_input_dim": 32, "projector_output_dim": 32}
        | {"vision_feature_layer": -1},
    ),
    "minimax_m3_vl": ("minimax_m3_vl_text", SMALL),
    "gemma4": ("gemma4_text", {**SMALL, "num_key_value_heads": 2, "head_dim": 16}),
    "mistral3": ("mistral4", {**SMALL, "head_dim": 16}),
    "kimi_k25": (
        "deepseek_v3-kimi",
        {**SMALL, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2},
    ),
}
# What transformers gets wrong where it turns its names back, by vLLM's reading of the publisher's.
MISNAMED = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    "model.mm_projector.": "mm_projector.",
}


def model_with_tower(name: str, **sizes: Any) -> Any:
    """Return transformers' model; `sizes` are of the text model."""
    text, tower = TOWERS[name]
    config = transformers.AutoConfig.for_model(
        name,
        text_config=FAMILIES[text].config(**sizes),
        vision_config=tower,
        tie_word_embeddings=sizes.get("tie_word_embeddings", False),
    )
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config).float().eval()


@pytest.mark.parametrize("form", ["published", "modules"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(name not in CONFIG_MAPPING, reason="no such"))
        for name in TOWERS
    ],
)
def test_the_text_model_beside_a_tower_is_read(name: str, form: str, tmp_path: Path) -> None:
    reference = model_with_tower(name)
    reference.save_pretrained(tmp_path, save_original_format=form == "published")
    if (name, form) == ("kimi_k25", "published"):
        publish_kimi(tmp_path)
    compare_text_models(reference, tmp_path)


def test_a_model_with_a_vision_tower_may_tie_its_embeddings(tmp_path: Path) -> None:
    reference = model_with_tower("qwen3_5_moe", tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)
    compare_text_models(reference, tmp_path)


@torch.inference_mode()
def compare_text_models(reference: Any, folder: Path) -> None:
    ids = torch.arange(70)[None] * 7 % 200 + 5  # two chunks of a recurrent layer
    model = load_model(folder, dtype=torch.float32)
    theirs = reference(input_ids=ids).logits
    torch.testing.assert_close(model(ids), theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


def test_a_dense_text_model_beside_a_tower_is_refused() -> None:
    config = {
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral", "vocab_size": 8},
        "vision_config": {"num_hidden_layers": 1},
    }
    with pytest.raises(ValueError, match="model_type='mistral' in text_config: a dense model"):
        parse_config(config, "here")


def publish_kimi(folder: Path) -> None:
    """Give tensors the names that the publisher gave them, and config.json a key of his."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    for wrong, right in MISNAMED.items():
        tensors = {key.replace(wrong, right): tensor for key, tensor in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = "kimi_k2"
    config["vision_config"]["vt_num_hidden_layers"] = config["vision_config"].pop(
        "num_hidden_layers"
    )
    (folder / "config.json").write_text(json.dumps(config))
