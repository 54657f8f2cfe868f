"""Checks of the whole trace: is what is alive at once in PSUM ever more than there is."""

from __future__ import annotations

import numpy as np

from nki_sim import trace as tr
from nki_sim.errors import CapacityError
from nki_sim.machine import Machine


def live_peak(trace: tr.Trace, space: int, core: int, rank: int) -> tuple[int, int]:
    """Return the most bytes per partition alive at once in one memory, and the position of it.

    A tensor is alive from the first to the last instruction that touches it. Tensors placed with
    an address count like others.

    Args:
        trace: a run.
        space: SBUF or PSUM of `trace.py`.
        core, rank: whose memory.

    Returns:
        (bytes, position in the trace), (0, -1) if the memory is unused.
    """
    chosen = [
        index
        for index, storage in enumerate(trace.storages)
        if storage.space == space and storage.core == core and storage.rank == rank
    ]
    if not chosen or not len(trace):
        return 0, -1
    operand_ids, first = trace.operand_ids()
    storage_of_range = np.array([memory.storage for memory in trace.ranges], dtype=np.int64)
    storages = storage_of_range[operand_ids]
    positions = np.repeat(np.arange(len(trace), dtype=np.int64), np.diff(first))
    begin = np.full(len(trace.storages), len(trace), dtype=np.int64)
    end = np.full(len(trace.storages), -1, dtype=np.int64)
    np.minimum.at(begin, storages, positions)
    np.maximum.at(end, storages, positions)
    change = np.zeros(len(trace) + 1, dtype=np.int64)
    sizes = np.array([trace.storages[index].size_bytes for index in chosen], dtype=np.int64)
    used = np.array(chosen, dtype=np.int64)
    alive = end[used] >= 0
    np.add.at(change, begin[used][alive], sizes[alive])
    np.subtract.at(change, end[used][alive] + 1, sizes[alive])
    total = np.cumsum(change)
    peak = int(total.argmax())
    return int(total[peak]), peak


def check_psum(machine: Machine) -> None:
    """Raise (or report) if more PSUM is alive at once than a core has.

    Raises:
        CapacityError: with the source line at which the peak is reached.
    """
    if machine.options.capacity == "off":
        return
    limit = machine.target.psum_bytes
    for core in machine.cores:
        peak, position = live_peak(machine.trace, tr.PSUM, core.id, core.rank)
        if peak > limit:
            record = machine.trace[position]
            machine.settle(machine.options.capacity, "capacity", CapacityError(
                "PSUM", f"at most {limit} bytes per partition alive at once",
                f"{peak} bytes on core {core.id}", instruction=record.op,
                location=f"{record.file}:{record.line}",
            ))  # fmt: skip
