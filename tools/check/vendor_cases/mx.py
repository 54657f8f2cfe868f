"""Packed mx data: four elements in one word, one power-of-two scale per 8 rows x 4 elements.

Arrays for kernels carry their type in the NumPy dtype's metadata; the vendor's references look
for "x4" in the printed dtype, which a one-field structured dtype gives.
"""

import importlib
import math
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from neuron_moe.tools.check.vendor_cases.inputs import POOL_ELEMENTS, Draw

GROUP_ROWS = 8
PACK = 4
PARTITIONS = 128


class Format(NamedTuple):
    """A packed type: its word, its element, the largest finite element and that element's
    exponent.
    """

    word: type[np.unsignedinteger[Any]]
    element: Any
    bits: int
    largest: float
    exponent: int


FORMATS = {
    "float4_e2m1fn_x4": Format(np.uint16, ml_dtypes.float4_e2m1fn, 4, 6.0, 2),
    "float8_e4m3fn_x4": Format(np.uint32, ml_dtypes.float8_e4m3fn, 8, 448.0, 8),
    "float8_e5m2_x4": Format(np.uint32, ml_dtypes.float8_e5m2, 8, 57344.0, 15),
}


def for_kernel(words: np.ndarray, name: str) -> np.ndarray:
    """Return packed words as an input tensor of type `name`."""
    return words.view(np.dtype(FORMATS[name].word, metadata={"nki": name}))


def for_reference(words: np.ndarray, name: str) -> np.ndarray:
    """Return packed words as an array whose printed dtype names the packed type."""
    return np.ascontiguousarray(words).view(np.dtype([(name, FORMATS[name].word)]))


def pack(values: np.ndarray, name: str) -> np.ndarray:
    """Round float32 [..., 4n] to the element type and pack four neighbours: [..., n] words."""
    form = FORMATS[name]
    codes = (
        values.astype(form.element)
        .view(np.uint8)
        .reshape(*values.shape[:-1], -1, PACK)
        .astype(form.word)
    )
    words: np.ndarray = codes[..., 0].copy()
    for slot in range(1, PACK):
        words |= codes[..., slot] << form.word(form.bits * slot)
    return words


def unpack(words: np.ndarray, name: str) -> np.ndarray:
    """Widen packed [..., n] words to float32 [..., 4n]."""
    form = FORMATS[name]
    raw = words.view(form.word)
    mask = form.word((1 << form.bits) - 1)
    codes = np.stack([(raw >> form.word(form.bits * slot)) & mask for slot in range(PACK)], axis=-1)
    values = codes.astype(np.uint8).view(form.element).astype(np.float32)
    widened: np.ndarray = values.reshape(*words.shape[:-1], -1)
    return widened


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


def provide_neuron_dtypes(nl: Any) -> None:
    """Answer to the vendor's module `neuron_dtypes` where it is missing; its references convert
    types with it.
    """
    if "neuron_dtypes" in sys.modules:
        return
    try:
        importlib.import_module("neuron_dtypes")
    except ImportError:
        module = types.ModuleType("neuron_dtypes")
        for name in (
            "bfloat16",
            "float16",
            "float32",
            "float8_e4m3",
            "float8_e4m3fn",
            "float8_e5m2",
            *FORMATS,
        ):
            setattr(module, name, getattr(nl, name))
        for function in (static_cast, sizeinbytes, finfo, is_float_type):
            setattr(module, function.__name__, function)
        sys.modules["neuron_dtypes"] = module


def static_cast(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Convert an array; packed types are packed, or widened to float32, along the last axis."""
    source = (
        array.dtype.names[0] if array.dtype.names else dict(array.dtype.metadata or {}).get("nki")
    )
    if source in FORMATS:
        return unpack(array, source).astype(np.dtype(dtype))
    name = str(dtype)
    if name in FORMATS:
        return for_reference(pack(np.asarray(array, dtype=np.float32), name), name)
    return array.astype(np.dtype(dtype))


def sizeinbytes(dtype: Any) -> int:
    """Return the bytes of one element."""
    return (
        FORMATS[str(dtype)].word().itemsize if str(dtype) in FORMATS else np.dtype(dtype).itemsize
    )


def is_float_type(dtype: Any) -> bool:
    """Return whether a type is a floating-point type."""
    return np.dtype(dtype).kind in "fV"


def finfo(dtype: Any) -> Any:
    """Return the limits of a floating-point type."""
    return ml_dtypes.finfo(np.dtype(dtype))  # type: ignore[no-untyped-call]
