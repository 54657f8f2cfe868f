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


def launch(job: Job, platform: str, mode: str = "full") -> Launched:
    """Run a job's kernel with strict checks.

    Args:
        job: kernel and inputs.
        platform: "trn1", "trn2" or "trn3".
        mode: "full", or "indices" to skip floating-point arithmetic.
    """
    options = nki_sim.SimOptions(target=platform, mode=mode)  # type: ignore[arg-type]
    run = nki_sim.run(job.kernel, lnc=job.cores, options=options, **job.inputs)
    return Launched(outputs=list(_flat(run.outputs)), simulated_us=run.timeline.total_us, run=run)


def _flat(value: Any) -> Any:
    """Yield the tensors of a result, in order."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    elif value is not None:
        yield value
