"""Grids of tiles and blocks of NKI 0.7."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_sim import isa
from nki_sim.language import api as nl

TILE = (128, 256)


def values(*shape: int) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def in_kernel(check: Callable[[Any], Any], x: np.ndarray[Any, Any]) -> Any:
    """Run `check` on a tensor inside a kernel, which returns the tensor; give what it returned."""
    found = []

    def kernel(x: Any) -> Any:
        found.append(check(x))
        return x

    nki_sim.run(kernel, x)
    return found[0]


@pytest.mark.parametrize("shape", [(256, 512), (300, 600), (128, 256), (5, 7)])
def test_a_copy_tile_by_tile(shape: tuple[int, int]) -> None:
    def kernel(x: Any) -> Any:
        y = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        source, target = nl.tiles(x, tile_shape=TILE), nl.tiles(y, tile_shape=TILE)
        for i in range(source.shape[0]):
            for j in range(source.shape[1]):
                tile = nl.ndarray(source[i, j].element_shape, x.dtype)
                isa.dma_copy(dst=tile.data, src=source[i, j].data)
                isa.dma_copy(dst=target[i, j].data, src=tile.data)
        return y

    x = values(*shape)
    run = nki_sim.run(kernel, x)
    assert np.array_equal(run.outputs, x)
    assert run.findings == []


@pytest.mark.parametrize("shape", [(512, 1024), (700, 1000)])
def test_a_copy_block_by_block_through_one_allocation_on_chip(shape: tuple[int, int]) -> None:
    def kernel(x: Any) -> Any:
        y = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        source = nl.blocks(x, tile_shape=TILE, block_shape=(2, 2))
        target = nl.blocks(y, tile_shape=TILE, block_shape=(2, 2))
        for i in range(source.shape[0]):
            for j in range(source.shape[1]):
                held = nl.empty_like(source[i, j], buffer=nl.sbuf)
                assert type(held) is nl.NkiBlockGrid
                assert held.element_shape == source[i, j].element_shape
                grids = [nl.tiles(each) for each in (source[i, j], held, target[i, j])]
                for a in range(grids[0].shape[0]):
                    for b in range(grids[0].shape[1]):
                        isa.dma_copy(dst=grids[1][a, b].data, src=grids[0][a, b].data)
                        isa.dma_copy(dst=grids[2][a, b].data, src=grids[1][a, b].data)
        return y

    x = values(*shape)
    assert np.array_equal(nki_sim.run(kernel, x).outputs, x)


def test_a_grid_says_its_shapes() -> None:
    def check(x: Any) -> None:
        grid = nl.tiles(x, tile_shape=TILE)
        assert (grid.shape, grid.tile_shape) == ((3, 3), TILE)
        assert (grid.element_shape, grid.index_step_elements) == ((300, 600), TILE)
        assert grid.is_remainder
        assert grid.data.shape == x.shape
        assert (grid[0, 0].shape, grid[0, 0].element_shape) == ((), TILE)
        assert not grid[0, 0].is_remainder
        assert grid[2, 2].data.shape == (44, 88)
        assert grid[1].shape == grid[1, :].shape == grid[1, ...].shape == (3,)
        assert grid[1, 1:].data.shape == (128, 344)
        stepped = grid[:, ::2]
        assert (stepped.shape, stepped.element_shape) == ((3, 2), (300, 344))
        assert stepped.index_step_elements == (128, 512)
        assert not stepped.is_data_representable
        blocks = nl.blocks(stepped, block_shape=(2, 1))
        assert (blocks.shape, blocks.block_shape) == ((2, 2), (2, 1))
        assert blocks[1, 1].data.shape == (44, 88)
        assert (blocks.dtype, blocks.buffer) == (x.dtype, x.buffer)
        assert nl.tiles(blocks[0, 1]).shape == (2, 1)
        with pytest.raises(nki_sim.LanguageError, match=r"One tile|one tile at a time"):
            _ = stepped.data
        with pytest.raises(nki_sim.OutOfBounds, match="cells 0 to 2"):
            _ = grid[3, 0]
        with pytest.raises(nki_sim.LanguageError, match="at most 2 indices"):
            _ = grid[0, 0, 0]

    in_kernel(check, values(300, 600))


def test_untiled_axes_in_front_are_taken_one_by_one() -> None:
    def check(x: Any) -> Any:
        grid = nl.tiles(x, tile_shape=(4, 8))
        assert (grid.shape, grid.tile_shape, grid.element_shape) == ((3, 2, 2), (4, 8), (3, 8, 16))
        return grid[2, 1, 0].data.array().copy()

    x = values(3, 8, 16)
    assert np.array_equal(in_kernel(check, x), x[2, 4:8, 0:8])


def test_tiles_on_chip_lie_one_after_the_other() -> None:
    def check(x: Any) -> Any:
        grid = nl.alloc_tiles(
            tile_shape=(4, 8), element_shape=(6, 20), buffer=nl.sbuf, dtype=x.dtype
        )
        assert (grid.shape, grid[1, 2].element_shape) == ((2, 3), (2, 4))
        assert not grid.is_data_representable  # 6 rows over 4 partitions
        assert grid[0].data.shape == (4, 20)
        again = nl.alloc_blocks(
            tile_shape=(4, 8),
            block_shape=(1, 2),
            element_shape=(4, 24),
            buffer=nl.psum,
            dtype=nl.float32,
        )
        assert (again.shape, again[0, 1].element_shape) == ((1, 2), (4, 8))
        return [grid[i, j].data.offset for i in range(2) for j in range(3)]

    assert in_kernel(check, values(6, 20)) == [0, 8, 16, 24, 32, 40]


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((16, 64), (1, 0)), ((2, 16, 64), (2, 1, 0)), ((2, 3, 16, 64), (3, 1, 2, 0))],
)
def test_a_destination_of_a_transpose_has_the_turned_shape(
    shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    def check(x: Any) -> Any:
        return nl.empty_like(x, buffer=nl.sbuf, transpose_axes=axes).shape

    assert in_kernel(check, values(*shape)) == tuple(shape[k] for k in axes)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda x: nl.tiles(x, tile_shape=(4.0, 8)), TypeError, "tile_shape: must be an int"),
        (lambda x: nl.tiles(x, tile_shape=[4, 8]), TypeError, "must be a tuple of ints"),
        (lambda x: nl.tiles(x), TypeError, "tile_shape=None"),
        (lambda x: nl.tiles(3, tile_shape=(4, 8)), TypeError, "a tensor or a grid"),
        (lambda x: nl.tiles(x, tile_shape=(8,)), ValueError, "tile_shape=(8,)"),
        (lambda x: nl.tiles(x, tile_shape=(0, 8)), ValueError, "at least 1"),
        (
            lambda x: nl.tiles(nl.tiles(x, tile_shape=(4, 8)), tile_shape=(4, 4)),
            ValueError,
            "None or",
        ),
        (lambda x: nl.blocks(x, tile_shape=(4, 8), block_shape=(2,)), ValueError, "block_shape"),
        (
            lambda x: nl.alloc_tiles(
                tile_shape=(4, 8), element_shape=(2, 4, 8), buffer=nl.sbuf, dtype=x.dtype
            ),
            ValueError,
            "every axis must be tiled in sbuf",
        ),
        (
            lambda x: nl.alloc_tiles(
                tile_shape=(4, 8), element_shape=(4, 8), buffer="sbuf", dtype=x.dtype
            ),
            TypeError,
            "a memory region",
        ),
        (
            lambda x: nl.empty_like(x, transpose_axes=(1, 0)),
            nki_sim.LanguageError,
            "with buffer=nl.sbuf",
        ),
        (
            lambda x: nl.empty_like(x, buffer=nl.sbuf, transpose_axes=(0, 1)),
            nki_sim.LanguageError,
            "(1, 0)",
        ),
    ],
)
def test_what_is_no_grid_is_refused(make: Any, error: type[Exception], text: str) -> None:
    def check(x: Any) -> str:
        with pytest.raises(error) as caught:
            make(x)
        return str(caught.value)

    assert text in in_kernel(check, values(8, 16))
