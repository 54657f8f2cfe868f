"""Packed mx data: four elements in one word, one power-of-two scale per 8 rows x 4 elements.

The types and their conversions are those of `nki_sim.neuron_dtypes`; here are the data.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from lab.check.vendor_cases.inputs import POOL_ELEMENTS, Draw
from nki_sim.neuron_dtypes import FORMATS as FORMATS
from nki_sim.neuron_dtypes import PACK as PACK
from nki_sim.neuron_dtypes import for_kernel as for_kernel
from nki_sim.neuron_dtypes import for_reference as for_reference
from nki_sim.neuron_dtypes import pack as pack
from nki_sim.neuron_dtypes import unpack as unpack

GROUP_ROWS = 8
PARTITIONS = 128


def draw_words(draw: Draw, shape: Sequence[int], name: str) -> np.ndarray:
    """Return packed words whose elements are uniform over the type's range."""
    form = FORMATS[name]

    def words(count: int) -> np.ndarray:
        values = (draw.rng.random(count * PACK, dtype=np.float32) * 2 - 1) * np.float32(
            form.largest
        )
        return pack(values, name)

    size = math.prod(shape)
    if size <= POOL_ELEMENTS // 64:
        return words(size).reshape(shape)
    return draw.from_pool(shape, ("words", name), lambda: words(POOL_ELEMENTS))


def draw_scales(draw: Draw, shape: Sequence[int], name: str, largest: float = 1.0) -> np.ndarray:
    """Return scale bytes that keep every element below `largest`: the biggest allowed exponent
    and ten below.
    """
    top = int(math.log2(largest / FORMATS[name].largest) + 127)

    def scales(count: int) -> np.ndarray:
        return draw.rng.integers(top - 10, top + 1, count, dtype=np.uint8)

    size = math.prod(shape)
    if size <= POOL_ELEMENTS // 64:
        return scales(size).reshape(shape)
    return draw.from_pool(shape, ("scales", top), lambda: scales(POOL_ELEMENTS))


def draw_stable_hidden(draw: Draw, tokens: int, hidden: int, largest: float = 5.0) -> np.ndarray:
    """Return [tokens, hidden] float32 that quantises to mx e4m3fn and back without loss.

    A scaling group is 8 partitions x 4 packed elements, where column c of a row sits in packed slot
    c // (hidden/4) and partition c % 128; one element of each group has the type's largest
    exponent.
    """
    name = "float8_e4m3fn_x4"
    form = FORMATS[name]
    groups = tokens * hidden // (GROUP_ROWS * PACK)
    values = (draw.rng.random((groups, GROUP_ROWS * PACK), dtype=np.float32) * 2 - 1) * np.float32(
        form.largest
    )
    place = draw.rng.integers(0, GROUP_ROWS * PACK, groups)
    sign = draw.rng.choice(np.array([-1.0, 1.0], dtype=np.float32), groups)
    values[np.arange(groups), place] = (
        sign * (1 + draw.rng.random(groups) * 0.5) * 2.0**form.exponent
    )
    rounded = values.astype(form.element).astype(np.float32)
    scales = draw_scales(draw, (groups, 1), name, largest).astype(np.float32) - 127
    stable = (rounded * np.exp2(scales)).reshape(
        tokens, hidden // 512, PARTITIONS // GROUP_ROWS, GROUP_ROWS, PACK
    )
    # [token, 512-tile, group, row in group, slot] -> [token, slot, 512-tile, group, row]
    return np.ascontiguousarray(stable.transpose(0, 4, 1, 2, 3)).reshape(tokens, hidden)


class ExpertWeights(NamedTuple):
    """Packed weights of a stack of experts, as plain words.

    Attributes:
        gate_up: [E, 128, 2, H/512, I] words.
        gate_up_scale: [E, 16, 2, H/512, I] uint8.
        down: [E, P, ceil(I/512), H] words; rows beyond I/4 are zero.
        down_scale: [E, ceil(P/8), ceil(I/512), H] uint8.
    """

    gate_up: np.ndarray
    gate_up_scale: np.ndarray
    down: np.ndarray
    down_scale: np.ndarray


def intermediate_partitions(intermediate: int) -> int:
    """Return P, the partitions that hold the packed intermediate axis."""
    return (
        math.ceil(intermediate / PACK / GROUP_ROWS) * GROUP_ROWS
        if intermediate < 512
        else PARTITIONS
    )


def draw_experts(
    draw: Draw,
    experts: int,
    hidden: int,
    intermediate: int,
    name: str,
    touched: Iterable[int] | None = None,
) -> ExpertWeights:
    """Return random packed weights; of all experts, or of the touched ones with zeros for the
    others.
    """
    word = FORMATS[name].word
    tiles, partitions, groups = (
        math.ceil(intermediate / 512),
        intermediate_partitions(intermediate),
        GROUP_ROWS,
    )
    weights = ExpertWeights(
        np.zeros((experts, PARTITIONS, 2, hidden // 512, intermediate), dtype=word),
        np.zeros((experts, PARTITIONS // groups, 2, hidden // 512, intermediate), dtype=np.uint8),
        np.zeros((experts, partitions, tiles, hidden), dtype=word),
        np.zeros((experts, math.ceil(partitions / groups), tiles, hidden), dtype=np.uint8),
    )
    for expert in range(experts) if touched is None else touched:
        weights.gate_up[expert] = draw_words(draw, weights.gate_up.shape[1:], name)
        weights.gate_up_scale[expert] = draw_scales(draw, weights.gate_up_scale.shape[1:], name)
        for tile in range(tiles):
            rows = min(PARTITIONS, intermediate // PACK - tile * PARTITIONS)
            scale_rows = min(
                PARTITIONS // groups, math.ceil(intermediate / 32) - tile * PARTITIONS // groups
            )
            weights.down[expert, :rows, tile] = draw_words(draw, (rows, hidden), name)
            weights.down_scale[expert, :scale_rows, tile] = draw_scales(
                draw, (scale_rows, hidden), name
            )
    return weights
