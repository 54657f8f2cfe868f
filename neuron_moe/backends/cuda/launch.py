"""Launches of the kernels: sort, forward and backward of the experts.

Axes: T tokens, K choices, P pairs, E experts, R rows, H hidden, I intermediate.
"""

from functools import cache

import torch
import triton
from torch import Tensor

from neuron_moe.backends.cuda import decode, hopper_launch, kernels
from neuron_moe.backends.cuda.records import Matrices, SortedRows, constants_of
from neuron_moe.backends.cuda.tiles import (
    MOST_PAIRS_UNSORTED,
    HopperTile,
    Tile,
    hopper_tile,
    product_tile,
    rows_of_tile,
    turned_tile,
)
from neuron_moe.blocks import num_blocks
from nki_kernels.common.formula import ExpertFormula

_CHUNK = 128  # pairs that one program sorts
_ELEMENTWISE_ROWS, _ELEMENTWISE_COLUMNS = 8, 256
_COPIED_ROWS, _COPIED_COLUMNS = 8, 512
_INTERPRETED_PROGRAMS = 3
_MOST_WARPS = 8  # of a program; with fewer, several run on a multiprocessor


def most_tiles(num_tokens: int, top_k: int, num_experts: int) -> tuple[int, int]:
    """Return the most row tiles any routing needs, and the rows of a tile."""
    rows = rows_of_tile(num_tokens * top_k, num_experts)
    return num_blocks(num_tokens, top_k, num_experts, rows), rows


def kept_tiles(num_tokens: int, top_k: int, num_experts: int, save_percent: int) -> int:
    """Return the row tiles whose first product is kept."""
    return most_tiles(num_tokens, top_k, num_experts)[0] * save_percent // 100


def sort_rows(index_TK: Tensor, num_experts: int) -> SortedRows:
    """Sort the pairs by expert without asking the device; pairs of an expert keep their order."""
    num_tokens, top_k = index_TK.shape
    tiles, rows = most_tiles(num_tokens, top_k, num_experts)
    num_pairs = num_tokens * top_k
    num_chunks = max(1, triton.cdiv(num_pairs, _CHUNK))
    bins = triton.next_power_of_2(num_experts + 1)

    def make(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=index_TK.device)

    rank_P, slot_P, counts_CE, offset_CE = (
        make(num_pairs), make(num_pairs), make(num_chunks, num_experts),
        make(num_chunks, num_experts),
    )  # fmt: skip
    total_E, first_tile_E, tile_expert, used = (
        make(num_experts), make(num_experts), make(tiles), make(1),
    )  # fmt: skip
    pair_R = make(tiles * rows).fill_(-1)
    index_P = index_TK.reshape(-1).contiguous()
    kernels.rank_pairs[(num_chunks,)](
        index_P, rank_P, counts_CE, num_pairs, num_experts, CHUNK=_CHUNK, BINS=bins
    )
    kernels.sum_chunks[(num_experts,)](
        counts_CE, offset_CE, total_E, num_chunks, num_experts,
        CHUNKS=triton.next_power_of_2(num_chunks),
    )  # fmt: skip
    kernels.place_pairs[(num_chunks,)](
        index_P, rank_P, offset_CE, total_E, pair_R, slot_P, tile_expert,
        first_tile_E, used, num_pairs, num_experts, tiles, CHUNK=_CHUNK, BINS=bins, BLOCK_ROWS=rows,
        TILES=triton.next_power_of_2(triton.cdiv(tiles, num_chunks)),
    )  # fmt: skip
    return SortedRows(pair_R, slot_P, tile_expert, first_tile_E, total_E, used, rows, top_k)


