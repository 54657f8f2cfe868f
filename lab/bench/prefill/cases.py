"""The prefill problems of the benchmark, and the roofline of each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from neuron_moe.tools.timing.layers import Model
from neuron_moe.tools.timing.useful_work import expert_work

TOKENS = (128, 1024, 8192)
ROUTINGS = ("balanced", "uniform", "skewed")


def roofline_us(model: Model, expert_index_TK: NDArray[np.int32]) -> float:
    """Return the least time of the experts' own work on two cores (computed)."""
    return expert_work(model.H, model.I, model.E, expert_index_TK).roofline_us()
