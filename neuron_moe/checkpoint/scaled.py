"""Quantised weights as they are published: codes and, beside them, the scales that multiply them.

What publishers write for a weight `X.weight` of a linear layer, [out, in]:

    codes                        scales                                    for instance
    X.weight        float8       X.weight_scale_inv [out/128, in/128]      DeepSeek-V3, MiniMax-M2
    X.weight        float8       X.weight_scale     [out, 1], [out], [1]   Llama 4 Maverick FP8
    X.weight_packed uint8        X.weight_scale     [out, in/32] uint8     compressed-tensors MXFP4
    X.weight_packed int32        X.weight_scale     [out, in/32]           Kimi-K2-Thinking, int4
    X.weight        float8       X.scale            [out/128, in/128]      DeepSeek-V4
    X.weight        int8         X.scale            [out, in/32] e8m0      DeepSeek-V4, MXFP4

Grids are rounded up. Scales are floats, or e8m0, powers of two in a byte. `weight_scale_inv`
multiplies too, whatever its name says. Experts in one tensor for all, such as
`experts.gate_up_proj`, have `experts.gate_up_proj_scale` beside them. The dtypes show which form it
is; the form of GPT-OSS has names of its own in the model's map.
Sources: deepseek-ai/DeepSeek-V3, `README_WEIGHTS.md`; vllm-project/compressed-tensors.
"""

from collections.abc import Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from neuron_moe.checkpoint.lazy import Indices, LazyTensor, Selection, hull, within
from neuron_moe.checkpoint.transforms import mxfp4
from neuron_moe.quantize.bf16 import FLOAT_DTYPES, is_finite
from neuron_moe.quantize.mxfp4 import MXFP4_GROUP_SIZE

BLOCK = 128  # rows and columns that share a scale, in every checkpoint published in blocks
BLOCK_SUFFIX, CHANNEL_SUFFIX, PACKED_SUFFIX = "_scale_inv", "_scale", "_packed"
SHAPE_SUFFIX = "_shape"
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE_DTYPES = (*FLOAT_DTYPES, torch.float8_e8m0fnu)
_PACKED_DTYPES = (torch.uint8, torch.int8)
_CODES_OF_A_GROUP = MXFP4_GROUP_SIZE // 2  # bytes
_LARGEST_SAFE_SCALE = 1e33  # times 57344, the largest code, is finite in float32 and bfloat16


class _Stored(Protocol):
    @property
    def dtype(self) -> torch.dtype:
        """Of what is in the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the same."""


T = TypeVar("T", bound=_Stored)


