"""Bounds that several instructions share: what lies on one is taken, what lies beyond is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_sim import IllegalOperand, SimOptions, isa
from nki_sim.language import api as nl
from nki_sim.testing import Tile, execute

STARTS = (0, 16, 32, 48, 64, 80, 96)
COUNTS = (1, 16, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128)
REACHED = {0: 128, 32: 32, 64: 64, 96: 32}  # partitions from a start, of the architecture guides
FITTING = {(0, 32), (32, 32), (64, 32), (96, 32), (0, 64), (64, 64), (0, 128)}  # row, rows
INT32 = (-(1 << 31), (1 << 31) - 1)


def is_taken(body: Any, **tiles: Tile) -> bool:
    """Run an instruction; say whether it was not refused."""
    try:
        execute(body, **tiles)
    except IllegalOperand:
        return False
    return True


@pytest.mark.parametrize("start", STARTS)
def test_an_engine_reaches_the_partitions_of_the_guide(start: int) -> None:
    for count in COUNTS:
        if start + count > 128:
            continue
        taken = is_taken(lambda x: isa.memset(x, 0), x=Tile(shape=(count, 4), start=start))
        assert taken == (count <= REACHED.get(start, 0)), (start, count)


@pytest.mark.parametrize("rows", [32, 64, 128])
@pytest.mark.parametrize("row", [0, 16, 32, 64, 96, 128])
def test_a_tile_of_the_array_lies_on_a_multiple_of_its_size(row: int, rows: int) -> None:
    ones = np.ones((32, 8), np.float32)

    def body(held: Any, moving: Any, out: Any) -> None:
        place, size = (row, 0), (rows, 128)
        isa.nc_matmul(out, held, moving, tile_position=place, tile_size=size)

    start = row if row in (32, 64, 96) else 0
    tiles = {"held": Tile(ones, start=start), "moving": Tile(ones, start=start)}
    taken = is_taken(body, out=Tile(shape=(8, 8), space="psum"), **tiles)
    assert taken == ((row, rows) in FITTING)


@pytest.mark.parametrize("columns", [127, 128, 129])
def test_the_hardware_transposes_up_to_128_columns(columns: int) -> None:
    taken = is_taken(
        lambda dst, x: isa.dma_transpose(dst, x, dge_mode=isa.dge_mode.hwdge),
        dst=Tile(shape=(columns, 16), dtype="bfloat16", space="hbm"),
        x=Tile(np.ones((16, columns)), "bfloat16", space="hbm"),
    )
    assert taken == (columns <= 128)


@pytest.mark.parametrize("shape", [(16, 1), (15, 1), (8, 1), (128, 1), (144, 1), (64, 2), (128, 2)])
def test_a_gathered_transpose_takes_16_to_128_rows_of_indices(shape: tuple[int, int]) -> None:
    rows, columns = shape
    count = max(16, rows * columns // 16 * 16)

    def body(dst: Any, x: Any) -> None:
        numbers = nl.ndarray(shape, nl.int32)
        isa.memset(numbers, 0)
        isa.dma_transpose(dst, x.ap([[8, count], [1, 8]], vector_offset=numbers))

    if rows > 128:
        return
    taken = is_taken(
        body, dst=Tile(shape=(8, count), dtype="bfloat16"),
        x=Tile(np.ones((4, 8)), "bfloat16", space="hbm"),
    )  # fmt: skip
    assert taken == (rows % 16 == 0 and (columns == 1 or rows == 128))


@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_rows_at_indices_need_the_second_generation(target: str) -> None:
    def body(dst: Any, x: Any) -> None:
        numbers = nl.ndarray((16, 1), nl.int32)
        isa.memset(numbers, 0)
        isa.dma_transpose(dst, x.ap([[8, 16], [1, 8]], vector_offset=numbers))

    tiles = {"dst": Tile(shape=(8, 16), dtype="bfloat16"),
             "x": Tile(np.ones((4, 8)), "bfloat16", space="hbm")}  # fmt: skip
    options = SimOptions(target=target)
    if target == "trn1":
        with pytest.raises(IllegalOperand, match=r"vector_offset: expected gen3 or later"):
            execute(body, options=options, **tiles)
    else:
        execute(body, options=options, **tiles)


@pytest.mark.parametrize("number", [INT32[0] - 1, INT32[0], INT32[1], INT32[1] + 1])
def test_an_offset_has_32_bits(number: int) -> None:
    taken = is_taken(
        lambda x: isa.iota(x, [[0, 4]], offset=number), x=Tile(shape=(1, 4), dtype="int32")
    )
    assert taken == (INT32[0] <= number <= INT32[1])


@pytest.mark.parametrize("number", [INT32[0] - 1, INT32[0], (1 << 32) - 1, 1 << 32])
def test_a_register_has_32_bits(number: int) -> None:
    def body() -> None:
        isa.register_move(isa.register_alloc(0), number)

    if INT32[0] <= number < 1 << 32:
        execute(body)
    else:
        with pytest.raises(nki_sim.LanguageError, match="a 32-bit value"):
            execute(body)


@pytest.mark.parametrize("is_mx", [False, True], ids=["matmul", "mx"])
@pytest.mark.parametrize(
    ("target", "dtype", "most"),
    [("trn2", "float32", 512), ("trn3", "float32", 4096), ("trn3", "bfloat16", 8192)],
)
def test_a_product_has_as_many_columns_as_the_target_takes(
    target: str, dtype: str, most: int, is_mx: bool
) -> None:
    if is_mx and target == "trn2":
        return
    word = "float8_e4m3fn_x4" if is_mx else "bfloat16"

    def body(out: Any, held: Any, moving: Any, one: Any, other: Any) -> None:
        isa.memset(held, 0)
        isa.memset(moving, 0)
        if is_mx:
            isa.nc_matmul_mx(out, held, moving, one, other)
        else:
            isa.nc_matmul(out, held, moving)

    for columns in (most, most + 2):
        tiles = {
            "held": Tile(shape=(32, 16), dtype=word),
            "moving": Tile(shape=(32, columns), dtype=word),
            "one": Tile(np.full((32, 16), 127), "uint8"),
            "other": Tile(np.full((32, columns), 127), "uint8"),
        }  # fmt: skip
        told = ""
        try:
            # Too many columns would not fit PSUM either; a narrower result is told second.
            out = Tile(shape=(16, min(columns, most)), dtype=dtype, space="psum")
            execute(body, options=SimOptions(target=target), out=out, **tiles)
        except IllegalOperand as error:
            told = str(error)
        assert (f"moving: expected at most {most} columns" in told) == (columns > most), told
