"""Several cores in one process: one thread each, one baton, switches only where cores meet.

The core that holds the baton runs until it waits for others, ends, or is preempted by the seeded
option. Meetings (`meet`) are the only communication: a core deposits a value under a key and goes
on when all members have done so, with the values of all. Vector clocks are joined there, which is
what the race detector knows about order.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any

from nki_sim.errors import DeadlockError, DivergenceError
from nki_sim.machine.core import Core, Machine

_READY, _WAITING, _DONE = range(3)


class _Abandoned(BaseException):
    """Unwinds the other cores after one has failed."""


class _Meeting:
    __slots__ = ("members", "values", "what")

    def __init__(self, members: tuple[int, ...], what: str) -> None:
        self.members = members
        self.values: dict[int, Any] = {}
        self.what = what


class Scheduler:
    """Runs one program per core.

    Args:
        machine: the machine whose cores run.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.cores = machine.cores
        count = len(self.cores)
        # Plain locks, released by whoever hands the baton over: a semaphore costs two thread
        # switches of the interpreter more.
        self._turn = [threading.Lock() for _ in range(count)]
        for lock in self._turn:
            lock.acquire()
        self._state = [_READY] * count
        self._waits_for: list[Any] = [None] * count
        self._meetings: dict[Any, _Meeting] = {}
        self._counts: list[dict[Any, int]] = [{} for _ in range(count)]
        self._failure: BaseException | None = None

    def run(self, program: Callable[[Core], Any]) -> list[Any]:
        """Run `program(core)` on every core; return the results in order of cores.

        Raises:
            BaseException: the first failure of any core.
        """
        results: list[Any] = [None] * len(self.cores)
        threads = []
        for core in self.cores:
            context = contextvars.copy_context()
            thread = threading.Thread(
                target=context.run, args=(self._body, core, program, results), daemon=True
            )
            thread.start()
            threads.append(thread)
        self._turn[self.machine.options.start_core % len(self.cores)].release()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return results

    def _body(self, core: Core, program: Callable[[Core], Any], results: list[Any]) -> None:
        self._turn[core.index].acquire()
        try:
            if self._failure is None:
                watches = self.machine.watches_numbers
                with self.machine.float_flags.watch(is_on=watches):
                    results[core.index] = program(core)
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001  handed to the caller of run()
            if self._failure is None:
                self._failure = error
        finally:
            self._state[core.index] = _DONE
            self._hand_over(core.index)

    def _hand_over(self, index: int) -> None:
        """Give the baton to the next core that can run."""
        count = len(self.cores)
        order = [(index + step) % count for step in range(1, count + 1)]
        for other in order:
            if self._state[other] == _READY:
                self._turn[other].release()
                return
        waiting = [other for other in order if self._state[other] == _WAITING]
        if not waiting:
            return
        if self._failure is None:
            self._failure = self._deadlock(waiting)
        other = waiting[0]
        self._state[other] = _READY
        self._turn[other].release()

    def _deadlock(self, waiting: list[int]) -> DeadlockError:
        places = "; ".join(
            f"core {self.cores[k].id} of rank {self.cores[k].rank} waits in "
            f"{self._waits_for[k].what}"
            for k in sorted(waiting)
        )
        ended = [k for k in range(len(self.cores)) if self._state[k] == _DONE]
        found = places + (f"; cores {ended} have ended" if ended else "")
        return DeadlockError("cores", "every core to reach the same meetings", found)

    def meet(self, core: Core, key: Any, members: Sequence[int], value: Any, what: str) -> Any:
        """Wait until all members have come to this meeting; return their values by core index.

        Args:
            core: the core that arrives.
            key: what the members agree on; the n-th meeting of a key on each core belong together.
            members: indices of the cores, all of them the same on every member.
            value: what the others get from this core.
            what: instruction and place, for messages.
        """
        index = core.index
        number = self._counts[index].get(key, 0)
        self._counts[index][key] = number + 1
        full_key = (key, number)
        group = tuple(sorted(members))
        meeting = self._meetings.get(full_key)
        if meeting is None:
            meeting = self._meetings[full_key] = _Meeting(group, what)
        if meeting.members != group or index not in group:
            raise DivergenceError("members", f"{meeting.members} as in {meeting.what}", str(group))
        meeting.values[index] = (value, list(core.clock))
        if len(meeting.values) == len(group):
            del self._meetings[full_key]
            self._join_clocks(meeting)
            for other in group:
                if other != index:
                    self._state[other] = _READY
        else:
            self._state[index] = _WAITING
            self._waits_for[index] = meeting
            meeting.what = what
            self.yield_baton(core)
        return {other: value for other, (value, _) in meeting.values.items()}

    def _join_clocks(self, meeting: _Meeting) -> None:
        clocks = [clock for _, clock in meeting.values.values()]
        joined = [max(entries) for entries in zip(*clocks, strict=True)]
        for member in meeting.members:
            clock = self.cores[member].clock
            clock[:] = joined
            clock[member] += 1

    def yield_baton(self, core: Core) -> None:
        """Let another core run; returns when this one has the baton again."""
        index = core.index
        self._hand_over(index)
        self._turn[index].acquire()
        if self._failure is not None:
            raise _Abandoned

    def maybe_preempt(self, core: Core) -> None:
        """Switch with the probability of the options."""
        if self.machine.random.random() < self.machine.preempt:
            self.yield_baton(core)
