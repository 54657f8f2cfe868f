"""How ranks exchange data: meetings, snapshots, and what is written where.

A collective has three meetings. At the first all members have arrived, so that what they did before
is done; then each takes a snapshot of its sources and gives it away at the second; each writes its
own destinations, and the third orders that before whatever follows. Tensors of shared HBM belong to
a rank: its first core reads and writes for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from nki_sim import dtypes
from nki_sim import trace as tr
from nki_sim.dtypes import Array, DType
from nki_sim.errors import IllegalOperand, OutOfBounds
from nki_sim.isa._arithmetic import op_name
from nki_sim.isa.functions import ALU_OPS
from nki_sim.machine import Core, MemoryRegion, NkiInstruction, NkiTensor
from nki_sim.machine.memory import UNKNOWN, Origin
from nki_sim.machine.undefined import poison

_REDUCTIONS: Final = ("add", "minimum", "maximum")
_REDUCE_NAMES: Final = {"min": "minimum", "max": "maximum"}

# From what the ranks sent, [rank][source], to the contents of one destination. It is applied to the
# masks of defined elements too.
Combine = Callable[[list[list[Array]]], Array]


class _Payload(NamedTuple):
    """Contents of one tensor: values, which of them are defined, whether they mean something."""

    values: Array
    defined: Array
    known: int


@dataclass(frozen=True, slots=True)
class _Meeting:
    """One collective on one core.

    Attributes:
        core: the running core.
        kind, ranks: which collective, and who takes part in which order.
        lane: core number within the rank that exchanges; 0 where the tensors belong to the rank.
        members: the cores that meet.
        what: instruction and place.
        sent: what each rank gave, one payload per source.
        writes: whether this core writes the destinations.
        facts: for the trace.
    """

    core: Core
    kind: str
    ranks: tuple[int, ...]
    lane: int
    members: list[int]
    what: str
    sent: list[list[_Payload]]
    writes: bool
    facts: tr.SyncFacts

    def leave(self) -> None:
        """Order what was written before everything that follows on any member."""
        self.core.meet((self.kind, "done", self.ranks, self.lane), self.members, None, self.what)


def _is_private(tensor: NkiTensor) -> bool:
    """Whether every core has a tensor of its own."""
    return tensor._alloc.region is not MemoryRegion.shared_hbm


def meet(core: Core, kind: str, ranks: Sequence[int], sources: Sequence[NkiTensor]) -> _Meeting:
    """Wait for the other ranks and exchange snapshots of the sources."""
    private = _is_private(sources[0])
    group, lnc = tuple(ranks), core.machine.lnc
    lane = core.id if private else 0
    numbers = (core.id,) if private else range(lnc)
    members = [rank * lnc + number for rank in group for number in numbers]
    what = f"{kind} at {core.location()}"
    earlier = sum(1 for entry in core.flow if entry[0] == kind and entry[2] == group)
    core.flow.append((kind, core.location(), group))
    core.meet((kind, "arrive", group, lane), members, None, what)
    payloads = [_snapshot(core, source) for source in sources]
    offers = core.meet((kind, "offer", group, lane), members, payloads, what)
    # Cores that exchange tensors of their own share the links of their rank.
    sharing = lnc if private else 1
    moved = sharing * sum(source.size * source.dtype.itemsize for source in sources)
    key = (kind, group, lane, earlier)
    facts = tr.SyncFacts(kind, key, len(members), moved, 128, "dma", len(group))
    sent = [offers[rank * lnc + lane] for rank in group]
    return _Meeting(core, kind, group, lane, members, what, sent, private or core.id == 0, facts)


def _snapshot(core: Core, source: NkiTensor) -> _Payload:
    alloc = source._alloc
    known = 1 if core.full else alloc.known
    if known:
        values = source.array().copy()
    else:
        values = np.broadcast_to(np.zeros((), source.dtype.numpy), source.shape)
    return _Payload(values, alloc.defined.elements_of(source.geometry.walk), known)


def exchange(
    core: Core,
    kind: str,
    ranks: Sequence[int],
    sources: Sequence[NkiTensor],
    outputs: Sequence[tuple[NkiTensor, Combine]],
    name: str | None,
) -> None:
    """Run a collective whose destinations follow from the sources of all ranks alone."""
    meeting = meet(core, kind, ranks, sources)
    written = [dst for dst, _ in outputs]
    if not meeting.writes:
        _wait_with_writer(core, meeting, written, sources, name)
        return
    values = [[payload.values for payload in payloads] for payloads in meeting.sent]
    known = all(payload.known for payloads in meeting.sent for payload in payloads)

    def meaning() -> None:
        for dst, combine in outputs:
            dst.array()[...] = combine(values).reshape(dst.shape)

    core.issue(kind, tr.DMA, meeting.facts, written, sources, meaning if known else None, name)
    masks = [[payload.defined for payload in payloads] for payloads in meeting.sent]
    for dst, combine in outputs:
        _note(dst, known, combine(masks).reshape(dst.shape), meeting.what)
    meeting.leave()


def _wait_with_writer(
    core: Core,
    meeting: _Meeting,
    writes: Sequence[NkiTensor],
    reads: Sequence[NkiTensor],
    name: str | None,
) -> NkiInstruction:
    """Take part in a collective that another core of the rank writes for.

    The clock holds this core's own instructions to its operands, too.
    """
    ids = [tuple([t.range_id(core.trace) for t in tensors]) for tensors in (reads, writes)]
    index = core.emit(meeting.kind, tr.DMA, meeting.facts, ids[0], ids[1], name)
    meeting.leave()
    return NkiInstruction(index, core.trace)


def _note(dst: NkiTensor, known: bool, defined: Array, what: str) -> None:
    """Mark a destination as unknown, or parts of it as unwritten, where its sources were."""
    if not known:
        dst._alloc.known = UNKNOWN
    if not defined.all():
        kind, _, location = what.rpartition(" at ")
        poison(dst._alloc, dst.geometry.walk, ~defined, Origin(kind, "srcs", location))


@dataclass(frozen=True, slots=True)
class Chunks:
    """How the metadata of a variable collective is read.

    Attributes:
        chunk_of: from the table of a sender [rows, ranks] and the position of a receiver to the
            number of elements and their offset.
        has_rdispls: whether row 3 says where received chunks go; else they go to equal slots.
        writes_counts: whether row 2 receives the numbers of elements.
    """

    chunk_of: Callable[[Array, int], tuple[int, int]]
    has_rdispls: bool
    writes_counts: bool


def exchange_chunks(
    core: Core,
    kind: str,
    ranks: Sequence[int],
    src: NkiTensor,
    dst: NkiTensor,
    metadata: NkiTensor,
    chunks: Chunks,
    name: str | None,
) -> NkiInstruction:
    """Run a collective whose chunk sizes stand in a metadata tensor.

    Raises:
        OutOfBounds: a chunk leaves its source, its slot or the destination.
    """
    meeting = meet(core, kind, ranks, [src, metadata])
    count = len(meeting.ranks)
    position = meeting.ranks.index(core.rank)
    tables = [table.values.reshape(-1, count).astype(np.int64) for _, table in meeting.sent]
    known = all(payload.known for payloads in meeting.sent for payload in payloads)
    own = tables[position]
    slot = dst.size // count
    received = np.zeros(count, np.uint32)

    def place(pieces: list[Array], target: Array) -> None:
        flat = target.reshape(-1)
        for sender, (piece, table) in enumerate(zip(pieces, tables, strict=True)):
            size, start = chunks.chunk_of(table, position)
            at = int(own[3, sender]) if chunks.has_rdispls else sender * slot
            end = dst.size if chunks.has_rdispls else at + slot
            who = f"{size} elements from rank {meeting.ranks[sender]}"
            if start + size > piece.size:
                raise OutOfBounds(
                    "metadata_tensor",
                    f"chunks inside the {piece.size} elements of srcs",
                    f"{who} at {start}",
                )
            if at + size > end:
                raise OutOfBounds(
                    "metadata_tensor",
                    f"chunks that end before element {end} of dsts",
                    f"{who} at {at}",
                )
            flat[at : at + size] = piece.reshape(-1)[start : start + size]
            received[sender] = size

    def meaning() -> None:
        target = dst.array().copy()
        place([payloads[0].values for payloads in meeting.sent], target)
        dst.array()[...] = target
        if chunks.writes_counts:
            table = metadata.array().copy()
            table.reshape(-1, count)[2] = received
            metadata.array()[...] = table

    written = (dst, metadata) if chunks.writes_counts else (dst,)
    reads = (src, metadata, dst)  # dst keeps what no chunk covers
    if not meeting.writes:
        return _wait_with_writer(core, meeting, written, reads, name)
    defined = dst._alloc.defined.elements_of(dst.geometry.walk)
    issued = core.issue(
        kind, tr.DMA, meeting.facts, written, reads, meaning if known else None, name
    )
    if known:
        place([payloads[0].defined for payloads in meeting.sent], defined)
    _note(dst, known, defined, meeting.what)
    meeting.leave()
    return issued


# Operand checks.


def check_tensors(
    srcs: Any, dsts: Any, *, hbm_only: bool = False, one: bool = False
) -> list[tuple[NkiTensor, NkiTensor]]:
    """Check lists of sources and destinations; return them in pairs."""
    for operand, tensors in (("srcs", srcs), ("dsts", dsts)):
        if not isinstance(tensors, list | tuple) or not tensors:
            raise IllegalOperand(operand, "a list of tensors", repr(tensors))
        for tensor in tensors:
            if type(tensor) is not NkiTensor:
                raise IllegalOperand(operand, "a list of tensors", repr(tensor))
            if tensor._alloc.space == tr.PSUM or (hbm_only and tensor._alloc.space != tr.HBM):
                allowed = "HBM" if hbm_only else "HBM or SBUF"
                raise IllegalOperand(operand, f"tensors in {allowed}", tensor.buffer.name)
    if len(srcs) != len(dsts):
        raise IllegalOperand("dsts", f"{len(srcs)} tensors like srcs", str(len(dsts)))
    everything = [*srcs, *dsts]
    if len({tensor._alloc.space for tensor in everything}) > 1:
        raise IllegalOperand("dsts", "all tensors in HBM or all in SBUF", "a mixture")
    if len({_is_private(tensor) for tensor in everything}) > 1:
        raise IllegalOperand("dsts", "tensors of HBM all shared or all private", "a mixture")
    if len(srcs) > 1 and (one or srcs[0]._alloc.space != tr.HBM):
        raise IllegalOperand("srcs", "one tensor", str(len(srcs)))
    for src, dst in zip(srcs, dsts, strict=True):
        if src.dtype is not dst.dtype:
            raise IllegalOperand("dsts", f"{src.dtype} like srcs", str(dst.dtype))
    return list(zip(srcs, dsts, strict=True))


def check_shape(operand: str, tensor: NkiTensor, shape: Sequence[int]) -> None:
    """The tensor has this shape."""
    if list(tensor.shape) != list(shape):
        raise IllegalOperand(operand, f"shape {list(shape)}", f"{list(tensor.shape)}")


def reduction(op: Any, dtype: DType) -> Callable[[list[Array]], Array]:
    """Return the sum, minimum or maximum of arrays, widened, in their order."""
    name = _REDUCE_NAMES.get(op_name(op), op_name(op))
    if name not in _REDUCTIONS:
        raise IllegalOperand("op", "nl.add, nl.minimum or nl.maximum", op_name(op) or repr(op))
    combine = ALU_OPS[name].apply
    is_integer = dtype.is_integer

    def reduce(arrays: list[Array]) -> Array:
        if arrays[0].dtype == np.bool_:  # masks of defined elements
            return np.asarray(np.logical_and.reduce(arrays))
        wide = np.int64 if is_integer else np.float32
        total = arrays[0].astype(wide)
        for array in arrays[1:]:
            total = combine(total, array.astype(wide))
        return total.astype(dtype.numpy) if is_integer else dtypes.convert(total, dtype)

    return reduce
