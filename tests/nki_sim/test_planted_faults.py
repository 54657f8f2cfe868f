"""Checkers find a fault to the byte, the row or the core, and say nothing of the clean twin.

A fault and its twin differ in one number or one line. The message of a fault must name this file,
the instruction and the operand. What one instruction refuses is in tests/nki_sim/isa, more faults
in test_mutated_kernels.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_sim import SimOptions, isa
from nki_sim.language import api as nl

Kernel = Callable[..., Any]
SBUF_BYTES = 212_984
SOURCE = Path(__file__).read_text().splitlines()


def _store(values: Any) -> Any:
    """Copy an SBUF tile to a new output."""
    out = nl.ndarray(values.shape, values.dtype, buffer=nl.shared_hbm)
    isa.dma_copy(out, values)
    return out


def _tile(value: float = 1.0, shape: tuple[int, ...] = (128, 64), dtype: Any = nl.float32) -> Any:
    tile = nl.ndarray(shape, dtype)
    isa.memset(tile, value)
    return tile


# SBUF capacity


def sbuf_of(x: Any, bytes_: int) -> Any:
    a = _tile(1, (128, bytes_ - 1024), nl.uint8)
    b = _tile(2, (128, 1024), nl.uint8)
    isa.tensor_tensor(b, b, a[:, 0:1024], nl.add)
    return _store(b)


def sbuf_beside_a_transpose(x: Any, bytes_: int) -> Any:
    a = _tile(1, (128, bytes_ - 256), nl.uint8)
    b = _tile(1, (128, 128), nl.bfloat16)
    turned = nl.ndarray((128, 128), nl.bfloat16, nl.psum)
    isa.nc_transpose(turned, b)
    isa.tensor_copy(b, turned)
    isa.tensor_tensor(b, b, a[:, 0:128], nl.add)
    return _store(b)


def sbuf_tile_of(x: Any, bytes_: int) -> Any:
    return _store(_tile(1, (128, bytes_), nl.uint8)[:, 0:16])


def sbuf_never_read(x: Any, bytes_: int) -> Any:
    held = [_tile(1, (128, bytes_ // 2), nl.uint8), _tile(1, (128, bytes_ // 2), nl.uint8)]
    more = _tile(0, (128, 4), nl.uint8)
    del held
    return _store(more)


def sbuf_of_five_tiles(x: Any, is_kept: bool) -> Any:
    total, tiles = _tile(0.0), []
    for _ in range(5):
        tile = _tile(1.0, (128, 25_000))
        if is_kept:
            tiles.append(tile)
        else:
            isa.tensor_tensor(total, total, tile[:, 0:64], nl.add)
    for tile in tiles:
        isa.tensor_tensor(total, total, tile[:, 0:64], nl.add)
    return _store(total)


# PSUM capacity


def psum_banks(x: Any, count: int) -> Any:
    stationary, moving = _tile(1.0, (128, 128)), _tile(1.0, (128, 512))
    banks = [nl.ndarray((128, 512), nl.float32, buffer=nl.psum) for _ in range(count)]
    for bank in banks:
        isa.nc_matmul(bank, stationary, moving)
    total = _tile(0.0, (128, 512))
    for bank in banks:
        isa.tensor_tensor(total, total, bank, nl.add)
    return _store(total)


# Addresses


def placed(x: Any, second_byte: int) -> Any:
    a = nl.ndarray((128, 64), nl.float32, address=(0, 0))
    b = nl.ndarray((128, 64), nl.float32, address=(0, second_byte))
    isa.memset(a, 1.0)
    isa.memset(b, 2.0)
    isa.tensor_tensor(b, b, a, nl.add)
    return _store(b)


def placed_on_the_same_bytes(x: Any, is_in_turn: bool) -> Any:
    a = nl.ndarray((128, 64), nl.float32, address=(0, 0))
    c = _tile(0.0)
    isa.memset(a, 1.0)
    if is_in_turn:
        isa.tensor_tensor(c, c, a, nl.add)
    b = nl.ndarray((128, 64), nl.float32, address=(0, 0))
    isa.memset(b, 2.0)
    isa.tensor_tensor(c, c, b, nl.add)
    if not is_in_turn:
        isa.tensor_tensor(c, c, a, nl.add)
    return _store(c)


def placed_at(x: Any, partition: int) -> Any:
    a = nl.ndarray((64, 64), nl.float32, address=(partition, 0))
    isa.memset(a, 1.0)
    return _store(a)


# Banks and types


def matmul_at_column(x: Any, first: int) -> Any:
    dst = nl.ndarray((128, 1024), nl.float32, buffer=nl.psum)
    window = dst[:, first : first + 512]
    isa.nc_matmul(window, _tile(1.0, (128, 128)), _tile(1.0, (128, 512)))
    out = _tile(0.0, (128, 512))
    isa.tensor_copy(out, window)
    return _store(out)


def hardware_dge_cast(x: Any, dtype: Any) -> Any:
    out = nl.ndarray((128, 64), dtype, buffer=nl.shared_hbm)
    isa.dma_copy(out, _tile(1.0), dge_mode=isa.dge_mode.hwdge)
    return out


# Bounds


def pattern_of(x: Any, rows: int) -> Any:
    out = _tile(0.0, (rows, 64))
    isa.dma_copy(out, x.ap([[64, rows], [1, 64]], offset=64 * 32))
    return _store(out)


def partition_overrun(x: Any, offset: int) -> Any:
    """A pattern that runs over the end of its partition into the next one."""
    a = _tile(1.0)
    b = _tile(0.0, (128, 32))
    isa.tensor_copy(b, a.ap([[64, 128], [1, 32]], offset=offset))
    return _store(b)


# Unwritten memory


def unwritten_middle(x: Any, columns: slice) -> Any:
    a = nl.ndarray((128, 64), nl.float32)
    isa.memset(a[:, 0:30], 1.0)
    isa.memset(a[:, 31:64], 1.0)
    b = _tile(0.0)
    isa.tensor_tensor(b[:, columns], b[:, columns], a[:, columns], nl.add)
    return _store(b)


def _count(total: Any) -> None:
    isa.tensor_scalar(total, total, nl.add, 1.0)


# PSUM accumulation


def accumulate_first(x: Any, first: bool | None) -> Any:
    dst = nl.ndarray((128, 64), nl.float32, buffer=nl.psum)
    isa.nc_matmul(dst, _tile(1.0, (128, 128)), _tile(1.0), accumulate=first)
    isa.nc_matmul(dst, _tile(1.0, (128, 128)), _tile(1.0), accumulate=True)
    out = _tile(0.0)
    isa.tensor_copy(out, dst)
    return _store(out)


# Two cores


def exchange_through_hbm(x: Any, has_barrier: bool) -> Any:
    """Core 0 writes a row that core 1 reads."""
    shared = nl.ndarray((2, 64), nl.float32, buffer=nl.shared_hbm)
    core = nl.program_id(0)
    isa.dma_copy(shared[core : core + 1], _tile(float(core + 1), (1, 64)))
    if has_barrier:
        isa.core_barrier(shared, (0, 1))
    other = nl.ndarray((1, 64), nl.float32)
    isa.dma_copy(other, shared[1 - core : 2 - core])
    out = nl.ndarray((2, 64), nl.float32, buffer=nl.shared_hbm)
    isa.dma_copy(out[core : core + 1], other)
    return out


def both_write(x: Any, is_split: bool) -> Any:
    """Both cores write different values to the same row, or each its own."""
    out = nl.ndarray((2, 64), nl.float32, buffer=nl.shared_hbm)
    core = nl.program_id(0)
    row = core if is_split else 0
    isa.dma_copy(out[row : row + 1], _tile(float(core), (1, 64)))
    if not is_split and core == 0:
        isa.dma_copy(out[1:2], _tile(0.0, (1, 64)))
    return out


def scatter_by_both(x: Any, has_barrier: bool) -> Any:
    """Both cores add to the same rows in turn."""
    out = nl.ndarray((256, 64), nl.float32, buffer=nl.shared_hbm)
    core = nl.program_id(0)
    if core == 0:
        for half in range(2):
            isa.dma_copy(out[half * 128 : half * 128 + 128], _tile(0.0))
    isa.core_barrier(out, (0, 1))
    rows = nl.ndarray((128, 1), nl.int32)
    isa.iota(rows, [[0, 1]], offset=0, channel_multiplier=1)
    for turn in range(2):
        if turn == core:
            target = out.ap([[64, 128], [1, 64]], vector_offset=rows)
            isa.dma_compute(target, [target, _tile(1.0)], nl.add)
        if has_barrier:
            isa.core_barrier(out, (0, 1))
    return out


def scatter_to_the_only_row(x: Any, writers: int) -> Any:
    """Cores write different values to a tensor of one row, through an index."""
    out = nl.ndarray((1, 64), nl.float32, buffer=nl.shared_hbm)
    core = nl.program_id(0)
    if core < writers:
        row = _tile(0, (1, 1), nl.int32)
        target = out.ap([[64, 1], [1, 64]], vector_offset=row)
        isa.dma_copy(target, _tile(float(core), (1, 64)))
    return out


def scatter_into_row_3(x: Any, row_of_other: int) -> Any:
    """One core writes a row through an index, the other the second half of a row."""
    out = nl.ndarray((8, 64), nl.float32, buffer=nl.shared_hbm)
    core = nl.program_id(0)
    if core == 0:
        isa.dma_copy(out, _tile(0.0, (8, 64)))
    isa.core_barrier(out, (0, 1))
    if core == 0:
        target = out.ap([[64, 1], [1, 64]], vector_offset=_tile(3, (1, 1), nl.int32))
        isa.dma_copy(target, _tile(1.0, (1, 64)))
    else:
        isa.dma_copy(out[row_of_other : row_of_other + 1, 32:64], _tile(2.0, (1, 32)))
    return out


def loop_iterations(x: Any, iterations: tuple[int, int]) -> Any:
    core = nl.program_id(0)
    register = isa.register_alloc(iterations[core])
    total = _tile(0.0, (1, 1))
    nl.fori_loop(0, register, lambda _: _count(total))
    out = nl.ndarray((2, 1), nl.float32, buffer=nl.shared_hbm)
    isa.dma_copy(out[core : core + 1], total)
    return out


# Language


def loop_counter(x: Any, is_written: bool) -> Any:
    total = _tile(0.0, (1, 1))
    for i in nl.dynamic_range(3):
        if is_written:
            isa.register_move(i, 0)
        isa.tensor_scalar(total, total, nl.add, 1.0)
    return _store(total)


@dataclass(frozen=True)
class Plant:
    """A kernel of one argument more, what makes it wrong and right, and what must be said."""

    kernel: Kernel
    fault: Any
    twin: Any
    error: type[Exception]
    operand: str
    lnc: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


E = nki_sim
PLANTS: dict[str, Plant] = {
    "sbuf-one-byte-too-many": Plant(sbuf_of, SBUF_BYTES + 1, SBUF_BYTES, E.CapacityError, "SBUF"),
    "sbuf-without-room-for-the-identity": Plant(
        sbuf_beside_a_transpose, SBUF_BYTES - 254, SBUF_BYTES - 256, E.CapacityError, "SBUF"
    ),
    "sbuf-one-tile-one-byte-too-large": Plant(
        sbuf_tile_of, SBUF_BYTES + 1, SBUF_BYTES, E.CapacityError, "tensor"
    ),
    "sbuf-tiles-that-nobody-reads": Plant(
        sbuf_never_read, SBUF_BYTES, SBUF_BYTES - 8, E.CapacityError, "SBUF"
    ),
    "sbuf-tiles-kept": Plant(sbuf_of_five_tiles, True, False, E.CapacityError, "SBUF"),
    "psum-nine-banks": Plant(psum_banks, 9, 8, E.CapacityError, "PSUM"),
    "address-overlap-by-one-element": Plant(placed, 252, 256, E.OverlapError, "tensor"),
    "address-reused-too-early": Plant(
        placed_on_the_same_bytes, False, True, E.OverlapError, "tensor"
    ),
    "address-beyond-partition-127": Plant(placed_at, 96, 64, E.CapacityError, "address"),
    "matmul-across-banks": Plant(matmul_at_column, 256, 512, E.IllegalOperand, "dst"),
    "hwdge-cast": Plant(hardware_dge_cast, nl.bfloat16, nl.float32, E.IllegalOperand, "dst"),
    "pattern-past-the-end": Plant(pattern_of, 69, 68, E.OutOfBounds, "x"),
    "pattern-into-the-next-partition": Plant(partition_overrun, 33, 32, E.OutOfBounds, "tensor"),
    "unwritten-column-in-a-tile": Plant(
        unwritten_middle, slice(0, 64), slice(31, 64), E.UninitializedRead, "tensor"
    ),
    "accumulate-on-nothing": Plant(accumulate_first, True, None, E.AccumulateError, "dst"),
    "race-write-then-read": Plant(exchange_through_hbm, False, True, E.RaceError, "tensor", lnc=2),
    "race-two-writes": Plant(both_write, False, True, E.RaceError, "tensor", lnc=2),
    "race-scatter-add": Plant(scatter_by_both, False, True, E.RaceError, "tensor", lnc=2),
    "race-scatter-and-half-a-row": Plant(scatter_into_row_3, 3, 2, E.RaceError, "tensor", lnc=2),
    "race-scatter-to-one-row": Plant(scatter_to_the_only_row, 2, 1, E.RaceError, "tensor", lnc=2),
    "iteration-counts-differ": Plant(
        loop_iterations, (2, 3), (3, 3), E.DivergenceError, "control flow", lnc=2
    ),
    "loop-counter-written": Plant(
        loop_counter, True, False, E.LanguageError, "register", options={"nki": "0.6"}
    ),
}


def rows() -> np.ndarray[Any, Any]:
    return np.arange(6400, dtype=np.float32).reshape(100, 64)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(name: str) -> None:
    plant = PLANTS[name]
    with pytest.raises(plant.error) as caught:
        nki_sim.run(
            plant.kernel, rows(), plant.fault, lnc=plant.lnc, options=SimOptions(**plant.options)
        )
    message = str(caught.value)
    assert "expected" in message
    assert "found" in message
    assert plant.operand in message
    assert f"{__file__}:" in message


@pytest.mark.parametrize("name", PLANTS)
def test_the_clean_twin_of_a_fault_passes(name: str) -> None:
    plant = PLANTS[name]
    run = nki_sim.run(
        plant.kernel, rows(), plant.twin, lnc=plant.lnc, options=SimOptions(**plant.options)
    )
    assert run.findings == []


def test_an_unwritten_value_is_blamed_on_the_instruction_that_first_read_it() -> None:
    with pytest.raises(E.UninitializedRead) as caught:
        nki_sim.run(unwritten_middle, rows(), slice(0, 64))
    assert (caught.value.instruction, caught.value.operand) == ("tensor_tensor", "data2")
    line = int(caught.value.location.rpartition(":")[2])
    assert "isa.tensor_tensor(b[:, columns], b[:, columns], a" in SOURCE[line - 1]
    assert "128 of 8192 elements of the returned tensor" in str(caught.value)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("name", ["race-write-then-read", "race-two-writes", "race-scatter-add"])
def test_a_race_is_found_whichever_core_starts(name: str, start: int) -> None:
    options = SimOptions(start_core=start)
    with pytest.raises(E.RaceError) as caught:
        nki_sim.run(PLANTS[name].kernel, rows(), PLANTS[name].fault, lnc=2, options=options)
    shown = re.findall(r"core \d \w+", str(caught.value))
    verbs = ["reads", "writes"] if name == "race-write-then-read" else ["writes", "writes"]
    assert sorted(place.split()[-1] for place in shown) == verbs
    assert (
        nki_sim.run(PLANTS[name].kernel, rows(), PLANTS[name].twin, lnc=2, options=options).findings
        == []
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("race-write-then-read", "race"),
        ("unwritten-column-in-a-tile", "uninitialized"),
        ("psum-nine-banks", "capacity"),
        ("sbuf-one-byte-too-many", "capacity"),
        ("address-overlap-by-one-element", "overlap"),
        ("accumulate-on-nothing", "accumulate"),
    ],
)
def test_a_policy_of_report_keeps_a_finding_instead(name: str, kind: str) -> None:
    plant = PLANTS[name]
    options = SimOptions(
        races="report",
        uninitialized="report",
        capacity="report",
        overlap="report",
        accumulate="report",
    )
    run = nki_sim.run(plant.kernel, rows(), plant.fault, lnc=plant.lnc, options=options)
    assert kind in {finding.kind for finding in run.findings}


@pytest.mark.parametrize(
    "name", ["sbuf-tiles-kept", "sbuf-tiles-that-nobody-reads", "psum-nine-banks"]
)
def test_with_reorder_what_can_wait_does_not_count_before_its_first_use(name: str) -> None:
    options = SimOptions(capacity="reorder")
    assert (
        nki_sim.run(PLANTS[name].kernel, rows(), PLANTS[name].fault, options=options).findings == []
    )


def test_what_nobody_reads_counts_in_order_and_takes_no_place_with_reorder() -> None:
    def kernel(x: Any) -> Any:
        kept = [nl.ndarray((128, 25_600), nl.float32) for _ in range(3)]
        for tile in kept:
            isa.dma_copy(tile, x)
        return x

    x = np.zeros((128, 25_600), np.float32)  # 100 KiB of a partition
    assert nki_sim.run(kernel, x, options=SimOptions(capacity="reorder")).findings == []
    with pytest.raises(E.CapacityError):
        nki_sim.run(kernel, x)


@pytest.mark.parametrize("name", ["sbuf-one-byte-too-many", "sbuf-one-tile-one-byte-too-large"])
def test_with_reorder_what_one_instruction_needs_must_still_fit(name: str) -> None:
    with pytest.raises(E.CapacityError):
        nki_sim.run(
            PLANTS[name].kernel, rows(), PLANTS[name].fault, options=SimOptions(capacity="reorder")
        )


def test_the_strictest_policy_raises_at_the_read_itself() -> None:
    with pytest.raises(E.UninitializedRead, match=r"tensor_tensor: .*128 of 8192 elements"):
        nki_sim.run(
            unwritten_middle, rows(), slice(0, 64), options=SimOptions(uninitialized="read")
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda dst, src, at: isa.tensor_copy(
                dst, src.ap([[64, 128], [1, 4]], scalar_offset=at, indirect_dim=1)
            ),
            "tensor_copy: src.scalar_offset: expected a value that was written",
        ),
        (
            lambda dst, src, at: isa.tensor_copy(dst, src.ap([[64, 128], [1, 4]], offset=61)),
            "tensor_copy: src: expected a non-empty view",
        ),
        (
            lambda dst, src, at: (
                isa.memset(at, 61),
                isa.tensor_copy(dst, src.ap([[64, 128], [1, 4]], scalar_offset=at, indirect_dim=1)),
            ),
            "tensor_copy: src: expected a non-empty view",
        ),
        (lambda dst, src, at: dst + src, "expected an instruction; found an operator"),
    ],
    ids=["unwritten-offset", "pattern", "offset-too-large", "operator"],
)
def test_of_tensors_without_a_name_the_right_operand_is_blamed(call: Any, message: str) -> None:
    def kernel() -> None:
        src = nl.ndarray((128, 64), nl.float32)
        isa.memset(src, 1.0)
        call(nl.ndarray((128, 4), nl.float32), src, nl.ndarray((1, 1), nl.int32))

    with pytest.raises(E.NkiValidationError, match=message) as caught:
        nki_sim.run(kernel)
    assert f"{__file__}:" in str(caught.value)
