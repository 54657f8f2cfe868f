"""What happens when a rank dies, hangs, or was started with other settings.

Each process publishes, once a second and from a thread of its own, which collective it entered
last. When a collective fails, the survivors read these notes and say which rank is gone (its notes
have stopped) or has not arrived (its last collective is an older one), instead of an address and a
port.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

HEARTBEAT_S = 0.5
STALE_AFTER_S = 3.0
DEFAULT_TIMEOUT_S = 300.0


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
    """Publishes this rank's progress and reads that of the others.

    Args:
        store: key-value store that all ranks reach; a copy with a connection of its own is made.
        rank: this process.
        world_size: number of processes.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._beat_store = store.clone()
        self._read_store = store.clone()
        self._last: tuple[int, str] = (0, "none yet")
        self._stop = threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self._beats = 0
        self._beat()
        self._thread = threading.Thread(target=self._run, name="neuron-moe-watch", daemon=True)
        self._thread.start()

    def note(self, collective: str, group: str) -> None:
        """Remember the collective this rank enters; the thread publishes it."""
        self._last = (self._last[0] + 1, f"{collective} over group {group!r}")

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=2.0)

    def suspects(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the ranks, of the given ones, that seem to have ended or fallen behind."""
        deadline = time.monotonic() + STALE_AFTER_S + 2 * HEARTBEAT_S
        others = [rank for rank in ranks if rank != self.rank]
        while True:
            try:
                found = self._look(others)
            except RuntimeError as error:
                return {0: f"its rendezvous store does not answer ({_first_line(error)})"}
            if found or time.monotonic() > deadline:
                return found or self._behind(others)
            time.sleep(HEARTBEAT_S)

    def _look(self, others: Sequence[int]) -> dict[int, str]:
        now = time.monotonic()
        found = {}
        for rank in others:
            value = self._read(rank)
            with self._lock:
                before, since = self._seen.get(rank, ("", now))
                if value != before:
                    self._seen[rank] = (value, now)
                    continue
            if now - since > STALE_AFTER_S:
                found[rank] = f"no sign of life for {now - since:.1f} s"
        return found

    def _behind(self, others: Sequence[int]) -> dict[int, str]:
        reached = {rank: json.loads(self._seen[rank][0]) for rank in others if rank in self._seen}
        return {
            rank: f"alive, but its last collective was number {entry['number']}: {entry['name']}"
            for rank, entry in reached.items()
            if entry["number"] < self._last[0]
        }

    def _read(self, rank: int) -> str:
        value: bytes = self._read_store.get(_key(rank))
        return value.decode()

    def _beat(self) -> None:
        self._beats += 1
        number, name = self._last
        entry = {"beat": self._beats, "number": number, "name": name}
        self._beat_store.set(_key(self.rank), json.dumps(entry))

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            try:
                self._beat()
            except RuntimeError:
                return  # the store is gone; the failing collective will tell


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
    """Return the error that names rank, collective and, where the watch can tell, the culprit."""
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
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    everyone: list[Any] = [None] * len(ranks)
    mine = {key: repr(value) for key, value in values.items()}
    started = time.monotonic()
    try:
        dist.all_gather_object(everyone, mine, group=group)
    except RuntimeError as error:
        seconds = time.monotonic() - started
        what = f"comparison of {what} settings"
        raise describe_failure(
            what, "model" if group else "world", ranks, seconds, error
        ) from error
    compare_settings(what, ranks, everyone)


def compare_settings(
    what: str, ranks: Sequence[int], everyone: Sequence[Mapping[str, str]]
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
                " Start every rank with the same settings."
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