def pair_scales(tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Return tensors without the scales of weights among them, and those scales by weight.

    Args:
        tensors: by their names in the files.
    """
    scales: dict[str, T] = {}
    codes: dict[str, str] = {}
    for name, info in tensors.items():
        # Of matrices: files of ranks have `scale` beside all experts, in one tensor.
        is_matrix = name.endswith(".weight") and len(info.shape) == 2
        beside = [name.removesuffix("weight") + "scale"] if is_matrix else []
        if info.dtype in FP8_DTYPES:
            weight, names = name, [name + BLOCK_SUFFIX, name + CHANNEL_SUFFIX, *beside]
        elif info.dtype in (torch.uint8, torch.int32) and name.endswith(PACKED_SUFFIX):
            weight = name.removesuffix(PACKED_SUFFIX)
            names = [weight + CHANNEL_SUFFIX]
            if info.dtype == torch.int32 and weight + SHAPE_SUFFIX in tensors:
                codes[weight + SHAPE_SUFFIX] = ""  # which the scales tell, too
        elif info.dtype == torch.int8:
            weight, names = name, beside
        else:
            continue
        found = next((each for each in names if each in tensors), None)
        if found is not None:
            scales[weight] = tensors[found]
            codes |= {found: "", name: weight}
    named = {codes.get(name, name): info for name, info in tensors.items()}
    named.pop("", None)
    return named, scales


def decode(codes: LazyTensor, scales: LazyTensor) -> LazyTensor:
    """Return the values: float32 of fp8 and int4 codes, bfloat16 of MXFP4.

    Raises:
        ValueError: the two do not belong together; names both.
    """
    if codes.dtype in _PACKED_DTYPES:
        return mxfp4.apply(_in_groups(_as_bytes(codes)), _as_bytes(scales))
    codes = _unpacked(codes) if codes.dtype == torch.int32 else codes
    factors = expand_scales(codes, scales)

    def read(selection: Selection) -> Tensor:
        values = codes.read(selection).float()
        factor = factors.read(selection)
        values *= factor
        if factor.numel() and factor.abs().max() > _LARGEST_SAFE_SCALE and not is_finite(values):
            raise ValueError(
                f"{scales.name} holds scales so large that weights become infinite: weights must be"
                " finite. The file is damaged; download it again."
            )
        return values

    return LazyTensor(f"{codes.name} + {scales.name}", codes.shape, torch.float32, read)


def expand_scales(codes: LazyTensor, scales: LazyTensor) -> LazyTensor:
    """Return what multiplies each element of codes, float32 of their shape.

    Raises:
        ValueError: the two do not belong together; names both.
    """
    if scales.dtype not in _SCALE_DTYPES:
        raise ValueError(
            f"{scales.name}: dtype {scales.dtype} must be float32, bfloat16, float16 or e8m0, to"
            f" scale {codes.name}. Download the checkpoint again."
        )
    scales = _with_columns(codes, scales)
    steps = _steps(codes, scales)

    def read(selection: Selection) -> Tensor:
        wanted = selection[len(selection) - len(steps) :]
        places = [_divide(indices, step) for indices, step in zip(wanted, steps, strict=True)]
        window = tuple(hull(part) for part in places)
        factor = scales.read(window).float()
        for axis, (part, span) in enumerate(zip(places, window, strict=True)):
            if len(span) > 1:  # else it is broadcast
                index = torch.tensor(within(part, span.start), dtype=torch.long)
                factor = factor.index_select(axis, index)
        return factor.expand(tuple(map(len, selection)))

    return LazyTensor(scales.name, codes.shape, torch.float32, read)


def _with_columns(codes: LazyTensor, scales: LazyTensor) -> LazyTensor:
    """Return scales of rows, [R] of [R, C], or of experts as if they had further axes, of one."""
    missing = len(codes.shape) - len(scales.shape)
    if not scales.shape or missing < 1 or scales.shape != codes.shape[:-missing]:
        return scales

    def read(selection: Selection) -> Tensor:
        part = scales.read(selection[:-missing])
        return part.reshape(*part.shape, *(1,) * missing)

    return LazyTensor(scales.name, (*scales.shape, *(1,) * missing), scales.dtype, read)


def _steps(codes: LazyTensor, scales: LazyTensor) -> tuple[int, ...]:
    """Return how many codes of each of the last axes share a scale.

    Raises:
        ValueError: neither one scale for all or each, nor one for each block or part of a row.
    """
    offset = len(codes.shape) - len(scales.shape)
    sizes = codes.shape[max(offset, 0) :]
    if offset >= 0 and all(
        count in (1, size) for count, size in zip(scales.shape, sizes, strict=True)
    ):
        return tuple(
            1 if count == size else size for count, size in zip(scales.shape, sizes, strict=True)
        )
    grid = (*codes.shape[:-2], *(-(-size // BLOCK) for size in codes.shape[-2:]))
    if scales.shape == grid and len(grid) > 1:
        return (*(1 for _ in grid[:-2]), BLOCK, BLOCK)
    if (
        offset == 0
        and scales.shape[:-1] == codes.shape[:-1]
        and 0 < scales.shape[-1] <= codes.shape[-1]
    ):
        size, rest = divmod(codes.shape[-1], scales.shape[-1])
        if not rest:
            return (*(1 for _ in grid[:-1]), size)
    raise ValueError(
        f"{scales.name} {list(scales.shape)}: must have one value for each row or column of"
        f" {codes.name} {list(codes.shape)}, for each of equal parts of a row, or be {list(grid)},"
        f" one for each block of {BLOCK} x {BLOCK}. Check that both come from one checkpoint."
    )


def _divide(indices: Indices, step: int) -> Indices:
    """Return which scale each index takes."""
    if step == 1:
        return indices
    return tuple(index // step for index in indices)


def _unpacked(codes: LazyTensor) -> LazyTensor:
    """Return int4 codes of compressed-tensors, eight to an int32 from its low bits on, as floats.

    The codes -8 to 7 are stored as 0 to 15.
    """
    *front, words = codes.shape

    def read(selection: Selection) -> Tensor:
        *rows, columns = selection
        span = hull(columns)
        window = range(span.start // 8, -(-span.stop // 8))
        packed = codes.read((*rows, window)).unsqueeze(-1)
        values = (packed >> torch.arange(0, 32, 4, dtype=torch.int32) & 15).flatten(-2) - 8
        index = torch.tensor(within(columns, 8 * window.start), dtype=torch.long)
        return values.index_select(-1, index).float()

    return LazyTensor(codes.name, (*front, 8 * words), torch.float32, read)


def _as_bytes(stored: LazyTensor) -> LazyTensor:
    """Return codes or e8m0 scales as the bytes that they are; other dtypes stay."""
    if stored.dtype not in (torch.int8, torch.float8_e8m0fnu):
        return stored

    def read(selection: Selection) -> Tensor:
        return stored.read(selection).view(torch.uint8)

    return LazyTensor(stored.name, stored.shape, torch.uint8, read)


def _in_groups(codes: LazyTensor) -> LazyTensor:
    """Return packed codes [.., R, C / 2] as blocks [.., R, G, 16]."""
    if not codes.shape or codes.shape[-1] % _CODES_OF_A_GROUP:
        raise ValueError(
            f"{codes.name} {list(codes.shape)}: the last axis must be a multiple of"
            f" {_CODES_OF_A_GROUP} bytes, the groups of MXFP4. Download the checkpoint again."
        )

    def read(selection: Selection) -> Tensor:
        *front, groups, _ = selection
        span = hull(groups)
        columns = range(span.start * _CODES_OF_A_GROUP, span.stop * _CODES_OF_A_GROUP)
        part = codes.read((*front, columns))
        return part.reshape(*part.shape[:-1], len(span), _CODES_OF_A_GROUP)

    shape = (*codes.shape[:-1], codes.shape[-1] // _CODES_OF_A_GROUP, _CODES_OF_A_GROUP)
    return LazyTensor(codes.name, shape, codes.dtype, read)
