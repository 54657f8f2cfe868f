"""Launches for few tokens: no sort, four kernels, and two for one token.

Axes: T tokens, K choices, P pairs, E experts, S parts of the depth, H hidden, I intermediate.
"""

from functools import cache

import torch
import triton
from torch import Tensor

from neuron_moe.backends.cuda import decode_kernels
from neuron_moe.backends.cuda.records import Matrices, form_of, kernel_formula
from neuron_moe.backends.cuda.tiles import DecodeTile, decode_tile, token_tile
from nki_kernels.common.formula import ExpertFormula, num_projections

_COLUMNS = 256


def forward(
    hidden_TH: Tensor,
    affinities_TK: Tensor,
    index_TK: Tensor,
    weights: Matrices,
    formula: ExpertFormula,
    tiles: tuple[DecodeTile, DecodeTile] | None = None,
) -> Tensor:
    """Return the output [T, H].

    Args:
        hidden_TH: contiguous.
        affinities_TK: contiguous.
        index_TK: [T, K] int32, -1 for none.
        weights: of the experts.
        formula: of the experts.
        tiles: of both products; by default those of `tiles.decode_tile`.
    """
    num_tokens, top_k = index_TK.shape
    num_experts, _, first_width = weights.first_EHI.shape
    H, num_pairs = weights.down_EIH.shape[2], num_tokens * top_k
    I = first_width // num_projections(formula)  # noqa: E741  the axis
    experts = min(num_pairs, num_experts)
    one, two = tiles or (
        _tile(experts, weights.first_EHI, num_tokens),
        _tile(experts, weights.down_EIH, num_tokens),
    )
    index_P = index_TK.reshape(-1).contiguous()
    blocks = triton.cdiv(H, two.width) if num_tokens == 1 else 0
    arrived = index_P.new_empty(triton.next_power_of_2(blocks)) if blocks else None
    first = weights.first_EHI, weights.first_scale
    first_SPI = _project(hidden_TH, index_P, *first, top_k, one, arrived)
    if arrived is not None:
        return _finish_token(
            first_SPI, index_P, (hidden_TH, affinities_TK), weights, formula, two, arrived
        )
    bias_EI, bias_EH = weights.first_bias_EI, weights.down_bias_EH
    middle_PI = hidden_TH.new_empty((num_pairs, I))
    block = min(_COLUMNS, triton.next_power_of_2(I))
    decode_kernels.activate_pairs[(num_pairs, triton.cdiv(I, block))](
        first_SPI,
        bias_EI,
        index_P,
        middle_PI,
        num_pairs,
        I=I,
        PARTS=first_SPI.shape[0],
        HAS_BIAS=bias_EI is not None,
        FORMULA=kernel_formula(formula),
        BLOCK=block,
        num_warps=2,
    )
    down_SPH = _project(middle_PI, index_P, weights.down_EIH, weights.down_scale, 1, two)
    output_TH = torch.empty_like(hidden_TH)
    block = min(_COLUMNS, triton.next_power_of_2(H))
    decode_kernels.combine_choices[(num_tokens, triton.cdiv(H, block))](
        down_SPH,
        index_P,
        affinities_TK,
        bias_EH,
        output_TH,
        num_pairs,
        H=H,
        TOP_K=top_k,
        PARTS=down_SPH.shape[0],
        HAS_BIAS=bias_EH is not None,
        BLOCK=block,
        num_warps=2,
    )
    return output_TH


def _finish_token(
    first_SKI: Tensor,
    index_K: Tensor,
    inputs: tuple[Tensor, Tensor],
    weights: Matrices,
    formula: ExpertFormula,
    tile: DecodeTile,
    arrived: Tensor,
) -> Tensor:
    """Return the output of one token: nothing waits for a third and a fourth launch."""
    hidden_1H, affinities_1K = inputs
    values, form = form_of(weights.down_EIH)
    bias_EI, bias_EH = weights.first_bias_EI, weights.down_bias_EH
    (parts, top_k, first_width), H = first_SKI.shape, values.shape[2]
    grid = top_k, triton.cdiv(H, tile.width), triton.cdiv(values.shape[1], tile.depth_part)
    output_1H = torch.empty_like(hidden_1H)
    decode_kernels.finish_token[grid](
        first_SKI,
        bias_EI,
        index_K,
        values,
        weights.down_scale,
        bias_EH,
        affinities_1K,
        first_SKI.new_empty((grid[2], top_k, H)),
        arrived,
        output_1H,
        top_k,
        *values.stride(),
        I=first_width // num_projections(formula),
        H=H,
        FIRST_PARTS=parts,
        PARTS=grid[2],
        HAS_FIRST_BIAS=bias_EI is not None,
        HAS_BIAS=bias_EH is not None,
        FORMULA=kernel_formula(formula),
        TOP_K=top_k,
        ROWS=tile.rows,
        DEPTH_PART=tile.depth_part,
        BLOCK_WIDTH=tile.width,
        BLOCK_DEPTH=tile.depth,
        PRECISION=_precision(hidden_1H),
        FORMAT=form,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **_overlap(hidden_1H.device),
    )
    return output_1H


@cache
def _overlap(device: torch.device) -> dict[str, bool]:
    """Return how a launch begins beside the one before it, where the device can do that."""
    can_overlap = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAPS": True, "launch_pdl": True} if can_overlap else {"OVERLAPS": False}


def _tile(experts: int, matrix: Tensor, num_tokens: int) -> DecodeTile:
    _, lines, width = matrix.shape
    form = form_of(matrix).format
    if num_tokens == 1 and form == "plain":
        return token_tile(experts, lines, width)
    return decode_tile(experts, lines, width, form)


def _project(
    rows: Tensor,
    index_P: Tensor,
    matrix: Tensor,
    scale: Tensor | None,
    pairs_of_row: int,
    tile: DecodeTile,
    arrived: Tensor | None = None,
) -> Tensor:
    """Return the products of pairs and their experts' matrices, [S, P, width] float32.

    Args:
        rows: one for `pairs_of_row` pairs.
        index_P: experts.
        matrix: of all experts.
        scale: of codes.
        pairs_of_row: see `rows`.
        tile: of the product.
        arrived: counters to set to zero, of one token.
    """
    values, form = form_of(matrix)
    _, lines, width = values.shape
    num_pairs, parts = index_P.shape[0], triton.cdiv(lines, tile.depth_part)
    out_SPI = torch.empty((parts, num_pairs, width), dtype=torch.float32, device=rows.device)
    decode_kernels.project_pairs[(num_pairs, triton.cdiv(width, tile.width), parts)](
        rows,
        index_P,
        values,
        scale,
        out_SPI,
        arrived,
        num_pairs,
        *values.stride(),
        DEPTH=rows.shape[1],
        WIDTH=width,
        TOP_K=pairs_of_row,
        DEPTH_PART=tile.depth_part,
        ROWS=tile.rows,
        PAIRS=triton.next_power_of_2(num_pairs),
        BLOCK_WIDTH=tile.width,
        BLOCK_DEPTH=tile.depth,
        PRECISION=_precision(rows),
        COUNTERS=0 if arrived is None else arrived.shape[0],
        num_warps=tile.warps,
        num_stages=tile.stages,
        FORMAT=form,
        OVERLAPS=arrived is not None and _overlap(rows.device)["OVERLAPS"],
    )
    return out_SPI


def _precision(rows: Tensor) -> str:
    return "ieee" if rows.dtype == torch.float32 else "tf32"
