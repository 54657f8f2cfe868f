"""A bench for single instructions: tiles with given contents, without any data movement.

Example:
    >>> import numpy as np
    >>> from nki_sim.testing import Tile, execute
    >>> from nki_sim import isa
    >>> x = np.array([[1.0, 4.0]], np.float32)
    >>> result = execute(lambda dst, x: isa.reciprocal(dst, x), x=Tile(x), dst=Tile(shape=(1, 2)))
    >>> result["dst"].tolist()
    [[1.0, 0.25]]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from nki_sim.dtypes import as_dtype
from nki_sim.launch import Run, run
from nki_sim.machine import MemoryRegion, NkiTensor, current
from nki_sim.options import SimOptions

_REGIONS = {
    "sbuf": MemoryRegion.sbuf,
    "psum": MemoryRegion.psum,
    "hbm": MemoryRegion.private_hbm,
}


@dataclass(frozen=True, slots=True)
class Tile:
    """A tensor for one instruction.

    Attributes:
        values: contents; None leaves the tensor unwritten.
        dtype: element type; None takes that of the values, or float32.
        shape: of an unwritten tensor.
        space: "sbuf", "psum" or "hbm".
        start: first partition.
        written: where the values count as written; None is everywhere.
    """

    values: ArrayLike | None = None
    dtype: Any = None
    shape: tuple[int, ...] = ()
    space: str = "sbuf"
    start: int = 0
    written: ArrayLike | None = None

    def create(self) -> NkiTensor:
        """Make the tensor on the running core."""
        array = None if self.values is None else np.asarray(self.values)
        shape = self.shape if array is None else array.shape
        if self.dtype is not None:
            dtype = as_dtype(self.dtype)
        else:
            dtype = as_dtype("float32" if array is None else array.dtype)
        rows = (shape[0] + self.start, *shape[1:])
        whole = current().allocate(rows, dtype, _REGIONS[self.space])
        view = whole[self.start :]
        if array is None:
            return view
        if array.dtype == dtype.numpy:
            view.array()[...] = array
        else:
            view.store(array)
        coverage, geometry = view._alloc.defined, view.geometry
        if self.written is None:
            coverage.add(geometry.box, geometry.walk)
        else:
            coverage.add_where(geometry.walk, np.broadcast_to(np.asarray(self.written), shape))
        return view


@dataclass(frozen=True, slots=True)
class Result:
    """What the instructions left behind.

    Attributes:
        tiles: final contents by name, in the storage type of each tensor.
        unwritten: by name, where a tensor holds nothing that anybody may rely on.
        run: the simulation.
    """

    tiles: dict[str, Any]
    unwritten: dict[str, Any]
    run: Run

    def __getitem__(self, name: str) -> Any:
        return self.tiles[name]


def execute(
    body: Callable[..., Any], *, options: SimOptions | None = None, **tiles: Tile
) -> Result:
    """Run a function that issues instructions on named tiles.

    Args:
        body: called with one tensor per tile, by name, inside a kernel.
        options: how to simulate.
        **tiles: the tensors.

    Raises:
        NkiValidationError: an instruction refused its operands.
    """
    contents: dict[str, Any] = {}
    unwritten: dict[str, Any] = {}

    def kernel() -> None:
        views = {name: tile.create() for name, tile in tiles.items()}
        body(**views)
        for name, view in views.items():
            contents[name] = view.array().copy()
            unwritten[name] = ~view._alloc.defined.elements_of(view.geometry.walk)

    return Result(contents, unwritten, run(kernel, options=options))
