"""Launches of the kernels: sort, forward and backward of the experts.

Axes: T tokens, K choices, P pairs, E experts, R rows, H hidden, I intermediate.
"""

from functools import cache

import torch
import triton
from torch import Tensor

from neuron_moe.backends.cuda import codes_kernels, decode, hopper_launch, kernels
from neuron_moe.backends.cuda.records import Matrices, Results, SortedRows, form_of, kernel_formula
from neuron_moe.backends.cuda.tiles import (
    MOST_PAIRS_UNSORTED,
    HopperTile,
    Tile,
    elementwise_tile,
    hopper_tile,
    product_tile,
    rows_of_tile,
    transposed_tile,
)
from neuron_moe.blocks import num_blocks
from neuron_moe.weights.narrow import MXFP4
from nki_kernels.common.formula import ExpertFormula, num_projections

_CHUNK = 128  # pairs that one program sorts
_ALIGNED = 4  # elements of 16 bytes
_COPIED_COLUMNS, _FILLED_ROWS = 1024, 8
_DECODED_LINES, _DECODED_COLUMNS = 32, 256
_FEWEST_FP8_ROWS = 256  # of an expert, the fewest measured on an H200 where whole matrices pay
_INTERPRETED_PROGRAMS = 3
_MOST_WARPS = 8  # of a program; with fewer, several run on a multiprocessor


def most_tiles(num_tokens: int, top_k: int, num_experts: int) -> tuple[int, int]:
    """Return the most row tiles any routing needs, and the rows of a tile."""
    rows = rows_of_tile(num_tokens * top_k, num_experts)
    return num_blocks(num_tokens, top_k, num_experts, rows), rows


def kept_tiles(num_tokens: int, top_k: int, num_experts: int, save_percent: int) -> int:
    """Return the row tiles whose first product is kept."""
    return most_tiles(num_tokens, top_k, num_experts)[0] * save_percent // 100


