"""Expert weights of a prefill case: bfloat16, fp8 with scales, or MXFP4 re-coded as fp8."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from lab.check.vendor_cases.case import Case, Skipped
from lab.check.vendor_cases.inputs import POOL_ELEMENTS, Draw
from neuron_moe.quantize.mxfp4 import encode_mxfp4
from neuron_moe.quantize.recode import recode_mxfp4_to_fp8
from nki_kernels.common.weight_formats import bias_terms, three_terms

BF16 = ml_dtypes.bfloat16
GROUP = 32  # values that share an exponent in the mx formats
MX_FP8 = {
    "float8_e4m3fn_x4": (ml_dtypes.float8_e4m3fn, 2.0**-11),
    "float8_e5m2_x4": (ml_dtypes.float8_e5m2, 2.0**-19),
}


@dataclasses.dataclass(slots=True, kw_only=True)
class Weights:
    """The experts, as the kernel takes them; experts nobody chose are zeros.

    Attributes:
        format: the kernel's weight format.
        gate_up: [E, H, 2I] codes, gate columns first.
        down: [E, I, H] codes.
        gate_up_scale, down_scale: [E, 2I], [E, H] float32, or None.
        gate_up_bias, down_bias: [E, 2I], [E, H] bfloat16, or None.
        touched: experts that some token chose.
    """

    format: str
    touched: Sequence[int]
    gate_up: np.ndarray
    down: np.ndarray
    gate_up_scale: np.ndarray | None = None
    down_scale: np.ndarray | None = None
    gate_up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None

    def operands(self) -> dict[str, Any]:
        """Return the kernel's optional operands."""
        found: dict[str, Any] = {}
        down_bias = self.down_bias
        if self.gate_up_scale is not None and self.down_scale is not None:
            found = {
                "gate_up_scale": self.gate_up_scale,
                "down_scale": three_terms(self.down_scale),
            }
            if down_bias is not None:
                down_bias = bias_terms(down_bias, self.down_scale)
        if self.gate_up_bias is not None and down_bias is not None:
            found["gate_up_bias"] = self.gate_up_bias.astype(np.float32)
            found["down_bias"] = down_bias
        return found

    def exact(
        self, expert: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Return gate_up [H, 2I], down [I, H] and the biases of one expert, in float64."""
        gate_up = self.gate_up[expert].astype(np.float64)
        down = self.down[expert].astype(np.float64)
        if self.gate_up_scale is not None and self.down_scale is not None:
            gate_up *= self.gate_up_scale[expert]
            down *= self.down_scale[expert]
        biases = (self.gate_up_bias, self.down_bias)
        first, second = (None if b is None else b[expert].astype(np.float64) for b in biases)
        return gate_up, down, first, second

    def rounded(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return all of it in bfloat16, for the torch backend."""
        gate_up, down = self.gate_up, self.down
        if self.gate_up_scale is not None and self.down_scale is not None:
            gate_up = self._decoded(gate_up, self.gate_up_scale)
            down = self._decoded(down, self.down_scale)
        biases = (self.gate_up_bias, self.down_bias)
        first, second = (None if b is None else _to_torch(b) for b in biases)
        return _to_torch(gate_up), _to_torch(down), first, second

    def _decoded(self, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Return codes * scale in bfloat16."""
        decoded = np.zeros(codes.shape, BF16)
        for expert in self.touched:
            decoded[expert] = (codes[expert].astype(np.float32) * scale[expert]).astype(BF16)
        return decoded


def draw_weights(
    case: Case,
    draw: Draw,
    num_experts: int,
    H: int,
    I: int,  # noqa: E741  the axis letter
    touched: Sequence[int],
) -> tuple[Weights, str]:
    """Draw the weights of a case, and say what differs from its format.

    Args:
        case: has quantize or weight_dtype, and bias.
        draw: source of random numbers.
        num_experts: E.
        H: hidden size.
        I: intermediate size.
        touched: experts that some token chose.
    """
    quantize = case.get("quantize") or "bfloat16"
    stored = case.get("weight_dtype") or quantize
    if stored in ("float8_e4m3", "float8_e5m2"):
        weights, note = _fp8_rows(draw, stored, num_experts, H, I, touched), ""
    elif stored == "float4_e2m1fn_x4":
        weights = _mxfp4(draw, num_experts, H, I, touched)
        note = "MXFP4 re-coded as float8_e5m2 without loss"
    elif stored in MX_FP8:
        weights = _plain(draw, num_experts, H, I, touched, *MX_FP8[stored])
        note = f"{stored} decoded to bfloat16 without loss"
    elif stored == "bfloat16":
        weights, note = _plain(draw, num_experts, H, I, touched), ""
    else:
        raise Skipped(f"weights of {stored!r}: not a format of blockwise_moe")
    if case.get("bias"):
        weights.gate_up_bias = draw.uniform((num_experts, 2 * I), -1.0, 1.0, BF16)
        weights.down_bias = draw.uniform((num_experts, H), -1.632, 1.4375, BF16)
    return weights, note


def _plain(
    draw: Draw,
    num_experts: int,
    H: int,
    I: int,  # noqa: E741  the axis letter
    touched: Sequence[int],
    code_dtype: Any = None,
    step: float = 1.0,
) -> Weights:
    """Return bfloat16 weights in [-0.1, 0.1), rounded to multiples of an fp8 format if asked."""
    gate_up, down = np.zeros((num_experts, H, 2 * I), BF16), np.zeros((num_experts, I, H), BF16)

    def rounded(size: int) -> np.ndarray:
        values = draw.rng.random(size, dtype=np.float32) * 0.2 - 0.1
        if code_dtype is not None:
            values = (values / step).astype(code_dtype).astype(np.float32) * step
        return values.astype(BF16)

    for expert in touched:
        for stack in (gate_up, down):
            shape = stack.shape[1:]
            if math.prod(shape) <= POOL_ELEMENTS:
                stack[expert] = rounded(math.prod(shape)).reshape(shape)
            else:  # rounding takes far longer than copying
                stack[expert] = draw.from_pool(
                    shape, ("rounded", step), lambda: rounded(POOL_ELEMENTS)
                )
    return Weights(format="bfloat16", touched=touched, gate_up=gate_up, down=down)


def _fp8_rows(
    draw: Draw,
    name: str,
    num_experts: int,
    H: int,
    I: int,  # noqa: E741  the axis letter
    touched: Sequence[int],
) -> Weights:
    """Return integer codes over the range of e4m3 with a scale for each output channel."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    gate_up, down = np.zeros((num_experts, H, 2 * I), dtype), np.zeros((num_experts, I, H), dtype)
    for expert in touched:
        for stack in (gate_up, down):
            stack[expert] = draw.integers(stack.shape[1:], -240, 240, dtype)
    return Weights(
        format=name,
        touched=touched,
        gate_up=gate_up,
        down=down,
        gate_up_scale=draw.uniform((num_experts, 2 * I), -0.1, 0.1, np.float32),
        down_scale=draw.uniform((num_experts, H), -0.1, 0.1, np.float32),
    )


def _mxfp4(
    draw: Draw,
    num_experts: int,
    H: int,
    I: int,  # noqa: E741  the axis letter
    touched: Sequence[int],
) -> Weights:
    """Return MXFP4 weights re-coded as e5m2, a power of two for each output channel."""
    dtype = np.dtype(ml_dtypes.float8_e5m2)
    gate_up, down = np.zeros((num_experts, H, 2 * I), dtype), np.zeros((num_experts, I, H), dtype)
    gate_up_scale = np.ones((num_experts, 2 * I), np.float32)
    down_scale = np.ones((num_experts, H), np.float32)
    for expert in touched:
        for stack, scale in ((gate_up, gate_up_scale), (down, down_scale)):
            rows, columns = stack.shape[1:]  # rows are summed over, columns are output channels
            padded = -(-rows // GROUP) * GROUP
            values = np.zeros((columns, padded), np.float32)
            values[:, :rows] = draw.uniform((columns, rows), -0.1, 0.1, np.float32)
            coded = recode_mxfp4_to_fp8(*encode_mxfp4(torch.from_numpy(values)))
            codes = coded.codes.view(torch.uint8).numpy().view(dtype)
            stack[expert] = codes[:, :rows].T
            scale[expert] = coded.scale.numpy().reshape(-1)
    return Weights(
        format="float8_e5m2",
        touched=touched,
        gate_up=gate_up,
        down=down,
        gate_up_scale=gate_up_scale,
        down_scale=down_scale,
    )


def _to_torch(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
