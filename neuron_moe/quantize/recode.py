"""MXFP4 re-coded as fp8 without loss, for tensor engines that read fp8 and not MXFP4.

An MXFP4 value is 2^s * {0, 0.5, 1, 1.5, 2, 3, 4, 6}: one mantissa bit over four binades, times the
power of two of its group. fp8 has more mantissa and, e5m2 above all, more binades, so the group's
power of two folds into the fp8 exponent relative to one power of two kept as the scale of a whole
channel or expert. This is exact as long as the exponents of the groups within that scope stay close
enough:

    format               widest spread, normal numbers only    with subnormal numbers
    e5m2                 26                                    28
    e4m3, OCP range      11                                    14
    e4m3, Neuron range   10                                    13

Groups of zeros fit anywhere. Where the spread is wider, bf16 (`decode_mxfp4`) is the way out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from neuron_moe.errors import check_choice
from neuron_moe.quantize.fp8 import E5M2, Fp8Format, QuantizedWeight
from neuron_moe.quantize.mxfp4 import (
    E8M0_BIAS,
    E8M0_NAN,
    FP4_MAX_EXPONENT,
    check_mxfp4,
    decode_mxfp4,
)

_FP4_MIN_EXPONENT = -1  # 0.5, the smallest magnitude but zero
_BF16_MANTISSA_BITS = 7
_MIN_SCALE_EXPONENT = -126  # scales stay normal float32 numbers
_SCOPES = ("channel", "expert")
_CHUNK_VALUES = 1 << 21


@dataclass(frozen=True, slots=True)
class ExponentSpread:
    """How far the group exponents of a weight are apart, and whether an fp8 format spans them.

    Args:
        fmt: the fp8 format requested.
        limit: the widest spread the format holds exactly.
        widest: the widest spread found in a scope.
        num_scopes: channels or experts in the weight.
        num_too_wide: how many of them exceed the limit.
        first_too_wide: index of the first of them, or None.
    """

    fmt: Fp8Format
    limit: int
    widest: int
    num_scopes: int
    num_too_wide: int
    first_too_wide: tuple[int, ...] | None

    @property
    def is_lossless(self) -> bool:
        """Whether every scope can be re-coded without loss."""
        return self.num_too_wide == 0


def spread_limit(fmt: Fp8Format, *, allow_subnormal: bool = False) -> int:
    """Return the widest spread of MXFP4 group exponents that `fmt` holds exactly.

    Example:
        >>> from neuron_moe.quantize import E4M3_NEURON, E5M2
        >>> spread_limit(E5M2), spread_limit(E5M2, allow_subnormal=True), spread_limit(E4M3_NEURON)
        (26, 28, 10)
    """
    lowest, highest = _exponent_window(fmt, allow_subnormal)
    return highest - lowest


def mxfp4_exponent_spread(
    blocks: Tensor,
    scales: Tensor,
    fmt: Fp8Format = E5M2,
    scope: str = "channel",
    *,
    allow_subnormal: bool = False,
) -> ExponentSpread:
    """Measure whether an MXFP4 weight can be re-coded in `fmt` without loss.

    Args:
        blocks: [..., R, G, 16] uint8, rows R being output channels.
        scales: [..., R, G] uint8.
        fmt: the fp8 format.
        scope: "channel", one scale for each row; "expert", one for each matrix [R, 32 G].
        allow_subnormal: also use subnormal fp8 numbers; how Trainium's tensor engine treats them is
            undocumented.

    Returns:
        The spread found and the limit.

    Raises:
        TypeError: if blocks or scales are not uint8.
        ValueError: for shapes that do not belong together, an unknown scope, or a scale that is NaN
            (255).
    """
    lowest_R, highest_R = _scope_exponents(blocks, scales, scope)
    spread_R = (highest_R - lowest_R).clamp(min=0)
    limit = spread_limit(fmt, allow_subnormal=allow_subnormal)
    too_wide = (spread_R > limit).nonzero()
    return ExponentSpread(
        fmt=fmt,
        limit=limit,
        widest=int(spread_R.max()) if spread_R.numel() else 0,
        num_scopes=spread_R.numel(),
        num_too_wide=len(too_wide),
        first_too_wide=tuple(too_wide[0].tolist()) if len(too_wide) else None,
    )


def recode_mxfp4_to_fp8(
    blocks: Tensor,
    scales: Tensor,
    fmt: Fp8Format = E5M2,
    scope: str = "channel",
    *,
    allow_subnormal: bool = False,
) -> QuantizedWeight:
    """Re-code an MXFP4 weight as fp8 with power-of-two scales; decoded values stay bit for bit.

    Args:
        blocks: [..., R, G, 16] uint8, rows R being output channels.
        scales: [..., R, G] uint8.
        fmt: the fp8 format; e5m2 is the safe choice.
        scope: "channel" or "expert", what shares a scale.
        allow_subnormal: also use subnormal fp8 numbers.

    Returns:
        codes [..., R, 32 G] and scale [..., R, 1] or [..., 1, 1].

    Raises:
        TypeError: if blocks or scales are not uint8.
        ValueError: if a scope spreads over more exponents than the format holds (use `decode_mxfp4`
            for that weight), or for shapes, scope or scales that are wrong.
    """
    spread = mxfp4_exponent_spread(blocks, scales, fmt, scope, allow_subnormal=allow_subnormal)
    if not spread.is_lossless:
        raise ValueError(
            f"scales {list(scales.shape)}: group exponents of {scope} {spread.first_too_wide} "
            f"spread over more than {spread.limit} (widest {spread.widest}; {spread.num_too_wide} "
            f"of {spread.num_scopes} {scope}s too wide): {fmt.name} cannot hold them exactly. "
            "Decode this weight to bf16 with decode_mxfp4()."
        )
    lowest_R, highest_R = _scope_exponents(blocks, scales, scope)
    lowest_allowed, _ = _exponent_window(fmt, allow_subnormal)
    # The largest group keeps its FP4 values, unless that would push the smallest one out of the
    # format.
    base_R = torch.minimum(highest_R, lowest_R - lowest_allowed).clamp(min=_MIN_SCALE_EXPONENT)
    base_R = torch.where(highest_R < lowest_R, torch.zeros_like(base_R), base_R)

    num_groups = scales.shape[-1]
    codes = torch.empty(*scales.shape[:-1], num_groups * 32, dtype=fmt.dtype, device=blocks.device)
    rows_of_base = base_R.expand(scales.shape[:-1]).reshape(-1, 1)
    blocks_RG16 = blocks.reshape(-1, num_groups, blocks.shape[-1])
    scales_RG, codes_RC = scales.reshape(-1, num_groups), codes.view(-1, num_groups * 32)
    rows_of_chunk = max(1, _CHUNK_VALUES // max(1, num_groups * 32))
    for start in range(0, len(scales_RG), rows_of_chunk):
        rows = slice(start, start + rows_of_chunk)
        relative = scales_RG[rows].int() - rows_of_base[rows]
        # Groups of zeros may carry any exponent, also one outside the window: their value does not
        # depend on it.
        relative = relative.clamp(0, E8M0_NAN - 1).to(torch.uint8)
        codes_RC[rows] = decode_mxfp4(blocks_RG16[rows], relative, torch.float32).to(fmt.dtype)
    scale = torch.ldexp(torch.ones(base_R.shape, device=blocks.device), base_R).unsqueeze(-1)
    return QuantizedWeight(codes, scale)


def recode_bf16_to_fp8(weight: Tensor, fmt: Fp8Format = E5M2) -> QuantizedWeight:
    """Re-code bfloat16 weights as fp8 with power-of-two scales, if none of their bits is lost.

    Weights that were decoded from MXFP4 pass, whatever was transposed, cut or interleaved since. A
    scale is shared by the whole matrix where its magnitudes are close enough, else by each column.

    Args:
        weight: [E, in, out] bfloat16.
        fmt: the fp8 format; only its normal numbers are used.

    Returns:
        codes [E, in, out] and scale [E, 1, 1] or [E, 1, out].

    Raises:
        TypeError: if the weight is not bfloat16.
        ValueError: if a weight does not fit; says which and why. Keep bfloat16 then.

    Example:
        >>> recode_bf16_to_fp8(torch.tensor([[[0.75], [-96.0]]], dtype=torch.bfloat16)).scale
        tensor([[[16.]]])
    """
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"weight.dtype={weight.dtype}: must be bfloat16. Convert it first.")
    return _recode_by_matrix(weight, fmt) or _recode_by_exponents(weight, fmt)


def _recode_by_matrix(weight: Tensor, fmt: Fp8Format) -> QuantizedWeight | None:
    """Try one scale for each matrix; None if bits are lost.

    Several times faster than looking at exponents, and what checkpoints pass.
    """
    codes = torch.empty(weight.shape, dtype=fmt.dtype, device=weight.device)
    scale_E11 = torch.ones(len(weight), 1, 1, device=weight.device)
    for matrix, place, scale in zip(weight, codes, scale_E11, strict=True):
        largest = torch.stack(torch.aminmax(matrix)).abs().max().float()
        if not bool(torch.isfinite(largest)):
            return None
        if bool(largest == 0):
            place.zero_()
            continue
        exponent = int(torch.frexp(largest).exponent) - 1
        # The largest magnitude gets the exponent of FP4's, or for small ones that of the format.
        for highest in (FP4_MAX_EXPONENT, fmt.max_exponent):
            factor = 2.0 ** max(exponent - highest, _MIN_SCALE_EXPONENT)
            place.copy_(matrix * (1.0 / factor))
            if _is_exact(place, matrix, factor, fmt):
                scale.fill_(factor)
                break
        else:
            return None
    return QuantizedWeight(codes, scale_E11)


def _is_exact(codes: Tensor, matrix: Tensor, factor: float, fmt: Fp8Format) -> bool:
    """Say whether codes times a factor are a matrix, by normal numbers alone."""
    magnitude = codes.view(torch.uint8) & 0x7F
    is_subnormal = magnitude - 1 < (1 << fmt.mantissa_bits) - 1  # 0 wraps around
    return not bool(is_subnormal.any()) and torch.equal(codes.to(matrix.dtype) * factor, matrix)


def _recode_by_exponents(weight: Tensor, fmt: Fp8Format) -> QuantizedWeight:
    """Find the scales of columns that fit; say what does not."""
    lowest_E1C, highest_E1C = _value_exponents(weight, fmt)
    window = fmt.max_exponent - fmt.min_exponent
    too_wide = (highest_E1C - lowest_E1C > window).nonzero()
    if len(too_wide):
        expert, _, column = too_wide[0].tolist()
        spread = int((highest_E1C - lowest_E1C)[expert, 0, column])
        raise ValueError(
            f"weight {list(weight.shape)}: magnitudes of expert {expert}, column {column}"
            f" spread over {spread + 1} powers of two ({len(too_wide)} columns too wide):"
            f" {fmt.name} holds {window + 1}. Keep bfloat16."
        )
    # The largest magnitude gets the exponent of FP4's, unless the smallest would leave the format.
    base_E1C = torch.minimum(highest_E1C - FP4_MAX_EXPONENT, lowest_E1C - fmt.min_exponent)
    base_E1C = torch.where(highest_E1C < lowest_E1C, 0, base_E1C).clamp(min=_MIN_SCALE_EXPONENT)
    codes = torch.empty(weight.shape, dtype=fmt.dtype, device=weight.device)
    for expert, (matrix, base, place) in enumerate(zip(weight, base_E1C, codes, strict=True)):
        scaled = torch.ldexp(matrix.float(), -base)
        place.copy_(scaled.to(fmt.dtype))
        # The largest exponent may lack the largest mantissas, as that of e4m3 in the OCP range.
        _refuse_lost(weight, expert, place.float() != scaled, fmt)
    scale = torch.ldexp(torch.ones(base_E1C.shape, device=weight.device), base_E1C)
    return QuantizedWeight(codes, scale)


def _refuse_lost(weight: Tensor, expert: int, is_lost: Tensor, fmt: Fp8Format) -> None:
    """Raise ValueError if a weight of an expert loses bits."""
    if not bool(is_lost.any()):
        return
    row, column = is_lost.nonzero()[0].tolist()
    raise ValueError(
        f"weight {list(weight.shape)}: {float(weight[expert, row, column])!r} at"
        f" [{expert}, {row}, {column}] has no exact {fmt.name} form"
        f" ({int(is_lost.sum())} of {is_lost.numel()} in that matrix). Keep bfloat16."
    )


def _value_exponents(weight: Tensor, fmt: Fp8Format) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest exponent of each column, zeros left out, [E, 1, C] int32.

    Raises:
        ValueError: a weight has more mantissa bits than `fmt`, or is not a normal number.
    """
    surplus = (1 << (_BF16_MANTISSA_BITS - fmt.mantissa_bits)) - 1
    lowest, highest = [], []
    for expert, matrix in enumerate(weight):
        bits = matrix.contiguous().view(torch.int16)
        field = (bits >> _BF16_MANTISSA_BITS) & 0xFF
        is_zero = (bits & 0x7FFF) == 0
        is_odd = ((bits & surplus) != 0) | (field == 0xFF) | ((field == 0) & ~is_zero)
        _refuse_lost(weight, expert, is_odd, fmt)
        lowest.append(torch.where(is_zero, 256, field).amin(0, keepdim=True))
        highest.append(torch.where(is_zero, -256, field).amax(0, keepdim=True))
    return torch.stack(lowest).int() - E8M0_BIAS, torch.stack(highest).int() - E8M0_BIAS


