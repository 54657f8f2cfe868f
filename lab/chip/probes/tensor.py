"""Micro-kernels of the Tensor engine: stream, floor, stationary tiles, PSUM, ramp."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from lab.chip.probes.tiles import filled, stored


def from_psum(bank_ps: nl.NkiTensor, columns: int) -> nl.NkiTensor:
    """Return the first columns of a bank in SBUF."""
    tile = nl.ndarray((bank_ps.shape[0], columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=tile, src=bank_ps[:, 0:columns], engine=nisa.engine.vector)
    return tile


@nki.jit
def matmul_train(repeats: int, columns: int, adds: bool) -> nl.NkiTensor:
    """Multiply back to back with two stationary tiles in turn; write to PSUM, or add to it."""
    one, other = filled(128, nl.bfloat16), filled(128, nl.bfloat16)
    moving = filled(columns, nl.bfloat16, 0.0)
    bank_ps = nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.psum)
    for turn in range(repeats):
        nisa.nc_matmul(
            dst=bank_ps,
            stationary=one if turn % 2 == 0 else other,
            moving=moving,
            accumulate=adds and turn > 0,
        )
    return stored(from_psum(bank_ps, 1))


@nki.jit
def short_matmuls(repeats: int, columns: int) -> nl.NkiTensor:
    """Multiply small tiles back to back: the floor of the engine."""
    one, other = filled(8, nl.bfloat16), filled(8, nl.bfloat16)
    moving = filled(columns, nl.bfloat16, 0.0)
    bank_ps = nl.ndarray((8, columns), dtype=nl.float32, buffer=nl.psum)
    for turn in range(repeats):
        nisa.nc_matmul(
            dst=bank_ps,
            stationary=one if turn % 2 == 0 else other,
            moving=moving,
            accumulate=False,
        )
    return stored(from_psum(bank_ps, 1))


@nki.jit
def matmul_chain(
    repeats: int, matmuls: int, width: int, columns: int, tiles: int, is_narrow: bool
) -> nl.NkiTensor:
    """Multiply in short trains, each of which needs the result of the one before as moving tile.

    A train's first stationary tile loads once its operands are there, which nothing hides; the
    others load behind the stream. Four bfloat16 matmuls and one of float32 stream equally long.

    Args:
        repeats: trains.
        matmuls: of a train.
        width: columns of a stationary tile.
        columns: of the moving tile.
        tiles: stationary ones, in turn: 1 or 2.
        is_narrow: of bfloat16 instead of float32.
    """
    dtype = nl.bfloat16 if is_narrow else nl.float32
    one, other = filled(width, dtype, 0.0), filled(width, dtype, 0.0)
    moving = filled(columns, dtype, 0.0)
    bank_ps = nl.ndarray((width, columns), dtype=nl.float32, buffer=nl.psum)
    for turn in range(repeats * matmuls):
        nisa.nc_matmul(
            dst=bank_ps,
            stationary=one if turn % tiles == 0 else other,
            moving=moving,
            accumulate=False,
        )
        if turn % matmuls == matmuls - 1:
            nisa.tensor_copy(
                dst=moving[0:width, 0:8], src=bank_ps[:, 0:8], engine=nisa.engine.vector
            )
    return stored(moving)


@nki.jit
def tiles_at_once(repeats: int) -> nl.NkiTensor:
    """Multiply on the 32 x 32 parts of the array in turn, that have nothing to do with each other.

    Args:
        repeats: turns through all parts.
    """
    stationary, moving = filled(32, nl.bfloat16, 0.0), filled(8, nl.bfloat16, 0.0)
    bank_ps = nl.ndarray((128, 4, 8), dtype=nl.float32, buffer=nl.psum)
    for _turn in range(repeats):
        for row in range(4):
            for column in range(4):
                first = 32 * column
                nisa.nc_matmul(
                    dst=bank_ps[first : first + 32, row, :],
                    stationary=stationary[32 * row : 32 * row + 32, :],
                    moving=moving[32 * row : 32 * row + 32, :],
                    accumulate=False,
                    tile_position=(32 * row, first),
                    tile_size=(32, 32),
                )
    tile = nl.ndarray((32, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=tile, src=bank_ps[0:32, 0, 0:1], engine=nisa.engine.vector)
    return stored(tile)


@nki.jit
def pulses(repeats: int, matmuls: int, pause: int) -> nl.NkiTensor:
    """Multiply in short trains, with pauses in which the engine cools."""
    stationary, moving = filled(128, nl.bfloat16), filled(512, nl.bfloat16, 0.0)
    rest, last = filled(pause, nl.float32), filled(1, nl.float32)
    bank_ps = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
    for _turn in range(repeats):
        for _matmul in range(matmuls):
            nisa.nc_matmul(dst=bank_ps, stationary=stationary, moving=moving, accumulate=False)
        nisa.tensor_copy(dst=last, src=bank_ps[:, 0:1], engine=nisa.engine.vector)
        nisa.tensor_copy(dst=rest, src=last.broadcast(1, pause), engine=nisa.engine.vector)
        nisa.tensor_copy(
            dst=moving[:, 0:1], src=rest[:, pause - 1 : pause], engine=nisa.engine.vector
        )
    return stored(from_psum(bank_ps, 1))
