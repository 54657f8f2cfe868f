"""GpSimd engine: index patterns, gathers, selections by position, reductions over partitions.

GpSimd reads and writes SBUF only. Its eight cores see 16 partitions each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from nki_sim import dtypes
from nki_sim import trace as tr
from nki_sim.constants import nc_version
from nki_sim.dtypes import Array
from nki_sim.errors import IllegalOperand, OutOfBounds
from nki_sim.isa import search
from nki_sim.isa._arithmetic import alu, bits, is_defined, op_name, store_bits
from nki_sim.isa._checks import (
    check_dtype,
    check_elements,
    check_generation,
    check_gpsimd_memory,
    check_on_chip,
    check_same_dtype,
    check_same_elements,
    check_same_partitions,
    check_tiles,
    compute_facts,
)
from nki_sim.isa._instruction import instruction
from nki_sim.isa.functions import ALU_OPS, REDUCE_ALIASES, reduce_last
from nki_sim.isa.operators import OPERATORS
from nki_sim.machine import Core, NkiInstruction, NkiTensor, VirtualRegister

_MAX_PATTERN_DIMS: Final = 4
_ELEMENTS_PER_INDEX: Final = (1, 2, 4, 8, 16, 32)
_MAX_INDICES: Final = 4096
_PARTITION_REDUCTIONS: Final = ("add", "average", "maximum", "bitwise_or", "bitwise_and")
_EQUAL: Final = OPERATORS["equal"]
_INT32_MIN, _INT32_MAX = -(1 << 31), (1 << 31) - 1


@functools.lru_cache(maxsize=1024)
def _pattern_values(pattern: tuple[tuple[int, int], ...]) -> Array:
    """Sum of index * step over the dimensions of a pattern, as int32, outermost first."""
    values = np.zeros(1, np.int64)
    for step, count in pattern:
        values = (values[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    wrapped = values.astype(np.int32)
    wrapped.setflags(write=False)
    return wrapped


def _check_pattern(pattern: Any, dst: NkiTensor) -> tuple[tuple[int, int], ...]:
    """A pattern has up to four [step, count] pairs that yield the elements of a partition."""
    try:
        pairs = tuple([(int(step), int(count)) for step, count in pattern])
    except (TypeError, ValueError):
        raise IllegalOperand("pattern", "a list of [step, count] pairs", repr(pattern)) from None
    if not 1 <= len(pairs) <= _MAX_PATTERN_DIMS:
        raise IllegalOperand("pattern", "one to four [step, count] pairs", str(len(pairs)))
    product = math.prod(count for _, count in pairs)
    if product != dst.geometry.elements:
        raise IllegalOperand(
            "pattern", f"counts whose product is {dst.geometry.elements} like dst", str(product)
        )
    return pairs


def _check_int32(operand: str, value: Any) -> int:
    number = value.read() if isinstance(value, VirtualRegister) else value
    if not isinstance(number, int | np.integer) or not _INT32_MIN <= number <= _INT32_MAX:
        raise IllegalOperand(operand, "a 32-bit int", repr(value))
    return int(number)


def _affine_values(
    pairs: tuple[tuple[int, int], ...], offset: int, multiplier: int, partitions: int
) -> Array:
    """[P, F] int32 values offset + p * multiplier + pattern, wrapping like int32."""
    rows = (offset + np.arange(partitions, dtype=np.int64)[:, None] * multiplier).astype(np.int32)
    return rows + _pattern_values(pairs)


@instruction
def iota(
    core: Core,
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    offset: Any = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> NkiInstruction:
    """Write ``offset + partition * channel_multiplier + sum(index * step)``, int32 inside.

    Partitions count from the first one of dst; `offset` may be a register (nki.isa.iota, NKI 0.6).
    """
    # Constraints.
    check_on_chip(("dst", dst))
    check_gpsimd_memory(("dst", dst))
    pairs = _check_pattern(pattern, dst)
    first = _check_int32("offset", offset)
    multiplier = _check_int32("channel_multiplier", channel_multiplier)

    # Cost.
    facts = compute_facts(dst, (), "iota")

    # Meaning.
    def meaning() -> None:
        dst.store(_affine_values(pairs, first, multiplier, dst.geometry.partitions))

    return core.issue("iota", tr.GPSIMD, facts, (dst,), (), meaning, name)


@instruction
def affine_select(
    core: Core,
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Any = _EQUAL,
    offset: Any = 0,
    name: str | None = None,
) -> NkiInstruction:
    """Keep elements whose affine value (as in `iota`) compares true with 0, else one number.

    (nki.isa.affine_select, NKI 0.6)
    """
    # Constraints.
    operands = (("dst", dst), ("on_true_tile", on_true_tile))
    check_tiles(*operands)
    check_gpsimd_memory(*operands)
    pairs = _check_pattern(pattern, dst)
    first = _check_int32("offset", offset)
    multiplier = _check_int32("channel_multiplier", channel_multiplier)
    comparison = alu(core, "cmp_op", cmp_op, 2)
    if comparison.kind != "comparison":
        raise IllegalOperand("cmp_op", "a comparison of nki.language", comparison.name)
    if not isinstance(on_false_value, int | float):
        raise IllegalOperand("on_false_value", "a number", repr(on_false_value))

    # Cost.
    facts = compute_facts(dst, (on_true_tile,), "affine_select")

    # Meaning.
    def meaning() -> None:
        values = _affine_values(pairs, first, multiplier, dst.geometry.partitions)
        chosen = comparison.apply(values, np.int32(0)) != 0
        if dst.dtype == on_true_tile.dtype:
            source = on_true_tile.flat()
            fallback = dtypes.convert(np.array([on_false_value], np.float32), dst.dtype)
            dst.store(np.where(chosen, source, fallback))
        else:
            dst.store(np.where(chosen, on_true_tile.f32(), np.float32(on_false_value)))

    return core.issue("affine_select", tr.GPSIMD, facts, (dst,), (on_true_tile,), meaning, name)


@instruction
def local_gather(
    core: Core,
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Gather along the free axis with one list of positions per 16 partitions.

    The list of a group is its 16 rows of `index` read column by column. Positions count elements,
    also where several are taken per index (nki.isa.local_gather, NKI 0.6).
    """
    # Constraints.
    operands = (("dst", dst), ("src_buffer", src_buffer), ("index", index))
    check_on_chip(*operands)
    check_gpsimd_memory(*operands)
    check_same_partitions(("src_buffer", src_buffer), ("index", index), ("dst", dst))
    partitions = src_buffer.geometry.partitions
    if partitions % search.GROUP:
        raise IllegalOperand("src_buffer", "a multiple of 16 partitions", str(partitions))
    check_dtype("index", index, dtypes.uint16)
    check_same_dtype(("src_buffer", src_buffer), ("dst", dst))
    if num_elem_per_idx not in _ELEMENTS_PER_INDEX:
        raise IllegalOperand("num_elem_per_idx", "1, 2, 4, 8, 16 or 32", repr(num_elem_per_idx))
    available = index.geometry.elements * search.GROUP
    valid = available if num_valid_indices is None else num_valid_indices
    if not isinstance(valid, int) or not 1 <= valid <= min(available, _MAX_INDICES):
        raise IllegalOperand(
            "num_valid_indices",
            f"1 to {min(available, _MAX_INDICES)} indices per core",
            repr(valid),
        )
    what = "elements per partition (indices x num_elem_per_idx)"
    check_elements("dst", dst, valid * num_elem_per_idx, what)

    # Cost.
    facts = compute_facts(dst, (src_buffer, index), "local_gather", extent=num_elem_per_idx)

    # Meaning.
    def meaning() -> None:
        lists = index.flat()
        limit = src_buffer.geometry.elements - num_elem_per_idx
        if lists.max() > limit:
            used = search.lists_of_groups(lists)[:, :valid]
            lists = _limited("index", index, lists, used, limit)
        gathered = search.gather_in_groups(src_buffer.flat(), lists, num_elem_per_idx, valid)
        dst.store(gathered)

    return core.issue("local_gather", tr.GPSIMD, facts, (dst,), (src_buffer, index), meaning, name)


