"""Tensor views: indexing and every view method against NumPy, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nki_sim
from nki_sim import IllegalOperand, LanguageError, OutOfBounds, isa
from nki_sim.language import api as nl
from nki_sim.testing import Tile, execute

X = np.arange(64 * 6 * 8, dtype=np.float32).reshape(64, 6, 8)


def seen(view: Callable[[Any], Any], values: Any = X, space: str = "sbuf") -> Any:
    """Return what a view of a tensor shows."""
    shown: list[Any] = []

    def body(x: Any) -> None:
        shown.append(view(x).array().copy())

    execute(body, x=Tile(values, space=space))
    return shown[0]


CHIP_VIEWS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "int-on-partitions-keeps-them": (lambda t: t[5], X[5:6]),
    "int-on-a-free-axis-drops-it": (lambda t: t[:, 2], X[:, 2]),
    "ints-on-all-free-axes-leave-one": (lambda t: t[:, 2, 3], X[:, 2, 3:4]),
    "three-ints": (lambda t: t[1, 2, 3], X[1:2, 2, 3:4]),
    "negative-int": (lambda t: t[:, -1], X[:, -1]),
    "slice": (lambda t: t[32:48, 1:4, 2:8:3], X[32:48, 1:4, 2:8:3]),
    "negative-slice": (lambda t: t[-16:, :, :-2], X[-16:, :, :-2]),
    "ellipsis": (lambda t: t[..., 1:3], X[..., 1:3]),
    "ds": (lambda t: t[nl.ds(32, 8), :, nl.ds(1, 3)], X[32:40, :, 1:4]),
    "fewer-indices": (lambda t: t[0:4], X[0:4]),
    "permute": (lambda t: t.permute((0, 2, 1)), X.transpose(0, 2, 1)),
    "broadcast": (
        lambda t: t[:, 0:1].broadcast(1, 4),
        np.broadcast_to(X[:, 0:1], (64, 4, 8)),
    ),
    "expand-and-squeeze": (lambda t: t.expand_dim(1).squeeze_dim(1), X),
    "expand": (lambda t: t.expand_dim(2), X[:, :, None]),
    "expand-at-the-end": (lambda t: t.expand_dim(3), X[..., None]),
    "expand-from-the-end": (lambda t: t.expand_dim(-1), X[..., None]),
    "expand-third-from-the-end": (lambda t: t.expand_dim(-3), X[:, None]),
    "reshape-dim": (lambda t: t.reshape_dim(2, (2, -1)), X.reshape(64, 6, 2, 4)),
    "flatten-dims": (lambda t: t.flatten_dims(1, 2), X.reshape(64, 48)),
    "reshape": (lambda t: t.reshape((64, 3, 16)), X.reshape(64, 3, 16)),
    "reshape-with-ones": (lambda t: t.reshape((64, 1, 48, 1)), X.reshape(64, 1, 48, 1)),
    "rearrange": (
        lambda t: t.rearrange(("p", "a", ("b", "c")), ("p", "c", ("a", "b")), {"c": 4}),
        X.reshape(64, 6, 2, 4).transpose(0, 3, 1, 2).reshape(64, 4, 12),
    ),
    "slice-method": (lambda t: t.slice(2, 1, 8, 2), X[:, :, 1:8:2]),
    "select": (lambda t: t.select(1, 4), X[:, 4]),
    "view-wider": (lambda t: t.view(nl.uint8), X.view(np.uint8)),
    "view-same": (lambda t: t.view(nl.int32), X.view(np.int32)),
    "ap": (lambda t: t.ap([[48, 64], [8, 3], [2, 4]], offset=1), X[:, 0:3, 1::2]),
    "ap-of-a-slice-by-its-own-rows": (
        lambda t: t[:, 1, 2:8].ap([[6, 64], [2, 3]]),
        X[:, 1, 2:8:2],
    ),
    "ap-of-a-slice-from-its-own-start": (
        lambda t: t[:, 1, 2:8].ap([[6, 64], [1, 3]], offset=1),
        X[:, 1, 3:6],
    ),
    "ap-of-a-slice-from-its-own-row": (
        lambda t: t[:, 1, 2:8].ap([[6, 32], [1, 3]], offset=32 * 6 + 1),
        X[32:, 1, 3:6],
    ),
    "ap-chooses-partitions": (lambda t: t.ap([[48, 16], [1, 8]], offset=32 * 48), X[32:48, 0]),
    "ap-repeats": (
        lambda t: t.ap([[48, 64], [0, 5], [1, 8]]),
        np.broadcast_to(X[:, 0:1], (64, 5, 8)),
    ),
    "ap-dtype": (
        lambda t: t.ap([[192, 64], [1, 16]], offset=4, dtype=nl.uint8),
        X.view(np.uint8).reshape(64, -1)[:, 4:20],
    ),
    "chain": (
        lambda t: t[:, 1:5].permute((0, 2, 1)).reshape_dim(1, (2, 4))[:, 1, 2:],
        X[:, 1:5].transpose(0, 2, 1).reshape(64, 2, 4, 4)[:, 1, 2:],
    ),
}


@pytest.mark.parametrize("name", CHIP_VIEWS)
def test_a_view_on_chip_shows_what_numpy_shows(name: str) -> None:
    view, expected = CHIP_VIEWS[name]
    assert np.array_equal(seen(view), expected)
    assert seen(view).shape == expected.shape


HBM_VIEWS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "int-drops": (lambda t: t[5], X[5]),
    "ints-drop-to-one-axis": (lambda t: t[5, 2, 3], X[5, 2, 3:4]),
    "permute-moves-any-axis": (lambda t: t.permute((2, 0, 1)), X.transpose(2, 0, 1)),
    "flatten-all": (lambda t: t.flatten_dims(0, 2), X.reshape(-1)),
    "reshape-any": (lambda t: t.reshape((6, 64, 8)), X.reshape(6, 64, 8)),
    "ap-with-filler": (lambda t: t.ap([[1, 1], [48, 4], [1, 8]], offset=48), X[1:5, 0][None]),
    "broadcast-rows": (
        lambda t: t.ap([[0, 4], [1, 8]], offset=16),
        np.broadcast_to(X[0, 2], (4, 8)),
    ),
}


@pytest.mark.parametrize("name", HBM_VIEWS)
def test_a_view_in_hbm_shows_what_numpy_shows(name: str) -> None:
    view, expected = HBM_VIEWS[name]
    assert np.array_equal(seen(view, space="hbm"), expected)
    assert seen(view, space="hbm").shape == expected.shape


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "expand-past-the-end": (lambda t: t.expand_dim(4), LanguageError),
    "expand-before-the-first": (lambda t: t.expand_dim(-5), LanguageError),
    "six-axes": (lambda t: t.expand_dim(1).expand_dim(1).expand_dim(1), LanguageError),
    "permute-partitions": (lambda t: t.permute((1, 0, 2)), LanguageError),
    "permute-twice-the-same": (lambda t: t.permute((0, 1, 1)), LanguageError),
    "broadcast-partitions": (lambda t: t[0:1].broadcast(0, 4), LanguageError),
    "broadcast-six": (lambda t: t.broadcast(1, 12), LanguageError),
    "squeeze-six": (lambda t: t.squeeze_dim(1), LanguageError),
    "reshape-partitions": (lambda t: t.reshape((32, 96)), LanguageError),
    "reshape-count": (lambda t: t.reshape((64, 47)), LanguageError),
    "reshape-of-a-slice": (lambda t: t[:, :, 0:4].reshape((64, 24)), LanguageError),
    "reshape-dim-product": (lambda t: t.reshape_dim(2, (3, 3)), LanguageError),
    "flatten-of-a-slice": (lambda t: t[:, :, 0:4].flatten_dims(1, 2), LanguageError),
    "slice-method-past-the-end": (lambda t: t.slice(1, 0, 7), OutOfBounds),
    "slice-method-empty": (lambda t: t.slice(1, 3, 3), OutOfBounds),
    "select-past-the-end": (lambda t: t.select(1, 6), OutOfBounds),
    "axis-past-the-last": (lambda t: t.select(3, 0), LanguageError),
    "index-past-the-end": (lambda t: t[:, 6], OutOfBounds),
    "start-past-the-end": (lambda t: t[:, 6:8], OutOfBounds),
    "too-many-indices": (lambda t: t[0, 0, 0, 0], LanguageError),
    "two-ellipses": (lambda t: t[..., 0, ...], LanguageError),
    "list-index": (lambda t: t[[0, 1]], LanguageError),
    "array-index": (lambda t: t[:, np.array([0, 1])], LanguageError),
    "ap-of-a-dynamic-view": (
        lambda t: t[:, isa.register_alloc(1)].ap([[48, 64], [1, 8]]),
        LanguageError,
    ),
    "register-past-the-axis": (
        lambda t: isa.tensor_copy(t[0:32, 0], t[0:32, isa.register_alloc(6)]),
        OutOfBounds,
    ),
    "register-slice-longer-than-the-axis": (
        lambda t: t[:, nl.ds(isa.register_alloc(0), 7)],
        OutOfBounds,
    ),
    "register-slice-past-the-axis": (
        lambda t: isa.tensor_copy(t[0:32, 0:2], t[0:32, nl.ds(isa.register_alloc(5), 2)]),
        OutOfBounds,
    ),
    "assignment": (lambda t: t.__setitem__(0, 1.0), LanguageError),
    "loop-over-it": (list, LanguageError),
    "view-of-three-bytes": (lambda t: t.view(nl.uint8)[:, :, 0:3].view(nl.int16), LanguageError),
    "ap-partition-stride": (lambda t: t.ap([[47, 64], [1, 8]]).array(), IllegalOperand),
    "ap-two-dynamic-offsets": (
        lambda t: t.ap([[48, 64], [1, 8]], scalar_offset=t, vector_offset=t),
        LanguageError,
    ),
    "ap-scalar-offset-on-partitions": (
        lambda t: t.ap([[48, 64], [1, 8]], scalar_offset=t[0, 0, 0]),
        LanguageError,
    ),
    "vector-select-on-chip": (lambda t: t.vector_select(0, t), LanguageError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_view_is_refused(name: str) -> None:
    view, error = REFUSED[name]
    with pytest.raises(error):
        seen(view)


def test_an_offset_on_an_offset_is_refused_in_hbm() -> None:
    with pytest.raises(LanguageError, match="guides disagree"):
        seen(lambda t: t[1:2].ap([[48, 1], [1, 8]], offset=8), space="hbm")


def test_an_axis_before_the_partitions_is_refused_for_these() -> None:
    for axis in (0, -4):
        with pytest.raises(LanguageError, match="leave the partition axis alone"):
            seen(lambda t, axis=axis: t.expand_dim(axis))


def test_a_slice_that_ends_past_the_axis_is_cut_and_reported() -> None:
    """The compiler cuts it too; published kernels rely on that for a short last tile."""
    shown: list[Any] = []

    def body(x: Any) -> None:
        shown.append(x[:, 4:12].shape)

    run = execute(body, x=Tile(X)).run
    assert shown == [(64, 2, 8)]
    assert [finding.kind for finding in run.findings] == ["slice"]


def test_a_tensor_is_equal_only_to_itself() -> None:
    def body(x: Any) -> None:
        assert x == x
        assert x != None  # noqa: E711  kernels write it so
        assert x[0:4] != x[0:4]
        assert isinstance(x, nl.ndarray)

    execute(body, x=Tile(np.zeros((4, 4), np.float32)))


def test_the_attributes_of_a_view_follow_the_language() -> None:
    def body(x: Any) -> None:
        part = x[1:3, 2, 1:8:2]
        assert (part.shape, part.strides, part.offset) == ((2, 4), (48, 2), 48 + 16 + 1)
        assert (part.ndim, part.size, part.dtype, part.buffer) == (2, 8, nl.float32, nl.sbuf)
        assert part.get_pattern() == [[48, 2], [2, 4]]
        assert x.is_contiguous()
        assert x[:, 2].is_contiguous()  # the partition axis does not count on chip
        assert not part.is_contiguous()
        assert not part.is_indirect()

    execute(body, x=Tile(X))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_slice_and_reshape_of_free_axes_agrees_with_numpy(data: st.DataObject) -> None:
    a, b = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
    values = np.arange(4 * a * b, dtype=np.int32).reshape(4, a, b)
    start = data.draw(st.integers(0, b - 1))
    stop = data.draw(st.integers(start + 1, b))
    step = data.draw(st.integers(1, 3))
    row = data.draw(st.integers(0, 3))
    view = seen(lambda t: t[row:4, :, start:stop:step].permute((0, 2, 1)), values)
    assert np.array_equal(view, values[row:4, :, start:stop:step].transpose(0, 2, 1))
    assert np.array_equal(seen(lambda t: t.reshape((4, b, a)), values), values.reshape(4, b, a))


def test_a_register_indexes_a_view() -> None:
    def body(x: Any, out: Any) -> None:
        def copy(i: Any) -> None:
            isa.tensor_copy(out[:, nl.ds(i, 1)], x[:, nl.ds(i, 1)])

        nl.fori_loop(2, 5, copy)

    shape = (64, 8)
    result = execute(body, x=Tile(X[:, 0]), out=Tile(np.zeros(shape, np.float32)))
    expected = np.zeros(shape, np.float32)
    expected[:, 2:5] = X[:, 0, 2:5]
    assert np.array_equal(result["out"], expected)


INDEX = 3
AFTER_DYNAMIC = {
    "select-then-slice": (lambda t, i: t.select(1, i)[:, 2:6], X[:, INDEX, 2:6]),
    "select-then-step": (lambda t, i: t.select(1, i).slice(1, 1, 8, 3), X[:, INDEX, 1:8:3]),
    "select-then-select": (lambda t, i: t.select(2, i).select(1, 4), X[:, 4, INDEX]),
    "slice-then-select": (lambda t, i: t[:, 2:6].select(1, i), X[:, 2 + INDEX]),
    "register-then-slice": (
        lambda t, i: t[:, nl.ds(isa.register_alloc(i), 2)][:, :, 4:7],
        X[:, INDEX : INDEX + 2, 4:7],
    ),
    "pattern-then-slice": (
        lambda t, i: t.ap([[48, 64], [8, 2], [1, 8]], scalar_offset=i, indirect_dim=1)[:, 1:, 5:],
        X[:, INDEX + 1 : INDEX + 2, 5:],
    ),
}


def index_tile() -> Any:
    tile = nl.ndarray((1, 1), nl.int32)
    isa.memset(tile, INDEX)
    return tile


@pytest.mark.parametrize("place", ["sbuf", "hbm"])
@pytest.mark.parametrize("name", AFTER_DYNAMIC)
def test_views_of_a_dynamic_view_keep_its_offset(name: str, place: str) -> None:
    view, expected = AFTER_DYNAMIC[name]

    def kernel(x: Any) -> Any:
        source = x
        if place == "sbuf":
            source = nl.ndarray(x.shape, x.dtype)
            isa.dma_copy(source, x)
        chosen = view(source, index_tile())
        out = nl.ndarray(chosen.shape, x.dtype, buffer=nl.shared_hbm)
        isa.dma_copy(out, chosen)
        return out

    found = nki_sim.run(kernel, X).outputs
    assert np.array_equal(found.reshape(expected.shape), expected)


def test_views_of_chosen_rows_keep_the_rows() -> None:
    rows = np.array([[5], [2], [40], [0]], np.int32)

    def kernel(x: Any, rows: Any) -> Any:
        index = nl.ndarray((4, 1), nl.int32)
        isa.dma_copy(index, rows)
        chosen = x.vector_select(0, index)
        with pytest.raises(LanguageError, match="axis 0 whole"):
            chosen[1:3]
        with pytest.raises(LanguageError, match="axis 0 whole"):
            chosen[0]
        part = chosen.slice(2, 1, 5)[:, 3]
        out = nl.ndarray(part.shape, x.dtype, buffer=nl.shared_hbm)
        isa.dma_copy(out, part)
        return out

    found = nki_sim.run(kernel, X, rows).outputs
    assert np.array_equal(found, X[rows[:, 0], 3, 1:5])


@pytest.mark.parametrize(("rows", "is_dense"), [(4, True), (3, False)])
def test_a_whole_tensor_walked_twice_is_dense(rows: int, is_dense: bool) -> None:
    walked = []
    count = rows * 64 + (0 if is_dense else 1)
    execute(
        lambda x: walked.append(x.ap([[0, 2], [1, count]]).geometry.box),
        x=Tile(np.zeros((4, 64), np.float32), space="hbm"),
    )
    assert walked[0].dense is is_dense
