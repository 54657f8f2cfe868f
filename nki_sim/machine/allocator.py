"""The memories of one core: creating tensors, and noting what has been written.

Tensors are created with their capacity and address checked, and those that cores share are found.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from nki_sim import trace as tr
from nki_sim.dtypes import DType
from nki_sim.errors import CapacityError
from nki_sim.machine.memory import EXACT, UNKNOWN, Allocation, Coverage, MemoryRegion, meet
from nki_sim.machine.program import Program
from nki_sim.machine.shared_log import SharedLog
from nki_sim.machine.system import System
from nki_sim.machine.tensor import NkiTensor

_BLOCK_BYTES: Final = 4096  # of a partition, by which tensors with an address are found


class Allocator(Program):
    """The memories of one core.

    Attributes:
        sbuf_bytes: bytes per partition of the SBUF tensors that Python keeps alive and that have
            been used; `sbuf_peak` is their maximum.
        identity_bytes: bytes per partition of what the compiler transposes with.
        accumulators: accumulator registers by engine, for instructions with a reduce command.
        shared_count: shared tensors allocated so far, by name.
        shared_lines: source line ids of these allocations.
    """

    def __init__(self, machine: System, rank: int, core: int) -> None:
        super().__init__(machine, rank, core)
        self.sbuf_bytes = 0
        self.sbuf_peak = 0
        self.identity_bytes = 0
        self.accumulators: dict[str, Any] = {}
        self.shared_count: dict[str, int] = {}
        self.shared_lines: list[int] = []
        # Tensors with an address, by memory and block of bytes, each with its rows and bytes.
        self._placed: dict[tuple[int, int], list[tuple[weakref.ref[Allocation], Any]]] = {}

    def allocate(
        self,
        shape: Sequence[int],
        dtype: DType,
        region: MemoryRegion,
        name: str = "",
        address: tuple[int, int] | None = None,
    ) -> NkiTensor:
        """Create a tensor in the memory of this core, or find the one the cores share.

        Raises:
            CapacityError: it can never fit, or its address is outside the memory.
        """
        sizes = tuple([int(size) for size in shape])
        if not sizes or min(sizes) < 1:
            raise CapacityError(
                "shape", "one or more axes of at least one element", f"{list(shape)}"
            )
        if region is MemoryRegion.shared_hbm:
            return self._allocate_shared(sizes, dtype, name)
        if self.open_loops:
            self.same_as_first_iteration(
                "nl.ndarray",
                ("shape", "dtype", "buffer", "address"),
                (sizes, dtype, region, address),
                {},
            )
        alloc = Allocation(self, region, sizes, dtype, name, address)
        alloc.birth = self.count_birth()
        space = alloc.space
        core = self.id
        partitions = 1
        size = alloc.size_bytes
        if space != tr.HBM:
            partitions = alloc.rows
            size = alloc.pitch
            self._check_fit(alloc)
            if address is not None:
                self._place(alloc)
        else:
            self._track(alloc)
        if space == tr.PSUM:
            alloc.accumulated = Coverage(alloc.rows, alloc.pitch, dtype.itemsize)
        alloc.line = self.line = self.here()
        alloc.trace_id = self.trace.add_storage(
            tr.Storage(space, core, self.rank, partitions, size, address, name)
        )
        self._keep(alloc)
        return NkiTensor(sizes, dtype, alloc, region, name)

    def _keep(self, alloc: Allocation) -> None:
        """Let a shortened loop find what it wrote."""
        if self.options.most_iterations:
            self.machine.allocations[alloc.trace_id] = alloc

    def _track(self, alloc: Allocation) -> None:
        """Do not keep a mask of a big tensor in HBM that nobody requests."""
        if self.options.uninitialized == "off":
            alloc.defined.full = True
            alloc.pending = functools.partial(_fill, alloc, self.options.fill)

    def _allocate_shared(self, shape: tuple[int, ...], dtype: DType, name: str) -> NkiTensor:
        """All cores of a rank name one tensor by its name, else by the order of allocation."""
        count = self.shared_count.get(name, 0)
        self.shared_count[name] = count + 1
        self.shared_lines.append(self.here())
        key = (self.rank, (name, count))
        found = self.machine.shared.get(key)
        if found is None:
            found = Allocation(self, MemoryRegion.shared_hbm, shape, dtype, name)
            found.line = self.shared_lines[-1]
            self._track(found)
            self._register_shared(found)
            self.machine.shared[key] = found
        elif found.shape != shape or found.dtype is not dtype:
            raise CapacityError(
                name or "shared tensor",
                f"the same shape and dtype on every core ({list(found.shape)}, {found.dtype})",
                f"{list(shape)}, {dtype}",
                "Every core must make the same shared_hbm allocations in the same order",
            )
        return NkiTensor(shape, dtype, found, MemoryRegion.shared_hbm, name)

    def _register_shared(self, alloc: Allocation) -> None:
        alloc.trace_id = self.trace.add_storage(
            tr.Storage(tr.HBM, -1, self.rank, 1, alloc.size_bytes, None, alloc.name)
        )
        self._keep(alloc)
        if len(self.clock) > 1 and self.options.races != "off":
            alloc.shared_log = SharedLog(alloc)
            self.machine.shared_logs.append(alloc.shared_log)

    def bind_input(self, array: Any, dtype: DType, name: str) -> NkiTensor:
        """Wrap a contiguous NumPy array (or a shape-only `TensorSpec`) as a kernel input in HBM."""
        shape = tuple(array.shape) or (1,)
        key = (self.rank, ("input", name))
        alloc = self.machine.shared.get(key)
        if alloc is None:
            alloc = Allocation(self, MemoryRegion.shared_hbm, shape, dtype, name)
            alloc.defined.full = True
            alloc.is_input = True
            if isinstance(array, np.ndarray) and (
                self.full or dtype.kind != "f" or array.size <= self.machine.options.small_elements
            ):
                alloc.adopt(array.reshape(-1).view(np.uint8))
            alloc.known = EXACT if alloc.has_data else UNKNOWN
            self._register_shared(alloc)
            self.machine.shared[key] = alloc
        return NkiTensor(shape, dtype, alloc, MemoryRegion.shared_hbm, name)

    def _check_fit(self, alloc: Allocation) -> None:
        """A tensor on chip must fit by itself and be where its address says."""
        limit = self.target.sbuf_bytes if alloc.space == tr.SBUF else self.target.psum_bytes
        memory = alloc.region.name
        if alloc.rows > 128:
            raise CapacityError(
                alloc.name or "shape", f"at most 128 partitions in {memory}", f"{list(alloc.shape)}"
            )
        start = 0 if alloc.address is None else alloc.address[1]
        if alloc.pitch + start > limit or start < 0:
            self.machine.settle(
                self.options.capacity,
                "capacity",
                CapacityError(
                    alloc.name or "tensor",
                    f"at most {limit} bytes per partition of {memory}",
                    f"{alloc.pitch} bytes"
                    + (f" from byte {start}" if alloc.address else "")
                    + f" for shape {list(alloc.shape)} of {alloc.dtype}",
                    location=self.location(),
                ),
            )
        if alloc.address is None:
            return
        start_row = alloc.address[0]
        if start_row < 0 or start_row + alloc.rows > 128:
            raise CapacityError(
                alloc.name or "address", "partitions inside 0..128", f"{start_row} + {alloc.rows}"
            )
        if alloc.space == tr.PSUM and start % self.target.psum_bank_bytes:
            raise CapacityError(
                alloc.name or "address",
                f"a PSUM address at the start of a bank of {self.target.psum_bank_bytes} bytes",
                f"byte {start}",
            )

    def _place(self, alloc: Allocation) -> None:
        """Find the tensors that are on the same bytes as a newly placed one."""
        place, mine = _place_of(alloc), weakref.ref(alloc)
        for block in range(place[2] // _BLOCK_BYTES, -(-place[3] // _BLOCK_BYTES)):
            alive = []
            for entry in self._placed.get((alloc.space, block), ()):
                other = entry[0]()
                if other is None:
                    continue
                alive.append(entry)
                if meet(place, entry[1]) and mine not in other.aliases[-1:]:
                    alloc.aliases.append(entry[0])
                    other.aliases.append(mine)
            alive.append((mine, place))
            self._placed[alloc.space, block] = alive

    def count_sbuf(self, alloc: Allocation) -> None:
        """Count the bytes of a tensor from its first use until Python drops it."""
        alloc.counted = True
        alloc.owner = self
        self.sbuf_bytes += alloc.pitch
        self.sbuf_peak = max(self.sbuf_peak, self.sbuf_bytes)

    def uncount_sbuf(self, alloc: Allocation) -> None:
        """Give back the bytes of a counted tensor that Python has dropped."""
        self.sbuf_bytes -= alloc.pitch
        self.machine.dropped[alloc.trace_id] = len(self.trace)

    def mark_written(self, writes: Sequence[NkiTensor], line: int) -> None:
        """Note that views hold values now, and that placed tensors below them do not."""
        for tensor in writes:
            alloc = tensor._alloc
            if not alloc.defined.full:
                geometry = tensor.geometry
                alloc.defined.add(geometry.box, geometry.walk)
            if alloc.poisoned is not None:
                alloc.poisoned.remove(tensor.geometry.walk)
            if alloc.aliases:
                self.clobber(alloc, tensor)
            if alloc.shared_log is not None:
                alloc.shared_log.write(self, tensor, line)

    def keep_input(self, alloc: Allocation) -> None:
        """Keep a copy of an input that is about to be written for the first time, and say so."""
        alloc.is_input = False
        if alloc.has_data:
            alloc.original = alloc.data.copy()
        text = (
            f"{alloc.name} is an input that the kernel writes; the caller's array stays as it was"
        )
        self.note("written", text)

    def clobber(self, alloc: Allocation, tensor: NkiTensor) -> None:
        """Writing a placed tensor makes the same bytes of other placed tensors undefined."""
        assert alloc.address is not None
        box = tensor.geometry.box
        row, start = alloc.address
        for ref in alloc.aliases:
            other = ref()
            if other is None or other.address is None or other.defined.empty:
                continue
            row_shift = row - other.address[0]
            shift = start - other.address[1]
            r0 = max(0, box.row_start + row_shift)
            r1 = min(other.rows, box.row_end + row_shift)
            b0 = max(0, box.byte_start + shift)
            b1 = min(other.pitch, box.byte_end + shift)
            if r0 < r1 and b0 < b1:
                other.defined.remove_box(r0, r1, b0, b1)
                if other.accumulated is not None:
                    other.accumulated.remove_box(r0, r1, b0, b1)
                other.clobbered_by = (
                    f"{alloc.name or 'a tensor'} written at {self.machine.location(self.line)}"
                )


def _place_of(alloc: Allocation) -> tuple[int, int, int, int]:
    """Return rows and bytes of a tensor with an address."""
    assert alloc.address is not None
    row, start = alloc.address
    return row, row + alloc.rows, start, start + alloc.pitch


def _fill(alloc: Allocation, byte: int) -> None:
    """Let what nobody wrote hold the bytes that the options name."""
    alloc.data[...] = byte
