"""The accesses of tensors that cores share, as the race detector reads them afterwards."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from nki_sim.machine.memory import Allocation, Walk
from nki_sim.machine.tensor import NkiTensor


class _Actor(Protocol):
    """Who accesses a tensor: a core, by its place among all cores and its vector clock."""

    index: int
    clock: list[int]


class Access(NamedTuple):
    """One access of shared memory.

    Attributes:
        core: index of the core.
        clock: its vector clock then.
        is_write: whether it writes.
        walk: the bytes; for indirect accesses the walk of one row.
        rows: byte positions of the rows of an indirect access, else None.
        same: a write that left every byte as it was; None if the values are not known.
        line: source line id.
    """

    core: int
    clock: tuple[int, ...]
    is_write: bool
    walk: Walk
    rows: Any
    same: bool | None
    line: int


class SharedLog:
    """The accesses of one shared tensor.

    Args:
        alloc: the tensor's bytes.
    """

    __slots__ = ("accesses", "alloc", "writers")

    def __init__(self, alloc: Allocation) -> None:
        self.alloc = alloc
        self.accesses: list[Access] = []
        self.writers: set[int] = set()

    def read(self, core: _Actor, tensor: NkiTensor, line: int) -> None:
        """Note a read of a static view."""
        self.rows(core, tensor.geometry.walk, None, False, False, line)

    def write(self, core: _Actor, tensor: NkiTensor, line: int, same: bool | None = False) -> None:
        """Note a write of a static view."""
        self.rows(core, tensor.geometry.walk, None, True, same, line)

    def rows(
        self, core: _Actor, walk: Walk, rows: Any, is_write: bool, same: bool | None, line: int
    ) -> None:
        """Note an access; of a gather or scatter the walk of one row, and where the rows start."""
        if is_write:
            self.writers.add(core.index)
        self.accesses.append(
            Access(core.index, tuple(core.clock), is_write, walk, rows, same, line)
        )

    def written_by_other(self, core: _Actor) -> bool:
        """Return whether another core has written the tensor."""
        return bool(self.writers - {core.index})
