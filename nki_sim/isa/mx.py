"""MX formats on the Tensor and Vector engines (gen4): block-scaled matmul and quantisation.

A scale tile holds one byte per group of 8 partitions x 4 packed elements. Group g of quadrant q has
its byte in row 32 q + g of the scale view, whose first partition is 0, 4, 8 or 12 of a quadrant, so
that four scale tensors share a tile; the other rows are not touched. Links: nki.isa.nc_matmul_mx,
nki.isa.quantize_mx (NKI 0.6) and the MX guide (nki/deep-dives/mxfp-matmul.rst).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from nki_sim import dtypes
from nki_sim import trace as tr
from nki_sim.constants import nc_version
from nki_sim.dtypes import Array
from nki_sim.errors import IllegalOperand
from nki_sim.isa import mx_formats
from nki_sim.isa._checks import (
    check_dtype,
    check_elements,
    check_generation,
    check_memory,
    check_same_partitions,
    compute_facts,
)
from nki_sim.isa._instruction import instruction
from nki_sim.isa._products import matrix_product
from nki_sim.isa.tensor_engine import (
    accumulation,
    check_in_sbuf,
    check_in_tile,
    check_product,
    store_sum,
    tile_of,
)
from nki_sim.machine import Core, NkiInstruction, NkiTensor

_PACKED: Final = frozenset(
    (dtypes.float8_e4m3fn_x4, dtypes.float8_e5m2_x4, dtypes.float4_e2m1fn_x4)
)
_QUADRANT: Final = 32
_GROUPS_PER_QUADRANT: Final = _QUADRANT // mx_formats.GROUP_PARTITIONS
_SCALE_STARTS: Final = (0, 4, 8, 12)
_STATIONARY_MAX: Final = 128


def _scale_rows(operand: str, scale: Any, data: NkiTensor, columns: int) -> list[NkiTensor]:
    """Check a scale tile and return the four rows of each quadrant that hold its bytes."""
    check_memory(operand, scale, (tr.SBUF,))
    check_dtype(operand, scale, dtypes.uint8, dtypes.float8_e8m0fnu)
    check_elements(operand, scale, columns, "elements per partition, one per packed column")
    quadrants = data.geometry.partitions // _QUADRANT
    needed = _QUADRANT * (quadrants - 1) + _GROUPS_PER_QUADRANT
    if scale.geometry.partitions < needed:
        raise IllegalOperand(
            operand,
            f"at least {needed} partitions for {quadrants} quadrants of data",
            str(scale.geometry.partitions),
        )
    start = scale.geometry.start_partition
    if start % _QUADRANT not in _SCALE_STARTS:
        raise IllegalOperand(
            operand, "a start partition of 0, 4, 8 or 12 in its quadrant", str(start)
        )
    return [scale[_QUADRANT * q : _QUADRANT * q + _GROUPS_PER_QUADRANT] for q in range(quadrants)]


def _check_packed(operand: str, value: Any) -> None:
    check_in_sbuf(operand, value)
    if value.dtype not in _PACKED:
        raise IllegalOperand(operand, "a packed x4 type", str(value.dtype))
    if value.geometry.partitions % _QUADRANT:
        raise IllegalOperand(operand, "a multiple of 32 partitions", str(value.geometry.partitions))


def _dequantise(data: NkiTensor, scales: list[NkiTensor]) -> Array:
    """Values [4 P, columns] in float32, packed slot inside partition."""
    scale_bytes = np.concatenate([_bytes(scale) for scale in scales])
    return mx_formats.dequantize(data.flat(), scale_bytes, data.dtype)


def _bytes(scale: NkiTensor) -> Array:
    return scale.flat().view(np.uint8)


@instruction
def nc_matmul_mx(
    core: Core,
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    stationary_scale: NkiTensor,
    moving_scale: NkiTensor,
    tile_position: tuple[int, ...] | None = None,
    tile_size: tuple[int, ...] | None = None,
    accumulate: bool | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Multiply block-scaled operands: sum over partitions and the 4 packed slots.

    Rounding and `accumulate` are those of `nc_matmul`.
    """
    # Constraints.
    check_generation(core, nc_version.gen4, "nc_matmul_mx")
    _check_packed("stationary", stationary)
    _check_packed("moving", moving)
    check_same_partitions(("stationary", stationary), ("moving", moving))
    k, m, n = stationary.geometry.partitions, stationary.geometry.elements, moving.geometry.elements
    if m > _STATIONARY_MAX or m % 2:
        raise IllegalOperand(
            "stationary", f"an even number up to {_STATIONARY_MAX} of columns", str(m)
        )
    check_memory("dst", dst, (tr.PSUM,))
    check_dtype("dst", dst, dtypes.float32, dtypes.bfloat16)
    result = check_product(core, dst, m, n)
    stationary_scales = _scale_rows("stationary_scale", stationary_scale, stationary, m)
    moving_scales = _scale_rows("moving_scale", moving_scale, moving, n)
    tile = _row_tile(k, stationary, tile_position, tile_size)

    # Cost.
    facts = tr.MatmulFacts(
        k, m, n, str(stationary.dtype), str(moving.dtype), str(result.dtype), tile=tile
    )

    # Meaning.
    adds, mask = accumulation(core, result, accumulate)

    def meaning() -> None:
        left = _dequantise(stationary, stationary_scales)
        product = matrix_product(left, _dequantise(moving, moving_scales))
        store_sum(result, product, adds, mask)

    reads = [stationary, moving, *stationary_scales, *moving_scales, *([result] if adds else [])]
    handle = core.issue("nc_matmul_mx", tr.TENSOR, facts, (result,), reads, meaning, name)
    coverage = result._alloc.accumulated
    if coverage is not None:
        coverage.add(result.geometry.box, result.geometry.walk)
    return handle


