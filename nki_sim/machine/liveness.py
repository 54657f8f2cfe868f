"""Checks of the whole trace: is what is alive at once on chip ever more than there is.

A tensor is alive from the first instruction that touches it to the last one that reads it, which is
what an allocator needs at least, in program order. A tensor that nobody reads is alive until the
kernel drops it. With `reorder`, what could wait does not count as the first: loads from HBM and
fills depend on nothing on chip, and sums in PSUM on SBUF alone, so that a scheduler may put them
right before their first use; a tensor that nobody reads then takes its place while it is written,
whenever Python drops it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from nki_sim import trace as tr
from nki_sim.dtypes import Array
from nki_sim.errors import CapacityError
from nki_sim.machine.core import Core, Machine


def _live_peak(
    trace: tr.Trace,
    space: int,
    core: int,
    rank: int,
    dropped: Mapping[int, int] | None = None,
    reorder: bool = False,
) -> tuple[int, int]:
    """Return the most bytes per partition alive at once in one memory, and the position of it.

    Tensors placed with an address count like others.

    Args:
        trace: a run.
        space: SBUF or PSUM of `trace.py`.
        core, rank: whose memory.
        dropped: position at which the kernel dropped a storage, by storage; the end if missing.
        reorder: let loads, fills and sums in PSUM wait for their first use.

    Returns:
        (bytes, position in the trace), (0, -1) if the memory is unused.
    """
    chosen = [
        index
        for index, storage in enumerate(trace.storages)
        if storage.space == space and storage.core == core and storage.rank == rank
    ]
    length = len(trace)
    if not chosen or not length:
        return 0, -1
    operand_ids, first = trace.operand_ids()
    columns = trace.columns()
    storage_of_range = np.array([memory.storage for memory in trace.ranges], dtype=np.int64)
    storages = storage_of_range[operand_ids]
    positions = np.repeat(np.arange(length, dtype=np.int64), np.diff(first))
    place = np.arange(len(operand_ids), dtype=np.int64) - first[positions]
    is_read = place < columns[positions, tr.NUM_READS]
    count = len(trace.storages)
    begin = np.full(count, length, dtype=np.int64)
    last_read = np.full(count, -1, dtype=np.int64)
    last_touch = np.full(count, -1, dtype=np.int64)
    np.minimum.at(begin, storages, positions)
    if reorder:
        movable = _is_movable(trace, columns, operand_ids, first)
        is_use = ~movable[positions] | is_read
        if space == tr.PSUM:
            is_use &= (columns[:, tr.ENGINE] != tr.TENSOR)[positions]
        first_use = np.full(count, length, dtype=np.int64)
        np.minimum.at(first_use, storages[is_use], positions[is_use])
        begin = np.where(first_use < length, first_use, begin)
    np.maximum.at(last_touch, storages, positions)
    np.maximum.at(last_read, storages[is_read], positions[is_read])
    used = np.array([index for index in chosen if begin[index] < length], dtype=np.int64)
    if not len(used):
        return 0, -1
    drops = dropped or {}
    until_drop = np.array([drops.get(int(index), length) - 1 for index in used], dtype=np.int64)
    end = last_touch[used]
    if not reorder:
        end = np.maximum(end, np.where(last_read[used] >= 0, last_read[used], until_drop))
    sizes = np.array([trace.storages[int(index)].size_bytes for index in used], dtype=np.int64)
    change = np.zeros(length + 1, dtype=np.int64)
    np.add.at(change, begin[used], sizes)
    np.subtract.at(change, np.minimum(end, length - 1) + 1, sizes)
    total = np.cumsum(change)
    peak = int(total.argmax())
    return int(total[peak]), peak


def _is_movable(
    trace: tr.Trace, columns: Array, operand_ids: Array, first: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return, per instruction, whether it only fills a tile or loads it from HBM."""
    fills = np.isin(columns[:, tr.OP], [trace.op_id(op) for op in ("memset", "iota")])
    loads = (columns[:, tr.ENGINE] == tr.DMA) & (columns[:, tr.NUM_READS] > 0)
    spaces = np.array([trace.storages[memory.storage].space for memory in trace.ranges])
    source = np.minimum(first[:-1], max(len(operand_ids) - 1, 0))
    from_hbm = spaces[operand_ids[source]] == tr.HBM if len(operand_ids) else loads
    movable: NDArray[np.bool_] = fills | (loads & from_hbm)
    return movable


def check_capacity(machine: Machine) -> None:
    """Raise (or report) if more SBUF or PSUM is alive at once than a core has.

    SBUF is looked at only if the tensors that Python kept alive were ever too many.

    Raises:
        CapacityError: with the source line at which the peak is reached.
    """
    if machine.options.capacity == "off":
        return
    for core in machine.cores:
        _check(machine, core, tr.PSUM, machine.target.psum_bytes)
        # As much as nki-library leaves for it: 128 elements of a partition.
        limit = machine.target.sbuf_bytes - core.identity_bytes
        if core.sbuf_peak > limit:
            _check(machine, core, tr.SBUF, limit)


def _check(machine: Machine, core: Core, space: int, limit: int) -> None:
    policy = machine.options.capacity
    reorder = policy == "reorder"
    peak, position = _live_peak(machine.trace, space, core.id, core.rank, machine.dropped, reorder)
    if peak > limit:
        record = machine.trace[position]
        memory = tr.SPACE_NAMES[space].upper()
        error = CapacityError(
            memory,
            f"at most {limit} bytes per partition alive at once",
            f"{peak} bytes on core {core.id}",
            instruction=record.op,
            location=f"{record.file}:{record.line}",
        )
        machine.settle(policy, "capacity", error)
