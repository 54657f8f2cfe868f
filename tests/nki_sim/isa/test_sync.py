"""Meetings of two cores: what barriers and exchanges do, order, and refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_sim import DeadlockError, DivergenceError, IllegalOperand, SimOptions, isa
from nki_sim.language import api as nl

ORDERS = [
    SimOptions(start_core=0),
    SimOptions(start_core=1),
    *[SimOptions(preempt=p, seed=seed) for p, seed in ((0.05, 1), (0.5, 2), (0.5, 3))],
]
IDS = ["core-0-first", "core-1-first", "preempt-1", "preempt-2", "preempt-3"]


def filled(value: float, shape: tuple[int, int] = (16, 8), dtype: Any = nl.float32) -> Any:
    tile = nl.ndarray(shape, dtype)
    isa.memset(tile, value)
    return tile


def save(core: int, tile: Any) -> Any:
    out = nl.ndarray((2, *tile.shape), tile.dtype, buffer=nl.shared_hbm)
    isa.dma_copy(out[core], tile)
    return out


def exchange(src: Any, dst: Any, pipe: int = 0, **keywords: Any) -> None:
    other = 1 - nl.program_id(0)
    isa.sendrecv(src, dst, other, other, pipe, **keywords)


@pytest.mark.parametrize("options", ORDERS, ids=IDS)
def test_an_exchange_gives_each_core_the_others_tile(options: SimOptions) -> None:
    def kernel() -> Any:
        core = nl.program_id(0)
        mine, theirs = filled(core + 1.0), filled(0.0)
        for turn in range(3):
            exchange(mine, theirs, pipe=turn % 2)
            isa.tensor_scalar(mine, theirs, nl.multiply, 10.0)
        return save(core, mine)

    out = nki_sim.run(kernel, lnc=2, options=options).outputs
    assert (out[0] == 2000).all()
    assert (out[1] == 1000).all()


def test_the_source_may_change_right_after_an_exchange() -> None:
    """The transfer takes the values of the meeting."""

    def kernel() -> Any:
        core = nl.program_id(0)
        mine, theirs = filled(core + 1.0), filled(0.0)
        exchange(mine, theirs)
        isa.memset(mine, 99.0)
        return save(core, theirs)

    assert nki_sim.run(kernel, lnc=2).outputs[:, 0, 0].tolist() == [2.0, 1.0]


def test_unwritten_elements_stay_unwritten_on_the_other_core() -> None:
    def kernel() -> Any:
        core = nl.program_id(0)
        mine, theirs = nl.ndarray((16, 8), nl.float32), filled(0.0)
        isa.memset(mine[:, 0:4], 1.0)
        exchange(mine, theirs)
        return save(core, theirs)

    with pytest.raises(
        nki_sim.UninitializedRead, match=r"test_sync.py:\d+: sendrecv: src: .*128 of 256"
    ):
        nki_sim.run(kernel, lnc=2)


@pytest.mark.parametrize("cores", [(0, 1), [0, 1], [1, 0]], ids=str)
@pytest.mark.parametrize("where", ["hbm", "sbuf"])
def test_a_barrier_takes_cores_and_data_as_kernels_write_them(cores: Any, where: str) -> None:
    def kernel() -> Any:
        core = nl.program_id(0)
        tile = filled(core + 1.0)
        out = save(core, tile)
        isa.core_barrier(out if where == "hbm" else tile, cores)
        return out

    assert nki_sim.run(kernel, lnc=2).findings == []


@pytest.mark.parametrize("cores", [0, (0,), (0, 1)], ids=str)
def test_a_barrier_of_one_core_does_nothing(cores: Any) -> None:
    def kernel() -> Any:
        tile = filled(1.0)
        for _ in range(2):
            isa.core_barrier(tile, cores)
        out = nl.ndarray((16, 8), nl.float32, buffer=nl.shared_hbm)
        isa.dma_copy(out, tile)
        return out

    done = nki_sim.run(kernel)
    assert (done.outputs == 1).all()
    first, second = (record.facts for record in done.trace if record.op == "core_barrier")
    assert (first.partners, second.partners) == (1, 1)
    assert first.key != second.key


def test_the_records_of_partners_share_a_key_that_no_other_meeting_has() -> None:
    def kernel() -> Any:
        core = nl.program_id(0)
        mine, theirs = filled(core + 1.0), filled(0.0)
        for _ in range(2):
            exchange(mine, theirs)
            isa.core_barrier(mine, (0, 1))
        return save(core, theirs)

    trace = nki_sim.run(kernel, lnc=2).trace
    keys = [r.facts.key for r in trace if r.op in ("sendrecv", "core_barrier")]
    assert len(keys) == 8
    assert all(keys.count(key) == 2 for key in keys)
    facts = next(r.facts for r in trace if r.op == "sendrecv")
    assert (facts.moved_bytes, facts.partners, facts.path) == (16 * 8 * 4, 2, "dma")


def on_core_1(then: Callable[[], Any], otherwise: Callable[[], Any]) -> Callable[[], Any]:
    def kernel() -> Any:
        core = nl.program_id(0)
        (then if core == 1 else otherwise)()
        return save(core, filled(1.0))

    return kernel


def send(shape: tuple[int, int] = (16, 8), dtype: Any = nl.float32, pipe: int = 0) -> Any:
    return lambda: exchange(filled(1.0, shape, dtype), filled(0.0, shape, dtype), pipe)


MISMATCHES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "one-core-ends": (on_core_1(lambda: None, send()), DeadlockError, "have ended"),
    "different-pipes": (on_core_1(send(pipe=1), send()), DeadlockError, "sendrecv at"),
    "barrier-and-exchange": (
        on_core_1(lambda: isa.core_barrier(filled(1.0), (0, 1)), send()),
        DeadlockError,
        "waits in",
    ),
    "shapes-differ": (on_core_1(send((16, 4)), send()), DivergenceError, "from the other core"),
    "types-differ": (on_core_1(send(dtype=nl.int32), send()), DivergenceError, "int32|float32"),
    "different-places": (
        on_core_1(
            lambda: isa.core_barrier(filled(1.0), (0, 1)),
            lambda: isa.core_barrier(filled(1.0), (0, 1)),
        ),
        DivergenceError,
        "core_barrier at",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_cores_that_do_not_meet_are_told_where(name: str) -> None:
    kernel, error, message = MISMATCHES[name]
    for options in ORDERS[:2]:
        with pytest.raises(error, match=message):
            nki_sim.run(kernel, lnc=2, options=options)


@pytest.mark.parametrize("dtype", [nl.float32, nl.bfloat16, nl.uint8])
def test_gpsimd_exchanges_256_elements(dtype: Any) -> None:
    def kernel(width: int) -> Any:
        tiles = [filled(1, (16, width), dtype) for _ in range(2)]
        exchange(*tiles, dma_engine=isa.dma_engine.gpsimd_dma)
        return None

    nki_sim.run(kernel, 256, lnc=2)
    with pytest.raises(IllegalOperand, match=f"at most {256 * dtype.itemsize} bytes"):
        nki_sim.run(kernel, 257, lnc=2)


REFUSALS: dict[str, Callable[[], Any]] = {
    "like src": lambda: exchange(filled(1.0), filled(1, dtype=nl.int32)),
    "a core below 2": lambda: isa.sendrecv(filled(1.0), filled(1.0), 2, 2, 0),
    "SBUF": lambda: exchange(nl.ndarray((16, 8), nl.float32, buffer=nl.psum), filled(1.0)),
    "this core": lambda: isa.core_barrier(filled(1.0), (1 - nl.program_id(0),)),
    "different cores": lambda: isa.core_barrier(filled(1.0), (0, 5)),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_a_meeting_refuses(message: str) -> None:
    with pytest.raises(IllegalOperand, match=message):
        nki_sim.run(REFUSALS[message], lnc=2)


def test_generation_2_has_no_second_core_to_meet() -> None:
    with pytest.raises(IllegalOperand, match="gen3"):
        nki_sim.run(lambda: isa.core_barrier(filled(1.0), 0), options=SimOptions(target="trn1"))


# Conflicts that are no races


def two_cores(body: Callable[[int, Any], None], rows: int = 8, dtype: Any = nl.float32) -> Any:
    def kernel() -> Any:
        out = nl.ndarray((rows, 16), dtype, buffer=nl.shared_hbm)
        body(nl.program_id(0), out)
        return out

    return kernel


def both_zero_everything(core: int, out: Any) -> None:
    isa.dma_copy(out, filled(0.0, (8, 16)))


def both_scatter_to_the_padding_row(core: int, out: Any) -> None:
    rows = nl.ndarray((2, 1), nl.int32)
    isa.iota(rows, [[0, 1]], offset=core, channel_multiplier=7 - core)  # rows core and 7
    values = filled(core + 1.0, (2, 16))
    isa.dma_copy(out.ap([[16, 2], [1, 16]], vector_offset=rows), values)


def both_scatter_equal_rows(core: int, out: Any) -> None:
    """To rows 0 and 1 of a tensor that nobody writes the rest of."""
    rows = nl.ndarray((2, 1), nl.int32)
    isa.iota(rows, [[0, 1]], offset=0, channel_multiplier=1)
    isa.dma_copy(out.ap([[16, 2], [1, 16]], vector_offset=rows), filled(1.0, (2, 16)))


def gather_beside_a_write(core: int, out: Any) -> None:
    """Each core fetches all rows and uses its own only."""
    isa.dma_copy(out[4 * core : 4 * core + 4], filled(1.0, (4, 16)))
    isa.core_barrier(out, (0, 1))
    rows, old = nl.ndarray((8, 1), nl.int32), filled(0.0, (8, 16))
    isa.iota(rows, [[0, 1]], offset=0, channel_multiplier=1)
    isa.dma_copy(old, out.ap([[16, 8], [1, 16]], vector_offset=rows))
    isa.dma_copy(out[4 * core : 4 * core + 4], filled(2.0, (4, 16)))


def ordered_by_sendrecv(core: int, out: Any) -> None:
    if core == 0:
        isa.dma_copy(out, filled(1.0, (8, 16)))
    exchange(filled(1.0), filled(0.0))
    if core == 1:
        isa.dma_copy(out, filled(2.0, (8, 16)))


def fence(core: int, out: Any) -> None:
    isa.dma_copy(out[4 * core : 4 * core + 4], filled(1.0, (4, 16)))
    isa.dma_copy(out, out)


BENIGN: dict[str, tuple[Callable[[int, Any], None], str]] = {
    "equal-values": (both_zero_everything, "equal values"),
    "equal-rows": (both_scatter_equal_rows, "equal values"),
    "padding-row": (both_scatter_to_the_padding_row, "padding row"),
    "gathered-rows": (gather_beside_a_write, "gathered rows"),
    "ordered-by-sendrecv": (ordered_by_sendrecv, ""),
    "fence": (fence, ""),
}


@pytest.mark.parametrize("options", ORDERS[:2], ids=IDS[:2])
@pytest.mark.parametrize("name", BENIGN)
def test_a_benign_conflict_is_at_most_reported(name: str, options: SimOptions) -> None:
    body, text = BENIGN[name]
    findings = nki_sim.run(two_cores(body), lnc=2, options=options).findings
    races = [finding for finding in findings if finding.kind == "race"]
    if text:
        assert races
        assert all(text in finding.text for finding in races)
    else:
        assert races == []


def test_what_lies_in_memory_that_nobody_wrote_is_no_value_to_be_equal_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(np, "empty", np.zeros)

    def write_where_the_other_does(core: int, out: Any) -> None:
        isa.dma_copy(out[core : core + 1], filled(1.0, (1, 16)))
        isa.core_barrier(out, (0, 1))
        isa.dma_copy(out[4:5], filled(float(core), (1, 16)))

    for options in ORDERS[:2]:
        with pytest.raises(nki_sim.RaceError):
            nki_sim.run(two_cores(write_where_the_other_does), lnc=2, options=options)


@pytest.mark.parametrize(("row", "rows"), [(0, 8), (5, 8), (6, 8), (7, 8), (1, 2), (0, 1)])
def test_only_the_last_row_of_several_is_padding(row: int, rows: int) -> None:
    def both_scatter(core: int, out: Any) -> None:
        number = nl.ndarray((1, 1), nl.int32)
        isa.memset(number, row)
        isa.dma_copy(out.ap([[16, 1], [1, 16]], vector_offset=number), filled(core + 1.0, (1, 16)))

    if 0 < row == rows - 1:
        assert "padding row" in nki_sim.run(two_cores(both_scatter, rows), lnc=2).findings[0].text
    else:
        with pytest.raises(nki_sim.RaceError):
            nki_sim.run(two_cores(both_scatter, rows), lnc=2)


@pytest.mark.parametrize("column", [0, 1, 2])
def test_cores_may_write_neighbouring_bytes(column: int) -> None:
    """Core 0 writes bytes 0, 4, 8 and 12 of rows 0, 2, 4 and 6, core 1 others of them."""

    def body(core: int, out: Any) -> None:
        begin = column if core == 1 else 0
        isa.dma_copy(out[0:8:2, begin:16:4], filled(core + 1.0, (4, 4), nl.uint8))

    def launch() -> nki_sim.Run:
        return nki_sim.run(two_cores(body, dtype=nl.uint8), lnc=2)

    if column == 0:
        with pytest.raises(nki_sim.RaceError):
            launch()
    else:
        assert [found for found in launch().findings if found.kind == "race"] == []


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("unknown", [0, 1, 2, 3])
def test_writes_whose_values_nobody_computes_are_not_compared(unknown: int, order: int) -> None:
    """In `indices` mode core `unknown` writes such values, with 2 both do, with 3 none."""

    def kernel(x: Any) -> Any:
        core = nl.program_id(0)
        out = nl.ndarray((2, 8), nl.float32, buffer=nl.shared_hbm)
        known = filled(core + 1.0, (2, 8))
        isa.dma_copy(out, x[0:2] if unknown in (core, 2) else known)
        return out

    def launch() -> nki_sim.Run:
        big = np.zeros((4096, 8), np.float32)
        options = SimOptions(mode="indices", start_core=order)
        return nki_sim.run(kernel, big, lnc=2, options=options)

    if unknown == 3:
        with pytest.raises(nki_sim.RaceError):
            launch()
    else:
        assert "values not compared" in launch().findings[0].text


def test_overlapping_columns_of_the_same_rows_race_only_where_they_overlap() -> None:
    def halves(width: int) -> Callable[[int, Any], None]:
        def body(core: int, out: Any) -> None:
            start = core * (16 - width)
            isa.dma_copy(out[:, start : start + width], filled(core + 1.0, (8, width)))

        return body

    assert nki_sim.run(two_cores(halves(8)), lnc=2).findings == []
    with pytest.raises(nki_sim.RaceError):
        nki_sim.run(two_cores(halves(9)), lnc=2)
