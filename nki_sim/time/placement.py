"""Where on chip the tensors without an address are, and whose place they take.

The compiler places tensors for which a kernel names no address. A model without this step would let
every new tile be filled at once, as if memory were endless. Here a tensor lives from its first to
its last access, and each new one takes the next free stretch behind the previous one, going round:
the reuse distance is as long as the capacity allows, as in compiled kernels whose loads run ahead.
The alternative is the lowest free place: least memory, earliest reuse, as in compiled kernels whose
tiles follow one another. Public profiles show both. Whoever takes over bytes must wait for their
last users.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Ring:
    """One memory of one core, filled round and round.

    `capacity` and sizes are bytes per partition; sizes are rounded up to `granule` (a bank in
    PSUM). Without `goes_round` every search starts at the lowest byte.
    """

    __slots__ = (
        "_ends",
        "_last_use",
        "_owners",
        "_pointer",
        "_starts",
        "capacity",
        "goes_round",
        "granule",
    )

    def __init__(self, capacity: int, granule: int = 1, goes_round: bool = True) -> None:
        self.capacity = capacity
        self.goes_round = goes_round
        self.granule = granule
        self._pointer = 0
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._owners: list[int] = []
        self._last_use: list[int] = []

    def place(self, owner: int, size: int, now: int, last_use: int) -> list[int] | None:
        """Give a new tensor a place; return the tensors whose bytes it takes over.

        Args:
            owner: id of the tensor.
            size: bytes per partition.
            now: position in program order of its first access.
            last_use: position of its last access.

        Returns:
            The previous owners of the place, all dead by now; None where no free stretch is left,
            which leaves the tensor without a place and without waits.
        """
        size = -(-size // self.granule) * self.granule
        if size > self.capacity:
            return None
        start = self._pointer if self._pointer + size <= self.capacity else 0
        wrapped = start == 0
        while True:
            blocker = self._live_end(start, start + size, now)
            if blocker is None:
                break
            start = blocker
            if start + size > self.capacity:
                if wrapped:
                    return None
                start, wrapped = 0, True
        taken = self._cut(start, start + size)
        where = bisect_left(self._starts, start)
        self._starts.insert(where, start)
        self._ends.insert(where, start + size)
        self._owners.insert(where, owner)
        self._last_use.insert(where, last_use)
        self._pointer = start + size if self.goes_round else 0
        return taken

    def _live_end(self, start: int, end: int, now: int) -> int | None:
        """Return the end of the last live stretch that overlaps, or None."""
        found = None
        index = max(0, bisect_right(self._starts, start) - 1)
        while index < len(self._starts) and self._starts[index] < end:
            if self._ends[index] > start and self._last_use[index] >= now:
                found = self._ends[index]
            index += 1
        return found

    def _cut(self, start: int, end: int) -> list[int]:
        """Remove the dead stretches inside, keep what sticks out; return their owners."""
        first = max(0, bisect_right(self._starts, start) - 1)
        if first < len(self._starts) and self._ends[first] <= start:
            first += 1
        stop = first
        owners = []
        kept: list[tuple[int, int, int, int]] = []
        while stop < len(self._starts) and self._starts[stop] < end:
            owner, last = self._owners[stop], self._last_use[stop]
            owners.append(owner)
            if self._starts[stop] < start:
                kept.append((self._starts[stop], start, owner, last))
            if self._ends[stop] > end:
                kept.append((end, self._ends[stop], owner, last))
            stop += 1
        self._starts[first:stop] = [piece[0] for piece in kept]
        self._ends[first:stop] = [piece[1] for piece in kept]
        self._owners[first:stop] = [piece[2] for piece in kept]
        self._last_use[first:stop] = [piece[3] for piece in kept]
        return owners
