"""MXFP4: groups of 32 four-bit floats (E2M1) that share one power of two (E8M0).

The layout is that of published GPT-OSS checkpoints. Along the last axis of the weight, which is the
axis the matmul contracts, group g holds values 32 g to 32 g + 31:

    blocks [..., G, 16] uint8   two codes a byte, the even value in the low nibble
    scales [..., G]     uint8   biased exponent: the group is multiplied by 2^(scale - 127); 255
    means NaN

A code is a sign bit and a magnitude 0, 0.5, 1, 1.5, 2, 3, 4 or 6. Source: OCP Microscaling Formats
(MX) 1.0, section 5.
"""

import torch
from torch import Tensor

from neuron_moe.quantize.bf16 import check_float_weight, is_finite

MXFP4_GROUP_SIZE = 32
E8M0_BIAS = 127
E8M0_NAN = 255
FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_MAX_EXPONENT = 2  # 6 = 1.5 * 2^2
CHUNK_GROUPS = 1 << 13  # groups worked on at once: 256 K values, 1 MiB as float32

_DECODED_DTYPES = (torch.bfloat16, torch.float32)


def check_mxfp4(blocks: Tensor, scales: Tensor) -> None:
    """Refuse blocks and scales that are not one MXFP4 weight.

    Raises:
        TypeError: if either is not uint8.
        ValueError: if the shapes do not belong together.
    """
    for name, codes in (("blocks", blocks), ("scales", scales)):
        if not isinstance(codes, Tensor):
            raise TypeError(f"{name} is a {type(codes).__name__}: must be a torch.Tensor.")
        if codes.dtype != torch.uint8:
            raise TypeError(
                f"{name}.dtype={codes.dtype}: must be uint8 codes. A weight that is decoded "
                "already needs no decoding; encode_mxfp4() makes codes of it."
            )
    if blocks.ndim < 2 or blocks.shape[-1] != MXFP4_GROUP_SIZE // 2:
        raise ValueError(
            f"blocks {list(blocks.shape)}: the last axis must be the {MXFP4_GROUP_SIZE // 2} bytes "
            f"of a group of {MXFP4_GROUP_SIZE} values. Reshape [..., K/2] to [..., "
            f"K/{MXFP4_GROUP_SIZE}, {MXFP4_GROUP_SIZE // 2}]."
        )
    if blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"scales {list(scales.shape)}: must be {list(blocks.shape[:-1])}, one for each group "
            f"of blocks {list(blocks.shape)}. Check that both come from the same weight."
        )


def e8m0_table(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the 256 values of E8M0: 2^(index - 127), NaN at 255; exact in float32 and bfloat16."""
    powers = [2.0 ** (index - E8M0_BIAS) for index in range(E8M0_NAN)]
    return torch.tensor([*powers, float("nan")], dtype=torch.float32).to(dtype)


def decode_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode an MXFP4 weight; exact, except that magnitudes of 2^128 and more become infinity.

    Args:
        blocks: [..., G, 16] uint8, two codes a byte, low nibble first.
        scales: [..., G] uint8, biased exponents; 255 gives NaN.
        dtype: bfloat16 or float32; both hold every product of a code and a scale.

    Returns:
        [..., 32 G] of `dtype`, contiguous.

    Raises:
        TypeError: if blocks or scales are not uint8, or `dtype` is neither bfloat16 nor float32.
        ValueError: if the shapes do not belong together.

    Example:
        >>> blocks = torch.zeros(1, 16, dtype=torch.uint8)
        >>> blocks[0, 0] = 0xF2  # low nibble 2 is 1.0, high nibble 15 is -6.0
        >>> decode_mxfp4(blocks, torch.tensor([126], dtype=torch.uint8))[:3]
        tensor([ 0.5000, -3.0000,  0.0000], dtype=torch.bfloat16)
    """
    check_mxfp4(blocks, scales)
    if dtype not in _DECODED_DTYPES:
        raise TypeError(
            f"dtype={dtype}: must be bfloat16 or float32, which hold every MXFP4 value. Decode to "
            "float32, then convert."
        )
    values = torch.tensor([*FP4_MAGNITUDES, *(-m for m in FP4_MAGNITUDES)], dtype=dtype)
    # One table look-up yields the two values of a byte: the pair is fetched as one integer of twice
    # the width.
    pair_type = torch.int32 if dtype == torch.bfloat16 else torch.int64
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1).view(pair_type)
    pairs = pairs.flatten().to(blocks.device)
    powers = e8m0_table(dtype).to(blocks.device)

    blocks_G16, scales_G = blocks.reshape(-1, blocks.shape[-1]), scales.reshape(-1)
    decoded_G32 = torch.empty(scales_G.numel(), MXFP4_GROUP_SIZE, dtype=dtype, device=blocks.device)
    for start in range(0, scales_G.numel(), CHUNK_GROUPS):
        piece = slice(start, start + CHUNK_GROUPS)
        codes = blocks_G16[piece].reshape(-1).int()
        pair_values = pairs.index_select(0, codes).view(dtype).view(-1, MXFP4_GROUP_SIZE)
        power = powers.index_select(0, scales_G[piece].int()).unsqueeze(1)
        torch.mul(pair_values, power, out=decoded_G32[piece])
    return decoded_G32.view(*scales.shape[:-1], scales.shape[-1] * MXFP4_GROUP_SIZE)


