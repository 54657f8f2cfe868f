"""Gemma 4: what is folded into weights, and layers with fewer key heads than others."""

from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_moe.checkpoint import save_checkpoint, unique_parameters
from neuron_moe.models.gemma4 import Config, Model, weight_map
from neuron_moe.models.loader import load_model
from neuron_moe.models.sizes import Spread
from tests.models.families import FAMILIES, reference_of, write_checkpoint

pytest.importorskip("transformers.models.gemma4", reason="this transformers has no Gemma4")
PROMPT = torch.arange(40)[None] * 7 % 290


@torch.inference_mode()
def test_what_is_saved_is_the_same_model_to_transformers(tmp_path: Path) -> None:
    published, saved = tmp_path / "published", tmp_path / "saved"
    write_checkpoint(FAMILIES["gemma4_text"].config(), published, seed=1)
    model: Any = load_model(published, dtype=torch.float32)
    rules = weight_map(model.config)
    save_checkpoint(unique_parameters(model), rules, saved, dtype=torch.float32)
    (saved / "config.json").write_text((published / "config.json").read_text())
    expected, again = (reference_of(folder)(PROMPT).logits for folder in (published, saved))
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)


def test_ranks_may_not_outnumber_the_fewest_key_heads_of_a_layer() -> None:
    values = FAMILIES["gemma4_text"].config(num_key_value_heads=4, num_global_key_value_heads=2)
    config = Config.from_hf({"rms_norm_eps": 1e-6, **values})
    with torch.device("meta"):
        model = Model(config)
    Spread(tp=2).check(config, model)
    with pytest.raises(ValueError, match="tp=4: must divide num_key_value_heads=2"):
        Spread(tp=4).check(config, model)
