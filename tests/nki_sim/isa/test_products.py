"""Products have the same bits wherever operands are, beside whatever, on every instruction set."""

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from nki_sim.isa._products import matrix_product

TYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float16": np.float16,
    "float32": np.float32,
}
SIZES = ((1, 1, 1), (128, 128, 512), (128, 64, 7), (37, 5, 130), (128, 128, 1))
CORE_TYPES = ("Haswell", "Zen", "SkylakeX")


def drawn(name: str, shape: tuple[int, int], seed: int, spread: float) -> np.ndarray:
    """Draw numbers of a type, as float32; `spread` octaves apart."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 2.0 ** rng.uniform(-spread, spread, shape)
    return values.astype(TYPES[name]).astype(np.float32)


@pytest.mark.numeric
@pytest.mark.parametrize("spread", [0.0, 8.0])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_element_is_the_exact_sum_rounded_once(
    size: tuple[int, int, int], name: str, spread: float
) -> None:
    K, M, N = size
    left, right = drawn(name, (K, M), 1, spread), drawn(name, (K, N), 2, spread)
    product = matrix_product(left, right)
    rng = np.random.default_rng(3)
    for row, column in zip(rng.integers(M, size=40), rng.integers(N, size=40), strict=True):
        terms = left[:, row].astype(float) * right[:, column].astype(float)
        assert product[row, column] == np.float32(math.fsum(terms.tolist()))


@pytest.mark.numeric
@pytest.mark.parametrize("name", TYPES)
def test_neighbours_alignment_and_strides_change_no_bit(name: str) -> None:
    K, M, N = 128, 96, 200
    left, right = drawn(name, (K, M), 1, 6.0), drawn(name, (K, N), 2, 6.0)
    whole = matrix_product(left, right)
    for rows, columns in ((slice(0, 1), slice(0, 1)), (slice(3, 50), slice(7, 200))):
        part = matrix_product(left[:, rows], right[:, columns])
        assert np.array_equal(part, whole[rows, columns])
    memory = np.empty(right.size + 9, np.float32)
    for offset in range(1, 9):
        moved = memory[offset : offset + right.size].reshape(right.shape)
        moved[:] = right
        assert np.array_equal(matrix_product(np.asfortranarray(left), moved), whole)


@pytest.mark.numeric
def test_a_cancelled_sum_is_exact() -> None:
    left = np.array([[1.0], [2.0**-40], [-1.0]], np.float32)
    right = np.array([[2.0**60], [3.0], [2.0**60]], np.float32)
    assert matrix_product(left, right)[0, 0] == np.float32(3 * 2.0**-40)


@pytest.mark.numeric
@np.errstate(all="ignore")
def test_what_is_no_number_or_too_large_is_told() -> None:
    huge = np.full((2, 1), 3e38, np.float32)
    assert matrix_product(huge, huge)[0, 0] == np.inf
    assert matrix_product(huge, -huge)[0, 0] == -np.inf
    broken = np.array([[np.inf], [1.0]], np.float32)
    assert np.isnan(matrix_product(broken, np.array([[0.0], [1.0]], np.float32)))[0, 0]
    assert matrix_product(broken, np.ones((2, 1), np.float32))[0, 0] == np.inf
    zero = matrix_product(np.zeros((2, 1), np.float32), -np.ones((2, 3), np.float32))
    assert not np.signbit(zero).any()


def digest() -> str:
    """Return a hash of the bits of some products."""
    found = hashlib.sha256()
    for name in TYPES:
        for number, (K, M, N) in enumerate(SIZES):
            for spread in (0.0, 4.0, 12.0):
                left, right = drawn(name, (K, M), number, spread), drawn(name, (K, N), 7, spread)
                found.update(matrix_product(left, right).tobytes())
    return found.hexdigest()


def test_instruction_sets_and_threads_change_no_bit() -> None:
    has_avx512 = "avx512f" in Path("/proc/cpuinfo").read_text()
    core_types = CORE_TYPES if has_avx512 else CORE_TYPES[:-1]
    code = "from tests.nki_sim.isa.test_products import digest; print(digest())"
    found = {digest()}
    for core_type in core_types:
        settings = {"OPENBLAS_CORETYPE": core_type, "OPENBLAS_NUM_THREADS": "2"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[3],
            text=True,
            env={**os.environ, **settings},
            capture_output=True,
            check=True,
        )
        found.add(done.stdout.strip())
    assert len(found) == 1
