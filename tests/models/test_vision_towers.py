"""Models with a vision tower, as transformers saves them: their text model is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from neuron_moe.models.loader import load_model
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
}


@pytest.mark.parametrize("form", ["published", "modules"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "minimax_m3_vl" else (pytest.mark.long,))
        for name in TOWERS
    ],
)
def test_the_text_model_beside_a_tower_is_read(name: str, form: str, tmp_path: Path) -> None:
    text, tower = TOWERS[name]
    config = transformers.AutoConfig.for_model(
        name, text_config=FAMILIES[text].config(), vision_config=tower
    )
    torch.manual_seed(0)
    reference = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    reference.save_pretrained(tmp_path, save_original_format=form == "published")
    ids = torch.arange(20)[None] * 7 % 200 + 5
    with torch.no_grad():
        theirs = reference(input_ids=ids).logits
        ours = load_model(tmp_path, dtype=torch.float32)(ids)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
