"""What Llama 4 alone has: a vision tower in its files, and scaling by place."""

from pathlib import Path

import pytest
import torch
from transformers import Llama4Config, Llama4ForConditionalGeneration

from neuron_moe.checkpoint import open_checkpoint
from neuron_moe.models.llama4 import weight_map
from neuron_moe.models.loader import load_model
from tests.models.families import COMMON, LLAMA4

VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vision_output_dim": 64,
    "image_size": 28,
    "patch_size": 14,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a vision tower, as published ones."""
    torch.manual_seed(0)
    text = {**COMMON, **LLAMA4, "attn_temperature_tuning": True}
    config = Llama4Config(text_config=text, vision_config=VISION)
    path = tmp_path_factory.mktemp("llama4")
    Llama4ForConditionalGeneration(config).save_pretrained(path)
    return path


def test_the_text_model_of_a_published_checkpoint_is_read(folder: Path) -> None:
    reference = Llama4ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(40)[None] * 7 % 290
    with torch.inference_mode():
        expected = reference(input_ids=ids).logits
        torch.testing.assert_close(
            load_model(folder, dtype=torch.float32)(ids), expected, rtol=1e-4, atol=1e-4
        )


def test_only_the_tensors_of_the_vision_tower_are_left_out(folder: Path) -> None:
    model = load_model(folder)
    checkpoint = open_checkpoint(folder)
    assignments = weight_map(model.config).resolve(checkpoint, model.state_dict())
    read = {key for assignment in assignments for key in assignment.keys}
    left_out = checkpoint.tensors.keys() - read
    assert left_out == {key for key in checkpoint.tensors if not key.startswith("language_model.")}


def test_the_scale_of_a_query_goes_by_its_place_and_not_by_padding(folder: Path) -> None:
    model = load_model(folder, dtype=torch.float32)
    attention = model.attentions[3]
    assert not attention.rotates
    query, key = torch.ones(1, 3, 4, 16), torch.ones(1, 3, 2, 16)
    tokens = model.describe_tokens(torch.tensor([[0, 8191, 5 * 8192 - 1]]), None)
    scaled, same = attention.rotate(query, key, tokens)
    assert torch.equal(same, key)
    expected = 1 + 0.1 * torch.tensor([0.0, 1.0, 5.0]).log1p()
    torch.testing.assert_close(scaled[0, :, 0, 0], expected)
