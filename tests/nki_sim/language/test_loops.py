"""Dynamic loops and registers of NKI 0.6: iterations, nesting, traces, what does not compile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_sim import AccumulateError, LanguageError, SimOptions, UninitializedRead, isa
from nki_sim.language import api as nl
from nki_sim.machine import VirtualRegister
from nki_sim.machine.iterations import changing_names

pytestmark = pytest.mark.usefixtures("nki_0_6")


def counter(value: int = 0) -> Any:
    tile = nl.ndarray((1, 1), nl.int32)
    isa.memset(tile, value)
    return tile


def bump(tile: Any, by: int = 1) -> None:
    isa.tensor_scalar(tile, tile, nl.add, by)


def saved(*tiles: Any) -> Any:
    out = nl.ndarray((len(tiles), 1), nl.int32, buffer=nl.shared_hbm)
    for k, tile in enumerate(tiles):
        isa.dma_copy(out[k : k + 1], tile)
    return out


def numbers(kernel: Callable[[], Any]) -> list[int]:
    return [int(value) for value in nki_sim.run(kernel).outputs[:, 0]]


@pytest.mark.parametrize(
    ("start", "stop", "step", "iterations"),
    [(0, 5, 1, 5), (2, 5, 1, 3), (0, 7, 3, 3), (5, 2, 1, 0), (-3, 2, 1, 5)],
)
def test_a_dynamic_range_counts_as_pythons(
    start: int, stop: int, step: int, iterations: int
) -> None:
    def kernel() -> Any:
        total, seen = counter(), counter()
        end = isa.register_alloc(stop)
        for i in nl.dynamic_range(isa.register_alloc(start), end, step):
            bump(total)
            isa.register_store(seen, i)
        return saved(total, seen)

    last = list(range(start, stop, step))[-1] if iterations else 0
    assert numbers(kernel) == [iterations, last]


def test_loops_nest_and_the_trace_shows_them() -> None:
    def kernel() -> Any:
        total = counter()
        for _ in nl.dynamic_range(2):
            for _ in nl.dynamic_range(isa.register_alloc(3)):
                bump(total)
        return saved(total)

    run = nki_sim.run(kernel)
    assert run.outputs[0, 0] == 6
    ops = [(record.op, record.loop_depth) for record in run.trace if "loop" in record.op]
    inner = [("loop_begin", 1), *[("loop_iteration", 2)] * 3, ("loop_end", 1)]
    assert ops == [("loop_begin", 0), *([("loop_iteration", 1), *inner] * 2), ("loop_end", 0)]
    assert {r.loop_depth for r in run.trace if r.op == "tensor_scalar"} == {2}


def test_while_loops_nest() -> None:
    def kernel() -> Any:
        outer, total = counter(2), counter()
        a, b = isa.register_alloc(outer), isa.register_alloc()
        while a:
            inner = counter(3)
            isa.register_load(b, inner)
            while b:
                bump(total)
                bump(inner, -1)
                isa.register_load(b, inner)
            bump(outer, -1)
            isa.register_load(a, outer)
        return saved(total)

    run = nki_sim.run(kernel)
    assert run.outputs[0, 0] == 6
    assert [record.op for record in run.trace].count("loop_begin") == 3


def test_the_counter_of_a_fori_loop_is_passed_by_value() -> None:
    def kernel() -> Any:
        total = counter()

        def body(i: Any) -> None:
            isa.register_move(i, 100)
            bump(total)

        nl.fori_loop(0, isa.register_alloc(4), body)
        return saved(total)

    assert numbers(kernel) == [4]


def test_registers_hold_32_bits_with_a_sign() -> None:
    def kernel() -> Any:
        register, other = isa.register_alloc(), isa.register_alloc(-7)
        source = nl.ndarray((1, 1), nl.uint32)
        isa.memset(source, 0xFFFFFFFF)
        isa.register_load(register, source)
        first, second = counter(), counter()
        isa.register_store(first, register)
        isa.register_move(register, other)
        isa.register_store(second, register)
        return saved(first, second)

    assert numbers(kernel)[1] == -7
    for value in (-(1 << 31) - 1, 1 << 32):
        with pytest.raises(LanguageError, match="32-bit"):
            nki_sim.run(lambda value=value: isa.register_alloc(value))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (-(1 << 31), -(1 << 31)),
        (0, 0),
        ((1 << 31) - 1, (1 << 31) - 1),
        (1 << 31, -(1 << 31)),
        ((1 << 32) - 1, -1),
    ],
)
def test_a_register_is_read_with_its_sign(written: int, read: int) -> None:
    register = VirtualRegister()
    register.write(written)
    assert register.read() == read


def test_a_register_is_loaded_from_hbm() -> None:
    def kernel(x: Any) -> Any:
        total = counter()
        for _ in nl.dynamic_range(isa.register_alloc(x[1:2])):
            bump(total)
        return saved(total)

    assert nki_sim.run(kernel, np.array([9, 4], np.int32)).outputs[0, 0] == 4


def loop_in_no_reorder() -> None:
    with nl.no_reorder():
        for _ in nl.dynamic_range(2):
            pass


def no_reorder_in_loop() -> None:
    for _ in nl.dynamic_range(2):
        with nl.no_reorder():
            counter()


def test_no_reorder_may_stand_in_a_loop_but_not_around_one() -> None:
    assert nki_sim.run(no_reorder_in_loop).findings == []
    with pytest.raises(LanguageError, match="no_reorder"):
        nki_sim.run(loop_in_no_reorder)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "positive": (lambda: list(nl.dynamic_range(0, 4, 0)), LanguageError),
    "returns nothing": (lambda: nl.fori_loop(0, 2, lambda i: i), LanguageError),
    "a register": (lambda: nl.while_loop(isa.register_alloc(1), lambda r: None), LanguageError),
    "register": (lambda: list(nl.dynamic_range(isa.register_alloc())), UninitializedRead),
    "one dynamic index": (
        lambda: nl.ndarray((4, 8, 8), nl.float32)[
            :, isa.register_alloc(1), nl.ds(isa.register_alloc(1), 2)
        ],
        LanguageError,
    ),
    "one element": (
        lambda: isa.register_load(isa.register_alloc(), nl.ndarray((1, 2), nl.int32)),
        nki_sim.IllegalOperand,
    ),
    "SBUF or HBM": (
        lambda: isa.register_alloc(nl.ndarray((1, 1), nl.int32, buffer=nl.psum)),
        nki_sim.IllegalOperand,
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_loop_or_register_refuses(message: str) -> None:
    body, error = REFUSED[message]
    with pytest.raises(error, match=message):
        nki_sim.run(body)


def test_an_accumulation_that_a_loop_makes_ambiguous_is_refused() -> None:
    def kernel() -> Any:
        a, b = nl.ndarray((32, 16), nl.bfloat16), nl.ndarray((32, 8), nl.bfloat16)
        isa.memset(a, 1.0)
        isa.memset(b, 1.0)
        bank = nl.ndarray((16, 8), nl.float32, buffer=nl.psum)
        for _ in nl.dynamic_range(3):
            isa.nc_matmul(bank, a, b)
        out = nl.ndarray((16, 8), nl.float32, buffer=nl.shared_hbm)
        tile = nl.ndarray((16, 8), nl.float32)
        isa.tensor_copy(tile, bank)
        isa.dma_copy(out, tile)
        return out

    with pytest.raises(AccumulateError, match="True or False"):
        nki_sim.run(kernel)
    run = nki_sim.run(kernel, options=SimOptions(accumulate="report"))
    assert (run.outputs == 96).all()
    assert [finding.kind for finding in run.findings] == ["accumulate"]


def escaping() -> Any:
    for _ in nl.dynamic_range(2):
        tile = counter(1)
    return saved(tile)


def escaping_to_an_engine() -> Any:
    for _ in nl.dynamic_range(2):
        tile = counter(1)
    copy = counter(1)
    isa.tensor_copy(copy, tile)
    return saved(copy)


def written_after_its_loop() -> Any:
    for _ in nl.dynamic_range(2):
        tile = counter(1)
    isa.memset(tile, 0)
    return saved(counter(1))


def breaking_inside() -> Any:
    total, outer = counter(), isa.register_alloc(2)
    left = counter(2)
    while outer:
        inner = isa.register_alloc(3)
        while inner:
            bump(total)
            break
        bump(left, -1)
        isa.register_load(outer, left)
    return saved(total)


def conditional_inside() -> Any:
    total, register = counter(), isa.register_alloc(2)
    while register:
        if register:
            bump(total)
        isa.register_load(register, total)
    return saved(total)


def escaping_in_hbm() -> Any:
    for _ in nl.dynamic_range(2):
        shared = nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm)
    tile = counter(1)
    isa.dma_copy(shared, tile)
    return shared


def breaking() -> Any:
    total = counter()
    for _ in nl.dynamic_range(3):
        bump(total)
        break
    return saved(total)


def returning() -> Any:
    total = counter()
    register = isa.register_alloc(3)
    while register:
        bump(total)
        return saved(total)
    return None


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (escaping, r"dma_copy: src: expected a tensor that exists outside"),
        (
            escaping_in_hbm,
            rf"at \S+test_loops.py:{escaping_in_hbm.__code__.co_firstlineno + 2}\b",
        ),
        (escaping_to_an_engine, r"tensor_copy: \w+: expected a tensor that exists outside"),
        (written_after_its_loop, r"memset: dst: expected a tensor that exists outside"),
        (conditional_inside, r"register: expected a condition known at compile time"),
        (breaking_inside, r"test_loops.py:\d+: dynamic loop: body: .*found break or return"),
        (breaking, r"test_loops.py:\d+: dynamic loop: body: .*found break or return"),
        (returning, r"test_loops.py:\d+: dynamic loop: body: .*found break or return"),
    ],
)
def test_what_no_dynamic_loop_can_do_is_refused_with_its_line(
    kernel: Callable[[], Any], message: str
) -> None:
    with pytest.raises(LanguageError, match=message):
        nki_sim.run(kernel)


def flip(tiles: list[Any]) -> None:
    slot = 0
    for _ in nl.dynamic_range(isa.register_alloc(4)):
        bump(tiles[slot])
        slot = 1 - slot


def first_iteration_flag(tiles: list[Any]) -> None:
    first = True
    for _ in nl.dynamic_range(isa.register_alloc(3)):
        if first:
            bump(tiles[0])
        first = False
        bump(tiles[1])


def first_iteration_end(tiles: list[Any]) -> None:
    first = True
    for _ in nl.dynamic_range(isa.register_alloc(3)):
        bump(tiles[1])
        if first:
            bump(tiles[0])
        first = False


def count(tiles: list[Any]) -> None:
    calls = [0]

    def body(_: Any) -> None:
        calls[0] += 1
        bump(tiles[0], calls[0])

    nl.fori_loop(0, isa.register_alloc(3), body)


def late(tiles: list[Any]) -> None:
    iteration = 0
    register = isa.register_alloc(4)
    left = counter(4)
    while register:
        iteration += 1
        if iteration == 3:
            bump(tiles[1])
        bump(left, -1)
        isa.register_load(register, left)


def swap(tiles: list[Any]) -> None:
    a, b = tiles
    for _ in nl.dynamic_range(2):
        bump(a)
        a, b = b, a


def carry(tiles: list[Any]) -> None:
    last = tiles[0]
    for _ in nl.dynamic_range(3):
        fresh = counter()
        isa.tensor_copy(fresh, last)
        last = fresh


def inner(tiles: list[Any]) -> None:
    slot = 0
    for _ in nl.dynamic_range(2):
        for _ in nl.dynamic_range(2):
            bump(tiles[slot])
        slot = 1 - slot


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (flip, "slot"),
        (first_iteration_flag, "first"),
        (first_iteration_end, "first"),
        (count, "calls"),
        (late, "iteration"),
        (swap, "a"),
        (carry, "last"),
        (inner, "slot"),
    ],
)
def test_python_state_that_changes_between_iterations_is_named(
    loop: Callable[[list[Any]], None], name: str
) -> None:
    def kernel() -> Any:
        tiles = [counter(), counter()]
        loop(tiles)
        return saved(*tiles)

    with pytest.raises(LanguageError, match=f"`{name}`.*the same instructions on every") as e:
        nki_sim.run(kernel)
    assert "test_loops.py" in str(e.value)


def test_what_an_iteration_makes_and_forgets_is_no_state() -> None:
    def kernel() -> Any:
        total, k = counter(), 7
        tiles = [counter(), counter(), counter()]
        for i in nl.dynamic_range(isa.register_alloc(3)):
            own = counter()
            register = isa.register_alloc()
            isa.register_load(register, total)
            for k in range(3):
                bump(tiles[k])
            isa.register_store(own, i)
            nl.shared_identity_matrix(16)
            isa.tensor_tensor(total, total, own, nl.add)
            for _ in nl.dynamic_range(i):
                bump(own)
                isa.tensor_tensor(total, total, own, nl.add)
        bump(total, k)
        return saved(total)

    assert numbers(kernel) == [0 + 1 + 2 + 2 + 3 + 4 + 2]


USES: list[Callable[[Any], Any]] = [
    lambda register: register + 1,
    lambda register: int(register),
    lambda register: register < 2,
    lambda register: register == 3,
    lambda register: register != 3,
    lambda register: register in (1, 2),
    lambda register: 1 in [register],
]


@pytest.mark.parametrize("use", USES)
def test_registers_are_no_numbers_of_python(use: Callable[[Any], Any]) -> None:
    with pytest.raises(
        LanguageError, match=r"test_loops.py:\d+: register: expected a number known"
    ):
        nki_sim.run(lambda: use(isa.register_alloc(3)))


@pytest.mark.parametrize("value", [1, 7])
def test_a_condition_that_no_iteration_changes_is_refused(value: int) -> None:
    iterations = [0]

    def begin() -> None:
        iterations[0] += 1

    def kernel() -> None:
        register = isa.register_alloc(value)
        while register:
            begin()

    with pytest.raises(LanguageError, match=rf"found {value} for 10001 iterations"):
        nki_sim.run(kernel)
    assert iterations == [10_002]


def test_a_condition_that_iterations_change_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nki_sim.machine.program._STUCK_ITERATIONS", 3)

    def kernel() -> Any:
        left, iterations = counter(12), counter()
        register = isa.register_alloc(left)
        while register:
            bump(left, -1)
            bump(iterations)
            isa.register_load(register, left)
        return saved(iterations)

    assert numbers(kernel) == [12]


def test_a_register_is_not_none() -> None:
    def kernel() -> Any:
        register = isa.register_alloc(1)
        assert register is not None
        return saved(counter(0 if register == None else 5))  # noqa: E711  the dialect's form

    assert numbers(kernel) == [5]


BODY = """
def kernel(slot, count, box, late, read):
    for iteration in nl.dynamic_range(4):
        slot = 1 - slot
        fresh = iteration
        use(fresh, read)
        count += 1
        box.flag = True
        use(late)
        late = fresh
"""


def test_the_variables_that_a_body_carries_on_are_known(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(BODY)
    assert changing_names(str(file), 3) == ("slot", "count", "box", "late")
    assert changing_names(str(tmp_path / "gone.py"), 3) == ()
