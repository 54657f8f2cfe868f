"""Several ranks of a model on this machine: processes that talk over gloo."""

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.failure import DEFAULT_TIMEOUT_S, CollectiveError, gather_objects

T = TypeVar("T")
_PATIENCE_S = 5.0
_END = "end of the work"


class RankError(RuntimeError):
    """A rank failed, and said why."""


_RANKS_PER_CORE = 4
_MOST_RANKS = 16  # on however few cores


def check_num_processes(tp: int, ep: int) -> None:
    """Raise ValueError if tp * ep ranks are too many processes for this machine."""
    cores = os.cpu_count() or 1
    most = max(_MOST_RANKS, _RANKS_PER_CORE * cores)
    if tp * ep > most and not _is_placed():
        raise ValueError(
            f"--tp {tp} x --ep {ep}: {tp * ep} processes, must be at most {most} on this machine"
            f" of {cores} cores. Lower them, or start the ranks with torchrun on several machines."
        )


def _is_placed() -> bool:
    """Say whether torchrun started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_on_ranks(
    tp: int, ep: int, work: Callable[[], T], *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> T:
    """Run `work` on tp * ep ranks; return what rank 0 got.

    Rank 0 is this process, the others are forked from it and print nothing. Under torchrun, which
    started the processes already, each only takes its place.

    Args:
        tp: ranks that split each expert.
        ep: ranks that split the experts.
        work: what each rank does, after the groups were built.
        timeout_s: longest wait for a rank that is alive but does not arrive.

    Raises:
        ValueError: these are too many processes; none was started.
        RankError: another rank failed.
    """
    size = tp * ep
    if size == 1:
        return work()
    if _is_placed():
        with _place(tp, ep, timeout_s), _silence(int(os.environ["RANK"])):
            return work()
    check_num_processes(tp, ep)
    context = multiprocessing.get_context("fork")
    address = f"tcp://127.0.0.1:{_free_port()}"
    children = []
    for rank in range(1, size):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(
            target=_child, args=(rank, tp, ep, timeout_s, address, work, theirs)
        )
        child.start()
        theirs.close()
        children.append((child, ours))
    try:
        with _connected(0, size, address), _place(tp, ep, timeout_s):
            result = work()
    except BaseException as error:
        dead = _dead(children)
        for child, _ in children:
            child.terminate()
        if isinstance(error, RuntimeError):  # perhaps only because another rank went away
            _raise_what_others_said(children, dead, error)
        raise
    finally:
        for child, _ in children:
            _end_child(child)
    _raise_what_others_said(children, {}, None)
    return result


def _dead(children: list[Any]) -> dict[int, int]:
    """Return the signal that ended each rank that a signal ended."""
    codes = {rank: child.exitcode for rank, (child, _) in enumerate(children, start=1)}
    return {rank: -code for rank, code in codes.items() if code is not None and code < 0}


def _end_child(child: Any) -> None:
    """Wait for a child that is about to end; end one that does not, such as a stopped one."""
    child.join(_PATIENCE_S)
    if child.is_alive():
        child.kill()
        child.join()


def _raise_what_others_said(
    children: list[Any], dead: dict[int, int], cause: BaseException | None
) -> None:
    """Raise RankError with what went wrong first: a signal, a rank's own error, one it saw."""
    size = len(children) + 1
    for rank, number in dead.items():
        name = signal.Signals(number).name
        memory = " Perhaps the memory of this machine ran out." if name == "SIGKILL" else ""
        raise RankError(f"rank {rank} of {size}: ended by {name}.{memory}") from cause
    said: dict[int, str] = {} if cause is None else {0: f"{type(cause).__name__}: {cause}"}
    for rank, (_, pipe) in enumerate(children, start=1):
        with contextlib.suppress(EOFError):
            if pipe.poll():
                said[rank] = pipe.recv()
    first = min(said, key=lambda rank: _distance(said[rank]), default=0)
    if first > 0:
        raise RankError(f"rank {first} of {size}: {said[first]}") from cause


def _distance(text: str) -> int:
    """Say how far from the cause an error is: its own, seen in a collective, seen at the end."""
    if not text.startswith(CollectiveError.__name__):
        return 0
    return 2 if _END in text.partition(" failed after ")[0] else 1


def _child(
    rank: int,
    tp: int,
    ep: int,
    timeout_s: float,
    address: str,
    work: Callable[[], Any],
    pipe: Any,
) -> None:
    # Garbage of an earlier group holds threads that a forked process does not have; collecting it
    # here would abort.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which ends the others
    torch.set_num_threads(1)

    def tell() -> None:
        try:
            with _silence(rank):
                work()
        except Exception as error:
            # Before the connections close, which is what the other ranks will see.
            pipe.send(f"{type(error).__name__}: {error}")
            raise

    try:
        with _connected(rank, tp * ep, address), _place(tp, ep, timeout_s):
            tell()
    except Exception:  # noqa: BLE001  rank 0 says what it was sent, or what it saw
        sys.exit(1)


@contextmanager
def _connected(rank: int, size: int, address: str) -> Iterator[None]:
    patience = timedelta(seconds=DEFAULT_TIMEOUT_S)
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=size, timeout=patience
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _place(tp: int, ep: int, timeout_s: float) -> Iterator[None]:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, timeout_s=timeout_s
    )
    try:
        yield
        gather_objects(_END, None)  # nobody leaves while others still talk
    finally:
        parallel_state.destroy_model_parallel()


@contextmanager
def _silence(rank: int) -> Iterator[None]:
    """Print nothing on any rank but 0."""
    if rank == 0:
        yield
        return
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout = sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
