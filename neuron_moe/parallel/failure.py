"""What happens when a rank dies, hangs, or was started with other settings.

Each process publishes, twice a second and from a thread of its own, which collective it entered
last, and follows the notes of the others. When a collective fails, the survivors say which rank is
gone (its notes have stopped) or has not arrived (its last collective is an older one), instead of
an address and a port.
"""

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

HEARTBEAT_S = 0.5
STALE_AFTER_S = 3.0
DEFAULT_TIMEOUT_S = 25.0  # with the time it takes to find the culprit, 30
START_TIMEOUT_S = 300.0  # until the first collective of a layer: ranks load at different speed
_SILENT_S = 20.0  # a rank that loads may keep its watch from the processor for a while
_PATIENCE_S = 30.0  # until a wait is reported
_QUICK_S = 0.005  # between notes while somebody waits for them

_log = logging.getLogger("neuron_moe")


class CollectiveError(RuntimeError):
    """A collective did not finish.

    Attributes:
        rank: this process, as a global rank.
        collective: what failed, such as 'all_gather'.
        group: the group it ran in.
        suspects: global ranks that ended or never arrived; empty if nobody stands out.
    """

    def __init__(
        self, message: str, rank: int, collective: str, group: str, suspects: tuple[int, ...]
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.collective = collective
        self.group = group
        self.suspects = suspects


class Watch:
    """Publishes this rank's progress and follows that of the others, from a thread of its own.

    The others are followed all the time, not only after a failure: the store may end together with
    the first rank that gives up.

    Args:
        store: key-value store that all ranks reach; a copy with a connection of its own is made.
        rank: this process.
        world_size: number of processes.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._store = store
        self._number = 0
        self._collective = "none yet"
        self._beats = 0
        self._seen: dict[int, tuple[str, float]] = {}  # last note of a rank, and since when
        self._read_at = time.monotonic()
        for other in self._others:
            self._seen[other] = ("", self._read_at)
        self._lost_store = ""
        self._starts = 0
        self._pause_s = HEARTBEAT_S
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="neuron-moe-watch", daemon=True)
        self._thread.start()

    def note(self, collective: str, group: str) -> None:
        """Remember the collective this rank enters; the thread publishes it."""
        with self._lock:
            self._number += 1
            self._collective = f"{collective} over group {group!r}"

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped = True
        self._wake.set()
        self._thread.join(timeout=2.0)

    def wait_for_start(self, collective: str, group: str, ranks: Sequence[int]) -> str:
        """Wait until the given ranks have come here as often as this one; say what went wrong.

        A rank may take its time, but neither be silent nor be in another collective.
        """
        with self._lock:
            self._starts += 1
            self._number += 1
            self._collective = f"{collective} over group {group!r}"
        self._pause_s = _QUICK_S
        self._wake.set()
        started, is_reported = time.monotonic(), False
        while True:
            with self._lock:
                missing = [rank for rank in ranks if self._starts_of(rank) < self._starts]
                silence = time.monotonic() - min(self._heard_of(rank) for rank in missing or ranks)
                is_elsewhere = any(self._number_of(rank) >= self._number for rank in missing)
            seconds = time.monotonic() - started
            if not missing:
                return ""
            is_silent = silence > _SILENT_S or bool(self._lost_store)
            if is_elsewhere or is_silent or seconds > START_TIMEOUT_S:
                return f"rank {_as_runs(missing)} did not come"
            if seconds > _PATIENCE_S and not is_reported:
                is_reported = True
                _log.warning("rank %s: waits for rank %s to start", self.rank, _as_runs(missing))
            time.sleep(_QUICK_S)

    def _starts_of(self, rank: int) -> int:
        if rank == self.rank:
            return self._starts
        note = self._note_of(rank)
        return 0 if note is None else int(note["starts"])

    def _number_of(self, rank: int) -> int:
        note = self._note_of(rank)
        return 0 if note is None else int(note["number"])

    def _heard_of(self, rank: int) -> float:
        """Return when a rank, or the store through which it would report, was heard of last."""
        return self._read_at if rank == self.rank else min(self._seen[rank][1], self._read_at)

    def _note_of(self, rank: int) -> dict[str, Any] | None:
        """Return the last note of another rank; None if there was none yet."""
        text = self._seen[rank][0]
        found: dict[str, Any] | None = json.loads(text) if text else None
        return found

    def suspects(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the ranks that seem to have ended, or of the given ones those that fell behind.

        A rank of another group counts too: its end reaches this one through ranks of both. Waits,
        if need be, as long as it takes for a silence to mean something.
        """
        others = [rank for rank in self._others if rank in ranks]
        deadline = time.monotonic() + STALE_AFTER_S + 2 * HEARTBEAT_S
        while True:
            with self._lock:
                found = self._silent() or self._frozen()
                if found or self._lost_store:
                    return found or {0: f"its rendezvous store is gone ({self._lost_store})"}
                if time.monotonic() > deadline:
                    return self._behind(others)
            time.sleep(HEARTBEAT_S / 2)

    def _silent(self) -> dict[int, str]:
        # Once the store is gone no new notes come: what was missing by then has to do.
        limit = 3 * HEARTBEAT_S if self._lost_store else STALE_AFTER_S
        silence = {rank: self._read_at - since for rank, (_, since) in self._seen.items()}
        # Those that ended because of the first are not to blame.
        limit = max(limit, max(silence.values(), default=0.0) - 3 * HEARTBEAT_S)
        return {
            rank: f"no sign of life for {seconds:.1f} s"
            for rank, seconds in silence.items()
            if seconds >= limit
        }

    def _frozen(self) -> dict[int, str]:
        """Say that rank 0 does not answer: its store does not, so no notes come from anybody."""
        seconds = time.monotonic() - self._read_at
        if self._lost_store or seconds < STALE_AFTER_S or self.rank == 0:
            return {}
        return {0: f"no sign of life, and no answer of the store it hosts, for {seconds:.1f} s"}

    def _behind(self, others: Sequence[int]) -> dict[int, str]:
        notes = {rank: note for rank in others if (note := self._note_of(rank)) is not None}
        return {
            rank: f"alive, but its last collective was number {note['number']}: {note['name']}"
            for rank, note in notes.items()
            if note["number"] < self._number
            or (note["number"] == self._number and note["name"] != self._collective)
        }

    def _beat(self) -> None:
        self._beats += 1
        with self._lock:
            note = {
                "beat": self._beats,
                "number": self._number,
                "name": self._collective,
                "starts": self._starts,
            }
        self._store.set(_key(self.rank), json.dumps(note))

    def _look(self) -> None:
        # A key that nobody wrote yet would be waited for.
        ranks = [
            rank for rank in self._others if self._seen[rank][0] or self._store.check([_key(rank)])
        ]
        values = self._store.multi_get([_key(rank) for rank in ranks]) if ranks else []
        with self._lock:
            self._read_at = now = time.monotonic()
            for rank, value in zip(ranks, values, strict=True):
                text = value.decode()
                if self._seen[rank][0] != text:
                    self._seen[rank] = (text, now)

    def _run(self) -> None:
        try:
            self._store = (
                self._store.clone()
            )  # waits for whoever hosts it, and so does what follows
            self._beat()
            while not self._is_stopped:
                self._wake.wait(self._pause_s)
                self._wake.clear()
                self._pause_s = min(2 * self._pause_s, HEARTBEAT_S)
                self._beat()
                self._look()
        except RuntimeError as error:
            with self._lock:
                self._lost_store = _first_line(error)


_watch: Watch | None = None


def start_watch(store: Any, rank: int, world_size: int) -> None:
    """Start publishing this rank's progress."""
    global _watch
    stop_watch()
    _watch = Watch(store, rank, world_size)


def stop_watch() -> None:
    """Stop publishing; nothing happens if it was not started."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def note_collective(collective: str, group: str) -> None:
    """Tell the watch, if there is one, that this rank enters a collective."""
    if _watch is not None:
        _watch.note(collective, group)


def describe_failure(
    collective: str, group: str, ranks: Sequence[int], seconds: float, error: RuntimeError
) -> CollectiveError:
    """Return the error that names rank, collective and, where the watch knows, the culprit."""
    here = dist.get_rank()
    found = {} if _watch is None else _watch.suspects(ranks)
    why = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(found.items()))
    message = (
        f"rank {here}: {collective} over group {group!r} (ranks {_as_runs(ranks)}) failed after"
        f" {seconds:.1f} s. {why or 'No rank stands out'}. Restart all ranks together."
        f" [{_first_line(error)}]"
    )
    return CollectiveError(message, here, collective, group, tuple(sorted(found)))


def check_same_on_all_ranks(
    what: str, values: Mapping[str, object], group: ProcessGroup | None = None
) -> None:
    """Compare settings between the processes of a group (default: all); collective.

    Raises:
        ValueError: some differ; the message names setting, ranks and values. Every rank raises.
    """
    mine = {key: repr(value) for key, value in values.items()}
    everyone = gather_objects(f"comparison of {what} settings", mine, group)
    compare_settings(what, dist.get_process_group_ranks(group or dist.group.WORLD), everyone)


def wait_for_start(group: ProcessGroup) -> None:
    """Wait until all ranks of a group have built and loaded what they compare next; collective.

    Raises:
        CollectiveError: a rank is gone or did not arrive.
    """
    _meet("start of a layer", "model", group)


def meet_everyone() -> None:
    """Wait until every process builds its groups; collective.

    Raises:
        CollectiveError: a rank is gone or did not arrive.
    """
    _meet("start of the groups", "world", dist.group.WORLD)


def _meet(what: str, name: str, group: ProcessGroup | None) -> None:
    ranks, started = dist.get_process_group_ranks(group), time.monotonic()
    try:
        if _watch is not None:
            problem = _watch.wait_for_start(what, name, ranks)
            if problem:
                raise RuntimeError(problem)
        elif dist.get_backend(group) == "gloo":
            dist.monitored_barrier(group, timedelta(seconds=START_TIMEOUT_S))
    except RuntimeError as error:
        seconds = time.monotonic() - started
        raise describe_failure(what, name, ranks, seconds, error) from error


def gather_objects(what: str, mine: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return what every process of a group (default: all) gave, in rank order; collective.

    Raises:
        CollectiveError: a rank is gone or did not arrive; `what` names the collective.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    name = "model" if group else "world"
    everyone: list[Any] = [None] * len(ranks)
    started = time.monotonic()
    note_collective(what, name)
    try:
        dist.all_gather_object(everyone, mine, group=group)
    except RuntimeError as error:
        seconds = time.monotonic() - started
        raise describe_failure(what, name, ranks, seconds, error) from error
    return everyone


def compare_settings(
    what: str,
    ranks: Sequence[int],
    everyone: Sequence[Mapping[str, str]],
    *,
    advice: str = "Start every rank with the same settings.",
) -> None:
    """Raise ValueError for the first setting on which ranks disagree."""
    for key in sorted({key for settings in everyone for key in settings}):
        values = [settings.get(key, "missing") for settings in everyone]
        usual = max(set(values), key=lambda value: (values.count(value), value == values[0]))
        odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
        if odd:
            found = values[ranks.index(odd[0])]
            raise ValueError(
                f"{what}: {key} is {found} on rank {_as_runs(odd)} and {usual} on the others."
                f" {advice}"
            )


def _key(rank: int) -> str:
    return f"neuron_moe/watch/{rank}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def _as_runs(ranks: Sequence[int]) -> str:
    """Write ranks as '0-7' or '0, 2, 4'."""
    ranks = sorted(ranks)
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
