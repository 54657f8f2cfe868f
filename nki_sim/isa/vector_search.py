"""Vector engine: searching rows, shuffling partitions, batch statistics.

Comparisons run on float32 values. Elements that the language leaves undefined (an index of a value
that does not occur) are all ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from nki_sim import dtypes
from nki_sim import trace as tr
from nki_sim.errors import IllegalOperand
from nki_sim.isa import search
from nki_sim.isa._arithmetic import store_wrapped
from nki_sim.isa._checks import (
    check_dtype,
    check_on_chip,
    check_same_dtype,
    check_same_elements,
    check_same_partitions,
    compute_facts,
)
from nki_sim.isa._instruction import instruction
from nki_sim.machine import Core, NkiInstruction, NkiTensor

_MIN_SEARCH: Final = 8
_MAX_SEARCH: Final = 16_384
_QUADRANT: Final = 32
_UNCHANGED: Final = 255
_BN_STATS_MAX: Final = 512


def _check_searched(operand: str, value: NkiTensor, minimum: int = _MIN_SEARCH) -> None:
    """A searched tile has 8 to 16,384 elements per partition in at most three dimensions."""
    elements = value.geometry.elements
    if not minimum <= elements <= _MAX_SEARCH:
        raise IllegalOperand(
            operand, f"{minimum} to {_MAX_SEARCH} elements per partition", str(elements)
        )
    if sum(count > 1 for count in value.shape[1:]) > 2:
        raise IllegalOperand(operand, "at most 3 dimensions", f"{list(value.shape)}")


def _check_eight(operand: str, value: NkiTensor) -> None:
    if value.geometry.elements != search.SLOTS:
        raise IllegalOperand(
            operand, "8 elements per partition", f"{value.geometry.elements} ({list(value.shape)})"
        )


@instruction
def max8(core: Core, dst: NkiTensor, src: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Find the 8 largest values of each row, descending, duplicates kept (nki.isa.max8)."""
    # Constraints.
    check_on_chip(("dst", dst), ("src", src))
    check_same_partitions(("src", src), ("dst", dst))
    _check_searched("src", src)
    _check_eight("dst", dst)

    # Cost.
    facts = compute_facts(dst, (src,), "max8")

    # Meaning.
    def meaning() -> None:
        dst.store(search.largest8(src.f32()))

    return core.issue("max8", tr.VECTOR, facts, (dst,), (src,), meaning, name)


