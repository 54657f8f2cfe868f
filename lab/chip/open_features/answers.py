"""Asking a device about an open feature: is what the kernel returns right?"""

from __future__ import annotations

import numpy as np

from lab.chip.device import Device, Job
from lab.chip.open_features.listing import OpenFeature


def ask(feature: OpenFeature, device: Device) -> str:
    """Run the kernel of a feature; return how many of its numbers are wrong, or "".

    Raises:
        Exception: whatever the compiler or the device says.
    """
    arguments, wanted = feature.problem(np.random.default_rng(0))
    job = Job(
        name=feature.name,
        kernel=feature.kernel,
        arguments=arguments,
        options={},
        cores=feature.cores,
        launches=feature.launches,
    )
    found = np.asarray(device.load(job).run())
    wrong = int(np.count_nonzero(found.astype(np.float64) != wanted.astype(np.float64)))
    return f"{wrong} of {found.size} elements are wrong" if wrong else ""
