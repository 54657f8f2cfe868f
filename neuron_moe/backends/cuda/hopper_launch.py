"""Launches of the products for Hopper GPUs.

Axes: T tokens, K choices, E experts, R rows, H hidden, I intermediate.
"""

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from neuron_moe.backends.cuda.products import BLOCK_DEPTH, BLOCK_ROWS, Product
from neuron_moe.backends.cuda.records import Results, SortedRows, kernel_formula
from neuron_moe.backends.cuda.tiles import HopperTile
from nki_kernels.common.formula import ExpertFormula


@cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Tell whether a device multiplies by warpgroups, and Triton has the language for it."""
    if device.type != "cuda" or importlib.util.find_spec("triton.experimental.gluon") is None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def fits(rows: SortedRows, *operands: Tensor) -> bool:
    """Tell whether operands of a product are ones that the kernels take."""
    device = operands[0].device
    if rows.rows != BLOCK_ROWS or not has_hopper_kernels(device):
        return False
    return all(_is_tiled(operand) for operand in operands)


def _is_tiled(operand: Tensor) -> bool:
    """Tell whether all but rows are whole steps, 16 bits wide, and are side by side."""
    whole = operand if operand.is_contiguous() else operand.transpose(-1, -2)
    is_whole = whole.is_contiguous() and operand.data_ptr() % 16 == 0
    return is_whole and takes(operand.dtype, *operand.shape[1:])


def takes(dtype: torch.dtype, *sizes: int) -> bool:
    """Tell whether the kernels multiply a dtype, and axes of these sizes."""
    return dtype.itemsize == 2 and all(size % BLOCK_DEPTH == 0 for size in sizes)


def project(
    rows: SortedRows,
    source: Tensor,
    matrix: Tensor,
    results: Results,
    *,
    tile: HopperTile,
    gathers: bool,
    first_tile: int,
    bias: Tensor | None,
    formula: ExpertFormula | None,
) -> None:
    """Multiply rows with their experts' matrices; see `hopper.multiply`."""
    out, kept, copied = results
    num_experts, depth, width = matrix.shape
    is_transposed = matrix.stride(2) != 1
    keeps = 0 if kept is None else kept.shape[0] // rows.rows
    product = Product(
        tile,
        num_experts,
        0,
        depth,
        width,
        rows.top_k,
        _programs(source.device),
        kernel_formula(formula or ExpertFormula()),
        gathers="left" if gathers else "none",
        right_is_transposed=is_transposed,
        has_bias=bias is not None,
        activates=formula is not None,
        keeps=keeps > 0,
        copies=copied is not None,
    )
    whole = (
        matrix.transpose(1, 2).reshape(-1, depth) if is_transposed else matrix.reshape(-1, width)
    )
    kept_desc = out_desc = _describe(out, product.stored_block)
    if kept is not None and keeps:
        kept_rows, kept_columns = product.stored_block
        kept_desc = (
            _describe(kept.view(-1, 2, width // 2), [kept_rows, 1, kept_columns])
            if product.is_paired
            else _describe(kept, product.stored_block)
        )
    described = (
        _describe(source, product.left_block),
        _describe(whole, product.right_block),
        out_desc,
        kept_desc,
        _describe(source if copied is None else copied, product.left_block),
    )
    _multiply(rows, product, described, source, bias, first_tile, keeps)


def transposed(
    rows: SortedRows,
    left: Tensor,
    right: Tensor,
    out: Tensor,
    *,
    tile: HopperTile,
    gathers: tuple[bool, bool],
) -> None:
    """Multiply each expert's rows of `left`, transposed, by its rows of `right`: [E, ., .]."""
    num_experts, height, width = out.shape
    product = Product(
        tile,
        num_experts,
        height,
        0,
        width,
        rows.top_k,
        _programs(left.device),
        kernel_formula(ExpertFormula()),
        gathers="left" if gathers[0] else "right" if gathers[1] else "none",
        sums_rows=True,
    )
    out_desc = _describe(out, [1, *product.stored_block])
    operands = (_describe(left, product.left_block), _describe(right, product.right_block))
    gathered = right if gathers[1] else left
    _multiply(rows, product, (*operands, out_desc, out_desc, out_desc), gathered, None, 0, 0)


def _multiply(
    rows: SortedRows,
    product: Product,
    described: tuple[Any, ...],
    gathered: Tensor,
    bias: Tensor | None,
    first_tile: int,
    kept_tiles: int,
) -> None:
    from neuron_moe.backends.cuda import hopper

    hopper.multiply[(product.programs,)](
        *described,
        gathered,
        rows.pair_R,
        bias,
        rows.tile_expert,
        rows.num_tiles,
        rows.first_tile_E,
        rows.total_E,
        first_tile,
        kept_tiles,
        P=product,
        num_warps=4,
    )


@cache
def _programs(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _describe(tensor: Tensor, block: list[int]) -> Any:
    """Return a tensor as TMA reads it, in blocks."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _layout(tuple(block), tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    import triton.language as tl
    from triton.experimental.gluon.language import NVMMASharedLayout

    kind = tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
    return NVMMASharedLayout.get_default_for(list(block), kind)
