"""fp8 weights with scales: e4m3 in the OCP and the Neuron range, and e5m2.

A weight w [..., R, C] is stored as codes of its shape and float32 scales, w = code * scale. The
schemes and the shapes of their scales are NxD's, for weights [E, in, out] whose output channels are
the last axis:

    per_tensor_symmetric                 [1]
    per_channel_symmetric                [1, 1, C]      one for each channel, shared by all experts
    expert_wise_per_channel_symmetric    [E, 1, C]
    blockwise_symmetric                  [E, ceil(R/128), ceil(C/128)], blocks at the far edges may
    be partial

Trainium 2 reads e4m3 with the exponent 15 reserved, so its largest number is 240; the OCP format
(e4m3fn) reaches 448. Up to 240 both have the same bit patterns, hence one torch dtype serves both.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from neuron_moe.errors import check_choice
from neuron_moe.quantize.bf16 import FLOAT_DTYPES, check_float_weight, is_finite


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """An fp8 number format.

    Args:
        name: what messages call it.
        dtype: the torch dtype that stores the codes.
        max_value: the largest finite magnitude that may be used.
        max_exponent: floor(log2) of the largest number.
        min_exponent: log2 of the smallest normal number.
        mantissa_bits: bits behind the leading one.
    """

    name: str
    dtype: torch.dtype
    max_value: float
    max_exponent: int
    min_exponent: int
    mantissa_bits: int

    @property
    def rounding_limit(self) -> float:
        """What rounds to more than `max_value`, from here on."""
        return self.max_value + float(2 ** (self.max_exponent - self.mantissa_bits - 1))


E4M3_OCP = Fp8Format("e4m3 (OCP, 448)", torch.float8_e4m3fn, 448.0, 8, -6, 3)
E4M3_NEURON = Fp8Format("e4m3 (Neuron, 240)", torch.float8_e4m3fn, 240.0, 7, -6, 3)
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, 57344.0, 15, -14, 2)

SCHEMES = (
    "per_tensor_symmetric",
    "per_channel_symmetric",
    "expert_wise_per_channel_symmetric",
    "blockwise_symmetric",
)
OCP_OVER_NEURON = E4M3_OCP.max_value / E4M3_NEURON.max_value  # 1.8667
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SLAB_ROWS = 512


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """An fp8 weight: codes and the scales that multiply them.

    Args:
        codes: [..., R, C] float8_e4m3fn or float8_e5m2.
        scale: float32; broadcasts against codes or, with `block_shape`, has one value for each
            block of the last two axes.
        block_shape: rows and columns of a block, or None.

    Raises:
        TypeError: if codes or scale have another dtype.
        ValueError: if the shapes do not belong together.
    """

    codes: Tensor
    scale: Tensor
    block_shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.codes.dtype not in _FP8_DTYPES:
            raise TypeError(
                f"codes.dtype={self.codes.dtype}: must be float8_e4m3fn or float8_e5m2. "
                "quantize_fp8() makes codes; raw bytes become codes with "
                ".view(torch.float8_e4m3fn)."
            )
        if self.scale.dtype != torch.float32:
            raise TypeError(
                f"scale.dtype={self.scale.dtype}: must be float32. Convert it with .float()."
            )
        shape, scale_shape = self.codes.shape, self.scale.shape
        if len(shape) < 2:
            raise ValueError(f"codes {list(shape)}: must have at least two axes, rows and columns.")
        if self.block_shape is None:
            if not _broadcasts(scale_shape, shape):
                raise ValueError(
                    f"scale {list(scale_shape)}: must broadcast against codes {list(shape)}. "
                    f"Give block_shape if it is a grid of blocks."
                )
            return
        _check_block_shape(self.block_shape)
        grid = _block_grid(shape, self.block_shape)
        if scale_shape != grid:
            raise ValueError(
                f"scale {list(scale_shape)}: must be {list(grid)}, one for each block of "
                f"{list(self.block_shape)} in codes {list(shape)}. Check the order of the axes."
            )


def quantize_fp8(
    weight: Tensor,
    fmt: Fp8Format = E4M3_NEURON,
    scheme: str = "expert_wise_per_channel_symmetric",
    *,
    block_shape: tuple[int, int] = (128, 128),
    power_of_two: bool = False,
) -> QuantizedWeight:
    """Quantise a weight to fp8, symmetric, the largest magnitude of each scope at the largest code.

    Args:
        weight: [..., R, C] float32, bfloat16 or float16; experts first, output channels last.
        fmt: E4M3_NEURON, E4M3_OCP or E5M2.
        scheme: one of the four names above; the scale of an all-zero scope is 1.
        block_shape: rows and columns of a block of "blockwise_symmetric".
        power_of_two: scales are the least powers of two, which multiply without error, whose codes
            round to no more than the largest; what was quantised so is quantised again alike.

    Returns:
        Codes of the shape of the weight and float32 scales.

    Raises:
        TypeError: if the weight is not float32, bfloat16 or float16.
        ValueError: for an unknown scheme, fewer than two axes, NaN or infinity.
    """
    check_float_weight("weight", weight)
    check_choice("scheme", scheme, SCHEMES)
    if weight.ndim < 2:
        raise ValueError(
            f"weight {list(weight.shape)}: must have at least two axes, rows and columns."
        )
    blocks = block_shape if scheme == "blockwise_symmetric" else None
    if blocks is not None:
        _check_block_shape(blocks)
    maximum = _scope_maximum(weight, scheme, block_shape)
    if not is_finite(maximum):
        raise ValueError(
            f"weight {list(weight.shape)} holds NaN or infinity: fp8 weights must be finite. "
            "Repair it before quantising."
        )
    scale = maximum / (fmt.rounding_limit if power_of_two else fmt.max_value)
    # A maximum so small that the quotient has few bits left would scale beyond the largest code:
    # keep it normal.
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    if power_of_two:
        scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent)
    scale = torch.where(maximum == 0, torch.ones_like(scale), scale)
    codes = torch.empty(weight.shape, dtype=fmt.dtype, device=weight.device)
    for values, factors, place in _slabs(weight, scale, blocks, codes):
        # A quotient a little above the largest code rounds back to it.
        place.copy_((values.float() / factors).to(fmt.dtype))
    return QuantizedWeight(codes, scale, blocks)


def dequantize_fp8(quantized: QuantizedWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Multiply codes by scales in float32 and round once to `dtype`.

    Args:
        quantized: codes [..., R, C] with their scales.
        dtype: float32, bfloat16 or float16.

    Returns:
        [..., R, C] of `dtype`.

    Raises:
        TypeError: if `dtype` is none of the three.
    """
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"dtype={dtype}: must be float32, bfloat16 or float16.")
    weight = torch.empty(quantized.codes.shape, dtype=dtype, device=quantized.codes.device)
    for values, factors, place in _slabs(
        quantized.codes, quantized.scale, quantized.block_shape, weight
    ):
        place.copy_(values.float() * factors)
    return weight


