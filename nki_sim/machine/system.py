"""What the cores of one launch share: trace, tensors in HBM, findings."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, Protocol
from weakref import WeakValueDictionary

from nki_sim import trace as tr
from nki_sim.errors import NkiValidationError
from nki_sim.machine.memory import Allocation
from nki_sim.machine.numbers import FloatFlags
from nki_sim.machine.shared_log import SharedLog
from nki_sim.options import SimOptions, find_nki
from nki_sim.targets import Target, find_target

PACKAGE_DIR: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LAUNCH: Final = f"{PACKAGE_DIR}launch.py"
_MOST_CALLERS: Final = 3


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


class _Meetings(Protocol):
    """How cores wait for each other; `scheduler.py` provides it where there are several."""

    def meet(self, core: Any, key: Any, members: Sequence[int], value: Any, what: str) -> Any:
        """Wait until all members have come; return their values by core index."""

    def maybe_preempt(self, core: Any) -> None:
        """Let another core run, now and then."""


class Watcher(Protocol):
    """Sees what kernels issue; `precedent.py` has one."""

    def begun(self, kernel: str) -> None:
        """See a launch begin."""

    def issued(
        self, core: Any, op: str, defaults: Mapping[str, Any], given: Mapping[str, Any], result: Any
    ) -> None:
        """See an instruction with its arguments as they were given."""

    def ended(self, trace: tr.Trace) -> None:
        """See the trace of a launch that ended well."""


_WATCHER: ContextVar[Watcher | None] = ContextVar("nki_sim_watcher", default=None)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Let a watcher see every launch while the context lasts."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


class System:
    """What the cores of one launch share.

    Args:
        options: how to simulate.
        lnc: physical cores per rank.
        ranks: ranks of the collective group.
    """

    def __init__(self, options: SimOptions, lnc: int = 1, ranks: int = 1) -> None:
        self.options = options
        self.nki = find_nki(options.nki)
        self.target: Target = find_target(options.target)
        self.lnc = lnc
        self.num_ranks = ranks
        self.trace = tr.Trace()
        self.findings: dict[tuple[str, str], Finding] = {}
        self.full = options.mode == "full"
        self.watches_numbers = self.full and options.numbers == "report"
        self.float_flags = FloatFlags()
        self.shared: dict[tuple[int, Any], Allocation] = {}
        self.shared_logs: list[SharedLog] = []
        self.scheduler: _Meetings | None = None
        self.watcher = _WATCHER.get()
        self.random = random.Random(options.seed)
        self.preempt = options.preempt if lnc * ranks > 1 else 0.0
        self._lines: dict[tuple[int, int], int] = {}
        self._callers: dict[tuple[tuple[int, int], ...], tr.Callers] = {}
        self._codes: list[Any] = []
        self.dropped: dict[int, int] = {}
        # By storage of the trace, while somebody has them.
        self.allocations: WeakValueDictionary[int, Allocation] = WeakValueDictionary()

    def inputs(self) -> list[Allocation]:
        """Return the tensors that came from the caller."""
        return [alloc for (_, key), alloc in self.shared.items() if key[0] == "input"]

    def restore_inputs(self) -> None:
        """Give back to the caller's arrays what they held."""
        for alloc in self.inputs():
            if alloc.original is not None:
                alloc.data[...] = alloc.original

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
        found = self._lines.get(key)
        if found is None:
            self._codes.append(code)  # keeps the id from being reused
            found = self._lines[key] = self.trace.line_id(code.co_filename, frame.f_lineno)
        return found

    def callers_of(self, frame: Any) -> tr.Callers:
        """Return the three nearest calls of the kernel that led to a frame, nearest first."""
        steps: list[Any] = []
        step = frame.f_back
        while step.f_code.co_filename != _LAUNCH and len(steps) < _MOST_CALLERS:
            if not step.f_code.co_filename.startswith(PACKAGE_DIR):
                steps.append(step)
            step = step.f_back
        key = tuple((id(step.f_code), step.f_lasti) for step in steps)
        found = self._callers.get(key)
        if found is None:
            self._codes.extend(step.f_code for step in steps)
            found = tuple((step.f_code.co_filename, step.f_lineno) for step in steps)
            self._callers[key] = found
        return found

    def location(self, line: int) -> str:
        """Return "file:line" for a line id."""
        file, number = self.trace.lines[line]
        return f"{file}:{number}"
