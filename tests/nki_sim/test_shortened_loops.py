"""SimOptions.most_iterations: loops that run a few iterations, for those who ask what is issued."""

from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_sim import SimOptions, isa
from nki_sim.errors import UninitializedRead
from nki_sim.language import api as nl
from nki_sim.precedent import recording

SHORT = SimOptions(mode="indices", uninitialized="report", most_iterations=2)
WHOLE = SimOptions(mode="indices")
NUMBERS = np.arange(8, dtype=np.int32).reshape(1, 8)


def doubled(numbers: Any, rows: Any) -> Any:
    """Double a row that a loaded number names, in a loop of a loaded length."""
    out = nl.ndarray(rows.shape, dtype=rows.dtype, buffer=nl.shared_hbm)
    numbers_sb = nl.ndarray((1, 8), dtype=nl.int32, buffer=nl.sbuf)
    row_sb = nl.ndarray((1, rows.shape[1]), dtype=rows.dtype, buffer=nl.sbuf)
    isa.dma_copy(numbers_sb, numbers)
    end = isa.register_alloc()
    isa.register_load(end, numbers_sb[0:1, 7:8])

    def one(_number: Any) -> None:
        isa.dma_copy(row_sb, rows.ap([[32, 1], [1, 32]], scalar_offset=end, indirect_dim=0))
        isa.tensor_scalar(row_sb, row_sb, nl.multiply, 2.0)
        isa.dma_copy(out[0:1], row_sb)

    nl.fori_loop(0, end, one)
    return out


def iterations(run: Any) -> int:
    return sum(one.op == "loop_iteration" for one in run.trace)


def test_a_loop_runs_few_iterations_and_uses_the_same() -> None:
    rows, found, counts = np.zeros((8, 32), np.float32), [], []
    for options in (SHORT, WHOLE):
        with recording() as recorder:
            counts.append(iterations(nki_sim.run(doubled, NUMBERS, rows, options=options)))
        found.append(dict(recorder.uses))
    assert counts == [2, 7]
    assert found[0] == found[1]


def counted(numbers: Any) -> Any:
    """Count iterations in memory, and go through a second loop so often."""
    count_sb = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    other_sb = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    isa.memset(count_sb, 0)
    isa.memset(other_sb, 0)

    def more(_number: Any) -> None:
        isa.tensor_scalar(count_sb, count_sb, nl.add, 1)

    def others(_number: Any) -> None:
        isa.tensor_scalar(other_sb, other_sb, nl.add, 1)

    nl.fori_loop(0, 7, more)
    end = isa.register_alloc()
    isa.register_load(end, count_sb)
    nl.fori_loop(0, end, others)
    out = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.shared_hbm)
    isa.dma_copy(out, other_sb)
    return out


def test_no_bound_comes_from_a_shortened_loop() -> None:
    assert nki_sim.run(counted, NUMBERS, options=WHOLE).outputs.item() == 7
    with pytest.raises(UninitializedRead, match="used as an address or register"):
        nki_sim.run(counted, NUMBERS, options=SHORT)


def held(numbers: Any) -> Any:
    """Load a register of outside in every iteration."""
    numbers_sb = nl.ndarray((1, 8), dtype=nl.int32, buffer=nl.sbuf)
    isa.dma_copy(numbers_sb, numbers)
    last = isa.register_alloc()

    def one(_number: Any) -> None:
        isa.register_load(last, numbers_sb[0:1, 3:4])

    nl.fori_loop(0, 5, one)


def test_a_loop_that_sets_an_outer_register_runs_whole() -> None:
    assert iterations(nki_sim.run(held, NUMBERS, options=SHORT)) == 5


def nested(numbers: Any) -> Any:
    """Go through an inner loop as often as a list says: 0, 1, 2, ... times."""
    numbers_sb = nl.ndarray((1, 8), dtype=nl.int32, buffer=nl.sbuf)
    count_sb = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    isa.dma_copy(numbers_sb, numbers)
    isa.memset(count_sb, 0.0)

    def inner(_number: Any) -> None:
        isa.tensor_scalar(count_sb, count_sb, nl.add, 1.0)

    def one(number: Any) -> None:
        here_sb = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        at = numbers_sb.ap([[8, 1], [1, 1]], scalar_offset=number, indirect_dim=1)
        isa.tensor_copy(here_sb, at)
        end = isa.register_alloc()
        isa.register_load(end, here_sb)
        nl.fori_loop(0, end, inner)

    nl.fori_loop(0, 6, one)


def test_a_loop_goes_on_until_its_inner_loop_was_entered() -> None:
    run = nki_sim.run(nested, np.array([[0, 0, 0, 0, 1, 1, 1, 1]], np.int32), options=SHORT)
    assert [one.op for one in run.trace].count("loop_begin") == 1 + 5
    assert iterations(run) == 5 + 1


def test_unwritten_memory_must_be_seen() -> None:
    with pytest.raises(ValueError, match='Use "report"'):
        SimOptions(mode="indices", uninitialized="off", most_iterations=2)
    with pytest.raises(ValueError, match="must be 0"):
        SimOptions(most_iterations=-1)
