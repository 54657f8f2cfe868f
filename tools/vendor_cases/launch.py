"""Running a kernel of the vendor on the simulator."""

import dataclasses
from typing import Any

import numpy as np

import nki_sim
from neuron_moe.tools.vendor_cases.case import Job


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


def launch(job: Job, platform: str, mode: str = "full", tolerant: bool = False) -> Launched:
    """Run a job's kernel with strict checks.

    Args:
        job: kernel and inputs.
        platform: "trn1", "trn2" or "trn3".
        mode: "full", or "indices" to skip floating-point arithmetic.
        tolerant: go on after unordered accesses of the two cores, and let unwritten memory be zero.
    """
    options = nki_sim.SimOptions(
        target=platform,
        mode=mode,  # type: ignore[arg-type]
        # Some kernels name all tiles of a loop before they use the first.
        capacity="reorder",
        fill=0 if tolerant else FINITE_FILL,
        uninitialized="off" if tolerant else "output",
        races="report" if tolerant else "error",
        # Cores that are not ordered advance together, as on the device: moe_bwd zeroes on one core
        # what the other one adds to, without a barrier.
        preempt=0.5 if tolerant else 0.0,
        mx_headroom=job.mx_headroom,
    )
    run = nki_sim.run(job.kernel, lnc=job.cores, options=options, **job.inputs)
    return Launched(outputs=list(_flat(run.outputs)), simulated_us=run.timeline.total_us, run=run)


def _flat(value: Any) -> Any:
    """Yield the tensors of a result, in order."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    elif value is not None:
        yield value
