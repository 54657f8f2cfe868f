"""Runs a function on several gloo ranks that are forked from this process."""

import gc
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def cuda_devices(folder: Path = Path("/dev")) -> int:
    """Count the GPUs that torch may use, by their files: to ask CUDA would start it."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(list(folder.glob("nvidia[0-9]*"))) if shown is None else len(shown.split(","))
    return count if shown != "" and torch.cuda.is_available() else 0


def start_ranks(
    size: int,
    function: Callable[[int], Any],
    *,
    timeout_s: float = 120.0,
    initialize: bool = True,
) -> list[tuple[str, Any]]:
    """Return ("ok", what function(rank) returned) or ("error", why not) of each rank."""
    context = multiprocessing.get_context("fork")
    port = _free_port()
    started = []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_child, args=(function, rank, size, port, theirs, initialize), daemon=True
        )
        process.start()
        theirs.close()
        started.append((process, ours))
    results: list[tuple[str, Any]] = []
    deadline = time.monotonic() + timeout_s
    for _, pipe in started:
        try:
            remaining = max(0.0, deadline - time.monotonic())
            result = pipe.recv() if pipe.poll(remaining) else ("error", "no answer in time")
        except EOFError:
            result = ("error", "process ended without an answer")
        results.append(result)
        pipe.close()
    for process, _ in started:
        process.join(timeout=2)
        if process.is_alive():
            process.kill()
    return results


def values_of(results: list[tuple[str, Any]]) -> list[Any]:
    """Return what the ranks returned.

    Raises:
        RuntimeError: one of them failed; why.
    """
    failed = [
        f"rank {rank}: {text}" for rank, (kind, text) in enumerate(results) if kind == "error"
    ]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [value for _, value in results]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(
    function: Callable[[int], Any], rank: int, size: int, port: int, pipe: Any, initialize: bool
) -> None:
    gc.freeze()  # garbage of the parent's groups would wait for threads that are not here
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        if initialize:
            dist.init_process_group(
                "gloo", rank=rank, world_size=size, timeout=timedelta(seconds=120)
            )
        pipe.send(("ok", function(rank)))
    except BaseException as error:  # noqa: BLE001  reported by the parent
        pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        pipe.close()
        os._exit(0)
