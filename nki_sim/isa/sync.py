"""Meetings of the two cores: core_barrier and sendrecv (nki.isa, NKI 0.6, generation 3 and later).

Both are ordering edges for the race detector. In a launch of one core a barrier of that core does
nothing.
"""

from __future__ import annotations

from typing import Any

from nki_sim import trace as tr
from nki_sim.constants import dma_engine as DmaEngine
from nki_sim.constants import engine as Engine
from nki_sim.constants import nc_version
from nki_sim.errors import DivergenceError, IllegalOperand
from nki_sim.isa._checks import ENGINE_IDS, check_generation, check_memory, check_same_dtype
from nki_sim.isa._instruction import instruction
from nki_sim.machine import Core, NkiInstruction, NkiTensor
from nki_sim.machine.geometry import share_bytes
from nki_sim.machine.memory import UNKNOWN, Origin
from nki_sim.machine.undefined import poison

_GPSIMD_DMA_BYTES = {4: 1024, 2: 512, 1: 256}


def _partners(core: Core, cores: Any) -> list[int]:
    """Return the indices of the cores of this rank that take part."""
    ids = [int(c) for c in cores] if isinstance(cores, (tuple, list)) else [int(cores)]
    lnc = core.machine.lnc
    if sorted(set(ids)) != sorted(ids) or any(not 0 <= c < max(lnc, 2) for c in ids):
        raise IllegalOperand("cores", f"different cores below {lnc}", str(cores))
    return [core.rank * lnc + c for c in ids if c < lnc]


@instruction
def core_barrier(
    core: Core,
    data: NkiTensor,
    cores: Any,
    engine: Engine = Engine.gpsimd,
    name: str | None = None,
) -> NkiInstruction:
    """Wait until all `cores` have come here; their accesses of `data` are ordered around it.

    Documented for data in shared HBM and cores (0, 1); data in SBUF and single cores also occur.
    """
    # Constraints.
    check_generation(core, nc_version.gen3, "core_barrier")
    if type(data) is not NkiTensor:
        raise IllegalOperand("data", "a tensor", repr(data))
    members = _partners(core, cores)
    if core.machine.lnc > 1 and core.index not in members:
        raise IllegalOperand("cores", f"this core ({core.id}) among the cores", str(cores))
    where = core.location()
    number = len(core.flow)

    # Meaning.
    if len(members) > 1:
        core.flow.append(("core_barrier", where, len(members)))
        core.meet(("core_barrier", core.rank), members, None, f"core_barrier at {where}")

    # Cost.
    alone = () if len(members) > 1 else (len(core.trace),)
    key = ("core_barrier", core.rank, tuple(members), number, *alone)
    facts = tr.SyncFacts("core_barrier", key, max(1, len(members)), 0, 128, "", 1)
    ids = (data.range_id(core.trace),)
    chosen = Engine.gpsimd if engine is Engine.unknown else engine
    index = core.emit("core_barrier", ENGINE_IDS[chosen], facts, ids, ids, name)
    return NkiInstruction(index, core.trace)


@instruction
def sendrecv(
    core: Core,
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: DmaEngine = DmaEngine.dma,
    name: str | None = None,
) -> NkiInstruction:
    """Give `src` to the other core and take its `src` into `dst`."""
    # Constraints.
    check_generation(core, nc_version.gen3, "sendrecv")
    for operand, value in (("src", src), ("dst", dst)):
        check_memory(operand, value, (tr.SBUF,))
    if src.shape != dst.shape:
        raise IllegalOperand("dst", f"shape {list(src.shape)} like src", f"{list(dst.shape)}")
    check_same_dtype(("src", src), ("dst", dst))
    if src._alloc is dst._alloc and share_bytes(src.geometry.walk, dst.geometry.walk):
        raise IllegalOperand(
            "dst",
            "other bytes than src, which the other core reads meanwhile",
            f"overlapping views of {src.label()}",
        )
    lnc = core.machine.lnc
    for operand, rank in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
        if not 0 <= int(rank) < lnc:
            raise IllegalOperand(operand, f"a core below {lnc}", str(rank))
    by_gpsimd = dma_engine is DmaEngine.gpsimd_dma
    row_bytes = src.geometry.elements * src.dtype.itemsize
    if by_gpsimd and row_bytes > _GPSIMD_DMA_BYTES[src.dtype.itemsize]:
        raise IllegalOperand(
            "src",
            f"at most {_GPSIMD_DMA_BYTES[src.dtype.itemsize]} bytes per partition of "
            f"{src.dtype} with gpsimd_dma",
            str(row_bytes),
        )

    # Meaning: the data are those at the meeting.
    where = core.location()
    number = len(core.flow)
    core.flow.append(("sendrecv", where, int(pipe_id)))
    base = core.rank * lnc
    members = sorted({core.index, base + int(send_to_rank), base + int(recv_from_rank)})
    offer = (int(send_to_rank), src.shape, src.dtype, _snapshot(core, src))
    what = f"sendrecv at {where}"
    found = core.meet(("sendrecv", core.rank, int(pipe_id)), members, offer, what)
    to, shape, dtype, payload = found[base + int(recv_from_rank)]
    if to != core.id or shape != src.shape or dtype is not src.dtype:
        raise DivergenceError(
            "src",
            f"{list(src.shape)} of {src.dtype} for core {core.id} from the other core",
            f"{list(shape)} of {dtype} for core {to}",
        )

    # Cost.
    key = ("sendrecv", core.rank, tuple(members), number)
    path = "gpsimd_dma" if by_gpsimd else "dma"
    facts = tr.SyncFacts(
        "sendrecv", key, len(members), src.shape[0] * row_bytes, src.shape[0], path, 1
    )
    values, defined, known = payload

    def meaning() -> None:
        dst.array()[...] = values

    engine = tr.GPSIMD if by_gpsimd else tr.DMA
    handle = core.issue("sendrecv", engine, facts, (dst,), (src,), meaning if known else None, name)
    if not known:
        dst._alloc.known = UNKNOWN
    if defined is not None:
        poison(dst._alloc, dst.geometry.walk, ~defined, Origin("sendrecv", "src", where))
    return handle


def _snapshot(core: Core, src: NkiTensor) -> tuple[Any, Any, int]:
    """Return values, mask of defined elements (None if all are), and what is known of them."""
    alloc = src._alloc
    geometry = src.geometry
    complete = alloc.defined.covers(geometry.box, geometry.walk)
    defined = None if complete else alloc.defined.elements_of(geometry.walk)
    known = 1 if core.full else alloc.known
    return (src.array().copy() if known else None), defined, known
