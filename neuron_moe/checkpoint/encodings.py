"""How weights are stored: plain, or as codes with scales beside them; what `scaled` reads.

An encoding works on a matrix, or on the matrices of some experts, and says beforehand which tensors
of which shapes come of it, so that files can be laid out before the first weight is read. Rows and
columns are as the checkpoint has them, so what an output channel is must be given: `in_axis` is -1
for matrices [out, in] and -2 for [in, out].

e4m3 stays within 240, the range of Trainium 2, which every reader of e4m3 understands. Scales that
are made here are powers of two: codes times scale is then exact in bfloat16, and encoding what was
decoded changes nothing. A `scale` that the weights came with is kept where it fits, so that codes
stay what they were, or become half of it where 240 requires that.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from neuron_moe.checkpoint.scaled import BLOCK, BLOCK_SUFFIX, CHANNEL_SUFFIX, PACKED_SUFFIX
from neuron_moe.quantize.bf16 import FLOAT_DTYPES, is_finite, round_to_bf16
from neuron_moe.quantize.fp8 import (
    E4M3_NEURON,
    E4M3_OCP,
    E5M2,
    Fp8Format,
    QuantizedWeight,
    dequantize_fp8,
    quantize_fp8,
)
from neuron_moe.quantize.mxfp4 import MXFP4_GROUP_SIZE, decode_mxfp4, encode_mxfp4

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredShape:
    """A tensor as a file holds it.

    Args:
        dtype: of its elements.
        shape: its axes.
        rows: how many rows of the matrix are stored in one row of it.
    """

    dtype: torch.dtype
    shape: Shape
    rows: int = 1


class Encoding(ABC):
    """One way to store weights."""

    name: ClassVar[str]
    covers_all: ClassVar[bool] = False
    """Whether every linear layer is stored so, and not only the experts."""

    @abstractmethod
    def shapes(self, key: str, shape: Shape, in_axis: int) -> dict[str, StoredShape]:
        """Return what is stored for a weight, by name.

        Raises:
            ValueError: the shape cannot be stored so.
        """

    @abstractmethod
    def encode(
        self, key: str, values: Tensor, in_axis: int, scale: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the tensors of a weight, in the shapes of `shapes`.

        Args:
            key: its name.
            values: [.., R, C] floats.
            in_axis: of the two last, the one that is contracted.
            scale: what multiplied the codes of each value, of its shape, where there were codes.
        """

    @abstractmethod
    def decode(self, key: str, stored: Mapping[str, Tensor], in_axis: int) -> Tensor:
        """Return what a reader sees in the tensors of a weight."""

    @abstractmethod
    def describe(self) -> dict[str, Any] | None:
        """Return the `quantization_config` of config.json; None without one."""


class Plain(Encoding):
    """Floats as they are, in bfloat16."""

    name = "bf16"

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype

    def shapes(self, key: str, shape: Shape, in_axis: int) -> dict[str, StoredShape]:
        """One tensor of the weight's shape."""
        return {key: StoredShape(self.dtype, shape)}

    def encode(
        self, key: str, values: Tensor, in_axis: int, scale: Tensor | None
    ) -> dict[str, Tensor]:
        """Round to the dtype.

        Raises:
            ValueError: a value is not finite, or too large for it.
        """
        if self.dtype == torch.bfloat16 and values.dtype in FLOAT_DTYPES:
            return {key: round_to_bf16(values)}
        rounded = values.to(self.dtype)
        if rounded.dtype in FLOAT_DTYPES and not is_finite(rounded):
            raise ValueError(
                f"{key} {list(values.shape)} holds NaN, infinity or more than {self.dtype} holds:"
                " a checkpoint must be finite. Repair the parameter."
            )
        return {key: rounded}

    def decode(self, key: str, stored: Mapping[str, Tensor], in_axis: int) -> Tensor:
        """The tensor."""
        return stored[key]

    def describe(self) -> dict[str, Any] | None:
        """Nothing."""
        return None


class Fp8Channels(Encoding):
    """fp8 codes with one scale for each output channel, `<weight>_scale`, as compressed-tensors
    names it."""

    def __init__(self, name: str, fmt: Fp8Format) -> None:
        self.name = name  # type: ignore[misc]
        self.fmt = fmt

    def shapes(self, key: str, shape: Shape, in_axis: int) -> dict[str, StoredShape]:
        """Codes of the weight's shape and scales with one element along the inputs."""
        scale = list(shape)
        scale[in_axis] = 1
        return {
            key: StoredShape(self.fmt.dtype, shape),
            key + CHANNEL_SUFFIX: StoredShape(torch.float32, tuple(scale)),
        }

    def encode(
        self, key: str, values: Tensor, in_axis: int, scale: Tensor | None
    ) -> dict[str, Tensor]:
        """Keep the scale of each channel where there is one that fits, else take a power of two."""
        kept = None if scale is None else scale.narrow(in_axis, 0, 1)
        if scale is None or kept is None or not torch.equal(scale, kept.expand_as(scale)):
            channels_last = values if in_axis == -2 else values.mT
            made = quantize_fp8(channels_last, self.fmt, power_of_two=True)
            codes, factor = (
                part if in_axis == -2 else part.mT for part in (made.codes, made.scale)
            )
            return {key: codes, key + CHANNEL_SUFFIX: factor}
        kept = torch.where(kept == 0, torch.ones_like(kept), kept)
        largest = (values / kept).abs().amax(in_axis, keepdim=True)
        factor = torch.where(largest > self.fmt.max_value, kept * 2, kept)
        codes = (values / factor).to(self.fmt.dtype)
        return {key: codes, key + CHANNEL_SUFFIX: factor}

    def decode(self, key: str, stored: Mapping[str, Tensor], in_axis: int) -> Tensor:
        """Codes times scales."""
        weight = QuantizedWeight(stored[key], stored[key + CHANNEL_SUFFIX])
        return dequantize_fp8(weight, torch.float32)

    def describe(self) -> dict[str, Any]:
        """Say it as compressed-tensors does, or as a format of ours where that has none."""
        if self.fmt is not E4M3_NEURON:
            return {"quant_method": "neuron_moe", "format": self.name}
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        return _compressed("float-quantized", {"weights": weights, "input_activations": inputs})