@instruction
def nc_find_index8(
    core: Core, dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """Find where each of 8 values occurs first in its row; equal values take successive places.

    A value with no occurrence left gives all ones (nki.isa.nc_find_index8, NKI 0.6).
    """
    # Constraints.
    check_on_chip(("dst", dst), ("data", data), ("vals", vals))
    check_same_partitions(("data", data), ("dst", dst), ("vals", vals))
    _check_searched("data", data)
    _check_eight("vals", vals)
    _check_eight("dst", dst)
    check_dtype("dst", dst, dtypes.uint16, dtypes.uint32)

    # Cost.
    facts = compute_facts(dst, (data, vals), "find_index8")

    # Meaning.
    def meaning() -> None:
        positions = search.match8(data.f32(), vals.f32(), first_slot_first=True)
        store_wrapped(dst, positions)

    return core.issue("nc_find_index8", tr.VECTOR, facts, (dst,), (data, vals), meaning, name)


@instruction
def nc_match_replace8(
    core: Core,
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Copy `data` with one occurrence of each of 8 values replaced by `imm`.

    The values are served from slot 7 down to 0, so among equal ones the last slot takes the first
    occurrence. `dst_idx` gets the positions, all ones for a value without an occurrence left
    (nki.isa.nc_match_replace8, NKI 0.6).
    """
    # Constraints.
    check_on_chip(("dst", dst), ("data", data), ("vals", vals))
    check_same_partitions(("data", data), ("dst", dst), ("vals", vals))
    check_same_elements(("data", data), ("dst", dst))
    _check_searched("data", data, minimum=1)
    _check_eight("vals", vals)
    if not isinstance(imm, int | float):
        raise IllegalOperand("imm", "a number known at compile time", repr(imm))
    writes = [dst]
    if dst_idx is not None:
        check_on_chip(("dst_idx", dst_idx))
        check_same_partitions(("data", data), ("dst_idx", dst_idx))
        _check_eight("dst_idx", dst_idx)
        check_dtype("dst_idx", dst_idx, dtypes.uint16, dtypes.uint32)
        writes.append(dst_idx)

    # Cost.
    facts = compute_facts(dst, (data, vals), "match_replace8")

    # Meaning.
    def meaning() -> None:
        values = data.f32()
        positions = search.match8(values, vals.f32(), first_slot_first=False)
        result = values.copy()
        rows, slots = np.nonzero(positions != search.NO_MATCH)
        result[rows, positions[rows, slots]] = np.float32(imm)
        dst.store(result)
        if dst_idx is not None:
            store_wrapped(dst_idx, positions)

    return core.issue("nc_match_replace8", tr.VECTOR, facts, writes, (data, vals), meaning, name)


@instruction
def nc_stream_shuffle(
    core: Core, dst: NkiTensor, src: NkiTensor, shuffle_mask: Sequence[int], name: str | None = None
) -> NkiInstruction:
    """Move partitions inside each quadrant of 32: ``dst[i] = src[mask[i]]``, 255 leaves dst[i].

    The same mask serves every quadrant (nki.isa.nc_stream_shuffle, NKI 0.6).
    """
    # Constraints.
    check_on_chip(("dst", dst), ("src", src))
    check_same_elements(("src", src), ("dst", dst))
    check_same_dtype(("src", src), ("dst", dst))
    mask = list(shuffle_mask)
    if len(mask) != _QUADRANT:
        raise IllegalOperand("shuffle_mask", "32 entries", str(len(mask)))
    for entry in mask:
        if not isinstance(entry, int) or not (0 <= entry < _QUADRANT or entry == _UNCHANGED):
            raise IllegalOperand("shuffle_mask", "entries 0..31, or 255 for no change", repr(entry))
    rows_dst, rows_src = dst.geometry.partitions, src.geometry.partitions
    active = -(-max(rows_dst, rows_src) // _QUADRANT) * _QUADRANT
    starts = {32: (0, 32, 64, 96), 64: (0, 64)}.get(active, (0,))
    for operand, value in (("src", src), ("dst", dst)):
        if value.geometry.start_partition not in starts:
            raise IllegalOperand(
                operand,
                f"start partition {', '.join(map(str, starts))} for {active} active partitions",
                str(value.geometry.start_partition),
            )
    moves = [
        (row, row - row % _QUADRANT + mask[row % _QUADRANT])
        for row in range(rows_dst)
        if mask[row % _QUADRANT] != _UNCHANGED
    ]
    for row, source in moves:
        if source >= rows_src:
            raise IllegalOperand(
                "shuffle_mask", f"source partitions below {rows_src} for row {row}", str(source)
            )
    targets = [row for row, _ in moves]
    sources = [source for _, source in moves]

    # Cost.
    facts = compute_facts(dst, (src,), "shuffle")

    # Meaning.
    def meaning() -> None:
        array = dst.array()
        rows = src.array()[sources]  # a copy: dst may be src
        array[targets] = rows.reshape(len(targets), *array.shape[1:])

    reads = (src,) if len(moves) == rows_dst else (src, dst)
    return core.issue("nc_stream_shuffle", tr.VECTOR, facts, (dst,), reads, meaning, name)


@instruction
def bn_stats(
    core: Core, dst: NkiTensor, data: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """Compute count, mean and variance * count of the even, then of the odd elements of each row.

    At most 512 elements; float32 inside (nki.isa.bn_stats, NKI 0.6).
    """
    # Constraints.
    check_on_chip(("dst", dst), ("data", data))
    check_same_partitions(("data", data), ("dst", dst))
    if data.geometry.elements > _BN_STATS_MAX:
        raise IllegalOperand(
            "data", f"at most {_BN_STATS_MAX} elements per partition", str(data.geometry.elements)
        )
    if dst.geometry.elements != 6:
        raise IllegalOperand("dst", "6 elements per partition", f"{list(dst.shape)}")

    # Cost.
    facts = compute_facts(dst, (data,), "bn_stats")

    # Meaning.
    def meaning() -> None:
        dst.store(search.half_statistics(data.f32()))

    return core.issue("bn_stats", tr.VECTOR, facts, (dst,), (data,), meaning, name)


@instruction
def bn_aggr(core: Core, dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Merge (count, mean, variance * count) triples of each row into mean and population variance.

    float32 inside (nki.isa.bn_aggr, NKI 0.6).
    """
    # Constraints.
    check_on_chip(("dst", dst), ("data", data))
    check_same_partitions(("data", data), ("dst", dst))
    if data.geometry.elements % 3:
        raise IllegalOperand(
            "data", "a multiple of 3 elements per partition", str(data.geometry.elements)
        )
    if dst.geometry.elements != 2:
        raise IllegalOperand("dst", "2 elements per partition", f"{list(dst.shape)}")

    # Cost.
    facts = compute_facts(dst, (data,), "bn_aggr")

    # Meaning.
    def meaning() -> None:
        dst.store(search.merge_statistics(data.f32()))

    return core.issue("bn_aggr", tr.VECTOR, facts, (dst,), (data,), meaning, name)
