"""A simulated chip with the public bugs of compiler and runtime, found by what a kernel issues.

A bug is known by the instructions, not by who asks, so that a kernel of ours meets it as a probe
does. A device without an answer stays so for every process that follows, until it is reset: that is
a file in the folder that FOLDER names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from lab.chip.device import Device, Job, Loaded
from lab.chip.stand_in import timed
from neuron_moe.tools.chip.environment import LNC, LNC_VARIABLES
from nki_sim.trace import PSUM, ComputeFacts, DmaFacts, Instruction, MatmulFacts, SyncFacts

FOLDER: Final = "NEURON_MOE_SIMULATED_DEVICE"
_WEDGED: Final = "wedged"
_MEETINGS: Final = ("sendrecv", "core_barrier")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A public bug.

    Attributes:
        where: issue or error code.
        effect: the compiler refuses the kernel, the device wedges, or numbers are wrong.
        message: what is said.
        meets: whether a kernel with these instructions meets it.
    """

    where: str
    effect: Literal["refused", "wedged", "wrong"]
    message: str
    meets: Callable[[Job, list[Instruction]], bool]


def _skips_in_a_transpose(_job: Job, code: list[Instruction]) -> bool:
    return any(
        isinstance(one.facts, DmaFacts)
        and one.facts.transpose != ""
        and 0 < one.facts.skipped_rows < one.facts.indirect_rows
        for one in code
    )


def _has_other_cores(job: Job, _code: list[Instruction]) -> bool:
    return str(job.cores) != os.environ.get(LNC_VARIABLES[0], LNC)


def _meets_in_two_launches(job: Job, code: list[Instruction]) -> bool:
    return job.launches > 1 and any(
        isinstance(one.facts, SyncFacts) and one.facts.kind in _MEETINGS for one in code
    )


def _has_runs_by_a_number(_job: Job, code: list[Instruction]) -> bool:
    """Tell whether the hardware makes descriptors of several runs a row from a loaded address."""
    return any(
        isinstance(one.facts, DmaFacts)
        and one.facts.dge == "hwdge"
        and one.facts.registers > 0
        and one.facts.runs > one.facts.rows
        for one in code
    )


def _searches_psum(_job: Job, code: list[Instruction]) -> bool:
    return any(
        isinstance(one.facts, ComputeFacts) and one.op == "max8" and PSUM in one.facts.spaces
        for one in code
    )


def _sums_over_iterations(_job: Job, code: list[Instruction]) -> bool:
    return any(
        isinstance(one.facts, MatmulFacts) and one.facts.accumulates and one.loop_depth > 0
        for one in code
    )


BUGS: Final = {
    "skipped-transpose": Bug(
        where="#1390",
        effect="wedged",
        message="NRT_EXEC_HW_ERR_DMA_ABORT: a transposing gather skipped an index",
        meets=_skips_in_a_transpose,
    ),
    "lnc": Bug(
        where="#1388",
        effect="refused",
        message="NCC_EVRF066: the kernel's LNC is not the program's",
        meets=_has_other_cores,
    ),
    "two-launches": Bug(
        where="#1298",
        effect="refused",
        message="NCC_IXLV002: names of barriers differ between the cores",
        meets=_meets_in_two_launches,
    ),
    "scalar-dge": Bug(
        where="#1253",
        effect="refused",
        message="Invalid Shape for Scalar DGE",
        meets=_has_runs_by_a_number,
    ),
    "psum-search": Bug(
        where="no issue: no document says it works",
        effect="refused",
        message="max8: src must be in SBUF",
        meets=_searches_psum,
    ),
    "loop-sums": Bug(
        where="no issue: no document says it works",
        effect="wrong",
        message="",
        meets=_sums_over_iterations,
    ),
}


def wedged_file(folder: Path) -> Path:
    """Return the file that is there while the simulated device of a folder does not answer."""
    return folder / _WEDGED


class Buggy:
    """A device with bugs.

    Args:
        device: the device behind it, which has none; simulated.
        bugs: names of BUGS.

    Raises:
        ValueError: FOLDER names no folder to keep the state of the device in.
    """

    kind: Literal["measured", "simulated"] = "simulated"

    def __init__(self, device: Device, bugs: Iterable[str]) -> None:
        self.name = device.name
        self._device = device
        self._bugs = [BUGS[name] for name in bugs]
        if FOLDER not in os.environ:
            raise ValueError(f"{FOLDER}: not set. Set it to a folder for the device's state.")
        self._wedged = wedged_file(Path(os.environ[FOLDER]))

    def load(self, job: Job) -> Loaded:
        """Compile a kernel.

        Raises:
            RuntimeError: a bug of the compiler.
        """
        kernel = _BuggyKernel(self._device.load(job), job, self._wedged, self._bugs)
        for bug in kernel.met:
            if bug.effect == "refused":
                raise RuntimeError(f"{bug.message} (simulated; {bug.where})")
        return kernel


@dataclass
class _BuggyKernel:
    loaded: Loaded
    job: Job
    wedged: Path
    bugs: list[Bug]

    @cached_property
    def met(self) -> list[Bug]:
        """The bugs that the kernel meets."""
        code = list(timed(self.job).trace)
        return [bug for bug in self.bugs if bug.meets(self.job, code)]

    def run(self) -> Any:
        """Launch it: right, wrong, or an error after which the device does not answer."""
        self._check()
        for bug in self.met:
            if bug.effect == "wedged":
                self.wedged.parent.mkdir(parents=True, exist_ok=True)
                self.wedged.touch()
                raise RuntimeError(f"{bug.message} (simulated; {bug.where})")
        found = self.loaded.run()
        if not any(bug.effect == "wrong" for bug in self.met):
            return found
        return tuple(map(_spoilt, found)) if isinstance(found, tuple | list) else _spoilt(found)

    def time_ns(self) -> float:
        """Return the time of a launch."""
        self._check()
        return self.loaded.time_ns()

    def _check(self) -> None:
        if self.wedged.exists():
            raise RuntimeError("NRT_EXEC_HW_ERR: the device does not answer (simulated)")


def _spoilt(array: np.ndarray) -> np.ndarray:
    """Return an array that misses what one iteration would have added to its largest number."""
    spoilt = np.array(array)
    flat = spoilt.reshape(-1)
    flat[np.abs(flat.astype(np.float64)).argmax()] = 0
    return spoilt
