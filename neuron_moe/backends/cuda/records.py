"""What launches hand to each other.

Axes: T tokens, K choices, P pairs, E experts, R rows, H hidden, I intermediate.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from neuron_moe.weights.narrow import FORMATS
from nki_kernels.common.formula import ExpertFormula, Limits


class SortedRows(NamedTuple):
    """Where the pairs of a routing are, in tiles of one expert each.

    Attributes:
        order: [.] int32, which holds the tensors below.
        pair_R: [R] int32 pair (token * K + choice) of each row, -1 for padding.
        slot_P: [P] int32 row of each pair, -1 for none.
        tile_expert: [tiles] int32.
        first_tile_E: [E] int32.
        total_E: [E] int32 rows, without padding.
        num_tiles: [1] int32 tiles in use.
        rows: of a tile.
        top_k: K.
    """

    order: Tensor
    pair_R: Tensor
    slot_P: Tensor
    tile_expert: Tensor
    first_tile_E: Tensor
    total_E: Tensor
    num_tiles: Tensor
    rows: int
    top_k: int


class Matrices(NamedTuple):
    """Weights of the experts, biases as they are added; also their gradients.

    Codes, see `NarrowMatrices`, have scales: fp8 one for each column of an expert, [E, columns]
    float32; MXFP4 exponents, [E, rows / 32, columns] uint8.
    """

    first_EHI: Tensor
    first_bias_EI: Tensor | None
    down_EIH: Tensor
    down_bias_EH: Tensor | None
    first_scale: Tensor | None = None
    down_scale: Tensor | None = None


class Form(NamedTuple):
    """A matrix as the Triton kernels read it.

    Attributes:
        values: plain, or codes as bytes.
        format: 'plain', or of the codes.
    """

    values: Tensor
    format: str


def form_of(matrix: Tensor) -> Form:
    """Return plain weights, or codes, as the Triton kernels read them."""
    name = FORMATS.get(matrix.dtype)
    return Form(matrix, "plain") if name is None else Form(matrix.view(torch.uint8), name)


class Results(NamedTuple):
    """Where a product of rows and matrices is stored.

    Attributes:
        out: the product, or its activation, of row tiles from the first computed on.
        kept: the product of the first of these tiles.
        copied: the rows that were gathered by token.
    """

    out: Tensor
    kept: Tensor | None = None
    copied: Tensor | None = None


@dataclass(frozen=True)
class KernelFormula:
    """A formula as the kernels take it: bounds are infinite where it has none."""

    act: str
    scale: float
    has_gate: bool
    gates_itself: bool
    gate_low: float
    gate_high: float
    up_low: float
    up_high: float
    up_offset: float
    gate_cap: float
    up_cap: float


@lru_cache
def kernel_formula(formula: ExpertFormula) -> KernelFormula:
    """Return a formula as the kernels take it."""
    return KernelFormula(
        formula.activation,
        formula.scale,
        formula.has_gate,
        formula.gates_itself,
        *_bounds(formula.gate_limits),
        *_bounds(formula.up_limits),
        formula.up_offset,
        formula.gate_softcap,
        formula.up_softcap,
    )


def _bounds(limits: Limits) -> tuple[float, float]:
    lower = limits.lower if limits.has_lower else -math.inf
    return lower, limits.upper if limits.has_upper else math.inf
