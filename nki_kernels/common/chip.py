"""The chip in the numbers that kernels are cut, fitted and estimated by.

All are those of a Trainium 2 in `nki_sim.hardware`, which names the source of each. Code on the
chip uses the whole numbers, which are constants to the compiler. Estimates on the host, and so
every choice of plan, block size and mode, read `core()`: the coefficients in force, which
`nki_sim.hardware_file.use_hardware` sets to what was measured on a chip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from nki_sim import hardware
from nki_sim.hardware import TRN2, Hardware

PARTITIONS: Final = TRN2.partitions  # lanes of SBUF and PSUM
BANKS: Final = TRN2.psum_banks
BANK_BYTES: Final = TRN2.psum_bank_bytes  # per partition
BANK_FLOATS: Final = BANK_BYTES // 4
GPSIMD_BYTES: Final = 512  # a partition may exchange through GpSimd (nki.isa.sendrecv)

# Of SBUF, that buffers are fitted into: how the compiler places them is not published. The words of
# a Trainium 3 are loaded in the parts they are stored in, and would not always fit.
_SBUF_PERCENT: Final = {"trn2": 90}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Core:
    """What one of the two physical cores of a launch does in a nanosecond, and what that costs.

    There is one for each chip, equal to itself alone: what is remembered by it may depend on any
    coefficient of the chip.

    Attributes:
        tensor_cycles_per_ns: a cycle takes one moving column of a matmul.
        matmul_floor_columns: a matmul of fewer moving columns takes as long.
        vector_cycles_per_ns: a cycle takes one element per partition.
        vector_overhead_cycles: of an instruction.
        hbm_bytes_per_ns: this core's half of what both have.
        dma_engines: of this core.
        dma_bytes_per_ns: of one engine.
        dma_run_ns: of one engine, per contiguous run.
        dge_ns: to make the descriptors of a transfer.
        steps: how long what one engine computes takes to be the input of the next, by our numbers.
        transfers: how long a small transfer takes, by our numbers.
        exchanges: how long the cores take to swap a small tile, by our numbers.
    """

    tensor_cycles_per_ns: float
    matmul_floor_columns: float
    vector_cycles_per_ns: float
    vector_overhead_cycles: float
    hbm_bytes_per_ns: float
    dma_engines: int
    dma_bytes_per_ns: float
    dma_run_ns: float
    dge_ns: float
    steps: float
    transfers: float
    exchanges: float


def chip_in_force(name: str = "trn2") -> Hardware:
    """Return the coefficients in force of a chip."""
    return hardware.CHIPS[name]


def most_sbuf_bytes(name: str = "trn2") -> int:
    """Return the bytes per partition beyond which nothing runs; what has one form may take all."""
    return hardware.CHIPS[name].sbuf_usable_bytes_per_partition


def fitted_sbuf_bytes(name: str = "trn2") -> int:
    """Return the bytes per partition that buffers may be fitted into, in whole KiB."""
    return most_sbuf_bytes(name) * _SBUF_PERCENT.get(name, 100) // 100 // 1024 * 1024


# Of a Trainium 2: what buffers are fitted into, and beyond which a kernel of one form is refused.
SBUF_BYTES: Final = fitted_sbuf_bytes()
MOST_SBUF_BYTES: Final = most_sbuf_bytes()


def core(name: str = "trn2") -> Core:
    """Return a core of a chip, by the coefficients in force."""
    chip = chip_in_force(name)
    known = _CORES.get(id(chip))
    if known is None:
        known = _CORES[id(chip)] = (chip, _core_of(chip))
    return known[1]


def cached_by_chip(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that remembers, for each chip, what it made of hashable arguments."""

    @functools.lru_cache(maxsize=512)
    def remembered(_core: Core, *arguments: Any) -> Any:
        return make(*arguments)

    @functools.wraps(make)
    def found(*arguments: Any) -> Any:
        return remembered(core(), *arguments)

    return found


# By identity, as a chip has too many numbers to compare each time; one that is kept stays itself.
_CORES: Final[dict[int, tuple[Hardware, Core]]] = {}


def _core_of(chip: Hardware) -> Core:
    return Core(
        tensor_cycles_per_ns=chip.tensor_clock_ghz,
        matmul_floor_columns=chip.matmul_floor_cycles,
        vector_cycles_per_ns=chip.vector_clock_ghz,
        vector_overhead_cycles=chip.vector_overhead_cycles,
        hbm_bytes_per_ns=chip.hbm_bytes_per_ns / 2,
        dma_engines=chip.dma_engines,
        dma_bytes_per_ns=chip.dma_engine_bytes_per_ns,
        dma_run_ns=chip.dma_run_ns,
        dge_ns=chip.hwdge_ns,
        steps=_step_ns(chip) / _step_ns(TRN2),
        transfers=_transfer_ns(chip) / _transfer_ns(TRN2),
        exchanges=chip.sendrecv_ns / TRN2.sendrecv_ns,
    )


def _step_ns(chip: Hardware) -> float:
    """Return the time from a product to what Vector and Scalar engine made of it, small tiles."""
    vector = chip.vector_overhead_cycles / chip.vector_clock_ghz
    scalar = chip.scalar_overhead_cycles / chip.scalar_clock_ghz
    return vector + scalar + chip.matmul_drain_ns + 2 * chip.semaphore_ns


def _transfer_ns(chip: Hardware) -> float:
    """Return the time of a small transfer, descriptors included."""
    return chip.hwdge_ns + chip.dma_first_byte_ns + chip.dma_done_ns
