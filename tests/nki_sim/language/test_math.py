"""The helpers of nki.language allocate a result and mean their NumPy namesakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_sim
from nki_sim import IllegalOperand, LanguageError
from nki_sim.isa.functions import ACTIVATIONS
from nki_sim.language import api as nl

RANDOM = np.random.default_rng(0)
X = RANDOM.uniform(0.2, 1.4, (32, 12)).astype(np.float32)
Y = RANDOM.uniform(-1.4, 1.4, (32, 12)).astype(np.float32)
ROWS = {"axis": 1, "keepdims": True}


def call(body: Callable[..., Any], *arrays: Any) -> Any:
    """Load arrays into tiles, run the body on them, store its result."""

    def kernel(*inputs: Any) -> Any:
        found = body(*[nl.load(tensor) for tensor in inputs])
        if found.buffer is nl.psum:
            found = nl.copy(found)
        out = nl.ndarray(found.shape, found.dtype, buffer=nl.shared_hbm)
        nl.store(out, found)
        return out

    return nki_sim.run(kernel, *arrays).outputs


BINARY = (
    *("add", "subtract", "multiply", "maximum", "minimum", "power"),
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    *("logical_and", "logical_or", "logical_xor"),
)


@pytest.mark.parametrize("name", BINARY)
def test_a_binary_helper_takes_tiles_and_numbers(name: str) -> None:
    helper, formula = getattr(nl, name), getattr(np, name)
    np.testing.assert_allclose(call(helper, X, Y), formula(X, Y), rtol=1e-6)
    right = call(lambda x: helper(x, 0.5), X)
    np.testing.assert_allclose(right, formula(X, np.float32(0.5)), rtol=1e-6)
    left = call(lambda x: helper(0.5, x), X)
    np.testing.assert_allclose(left, formula(np.float32(0.5), X), rtol=1e-6)


BITS = ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift")


@pytest.mark.parametrize("name", BITS)
def test_a_bit_helper_works_on_patterns(name: str) -> None:
    a = RANDOM.integers(0, 256, (4, 8)).astype(np.uint8)
    b = RANDOM.integers(0, 8, (4, 8)).astype(np.uint8)
    np.testing.assert_array_equal(call(getattr(nl, name), a, b), getattr(np, name)(a, b))


def test_invert_flips_every_bit() -> None:
    a = RANDOM.integers(0, 256, (4, 8)).astype(np.uint8)
    np.testing.assert_array_equal(call(nl.invert, a), 255 - a)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_helper_applies_its_function(name: str) -> None:
    expected = ACTIVATIONS[name].apply(X)
    np.testing.assert_allclose(call(getattr(nl, name), X), expected, rtol=1e-6)


UNARY = ("negative", "logical_not", "cos", "tan", "floor", "ceil", "trunc", "abs", "square")


@pytest.mark.parametrize("name", UNARY)
def test_a_unary_helper_means_its_numpy_namesake(name: str) -> None:
    scale = 3.0 if name in ("floor", "ceil", "trunc") else 1.0
    y = (Y * scale).astype(np.float32)
    np.testing.assert_allclose(
        call(getattr(nl, name), y), getattr(np, name)(y).astype(np.float32), rtol=2e-5, atol=1e-6
    )


REDUCTIONS = ("sum", "prod", "max", "min", "mean", "var")


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("keepdims", [False, True])
def test_a_reduction_runs_along_the_free_axes(name: str, keepdims: bool) -> None:
    found = call(lambda y: getattr(nl, name)(y, axis=1, keepdims=keepdims), Y)
    expected = getattr(np, name)(Y.astype(np.float64), axis=1, keepdims=True)
    assert found.shape == (32, 1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_reduction_keeps_leading_axes() -> None:
    cube = Y.reshape(32, 3, 4)
    found = call(lambda y: nl.max(y, axis=2), cube)
    np.testing.assert_array_equal(found, cube.max(axis=2))
    found = call(lambda y: nl.max(y, axis=(1, 2), keepdims=True), cube)
    np.testing.assert_array_equal(found, cube.max(axis=(1, 2), keepdims=True))


def test_all_tests_for_nonzero() -> None:
    a = RANDOM.integers(0, 12, (32, 8)).astype(np.float32)
    np.testing.assert_array_equal(call(lambda a: nl.all(a, axis=1), a)[:, 0], a.all(axis=1))


def test_softmax_and_rms_norm() -> None:
    powers = np.exp(Y.astype(np.float64))
    np.testing.assert_allclose(
        call(nl.softmax, Y), powers / powers.sum(axis=1, keepdims=True), rtol=1e-5
    )
    wide = Y.astype(np.float64)
    normal = wide / np.sqrt(np.square(wide).sum(axis=1, keepdims=True) / 12 + 1e-6)
    found = call(lambda y, w: nl.rms_norm(y, w, axis=1, n=12), Y, X)
    np.testing.assert_allclose(found, normal * X, rtol=1e-5)
    found = call(lambda y: nl.rms_norm(y, None, axis=1, n=12), Y)
    np.testing.assert_allclose(found, normal, rtol=1e-5)


def test_results_have_the_widest_type_unless_one_is_named() -> None:
    half = X.astype(ml_dtypes.bfloat16)
    assert call(nl.add, half, half).dtype == half.dtype
    assert call(nl.add, half, X).dtype == np.float32
    assert call(nl.less, X, Y).dtype == np.bool_
    found = call(lambda x: nl.exp(x, dtype=nl.bfloat16), X)
    np.testing.assert_array_equal(found, np.exp(X).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_where_selects(dtype: Any) -> None:
    condition = RANDOM.integers(0, 2, (32, 12)).astype(dtype)
    found = call(nl.where, condition, X, Y)
    np.testing.assert_array_equal(found, np.where(condition != 0, X, Y))


def test_shapes_change_by_views_and_copies() -> None:
    found = call(lambda x: nl.expand_dims(x, 1), X)
    np.testing.assert_array_equal(found, X[:, None])
    found = call(lambda x: nl.broadcast_to(nl.expand_dims(x, 1), (32, 3, 12)), X)
    np.testing.assert_array_equal(found, np.repeat(X[:, None], 3, axis=1))
    np.testing.assert_array_equal(call(lambda x: nl.broadcast_to(x, (32, 12)), X), X)
    np.testing.assert_array_equal(call(nl.transpose, X), X.T)
    np.testing.assert_array_equal(call(lambda x: nl.transpose(x, dtype=nl.float32), X), X.T)


@pytest.mark.parametrize("partitions", [7, 32, 128])
def test_one_partition_is_repeated_over_many(partitions: int) -> None:
    found = call(lambda x: nl.broadcast_to(x[0:1], (partitions, 12)), X[:2])
    np.testing.assert_array_equal(found, np.repeat(X[:1], partitions, axis=0))
    found = call(lambda x: nl.broadcast_to(x, (partitions, 3), dtype=nl.bfloat16), X[:1, :1])
    np.testing.assert_array_equal(found, np.full((partitions, 3), X[0, 0], ml_dtypes.bfloat16))


def test_windows_of_an_image_are_summed_over_two_axes() -> None:
    image = RANDOM.integers(0, 9, (4, 36)).astype(np.float32)
    windows = [[36, 4], [12, 3], [2, 3], [6, 2], [1, 2]]
    found = call(lambda x: nl.sum(x.ap(windows), axis=[3, 4]), image)
    expected = image.reshape(4, 3, 2, 3, 2).sum(axis=(2, 4))
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def test_matmul_contracts_the_partitions() -> None:
    found = call(lambda x, y: nl.matmul(x, y, transpose_x=True), X, Y)
    np.testing.assert_allclose(found, X.T.astype(np.float64) @ Y, rtol=1e-5, atol=1e-5)


def test_gather_flattened_picks_inside_partitions() -> None:
    indices = RANDOM.integers(0, 12, (32, 5)).astype(np.uint32)
    found = call(nl.gather_flattened, X, indices)
    np.testing.assert_array_equal(found, np.take_along_axis(X, indices.astype(int), axis=1))


def test_load_transpose2d_loads_transposed_and_converts() -> None:
    def kernel(x: Any) -> Any:
        tile = nl.load_transpose2d(x, dtype=nl.bfloat16)
        out = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
        nl.store(out, tile)
        return out

    found = nki_sim.run(kernel, X).outputs
    np.testing.assert_array_equal(found, X.T.astype(ml_dtypes.bfloat16))


def test_random_numbers_follow_their_seed() -> None:
    def kernel(seed: Any) -> Any:
        found = []
        for start in (3, nl.load(seed), 4):
            nl.random_seed(start)
            tile = nl.rand((64, 256), nl.float32)
            out = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
            nl.store(out, tile)
            found.append(out)
        return tuple(found)

    first, again, other = nki_sim.run(kernel, np.full((1, 1), 3, np.uint32)).outputs
    np.testing.assert_array_equal(first, again)
    assert (first == other).mean() < 0.01
    assert first.min() >= 0
    assert first.max() < 1
    assert abs(first.mean() - 0.5) < 0.01
    assert abs(first.var() - 1 / 12) < 0.005


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            lambda x, y: nl.add(x, nl.sum(y, **ROWS)),
            IllegalOperand,
            r"y: expected shape \[32, 12\]",
        ),
        (lambda x, y: nl.matmul(x, y), LanguageError, "transpose_x: expected True"),
        (lambda x, y: nl.transpose(x, nl.bfloat16), LanguageError, "dtype: expected float32"),
        (lambda x, y: nl.softmax(x, axis=0), LanguageError, "axis: expected the last free axes"),
        (lambda x, y: nl.sum(x, axis=0), LanguageError, "axis: expected the last free axes"),
        (lambda x, y: nl.add(1, 2), IllegalOperand, "x: expected a tile in x or y"),
        (lambda x, y: nl.exp(x, y), TypeError, "takes 1 operands, 2 were given"),
        (lambda x, y: nl.gather_flattened(x, y, axis=1), LanguageError, "axis: expected 0"),
    ],
)
def test_what_no_instruction_does_is_refused(
    body: Callable[..., Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        call(body, X, Y)
