"""DMA instructions: copies, gathers and scatters, transposes, and sums in flight.

Links: nki.isa.dma_copy, nki.isa.dma_transpose, nki.isa.dma_compute and the deep dive on descriptor
generation (nki/deep-dives/nki-dge.rst), NKI 0.6.

Not checked here: the number of descriptors a queue holds, and `priority` beyond its generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from nki_sim import trace as tr
from nki_sim.constants import dge_mode as Dge
from nki_sim.constants import engine as Engine
from nki_sim.constants import nc_version
from nki_sim.constants import oob_mode as Oob
from nki_sim.dtypes import Array, convert
from nki_sim.errors import IllegalOperand
from nki_sim.isa._checks import check_generation, check_same_dtype
from nki_sim.isa._dma_operand import Access, cast, check_overlap, is_same, resolve, rows_at
from nki_sim.isa._dma_transfer import move
from nki_sim.isa._instruction import instruction
from nki_sim.machine import Core, NkiInstruction, NkiTensor
from nki_sim.machine.geometry import contiguous_runs
from nki_sim.machine.numbers import watch_narrowing
from nki_sim.machine.tensor import read_indices

_PERMUTATION: Final = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
_FACTS: dict[Any, tr.DmaFacts] = {}


@instruction(resolve=False)
def dma_copy(
    core: Core,
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: Oob = Oob.error,
    dge_mode: Dge = Dge.unknown,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """Copy `src` to `dst`, element by element in row-major order of both.

    Equal types are copied bit by bit, others go through float32. A `vector_offset` on either side
    makes it a gather or scatter of rows; with `oob_mode.skip` rows out of range are left out. A
    copy of a view onto itself moves nothing and orders its users.
    """
    # Constraints.
    _check_sides(("dst", dst), ("src", src))
    if dst.size != src.size:
        raise IllegalOperand(
            "src",
            f"{dst.size} elements like dst {list(dst.shape)}",
            f"{src.size} ({list(src.shape)})",
        )
    if priority is not None:
        check_generation(core, nc_version.gen4, "priority")
    mode = _dge(core, dge_mode, dst, src)
    _check_queue(engine, mode)
    if mode is Dge.hwdge and dst.dtype is not src.dtype:
        raise IllegalOperand(
            "dst",
            f"{src.dtype} like src with hwdge, which does not cast",
            str(dst.dtype),
            "Use .view() to reinterpret",
        )
    if "x" in (dst.dtype.kind, src.dtype.kind) and dst.dtype.itemsize != src.dtype.itemsize:
        raise IllegalOperand(
            "dst",
            f"elements of {src.dtype.itemsize} bytes, as packed types are not cast",
            str(dst.dtype),
        )
    to, source = resolve(core, "dst", dst, oob_mode), resolve(core, "src", src, oob_mode)
    fence = is_same(to, source)
    if not fence:
        check_overlap(to, source)

    # Cost.
    facts = _facts(to, [source], mode, engine, moved=not fence)
    handle = _emit(core, "dma_copy", facts, to, [source], (dst, src), name)

    # Meaning.
    def combine(arrays: list[Array]) -> Array:
        return cast(arrays[0], src.dtype, dst.dtype)

    if not fence:
        move(core, "dma_copy", to, [source], combine, _first)
    return handle


@instruction(resolve=False)
def dma_transpose(
    core: Core,
    dst: NkiTensor,
    src: NkiTensor,
    axes: Sequence[int] | None = None,
    priority: int | None = None,
    dge_mode: Dge = Dge.unknown,
    oob_mode: Oob = Oob.error,
    name: str | None = None,
) -> NkiInstruction:
    """Reverse the axes of `src` into `dst`: (1, 0), (2, 1, 0) or, of four, (3, 1, 2, 0).

    With a `vector_offset` on `src` the rows are gathered first, in the order of the transposed and
    flattened index tensor.
    """
    # Constraints.
    _check_sides(("dst", dst), ("src", src))
    order = _PERMUTATION.get(src.ndim)
    if order is None:
        raise IllegalOperand("src", "2, 3 or 4 axes", f"{list(src.shape)}")
    if axes is not None and tuple(axes) != order:
        raise IllegalOperand("axes", f"{order} for {src.ndim} axes", str(tuple(axes)))
    expected = tuple(src.shape[axis] for axis in order)
    if dst.shape != expected:
        raise IllegalOperand("dst", f"shape {list(expected)}", f"{list(dst.shape)}")
    check_same_dtype(("src", src), ("dst", dst))
    if src.dtype.itemsize not in (2, 4):
        raise IllegalOperand("src", "elements of 2 or 4 bytes", str(src.dtype))
    indirect = src._dynamic is not None and src._dynamic.kind == "vector"
    mode = _dge(core, dge_mode, dst, src)
    if indirect:
        _check_indirect_transpose(src)
    elif mode is Dge.hwdge:
        _check_hardware_transpose(src)
    if Oob(oob_mode) is Oob.skip and src._dynamic is None and dst._dynamic is None:
        raise IllegalOperand("oob_mode", "skip with a dynamic offset only", "a static src and dst")
    to = resolve(core, "dst", dst, oob_mode)
    source = _gathered(core, src, oob_mode) if indirect else resolve(core, "src", src, oob_mode)

    # Cost.
    facts = _facts(to, [source], mode, Engine.unknown, transpose=f"{src.dtype.itemsize}-byte")
    handle = _emit(core, "dma_transpose", facts, to, [source], (dst, src), name)

    # Meaning: the destination is walked in the order of the source.
    to.reorder(tuple(int(axis) for axis in np.argsort(order)))
    move(core, "dma_transpose", to, [source], _first, _first)
    return handle


@instruction(resolve=False)
def dma_compute(
    core: Core,
    dst: NkiTensor,
    srcs: Sequence[NkiTensor],
    reduce_op: Any,
    scales: Sequence[float] | None = None,
    unique_indices: bool = True,
    oob_mode: Oob = Oob.error,
    name: str | None = None,
) -> NkiInstruction:
    """Write the sum of `srcs` to `dst`, in float32 and rounded once.

    To accumulate, list `dst` among the sources. With a `vector_offset` it is a read-modify-write of
    rows: scatter (dst and one source are the same rows) or gather (dst is the other source).
    """
    # Constraints.
    sources = list(srcs)
    if not 1 <= len(sources) <= 16:
        raise IllegalOperand("srcs", "1 to 16 sources", str(len(sources)))
    _check_sides(("dst", dst), *(("srcs", src) for src in sources))
    if getattr(reduce_op, "name", None) != "add":
        raise IllegalOperand("reduce_op", "nl.add", repr(reduce_op))
    if scales is not None and (
        len(scales) != len(sources) or any(float(scale) != 1.0 for scale in scales)
    ):
        raise IllegalOperand("scales", f"None or {len(sources)} times 1.0", str(list(scales)))
    for src in sources:
        if src.size != dst.size:
            raise IllegalOperand("srcs", f"{dst.size} elements like dst", f"{list(src.shape)}")
        if src.dtype.kind == "x" or dst.dtype.kind == "x":
            raise IllegalOperand("srcs", "types with arithmetic", f"{src.dtype}, {dst.dtype}")
    indirect = [t for t in (dst, *sources) if t._dynamic is not None]
    if any(t._dynamic is not None and t._dynamic.kind == "vector" for t in indirect):
        if len(sources) != 2:
            raise IllegalOperand("srcs", "two sources with a vector_offset", str(len(sources)))
        check_generation(core, nc_version.gen3, "vector_offset")
    elif Oob(oob_mode) is Oob.skip and not indirect:
        raise IllegalOperand("oob_mode", "skip with a dynamic offset only", "static operands")
    if len(sources) == 1:
        core.note(
            "deprecated",
            "dma_compute of one source copies it; list dst as a source to accumulate",
        )
    to = resolve(core, "dst", dst, oob_mode)
    moved = [resolve(core, "srcs", src, oob_mode) for src in sources]
    if unique_indices and to.indirect:
        _check_unique(to)

    # Cost.
    facts = _facts(to, moved, Dge.swdge if indirect else Dge.none, Engine.unknown)
    handle = _emit(core, "dma_compute", facts, to, moved, (dst, *sources), name)

    # Meaning.
    def combine(arrays: list[Array]) -> Array:
        total = arrays[0].astype(np.float32)
        for array in arrays[1:]:
            total = total + array.astype(np.float32)
        watch_narrowing(total, dst.dtype)
        return convert(total, dst.dtype)

    move(core, "dma_compute", to, moved, combine, _all_of)
    return handle


def _first(arrays: list[Array]) -> Array:
    return arrays[0]


def _all_of(masks: list[Array]) -> Array:
    result = masks[0]
    for mask in masks[1:]:
        result = result & mask.reshape(result.shape)
    return result


def _check_sides(*operands: tuple[str, NkiTensor]) -> None:
    """A DMA reaches HBM and SBUF, not PSUM."""
    for operand, value in operands:
        if type(value) is not NkiTensor:
            raise IllegalOperand(operand, "a tensor", repr(value))
        if value._alloc.space == tr.PSUM:
            raise IllegalOperand(
                operand,
                "a tensor in HBM or SBUF",
                "psum",
                "Copy it to SBUF with nisa.tensor_copy first",
            )


def _dge(core: Core, mode: Any, *operands: NkiTensor) -> Dge:
    """Check the descriptor mode against the generation and the offsets."""
    if isinstance(mode, str):
        mode = Dge[mode]
    chosen = Dge(mode)
    kinds = {t._dynamic.kind for t in operands if t._dynamic is not None}
    if chosen is Dge.hwdge:
        check_generation(core, nc_version.gen3, "dge_mode.hwdge")
    if "vector" in kinds:
        check_generation(core, nc_version.gen3, "vector_offset")
        if chosen not in (Dge.unknown, Dge.swdge):
            raise IllegalOperand("dge_mode", "unknown or swdge with a vector_offset", chosen.name)
        return Dge.swdge
    if kinds and chosen is Dge.none:
        core.note("dge", "dge_mode.none is documented for static addresses only")
    return chosen


def _check_queue(engine: Any, mode: Dge) -> None:
    if engine is not Engine.unknown:
        if engine not in (Engine.sync, Engine.scalar, Engine.gpsimd):
            raise IllegalOperand("engine", "sync or scalar", str(getattr(engine, "name", engine)))
        if mode is not Dge.hwdge or engine is Engine.gpsimd:
            raise IllegalOperand(
                "engine", "sync or scalar, and dge_mode.hwdge", f"{engine.name} with {mode.name}"
            )


def _check_hardware_transpose(src: NkiTensor) -> None:
    """Limits of the hardware descriptor generator (NKI 0.6)."""
    rows, columns = src.shape[0], src.shape[-1]
    if src.dtype.itemsize != 2:
        raise IllegalOperand("src", "elements of 2 bytes with hwdge", str(src.dtype))
    if columns > 128:
        raise IllegalOperand("src", "at most 128 on the last axis with hwdge", str(columns))
    if src.ndim == 2:
        if rows != 16:
            raise IllegalOperand("src", "16 rows with hwdge and two axes", str(rows))
    elif rows not in (1, 2, 4, 8, 16) or rows * src.shape[-2] % 16:
        raise IllegalOperand(
            "src",
            "1, 2, 4, 8 or 16 on axis 0, and a multiple of 16 with axis -2, with hwdge",
            f"{list(src.shape)}",
        )


def _check_indirect_transpose(src: NkiTensor) -> None:
    """Limits of the transpose of gathered rows (NKI 0.6)."""
    assert src._dynamic is not None
    index = src._dynamic.index
    if src.dtype.itemsize != 2:
        raise IllegalOperand("src", "elements of 2 bytes with a vector_offset", str(src.dtype))
    if str(index.dtype) != "uint32":
        raise IllegalOperand("vector_offset", "indices of uint32", str(index.dtype))
    if src.shape[-1] > 128 or src.shape[0] % 16:
        raise IllegalOperand(
            "src",
            "a multiple of 16 rows and at most 128 on the last axis with a vector_offset",
            f"{list(src.shape)}",
        )
    if src.ndim == 4 and 1 not in src.shape[1:3]:
        raise IllegalOperand("src", "size 1 on axis 1 or 2", f"{list(src.shape)}")
    rows = index.shape[0]
    columns = index.size // rows
    if rows % 16 or not 16 <= rows <= 128 or (columns > 1 and rows != 128):
        raise IllegalOperand(
            "vector_offset",
            "16 to 128 rows, a multiple of 16; 128 with several columns",
            f"{list(index.shape)}",
        )
    if index.size < src.shape[0]:
        raise IllegalOperand("vector_offset", f"at least {src.shape[0]} indices", str(index.size))


def _gathered(core: Core, src: NkiTensor, oob_mode: Any) -> Access:
    """Resolve the rows of an indirect transpose; the indices count column by column."""
    assert src._dynamic is not None
    index = src._dynamic.index
    numbers = read_indices(index).reshape(index.shape[0], -1).T.reshape(-1)[: src.shape[0]]
    access = rows_at(core, "src", src, numbers, oob_mode)
    if 0 < access.num_skipped < len(numbers):
        text = "a transposing gather of valid and skipped indices hangs a device (SDK issue 1390)"
        core.note("dge", text)
    return access


def _check_unique(access: Access) -> None:
    """A read-modify-write needs different rows."""
    starts = access.starts if access.valid is None else access.starts[access.valid]
    values, counts = np.unique(starts, return_counts=True)
    if len(values) != len(starts):
        twice = int(values[counts.argmax()])
        raise IllegalOperand(
            "vector_offset",
            "unique indices",
            f"several for the row at element {twice}",
            "Padding must be out of range, with oob_mode.skip",
        )


def _emit(
    core: Core,
    op: str,
    facts: tr.DmaFacts,
    dst: Access,
    srcs: list[Access],
    operands: tuple[NkiTensor, ...],
    name: str | None,
) -> NkiInstruction:
    """Append a data movement to the trace: it reads its sources, and the operands' offsets."""
    trace = core.trace
    found: tuple[int, ...] = ()
    for src in srcs:
        found += src.range_ids(trace)
    for value in operands:
        if value._dynamic is not None and type(value._dynamic.index) is NkiTensor:
            index = value._dynamic.index.resolve()
            if index._alloc.space == tr.SBUF and not index._alloc.counted:
                core.count_sbuf(index._alloc)
            found += (index.range_id(trace),)
    issued = core.emit(op, tr.DMA, facts, found, dst.range_ids(trace), name)
    return NkiInstruction(issued, trace)


