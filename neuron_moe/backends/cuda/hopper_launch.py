"""Launches of the products for Hopper GPUs.

Axes: T tokens, K choices, E experts, R rows, H hidden, I intermediate.
"""

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuron_moe.backends.cuda.tiles import HopperTile

if TYPE_CHECKING:
    from neuron_moe.backends.cuda.launch import SortedRows

_BLOCK_ROWS, _BLOCK_DEPTH = 128, 64


@cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Tell whether a device multiplies by warpgroups, and Triton has the language for it."""
    if device.type != "cuda" or importlib.util.find_spec("triton.experimental.gluon") is None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def fits(rows: "SortedRows", *operands: Tensor) -> bool:
    """Tell whether operands of a product are ones that the kernels take."""
    if rows.rows != _BLOCK_ROWS or not has_hopper_kernels(operands[0].device):
        return False
    return all(_is_tiled(operand) for operand in operands)


def _is_tiled(operand: Tensor) -> bool:
    """Tell whether all but rows are whole steps, 16 bits wide, and lie side by side."""
    sizes = operand.shape[1:]
    whole = operand if operand.is_contiguous() else operand.transpose(-1, -2)
    return (
        operand.element_size() == 2
        and all(size % _BLOCK_DEPTH == 0 for size in sizes)
        and whole.is_contiguous()
        and operand.data_ptr() % 16 == 0
    )


def project(
    rows: "SortedRows", source: Tensor, matrix: Tensor, out: Tensor, *, tile: HopperTile,
    gathers: bool, first_tile: int, bias: Tensor | None, kept: Tensor | None,
    constants: dict[str, Any], activates: bool,
) -> None:  # fmt: skip
    """Multiply rows with their experts' matrices; see `hopper.multiply`."""
    num_experts, depth, width = matrix.shape
    is_turned = matrix.stride(2) != 1
    is_paired = activates and constants["HAS_GATE"]
    span = tile.width // 2 if is_paired else tile.width
    if is_turned:
        whole, block = matrix.transpose(1, 2).reshape(-1, depth), [tile.width, _BLOCK_DEPTH]
    else:
        whole, block = matrix.reshape(-1, width), [_BLOCK_DEPTH, span]
    keeps = 0 if kept is None else kept.shape[0] // rows.rows
    staged = _staged(tile)
    out_desc = _describe(out, staged)
    kept_desc = out_desc
    if kept is not None and keeps:
        kept_desc = _describe(kept, staged)
        if is_paired:
            kept_desc = _describe(kept.view(-1, 2, width // 2), [staged[0], 1, staged[1]])
    _multiply(
        rows, tile, _describe(source, [_BLOCK_ROWS, _BLOCK_DEPTH]), _describe(whole, block), out_desc,
        kept_desc, source, bias, first_tile, keeps, LEFT=0, DEPTH=depth, WIDTH=width,
        NUM_EXPERTS=num_experts, GATHERS=int(gathers), TURNED=False, RIGHT_TURNED=is_turned,
        PAIRED=is_paired, HAS_BIAS=bias is not None, ACTIVATES=activates, KEEPS=keeps > 0, **constants,
    )  # fmt: skip


def turned(
    rows: "SortedRows", left: Tensor, right: Tensor, out: Tensor, *, tile: HopperTile,
    gathers: tuple[bool, bool], constants: dict[str, Any],
) -> None:  # fmt: skip
    """Multiply each expert's rows of `left`, turned, with its rows of `right`: out [E, ., .]."""
    num_experts, height, width = out.shape
    gathered = 1 if gathers[0] else 2 if gathers[1] else 0
    out_desc = _describe(out, [1, *_staged(tile)])
    _multiply(
        rows, tile, _describe(left, [_BLOCK_DEPTH, _BLOCK_ROWS]),
        _describe(right, [_BLOCK_DEPTH, tile.width]), out_desc, out_desc, right if gathers[1] else left,
        None, 0, 0, LEFT=height, DEPTH=_BLOCK_DEPTH, WIDTH=width, NUM_EXPERTS=num_experts,
        GATHERS=gathered, TURNED=True, RIGHT_TURNED=False, PAIRED=False, HAS_BIAS=False,
        ACTIVATES=False, KEEPS=False, **constants,
    )  # fmt: skip


def _staged(tile: HopperTile) -> list[int]:
    """Return the block that one store takes."""
    return [_BLOCK_ROWS // tile.consumers, tile.width // 2 // tile.pieces]


def _multiply(
    rows: "SortedRows", tile: HopperTile, left_desc: Any, right_desc: Any, out_desc: Any, kept_desc: Any,
    gathered: Tensor, bias: Tensor | None, first_tile: int, keeps: int, **constants: Any,
) -> None:  # fmt: skip
    from neuron_moe.backends.cuda import hopper

    programs = torch.cuda.get_device_properties(gathered.device).multi_processor_count
    hopper.multiply[(programs,)](
        left_desc, right_desc, out_desc, kept_desc, gathered, rows.pair_R, bias, rows.tile_expert,
        rows.num_tiles, rows.first_tile_E, rows.total_E, first_tile, keeps, TOP_K=rows.top_k, **constants,
        BLOCK_WIDTH=tile.width, BLOCK_DEPTH=_BLOCK_DEPTH, GROUP=tile.group, PROGRAMS=programs,
        STAGES=tile.stages, LAG=tile.lag, SKEW=tile.skew, PIECES=tile.pieces, CONSUMERS=tile.consumers,
        PRODUCER_WARPS=tile.producer_warps, num_warps=8 // tile.consumers,
    )  # fmt: skip


def _describe(tensor: Tensor, block: list[int]) -> Any:
    """Return a tensor as TMA reads it, in blocks."""
    import triton.language as tl
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    kind = tl.bfloat16 if tensor.dtype == torch.bfloat16 else tl.float16
    layout = NVMMASharedLayout.get_default_for(block, kind)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)
