"""Each instruction refuses each of its operands in the wrong memory, place, size or kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nki_sim import IllegalOperand, SimOptions, isa
from nki_sim.constants import reduce_cmd
from nki_sim.errors import NkiValidationError
from nki_sim.language import api as nl
from nki_sim.testing import Tile, execute

ROWS, COLUMNS = 32, 16
X = Tile(np.random.default_rng(3).random((ROWS, COLUMNS)).astype(np.float32))
ONE = Tile(np.ones((ROWS, 1), np.float32))
EIGHT = Tile(np.sort(X.values)[:, :-9:-1].copy())  # type: ignore[arg-type]
MASK = Tile(np.ones((ROWS, COLUMNS), np.uint8))
INTEGERS = Tile(np.zeros((ROWS, COLUMNS), np.uint32))
Call = Callable[..., Any]


def out(
    columns: int = COLUMNS, dtype: str = "float32", *, rows: int = ROWS, space: str = "sbuf"
) -> Tile:
    return Tile(shape=(rows, columns), dtype=dtype, space=space)


# A right call, and its tensors.
CALLS: dict[str, tuple[Call, dict[str, Tile]]] = {
    "tensor_tensor": (
        lambda dst, data1, data2: isa.tensor_tensor(dst, data1, data2, nl.add),
        {"dst": out(), "data1": X, "data2": X},
    ),
    "tensor_scalar": (
        lambda dst, data, operand0: isa.tensor_scalar(dst, data, nl.add, operand0),
        {"dst": out(), "data": X, "operand0": ONE},
    ),
    "scalar_tensor_tensor": (
        lambda dst, data, operand0, operand1: isa.scalar_tensor_tensor(
            dst, data, nl.add, operand0, nl.add, operand1
        ),
        {"dst": out(), "data": X, "operand0": ONE, "operand1": X},
    ),
    "tensor_reduce": (
        lambda dst, data: isa.tensor_reduce(dst, nl.add, data, axis=1),
        {"dst": out(1), "data": X},
    ),
    "reciprocal": (isa.reciprocal, {"dst": out(), "data": X}),
    "tensor_tensor_scan": (
        lambda dst, data0, data1: isa.tensor_tensor_scan(
            dst, data0, data1, 0.0, nl.multiply, nl.add
        ),
        {"dst": out(), "data0": X, "data1": X},
    ),
    "tensor_copy": (isa.tensor_copy, {"dst": out(), "src": X}),
    "memset": (lambda dst: isa.memset(dst, 0.0), {"dst": out()}),
    "tensor_copy_predicated": (
        isa.tensor_copy_predicated,
        {"dst": X, "src": X, "predicate": MASK},
    ),
    "activation": (
        lambda dst, data, bias, scale: isa.activation(dst, nl.exp, data, bias=bias, scale=scale),
        {"dst": out(), "data": X, "bias": ONE, "scale": ONE},
    ),
    "activation_reduce": (
        lambda dst, data, reduce_res: isa.activation_reduce(dst, nl.exp, data, nl.add, reduce_res),
        {"dst": out(), "data": X, "reduce_res": out(1)},
    ),
    "activate2": (
        lambda dst, data: isa.activate2(dst, nl.exp, data, 1.0, 0.0, nl.multiply, nl.add),
        {"dst": out(), "data": X},
    ),
    "select_reduce": (
        lambda dst, predicate, on_true, reduce_res: isa.select_reduce(
            dst, predicate, on_true, 0.0, reduce_res, reduce_cmd.reset_reduce
        ),
        {"dst": out(), "predicate": MASK, "on_true": X, "reduce_res": out(1)},
    ),
    "range_select": (
        lambda dst, on_true_tile, bound0, bound1, reduce_res: isa.range_select(
            dst, on_true_tile, nl.greater_equal, nl.less, bound0, bound1, reduce_res=reduce_res
        ),
        {"dst": out(), "on_true_tile": X, "bound0": ONE, "bound1": ONE, "reduce_res": out(1)},
    ),
    "tensor_scalar_reduce": (
        lambda dst, data, reduce_res: isa.tensor_scalar_reduce(
            dst, data, nl.add, 1.0, nl.add, reduce_res
        ),
        {"dst": out(), "data": X, "reduce_res": out(1)},
    ),
    "tensor_scalar_cumulative": (
        lambda dst, src: isa.tensor_scalar_cumulative(dst, src, nl.multiply, nl.add, 1.0),
        {"dst": out(), "src": X},
    ),
    "exponential": (
        lambda dst, src, max_value: isa.exponential(dst, src, max_value),
        {"dst": out(), "src": X, "max_value": ONE},
    ),
    "max8": (isa.max8, {"dst": out(8), "src": X}),
    "nc_find_index8": (
        isa.nc_find_index8,
        {"dst": out(8, "uint32"), "data": X, "vals": EIGHT},
    ),
    "nc_match_replace8": (
        lambda dst, data, vals, dst_idx: isa.nc_match_replace8(dst, data, vals, 0.0, dst_idx),
        {"dst": out(), "data": X, "vals": EIGHT, "dst_idx": out(8, "uint32")},
    ),
    "nc_stream_shuffle": (
        lambda dst, src: isa.nc_stream_shuffle(dst, src, list(range(32))),
        {"dst": out(), "src": X},
    ),
    "bn_stats": (isa.bn_stats, {"dst": out(6), "data": X}),
    "iota": (
        lambda dst: isa.iota(dst, [[1, COLUMNS]], offset=0, channel_multiplier=0),
        {"dst": out(dtype="int32")},
    ),
    "affine_select": (
        lambda dst, on_true_tile: isa.affine_select(
            dst,
            pattern=[[1, COLUMNS]],
            offset=0,
            channel_multiplier=1,
            on_true_tile=on_true_tile,
            on_false_value=0.0,
            cmp_op=nl.equal,
        ),
        {"dst": out(), "on_true_tile": X},
    ),
    "nc_n_gather": (isa.nc_n_gather, {"dst": out(), "data": X, "indices": INTEGERS}),
    "nc_transpose": (isa.nc_transpose, {"dst": out(ROWS, rows=COLUMNS), "data": X}),
    "nc_matmul": (
        isa.nc_matmul,
        {"dst": out(rows=COLUMNS, space="psum"), "stationary": X, "moving": X},
    ),
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
NEWER = {"activate2", "exponential"}  # of generation 4
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