def encode_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Encode a weight as MXFP4 by the OCP rule, codes rounded to nearest, ties to even.

    The scale of a group is 2^(floor(log2(maximum)) - 2); a scaled value above 6 saturates there.
    Encoding what `decode_mxfp4` returned gives the same values again, and encoding twice gives the
    same codes.

    Args:
        weight: [..., K] float32, bfloat16 or float16, K a multiple of 32 along the contracted axis.

    Returns:
        blocks [..., K/32, 16] uint8 and scales [..., K/32] uint8.

    Raises:
        TypeError: if the weight is not float32, bfloat16 or float16.
        ValueError: if K is not a multiple of 32, or the weight holds NaN or infinity.

    Example:
        >>> blocks, scales = encode_mxfp4(torch.tensor([0.5, -3.0] + [0.0] * 30))
        >>> hex(blocks[0, 0]), scales.tolist()
        ('0xf2', [126])
    """
    check_float_weight("weight", weight)
    if weight.ndim == 0 or weight.shape[-1] % MXFP4_GROUP_SIZE:
        raise ValueError(
            f"weight {list(weight.shape)}: the last axis must be a multiple of {MXFP4_GROUP_SIZE}, "
            "the MXFP4 group. "
            f"Pad it with zeros, or transpose so that the contracted axis comes last."
        )
    num_groups = weight.shape[-1] // MXFP4_GROUP_SIZE
    weight_G32 = weight.reshape(-1, MXFP4_GROUP_SIZE)
    blocks_G16 = torch.empty(
        len(weight_G32), MXFP4_GROUP_SIZE // 2, dtype=torch.uint8, device=weight.device
    )
    scales_G = torch.empty(len(weight_G32), dtype=torch.uint8, device=weight.device)
    for start in range(0, len(weight_G32), CHUNK_GROUPS):
        piece = slice(start, start + CHUNK_GROUPS)
        blocks_G16[piece], scales_G[piece] = _encode_groups(weight_G32[piece].float())
    shape = (*weight.shape[:-1], num_groups)
    return blocks_G16.view(*shape, MXFP4_GROUP_SIZE // 2), scales_G.view(shape)


def encode_mxfp4_exactly(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Encode a weight whose values MXFP4 has; None for any other.

    Args:
        weight: as of `encode_mxfp4`.

    Returns:
        Blocks and scales as `encode_mxfp4` gives them.
    """
    if not bool(weight.isfinite().all()):
        return None
    blocks, scales = encode_mxfp4(weight)
    decoded = decode_mxfp4(blocks, scales, torch.float32)
    return (blocks, scales) if torch.equal(decoded, weight.float()) else None


def _encode_groups(values_G32: Tensor) -> tuple[Tensor, Tensor]:
    """Encode float32 groups; return blocks [G, 16] and scales [G], both uint8."""
    maximum_G = values_G32.abs().amax(dim=1)
    if not is_finite(maximum_G):
        raise ValueError(
            "weight holds NaN or infinity: MXFP4 has neither. Repair the weight before encoding it."
        )
    exponent_G = torch.frexp(maximum_G).exponent - 1  # floor(log2), subnormal numbers included
    scales_G = (exponent_G - FP4_MAX_EXPONENT + E8M0_BIAS).clamp(min=0)
    scales_G[maximum_G == 0] = 0
    inverse_G = e8m0_table().to(values_G32.device).index_select(0, 2 * E8M0_BIAS - scales_G)
    scaled_G32 = values_G32.abs().mul_(inverse_G.unsqueeze(1))
    codes_G32 = _round_to_codes(scaled_G32)
    codes_G32 |= torch.signbit(values_G32).view(torch.uint8) << 3
    blocks_G16 = codes_G32[:, 0::2] | (codes_G32[:, 1::2] << 4)
    return blocks_G16, scales_G.to(torch.uint8)


def _round_to_codes(scaled: Tensor) -> Tensor:
    """Round float32 magnitudes to codes 0 to 7, to nearest, ties to the even code.

    Codes count steps of 0.5 up to 2, of 1 up to 4 and of 2 up to 6. Each stretch begins at an even
    code, so that rounding the part of the magnitude within it, ties to even, does what is wanted.
    """
    codes = (scaled.clamp(max=2) * 2).round_()
    codes += (scaled.clamp(2, 4) - 2).round_()
    codes += ((scaled.clamp(4, 6) - 4) / 2).round_()
    return codes.to(torch.uint8)
