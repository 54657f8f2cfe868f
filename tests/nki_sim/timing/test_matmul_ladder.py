"""Four matmul kernels, each with one optimisation more, are timed in the order of the vendor's
tutorials.

The steps are those of the matrix multiplication and kernel optimization tutorials of
aws-neuron/aws-neuron-sdk (nki/guides/tutorials): load both tiles for every matmul; keep a column of
tiles; block the free axes; block all three axes and load whole rows of a block. The published
profiles order them so, and so does the worked 4096^3 example of
aws-neuron/neuron-agentic-development: 8,602, 2,451 and 1,801 us.
"""

# ruff: noqa: PERF401  kernels hold no comprehension: the language has none
import itertools
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_sim
from nki_sim.time.sensitivity import compare

nki_sim.provide()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

SIZE = 2048
M_TILE, K_TILE, N_TILE = 128, 128, 512


def load(source: Any, row: int, rows: int, column: int, columns: int) -> Any:
    tile = nl.ndarray((rows, columns), dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source[row : row + rows, column : column + columns])
    return tile


def store_psum(result: Any, row: int, column: int, psum: Any) -> None:
    tile = nl.ndarray((M_TILE, N_TILE), dtype=result.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=tile, src=psum)
    nisa.dma_copy(dst=result[row : row + M_TILE, column : column + N_TILE], src=tile)


def new_result(lhs_T: Any, rhs: Any) -> Any:
    return nl.ndarray((lhs_T.shape[1], rhs.shape[1]), dtype=lhs_T.dtype, buffer=nl.shared_hbm)


def new_psum() -> Any:
    return nl.ndarray((M_TILE, N_TILE), dtype=nl.float32, buffer=nl.psum)


@nki.jit
def tiled(lhs_T, rhs):
    result = new_result(lhs_T, rhs)
    for m in range(0, lhs_T.shape[1], M_TILE):
        for n in range(0, rhs.shape[1], N_TILE):
            psum = new_psum()
            for k in range(0, rhs.shape[0], K_TILE):
                stationary = load(lhs_T, k, K_TILE, m, M_TILE)
                moving = load(rhs, k, K_TILE, n, N_TILE)
                nisa.nc_matmul(dst=psum, stationary=stationary, moving=moving)
            store_psum(result, m, n, psum)
    return result


