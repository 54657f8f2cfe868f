"""Grids of tiles and blocks (NKI 0.7): `tiles`, `blocks`, `alloc_tiles`, `alloc_blocks`.

A grid is a view. Along each axis it holds the numbers of the tiles that were chosen, and where they
are: tile t begins `step * t` elements on, its elements are `stride` apart. In a tensor that was
there before, step is tile times stride; in one that `alloc_tiles` made on chip, tiles are one after
the other in row-major order, each over as many partitions as a tile has rows.

Assumed, as the pages do not say it: an index that takes an untiled axis takes it out of
`element_shape`, too; `data` has the axes of `element_shape`, so that several tiles with gaps
between them have none; `is_remainder` is true where a chosen cell is cut short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Self

from nki_sim.dtypes import DType
from nki_sim.errors import LanguageError, OutOfBounds
from nki_sim.language.objects import create, find_region
from nki_sim.machine import MemoryRegion, NkiTensor
from nki_sim.machine.geometry import contiguous_strides

_PARTITIONS: Final = 128
_SLAB: Final = 0  # size of a tile of an axis that is not tiled


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis: chosen tiles of `tile` elements below `extent`, `per` of them in a cell."""

    extent: int
    tile: int
    stride: int
    step: int
    tiles: tuple[int, ...]
    per: int = 1
    taken: bool = False

    @property
    def cells(self) -> int:
        return -(-len(self.tiles) // self.per)

    @property
    def size(self) -> int:
        """Chosen elements."""
        width = max(self.tile, 1)
        return sum(min(width, self.extent - tile * width) for tile in self.tiles)

    @property
    def is_one_run(self) -> bool:
        """Whether the elements are equally far apart."""
        is_next = all(b == a + 1 for a, b in pairwise(self.tiles))
        return len(self.tiles) == 1 or (is_next and self.step == max(self.tile, 1) * self.stride)

    def choose(self, cells: Sequence[int], taken: bool) -> _Axis:
        chosen = [t for c in cells for t in self.tiles[c * self.per : (c + 1) * self.per]]
        return replace(self, tiles=tuple(chosen), taken=taken)


class NkiGrid:
    """A view of a tensor in cells: tiles, or blocks of tiles. `tiles` and `blocks` make them."""

    def __init__(self, base: NkiTensor, axes: tuple[_Axis, ...]) -> None:
        self._base = base
        self._axes = axes

    def __repr__(self) -> str:
        cells = f"{list(self.shape)} of {list(self.tile_shape)}"
        return f"{type(self).__name__}({self._base.label()}, {cells}, {self.dtype})"

    @property
    def buffer(self) -> Any:
        """Memory region of the tensor."""
        return self._base.buffer

    @property
    def dtype(self) -> DType:
        """Element type of the tensor."""
        return self._base.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells along each axis that no index has taken."""
        return tuple([axis.cells for axis in self._axes if not axis.taken])

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """Elements of a whole tile."""
        return tuple([axis.tile for axis in self._axes if axis.tile])

    @property
    def element_shape(self) -> tuple[int, ...]:
        """Chosen elements along each axis, but for untiled ones that an index has taken."""
        return tuple([axis.size for axis in self._kept])

    @property
    def index_step_elements(self) -> tuple[int, ...]:
        """Elements from one cell to the next, along each axis of `shape`."""
        steps = []
        for axis in self._axes:
            apart = axis.tiles[axis.per] - axis.tiles[0] if axis.cells > 1 else axis.per
            steps += [] if axis.taken else [apart * max(axis.tile, 1)]
        return tuple(steps)

    @property
    def is_remainder(self) -> bool:
        """Whether the last cell of some axis is smaller than the others."""
        return any(axis.size < axis.cells * axis.per * max(axis.tile, 1) for axis in self._axes)

    @property
    def is_data_representable(self) -> bool:
        """Whether `data` exists."""
        return all(axis.is_one_run for axis in self._axes)

    @property
    def data(self) -> NkiTensor:
        """The chosen elements as one tensor, for an instruction.

        Raises:
            LanguageError: no access pattern of these axes holds them.
        """
        for number, axis in enumerate(self._axes):
            if not axis.is_one_run:
                raise LanguageError(
                    self._base.label(),
                    f"tiles side by side on axis {number} for .data",
                    f"tiles {list(axis.tiles)} with gaps or laid one after the other",
                    "Take one tile at a time: grid[i, j].data",
                )
        offset = self._base.offset + sum(axis.tiles[0] * axis.step for axis in self._axes)
        strides = tuple([axis.stride for axis in self._kept])
        return self._base._derive(self.element_shape, strides, offset)

    @property
    def _kept(self) -> list[_Axis]:
        return [axis for axis in self._axes if axis.tile or not axis.taken]

    def __getitem__(self, key: Any) -> Self:
        """Return the cells of an index: numbers, slices with a positive step, `...`."""
        keys = list(key) if isinstance(key, tuple) else [key]
        open_axes = [k for k, axis in enumerate(self._axes) if not axis.taken]
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys[at : at + 1] = [slice(None)] * (len(open_axes) - len(keys) + 1)
        if len(keys) > len(open_axes):
            raise LanguageError(
                self._base.label(), f"at most {len(open_axes)} indices", f"{len(keys)}"
            )
        axes = list(self._axes)
        for place, item in zip(open_axes, keys, strict=False):
            cells = range(axes[place].cells)
            if isinstance(item, slice):
                chosen = cells[item] if (item.step or 1) > 0 else range(0)
            else:
                number = _exact(item, "a cell")
                chosen = cells[number : number + 1] if number >= 0 else range(0)
            if not chosen:
                raise OutOfBounds(self._base.label(), f"cells 0 to {len(cells) - 1}", f"{item}")
            axes[place] = axes[place].choose(chosen, not isinstance(item, slice))
        return type(self)(self._base, tuple(axes))


class NkiTileGrid(NkiGrid):
    """A grid whose cells are tiles."""


class NkiBlockGrid(NkiGrid):
    """A grid whose cells are blocks of tiles; `tiles` opens them."""

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Tiles of a whole block."""
        return tuple([axis.per for axis in self._axes if axis.tile])


def _exact(value: Any, what: str) -> int:
    if type(value) is not int:
        raise TypeError(f"{what}: must be an int that is known at compile time; found {value!r}.")
    return value


def _sizes(name: str, shape: Any, ranks: range) -> tuple[int, ...]:
    """Return a shape of positive ints.

    Raises:
        TypeError: it is no tuple of ints.
        ValueError: an entry below 1, or another number of entries than `ranks` has.
    """
    if not isinstance(shape, tuple):
        raise TypeError(f"{name}={shape!r}: must be a tuple of ints.")
    if any(_exact(each, name) < 1 for each in shape) or len(shape) not in ranks:
        most = f"{ranks.start} to {ranks.stop - 1}" if len(ranks) > 1 else f"{ranks.start}"
        raise ValueError(f"{name}={shape!r}: must have {most} entries of at least 1.")
    return shape


def _axes_of(shape: Sequence[int], tile_shape: Any) -> list[_Axis]:
    """Return the axes of a shape, with the strides still to come."""
    tile = _sizes("tile_shape", tile_shape, range(2, len(shape) + 1))
    widths = [_SLAB] * (len(shape) - len(tile)) + list(tile)
    return [
        _Axis(extent, width, 0, 0, tuple(range(-(-extent // max(width, 1)))))
        for extent, width in zip(shape, widths, strict=True)
    ]


def _place(axes: Sequence[_Axis], strides: Sequence[int]) -> tuple[_Axis, ...]:
    """Return the axes as they are stored in a tensor of natural layout."""
    placed = zip(axes, strides, strict=True)
    return tuple([replace(a, stride=s, step=max(a.tile, 1) * s) for a, s in placed])


def _lay_out(
    axes: Sequence[_Axis], dtype: Any, buffer: MemoryRegion, name: str, address: Any
) -> tuple[NkiTensor, tuple[_Axis, ...]]:
    """Make a tensor for a grid: compact in HBM, on chip the tiles one after the other."""
    if buffer in (MemoryRegion.shared_hbm, MemoryRegion.private_hbm):
        base = create([axis.extent for axis in axes], dtype, buffer, name, address)
        return base, _place(axes, base.strides)
    if any(axis.tile == _SLAB for axis in axes):
        raise ValueError(f"element_shape: every axis must be tiled in {buffer.name}.")
    tile = [axis.tile for axis in axes]
    grid = [len(axis.tiles) for axis in axes]
    columns = math.prod(tile[1:])
    base = create((tile[0], math.prod(grid) * columns), dtype, buffer, name, address)
    within = (base.strides[0], *contiguous_strides(tile)[1:])
    steps = [columns * each for each in contiguous_strides(grid)]
    placed = zip(axes, within, steps, strict=True)
    return base, tuple([replace(a, stride=s, step=t) for a, s, t in placed])


def tiles(source: NkiTensor | NkiGrid, *, tile_shape: tuple[int, ...] | None = None) -> NkiTileGrid:
    """Return a tensor, or the cells of a grid, as a grid of tiles.

    Args:
        source: tensor, or grid: its tiles stay what they are.
        tile_shape: elements of a tile, of the last axes of a tensor; at least two.
    """
    if isinstance(source, NkiGrid):
        if tile_shape not in (None, source.tile_shape):
            known = source.tile_shape
            raise ValueError(f"tile_shape={tile_shape!r}: must be None or the grid's {known}.")
        open_axes = [replace(a, per=1, taken=a.taken and not a.tile) for a in source._axes]
        return NkiTileGrid(source._base, tuple(open_axes))
    if not isinstance(source, NkiTensor):
        raise TypeError(f"source={source!r}: must be a tensor or a grid.")
    return NkiTileGrid(source, _place(_axes_of(source.shape, tile_shape), source.strides))


def blocks(
    source: NkiTensor | NkiGrid,
    *,
    tile_shape: tuple[int, ...] | None = None,
    block_shape: tuple[int, ...],
) -> NkiBlockGrid:
    """Return a tensor, or the tiles of a grid, as a grid of blocks of `block_shape` tiles."""
    grid = tiles(source, tile_shape=tile_shape)
    rank = len(grid.tile_shape)
    sizes = _sizes("block_shape", block_shape, range(rank, rank + 1))
    pers = (1,) * (len(grid._axes) - rank) + sizes
    pairs = zip(grid._axes, pers, strict=True)
    return NkiBlockGrid(grid._base, tuple([replace(axis, per=per) for axis, per in pairs]))


def alloc_tiles(
    *,
    tile_shape: tuple[int, ...],
    element_shape: tuple[int, ...],
    buffer: MemoryRegion,
    dtype: Any,
    address: tuple[int, int] | None = None,
    name: str = "",
) -> NkiTileGrid:
    """Make a tensor without values as a grid of tiles.

    Args:
        tile_shape: elements of a tile, along the last axes.
        element_shape: elements in all; axes before those of a tile stay untiled (HBM only).
        buffer, dtype, address, name: as for `nl.ndarray`.
    """
    if not isinstance(buffer, MemoryRegion):
        raise TypeError(f"buffer={buffer!r}: must be a memory region, as nl.sbuf.")
    axes = _axes_of(_sizes("element_shape", element_shape, range(1, 6)), tile_shape)
    return NkiTileGrid(*_lay_out(axes, dtype, buffer, name, address))


def alloc_blocks(
    *,
    tile_shape: tuple[int, ...],
    block_shape: tuple[int, ...],
    element_shape: tuple[int, ...],
    buffer: MemoryRegion,
    dtype: Any,
    address: tuple[int, int] | None = None,
    name: str = "",
) -> NkiBlockGrid:
    """Make a tensor without values as a grid of blocks, laid out as by `alloc_tiles`."""
    made = alloc_tiles(
        tile_shape=tile_shape,
        element_shape=element_shape,
        buffer=buffer,
        dtype=dtype,
        address=address,
        name=name,
    )
    return blocks(made, block_shape=block_shape)


_TURNS: Final = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def empty_like(
    x: NkiTensor | NkiGrid,
    dtype: Any = None,
    buffer: Any = None,
    name: str = "",
    *,
    transpose_axes: tuple[int, ...] | None = None,
    address: tuple[int, int] | None = None,
) -> NkiTensor | NkiGrid:
    """Create a tensor, or a grid, without values with the shape of another.

    Args:
        x: tensor or grid; of a grid the chosen cells are packed without gaps.
        dtype, buffer: those of `x` if None.
        name, address: as for `nl.ndarray`.
        transpose_axes: the order that a `nisa.dma_transpose` of `x` will give to its axes: (1, 0),
            (2, 1, 0) or (3, 1, 2, 0). The destination is in SBUF.
    """
    kind, region = dtype or x.dtype, x.buffer if buffer is None else buffer
    sizes = x.element_shape if isinstance(x, NkiGrid) else x.shape
    order = tuple(range(len(sizes)))
    if transpose_axes is not None:
        order = _TURNS.get(len(sizes), ())
        if transpose_axes != order or find_region(region) is not MemoryRegion.sbuf:
            raise LanguageError(
                "transpose_axes",
                f"{order or 'a tensor of 2 to 4 axes'} with buffer=nl.sbuf",
                f"{transpose_axes!r} of {len(sizes)} axes in {find_region(region).name}",
            )
        if sizes[order[0]] > _PARTITIONS:
            raise LanguageError(
                "transpose_axes",
                f"at most {_PARTITIONS} elements on the axis that becomes partitions",
                f"{sizes[order[0]]} on axis {order[0]}",
            )
    if not isinstance(x, NkiGrid):
        return create([sizes[k] for k in order], kind, region, name, address)
    axes = []
    for k in order:
        axis = x._kept[k]
        axes.append(replace(axis, extent=axis.size, tiles=tuple(range(len(axis.tiles)))))
    return type(x)(*_lay_out(axes, kind, find_region(region), name, address))
