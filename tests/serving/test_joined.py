"""A model as few graphs, whose experts choose their form at run time; none of it needs vLLM."""

from typing import Any

import pytest
import torch
from torch import Tensor

from neuron_moe.models.decoder import DecoderModel
from neuron_moe.models.loader import load_model
from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder
from neuron_moe.serving.joined import join

STEPS = ((1, "decode"), (3, "decode"), (3, "prefill"), (40, "prefill"), (1, "decode"))


def _queries(_attention: Any, query: Tensor, *_others: Any) -> Tensor:
    """Stand in for a server's attention: a token sees nothing but itself."""
    return query.flatten(-2)


def _model() -> DecoderModel:
    loaded = load_model(checkpoint_folder(TINY_NAME), dtype=torch.float32)
    assert isinstance(loaded, DecoderModel)
    del loaded.layers[2:]
    for attention in loaded.attentions:
        attention.core = _queries
    for layer in loaded.layers:
        layer.moe.expert_mlps.enable_load_counters()
    return loaded


def _load(model: DecoderModel) -> list[list[int]]:
    return [layer.moe.expert_load.tolist() for layer in model.layers]


@pytest.mark.long
def test_graphs_compute_and_count_what_the_model_does_in_steps_of_any_size() -> None:
    plain, model, other = _model(), _model(), _model()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of graphs that other tests captured
    other.norm.weight.zero_()  # its graphs are of the same code, but not ours
    for each in (other, model):
        joined = join(each, "eager")
        joined.capture()
    before = _load(model)
    for number, (tokens, phase) in enumerate(STEPS):
        ids_T = torch.arange(number, number + tokens, dtype=torch.int32)
        places_T = torch.arange(tokens)
        with torch.inference_mode():
            expected = plain.forward_tokens(ids_T, places_T, phase=phase)
            torch.testing.assert_close(joined(ids_T, places_T, phase=phase), expected)
    new = [
        [after - first for after, first in zip(*layer, strict=True)]
        for layer in zip(_load(model), before, strict=True)
    ]
    assert new == _load(plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * 3
