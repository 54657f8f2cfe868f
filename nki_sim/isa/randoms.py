"""Random numbers of the Vector and GpSimd engines.

The guide names the generator (XORWOW; Marsaglia, "Xorshift RNGs", 2003) and the size of its state
per lane: 6 words on GpSimd, 24 on Vector. How the words are used is not documented. Here the 24
words are four generators that serve elements 0, 1, 2, 3, 4.. of a row in turn, so sequences are
repeatable and well distributed but not those of the hardware. Before the first seed every lane has
a fixed state. `dropout` is not simulated.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from nki_sim import dtypes
from nki_sim import trace as tr
from nki_sim.constants import engine as Engine
from nki_sim.constants import nc_version
from nki_sim.dtypes import Array
from nki_sim.errors import IllegalOperand
from nki_sim.isa._arithmetic import f32_of, tiles_among
from nki_sim.isa._checks import (
    ENGINE_IDS,
    check_dtype,
    check_engine,
    check_generation,
    check_gpsimd_memory,
    check_memory,
    check_on_chip,
    compute_facts,
    scalar_operand,
)
from nki_sim.isa._instruction import instruction
from nki_sim.machine import Core, NkiInstruction, NkiTensor

_WORDS: Final = 6  # five words of shift register and one counter
_GENERATORS: Final = {Engine.vector: 4, Engine.gpsimd: 1}
_LANES: Final = 128
_COUNTER_STEP: Final = np.uint32(362_437)
_RAND2_TYPES: Final = frozenset(
    {
        dtypes.float8_e4m3,
        dtypes.float8_e5m2,
        dtypes.float16,
        dtypes.bfloat16,
        dtypes.float32,
        dtypes.tfloat32,
        dtypes.int8,
        dtypes.int16,
        dtypes.int32,
        dtypes.uint8,
        dtypes.uint16,
        dtypes.uint32,
    }
)


def _key(engine: Engine) -> str:
    return f"random_{engine.name}"


def _expand(seeds: Array, words: int) -> Array:
    """Spread 32-bit seeds [lanes] to state words [lanes, words] (SplitMix64 steps)."""
    z: Array = seeds.astype(np.uint64)[:, None] * np.uint64(words + 1)
    z = z + np.arange(1, words + 1, dtype=np.uint64)
    z = z * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


def _state(core: Core, engine: Engine) -> Array:
    """State words [128, words] of an engine; created with a fixed seed."""
    key = _key(engine)
    if key not in core.accumulators:
        lanes = np.arange(_LANES, dtype=np.uint32)
        core.accumulators[key] = _expand(lanes, _WORDS * _GENERATORS[engine])
    state: Array = core.accumulators[key]
    return state


def _lanes(core: Core, engine: Engine, tensor: NkiTensor) -> Array:
    """State words of the partitions of a tensor."""
    start = tensor.geometry.start_partition
    return _state(core, engine)[start : start + tensor.geometry.partitions]


def _draw(core: Core, engine: Engine, dst: NkiTensor) -> Array:
    """Draw uint32 numbers [partitions, elements] for a tile and advance the state of its lanes."""
    generators = _GENERATORS[engine]
    partitions, elements = dst.geometry.partitions, dst.geometry.elements
    lanes = _lanes(core, engine, dst)
    x, y, z, w, v, d = lanes.reshape(partitions, generators, _WORDS).transpose(2, 0, 1).copy()
    steps = -(-elements // generators)
    drawn = np.empty((steps, partitions, generators), np.uint32)
    for step in range(steps):
        t = x ^ (x >> np.uint32(2))
        x, y, z, w = y, z, w, v
        v = v ^ (v << np.uint32(4)) ^ t ^ (t << np.uint32(1))
        d = d + _COUNTER_STEP
        drawn[step] = d + v
    lanes[...] = np.stack((x, y, z, w, v, d)).transpose(1, 2, 0).reshape(partitions, -1)
    return drawn.transpose(1, 0, 2).reshape(partitions, -1)[:, :elements]


@instruction
def rng(
    core: Core, dst: NkiTensor, engine: Any = Engine.vector, name: str | None = None
) -> NkiInstruction:
    """Write random bits, the low ones of 32 per element (nki.isa.rng, NKI 0.6)."""
    # Constraints.
    check_on_chip(("dst", dst))
    if not dst.dtype.is_integer:
        raise IllegalOperand("dst", "an integer type", str(dst.dtype))
    allowed: tuple[Engine, ...] = (Engine.vector, Engine.gpsimd)
    if core.target.version < nc_version.gen3:
        allowed = (Engine.vector,)
    chosen = check_engine(core, engine, allowed, Engine.vector)
    if chosen is Engine.gpsimd:
        check_gpsimd_memory(("dst", dst))

    # Cost.
    facts = compute_facts(dst, (), "rng")

    # Meaning.
    def meaning() -> None:
        words = _draw(core, chosen, dst)
        array = dst.array()
        array[...] = words.astype(f"u{array.dtype.itemsize}").view(array.dtype).reshape(array.shape)

    return core.issue("rng", ENGINE_IDS[chosen], facts, (dst,), (), meaning, name)


@instruction
def rand2(
    core: Core, dst: NkiTensor, min: Any, max: Any, name: str | None = None
) -> NkiInstruction:
    """Write uniform numbers between min and max, float32 inside (nki.isa.rand2, NKI 0.6; gen4)."""
    # Constraints.
    check_generation(core, nc_version.gen4, "rand2")
    check_on_chip(("dst", dst))
    if dst.dtype not in _RAND2_TYPES:
        raise IllegalOperand("dst", "a float or integer type", str(dst.dtype))
    bounds = [
        scalar_operand(core, operand, value, dst.geometry.partitions)
        for operand, value in (("min", min), ("max", max))
    ]
    tiles = tiles_among(*bounds)
    for tile in tiles:
        check_dtype("min, max", tile, dtypes.float32)
    if not tiles and not bounds[0] < bounds[1]:
        raise IllegalOperand("max", f"more than min={min}", repr(max))

    # Cost.
    facts = compute_facts(dst, (), "rand2")

    # Meaning.
    def meaning() -> None:
        words = _draw(core, Engine.vector, dst)
        unit = (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
        low, high = map(f32_of, bounds)
        dst.store(low + unit * (high - low))

    return core.issue("rand2", tr.VECTOR, facts, (dst,), tiles, meaning, name)


@instruction
def set_rng_seed(core: Core, src_seeds: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Seed the generators of the Vector engine from one 32-bit value (nki.isa.set_rng_seed)."""
    # Constraints.
    check_on_chip(("src_seeds", src_seeds))
    geometry = src_seeds.geometry
    if geometry.partitions != 1 or geometry.elements != 1:
        raise IllegalOperand("src_seeds", "shape [1, 1]", f"{list(src_seeds.shape)}")
    if src_seeds.dtype.itemsize != 4:
        raise IllegalOperand("src_seeds", "a 32-bit type", str(src_seeds.dtype))

    # Cost.
    facts = compute_facts(src_seeds, (), "set_rng_seed")

    # Meaning.
    def meaning() -> None:
        seed = src_seeds.flat().view(np.uint32).astype(np.uint64)[0, 0]
        seeds = seed * np.uint64(_LANES) + np.arange(_LANES, dtype=np.uint64)
        words = _WORDS * _GENERATORS[Engine.vector]
        core.accumulators[_key(Engine.vector)] = _expand(seeds, words)

    return core.issue("set_rng_seed", tr.VECTOR, facts, (), (src_seeds,), meaning, name)


