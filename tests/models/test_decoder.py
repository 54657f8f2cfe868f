"""The shared decoder: the flat form that servers call, and cores of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from neuron_moe.models.loader import load_model
from tests.models.flat_form import assert_flat_form_agrees


def test_the_flat_form_is_the_padded_batch(checkpoint_of: Callable[..., Path]) -> None:
    model = load_model(checkpoint_of(), dtype=torch.float32)
    assert_flat_form_agrees(model, 300)


def test_an_unknown_phase_is_refused(checkpoint_of: Callable[..., Path]) -> None:
    model = load_model(checkpoint_of())
    with pytest.raises(ValueError, match="phase='decod'"):
        model.forward_tokens(torch.tensor([1]), torch.tensor([0]), phase="decod")
