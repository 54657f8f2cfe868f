"""Many streaming clients for some minutes: every answer compared, memory of the server watched."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from neuron_moe.serving.client import Server, complete

SAMPLE_S = 5.0


@dataclass
class Soak:
    """What came of it.

    Attributes:
        answers: complete and equal to what was expected.
        problems: the others, in words.
        memory_mib: of all processes of the server, every few seconds.
    """

    answers: int = 0
    problems: list[str] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)


def soak(
    server: Server,
    pid: int,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    *,
    clients: int,
    seconds: float,
) -> Soak:
    """Ask from several threads until the time is over."""
    result, lock, end = Soak(), threading.Lock(), time.monotonic() + seconds

    def ask(client: int) -> None:
        number = client
        while time.monotonic() < end:
            row = number % len(prompts)
            number += clients + 1
            try:
                got = complete(server, prompts[row], len(expected[row])).token_ids
                problem = None if got == list(expected[row]) else f"prompt {row}: {got}"
            except Exception as error:  # noqa: BLE001  any failure is a finding
                problem = f"prompt {row}: {type(error).__name__}: {error}"
            with lock:
                result.answers += problem is None
                if problem is not None:
                    result.problems.append(problem)

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        result.memory_mib.append(memory_of(pid))
        time.sleep(SAMPLE_S)
    for thread in threads:
        thread.join()
    return result


def memory_of(pid: int) -> float:
    """Return MiB of a process and all that it started."""
    parent = psutil.Process(pid)
    return sum(each.memory_info().rss for each in (parent, *parent.children(recursive=True))) / (
        1 << 20
    )
