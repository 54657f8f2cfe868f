"""Load counters of a whole model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from neuron_moe.models.expert_load import LoadRecorder, moe_layers
from neuron_moe.models.loader import load_model


def test_every_real_token_is_counted_top_k_times(checkpoint_of: Callable[..., Path]) -> None:
    model = load_model(checkpoint_of(), dtype=torch.float32)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[0, :4] = False
    with LoadRecorder(model) as loads, torch.inference_mode():
        model(torch.arange(18).view(2, 9), real_US=real)
        first_LE = loads.take()
        model(torch.arange(3)[None])
        second_LE = loads.take()
    assert first_LE.shape == (2, 8)
    assert first_LE.sum(1).tolist() == [14 * 4] * 2
    assert second_LE.sum(1).tolist() == [3 * 4] * 2
    assert [layer.expert_load for layer in moe_layers(model)] == [None, None]


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="model=Linear: has no MoE layer"):
        LoadRecorder(torch.nn.Linear(2, 2))


def test_taking_outside_the_context_is_refused(checkpoint_of: Callable[..., Path]) -> None:
    with pytest.raises(RuntimeError, match="outside its context"):
        LoadRecorder(load_model(checkpoint_of())).take()