def rescale_ocp_to_neuron(
    quantized: QuantizedWeight, factor: float = OCP_OVER_NEURON
) -> QuantizedWeight:
    """Rescale OCP e4m3 codes (up to 448) into the range of Trainium 2 (up to 240).

    Codes are divided by `factor` and rounded, scales multiplied by it. The default, 448/240, is
    what NxD's scripts use and rounds almost every code; `factor=2.0` is exact for every code whose
    half is a normal number (magnitudes of 2^-5 and more, and even subnormal codes).

    Args:
        quantized: float8_e4m3fn codes with their scales.
        factor: at least 448/240.

    Returns:
        Codes within 240 and their scales.

    Raises:
        TypeError: if the codes are not e4m3.
        ValueError: if the factor is too small to reach the range, or codes are NaN.
    """
    if quantized.codes.dtype != torch.float8_e4m3fn:
        raise TypeError(
            f"codes.dtype={quantized.codes.dtype}: must be float8_e4m3fn; e5m2 has the same range "
            "on Trainium 2."
        )
    if not OCP_OVER_NEURON <= factor < float("inf"):
        raise ValueError(
            f"factor={factor}: must be at least 448/240 = {OCP_OVER_NEURON:.4f}. Use the default, "
            "or 2.0."
        )
    codes = torch.empty_like(quantized.codes)
    one = torch.ones(1, device=codes.device)
    for values, _, place in _slabs(quantized.codes, one, None, codes):
        quotient = values.float() / factor
        if bool(torch.isnan(quotient).any()):
            raise ValueError(
                f"codes {list(codes.shape)} hold NaN: weights must be finite. Repair the "
                "checkpoint."
            )
        place.copy_(quotient.to(codes.dtype))
    return QuantizedWeight(codes, quantized.scale * factor, quantized.block_shape)


