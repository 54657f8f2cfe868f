"""Random numbers: repeatable, well spread, advancing; and constraints of the instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_sim import SimOptions, isa
from nki_sim.testing import Tile, execute

GEN4 = SimOptions(target="trn3")


def out(dtype: Any = "uint32", shape: tuple[int, ...] = (64, 40), **where: Any) -> Tile:
    return Tile(shape=shape, dtype=dtype, **where)


def seed(value: int) -> Tile:
    return Tile(np.full((1, 1), value, np.uint32))


def xorwow(words: list[int], count: int) -> list[int]:
    """Marsaglia's generator, one number at a time."""
    x, y, z, w, v, d = words
    numbers = []
    for _ in range(count):
        t = (x ^ (x >> 2)) & 0xFFFFFFFF
        x, y, z, w = y, z, w, v
        v = (v ^ (v << 4) ^ t ^ (t << 1)) & 0xFFFFFFFF
        d = (d + 362437) & 0xFFFFFFFF
        numbers.append((d + v) & 0xFFFFFFFF)
    return numbers


def test_gpsimd_numbers_are_xorwow_from_the_state_that_was_set() -> None:
    state = np.random.default_rng(0).integers(1, 1 << 32, (4, 6)).astype(np.uint32)

    def body(dst: Any, state: Any, after: Any) -> None:
        isa.rand_set_state(state)
        isa.rng(dst, engine=isa.engine.gpsimd)
        isa.rand_get_state(after)

    result = execute(body, dst=out(shape=(4, 40)), state=Tile(state), after=out(shape=(4, 6)))
    for lane in range(4):
        assert result["dst"][lane].tolist() == xorwow(state[lane].tolist(), 40)
    assert not (result["after"] == state).any(axis=1).all()


def test_the_vector_state_can_be_saved_and_restored() -> None:
    def body(first: Any, again: Any, state: Any) -> None:
        isa.rand_get_state(state, engine=isa.engine.vector)
        isa.rng(first, engine=isa.engine.vector)
        isa.rand_set_state(state, engine=isa.engine.vector)
        isa.rng(again, engine=isa.engine.vector)

    result = execute(body, first=out(), again=out(), state=out(shape=(64, 24)), options=GEN4)
    np.testing.assert_array_equal(result["first"], result["again"])


def test_a_seed_determines_the_sequence_and_calls_continue_it() -> None:
    def body(seed: Any, other: Any, first: Any, second: Any, again: Any, different: Any) -> None:
        isa.set_rng_seed(seed)
        isa.rng(first)
        isa.rng(second)
        isa.set_rng_seed(seed)
        isa.rng(again)
        isa.set_rng_seed(other)
        isa.rng(different)

    result = execute(
        body, seed=seed(7), other=seed(8), first=out(), second=out(), again=out(), different=out()
    )
    np.testing.assert_array_equal(result["first"], result["again"])
    for name in ("second", "different"):
        assert (result["first"] == result[name]).mean() < 0.01


def test_lanes_and_elements_are_uncorrelated_and_fill_their_range() -> None:
    result = execute(lambda dst: isa.rng(dst), dst=out(shape=(128, 512)))
    unit = result["dst"] / 2.0**32
    assert abs(unit.mean() - 0.5) < 0.005
    assert abs(unit.var() - 1 / 12) < 0.002
    assert np.abs(np.corrcoef(unit) - np.eye(128)).max() < 0.25  # 512 samples: 0.044 per sigma
    assert len(np.unique(result["dst"])) > 65_500


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
def test_narrow_types_get_the_low_bits(dtype: str) -> None:
    def body(seed: Any, wide: Any, narrow: Any) -> None:
        isa.set_rng_seed(seed)
        isa.rng(wide)
        isa.set_rng_seed(seed)
        isa.rng(narrow)

    result = execute(body, seed=seed(1), wide=out(), narrow=out(dtype))
    bits = np.dtype(dtype).itemsize * 8
    low = result["wide"].astype(np.int64) % (1 << bits)
    np.testing.assert_array_equal(result["narrow"].astype(np.int64) % (1 << bits), low)


def test_rand2_is_uniform_between_its_bounds() -> None:
    low = np.linspace(-3, 3, 64, dtype=np.float32)[:, None]
    result = execute(
        lambda dst, low: isa.rand2(dst, low, 5.0),
        dst=out("float32", (64, 512)),
        low=Tile(low),
        options=GEN4,
    )
    assert (result["dst"] >= low).all()
    assert (result["dst"] <= 5.0).all()
    unit = (result["dst"] - low) / (5.0 - low)
    assert abs(unit.mean() - 0.5) < 0.01
    assert abs(unit.var() - 1 / 12) < 0.005
