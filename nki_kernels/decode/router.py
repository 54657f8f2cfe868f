"""The router of the fused decode layer: from transposed tokens on chip to experts and affinities.

    logits = x @ router_weight^T (+ bias), float32; the choice is that of router_choice.py

The weights are transposed when they are loaded into HBM, not in every step: `pack_router_weight`
gives each partition its rows of H for all experts in one run. Of a large router each core takes
half of the experts; the cores exchange logits, which are few. In bfloat16 the products are exact;
float32 weights take float32 tokens and four passes of the tensor engine.

Tokens are on the partitions of everything that comes out, 128 a tile, in their order.

Sources: nki_kernels.common.router_choice for the family; NKI 0.6 ISA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import nki.isa as nisa
import nki.language as nl
import numpy as np
from numpy.typing import NDArray

from nki_kernels.common.axes import AxisTiles
from nki_kernels.common.chip import BANK_FLOATS, PARTITIONS
from nki_kernels.common.formula import RouterFormula
from nki_kernels.common.memory import Tiles, allocate, tiles
from nki_kernels.common.router_choice import (
    AT_ONCE,
    LOWEST,
    Picked,
    pick,
    ranks_scores,
    weigh,
    write_index,
)
from nki_kernels.common.tiles import multiply_banks, rows_of, swap_with_other

_PIECES = 4  # most transfers of the router's weight: matmuls start before the last bytes
_SPLIT_BYTES = 1 << 20  # of a weight: half of the load takes longer than exchanging logits
_PIECE_BYTES = 2048  # and the shortest run of one (nki-dma-bandwidth-guide: shorter is slower)


@dataclass
class RouterTiles(nl.NKIObject):
    """The router's operands in SBUF."""

    weight_sb: nl.ndarray  # [h, H/h, N/P], this core's part
    biases: list[nl.ndarray]  # [1, N] float32, one or none
    selection_biases: list[nl.ndarray]  # [tokens, N] float32, one or none


def router_parts(num_experts: int, hidden_size: int, weight_bytes: int, num_cores: int) -> int:
    """Return how many cores share the router's experts; if more than one, they exchange logits.

    Args:
        num_experts: N, of all ranks.
        hidden_size: H.
        weight_bytes: of an element of the weight.
        num_cores: physical cores of the launch.
    """
    is_large = num_experts * hidden_size * weight_bytes >= _SPLIT_BYTES
    can_split = num_experts % num_cores == 0 and num_experts >= num_cores * AT_ONCE
    return num_cores if is_large and can_split else 1


