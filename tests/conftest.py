"""Fixed seeds for every test; nothing here changes what a test asserts."""

import random

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  libraries under test may use the legacy generator
    torch.manual_seed(0)
    torch.set_num_threads(1)
