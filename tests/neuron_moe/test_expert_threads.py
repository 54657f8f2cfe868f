"""Experts side by side on threads of their own."""

import multiprocessing
import threading

import pytest
import torch

from neuron_moe.backends.expert_threads import run_side_by_side


@pytest.fixture(autouse=True)
def four_threads() -> object:
    """Let torch have four threads, and the number it had afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 50])
def test_every_task_runs_once(count: int) -> None:
    done: list[int] = []
    run_side_by_side([lambda number=number: done.append(number) for number in range(count)])
    assert sorted(done) == list(range(count))
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(("count", "width"), [(2, 2), (3, 1), (4, 1), (9, 1)])
def test_few_tasks_share_all_threads(count: int, width: int) -> None:
    widths: list[int] = []
    run_side_by_side([lambda: widths.append(torch.get_num_threads())] * count)
    assert widths == [width] * count


def test_tasks_run_in_the_mode_of_the_caller() -> None:
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    run_side_by_side([look] * 4)
    with torch.inference_mode():
        run_side_by_side([look] * 4)
    assert seen == [(False, False)] * 4 + [(True, False)] * 4


def test_an_error_of_a_task_reaches_the_caller_and_the_threads_go_on() -> None:
    def fail() -> None:
        raise RuntimeError("no such product")

    with pytest.raises(RuntimeError, match="no such product"):
        run_side_by_side([fail, *[lambda: None] * 7])
    test_every_task_runs_once(9)


def test_callers_on_several_threads_get_their_own_results() -> None:
    results: dict[int, list[int]] = {caller: [] for caller in range(3)}

    def call(caller: int) -> None:
        torch.set_num_threads(4)
        tasks = [lambda number=number: results[caller].append(number) for number in range(20)]
        run_side_by_side(tasks)

    callers = [threading.Thread(target=call, args=(caller,)) for caller in results]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert all(sorted(result) == list(range(20)) for result in results.values())


def _run_in_child() -> None:
    torch.set_num_threads(4)
    done: list[int] = []
    run_side_by_side([lambda number=number: done.append(number) for number in range(9)])
    assert sorted(done) == list(range(9))


def test_a_forked_process_has_threads_of_its_own() -> None:
    test_every_task_runs_once(4)
    child = multiprocessing.get_context("fork").Process(target=_run_in_child)
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 0