def forward(
    hidden_TH: Tensor, affinities_TK: Tensor, index_TK: Tensor, weights: Matrices,
    formula: ExpertFormula, save_percent: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output [T, H] and the kept rows of the first product."""
    num_experts, H, width = weights.first_EHI.shape
    I = weights.down_EIH.shape[1]  # noqa: E741  the axis
    num_tokens, top_k = index_TK.shape
    keeps = kept_tiles(num_tokens, top_k, num_experts, save_percent)
    if keeps == 0 and num_tokens * top_k <= MOST_PAIRS_UNSORTED:
        output_TH = decode.forward(hidden_TH, affinities_TK, index_TK, weights, formula)
        return output_TH, hidden_TH.new_empty((0, width))
    rows = sort_rows(index_TK, num_experts)
    num_rows = rows.pair_R.shape[0]
    kept = hidden_TH.new_empty((keeps * rows.rows, width))
    middle_RI = hidden_TH.new_empty((num_rows, I))
    _project(hopper_tile("first", H, I), rows, hidden_TH, weights.first_EHI, middle_RI,
             gathers=True, formula=formula, bias=weights.first_bias_EI, kept=kept)  # fmt: skip
    output_RH = hidden_TH.new_empty((num_rows, H))
    _project(hopper_tile("second", H, I), rows, middle_RI, weights.down_EIH, output_RH,
             bias=weights.down_bias_EH)  # fmt: skip
    output_TH = torch.empty_like(hidden_TH)
    _combine(rows, output_RH, output_TH, affinities_TK)
    return output_TH, kept


def backward(
    gradient_TH: Tensor, inputs: tuple[Tensor, Tensor, Tensor, Tensor], weights: Matrices,
    formula: ExpertFormula, save_percent: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of hidden states, affinities, and weights with biases.

    Args:
        gradient_TH: of the output.
        inputs: hidden states, affinities, index, and what was kept.
        weights: of the experts.
        formula: of the experts.
        save_percent: as in the forward pass.
    """
    hidden_TH, affinities_TK, index_TK, kept = inputs
    num_experts, H, width = weights.first_EHI.shape
    I = weights.down_EIH.shape[1]  # noqa: E741  the axis
    num_tokens, top_k = index_TK.shape
    keeps = kept_tiles(num_tokens, top_k, num_experts, save_percent)
    rows = sort_rows(index_TK, num_experts)
    num_rows = rows.pair_R.shape[0]
    gradient_TH = gradient_TH.to(hidden_TH.dtype).contiguous()
    fresh = hidden_TH.new_empty((num_rows - kept.shape[0], width))
    if fresh.shape[0]:
        _project(hopper_tile("first", H, I), rows, hidden_TH, weights.first_EHI, fresh,
                 gathers=True, first_tile=keeps, bias=weights.first_bias_EI)  # fmt: skip
    back_RI = hidden_TH.new_empty((num_rows, I))
    first_EIH, down_EHI = weights.first_EHI.transpose(1, 2), weights.down_EIH.transpose(1, 2)
    _project(hopper_tile("second_back", H, I), rows, gradient_TH, down_EHI, back_RI, gathers=True)
    product_RI, middle_RI = hidden_TH.new_empty((num_rows, width)), torch.empty_like(back_RI)
    affinity_TK = torch.zeros_like(affinities_TK)
    grid = (num_rows // _ELEMENTWISE_ROWS,)
    kernels.differentiate[grid](
        back_RI, kept, fresh, rows.pair_R, affinities_TK, gradient_TH, weights.down_bias_EH,
        rows.tile_expert, rows.num_tiles, product_RI, middle_RI, affinity_TK, keeps,
        H=H, I=I, TOP_K=top_k, HAS_BIAS=weights.down_bias_EH is not None,
        **constants_of(formula), BLOCK_ROWS=rows.rows, ROWS=_ELEMENTWISE_ROWS,
        BLOCK=min(_ELEMENTWISE_COLUMNS, triton.next_power_of_2(max(H, I))),
    )  # fmt: skip
    del back_RI, fresh
    # In this order, so that rows of H are freed before gradients of weights are there.
    rows_RH = hidden_TH.new_empty((num_rows, H))
    _project(hopper_tile("first_back", H, I), rows, product_RI, first_EIH, rows_RH)
    hidden = torch.empty_like(hidden_TH)
    _combine(rows, rows_RH, hidden, None)
    del rows_RH
    tile = hopper_tile("first_weights", H, I)
    first = _turned(tile, rows, (hidden_TH, product_RI), num_experts, gathered=0)
    first_bias = _sums(rows, product_RI, weights.first_bias_EI, None)
    del product_RI
    tile = hopper_tile("second_weights", H, I)
    down = _turned(tile, rows, (middle_RI, gradient_TH), num_experts, gathered=1)
    down_bias = _sums(rows, gradient_TH, weights.down_bias_EH, affinities_TK)
    return hidden, affinity_TK, first, first_bias, down, down_bias


def _project(
    hopper: HopperTile, rows: SortedRows, source: Tensor, matrix: Tensor, out: Tensor, *,
    gathers: bool = False, first_tile: int = 0, formula: ExpertFormula | None = None,
    bias: Tensor | None = None, kept: Tensor | None = None,
) -> None:  # fmt: skip
    _, depth, width = matrix.shape
    if hopper_launch.fits(rows, source, matrix, out):
        hopper_launch.project(
            rows, source, matrix, out, tile=hopper, gathers=gathers,
            first_tile=first_tile, bias=bias, kept=kept, formula=formula,
        )  # fmt: skip
        return
    tile = product_tile(rows.rows, source.element_size())
    keeps = 0 if kept is None else kept.shape[0] // rows.rows
    programs = _programs(source.device) * (_MOST_WARPS // tile.warps)
    kernels.project[(programs,)](
        source, rows.pair_R, matrix, bias, out, kept, rows.tile_expert, rows.num_tiles, first_tile,
        keeps, *matrix.stride(), DEPTH=depth, WIDTH=width, TOP_K=rows.top_k, GATHERS=gathers,
        HAS_BIAS=bias is not None, ACTIVATES=formula is not None, KEEPS=keeps > 0,
        **constants_of(formula or ExpertFormula()), BLOCK_ROWS=rows.rows,
        **_fitted(tile, depth, width), PROGRAMS=programs, PRECISION=_precision(source),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _fitted(tile: Tile, depth: int, width: int) -> dict[str, int]:
    """Return a tile's sizes, no larger than the product needs."""
    return {
        "BLOCK_WIDTH": min(tile.width, max(32, triton.next_power_of_2(width))),
        "BLOCK_DEPTH": min(tile.depth, max(16, triton.next_power_of_2(depth))),
        "GROUP": tile.group,
    }


def _combine(rows: SortedRows, rows_RH: Tensor, out: Tensor, weights_TK: Tensor | None) -> None:
    num_tokens, H = out.shape
    block = min(1024, triton.next_power_of_2(H))
    kernels.combine_rows[(num_tokens, triton.cdiv(H, block))](
        rows_RH, rows.slot_P, weights_TK, out, H=H, TOP_K=rows.top_k,
        HAS_WEIGHTS=weights_TK is not None, BLOCK=block,
    )  # fmt: skip


def _turned(
    hopper: HopperTile,
    rows: SortedRows,
    sides: tuple[Tensor, Tensor],
    num_experts: int,
    *,
    gathered: int,
) -> Tensor:
    """Return each expert's left rows, turned, times its right rows; one side is read by token."""
    left, right = sides
    widths = left.shape[1], right.shape[1]
    out = left.new_empty((num_experts, *widths))
    gathers = (gathered == 0, gathered == 1)
    if hopper_launch.fits(rows, left, right, out):
        if not hopper.gathers:
            left, right = (copy_rows(rows, side) if has else side
                           for side, has in zip(sides, gathers, strict=True))  # fmt: skip
            gathers = (False, False)
        hopper_launch.turned(rows, left, right, out, tile=hopper, gathers=gathers)
        return out
    tile = turned_tile(rows.rows, left.element_size())
    programs = _programs(left.device) * (_MOST_WARPS // tile.warps)
    kernels.multiply_turned[(programs,)](
        left, right, rows.pair_R, rows.first_tile_E, rows.total_E, out, LEFT=widths[0],
        RIGHT=widths[1], TOP_K=rows.top_k, NUM_EXPERTS=num_experts, GATHERS_LEFT=gathers[0],
        GATHERS_RIGHT=gathers[1], ROWS_PER_TILE=rows.rows, BLOCK_LEFT=tile.rows,
        BLOCK_RIGHT=tile.width, BLOCK_ROWS=tile.depth, GROUP=tile.group, PROGRAMS=programs,
        PRECISION=_precision(left), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def copy_rows(rows: SortedRows, source: Tensor) -> Tensor:
    """Return the tokens of the rows, [R, H]; padding is zeros where its tile is in use."""
    num_rows, H = rows.pair_R.shape[0], source.shape[1]
    out = source.new_empty((num_rows, H))
    block = min(_COPIED_COLUMNS, triton.next_power_of_2(H))
    kernels.copy_rows[(num_rows // _COPIED_ROWS, triton.cdiv(H, block))](
        source, rows.pair_R, rows.num_tiles, out, H=H, TOP_K=rows.top_k, BLOCK_ROWS=rows.rows,
        ROWS=_COPIED_ROWS, BLOCK=block,
    )  # fmt: skip
    return out


def _sums(
    rows: SortedRows, source: Tensor, bias: Tensor | None, weights_TK: Tensor | None
) -> Tensor:
    """Return the gradient of a bias; an empty tensor where there is none."""
    if bias is None:
        return source.new_empty(0)
    num_experts, width = bias.shape
    out, block = torch.empty_like(bias), min(128, triton.next_power_of_2(width))
    kernels.sum_rows[(num_experts, triton.cdiv(width, block))](
        source, rows.pair_R, weights_TK, rows.first_tile_E, rows.total_E, out, WIDTH=width,
        TOP_K=rows.top_k, GATHERS=weights_TK is not None, ROWS_PER_TILE=rows.rows,
        BLOCK_ROWS=min(32, rows.rows), BLOCK=block,
    )  # fmt: skip
    return out


def _precision(source: Tensor) -> str:
    return "ieee" if source.dtype == torch.float32 else "tf32"


@cache
def _programs(device: torch.device) -> int:
    """Return the multiprocessors, for each of which a persistent kernel has its programs."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