@nki.jit
def hoisted(lhs_T, rhs):
    result = new_result(lhs_T, rhs)
    for m in range(0, lhs_T.shape[1], M_TILE):
        stationary = []
        for k in range(0, rhs.shape[0], K_TILE):
            stationary.append(load(lhs_T, k, K_TILE, m, M_TILE))
        for n in range(0, rhs.shape[1], N_TILE):
            psum = new_psum()
            for k in range(0, rhs.shape[0], K_TILE):
                moving = load(rhs, k, K_TILE, n, N_TILE)
                nisa.nc_matmul(dst=psum, stationary=stationary[k // K_TILE], moving=moving)
            store_psum(result, m, n, psum)
    return result


@nki.jit
def blocked_free_axes(lhs_T, rhs):
    result = new_result(lhs_T, rhs)
    for m in range(0, lhs_T.shape[1], 2 * M_TILE):
        stationary = []
        for k in range(0, rhs.shape[0], K_TILE):
            for part in range(2):
                stationary.append(load(lhs_T, k, K_TILE, m + part * M_TILE, M_TILE))
        for n in range(0, rhs.shape[1], 2 * N_TILE):
            moving = []
            for k in range(0, rhs.shape[0], K_TILE):
                for part in range(2):
                    moving.append(load(rhs, k, K_TILE, n + part * N_TILE, N_TILE))
            for row in range(2):
                for column in range(2):
                    psum = new_psum()
                    for k in range(rhs.shape[0] // K_TILE):
                        nisa.nc_matmul(
                            dst=psum,
                            stationary=stationary[2 * k + row],
                            moving=moving[2 * k + column],
                        )
                    store_psum(result, m + row * M_TILE, n + column * N_TILE, psum)
    return result


@nki.jit
def blocked_all_axes(lhs_T, rhs):
    result = new_result(lhs_T, rhs)
    for n in range(0, rhs.shape[1], 2 * N_TILE):
        sums = []
        for _ in range(lhs_T.shape[1] // M_TILE):
            tile = nl.ndarray((M_TILE, 2 * N_TILE), dtype=lhs_T.dtype, buffer=nl.sbuf)
            nisa.memset(dst=tile, value=0.0)
            sums.append(tile)
        for k in range(0, rhs.shape[0], 8 * K_TILE):
            moving = []
            stationary = []
            for part in range(8):
                moving.append(load(rhs, k + part * K_TILE, K_TILE, n, 2 * N_TILE))
            for part in range(8):
                stationary.append(load(lhs_T, k + part * K_TILE, K_TILE, 0, lhs_T.shape[1]))
            for column in range(2):
                for m in range(lhs_T.shape[1] // M_TILE):
                    psum = new_psum()
                    for part in range(8):
                        nisa.nc_matmul(
                            dst=psum,
                            stationary=stationary[part][:, m * M_TILE : (m + 1) * M_TILE],
                            moving=moving[part][:, column * N_TILE : (column + 1) * N_TILE],
                        )
                    total = sums[m][:, column * N_TILE : (column + 1) * N_TILE]
                    nisa.tensor_tensor(dst=total, data1=total, data2=psum, op=nl.add)
        for m in range(lhs_T.shape[1] // M_TILE):
            row = m * M_TILE
            nisa.dma_copy(dst=result[row : row + M_TILE, n : n + 2 * N_TILE], src=sums[m])
    return result


LADDER = [tiled, hoisted, blocked_free_axes, blocked_all_axes]


@pytest.fixture(scope="module")
def runs() -> list[nki_sim.Run]:
    matrix = nki_sim.TensorSpec((SIZE, SIZE), ml_dtypes.bfloat16)
    options = nki_sim.SimOptions(mode="indices")
    return [nki_sim.run(kernel, matrix, matrix, options=options) for kernel in LADDER]


@pytest.mark.parametrize("kernel", LADDER, ids=[kernel.func.__name__ for kernel in LADDER])
def test_every_step_multiplies(kernel: Any) -> None:
    rng = np.random.default_rng(0)
    lhs_T = rng.standard_normal((1024, 256)).astype(ml_dtypes.bfloat16)
    rhs = rng.standard_normal((1024, 1024)).astype(ml_dtypes.bfloat16)
    expected = lhs_T.astype(np.float32).T @ rhs.astype(np.float32)
    found = nki_sim.run(kernel, lhs_T, rhs).outputs.astype(np.float32)
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_the_ladder_comes_out_in_the_published_order(
    runs: list[nki_sim.Run], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{'bf16 2048^3 (simulated)':<24} {'total us':>9} {'PE':>6} {'GB/s':>6} {'MB':>7}"]
    for kernel, run in zip(LADDER, runs, strict=True):
        timeline = run.timeline
        lines.append(
            f"{kernel.func.__name__:<24} {timeline.total_us:>9.1f} {timeline.pe_utilisation:>6.1%}"
            f" {timeline.hbm_bytes_per_s / 1e9:>6.0f} {timeline.hbm_bytes / 1e6:>7.1f}"
        )
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")
    times = [run.timeline.total_us for run in runs]
    assert times == sorted(times, reverse=True)
    assert times[0] > 3 * times[-1]


def test_the_naive_kernel_is_memory_bound_and_the_best_is_compute_bound(
    runs: list[nki_sim.Run],
) -> None:
    naive, best = runs[0].timeline, runs[-1].timeline
    assert naive.memory_bound_ns > naive.compute_bound_ns
    assert best.compute_bound_ns > best.memory_bound_ns
    assert best.pe_utilisation > 0.75


def test_the_order_survives_the_assumptions(runs: list[nki_sim.Run]) -> None:
    for slower, faster in itertools.pairwise(runs):
        assert compare(faster.timeline, slower.timeline).survives
