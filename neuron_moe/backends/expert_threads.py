"""Threads that compute experts side by side, each by itself.

One product after the other, each split over all threads, meets at a barrier twice for each expert.
Experts side by side meet once for a layer. Where there are fewer tasks than threads, each worker
has several threads of its own for its products.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import torch

Task = Callable[[], None]


class _Order(NamedTuple):
    """What each worker gets: tasks that all of them draw from, and where to report the end."""

    tasks: Iterator[Task]
    is_inference: bool
    done: "SimpleQueue[BaseException | None]"


class _Workers:
    """Some threads that wait for tasks, each with `width` threads for the products of torch."""

    def __init__(self, size: int, width: int) -> None:
        self._orders: list[SimpleQueue[_Order]] = [SimpleQueue() for _ in range(size)]
        ready: SimpleQueue[None] = SimpleQueue()
        for number, orders in enumerate(self._orders):
            threading.Thread(
                target=_work, args=(orders, width, ready), name=f"experts-{number}", daemon=True
            ).start()
        for _ in self._orders:
            ready.get()

    def run(self, tasks: Sequence[Task]) -> None:
        """Run tasks, whoever is free taking the next; raise what the first to fail raised."""
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        order = _Order(iter(tasks), torch.is_inference_mode_enabled(), done)
        for orders in self._orders:
            orders.put(order)
        errors = [error for error in (done.get() for _ in self._orders) if error is not None]
        if errors:
            raise errors[0]


def run_side_by_side(tasks: Sequence[Task]) -> None:
    """Run tasks that need no gradient on all threads of torch; return when all are done."""
    num_threads = torch.get_num_threads()
    width = max(1, num_threads // max(1, len(tasks)))
    if len(tasks) == 1 or num_threads == 1:
        for task in tasks:
            task()
        return
    _workers(os.getpid(), num_threads, width).run(tasks)


@functools.cache
def _workers(_process: int, num_threads: int, width: int) -> _Workers:
    """Return the workers of this process; a forked one has none of its parent's threads."""
    workers = _Workers(num_threads // width, width)
    torch.set_num_threads(num_threads)  # each worker set its own, the last one for new threads too
    return workers


def _work(orders: "SimpleQueue[_Order]", width: int, ready: "SimpleQueue[None]") -> None:
    torch.get_num_threads()  # a thread takes the number of the others at its first look
    torch.set_num_threads(width)
    ready.put(None)
    while True:
        order = orders.get()
        order.done.put(_draw(order))


def _draw(order: _Order) -> BaseException | None:
    """Run tasks until there are none left; return what went wrong."""
    try:
        with torch.inference_mode(order.is_inference), torch.no_grad():
            for task in order.tasks:
                task()
    except BaseException as error:  # noqa: BLE001  raised again by who gave the order
        return error
    return None
