"""What the vendor's public kernel library (aws-neuron/nki-library) needs on the simulator."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal

from nki_sim.errors import CapacityError, RaceError, UninitializedRead
from nki_sim.options import SimOptions

# Faults after which the results of a kernel are still worth comparing.
FORGIVABLE: Final = (RaceError, UninitializedRead, CapacityError)
# Unwritten memory is taken to hold finite numbers: several mx kernels of the library multiply
# partitions that nobody wrote by weights of zero, which is harmless unless they hold NaN. Results
# that depend on which finite number it is are still refused.
_FINITE_FILL: Final = 0x41


def library_options(
    target: str | None,
    forgiven: Collection[type[Exception]] = (),
    *,
    mode: Literal["full", "indices"] = "full",
    mx_headroom: int = 1,
) -> SimOptions:
    """Return strict options for the library's kernels, but for the forgiven faults.

    Args:
        target: "trn1", "trn2" or "trn3".
        forgiven: some of FORGIVABLE: go on after unordered accesses of the two cores, let unwritten
            memory be zero, let tensors that do not fit be spilled.
        mode: "full", or "indices" to skip floating-point arithmetic.
        mx_headroom: 0 for a library of NKI before 0.5.
    """
    races, zeros = RaceError in forgiven, UninitializedRead in forgiven
    return SimOptions(
        nki="0.6",  # the library's kernels loop over nl.dynamic_range
        target=target,
        mode=mode,
        # Some kernels name all tiles of a loop before they use the first.
        capacity="report" if CapacityError in forgiven else "reorder",
        fill=0 if zeros else _FINITE_FILL,
        uninitialized="off" if zeros else "output",
        races="report" if races else "error",
        # What the outputs show where it matters, as they are compared.
        accumulate="report",
        scatter="report",
        # Cores that are not ordered advance together, as on the device: moe_bwd zeroes on one core
        # what the other one adds to, without a barrier.
        preempt=0.5 if races else 0.0,
        mx_headroom=mx_headroom,
    )
