"""What the cores of one launch share: trace, tensors in HBM, findings."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

from nki_sim import trace as tr
from nki_sim.errors import NkiValidationError
from nki_sim.machine.memory import Allocation
from nki_sim.options import SimOptions
from nki_sim.targets import Target, find_target

if TYPE_CHECKING:
    from nki_sim.machine.core import Core
    from nki_sim.machine.races import SharedLog
    from nki_sim.machine.scheduler import Scheduler


class Finding(NamedTuple):
    """Something legal, or tolerated by the options, that is worth knowing.

    Attributes:
        kind: "uninitialized", "capacity", "race", "overlap", "accumulate", "oob", "deprecated", ...
        location: "file:line" of the kernel, empty if it belongs to the whole run.
        text: one sentence.
    """

    kind: str
    location: str
    text: str


class Machine:
    """What the cores of one launch share.

    Args:
        options: how to simulate.
        lnc: physical cores per rank.
        ranks: ranks of the collective group.
    """

    def __init__(self, options: SimOptions, lnc: int = 1, ranks: int = 1) -> None:
        self.options = options
        self.target: Target = find_target(options.target)
        self.lnc = lnc
        self.num_ranks = ranks
        self.trace = tr.Trace()
        self.findings: dict[tuple[str, str], Finding] = {}
        self.full = options.mode == "full"
        self.shared: dict[tuple[int, Any], Allocation] = {}
        self.shared_logs: list[SharedLog] = []
        self.scheduler: Scheduler | None = None
        self.random = random.Random(options.seed)
        self.preempt = options.preempt if lnc * ranks > 1 else 0.0
        self.lines: dict[tuple[int, int], int] = {}
        self._codes: list[Any] = []
        self.dropped: dict[int, int] = {}
        self.cores: list[Core] = []

    def find(self, kind: str, location: str, text: str) -> None:
        """Keep a finding, once per kind and place."""
        self.findings.setdefault((kind, location or text), Finding(kind, location, text))

    def settle(self, policy: str, kind: str, error: NkiValidationError) -> None:
        """Raise, report or drop a fault as its policy says."""
        if policy in ("error", "reorder"):
            raise error
        if policy == "report":
            self.find(kind, error.location, str(error))

    def line_of(self, frame: Any) -> int:
        """Return the trace's id of the source line that a frame is at."""
        code = frame.f_code
        key = (id(code), frame.f_lasti)
        found = self.lines.get(key)
        if found is None:
            self._codes.append(code)  # keeps the id from being reused
            found = self.lines[key] = self.trace.line_id(code.co_filename, frame.f_lineno)
        return found

    def location(self, line: int) -> str:
        """Return "file:line" for a line id."""
        file, number = self.trace.lines[line]
        return f"{file}:{number}"