class Fp8Blocks(Encoding):
    """OCP e4m3 codes with one scale for 128 x 128 of them, `<weight>_scale_inv`, as DeepSeek-V3."""

    name = "fp8_blocks"
    covers_all = True

    def shapes(self, key: str, shape: Shape, in_axis: int) -> dict[str, StoredShape]:
        """Codes of the weight's shape and a grid."""
        *front, rows, columns = shape
        grid = (*front, -(-rows // BLOCK), -(-columns // BLOCK))
        return {
            key: StoredShape(torch.float8_e4m3fn, shape),
            key + BLOCK_SUFFIX: StoredShape(torch.float32, grid, 1 if front else BLOCK),
        }

    def encode(
        self, key: str, values: Tensor, in_axis: int, scale: Tensor | None
    ) -> dict[str, Tensor]:
        """Keep the scale of each block where there is one, else scale the largest code to 448."""
        if scale is not None:
            grid = scale[..., ::BLOCK, ::BLOCK]
            spread = grid.repeat_interleave(BLOCK, -2)[..., : values.shape[-2], :]
            spread = spread.repeat_interleave(BLOCK, -1)[..., : values.shape[-1]]
            codes = (values / spread).to(torch.float8_e4m3fn)
            if torch.equal(scale, spread) and is_finite(codes.float()):
                return {key: codes, key + BLOCK_SUFFIX: grid.contiguous()}
        made = quantize_fp8(values, E4M3_OCP, "blockwise_symmetric")
        return {key: made.codes, key + BLOCK_SUFFIX: made.scale}

    def decode(self, key: str, stored: Mapping[str, Tensor], in_axis: int) -> Tensor:
        """Codes times the scales of their blocks."""
        weight = QuantizedWeight(stored[key], stored[key + BLOCK_SUFFIX], (BLOCK, BLOCK))
        return dequantize_fp8(weight, torch.float32)

    def describe(self) -> dict[str, Any]:
        """Say it as DeepSeek-V3 does."""
        blocks = {"fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
        return {"quant_method": "fp8", "activation_scheme": "dynamic", **blocks}


class PackedMxfp4(Encoding):
    """MXFP4, two codes a byte in `<weight>_packed` and exponents in `<weight>_scale`, as
    compressed-tensors names it."""

    name = "mxfp4"

    def shapes(self, key: str, shape: Shape, in_axis: int) -> dict[str, StoredShape]:
        """Half a byte a code, a byte for 32 of them along the inputs."""
        if in_axis != -1 or shape[-1] % MXFP4_GROUP_SIZE:
            raise ValueError(
                f"{key} {list(shape)}: MXFP4 needs a last axis of inputs, a multiple of"
                f" {MXFP4_GROUP_SIZE}. Choose another format, or the layout of separate experts."
            )
        *front, columns = shape
        return {
            key + PACKED_SUFFIX: StoredShape(torch.uint8, (*front, columns // 2)),
            key + CHANNEL_SUFFIX: StoredShape(torch.uint8, (*front, columns // MXFP4_GROUP_SIZE)),
        }

    def encode(
        self, key: str, values: Tensor, in_axis: int, scale: Tensor | None
    ) -> dict[str, Tensor]:
        """Encode by the OCP rule."""
        blocks, scales = encode_mxfp4(values)
        return {key + PACKED_SUFFIX: blocks.flatten(-2), key + CHANNEL_SUFFIX: scales}

    def decode(self, key: str, stored: Mapping[str, Tensor], in_axis: int) -> Tensor:
        """Decode the codes."""
        scales = stored[key + CHANNEL_SUFFIX]
        blocks = stored[key + PACKED_SUFFIX].reshape(*scales.shape, MXFP4_GROUP_SIZE // 2)
        return decode_mxfp4(blocks, scales)

    def describe(self) -> dict[str, Any]:
        """Say it as compressed-tensors does."""
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "symmetric": True}
        weights |= {"group_size": MXFP4_GROUP_SIZE}
        return _compressed("mxfp4-pack-quantized", {"weights": weights})


def _compressed(stored: str, group: dict[str, Any]) -> dict[str, Any]:
    """Return the section that compressed-tensors reads; only experts are stored so."""
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": [r"re:.*experts.*_proj$", r"re:.*w[123]$"], **group}
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_expert.*"],
    }


ENCODINGS: dict[str, Encoding] = {
    encoding.name: encoding
    for encoding in (
        Plain(),
        Fp8Channels("e4m3", E4M3_NEURON),
        Fp8Channels("e5m2", E5M2),
        Fp8Blocks(),
        PackedMxfp4(),
    )
}
