"""Findings about numbers: each is shown at its line, and its harmless twin is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_sim
from nki_sim import SimOptions, isa
from nki_sim.language import api as nl

NUMBERS = {"overflow", "inexact", "nan"}
Kernel = Callable[[Any], Any]


def save(tile: Any) -> Any:
    out = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
    isa.dma_copy(out, tile)
    return out


def load(x: Any) -> Any:
    tile = nl.ndarray(x.shape, x.dtype)
    isa.dma_copy(tile, x)
    return tile


def writing(issue: Callable[[Any, Any], Any], dtype: Any = nl.float32) -> Kernel:
    """Return a kernel that returns what an instruction writes to a tile, given that and x."""

    def kernel(x: Any) -> Any:
        tile = nl.ndarray(x.shape, dtype)
        issue(tile, x)
        return save(tile)

    return kernel


def narrowed(dtype: Any) -> Kernel:
    return writing(lambda tile, x: isa.tensor_copy(tile, load(x)), dtype)


def narrowed_by_dma(dtype: Any) -> Kernel:
    return writing(lambda tile, x: isa.dma_copy(tile, x), dtype)


def filled(dtype: Any) -> Kernel:
    return writing(lambda tile, x: isa.memset(tile, -3.4028234663852886e38), dtype)


def activated(op: Any) -> Kernel:
    return writing(lambda tile, x: isa.activation(tile, op, load(x)))


to_float = narrowed(nl.float32)
counted = writing(lambda tile, x: isa.tensor_scalar(tile, load(x), nl.multiply, 1.0), nl.int32)


def difference(x: Any) -> Any:
    """Give inf - x."""
    tile, endless = load(x), nl.full(x.shape, np.inf, nl.float32)
    isa.tensor_tensor(tile, endless, tile, nl.subtract)
    return save(tile)


def difference_of_infinities(x: Any) -> Any:
    tile, endless = load(x), nl.full(x.shape, np.inf, nl.float32)
    isa.tensor_tensor(tile, endless, tile, nl.subtract)
    isa.tensor_tensor(tile, endless, tile, nl.subtract)
    return save(tile)


def product(x: Any) -> Any:
    tile, zeros = load(x), nl.full((1, 4), np.inf, nl.float32)
    bank = nl.ndarray((x.shape[1], 4), nl.float32, buffer=nl.psum)
    isa.nc_matmul(bank, tile, zeros)
    out = nl.ndarray(bank.shape, nl.float32)
    isa.tensor_copy(out, bank)
    return save(out)


def row(*values: float, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.array([values], dtype)


FOUND: dict[str, tuple[Kernel, Any, Any, str, str]] = {
    "bfloat16": (narrowed(nl.bfloat16), row(3.4e38), row(3.38e38), "overflow", "overflow bfloat16"),
    "float16": (narrowed(nl.float16), row(7e4, 1), row(65504), "overflow", "1 of 2 values"),
    "e4m3": (narrowed(nl.float8_e4m3), row(256), row(240), "overflow", "overflow float8_e4m3"),
    "e4m3fn": (narrowed(nl.float8_e4m3fn), row(-500), row(464), "overflow", "the first -500"),
    "e5m2": (narrowed(nl.float8_e5m2), row(62e3), row(57344), "overflow", r"at \[0, 0\]"),
    "int8": (narrowed(nl.int8), row(1, 128), row(127.4), "overflow", r"int8, the first 128.* at"),
    "uint8": (narrowed(nl.uint8), row(-1), row(255), "overflow", "saturate in uint8"),
    "no-number-to-int": (narrowed(nl.int32), row(np.nan), row(0), "overflow", "saturate in int32"),
    "by-dma": (narrowed_by_dma(nl.float16), row(7e4), row(65504), "overflow", "overflow float16"),
    "integers-by-dma": (
        narrowed_by_dma(nl.float32),
        row(16777217, dtype=np.int32),
        row(16777218, dtype=np.int32),
        "inexact",
        "integers that float32 rounds",
    ),
    "infinite": (activated(nl.exp), row(100), row(80), "overflow", "become infinite in float32"),
    "integers": (
        to_float,
        row(16777217, 1, dtype=np.int32),
        row(16777216, -(1 << 31), dtype=np.int32),
        "inexact",
        "1 of 2 values are integers that float32 rounds, the first 16777217",
    ),
    "counts": (counted, row(20000002), row(2.0**30), "inexact", r"integers beyond 2\^24"),
    "nan": (activated(nl.log), row(-1), row(1), "nan", "the first NaN"),
    "nan-of-a-product": (product, row(0, 1), row(1, 1), "nan", "4 of 8 values are the first NaN"),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_number_that_is_lost_is_found_and_its_twin_is_not(name: str) -> None:
    kernel, bad, good, kind, text = FOUND[name]
    found = [each for each in nki_sim.run(kernel, bad).findings if each.kind in NUMBERS]
    assert [each.kind for each in found] == [kind]
    assert found[0].location.startswith(f"{__file__}:")
    assert re.search(text, found[0].text), found[0].text
    assert nki_sim.run(kernel, good).findings == []


def test_a_fill_that_becomes_infinite_is_found() -> None:
    (found,) = nki_sim.run(filled(nl.bfloat16), row(0)).findings
    assert (found.kind, "overflow bfloat16" in found.text) == ("overflow", True)
    assert nki_sim.run(filled(nl.float32), row(0)).findings == []


def test_a_difference_of_infinities_is_found() -> None:
    (found,) = nki_sim.run(difference_of_infinities, row(1)).findings
    assert (found.kind, found.text.startswith("1 of 1 values are the first NaN")) == ("nan", True)


def test_a_nan_from_inputs_that_are_not_finite_is_no_finding() -> None:
    assert nki_sim.run(difference, row(np.nan, np.inf)).findings == []


def test_infinities_that_came_in_are_no_overflow() -> None:
    assert nki_sim.run(narrowed(nl.bfloat16), row(np.inf, -np.inf)).findings == []


def test_an_overflow_inside_of_a_function_is_none_of_the_result() -> None:
    run = nki_sim.run(activated(nl.sigmoid), row(-100))
    assert run.findings == []
    assert run.outputs[0, 0] == 0


@pytest.mark.parametrize("options", [SimOptions(numbers="off"), SimOptions(mode="indices")])
def test_it_can_be_turned_off_and_needs_values(options: SimOptions) -> None:
    assert nki_sim.run(narrowed(nl.int8), row(300), options=options).findings == []


def test_unwritten_memory_tells_nothing_of_numbers() -> None:
    def kernel(x: Any) -> Any:
        tile, small = nl.ndarray((1, 2), nl.float32), nl.ndarray((1, 2), nl.float8_e4m3)
        isa.dma_copy(tile[:, 0:1], x)
        isa.tensor_copy(small, tile)
        return save(small[:, 0:1])

    assert {each.kind for each in nki_sim.run(kernel, row(1)).findings} == {"uninitialized"}


def test_two_cores_are_watched_alike() -> None:
    run = nki_sim.run(activated(nl.exp), row(100), lnc=2)
    assert {each.kind for each in run.findings} >= {"overflow"}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_the_message_takes_values_of_any_type(dtype: Any) -> None:
    (found,) = nki_sim.run(narrowed(nl.int8), row(300, dtype=dtype)).findings
    assert "300" in found.text
