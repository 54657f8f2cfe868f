"""The prefill problems of the benchmark, and the roofline of each."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from neuron_moe.tools.bench.comparison.layers import (
    BF16_BYTES,
    HBM_BYTES_PER_US,
    PE_CYCLES_PER_US,
    Model,
)

TOKENS = (128, 1024, 8192)
ROUTINGS = ("balanced", "uniform", "skewed")


def roofline_us(model: Model, expert_index_TK: NDArray[np.int32]) -> float:
    """Return the least time of the layer on two cores, with perfect overlap (computed).

    The larger of HBM (weights of the experts used once; per choice a row gathered, written and read
    again, per token a row written; two rows per token if K is 1) and the tensor engine (128-row
    tiles, the cheaper of whole and packed tiles, split by tiles or by I).
    """
    T, K = expert_index_TK.shape
    counts = np.bincount(expert_index_TK.reshape(-1), minlength=model.E)
    passes = 2 if K == 1 else 3 * K + 1
    size = 3 * model.H * model.I * int((counts > 0).sum()) + passes * T * model.H
    tiles = int(np.ceil(counts / 128).sum())
    whole = min(_tile_cycles(model.H, model.I) / 2, _tile_cycles(model.H, math.ceil(model.I / 2)))
    packed = min(_packed_cycles(model.H, model.I) / 2, _packed_cycles(model.H, -(-model.I // 2)))
    pe_us = tiles * min(whole, packed) / PE_CYCLES_PER_US
    return float(max(size * BF16_BYTES / HBM_BYTES_PER_US, pe_us))


def _tile_cycles(H: int, I: int) -> float:  # noqa: E741  the axis letters
    return 3 * H * math.ceil(I / 128) + 128 * math.ceil(H / 128)


def _packed_cycles(H: int, I: int) -> float:  # noqa: E741  the axis letters
    return H * math.ceil(2 * I / 128) + H * math.ceil(I / 32) / 4
