"""Bounds that several instructions share: what is on one is taken, what is beyond is not."""

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


@pytest.mark.parametrize("shape", [(16, 1), (15, 1), (24, 1), (8, 1), (128, 1), (64, 2), (128, 2)])
def test_a_gathered_transpose_takes_16_to_128_rows_of_indices(shape: tuple[int, int]) -> None:
    rows, columns = shape
    count = max(16, rows * columns // 16 * 16)

    def body(dst: Any, x: Any) -> None:
        numbers = nl.ndarray(shape, nl.uint32)
        isa.memset(numbers, 0)
        isa.dma_transpose(dst, x.ap([[8, count], [1, 8]], vector_offset=numbers))

    taken = is_taken(
        body,
        dst=Tile(shape=(8, count), dtype="bfloat16"),
        x=Tile(np.ones((4, 8)), "bfloat16", space="hbm"),
    )
    assert taken == (rows % 16 == 0 and (columns == 1 or rows == 128))


@pytest.mark.parametrize("start", [-5, -4, 0, (1 << 24) - 4, (1 << 24) - 3])
def test_positions_of_a_range_end_between_0_and_2_to_the_24(start: int) -> None:
    def body(dst: Any, x: Any, low: Any) -> None:
        isa.range_select(dst, x, nl.greater_equal, nl.less, low, low, range_start=start)

    x = Tile(np.ones((8, 4), np.float32))
    taken = is_taken(body, dst=Tile(shape=(8, 4)), x=x, low=Tile(np.zeros((8, 1), np.float32)))
    assert taken == (0 <= start + 4 <= 1 << 24)


SHAPES = [
    *((rows, 16 // rows, 8) for rows in (1, 2, 4, 8, 16)),
    *((3, 16, 8), (32, 1, 8), (2, 4, 8), (4, 2, 8)),
    *((16, 8), (8, 8), (32, 8), (2, 3, 8, 8), (2, 8, 3, 8)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_hardware_transposes_16_rows_or_a_multiple(shape: tuple[int, ...]) -> None:
    order = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(shape)]
    turned = tuple(shape[axis] for axis in order)
    taken = is_taken(
        lambda dst, x: isa.dma_transpose(dst, x, dge_mode=isa.dge_mode.hwdge),
        dst=Tile(shape=turned, dtype="bfloat16", space="hbm"),
        x=Tile(np.ones(shape), "bfloat16", space="hbm"),
    )
    rows, together = shape[0], shape[0] * shape[-2]
    assert taken == (
        rows == 16 if len(shape) == 2 else rows in (1, 2, 4, 8, 16) and together % 16 == 0
    )


AT_INDICES: dict[str, Any] = {
    "dma_copy": lambda dst, rows: isa.dma_copy(dst, rows),
    "dma_compute": lambda dst, rows: isa.dma_compute(dst, [dst, rows], nl.add),
    "dma_transpose": lambda dst, rows: isa.dma_transpose(dst.reshape((8, 16)), rows),
}


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("name", AT_INDICES)
def test_rows_at_indices_need_the_second_generation(name: str, target: str) -> None:
    def body(dst: Any, x: Any) -> None:
        numbers = nl.ndarray((16, 1), nl.uint32)
        isa.memset(numbers, 0)
        AT_INDICES[name](dst, x.ap([[8, 16], [1, 8]], vector_offset=numbers))

    tiles = {
        "dst": Tile(np.ones((16, 8)), "bfloat16", space="hbm"),
        "x": Tile(np.ones((4, 8)), "bfloat16", space="hbm"),
    }
    options = SimOptions(target=target)
    if target == "trn1":
        with pytest.raises(IllegalOperand, match=r"vector_offset: expected gen3 or later"):
            execute(body, options=options, **tiles)
    else:
        execute(body, options=options, **tiles)


@pytest.mark.parametrize("index", [-1, 0, 1, 9, 10, 30])
@pytest.mark.parametrize("kind", ["vector", "scalar"])
def test_a_row_at_an_index_lies_in_the_part_that_is_looked_at(kind: str, index: int) -> None:
    """Behind rows 10 to 19 the tensor goes on."""
    values = np.arange(80.0, dtype=np.float32).reshape(40, 2)

    def body(dst: Any, x: Any, number: Any) -> None:
        if kind == "vector":
            row = x[10:20].ap([[2, 1], [1, 2]], vector_offset=number)
        else:
            row = x[10:20].ap([[2, 1], [1, 2]], scalar_offset=number)
        isa.dma_copy(dst, row)

    tiles = {
        "dst": Tile(shape=(1, 2)),
        "x": Tile(values, space="hbm"),
        "number": Tile(np.array([[index]], np.int32)),
    }
    if 0 <= index < 10:
        assert np.array_equal(execute(body, **tiles)["dst"], values[10 + index : 11 + index])
    else:
        with pytest.raises(nki_sim.OutOfBounds, match="inside 20 elements"):
            execute(body, **tiles)
    clamped = 10 + min(max(index, 0), 9)
    result = execute(body, options=SimOptions(out_of_bounds="clamp"), **tiles)
    assert np.array_equal(result["dst"], values[clamped : clamped + 1])


@pytest.mark.parametrize("index", [-5, 0, 31, 32, 1000])
def test_a_clamped_offset_keeps_the_whole_pattern_inside(index: int) -> None:
    """Four rows from row 5 + index on, of 40."""
    values = np.arange(80.0, dtype=np.float32).reshape(40, 2)
    result = execute(
        lambda dst, x, number: isa.dma_copy(
            dst, x.ap([[2, 4], [1, 2]], offset=10, scalar_offset=number)
        ),
        options=SimOptions(out_of_bounds="clamp"),
        dst=Tile(shape=(4, 2)),
        x=Tile(values, space="hbm"),
        number=Tile(np.array([[index]], np.int32)),
    )
    first = 5 + min(max(index, 0), 31)
    assert np.array_equal(result["dst"], values[first : first + 4])


@pytest.mark.parametrize("operand", ["held", "moving", "src", "dst"])
def test_packed_operands_start_at_a_quadrant(operand: str) -> None:
    def body(held: Any, moving: Any, out: Any, one: Any, src: Any, dst: Any) -> None:
        for tile in (held, moving, src):
            isa.dma_copy(tile, nl.ndarray(tile.shape, tile.dtype, buffer=nl.private_hbm))
        if operand in ("held", "moving"):
            isa.nc_matmul_mx(out, held, moving, one, one)
        else:
            isa.quantize_mx(dst, src, one[:, 0:4])

    def tile(name: str, dtype: str, columns: int) -> Tile:
        return Tile(shape=(32, columns), dtype=dtype, start=start if name == operand else 0)

    for start in (0, 16, 32):
        shown = ""
        try:
            execute(
                body,
                options=SimOptions(target="trn3", uninitialized="off"),
                held=tile("held", "float8_e4m3fn_x4", 16),
                moving=tile("moving", "float8_e4m3fn_x4", 16),
                out=Tile(shape=(16, 16), space="psum"),
                one=Tile(np.full((32, 16), 127), "uint8"),
                src=tile("src", "bfloat16", 16),
                dst=tile("dst", "float8_e4m3fn_x4", 4),
            )
        except IllegalOperand as error:
            shown = str(error)
        assert ("32 partitions from 16" in shown) == (start == 16), (start, shown)


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
        }
        shown = ""
        try:
            # Too many columns would not fit PSUM either; a narrower result is reported second.
            out = Tile(shape=(16, min(columns, most)), dtype=dtype, space="psum")
            execute(body, options=SimOptions(target=target), out=out, **tiles)
        except IllegalOperand as error:
            shown = str(error)
        assert (f"moving: expected at most {most} columns" in shown) == (columns > most), shown
