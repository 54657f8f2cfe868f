"""A launch keeps NumPy on one thread and gives the setting back, also after an error."""

from __future__ import annotations

from typing import Any

import pytest

import nki_sim
from nki_sim.machine.host_threads import _thread_functions, one_blas_thread

FUNCTIONS = _thread_functions()
needs_openblas = pytest.mark.skipif(FUNCTIONS is None, reason="NumPy runs without OpenBLAS here")


@needs_openblas
def test_a_launch_uses_one_thread_and_restores_the_number() -> None:
    assert FUNCTIONS is not None
    getter, setter = FUNCTIONS
    before = getter()
    setter(2)
    try:
        during = nki_sim.run(lambda: getter()).outputs
        assert (during, getter()) == (1, 2)
        with pytest.raises(ZeroDivisionError):
            nki_sim.run(lambda: 1 // 0)
        assert getter() == 2
    finally:
        setter(before)


def test_without_openblas_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nki_sim.machine.host_threads._thread_functions", lambda: None)
    ran: list[Any] = []
    with one_blas_thread():
        ran.append(1)
    assert ran == [1]