def _row_tile(k: int, stationary: NkiTensor, position: Any, size: Any) -> tuple[int, ...]:
    """Check a row tile: (row, 0, rows, 128); empty for the whole array."""
    tile = tile_of(position, size)
    if not tile:
        return ()
    row, column, rows, columns = tile
    if column != 0 or columns != 128:
        raise IllegalOperand("tile_size", "all 128 columns from column 0", f"{position}, {size}")
    if rows not in (32, 64, 128) or row % rows or row + rows > 128 or k > rows:
        raise IllegalOperand(
            "tile_position",
            f"32, 64 or 128 rows at a multiple of that, at least {k}",
            f"{position}, {size}",
        )
    check_in_tile("stationary", stationary, "row", row, rows)
    return tile


@instruction
def quantize_mx(
    core: Core, dst: NkiTensor, src: NkiTensor, dst_scale: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """Quantise groups of 8 partitions x 4 neighbours to packed fp8 with one scale byte each.

    The scale is 2^(floor(log2(largest magnitude)) - (largest exponent of the format - 1)); the
    option `mx_headroom` gives the rule of NKI before 0.5.
    """
    # Constraints.
    check_generation(core, nc_version.gen4, "quantize_mx")
    for operand, value in (("src", src), ("dst", dst)):
        check_in_sbuf(operand, value)
    check_dtype("src", src, dtypes.float16, dtypes.bfloat16)
    check_dtype("dst", dst, dtypes.float8_e4m3fn_x4, dtypes.float8_e5m2_x4)
    if type(dst_scale) is NkiTensor:
        check_dtype("dst_scale", dst_scale, dtypes.uint8)
    partitions, elements = src.geometry.partitions, src.geometry.elements
    if partitions % _QUADRANT:
        raise IllegalOperand("src", "a multiple of 32 partitions", str(partitions))
    if elements % mx_formats.GROUP_SLOTS:
        raise IllegalOperand("src", "a multiple of 4 elements per partition", str(elements))
    check_same_partitions(("src", src), ("dst", dst))
    columns = elements // mx_formats.GROUP_SLOTS
    check_elements("dst", dst, columns, "packed elements per partition")
    scales = _scale_rows("dst_scale", dst_scale, src, columns)

    # Cost.
    facts = compute_facts(dst, (src,), "quantize_mx")

    # Meaning.
    def meaning() -> None:
        packed, scale_bytes = mx_formats.quantize(src.f32(), dst.dtype, core.options.mx_headroom)
        array = dst.array()
        array[...] = packed.reshape(array.shape)
        for quadrant, rows in enumerate(scales):
            first = _GROUPS_PER_QUADRANT * quadrant
            part = scale_bytes[first : first + _GROUPS_PER_QUADRANT]
            rows.array()[...] = part.reshape(rows.shape)

    return core.issue("quantize_mx", tr.VECTOR, facts, (dst, *scales), (src,), meaning, name)