def pack_router_weight(
    weight_NH: NDArray[Any], axis: AxisTiles, num_parts: int = 1
) -> NDArray[Any]:
    """Return [P, h, H/h, N/P]: for each part and partition its rows of H, for all experts.

    Args:
        weight_NH: [N, H] of any dtype, as in the checkpoint; [1, H] for a gate.
        axis: how H is spread over partitions: `moe.h_axis` of the layer's configuration.
        num_parts: P, its `router_parts`; 1 for a gate.
    """
    num_experts, hidden_size = weight_NH.shape
    padded = np.zeros((axis.rows * axis.count, num_experts), weight_NH.dtype)
    padded[:hidden_size] = weight_NH.T
    group = axis.count if axis.is_strided else axis.group
    grouped = padded.reshape(axis.count // group, axis.rows, group, num_parts, -1)
    packed = grouped.transpose(3, 1, 0, 2, 4)
    return np.ascontiguousarray(packed).reshape(num_parts, axis.rows, axis.count, -1)


class RouterTable(NamedTuple):
    """The router's operands in SBUF."""

    weight: Tiles
    bias: Tiles
    selection_bias: Tiles


def router_table(
    weight_shape: tuple[int, ...], dtype: Any, num_tokens: int, formula: RouterFormula
) -> RouterTable:
    """Return the buffers of a router's operands.

    Args:
        weight_shape: [P, h, H/h, N/P] of the weight in HBM; a core has one part of it.
        dtype: its type.
        num_tokens: T.
        formula: the router.
    """
    num_experts = weight_shape[0] * weight_shape[3]
    rows = min(PARTITIONS, num_tokens)
    return RouterTable(
        weight=tiles(1, (weight_shape[1], weight_shape[2], weight_shape[3]), dtype),
        bias=tiles(int(formula.has_bias), (1, num_experts), nl.float32),
        selection_bias=tiles(int(formula.has_selection_bias), (rows, num_experts), nl.float32),
    )


def choice_bytes(num_tokens: int, num_experts: int, formula: RouterFormula) -> int:
    """Return the bytes of SBUF per partition that logits, scores and choices take on the way."""
    columns = 4 * max(AT_ONCE, num_experts)
    each = 7 if ranks_scores(formula) else 3
    return -(-num_tokens // PARTITIONS) * (each * columns + 512)


def load_router(
    weight: nl.ndarray,
    bias_1E: nl.ndarray,
    selection_bias_1E: nl.ndarray,
    formula: RouterFormula,
    num_tokens: int,
) -> RouterTiles:
    """Load the router's operands; those the formula does not use may be None."""
    table = router_table(weight.shape, weight.dtype, num_tokens, formula)
    own = weight[nl.program_id(0) if weight.shape[0] > 1 else 0]
    weight_sb = allocate(table.weight)[0]
    _load_pieces(weight_sb, own)
    biases = allocate(table.bias)
    for bias_sb in biases:
        _repeat_row(bias_sb, bias_1E)
    selection_biases = allocate(table.selection_bias)
    for bias_sb in selection_biases:
        _repeat_row(bias_sb, selection_bias_1E)
    return RouterTiles(weight_sb, biases, selection_biases)


def _load_pieces(weight_sb: nl.ndarray, own: nl.ndarray) -> None:
    """Load a core's part of the weight, in pieces: matmuls start before the last bytes are in."""
    rows, count, columns = own.shape
    run_bytes = count * columns * (4 if own.dtype == nl.float32 else 2)
    pieces = max(1, min(_PIECES, run_bytes // _PIECE_BYTES))
    step = -(-count // pieces)
    for first in range(0, count, step):
        chunks = slice(first, min(first + step, count))
        nisa.dma_copy(
            dst=weight_sb[0:rows, chunks, :], src=own[:, chunks, :], dge_mode=nisa.dge_mode.none
        )


def _repeat_row(repeated_sb: nl.ndarray, row_1X: nl.ndarray) -> None:
    """Load a float32 row [1, X] into each of the partitions of a tile."""
    source = row_1X.ap([[0, repeated_sb.shape[0]], [1, row_1X.shape[1]]])
    nisa.dma_copy(dst=repeated_sb, src=source, dge_mode=nisa.dge_mode.none)


def make_logits(
    x_sb: nl.ndarray,
    first: int,
    rows: int,
    router: RouterTiles,
    h_axis: AxisTiles,
    num_experts: int,
    ones_sb: nl.ndarray,
) -> nl.ndarray:
    """Return the logits of tokens first .. first + rows, [rows, max(N, 8)] float32.

    Args:
        x_sb: [h, H/h, T] transposed tokens.
        first: first token.
        rows: tokens, at most 128.
        router: its operands.
        h_axis: how H is spread over partitions.
        num_experts: N.
        ones_sb: [128, 128] float32 of ones.
    """
    columns = router.weight_sb.shape[2]
    core = nl.program_id(0) if columns < num_experts else 0
    begin = core * columns
    logits_ps = nl.ndarray((rows, columns), nl.float32, buffer=nl.psum)
    _multiply_weight(logits_ps, x_sb[:, :, first : first + rows], router.weight_sb, h_axis)
    for bias_sb in router.biases:
        for first in range(0, columns, BANK_FLOATS):
            last = min(first + BANK_FLOATS, columns)
            nisa.nc_matmul(
                dst=logits_ps[:, first:last],
                stationary=ones_sb[0:1, 0:rows],
                moving=bias_sb[:, begin + first : begin + last],
                is_stationary_onezero=True,
                accumulate=True,
            )
    logits_sb = nl.ndarray((rows, max(AT_ONCE, num_experts)), nl.float32, buffer=nl.sbuf)
    if num_experts < AT_ONCE:
        nisa.memset(dst=logits_sb, value=LOWEST)
    nisa.tensor_copy(dst=logits_sb[:, begin : begin + columns], src=logits_ps)
    if columns < num_experts:
        _exchange_logits(logits_sb, columns, core)
    return logits_sb


def _multiply_weight(
    logits_ps: nl.ndarray, tokens_sb: nl.ndarray, weight_sb: nl.ndarray, h_axis: AxisTiles
) -> None:
    """Write x @ router_weight^T of transposed tokens, widened first for a float32 weight."""
    if weight_sb.dtype == nl.float32:
        wide_sb = nl.ndarray(tokens_sb.shape, nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=wide_sb, src=tokens_sb)
        tokens_sb = wide_sb
    for tile in range(h_axis.count):
        depth = rows_of(h_axis, tile)
        tokens = tokens_sb[0:depth, tile, :]
        multiply_banks(logits_ps, tokens, weight_sb[0:depth, tile, :], tile > 0)


def _exchange_logits(logits_sb: nl.ndarray, columns: int, core: int) -> None:
    """Get the other core's half of the logits for one's own."""
    other = 1 - core
    own_sb = logits_sb[:, core * columns : (core + 1) * columns]
    theirs_sb = logits_sb[:, other * columns : (other + 1) * columns]
    swap_with_other(own_sb, theirs_sb, core, columns * 4)


def pick_experts(
    logits: list[nl.ndarray], router: RouterTiles, num_experts: int, formula: RouterFormula
) -> tuple[list[nl.ndarray], list[Picked]]:
    """Return the experts of every tile of tokens, [rows, K] int32, and what weighing them needs."""
    index_tiles = []
    picked_tiles = []
    for logits_sb in logits:
        # `pick` reads no selection bias where there is none.
        bias_sb = router.selection_biases[0] if formula.has_selection_bias else logits_sb
        picked = pick(logits_sb, bias_sb, num_experts, formula)
        index_sb = nl.ndarray((logits_sb.shape[0], formula.top_k), nl.int32, buffer=nl.sbuf)
        write_index(index_sb, picked.position_sb[:, 0 : index_sb.shape[1]], num_experts)
        index_tiles.append(index_sb)
        picked_tiles.append(picked)
    return index_tiles, picked_tiles


def weigh_experts(
    logits: list[nl.ndarray],
    picked_tiles: list[Picked],
    num_experts: int,
    formula: RouterFormula,
) -> list[nl.ndarray]:
    """Return the affinities of every tile of tokens, [rows, K] float32."""
    affinity_tiles = []
    for tile in range(len(logits)):
        rows = logits[tile].shape[0]
        affinity_sb = nl.ndarray((rows, formula.top_k), nl.float32, buffer=nl.sbuf)
        weigh(affinity_sb, picked_tiles[tile], logits[tile], num_experts, formula)
        affinity_tiles.append(affinity_sb)
    return affinity_tiles


def load_gate(gate: nl.ndarray) -> nl.ndarray:
    """Load the weight of the shared experts' gate, [h, H/h, 1]."""
    gate_sb = nl.ndarray(gate.shape[1:4], gate.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=gate_sb, src=gate[0], dge_mode=nisa.dge_mode.none)
    return gate_sb


def gate_tokens(x_sb: nl.ndarray, gate_sb: nl.ndarray, h_axis: AxisTiles) -> nl.ndarray:
    """Return sigmoid(x @ gate) of every token on every partition, [128, T] float32.

    The gate's weight is read once for each of 128 columns, so that the product is the broadcast.
    """
    num_tokens = x_sb.shape[2]
    gate_ps = nl.ndarray((PARTITIONS, num_tokens), nl.float32, buffer=nl.psum)
    for tile in range(h_axis.count):
        depth = rows_of(h_axis, tile)
        nisa.nc_matmul(
            dst=gate_ps,
            stationary=gate_sb[0:depth, tile, :].broadcast(1, PARTITIONS),
            moving=x_sb[0:depth, tile, :],
            accumulate=tile > 0,
        )
    gate_row_sb = nl.ndarray((PARTITIONS, num_tokens), nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=gate_row_sb, op=nl.sigmoid, data=gate_ps)
    return gate_row_sb
