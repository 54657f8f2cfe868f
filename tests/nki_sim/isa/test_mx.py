"""MX matmul and quantisation: meaning group by group, layout of the scales, constraints."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nki_sim import SimOptions, UninitializedRead, isa
from nki_sim.testing import Tile, execute

RANDOM = np.random.default_rng(0)
GEN4 = SimOptions(target="trn3")
FP8 = {"float8_e4m3fn_x4": ml_dtypes.float8_e4m3fn, "float8_e5m2_x4": ml_dtypes.float8_e5m2}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def packed(partitions: int, columns: int, dtype: str) -> tuple[Any, Any]:
    """Random packed elements [P, C] and their values [P, C, 4]."""
    if dtype == "float4_e2m1fn_x4":
        codes = RANDOM.integers(0, 16, (partitions, columns, 4))
        words = sum(codes[:, :, slot] << (4 * slot) for slot in range(4)).astype(np.uint16)
        return words, FP4[codes]
    values = RANDOM.normal(size=(partitions, columns, 4)).astype(np.float32).astype(FP8[dtype])
    codes = values.view(np.uint8).astype(np.uint32)
    words = sum(codes[:, :, slot] << (8 * slot) for slot in range(4)).astype(np.uint32)
    return words, values.astype(np.float64)


def scales(partitions: int, columns: int, base: int = 0) -> tuple[Any, Any]:
    """A scale tile [128, C] with bytes at 32 q + base + g, and the factor of each partition."""
    tile = RANDOM.integers(0, 256, (128, columns)).astype(np.uint8)
    factors = np.empty((partitions, columns))
    for partition in range(partitions):
        row = partition // 32 * 32 + base + partition % 32 // 8
        tile[row] = np.clip(tile[row], 120, 134)
        factors[partition] = 2.0 ** (tile[row].astype(int) - 127)
    return tile, factors


@pytest.mark.parametrize("partitions", [32, 64, 128])
@pytest.mark.parametrize("base", [0, 4, 12])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("float8_e4m3fn_x4", "float8_e4m3fn_x4"),
        ("float4_e2m1fn_x4", "float8_e5m2_x4"),
        ("float4_e2m1fn_x4", "float4_e2m1fn_x4"),
    ],
)
def test_matmul_sums_over_partitions_and_slots(
    partitions: int, base: int, left: str, right: str
) -> None:
    m, n = 6, 10
    a, a_values = packed(partitions, m, left)
    b, b_values = packed(partitions, n, right)
    a_scale, a_factor = scales(partitions, m, base)
    b_scale, b_factor = scales(partitions, n, base)

    def body(dst: Any, a: Any, b: Any, s: Any, t: Any) -> None:
        rows = slice(base, base + 128 - 32 + 4)
        isa.nc_matmul_mx(dst, a, b, s[rows], t[rows])

    result = execute(
        body,
        dst=Tile(shape=(m, n), space="psum"),
        a=Tile(a, left),
        b=Tile(b, right),
        s=Tile(a_scale),
        t=Tile(b_scale.view(ml_dtypes.float8_e8m0fnu)),
        options=GEN4,
    )
    expected = np.einsum("pmj,pm,pnj,pn->mn", a_values, a_factor, b_values, b_factor)
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(result["dst"], expected, rtol=1e-5, atol=tolerance)


def test_a_compact_scale_tile_serves_one_quadrant() -> None:
    a, a_values = packed(32, 4, "float8_e4m3fn_x4")
    scale = RANDOM.integers(120, 134, (4, 4)).astype(np.uint8)
    result = execute(
        lambda dst, a, s: isa.nc_matmul_mx(dst, a, a, s, s),
        dst=Tile(shape=(4, 4), space="psum"),
        a=Tile(a, "float8_e4m3fn_x4"),
        s=Tile(scale),
        options=GEN4,
    )
    values = a_values * np.repeat(2.0 ** (scale.astype(int) - 127), 8, axis=0)[:, :, None]
    np.testing.assert_allclose(
        result["dst"], np.einsum("pmj,pnj->mn", values, values), rtol=1e-5, atol=1e-6
    )


def test_matmuls_accumulate_like_ordinary_ones() -> None:
    a, _ = packed(32, 4, "float8_e4m3fn_x4")
    scale = np.full((4, 4), 127, np.uint8)

    def body(once: Any, twice: Any, again: Any, a: Any, s: Any) -> None:
        isa.nc_matmul_mx(once, a, a, s, s)
        for dst, last in ((twice, None), (again, False)):
            isa.nc_matmul_mx(dst, a, a, s, s)
            isa.nc_matmul_mx(dst, a, a, s, s, accumulate=last)

    psum = Tile(shape=(4, 4), space="psum")
    result = execute(
        body,
        once=psum,
        twice=psum,
        again=psum,
        a=Tile(a, "float8_e4m3fn_x4"),
        s=Tile(scale),
        options=GEN4,
    )
    np.testing.assert_allclose(result["twice"], 2 * result["once"], rtol=1e-6)
    np.testing.assert_array_equal(result["again"], result["once"])


def test_a_matmul_adds_where_an_earlier_one_wrote() -> None:
    a, _ = packed(32, 4, "float8_e4m3fn_x4")
    scale = np.full((4, 4), 127, np.uint8)

    def body(once: Any, dst: Any, a: Any, s: Any) -> None:
        isa.nc_matmul_mx(once, a, a, s, s)
        isa.nc_matmul_mx(dst[:, 0:2], a, a[:, 0:2], s, s[:, 0:2])
        isa.nc_matmul_mx(dst, a, a, s, s)

    psum = Tile(shape=(4, 4), space="psum")
    result = execute(
        body, once=psum, dst=psum, a=Tile(a, "float8_e4m3fn_x4"), s=Tile(scale), options=GEN4
    )
    np.testing.assert_allclose(result["dst"], result["once"] * [2, 2, 1, 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("row", "rows", "start", "partitions"),
    [(0, 32, 0, 32), (96, 32, 96, 32), (64, 64, 64, 64), (64, 64, 64, 32), (0, 128, 32, 32)],
)
def test_a_row_tile_of_the_array_multiplies_alike(
    row: int, rows: int, start: int, partitions: int
) -> None:
    a, _ = packed(128, 4, "float8_e4m3fn_x4")
    scale, _ = scales(128, 4)

    def body(whole: Any, tile: Any, a: Any, s: Any) -> None:
        part, its = a[start : start + partitions], s[start : start + partitions]
        isa.nc_matmul_mx(whole, part, part, its, its)
        position = {"tile_position": (row, 0), "tile_size": (rows, 128)}
        isa.nc_matmul_mx(tile, part, part, its, its, **position)

    psum = Tile(shape=(4, 4), space="psum")
    result = execute(
        body, whole=psum, tile=psum, a=Tile(a, "float8_e4m3fn_x4"), s=Tile(scale), options=GEN4
    )
    np.testing.assert_array_equal(result["tile"], result["whole"])


@pytest.mark.parametrize(("dtype", "reserve"), [("float8_e4m3fn_x4", 7), ("float8_e5m2_x4", 14)])
@pytest.mark.parametrize("base", [0, 8])
def test_quantising_follows_the_rule_group_by_group(dtype: str, reserve: int, base: int) -> None:
    src = (RANDOM.normal(size=(64, 3, 8)) * 10).astype(ml_dtypes.bfloat16)
    src[8:16, 0, :4] = 0
    src[16:24, 1, 4:] *= 2.0**-130  # below the smallest scale
    result = execute(
        lambda dst, x, s: isa.quantize_mx(dst, x, s[base : base + 36]),
        dst=Tile(shape=(64, 6), dtype=dtype),
        x=Tile(src),
        s=Tile(shape=(64, 6), dtype="uint8"),
        options=GEN4,
    )
    values = src.astype(np.float64).reshape(64, 6, 4)
    limit = float(ml_dtypes.finfo(FP8[dtype]).max)
    codes = result["dst"].view(np.uint8).reshape(64, 6, 4)
    for partition in range(64):
        group = partition // 8 * 8
        for column in range(6):
            largest = float(np.abs(values[group : group + 8, column]).max())
            exponent = max(-127, math.floor(math.log2(largest)) - reserve) if largest else -127
            row = partition // 32 * 32 + base + partition % 32 // 8
            assert result["s"][row, column] == exponent + 127
            scaled = np.clip(values[partition, column] / 2.0**exponent, -limit, limit)
            expected = scaled.astype(np.float32).astype(FP8[dtype]).view(np.uint8)
            assert codes[partition, column].tolist() == expected.tolist()


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
def test_the_rule_of_older_releases_leaves_no_headroom(kind: Any) -> None:
    src = (RANDOM.normal(size=(32, 4)) * 3).astype(kind)
    scales = []
    for headroom in (0, 1):
        result = execute(
            isa.quantize_mx,
            dst=Tile(shape=(32, 1), dtype="float8_e4m3fn_x4"),
            src=Tile(src),
            dst_scale=Tile(np.zeros((32, 1), np.uint8)),
            options=SimOptions(target="trn3", mx_headroom=headroom),
        )
        scales.append(result["dst_scale"][:4, 0].astype(int))
    assert (scales[1] == scales[0] + 1).all()


def test_quantising_leaves_the_other_rows_of_the_scale_tile() -> None:
    src = np.ones((64, 8), ml_dtypes.bfloat16)
    old = np.full((64, 2), 9, np.uint8)
    result = execute(
        isa.quantize_mx,
        dst=Tile(shape=(64, 2), dtype="float8_e4m3fn_x4"),
        src=Tile(src),
        dst_scale=Tile(old),
        options=GEN4,
    )
    untouched = [row for row in range(64) if row % 32 >= 4]
    assert (result["dst_scale"][untouched] == 9).all()
    assert (result["dst_scale"][[0, 3, 32, 35]] == 127 - 7).all()


def test_a_quantised_product_is_close_to_the_exact_one() -> None:
    a = RANDOM.normal(size=(128, 4 * 16)).astype(ml_dtypes.bfloat16)
    b = RANDOM.normal(size=(128, 4 * 24)).astype(ml_dtypes.bfloat16)

    def body(dst: Any, a: Any, b: Any, p: Any, q: Any, s: Any, t: Any) -> None:
        isa.quantize_mx(p, a, s)
        isa.quantize_mx(q, b, t)
        isa.nc_matmul_mx(dst, p, q, s, t)

    kind = "float8_e4m3fn_x4"
    result = execute(
        body,
        dst=Tile(shape=(16, 24), space="psum"),
        a=Tile(a),
        b=Tile(b),
        p=Tile(shape=(128, 16), dtype=kind),
        q=Tile(shape=(128, 24), dtype=kind),
        s=Tile(shape=(128, 16), dtype="uint8"),
        t=Tile(shape=(128, 24), dtype="uint8"),
        options=GEN4,
    )
    exact = np.einsum(
        "pmj,pnj->mn",
        a.astype(np.float64).reshape(128, 16, 4),
        b.astype(np.float64).reshape(128, 24, 4),
    )
    error = np.abs(result["dst"] - exact)
    assert error.mean() < 0.05 * exact.std()  # 3 mantissa bits on both sides
    assert not result.run.findings  # unused rows of the scale tiles are not read


def test_a_scale_that_nobody_wrote_makes_the_product_unwritten() -> None:
    a, _ = packed(32, 4, "float8_e4m3fn_x4")
    tiles = {
        "dst": Tile(shape=(4, 4), space="psum"),
        "a": Tile(a, "float8_e4m3fn_x4"),
        "s": Tile(shape=(4, 4), dtype="uint8"),
        "t": Tile(np.full((4, 4), 127, np.uint8)),
    }

    def body(dst: Any, a: Any, s: Any, t: Any) -> None:
        isa.nc_matmul_mx(dst, a, a, s, t)

    assert execute(body, options=GEN4, **tiles).unwritten["dst"].all()
    strict = SimOptions(target="trn3", uninitialized="read")
    with pytest.raises(UninitializedRead):
        execute(body, options=strict, **tiles)
