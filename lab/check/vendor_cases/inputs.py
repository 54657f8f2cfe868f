"""Random inputs: reproducible, quick for gigabytes, and lazy where a kernel touches few experts."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int32": np.int32,
    "uint32": np.uint32,
}

# Arrays above this many elements repeat a pool of random numbers at random offsets: drawing them
# all would take longer than running the kernel.
POOL_ELEMENTS = (1 << 21) + 331


def dtype_of(name: str | None) -> np.dtype[Any]:
    """Return the NumPy dtype of a case's dtype name."""
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r}: must be one of {', '.join(DTYPES)}. Correct the case.")
    dtype: np.dtype[Any] = np.dtype(DTYPES[name])
    return dtype


class Draw:
    """Random arrays of one case."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._pools: dict[tuple[Any, ...], np.ndarray] = {}

    def uniform(self, shape: Sequence[int], low: float, high: float, dtype: Any) -> np.ndarray:
        """Return uniform numbers in [low, high)."""
        kind = ("uniform", low, high)
        return self._fill(
            shape, dtype, kind, lambda n: self.rng.random(n, dtype=np.float32) * (high - low) + low
        )

    def normal(self, shape: Sequence[int], dtype: Any, std: float = 1.0) -> np.ndarray:
        """Return normal numbers with mean 0."""
        return self._fill(
            shape,
            dtype,
            ("normal", std),
            lambda n: self.rng.standard_normal(n, dtype=np.float32) * std,
        )

    def integers(self, shape: Sequence[int], low: int, high: int, dtype: Any) -> np.ndarray:
        """Return integers in [low, high)."""
        kind = ("integers", low, high)
        return self._fill(
            shape, dtype, kind, lambda n: self.rng.integers(low, high, n).astype(np.float32)
        )

    def choices(self, rows: int, of: int, count: int) -> np.ndarray:
        """Return `count` distinct numbers below `of` per row: [rows, count] int32."""
        return np.argsort(self.rng.random((rows, of)), axis=1)[:, :count].astype(np.int32)

    def _fill(
        self,
        shape: Sequence[int],
        dtype: Any,
        kind: tuple[Any, ...],
        draw: Callable[[int], np.ndarray],
    ) -> np.ndarray:
        """Fill an array from draw(), or from a pool of its numbers when it is large."""
        size = math.prod(shape)
        if size <= POOL_ELEMENTS:
            return draw(size).astype(dtype).reshape(shape)
        return self.from_pool(
            shape, (*kind, np.dtype(dtype)), lambda: draw(POOL_ELEMENTS).astype(dtype)
        )

    def from_pool(
        self, shape: Sequence[int], key: tuple[Any, ...], pool_of: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """Return an array of pieces of a pool, each from a random offset; pools are kept by key."""
        if key not in self._pools:
            self._pools[key] = pool_of()
        pool = self._pools[key]
        out = np.empty(math.prod(shape), dtype=pool.dtype)
        position = 0
        while position < out.size:
            offset = int(self.rng.integers(0, pool.size // 2))
            piece = min(pool.size - offset, out.size - position)
            out[position : position + piece] = pool[offset : offset + piece]
            position += piece
        return out.reshape(shape)


def only_experts(
    shape: Sequence[int],
    dtype: Any,
    touched: Iterable[int],
    fill: Callable[[Sequence[int]], np.ndarray],
) -> np.ndarray:
    """Return a stack of experts of which only the touched ones are drawn; the rest stays
    unallocated zero pages.
    """
    stack = np.zeros(shape, dtype=dtype)
    for expert in touched:
        stack[expert] = fill(shape[1:])
    return stack


def chosen_experts(logits_TE: np.ndarray, top_k: int) -> np.ndarray:
    """Return the [T, K] experts with the largest logits."""
    return np.argpartition(-logits_TE, top_k - 1, axis=1)[:, :top_k]


def separate_logits(
    draw_rows: Callable[[int], np.ndarray],
    logits_of: Callable[[np.ndarray], np.ndarray],
    rows: int,
    top_k: int,
    margin: float,
) -> np.ndarray:
    """Return rows whose k+1 largest logits differ by at least a margin, in units of each row's
    spread.

    Where two logits tie to within rounding, a kernel and its reference may rightly choose
    different experts.
    """
    out = draw_rows(rows)
    for _ in range(200):
        top = -np.sort(-logits_of(out), axis=1)
        gaps = top[:, :top_k] - top[:, 1 : top_k + 1]
        close = np.flatnonzero(gaps.min(axis=1) < margin * top.std(axis=1))
        if not close.size:
            break
        out[close] = draw_rows(close.size)
    return out
