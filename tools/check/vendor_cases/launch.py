"""Running a kernel of the vendor on the simulator."""

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np

import nki_sim
from neuron_moe.tools.check.launcher import show
from neuron_moe.tools.check.vendor_cases.case import Job


@dataclasses.dataclass(slots=True, kw_only=True)
class Launched:
    """What a run gives.

    Attributes:
        outputs: returned tensors, in order.
        simulated_us: time of the kernel by the simulator's timeline, microseconds.
        run: the simulator's own record.
    """

    outputs: list[np.ndarray]
    simulated_us: float | None
    run: Any


# Unwritten memory is taken to hold finite numbers: several mx kernels of the library multiply
# partitions that nobody wrote by weights of zero, which is harmless unless they hold NaN. Results
# that depend on which finite number it is are still refused.
FINITE_FILL = 0x41


# Faults after which the results of a kernel are still worth comparing.
FORGIVABLE = (nki_sim.RaceError, nki_sim.UninitializedRead, nki_sim.CapacityError)


def launch(
    job: Job, platform: str, mode: str = "full", forgiven: Collection[type[Exception]] = ()
) -> Launched:
    """Run a job's kernel with strict checks, but for the forgiven ones.

    Args:
        job: kernel and inputs.
        platform: "trn1", "trn2" or "trn3".
        mode: "full", or "indices" to skip floating-point arithmetic.
        forgiven: some of FORGIVABLE: go on after unordered accesses of the two cores, let unwritten
            memory be zero, let tensors that do not fit be spilled.
    """
    races = nki_sim.RaceError in forgiven
    zeros = nki_sim.UninitializedRead in forgiven
    options = nki_sim.SimOptions(
        nki="0.6",  # the library's kernels loop over nl.dynamic_range
        target=platform,
        mode=mode,  # type: ignore[arg-type]
        # Some kernels name all tiles of a loop before they use the first.
        capacity="report" if nki_sim.CapacityError in forgiven else "reorder",
        fill=0 if zeros else FINITE_FILL,
        uninitialized="off" if zeros else "output",
        races="report" if races else "error",
        # What the outputs show where it matters, as they are compared.
        accumulate="report",
        scatter="report",
        # Cores that are not ordered advance together, as on the device: moe_bwd zeroes on one core
        # what the other one adds to, without a barrier.
        preempt=0.5 if races else 0.0,
        mx_headroom=job.mx_headroom,
    )
    run = nki_sim.run(job.kernel, lnc=job.cores, options=options, **job.inputs)
    show(run)
    return Launched(outputs=list(_flat(run.outputs)), simulated_us=run.timeline.total_us, run=run)


def _flat(value: Any) -> Any:
    """Yield the tensors of a result, in order."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    elif value is not None:
        yield value