def _exponent_window(fmt: Fp8Format, allow_subnormal: bool) -> tuple[int, int]:
    """Return the lowest and highest group exponent whose eight magnitudes are exact in `fmt`."""
    floor = fmt.min_exponent - fmt.mantissa_bits if allow_subnormal else fmt.min_exponent
    # 0.5 must not fall below the floor; 6 = 1.5 * 2^2 needs its mantissa bit within the largest
    # number.
    highest = fmt.max_exponent - FP4_MAX_EXPONENT
    return floor - _FP4_MIN_EXPONENT, highest


def _scope_exponents(blocks: Tensor, scales: Tensor, scope: str) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest group exponent of each scope, groups of zeros left out.

    A scope of zeros only has a smallest exponent above its largest one.
    """
    check_mxfp4(blocks, scales)
    check_choice("scope", scope, _SCOPES)
    if scales.ndim < 2:
        raise ValueError(f"scales {list(scales.shape)}: must be [..., rows, groups].")
    if bool((scales == E8M0_NAN).any()):
        raise ValueError(
            f"scales {list(scales.shape)} hold {E8M0_NAN}, which is NaN: weights must be finite. "
            "Repair the checkpoint."
        )
    has_value = torch.empty(scales.shape, dtype=torch.bool, device=scales.device)
    flat_has_value, flat_blocks = has_value.view(-1), blocks.reshape(-1, blocks.shape[-1])
    groups_of_chunk = _CHUNK_VALUES // 32
    for start in range(0, len(flat_blocks), groups_of_chunk):
        chunk = slice(start, start + groups_of_chunk)
        magnitudes = flat_blocks[chunk] & 0x77  # without the two sign bits
        flat_has_value[chunk] = (magnitudes != 0).any(dim=-1)
    axes = (-1,) if scope == "channel" else (-2, -1)
    exponents = scales.to(torch.int16) - E8M0_BIAS
    lowest = torch.where(has_value, exponents, 256).amin(axes)
    highest = torch.where(has_value, exponents, -256).amax(axes)
    if scope == "expert":
        lowest, highest = lowest.unsqueeze(-1), highest.unsqueeze(-1)
    return lowest, highest
