"""The activations of the NumPy reference against those of torch."""

import numpy as np
import pytest
import torch

from neuron_moe.activations import ACTIVATIONS as TORCH
from nki_kernels.common.expert_reference import ACTIVATIONS


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_that_of_torch(name: str) -> None:
    x = np.linspace(-6, 6, 201)
    np.testing.assert_allclose(ACTIVATIONS[name](x), TORCH[name](torch.from_numpy(x)), atol=1e-12)
