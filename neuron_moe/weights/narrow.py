"""Expert matrices kept as codes: fp8 with one scale per output channel, half the bytes of bfloat16,
or MXFP4 with one for 32 inputs of a channel, about a quarter.

The nki kernels multiply fp8 codes as they are and scale the products; those of the cuda backend
decode codes of both kinds in registers. The torch backend decodes an expert when it is needed, so
all compute with the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuron_moe.errors import WeightError
from neuron_moe.quantize import (
    MXFP4_GROUP_SIZE,
    QuantizedWeight,
    decode_mxfp4,
    dequantize_fp8,
    encode_mxfp4_exactly,
)

KERNEL_FORMATS = {torch.float8_e4m3fn: "float8_e4m3", torch.float8_e5m2: "float8_e5m2"}
MXFP4 = "mxfp4"
FORMATS = {**KERNEL_FORMATS, torch.uint8: MXFP4}
_LARGEST_EXPONENT = 128  # of MXFP4: the cuda kernels put 126 on top
# Magnitude bits of the largest code Trainium 2 reads as a number: 240 in e4m3, 57344 in e5m2.
_LARGEST_BITS = {torch.float8_e4m3fn: 0x77, torch.float8_e5m2: 0x7B}


@dataclass(frozen=True, eq=False)
class NarrowMatrices(Sequence[Tensor]):
    """The matrices of some experts, [in, out] each, as codes and scales.

    Attributes:
        codes_Ekn: [E, in, out] float8_e4m3fn (magnitudes up to 240) or float8_e5m2; of MXFP4
            [E, in / 2, out] uint8, line j of inputs j (low bits) and j + in / 2.
        scale: [E, 1] or [E, out] float32; of MXFP4 [E, in / 32, out] uint8 exponents, up to 128.
        dtype: of the matrices they stand for.
        is_quantized: the codes are the weights, as in a state dict; else they were made from plain
            weights without loss, and the state dict holds those.
    """

    codes_Ekn: Tensor
    scale: Tensor
    dtype: torch.dtype
    is_quantized: bool = False

    @classmethod
    def from_codes(
        cls, name: str, codes: Tensor, scale: Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> "NarrowMatrices":
        """Check quantised weights as they come from a state dict.

        Args:
            name: of the weight, for messages.
            codes: float8_e4m3fn or float8_e5m2.
            scale: float32 [1], [1, 1, out], [E, 1, 1] or [E, 1, out]: NxD's symmetric schemes.
            shape: [E, in, out] that the codes must have.
            dtype: of the matrices they stand for.

        Raises:
            WeightError: what cannot be multiplied as it is.
        """
        if tuple(codes.shape) != tuple(shape):
            raise WeightError(
                f"{name}: shape {list(codes.shape)} must be {list(shape)}. Check its order of axes,"
                " and that module and weights have the same sizes."
            )
        allowed = {(1,), (1, 1, shape[2]), (shape[0], 1, 1), (shape[0], 1, shape[2])}
        if tuple(scale.shape) not in allowed or scale.dtype != torch.float32:
            raise WeightError(
                f"{name}: scale {list(scale.shape)} {scale.dtype} must be float32 [1], [1, 1, out],"
                " [E, 1, 1] or [E, 1, out]. Decode other schemes with dequantize_fp8()."
            )
        if not are_numbers(codes):
            raise WeightError(
                f"{name}: holds codes above 240 (e4m3), infinite or NaN. Use"
                " rescale_ocp_to_neuron(), or repair the checkpoint."
            )
        columns = scale.shape[-1] if scale.ndim == 3 else 1
        scale_En = scale.expand(shape[0], 1, columns).reshape(shape[0], columns).contiguous()
        return cls(codes.contiguous(), scale_En, dtype, True)

    @classmethod
    def from_exact(cls, recoded: QuantizedWeight, dtype: torch.dtype) -> "NarrowMatrices":
        """Keep what `recode_bf16_to_fp8` made."""
        return cls(recoded.codes, recoded.scale.squeeze(1), dtype)

    @classmethod
    def from_mxfp4_values(cls, weight_Ekn: Tensor) -> "NarrowMatrices | None":
        """Keep matrices whose values MXFP4 has, up to 12, as decoded checkpoints do; else None.

        Args:
            weight_Ekn: [E, in, out]; a group is 32 inputs, `in` a multiple of 64.
        """
        codes, scales = [], []
        if weight_Ekn.shape[1] % (2 * MXFP4_GROUP_SIZE):
            return None
        for matrix_kn in weight_Ekn:
            found = encode_mxfp4_exactly(matrix_kn.t().contiguous())
            if found is None or int(found[1].max()) > _LARGEST_EXPONENT:
                return None
            pairs_n = found[0].flatten(1)
            codes_nk = torch.stack([pairs_n & 15, pairs_n >> 4], dim=2).flatten(1)
            low_nk, high_nk = codes_nk.chunk(2, dim=1)
            codes.append((low_nk | high_nk << 4).t())
            scales.append(found[1].t())
        return cls(torch.stack(codes), torch.stack(scales), weight_Ekn.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle codes as bytes, which pickle knows."""
        bits = self.codes_Ekn.view(torch.uint8)
        rest = (self.scale, self.dtype, self.is_quantized)
        return _from_bits, (bits, self.codes_Ekn.dtype, *rest)

    @property
    def shape(self) -> torch.Size:
        """[E, in, out]."""
        num_experts, rows, columns = self.codes_Ekn.shape
        return torch.Size((num_experts, 2 * rows if self.format == MXFP4 else rows, columns))

    @property
    def format(self) -> str:
        """The kernels' name of the codes' format."""
        return FORMATS[self.codes_Ekn.dtype]

    @property
    def scale_per_channel_En(self) -> Tensor:
        """[E, out] float32, of fp8."""
        return self.scale.expand(-1, self.shape[2]).contiguous()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int) -> Tensor:  # type: ignore[override]
        """Return the [in, out] matrix of one expert, decoded."""
        codes_kn, scale = self.codes_Ekn[expert], self.scale[expert]
        if self.format != MXFP4:
            return dequantize_fp8(QuantizedWeight(codes_kn, scale), self.dtype)
        codes_nk = torch.cat([codes_kn & 15, codes_kn >> 4]).t()
        blocks = (codes_nk[:, 0::2] | codes_nk[:, 1::2] << 4).view(*scale.t().shape, -1)
        decoded_nk = decode_mxfp4(blocks, scale.t().contiguous(), torch.float32)
        return decoded_nk.t().to(self.dtype)

    def to(self, device: torch.device, dtype: torch.dtype) -> "NarrowMatrices":
        """Return the same numbers on a device, standing for matrices of another dtype."""
        codes, scale = self.codes_Ekn.to(device), self.scale.to(device)
        return NarrowMatrices(codes, scale, dtype, self.is_quantized)

    def run(self, experts: slice) -> "NarrowMatrices":
        """Return a run of the experts; a view."""
        return NarrowMatrices(
            self.codes_Ekn[experts], self.scale[experts], self.dtype, self.is_quantized
        )

    def unpack(self) -> Tensor:
        """Return [E, in, out], decoded."""
        if self.format == MXFP4:
            return torch.stack([*self])
        return dequantize_fp8(QuantizedWeight(self.codes_Ekn, self.scale.unsqueeze(1)), self.dtype)

    def multiply(self, rows_nk: Tensor, expert: int) -> Tensor:
        """Return rows [n, in] times the matrix of one expert, [n, out]."""
        return rows_nk @ self[expert]


def are_numbers(codes: Tensor) -> bool:
    """Say whether Trainium 2 reads all codes, of a dtype in KERNEL_FORMATS, as torch does."""
    return int((codes.view(torch.uint8) & 0x7F).max()) <= _LARGEST_BITS[codes.dtype]


def _from_bits(bits_Ekn: Tensor, codes: torch.dtype, *rest: Any) -> NarrowMatrices:
    return NarrowMatrices(bits_Ekn.view(codes), *rest)
