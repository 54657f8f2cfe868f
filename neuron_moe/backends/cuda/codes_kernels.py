"""Triton kernels that read weights: plain, fp8 or MXFP4, decoded in registers.

Axes: E experts. A matrix is [E, depth, width].
"""

import triton.language as tl
from triton import jit


@jit
def load_lines(
    stack,
    expert,
    start,
    column,
    is_column,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return BLOCK_DEPTH lines of an expert's matrix from `start` on, and, of MXFP4, those that are
    in the high halves of their bytes.

    A line is one of the matrix or, of MXFP4, of bytes. Codes of fp8 are not scaled. The stack is
    all matrices, their scales, and the strides of an expert, a line and a column.
    """
    matrix_ptr, scale_ptr, expert_stride, depth_stride, width_stride = stack
    LINES: tl.constexpr = DEPTH // 2 if FORMAT == "mxfp4" else DEPTH
    line = start + tl.arange(0, BLOCK_DEPTH)
    place = line[:, None] * depth_stride + column[None, :] * width_stride
    inside = (line < LINES)[:, None] & is_column[None, :]
    low = tl.load(matrix_ptr + expert * expert_stride + place, mask=inside, other=0)
    high = low
    if FORMAT == "mxfp4":
        group = start // 32 + tl.arange(0, BLOCK_DEPTH // 32)
        place = (expert * (DEPTH // 32) + group)[:, None] * WIDTH + column[None, :]
        inside = (group < LINES // 32)[:, None] & is_column[None, :]
        low_power = tl.load(scale_ptr + place, mask=inside, other=0)
        high_power = tl.load(scale_ptr + place + LINES // 32 * WIDTH, mask=inside, other=0)
        low, high = _decode_mxfp4(low, low_power, high_power, DTYPE)
    elif FORMAT != "plain":
        low = _decode_fp8(low, FORMAT, DTYPE)
    return low, high


@jit
def decode_lines(
    matrix_ptr,
    scale_ptr,
    out_ptr,
    expert_stride,
    depth_stride,
    width_stride,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Store the matrices of codes: out [E, DEPTH, WIDTH]."""
    LINES: tl.constexpr = DEPTH // 2 if FORMAT == "mxfp4" else DEPTH
    expert, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_DEPTH
    line = start + tl.arange(0, BLOCK_DEPTH)
    column = tl.program_id(2) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    is_column = column < WIDTH
    stack = matrix_ptr, scale_ptr, expert_stride, depth_stride, width_stride
    low, high = load_lines(
        stack,
        expert,
        start,
        column,
        is_column,
        DEPTH,
        WIDTH,
        BLOCK_DEPTH,
        FORMAT,
        out_ptr.dtype.element_ty,
    )
    place = out_ptr + (expert * DEPTH + line)[:, None] * WIDTH + column[None, :]
    inside = (line < LINES)[:, None] & is_column[None, :]
    if FORMAT == "mxfp4":
        tl.store(place + LINES * WIDTH, high, mask=inside)
    else:
        scale = tl.load(scale_ptr + expert * WIDTH + column, mask=is_column, other=0.0)
        low = (low.to(tl.float32) * scale[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(place, low, mask=inside)


def _decode_four(shift: int, bits: str, rest: str) -> tl.constexpr:
    """Return instructions that make four codes of fp8 two words of two bfloat16 each.

    Args:
        shift: of exponent and mantissa from below the sign to their place.
        bits: where they are then, in both halves of a word.
        rest: what they lack, as bfloat16 in both halves.
    """
    half = """
        and.b32 sign, {word}, 0x80008000;
        shr.b32 {word}, {word}, {shift};
        lop3.b32 {word}, {word}, {bits}, sign, 0xEA;
        fma.rn.bf16x2 {out}, {word}, rest, zero;"""
    halves = (
        half.format(word=word, out=out, shift=shift, bits=bits)
        for word, out in (("low", "$0"), ("high", "$1"))
    )
    return tl.constexpr(
        "{.reg .b32 low, high, sign, rest, zero; mov.b32 zero, 0x80008000;"
        f" mov.b32 rest, {rest}; prmt.b32 low, $2, 0, 0x1404; prmt.b32 high, $2, 0, 0x3424;"
        + "".join(halves)
        + "}"
    )


# In the bits of a bfloat16 codes are 2^-120 and 2^-112 of their values.
_E4M3 = _decode_four(4, "0x07F007F0", "0x7B807B80")
_E5M2 = _decode_four(3, "0x0FE00FE0", "0x77807780")


@jit
def _decode_fp8(codes, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Return the values of codes, without rounding; in bfloat16 of four codes at once."""
    if DTYPE == tl.bfloat16:
        values = tl.inline_asm_elementwise(
            _E4M3 if FORMAT == "float8_e4m3" else _E5M2,
            "=&r,=&r,r",
            [codes],
            tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    elif FORMAT == "float8_e4m3":
        values = codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        values = codes.to(tl.float8e5, bitcast=True).to(DTYPE)
    return values


@jit
def _decode_mxfp4(codes, low_power, high_power, DTYPE: tl.constexpr):
    """Return the values of low and of high halves of bytes, whose groups have these exponents.

    A code (e2m1) put into the bits of a wider float is 2^-14 (float16) or 2^-126 (bfloat16) of its
    value; 2^(exponent - 127) of its group makes up for it, without rounding. Four bytes at once
    give eight bfloat16.
    """
    WIDTH: tl.constexpr = codes.shape[1]
    GROUPS: tl.constexpr = low_power.shape[0]
    codes = tl.reshape(codes, (GROUPS, 32, WIDTH))
    low_power = low_power.to(tl.int32)[:, None, :]
    high_power = high_power.to(tl.int32)[:, None, :]
    if DTYPE == tl.bfloat16:
        low_scale = ((low_power + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        high_scale = ((high_power + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 left, right, sign, size, zero;
            mov.b32 zero, 0x80008000;
            prmt.b32 left, $4, 0, 0x4140;
            prmt.b32 right, $4, 0, 0x4342;
            shl.b32 sign, left, 12;
            shl.b32 size, left, 6;
            and.b32 sign, sign, 0x80008000;
            lop3.b32 size, size, 0x01C001C0, sign, 0xEA;
            fma.rn.bf16x2 $0, size, $5, zero;
            shl.b32 sign, right, 12;
            shl.b32 size, right, 6;
            and.b32 sign, sign, 0x80008000;
            lop3.b32 size, size, 0x01C001C0, sign, 0xEA;
            fma.rn.bf16x2 $1, size, $6, zero;
            shl.b32 sign, left, 8;
            shl.b32 size, left, 2;
            and.b32 sign, sign, 0x80008000;
            lop3.b32 size, size, 0x01C001C0, sign, 0xEA;
            fma.rn.bf16x2 $2, size, $7, zero;
            shl.b32 sign, right, 8;
            shl.b32 size, right, 2;
            and.b32 sign, sign, 0x80008000;
            lop3.b32 size, size, 0x01C001C0, sign, 0xEA;
            fma.rn.bf16x2 $3, size, $8, zero;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [codes, low_scale, high_scale],
            (tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        codes = codes.to(tl.uint16)
        low = (((codes << 12) & 0x8000) | ((codes << 9) & 0x0E00)).to(tl.float16, bitcast=True)
        high = (((codes << 8) & 0x8000) | ((codes << 5) & 0x0E00)).to(tl.float16, bitcast=True)
        low_scale = ((low_power + 14) << 23).to(tl.float32, bitcast=True)
        high_scale = ((high_power + 14) << 23).to(tl.float32, bitcast=True)
        low = (low.to(tl.float32) * low_scale).to(DTYPE)
        high = (high.to(tl.float32) * high_scale).to(DTYPE)
    return tl.reshape(low, (GROUPS * 32, WIDTH)), tl.reshape(high, (GROUPS * 32, WIDTH))