# Cost.


def _run(access: Access) -> int:
    """Elements of a contiguous piece, which also ends at the end of a partition."""
    if access.starts is None:
        return access.tensor.geometry.run
    item = access.tensor.dtype.itemsize
    return contiguous_runs(access.walk_of_row(), 0)[0] // item


def _facts(
    dst: Access,
    srcs: list[Access],
    mode: Dge,
    engine: Any,
    transpose: str = "",
    moved: bool = True,
) -> tr.DmaFacts:
    """Return the interned facts of a data movement."""
    skipped = max(access.num_skipped for access in (dst, *srcs))
    key = (
        dst.cost_key(),
        tuple([src.cost_key() for src in srcs]),
        mode,
        engine,
        transpose,
        moved,
        skipped,
    )
    found = _FACTS.get(key)
    if found is None:
        found = _FACTS[key] = _new_facts(dst, srcs, mode, engine, transpose, moved, skipped)
    return found


def _new_facts(
    dst: Access,
    srcs: list[Access],
    mode: Dge,
    engine: Any,
    transpose: str,
    moved: bool,
    skipped: int,
) -> tr.DmaFacts:
    size = dst.tensor.size if moved else 0
    accesses = (dst, *srcs)
    chosen_rows = max((a.num_rows for a in accesses if a.starts is not None), default=0)
    if skipped:
        size = size * (chosen_rows - skipped) // chosen_rows
    src = srcs[0].tensor
    item = max(src.dtype.itemsize, dst.tensor.dtype.itemsize)
    run = max(1, min(_run(access) for access in accesses))
    if transpose:
        run = 1
    hbm_runs = [_run(a) for a in accesses if a.tensor._alloc.space == tr.HBM]
    read = sum(size * s.tensor.dtype.itemsize for s in srcs if s.tensor._alloc.space == tr.HBM)
    written = size * dst.tensor.dtype.itemsize if dst.tensor._alloc.space == tr.HBM else 0
    on_chip = [a.tensor.shape[0] for a in accesses if a.tensor._alloc.space != tr.HBM]
    rows = max(on_chip) if on_chip else (chosen_rows or _outer_rows(dst.tensor))
    return tr.DmaFacts(
        moved_bytes=size * item * len(srcs),
        rows=rows,
        runs=-(-size // run),
        hbm_runs=-(-size // max(1, min(hbm_runs))) if hbm_runs else 0,
        src_space=src._alloc.space,
        dst_space=dst.tensor._alloc.space,
        hbm_read_bytes=read,
        hbm_write_bytes=written,
        element_bytes=item,
        dge=mode.name,
        queue=engine.name if engine is not Engine.unknown else "",
        indirect_rows=max((a.num_rows for a in accesses if a.indirect), default=0),
        skipped_rows=skipped,
        transpose=transpose,
        sources=len(srcs),
        registers=sum(access.registers for access in accesses),
    )


def _outer_rows(value: NkiTensor) -> int:
    """Rows of a copy between HBM tensors: its contiguous pieces, at least one."""
    return max(1, value.size // max(1, value.geometry.run))
