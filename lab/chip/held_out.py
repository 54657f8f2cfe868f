"""Ten kernels that the calibration has not seen: ours, on small shapes."""

from __future__ import annotations

import math
from typing import Any, Final

from lab.check.chip_cases import CASES
from lab.check.kernel_cases.adapters import run
from lab.check.launcher import Launched, Launcher, launching_with, simulate
from lab.check.vendor_cases.case import Case, Limits
from lab.chip.device import Job

# Which launch of which case; a prefill is index_blocks, blockwise_moe and combine.
HELD_OUT: Final = (
    ("small/prefill", (0, 1, 2)),
    ("small/prefill-split-on-I", (1,)),
    ("small/decode", (0,)),
    ("small/decode-all", (0,)),
    ("small/decode-layer", (0,)),
    ("small/router", (0,)),
    ("small/combine", (0,)),
    ("small/index", (0,)),
)


def held_out_jobs(launcher: Launcher = simulate) -> list[Job]:
    """Return the kernels with their arguments, as the cases of `chip check` launch them.

    Args:
        launcher: runs them on the way, as a case may need what its first kernel found.
    """
    found = []
    for name, wanted in HELD_OUT:
        jobs = jobs_of(CASES[name], launcher)
        found += [jobs[number] for number in wanted]
    return found


def jobs_of(case: Case, launcher: Launcher) -> list[Job]:
    """Return every launch of a case, which is run on the way."""
    jobs: list[Job] = []

    def note(kernel: Any, *arguments: Any, lnc: int, **options: Any) -> Launched:
        named = {name: value for name, value in options.items() if name != "options"}
        name = f"{case.id}: {getattr(kernel, '__name__', kernel)}"
        jobs.append(Job(name=name, kernel=kernel, arguments=arguments, options=named, cores=lnc))
        return launcher(kernel, *arguments, lnc=lnc, **options)

    with launching_with(note):
        run(case, Limits(macs=math.inf, input_bytes=math.inf))
    return jobs
