"""Races between cores on shared memory, and cores that took different ways.

Order between cores comes from meetings only (core_barrier, sendrecv, collectives); each core keeps
a vector clock that is joined there. Two accesses of the same bytes by different cores, one of them
a write, race if neither happened before the other. Four cases are not errors: see `_benign`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nki_sim.errors import DivergenceError, RaceError
from nki_sim.machine.core import Core, Machine
from nki_sim.machine.geometry import contiguous_runs
from nki_sim.machine.shared_log import Access, SharedLog


def check_races(machine: Machine) -> None:
    """Raise (or report) for unordered accesses of shared memory.

    Raises:
        RaceError: names both source lines.
    """
    if machine.options.races == "off":
        return
    for log in machine.shared_logs:
        if not log.writers or len({access.core for access in log.accesses}) < 2:
            continue
        _check_log(machine, log)


def _unit_of(log: SharedLog) -> int:
    """Return the largest number of bytes of which all accesses touch whole multiples."""
    unit = 0
    for walk, rows in {(a.walk, None) for a in log.accesses if a.rows is None} | {
        (a.walk, int(np.gcd.reduce(a.rows))) for a in log.accesses if a.rows is not None
    }:
        run, dims = contiguous_runs(walk, 0)
        unit = math.gcd(unit, run, walk.offset, rows or 0, *(stride for stride, _ in dims))
    return max(1, unit)


def _units_of(access: Access, unit: int) -> Any:
    """Return the positions of an access in units."""
    run, dims = contiguous_runs(access.walk, 0)
    positions = np.arange(run // unit, dtype=np.int64)
    for stride, count in reversed(dims):
        steps = np.arange(count, dtype=np.int64) * (stride // unit)
        positions = (steps[:, None] + positions[None, :]).reshape(-1)
    if access.rows is None:
        return positions + access.walk.offset // unit
    starts = np.asarray(access.rows, dtype=np.int64) // unit
    return (starts[:, None] + positions[None, :]).reshape(-1)


def _check_log(machine: Machine, log: SharedLog) -> None:
    """Replay the accesses of one tensor over arrays of the last clock of each core."""
    unit = _unit_of(log)
    entries = -(-log.alloc.size_bytes // unit)
    count = len(machine.cores)
    last_write = np.zeros((count, entries), dtype=np.int32)
    last_read = np.zeros((count, entries), dtype=np.int32)
    write_access = np.full((count, entries), -1, dtype=np.int32)
    read_access = np.full((count, entries), -1, dtype=np.int32)
    for position, access in enumerate(log.accesses):
        where = _units_of(access, unit)
        own = access.clock[access.core]
        for other in range(count):
            if other == access.core:
                continue
            seen = access.clock[other]
            earlier = write_access[other], last_write[other]
            _compare(machine, log, access, where, unit, *earlier, seen)
            if access.is_write:
                earlier = read_access[other], last_read[other]
                _compare(machine, log, access, where, unit, *earlier, seen)
        clocks, accesses = (
            (last_write, write_access) if access.is_write else (last_read, read_access)
        )
        clocks[access.core, where] = own
        accesses[access.core, where] = position


def _compare(
    machine: Machine,
    log: SharedLog,
    access: Access,
    where: Any,
    unit: int,
    by: Any,
    clocks: Any,
    seen: int,
) -> None:
    """Report the accesses of another core, among `by`, that this one is not ordered after."""
    unordered = clocks[where] > seen
    if not unordered.any():
        return
    for position in np.unique(by[where[unordered]]):
        earlier = log.accesses[position]
        text = _benign(log, earlier, access, where[unordered] * unit)
        error = RaceError(
            log.alloc.name or "shared tensor",
            "core_barrier or sendrecv between accesses of the same bytes by two cores",
            f"{_place(machine, access)} and {_place(machine, earlier)}"
            + (f" ({text})" if text else ""),
            location=machine.location(access.line),
        )
        if text:
            machine.find("race", error.location, str(error))
        else:
            machine.settle(machine.options.races, "race", error)


def _place(machine: Machine, access: Access) -> str:
    verb = "writes" if access.is_write else "reads"
    core = machine.cores[access.core]
    rank = f" of rank {core.rank}" if machine.num_ranks > 1 else ""
    return f"core {core.id}{rank} {verb} at {machine.location(access.line)}"


def _benign(log: SharedLog, earlier: Access, later: Access, positions: Any) -> str:
    """Return why an unordered pair is not an error, or the empty string.

    1. Sendrecv and barriers order accesses (in the clocks). 2. A write that changes nothing: both
    cores store equal values. 3. Scatters to the last row, the padding row of token lists. 4. A
    gather beside a write: rows that are fetched by index are often not used.
    """
    if earlier.same or later.same:
        return "equal values"
    if earlier.is_write and later.same is None:
        return "values not compared, as mode='indices' does not compute them"
    scatters = [a for a in (earlier, later) if a.is_write and a.rows is not None]
    if scatters:
        last_row = (log.alloc.rows - 1) * log.alloc.pitch
        if log.alloc.rows > 1 and bool((np.asarray(positions) >= last_row).all()):
            return "padding row"
    reads = [a for a in (earlier, later) if not a.is_write]
    if reads and reads[0].rows is not None:
        return "gathered rows"
    return ""


def _first_other(one: Core, other: Core) -> int:
    """Return the line of the first shared allocation that only one of two cores made."""
    a, b = one.shared_lines, other.shared_lines
    if len(a) < len(b):
        a, b = b, a
    same = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
    return a[min(same, len(a) - 1)]


def check_flow(machine: Machine) -> None:
    """Raise if the cores of a rank took different dynamic loops or met at different places.

    Raises:
        DivergenceError: names the first difference.
    """
    for rank in range(machine.num_ranks):
        cores = [core for core in machine.cores if core.rank == rank]
        for core in cores[1:]:
            if core.shared_count != cores[0].shared_count:
                raise DivergenceError(
                    "shared_hbm",
                    f"the allocations of core 0 ({cores[0].shared_count})",
                    f"{core.shared_count} on core {core.id}",
                    "Every core must make the same shared_hbm allocations",
                    location=machine.location(_first_other(cores[0], core)),
                )
            first = cores[0].flow
            for a, b in zip(first, core.flow, strict=False):
                if a != b:
                    raise DivergenceError(
                        "control flow",
                        f"{a[0]} at {a[1]} with {a[2]} iterations on core 0",
                        f"{b[0]} at {b[1]} with {b[2]} iterations on core {core.id}",
                        location=b[1],
                    )
            if len(first) != len(core.flow):
                longer = first if len(first) > len(core.flow) else core.flow
                extra = longer[min(len(first), len(core.flow))]
                raise DivergenceError(
                    "control flow",
                    "the same dynamic loops on both cores",
                    f"{extra[0]} at {extra[1]} on one core only",
                    location=extra[1],
                )