def order_size(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Return the elements of the order that `sort_rows` finds."""
    return sum(_order_sizes(num_tokens, top_k, num_experts))


def _order_sizes(num_tokens: int, top_k: int, num_experts: int) -> list[int]:
    """Return the elements of a SortedRows' tensors, in its order, each from 16 bytes on."""
    tiles, rows = most_tiles(num_tokens, top_k, num_experts)
    sizes = [tiles * rows, num_tokens * top_k, tiles, num_experts, num_experts, 1]
    return [triton.cdiv(size, _ALIGNED) * _ALIGNED for size in sizes]


def view_order(order: Tensor, index_TK: Tensor, num_experts: int) -> SortedRows:
    """Return the parts of an order."""
    num_tokens, top_k = index_TK.shape
    tiles, rows = most_tiles(num_tokens, top_k, num_experts)
    parts = torch.split(order, _order_sizes(num_tokens, top_k, num_experts))
    pair_R, slot_P, tile_expert, first_tile_E, total_E, used = parts
    return SortedRows(
        order,
        pair_R,
        slot_P[: num_tokens * top_k],
        tile_expert[:tiles],
        first_tile_E[:num_experts],
        total_E[:num_experts],
        used[:1],
        rows,
        top_k,
    )


def sort_rows(index_TK: Tensor, num_experts: int) -> SortedRows:
    """Sort the pairs by expert without asking the device; pairs of an expert keep their order."""
    num_tokens, top_k = index_TK.shape
    num_pairs = num_tokens * top_k
    num_chunks = max(1, triton.cdiv(num_pairs, _CHUNK))
    bins = triton.next_power_of_2(num_experts + 1)

    def make(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=index_TK.device)

    found = view_order(make(order_size(num_tokens, top_k, num_experts)), index_TK, num_experts)
    counts_CE, offset_CE = make(num_chunks, num_experts), make(num_chunks, num_experts)
    rank_P, num_rows, tiles = make(num_pairs), found.pair_R.shape[0], found.tile_expert.shape[0]
    index_P = index_TK.reshape(-1).contiguous()
    kernels.rank_pairs[(num_chunks,)](
        index_P,
        rank_P,
        counts_CE,
        found.pair_R,
        num_pairs,
        num_experts,
        num_rows,
        CHUNK=_CHUNK,
        BINS=bins,
        ROWS=triton.next_power_of_2(triton.cdiv(num_rows, num_chunks)),
    )
    kernels.sum_chunks[(num_experts,)](
        counts_CE,
        offset_CE,
        found.total_E,
        num_chunks,
        num_experts,
        CHUNKS=triton.next_power_of_2(num_chunks),
    )
    kernels.place_pairs[(num_chunks,)](
        index_P,
        rank_P,
        offset_CE,
        found.total_E,
        found.pair_R,
        found.slot_P,
        found.tile_expert,
        found.first_tile_E,
        found.num_tiles,
        num_pairs,
        num_experts,
        tiles,
        CHUNK=_CHUNK,
        BINS=bins,
        BLOCK_ROWS=found.rows,
        TILES=triton.next_power_of_2(triton.cdiv(tiles, num_chunks)),
    )
    return found


def forward(
    hidden_TH: Tensor,
    affinities_TK: Tensor,
    index_TK: Tensor,
    weights: Matrices,
    formula: ExpertFormula,
    save_percent: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output [T, H], kept rows of the first product, and, with these, the order."""
    num_experts, _, width = weights.first_EHI.shape
    H, I = hidden_TH.shape[1], width // num_projections(formula)  # noqa: E741  the axis
    num_tokens, top_k = index_TK.shape
    keeps = kept_tiles(num_tokens, top_k, num_experts, save_percent)
    if keeps == 0 and num_tokens * top_k <= MOST_PAIRS_UNSORTED:
        output_TH = decode.forward(hidden_TH, affinities_TK, index_TK, weights, formula)
        return output_TH, hidden_TH.new_empty((0, width)), index_TK.new_empty(0)
    rows = sort_rows(index_TK, num_experts)
    num_rows = rows.pair_R.shape[0]
    kept = hidden_TH.new_empty((keeps * rows.rows, width))
    middle_RI = hidden_TH.new_empty((num_rows, I))
    _project(
        hopper_tile("first", H, I),
        rows,
        hidden_TH,
        weights.first_EHI,
        Results(middle_RI, kept),
        gathers=True,
        formula=formula,
        bias=weights.first_bias_EI,
        scale=weights.first_scale,
    )
    output_RH = hidden_TH.new_empty((num_rows, H))
    _project(
        hopper_tile("second", H, I),
        rows,
        middle_RI,
        weights.down_EIH,
        Results(output_RH),
        bias=weights.down_bias_EH,
        scale=weights.down_scale,
    )
    output_TH = torch.empty_like(hidden_TH)
    _combine(rows, output_RH, output_TH, affinities_TK)
    return output_TH, kept, rows.order if keeps else index_TK.new_empty(0)


def backward(
    gradient_TH: Tensor,
    inputs: tuple[Tensor, ...],
    weights: Matrices,
    formula: ExpertFormula,
    save_percent: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of hidden states, affinities, and weights with biases.

    Args:
        gradient_TH: of the output.
        inputs: hidden states, affinities, index, and what was kept: rows and their order.
        weights: of the experts.
        formula: of the experts.
        save_percent: as in the forward pass.
    """
    hidden_TH, affinities_TK, index_TK, kept, order = inputs
    num_experts, H, _ = weights.first_EHI.shape
    I = weights.down_EIH.shape[1]  # noqa: E741  the axis
    is_sorted = order.shape[0] > 0
    rows = (
        view_order(order, index_TK, num_experts) if is_sorted else sort_rows(index_TK, num_experts)
    )
    gradient_TH = gradient_TH.to(hidden_TH.dtype).contiguous()
    product_RI, middle_RI, copied_RH, affinity_TK = _middle_gradients(
        gradient_TH, (hidden_TH, affinities_TK, kept), rows, weights, formula
    )
    # In this order, so that rows of H are freed before the gradients of first weights are there.
    down = _transposed(
        hopper_tile("second_weights", H, I),
        rows,
        (middle_RI, gradient_TH),
        num_experts,
        gathered=1,
        copied=copied_RH,
    )
    down_bias = _sums(rows, gradient_TH, weights.down_bias_EH, affinities_TK)
    del middle_RI, copied_RH
    rows_RH = hidden_TH.new_empty((rows.pair_R.shape[0], H))
    _project(
        hopper_tile("first_back", H, I),
        rows,
        product_RI,
        weights.first_EHI.transpose(1, 2),
        Results(rows_RH),
    )
    hidden = torch.empty_like(hidden_TH)
    _combine(rows, rows_RH, hidden, None)
    del rows_RH
    tile = hopper_tile("first_weights", H, I)
    copies = is_sorted and not tile.gathers and hopper_launch.fits(rows, hidden_TH, product_RI)
    first = _transposed(
        tile,
        rows,
        (hidden_TH, product_RI),
        num_experts,
        gathered=0,
        copied=copy_rows(rows, hidden_TH) if copies else None,
    )
    first_bias = _sums(rows, product_RI, weights.first_bias_EI, None)
    return hidden, affinity_TK, first, first_bias, down, down_bias


def _middle_gradients(
    gradient_TH: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    rows: SortedRows,
    weights: Matrices,
    formula: ExpertFormula,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the first product's gradients, weighted activations, copied rows, the affinities'.

    Args:
        gradient_TH: of the output.
        inputs: hidden states, affinities, and rows that were kept.
        rows: in their order.
        weights: of the experts.
        formula: of the experts.
    """
    hidden_TH, affinities_TK, kept = inputs
    _, H, width = weights.first_EHI.shape
    I = weights.down_EIH.shape[1]  # noqa: E741  the axis
    num_rows, keeps = rows.pair_R.shape[0], kept.shape[0] // rows.rows
    fresh = hidden_TH.new_empty((num_rows - kept.shape[0], width))
    if fresh.shape[0]:
        _project(
            hopper_tile("first", H, I),
            rows,
            hidden_TH,
            weights.first_EHI,
            Results(fresh),
            gathers=True,
            first_tile=keeps,
            bias=weights.first_bias_EI,
        )
    back_RI, down_EHI = hidden_TH.new_empty((num_rows, I)), weights.down_EIH.transpose(1, 2)
    copied_RH = None
    if hopper_launch.fits(rows, gradient_TH, down_EHI, back_RI):
        copied_RH = hidden_TH.new_empty((num_rows, H))
    _project(
        hopper_tile("second_back", H, I),
        rows,
        gradient_TH,
        down_EHI,
        Results(back_RI, copied=copied_RH),
        gathers=True,
    )
    product_RI, middle_RI = hidden_TH.new_empty((num_rows, width)), torch.empty_like(back_RI)
    affinity_TK = torch.zeros_like(affinities_TK)
    line, height, warps = elementwise_tile(I)
    kernels.differentiate[(num_rows // height,)](
        back_RI,
        kept,
        fresh,
        rows.pair_R,
        affinities_TK,
        gradient_TH,
        weights.down_bias_EH,
        rows.tile_expert,
        rows.num_tiles,
        product_RI,
        middle_RI,
        affinity_TK,
        keeps,
        H=H,
        I=I,
        TOP_K=rows.top_k,
        HAS_BIAS=weights.down_bias_EH is not None,
        FORMULA=kernel_formula(formula),
        BLOCK_ROWS=rows.rows,
        ROWS=height,
        BLOCK=line,
        num_warps=warps,
    )
    return product_RI, middle_RI, copied_RH, affinity_TK


def _project(
    hopper: HopperTile,
    rows: SortedRows,
    source: Tensor,
    matrix: Tensor,
    results: Results,
    *,
    gathers: bool = False,
    first_tile: int = 0,
    formula: ExpertFormula | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:
    out, kept, _ = results
    if scale is not None and decodes_whole(rows, matrix) and hopper_launch.fits(rows, source, out):
        matrix, scale = decode_matrices(matrix, scale, source.dtype), None
    values, form = form_of(matrix)
    depth, width = source.shape[1], matrix.shape[2]
    if hopper_launch.fits(rows, source, matrix, out):
        hopper_launch.project(
            rows,
            source,
            matrix,
            results,
            tile=hopper,
            gathers=gathers,
            first_tile=first_tile,
            bias=bias,
            formula=formula,
        )
        return
    tile = product_tile(rows.rows, source.element_size())
    keeps = 0 if kept is None else kept.shape[0] // rows.rows
    programs = _programs(source.device) * (_MOST_WARPS // tile.warps)
    kernels.project[(programs,)](
        source,
        rows.pair_R,
        values,
        scale,
        bias,
        out,
        kept,
        rows.tile_expert,
        rows.num_tiles,
        first_tile,
        keeps,
        *values.stride(),
        DEPTH=depth,
        WIDTH=width,
        TOP_K=rows.top_k,
        GATHERS=gathers,
        FORMAT=form,
        HAS_BIAS=bias is not None,
        ACTIVATES=formula is not None,
        KEEPS=keeps > 0,
        FORMULA=kernel_formula(formula or ExpertFormula()),
        BLOCK_ROWS=rows.rows,
        **_fitted(tile, values.shape[1], width),
        PROGRAMS=programs,
        PRECISION=_precision(source),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def decodes_whole(rows: SortedRows, codes: Tensor) -> bool:
    """Tell whether decoding whole matrices pays: of MXFP4 always, of fp8 for many rows an expert.

    Args:
        rows: in their order.
        codes: of all experts.
    """
    mean = rows.slot_P.shape[0] / rows.total_E.shape[0]
    return form_of(codes).format == MXFP4 or mean >= _FEWEST_FP8_ROWS


def decode_matrices(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrices of codes, [E, depth, width], see `Matrices`."""
    values, form = form_of(codes)
    num_experts, lines, width = values.shape
    depth = 2 * lines if form == MXFP4 else lines
    out = torch.empty((num_experts, depth, width), dtype=dtype, device=codes.device)
    block = min(_DECODED_COLUMNS, triton.next_power_of_2(width))
    grid = num_experts, triton.cdiv(lines, _DECODED_LINES), triton.cdiv(width, block)
    codes_kernels.decode_lines[grid](
        values,
        scale,
        out,
        *values.stride(),
        DEPTH=depth,
        WIDTH=width,
        BLOCK_DEPTH=_DECODED_LINES,
        BLOCK_WIDTH=block,
        FORMAT=form,
    )
    return out


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
        rows_RH,
        rows.slot_P,
        weights_TK,
        out,
        H=H,
        TOP_K=rows.top_k,
        HAS_WEIGHTS=weights_TK is not None,
        BLOCK=block,
    )


def _transposed(
    hopper: HopperTile,
    rows: SortedRows,
    sides: tuple[Tensor, Tensor],
    num_experts: int,
    *,
    gathered: int,
    copied: Tensor | None,
) -> Tensor:
    """Return each expert's left rows, transposed, times its right rows.

    One side is read by token, or, in the order of the rows, from a copy.
    """
    left, right = sides
    widths = left.shape[1], right.shape[1]
    out = left.new_empty((num_experts, *widths))
    gathers = (gathered == 0, gathered == 1)
    if hopper_launch.fits(rows, left, right, out):
        if copied is not None:
            left, right = (left, copied) if gathered else (copied, right)
            gathers = (False, False)
        hopper_launch.transposed(rows, left, right, out, tile=hopper, gathers=gathers)
        return out
    tile = transposed_tile(rows.rows, left.element_size())
    programs = _programs(left.device) * (_MOST_WARPS // tile.warps)
    kernels.multiply_transposed[(programs,)](
        left,
        right,
        rows.pair_R,
        rows.first_tile_E,
        rows.total_E,
        out,
        LEFT=widths[0],
        RIGHT=widths[1],
        TOP_K=rows.top_k,
        NUM_EXPERTS=num_experts,
        GATHERS_LEFT=gathers[0],
        GATHERS_RIGHT=gathers[1],
        ROWS_PER_TILE=rows.rows,
        BLOCK_LEFT=tile.rows,
        BLOCK_RIGHT=tile.width,
        BLOCK_ROWS=tile.depth,
        GROUP=tile.group,
        PROGRAMS=programs,
        PRECISION=_precision(left),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def copy_rows(rows: SortedRows, source: Tensor) -> Tensor:
    """Return the tokens of the rows, [R, H]; padding is zeros where its tile is in use."""
    num_rows, (num_tokens, H) = rows.pair_R.shape[0], source.shape
    out = source.new_empty((num_rows, H))
    block = min(_COPIED_COLUMNS, triton.next_power_of_2(H))
    kernels.copy_rows[(num_tokens + num_rows // rows.rows, triton.cdiv(H, block))](
        source,
        rows.slot_P,
        rows.pair_R,
        rows.num_tiles,
        out,
        num_tokens,
        H=H,
        TOP_K=rows.top_k,
        BLOCK_ROWS=rows.rows,
        ROWS=_FILLED_ROWS,
        BLOCK=block,
    )
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
        source,
        rows.pair_R,
        weights_TK,
        rows.first_tile_E,
        rows.total_E,
        out,
        WIDTH=width,
        TOP_K=rows.top_k,
        GATHERS=weights_TK is not None,
        ROWS_PER_TILE=rows.rows,
        BLOCK_ROWS=min(32, rows.rows),
        BLOCK=block,
    )
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
