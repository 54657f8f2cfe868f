"""Each instruction refuses each of its operands in the wrong memory, place, size or kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nki_sim import IllegalOperand, SimOptions, isa
from nki_sim.errors import NkiValidationError
from nki_sim.testing import Tile, execute
from tests.golden.calls import NEWER, RIGHT, bound

# A right call, and its tensors; what moves data or draws numbers takes tensors anywhere.
ANYWHERE = ("dma_", "rand", "rng", "nc_matmul_mx", "quantize_mx")
CALLS = {
    **{name: bound(name, of) for name, of in RIGHT.items() if not name.startswith(ANYWHERE)},
    "register_load": (
        lambda src: isa.register_load(isa.register_alloc(0), src),
        {"src": Tile(np.zeros((1, 1), np.int32))},
    ),
}


def shorter(tile: Tile, axis: int) -> Tile:
    """Return a tile with one row, or one column, less; with one more where there is only one."""
    shape = tile.shape or np.shape(tile.values)  # type: ignore[arg-type]
    count = shape[axis] - 1 or 2
    if tile.values is None:
        sizes = list(shape)
        sizes[axis] = count
        return replace(tile, shape=tuple(sizes))
    return replace(tile, values=np.repeat(np.take(tile.values, [0], axis), count, axis))


WRONG: dict[str, Callable[[Tile], Tile]] = {
    "in HBM": lambda tile: replace(tile, space="hbm"),
    "from partition 16 on": lambda tile: replace(tile, start=16),
    "of other partitions": lambda tile: shorter(tile, 0),
    "of other columns": lambda tile: shorter(tile, 1),
}
# What says how much there is to do, or may be larger than that.
RIGHT_AS_WELL = {
    ("tensor_reduce", "data", "of other columns"),
    ("memset", "dst", "of other partitions"),
    ("memset", "dst", "of other columns"),
    ("iota", "dst", "of other partitions"),
    ("max8", "src", "of other columns"),
    ("nc_find_index8", "data", "of other columns"),
    ("nc_n_gather", "data", "of other columns"),
    ("nc_stream_shuffle", "dst", "of other partitions"),
    ("bn_stats", "data", "of other columns"),
    ("nc_transpose", "data", "of other columns"),
    ("nc_matmul", "stationary", "of other columns"),
    ("local_gather", "src_buffer", "of other columns"),
    ("tensor_partition_reduce", "data", "of other partitions"),
    ("register_load", "src", "in HBM"),
    ("register_load", "src", "from partition 16 on"),
}


def options_of(name: str) -> SimOptions:
    return SimOptions(target="trn3" if name in NEWER else "trn2")


@pytest.mark.parametrize("name", CALLS)
def test_a_right_call_runs(name: str) -> None:
    call, tiles = CALLS[name]
    assert execute(call, options=options_of(name), **tiles).run.findings == []


@pytest.mark.parametrize("name", CALLS)
def test_each_operand_that_is_wrong_is_refused(name: str) -> None:
    call, tiles = CALLS[name]
    accepted = set()
    for operand, (how, change) in itertools.product(tiles, WRONG.items()):
        try:
            execute(call, options=options_of(name), **(tiles | {operand: change(tiles[operand])}))
        except NkiValidationError:
            continue
        accepted.add((name, operand, how))
    assert accepted == {case for case in RIGHT_AS_WELL if case[0] == name}


@pytest.mark.parametrize("name", CALLS)
def test_an_operand_that_is_no_tensor_is_refused(name: str) -> None:
    call, tiles = CALLS[name]
    for operand in tiles:

        def body(operand: str = operand, **views: Any) -> None:
            call(**(views | {operand: "text"}))

        with pytest.raises(IllegalOperand):
            execute(body, options=options_of(name), **tiles)