def _limited(operand: str, index: NkiTensor, values: Array, used: Array, limit: int) -> Array:
    """Raise if a used index leaves the row; unwritten indices are limited to it."""
    if used.max() > limit and is_defined(index):
        raise OutOfBounds(operand, f"positions up to {limit}", str(int(used.max())))
    return np.minimum(values, limit).astype(values.dtype)


@instruction
def nc_n_gather(
    core: Core, dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """Gather inside each partition: ``dst[p, i] = data[p, indices[p, i]]``.

    (nki.isa.nc_n_gather, NKI 0.6)
    """
    # Constraints.
    operands = (("dst", dst), ("data", data), ("indices", indices))
    check_on_chip(*operands)
    check_gpsimd_memory(*operands)
    check_same_partitions(("data", data), ("indices", indices), ("dst", dst))
    check_same_elements(("indices", indices), ("dst", dst))
    check_dtype("indices", indices, dtypes.uint32)
    check_same_dtype(("data", data), ("dst", dst))

    # Cost.
    facts = compute_facts(dst, (data, indices), "n_gather")

    # Meaning.
    def meaning() -> None:
        positions = indices.flat().astype(np.int64)
        limit = data.geometry.elements - 1
        if positions.max() > limit:
            positions = _limited("indices", indices, positions, positions, limit)
        dst.store(np.take_along_axis(data.flat(), positions, axis=1))

    return core.issue("nc_n_gather", tr.GPSIMD, facts, (dst,), (data, indices), meaning, name)


@instruction
def nonzero_with_count(
    core: Core,
    dst: NkiTensor,
    src: NkiTensor,
    index_offset: int = 0,
    padding_val: int = -1,
    name: str | None = None,
) -> NkiInstruction:
    """List the positions of nonzeros of every 16th partition, padded, with their count at the end.

    The other partitions of dst keep what they hold (nki.isa.nonzero_with_count, NKI 0.6; gen3+).
    """
    # Constraints.
    check_generation(core, nc_version.gen3, "nonzero_with_count")
    operands = (("dst", dst), ("src", src))
    check_on_chip(*operands)
    check_gpsimd_memory(*operands)
    check_same_partitions(("src", src), ("dst", dst))
    elements = src.geometry.elements
    check_elements("dst", dst, elements + 1, "elements per partition, one more than src")
    check_dtype("src", src, dtypes.float32, dtypes.int32)
    check_dtype("dst", dst, dtypes.int32)
    base = _check_int32("index_offset", index_offset)
    padding = _check_int32("padding_val", padding_val)
    rows = range(0, src.geometry.partitions, search.GROUP)
    sources = [src[row : row + 1] for row in rows]
    targets = [dst[row : row + 1] for row in rows]

    # Cost.
    facts = compute_facts(dst, (src,), "nonzero")

    # Meaning.
    def meaning() -> None:
        for source, target in zip(sources, targets, strict=True):
            found = np.flatnonzero(source.flat()[0])
            row = np.full(elements + 1, padding, np.int32)
            row[: found.size] = found + base
            row[-1] = found.size
            target.store(row)

    return core.issue("nonzero_with_count", tr.GPSIMD, facts, targets, sources, meaning, name)


@instruction
def topk(
    core: Core,
    val_dst: NkiTensor,
    idx_dst: NkiTensor,
    src: NkiTensor,
    n: int,
    name: str | None = None,
) -> NkiInstruction:
    """Find the largest of n values that are down the 16 partitions of each group, ascending.

    Element e of a group is in its partition e % 16, column e // 16. How many are found is the width
    of val_dst. Every row of a group gets the same result, and equal values come in the order of
    their positions: the guide leaves both open (nki.isa.topk, NKI 0.6).
    """
    # Constraints.
    operands = (("val_dst", val_dst), ("idx_dst", idx_dst), ("src", src))
    check_on_chip(*operands)
    check_gpsimd_memory(*operands)
    check_same_partitions(("src", src), ("val_dst", val_dst), ("idx_dst", idx_dst))
    check_same_elements(("val_dst", val_dst), ("idx_dst", idx_dst))
    partitions, k = src.geometry.partitions, val_dst.geometry.elements
    if partitions % search.GROUP:
        raise IllegalOperand("src", "a multiple of 16 partitions", str(partitions))
    if not isinstance(n, int) or not 8 <= n < 65_536:
        raise IllegalOperand("n", "8 to 65535", repr(n))
    if src.geometry.elements * search.GROUP < n:
        raise IllegalOperand(
            "src",
            f"at least {-(-n // search.GROUP)} elements per partition for n={n}",
            str(src.geometry.elements),
        )
    if not 1 <= k <= n:
        raise IllegalOperand("val_dst", f"1 to n={n} elements per partition", str(k))
    check_dtype("val_dst", val_dst, dtypes.bfloat16)
    check_dtype("idx_dst", idx_dst, dtypes.uint32)

    # Cost.
    facts = compute_facts(val_dst, (src,), "topk", extent=k)

    # Meaning.
    def meaning() -> None:
        values, positions = search.snake_topk(src.f32(), n, k)
        val_dst.store(values)
        idx_dst.store(positions)

    return core.issue("topk", tr.GPSIMD, facts, (val_dst, idx_dst), (src,), meaning, name)


@instruction
def tensor_partition_reduce(
    core: Core, dst: NkiTensor, op: Any, data: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """Reduce over the partitions into one (nki.isa.tensor_partition_reduce, NKI 0.6)."""
    # Constraints.
    check_on_chip(("dst", dst), ("data", data))
    check_gpsimd_memory(("dst", dst), ("data", data))
    check_same_elements(("data", data), ("dst", dst))
    if dst.geometry.partitions != 1:
        raise IllegalOperand("dst", "1 partition", str(dst.geometry.partitions))
    code = REDUCE_ALIASES.get(op_name(op), op_name(op))
    if code not in _PARTITION_REDUCTIONS:
        raise IllegalOperand("op", ", ".join(_PARTITION_REDUCTIONS), code or repr(op))
    is_bits = code.startswith("bitwise")
    if is_bits and not (data.dtype.is_integer and dst.dtype.is_integer):
        raise IllegalOperand("data", f"integer types for {code}", f"{data.dtype} to {dst.dtype}")

    # Cost.
    facts = compute_facts(dst, (data,), code)

    # Meaning.
    def meaning() -> None:
        if is_bits:
            store_bits(dst, reduce_last(ALU_OPS[code], bits(data).T))
        elif code == "average":
            total = reduce_last(ALU_OPS["add"], data.f32().T)
            dst.store(total / np.float32(data.geometry.partitions))
        else:
            dst.store(reduce_last(ALU_OPS[code], data.f32().T))

    return core.issue("tensor_partition_reduce", tr.GPSIMD, facts, (dst,), (data,), meaning, name)


@instruction
def sequence_bounds(
    core: Core, dst: NkiTensor, segment_ids: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """Write, for each element, where its segment starts and where it ends (one past the last).

    Elements of segment 0 are padding: they start at the length and end at -1
    (nki.isa.sequence_bounds, NKI 0.6).
    """
    # Constraints.
    operands = (("dst", dst), ("segment_ids", segment_ids))
    check_on_chip(*operands)
    check_gpsimd_memory(*operands)
    for operand, value in operands:
        if value.geometry.partitions != 1:
            raise IllegalOperand(operand, "1 partition", str(value.geometry.partitions))
        check_dtype(operand, value, dtypes.float32, dtypes.int32)
    length = segment_ids.geometry.elements
    check_elements("dst", dst, 2 * length, "elements: start and end of each")

    # Cost.
    facts = compute_facts(dst, (segment_ids,), "sequence_bounds")

    # Meaning.
    def meaning() -> None:
        ids = segment_ids.flat()[0]
        changes = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        edges = np.concatenate(([0], changes, [length]))
        lengths = np.diff(edges)
        starts, ends = np.repeat(edges[:-1], lengths), np.repeat(edges[1:], lengths)
        padding = ids == 0
        dst.store(np.stack((np.where(padding, length, starts), np.where(padding, -1, ends))))

    return core.issue("sequence_bounds", tr.GPSIMD, facts, (dst,), (segment_ids,), meaning, name)
