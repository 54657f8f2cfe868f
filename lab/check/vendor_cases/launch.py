"""Running a kernel of the vendor on the simulator."""

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np

import nki_sim
from lab.check.launcher import show
from lab.check.vendor_cases.case import Job
from nki_sim.vendor_library import library_options


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


def launch(
    job: Job, platform: str, mode: str = "full", forgiven: Collection[type[Exception]] = ()
) -> Launched:
    """Run a job's kernel with strict checks, but for the forgiven ones.

    Args:
        job: kernel and inputs.
        platform: "trn1", "trn2" or "trn3".
        mode: "full", or "indices" to skip floating-point arithmetic.
        forgiven: some of `nki_sim.vendor_library.FORGIVABLE`.
    """
    options = library_options(
        platform,
        forgiven,
        mode=mode,  # type: ignore[arg-type]
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