def _state_engine(core: Core, engine: Any, operand: str, tensor: NkiTensor) -> Engine:
    """Check what rand_set_state and rand_get_state share; return the engine."""
    check_generation(core, nc_version.gen3, operand)
    check_on_chip((operand, tensor))
    allowed: tuple[Engine, ...] = (Engine.gpsimd,)
    if core.target.version >= nc_version.gen4:
        allowed = (Engine.gpsimd, Engine.vector)
    chosen: Engine = check_engine(core, engine, allowed, Engine.gpsimd)
    check_dtype(operand, tensor, dtypes.uint32)
    words = _WORDS * _GENERATORS[chosen]
    if tensor.geometry.elements != words:
        raise IllegalOperand(
            operand, f"{words} elements per partition on {chosen.name}", f"{list(tensor.shape)}"
        )
    return chosen


@instruction
def rand_set_state(
    core: Core, src_seeds: NkiTensor, engine: Any = Engine.gpsimd, name: str | None = None
) -> NkiInstruction:
    """Set the generator state of each lane (nki.isa.rand_set_state, NKI 0.6; gen3+)."""
    # Constraints.
    chosen = _state_engine(core, engine, "src_seeds", src_seeds)
    check_memory("src_seeds", src_seeds, (tr.SBUF,))

    # Cost.
    facts = compute_facts(src_seeds, (), "rand_set_state")

    # Meaning.
    def meaning() -> None:
        _lanes(core, chosen, src_seeds)[...] = src_seeds.flat()

    return core.issue("rand_set_state", ENGINE_IDS[chosen], facts, (), (src_seeds,), meaning, name)


@instruction
def rand_get_state(
    core: Core, dst: NkiTensor, engine: Any = Engine.gpsimd, name: str | None = None
) -> NkiInstruction:
    """Store the generator state of each lane (nki.isa.rand_get_state, NKI 0.6; gen3+)."""
    # Constraints.
    chosen = _state_engine(core, engine, "dst", dst)
    if chosen is Engine.gpsimd:
        check_gpsimd_memory(("dst", dst))

    # Cost.
    facts = compute_facts(dst, (), "rand_get_state")

    # Meaning.
    def meaning() -> None:
        dst.array()[...] = _lanes(core, chosen, dst).reshape(dst.shape)

    return core.issue("rand_get_state", ENGINE_IDS[chosen], facts, (dst,), (), meaning, name)


@instruction
def dropout(
    core: Core, dst: NkiTensor, data: NkiTensor, prob: Any, name: str | None = None
) -> NkiInstruction:
    """Not implemented: how the hardware turns random bits into a mask is not documented."""
    raise NotImplementedError(
        "nki.isa.dropout: not simulated. Use nisa.rng and nisa.select_reduce."
    )
