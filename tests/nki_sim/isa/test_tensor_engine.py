"""The Tensor engine: products, accumulation, tiles and transposes against NumPy, and limits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_sim
from nki_sim import AccumulateError, SimOptions, isa
from nki_sim.language import api as nl
from nki_sim.testing import Result, Tile, execute

RANDOM = np.random.default_rng(2)
TRN3 = SimOptions(target="trn3")
DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def normal(shape: tuple[int, ...], dtype: Any = ml_dtypes.bfloat16) -> Any:
    return RANDOM.normal(size=shape).astype(dtype)


def product(a: Any, b: Any) -> Any:
    """Contract the first axes, in float64."""
    return a.astype(np.float64).reshape(a.shape[0], -1).T @ b.astype(np.float64).reshape(
        b.shape[0], -1
    )


def psum(shape: tuple[int, ...], dtype: str = "float32") -> Tile:
    return Tile(shape=shape, dtype=dtype, space="psum")


def multiplied(a: Any, b: Any, shape: tuple[int, ...], **more: Any) -> Result:
    """Multiply two tiles into a `dst` of a shape; assert that it begins with the product."""
    result = execute(
        lambda dst, a, b: isa.nc_matmul(dst, a, b),
        dst=psum(shape),
        a=Tile(a),
        b=Tile(b),
        **more,
    )
    expected = product(a, b)
    found = result["dst"][: len(expected)].reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_sums_in_float32(dtype: str) -> None:
    multiplied(normal((96, 48), DTYPES[dtype]), normal((96, 200), DTYPES[dtype]), (48, 200))


def test_types_of_16_and_8_bits_mix() -> None:
    multiplied(normal((128, 64), ml_dtypes.float8_e4m3), normal((128, 32)), (64, 32))


def test_free_axes_are_flattened_on_all_sides() -> None:
    multiplied(normal((64, 4, 8)), normal((64, 3, 10)), (32, 5, 6))


def test_double_row_contracts_over_pairs() -> None:
    fp8 = ml_dtypes.float8_e4m3
    a, b = normal((128, 2, 32), fp8), normal((128, 2, 100), fp8)
    for mode in (isa.matmul_perf_mode.double_row, "double_row"):
        result = execute(
            lambda dst, a, b, mode=mode: isa.nc_matmul(dst, a, b, perf_mode=mode),
            dst=psum((32, 100)),
            a=Tile(a),
            b=Tile(b),
        )
        expected = sum(product(a[:, k], b[:, k]) for k in range(2))
        np.testing.assert_allclose(result["dst"], expected, rtol=1e-5, atol=1e-3)


def test_none_overwrites_first_and_adds_later() -> None:
    a, b = normal((128, 32)), normal((128, 64))

    def body(dst: Any, a: Any, b: Any) -> None:
        for _ in range(3):
            isa.nc_matmul(dst, a, b)

    result = execute(body, dst=psum((32, 64)), a=Tile(a), b=Tile(b))
    np.testing.assert_allclose(result["dst"], 3 * product(a, b), rtol=1e-5, atol=1e-3)


def test_none_is_decided_for_each_location() -> None:
    """The second product covers what the first wrote and what nobody wrote."""
    a, b = normal((128, 32)), normal((128, 64))

    def body(dst: Any, a: Any, b: Any) -> None:
        isa.nc_matmul(dst[:, 16:48], a, b[:, 16:48])
        isa.nc_matmul(dst, a, b)

    run = execute(body, dst=psum((32, 64)), a=Tile(a), b=Tile(b))
    expected = product(a, b)
    expected[:, 16:48] *= 2
    np.testing.assert_allclose(run["dst"], expected, rtol=1e-5, atol=1e-3)
    assert run.run.findings == []


REPORT = SimOptions(accumulate="report")


@pytest.mark.parametrize("writer", ["memset", "tensor_copy", "activation"])
@pytest.mark.parametrize("sums", [1, 3])
def test_none_over_what_another_instruction_put_overwrites_and_says_so(
    writer: str, sums: int
) -> None:
    a, b = normal((128, 32)), normal((128, 64))

    def body(dst: Any, a: Any, b: Any) -> None:
        if writer == "memset":
            isa.memset(dst, 100.0)
        elif writer == "tensor_copy":
            isa.tensor_copy(dst, b[0:32])
        else:
            isa.activation(dst, nl.copy, b[0:32])
        for _ in range(sums):
            isa.nc_matmul(dst, a, b)

    result = execute(body, dst=psum((32, 64)), a=Tile(a), b=Tile(b))
    np.testing.assert_allclose(result["dst"], sums * product(a, b), rtol=1e-5, atol=1e-3)
    assert [finding.kind for finding in result.run.findings] == ["accumulate"]
    assert "None, which overwrites it" in result.run.findings[0].text
    off = SimOptions(accumulate="off")
    assert not execute(body, options=off, dst=psum((32, 64)), a=Tile(a), b=Tile(b)).run.findings


def test_true_on_what_no_matmul_wrote_is_still_an_error() -> None:
    def body(dst: Any, a: Any, b: Any) -> None:
        isa.memset(dst, 0.0)
        isa.nc_matmul(dst, a, b, accumulate=True)

    with pytest.raises(AccumulateError, match="no matmul has written"):
        execute(body, dst=psum((32, 64)), a=Tile(normal((8, 32))), b=Tile(normal((8, 64))))


def test_a_line_does_not_overwrite_the_product_it_made_of_other_operands() -> None:
    a, b = normal((128, 32)), normal((128, 64))
    first: bool | None

    def body(dst: Any, a: Any, b: Any) -> None:
        for _warm_up in range(3):
            isa.nc_matmul(dst, a, b, accumulate=False)
        for columns in (slice(0, 32), slice(32, 64)):
            isa.nc_matmul(dst, b[:, columns], b, accumulate=first if columns.start else False)

    tiles = {"dst": psum((32, 64)), "a": Tile(a), "b": Tile(b)}
    for first in (True, None):  # noqa: B007  read by body
        assert execute(body, **tiles).run.findings == []
    first = False
    with pytest.raises(AccumulateError, match="overwrites a product that nothing has read"):
        execute(body, **tiles)


def test_false_overwrites_and_true_adds() -> None:
    a, b = normal((128, 32)), normal((128, 64))

    def body(dst: Any, a: Any, b: Any) -> None:
        isa.nc_matmul(dst, b[:, 0:32], b)
        isa.nc_matmul(dst, a, b, accumulate=False)
        isa.nc_matmul(dst, a, b, accumulate=True)

    result = execute(body, options=REPORT, dst=psum((32, 64)), a=Tile(a), b=Tile(b))
    np.testing.assert_allclose(result["dst"], 2 * product(a, b), rtol=1e-5, atol=1e-3)


def test_a_new_tensor_at_the_same_address_starts_afresh() -> None:
    a, b = normal((128, 32)), normal((128, 64))

    def body(a: Any, b: Any, out: Any) -> None:
        for _ in range(2):
            bank = nl.ndarray((32, 64), nl.float32, buffer=nl.psum, address=(0, 2048))
            isa.nc_matmul(bank, a, b)
            isa.tensor_copy(out, bank)

    result = execute(body, a=Tile(a), b=Tile(b), out=Tile(shape=(32, 64)))
    np.testing.assert_allclose(result["out"], product(a, b), rtol=1e-5, atol=1e-4)


def test_true_on_half_written_psum_raises() -> None:
    def body(dst: Any, a: Any, b: Any) -> None:
        isa.nc_matmul(dst[:, 0:32], a, b[:, 0:32])
        isa.nc_matmul(dst, a, b, accumulate=True)

    with pytest.raises(AccumulateError, match="nc_matmul"):
        execute(body, dst=psum((32, 64)), a=Tile(normal((8, 32))), b=Tile(normal((8, 64))))


def test_a_larger_destination_keeps_its_other_partitions() -> None:
    result = multiplied(normal((64, 20)), normal((64, 30)), (128, 30))
    assert result.unwritten["dst"][20:].all()


@pytest.mark.parametrize("column", [0, 32, 64, 96])
def test_column_tiles_work_side_by_side(column: int) -> None:
    a, b = normal((128, 16)), normal((128, 40))

    def body(dst: Any, a: Any, b: Any) -> None:
        isa.nc_matmul(
            dst[column : column + 16], a, b, tile_position=(0, column), tile_size=(128, 32)
        )

    result = execute(body, dst=psum((128, 40)), a=Tile(a), b=Tile(b))
    np.testing.assert_allclose(
        result["dst"][column : column + 16], product(a, b), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("row", [0, 32, 64, 96])
def test_row_tiles_take_their_partitions(row: int) -> None:
    a, b = normal((32, 16)), normal((32, 40))

    def body(dst: Any, a: Any, b: Any) -> None:
        isa.nc_matmul(dst, a, b, tile_position=(row, 0), tile_size=(32, 128))

    result = execute(body, dst=psum((16, 40)), a=Tile(a, start=row), b=Tile(b, start=row))
    np.testing.assert_allclose(result["dst"], product(a, b), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.int32, np.float32, ml_dtypes.bfloat16, np.uint8])
def test_a_transpose_by_the_array_copies_bits(dtype: Any) -> None:
    bits = RANDOM.integers(0, 256, (64, 24 * np.dtype(dtype).itemsize), dtype=np.uint8)
    values = bits.view(dtype)  # NaN and infinities among them
    identity = Tile(np.eye(64, dtype=np.float32))
    result = execute(
        lambda dst, x, one: isa.nc_matmul(dst, x, one, is_transpose=True),
        dst=psum((24, 64), str(np.dtype(dtype))),
        x=Tile(values),
        one=identity,
    )
    assert result["dst"].tobytes() == np.ascontiguousarray(values.T).tobytes()


def test_four_transposes_lie_side_by_side_in_a_bank() -> None:
    values = normal((128, 512))

    def body(dst: Any, x: Any, one: Any) -> None:
        for k in range(4):
            part = slice(128 * k, 128 * k + 128)
            isa.nc_matmul(dst[:, part], x[:, part], one, is_transpose=True)

    result = execute(
        body,
        dst=psum((128, 512), "bfloat16"),
        x=Tile(values),
        one=Tile(np.eye(128).astype(ml_dtypes.bfloat16)),
    )
    for k in range(4):
        part = slice(128 * k, 128 * k + 128)
        assert np.array_equal(result["dst"][:, part], values[:, part].T)


@pytest.mark.parametrize(
    ("shape", "space", "engine"),
    [((128, 100), "psum", "tensor"), ((32, 20), "sbuf", "vector"), ((20, 32), "psum", "vector")],
)
def test_nc_transpose_swaps_partitions_and_columns(
    shape: tuple[int, int], space: str, engine: str
) -> None:
    values = normal(shape)
    chosen = isa.engine[engine]
    result = execute(
        lambda dst, x: isa.nc_transpose(dst, x, engine=chosen),
        dst=Tile(shape=(shape[1], shape[0]), dtype="bfloat16", space=space),
        x=Tile(values),
    )
    assert np.array_equal(result["dst"], values.T)
    names = {0: "tensor", 1: "vector"}
    assert names[next(iter(result.run.trace)).engine] == engine


def test_nc_transpose_into_a_larger_destination() -> None:
    values = normal((128, 60))
    result = execute(
        lambda dst, x: isa.nc_transpose(dst, x),
        dst=psum((128, 128), "bfloat16"),
        x=Tile(values),
    )
    assert np.array_equal(result["dst"][:60], values.T)
    assert result.unwritten["dst"][60:].all()


def test_a_product_begins_anew_where_another_tensor_lay_meanwhile() -> None:
    def kernel() -> Any:
        first, other = (
            nl.ndarray((4, 4), nl.float32, buffer=nl.psum, address=(0, 0)) for _ in range(2)
        )
        one, total = nl.ndarray((32, 4), nl.float32), nl.ndarray((4, 4), nl.float32)
        isa.memset(one, 1.0)
        isa.memset(total, 0.0)
        for product in (first, other, first):
            isa.nc_matmul(product, one, one)
            isa.tensor_tensor(total, total, product, nl.add)
        out = nl.ndarray((4, 4), nl.float32, buffer=nl.shared_hbm)
        isa.dma_copy(out, total)
        return out

    assert (nki_sim.run(kernel).outputs == 3 * 32).all()


def test_generation_4_accumulates_in_bfloat16_with_a_rounding_at_each_write() -> None:
    a, b = normal((128, 32)), normal((128, 64))

    def body(dst: Any, a: Any, b: Any) -> None:
        isa.nc_matmul(dst, a, b)
        isa.nc_matmul(dst, a, b)

    result = execute(body, options=TRN3, dst=psum((32, 64), "bfloat16"), a=Tile(a), b=Tile(b))
    once = (a.astype(np.float32).T @ b.astype(np.float32)).astype(ml_dtypes.bfloat16)
    twice = once.astype(np.float32) + a.astype(np.float32).T @ b.astype(np.float32)
    assert np.array_equal(result["dst"], twice.astype(ml_dtypes.bfloat16))


def test_generation_4_takes_wide_moving_operands_and_several_banks() -> None:
    multiplied(normal((16, 32)), normal((16, 1024)), (32, 1024), options=TRN3)


def test_the_trace_records_sizes_types_and_tiles() -> None:
    result = execute(
        lambda dst, a, b: isa.nc_matmul(dst, a, b, tile_position=(0, 0), tile_size=(64, 32)),
        dst=psum((32, 64)),
        a=Tile(normal((64, 32))),
        b=Tile(normal((64, 64))),
    )
    facts = next(iter(result.run.trace)).facts
    assert (facts.k, facts.m, facts.n) == (64, 32, 64)
    assert (facts.stationary_dtype, facts.dst_dtype) == ("bfloat16", "float32")
    assert facts.tile == (0, 0, 64, 32)


def test_a_product_may_be_added_to_what_was_turned_into_psum() -> None:
    x, one = normal((16, 16), np.float32), np.eye(16, dtype=np.float32)

    def body(dst: Any, x: Any, one: Any) -> None:
        isa.nc_transpose(dst, x)
        isa.nc_matmul(dst, one, x, accumulate=True)

    result = execute(body, dst=psum((16, 16)), x=Tile(x), one=Tile(one))
    np.testing.assert_allclose(result["dst"], x.T + x, rtol=1e-6)


@pytest.mark.parametrize("fill", [0x00, 0xFF])
def test_without_a_check_unwritten_memory_holds_the_fill(fill: int) -> None:
    options = SimOptions(uninitialized="off", fill=fill)
    result = execute(
        lambda dst, x: isa.tensor_copy(dst, x),
        options=options,
        dst=Tile(shape=(4, 4), dtype="uint8"),
        x=Tile(shape=(4, 4), dtype="uint8"),
    )
    assert (result["dst"] == fill).all()