def _broadcasts(scale_shape: torch.Size, shape: torch.Size) -> bool:
    """Say whether a scale broadcasts against codes without enlarging them."""
    if len(scale_shape) > len(shape):
        return False
    tail = shape[len(shape) - len(scale_shape) :]
    return all(size in (1, whole) for size, whole in zip(scale_shape, tail, strict=True))


def _check_block_shape(block_shape: tuple[int, int]) -> None:
    """Refuse a block shape that is not two positive integers."""
    if len(block_shape) != 2 or any(not isinstance(n, int) or n < 1 for n in block_shape):
        raise ValueError(
            f"block_shape={block_shape}: must be two positive integers, rows and columns. Use "
            "(128, 128)."
        )


def _block_grid(shape: torch.Size, block_shape: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales of a blockwise weight."""
    return (*shape[:-2], -(-shape[-2] // block_shape[0]), -(-shape[-1] // block_shape[1]))


def _absolute_maximum(values: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return max|values| along `dim` in float32, without a copy of the values."""
    return torch.maximum(values.amax(dim, keepdim=True), -values.amin(dim, keepdim=True)).float()


def _scope_maximum(weight: Tensor, scheme: str, block_shape: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each scope, in the shape of the scales."""
    if scheme == "per_tensor_symmetric":
        return _absolute_maximum(weight, tuple(range(weight.ndim))).view(1)
    if scheme == "per_channel_symmetric":
        return _absolute_maximum(weight, tuple(range(weight.ndim - 1)))
    if scheme == "expert_wise_per_channel_symmetric":
        return _absolute_maximum(weight, -2)
    rows, columns = block_shape
    grid_rows = []
    for start in range(0, weight.shape[-2], rows):
        column_maximum = _absolute_maximum(weight[..., start : start + rows, :], -2)
        missing = -weight.shape[-1] % columns
        padded = torch.nn.functional.pad(column_maximum, (0, missing))
        grid_rows.append(padded.view(*padded.shape[:-1], -1, columns).amax(-1))
    return torch.cat(grid_rows, dim=-2)


def _slabs(
    weight: Tensor, scale: Tensor, block_shape: tuple[int, int] | None, result: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Cut a weight in slabs of rows; yield values, scales that fit them, their place in result."""
    num_rows, num_columns = weight.shape[-2:]
    slab_rows = _SLAB_ROWS if block_shape is None else block_shape[0]
    values_ERC = weight.reshape(-1, num_rows, num_columns)
    result_ERC = result.view(-1, num_rows, num_columns)
    scale_rows = scale.shape[-2] if scale.ndim > 1 else 1
    scale_shape = (*weight.shape[:-2], scale_rows, scale.shape[-1])
    scale_ERC = scale.expand(scale_shape).reshape(-1, scale_rows, scale.shape[-1])
    for expert in range(len(values_ERC)):
        for start in range(0, num_rows, slab_rows):
            rows = slice(start, start + slab_rows)
            factors = scale_ERC[expert]
            if block_shape is not None:
                row_of_blocks = factors[start // slab_rows]
                factors = row_of_blocks.repeat_interleave(block_shape[1])[:num_columns]
            elif scale_rows > 1:
                factors = factors[rows]
            yield values_ERC[expert, rows], factors, result_ERC[expert, rows]
