"""The work that a MoE layer needs, whatever computes it, and the least time that takes.

Tokens of padded tiles, rows gathered or stored between kernels, and matrices of ones and zeros that
move rows are overhead: no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuron_moe.plan import LayerParts
from neuron_moe.tools.timing.layers import (
    BF16_BYTES,
    HBM_BYTES_PER_US,
    PE_CYCLES_PER_US,
)
from neuron_moe.weights.narrow import NarrowMatrices
from nki_kernels.common.formula import num_projections

_CELLS = 128 * 128  # of a core's array


@dataclass(frozen=True, slots=True)
class UsefulWork:
    """What no kernel can do without.

    Attributes:
        macs: multiplications of a matrix's element with a token's, each with an addition.
        hbm_bytes: weights that some token uses, once; tokens in and out.
    """

    macs: int
    hbm_bytes: int

    def __add__(self, other: UsefulWork) -> UsefulWork:
        """Return the work of both."""
        return UsefulWork(self.macs + other.macs, self.hbm_bytes + other.hbm_bytes)

    @property
    def flops(self) -> int:
        """Floating-point operations: a multiplication and an addition each."""
        return 2 * self.macs

    def roofline_us(self, num_cores: int = 2) -> float:
        """Return the least time, with perfect overlap (computed): the larger of multiplications on
        full arrays and bytes at the cores' share of the HBM's rate.
        """
        pe_us = self.macs / (num_cores * _CELLS * PE_CYCLES_PER_US)
        return float(max(pe_us, self.hbm_bytes / (num_cores / 2 * HBM_BYTES_PER_US)))


def expert_work(
    hidden_size: int,
    width: int,
    num_experts: int,
    index_TK: NDArray[np.int32],
    *,
    matrices: int = 3,
    weight_bytes: int = BF16_BYTES,
) -> UsefulWork:
    """Return the work of a rank's routed experts.

    Args:
        hidden_size: H.
        width: of an expert on this rank, I.
        num_experts: of this rank.
        index_TK: [T, K] choices; numbers that are none of this rank's experts are another rank's.
        matrices: of an expert.
        weight_bytes: of an element.
    """
    here = index_TK[(index_TK >= 0) & (index_TK < num_experts)]
    cells = matrices * hidden_size * width
    rows = 2 * len(index_TK) * hidden_size * BF16_BYTES
    return UsefulWork(here.size * cells, len(np.unique(here)) * cells * weight_bytes + rows)


def layer_work(parts: LayerParts, index_TK: NDArray[np.int32]) -> UsefulWork:
    """Return the work of a layer as a rank holds it: router, routed and shared experts.

    Args:
        parts: of the layer.
        index_TK: [T, K] choices among the model's experts.
    """
    weights, num_tokens = parts.weights, len(index_TK)
    experts, width, hidden_size = weights.down_proj_EIH.shape
    is_narrow = isinstance(weights.packed_down, NarrowMatrices)
    found = expert_work(
        hidden_size,
        width,
        experts,
        index_TK - parts.first_expert,
        matrices=num_projections(weights.formula) + 1,
        weight_bytes=1 if is_narrow else BF16_BYTES,
    )
    if parts.router is not None:
        cells = parts.router.linear_router.weight.numel()
        found += UsefulWork(num_tokens * cells, cells * BF16_BYTES)
    if parts.shared is not None:
        cells = 3 * hidden_size * parts.shared.width
        found += UsefulWork(num_tokens * cells, cells * BF16_BYTES)
    return found
