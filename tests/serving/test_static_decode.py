"""MoE layers of decode steps as static graphs; none of it needs vLLM."""

import pytest
import torch

from neuron_moe.models.decoder import DecoderModel
from neuron_moe.models.loader import load_model
from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder
from neuron_moe.serving.static_decode import capture_decode


@pytest.fixture
def model() -> DecoderModel:
    loaded = load_model(checkpoint_folder(TINY_NAME), dtype=torch.float32)
    assert isinstance(loaded, DecoderModel)
    del loaded.layers[2:]
    return loaded


@torch.inference_mode()
def test_graphs_compute_what_the_layers_do(model: DecoderModel) -> None:
    inputs = [torch.randn(tokens, 1, model.config.hidden_size) for tokens in (1, 3, 4, 5)]
    expected = [[layer.moe(each)[0] for each in inputs] for layer in model.layers]
    torch._dynamo.reset()
    assert capture_decode(model, 4, "eager") == 2 * 3  # of 1, 2 and 4 tokens
    for layer, outputs in zip(model.layers, expected, strict=True):
        for each, output in zip(inputs, outputs, strict=True):
            torch.testing.assert_close(layer.moe(each)[0], output)


@torch.inference_mode()
def test_a_graph_that_would_be_captured_late_is_refused(model: DecoderModel) -> None:
    torch._dynamo.reset()
    capture_decode(model, 2, "eager")
    moe = model.layers[0].moe
    moe(torch.zeros(2, 1, model.config.hidden_size))
    with pytest.raises(RuntimeError, match="recompil"):
        moe(torch.zeros(2, 1, model.config.hidden_size, dtype=torch.float64))
