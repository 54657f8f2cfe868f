"""Triton kernels that read weights: plain, fp8 or MXFP4, decoded in registers.

Axes: E experts. A matrix is [E, depth, width].
"""

# fmt: off
import triton.language as tl
from triton import jit


@jit
def load_lines(matrix_ptr, scale_ptr, expert, start, column, is_column, word, is_word,
               expert_stride, depth_stride, width_stride, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
               BLOCK_DEPTH: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Return BLOCK_DEPTH lines of an expert's matrix from `start` on, and, of MXFP4, those that lie
    in the high halves of their bytes.

    A line is one of the matrix or, of MXFP4, of bytes. Codes for bfloat16 are read as words of four
    columns. Those of fp8 are not scaled.
    """
    LINES: tl.constexpr = DEPTH // 2 if FORMAT == "mxfp4" else DEPTH
    line = start + tl.arange(0, BLOCK_DEPTH)
    is_line = line < LINES
    if FORMAT == "plain" or DTYPE != tl.bfloat16:
        place = line[:, None] * depth_stride + column[None, :] * width_stride
        inside = is_line[:, None] & is_column[None, :]
        matrix = tl.load(matrix_ptr + expert * expert_stride + place, mask=inside, other=0)
    else:
        words_ptr = matrix_ptr.to(tl.pointer_type(tl.int32))
        place = (expert * LINES + line)[:, None] * (WIDTH // 4) + word[None, :]
        matrix = tl.load(words_ptr + place, mask=is_line[:, None] & is_word[None, :], other=0)
    if FORMAT == "mxfp4":
        group = start // 32 + tl.arange(0, BLOCK_DEPTH // 32)
        is_group = group < LINES // 32
        group = expert * (DEPTH // 32) + group
        if DTYPE == tl.bfloat16:
            powers_ptr = scale_ptr.to(tl.pointer_type(tl.int32))
            place = powers_ptr + group[:, None] * (WIDTH // 4) + word[None, :]
            inside = is_group[:, None] & is_word[None, :]
            low_power = tl.load(place, mask=inside, other=0)
            high_power = tl.load(place + LINES // 32 * (WIDTH // 4), mask=inside, other=0)
            low, high = _decode_mxfp4_words(matrix, low_power, high_power)
        else:
            place = scale_ptr + group[:, None] * WIDTH + column[None, :]
            inside = is_group[:, None] & is_column[None, :]
            low_power = tl.load(place, mask=inside, other=0)
            high_power = tl.load(place + LINES // 32 * WIDTH, mask=inside, other=0)
            low, high = _decode_mxfp4(matrix, low_power, high_power, DTYPE)
    else:
        low = matrix
        if FORMAT != "plain":
            if DTYPE == tl.bfloat16:
                low = _decode_fp8_words(matrix, FORMAT)
            elif FORMAT == "float8_e4m3":
                low = matrix.to(tl.float8e4nv, bitcast=True).to(DTYPE)
            else:
                low = matrix.to(tl.float8e5, bitcast=True).to(DTYPE)
        high = low
    return low, high


@jit
def decode_lines(matrix_ptr, scale_ptr, out_ptr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
                 BLOCK_DEPTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, FORMAT: tl.constexpr):
    """Store the matrices of codes: out [E, DEPTH, WIDTH]."""
    LINES: tl.constexpr = DEPTH // 2 if FORMAT == "mxfp4" else DEPTH
    expert, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_DEPTH
    line = start + tl.arange(0, BLOCK_DEPTH)
    column = tl.program_id(2) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    word = tl.program_id(2) * (BLOCK_WIDTH // 4) + tl.arange(0, BLOCK_WIDTH // 4)
    is_column = column < WIDTH
    low, high = load_lines(matrix_ptr, scale_ptr, expert, start, column, is_column, word,
                           word < WIDTH // 4, LINES * WIDTH, WIDTH, 1, DEPTH, WIDTH, BLOCK_DEPTH,
                           FORMAT, out_ptr.dtype.element_ty)
    place = out_ptr + (expert * DEPTH + line)[:, None] * WIDTH + column[None, :]
    inside = (line < LINES)[:, None] & is_column[None, :]
    if FORMAT == "mxfp4":
        tl.store(place + LINES * WIDTH, high, mask=inside)
    else:
        scale = tl.load(scale_ptr + expert * WIDTH + column, mask=is_column, other=0.0)
        low = (low.to(tl.float32) * scale[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(place, low, mask=inside)


@jit
def _columns_of(left, right):
    """Return the bfloat16 columns [N, 4 W] of words [N, W] of two each: 0 and 1, 2 and 3."""
    HEIGHT: tl.constexpr = left.shape[0]
    WIDTH: tl.constexpr = left.shape[1]
    pairs = tl.reshape(tl.join(left, right), (HEIGHT, 2 * WIDTH))
    even = (pairs & 0xFFFF).to(tl.uint16)
    odd = ((pairs >> 16) & 0xFFFF).to(tl.uint16)
    both = tl.reshape(tl.join(even, odd), (HEIGHT, 4 * WIDTH))
    return both.to(tl.bfloat16, bitcast=True)


def _decode_four(shift: int, bits: str, rest: str) -> tl.constexpr:
    """Return instructions that put four codes of fp8 into two words of two bfloat16 each.

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
        + "".join(halves) + "}"
    )


# In the bits of a bfloat16 codes are 2^-120 and 2^-112 of their values.
_E4M3 = _decode_four(4, "0x07F007F0", "0x7B807B80")
_E5M2 = _decode_four(3, "0x0FE00FE0", "0x77807780")


@jit
def _decode_fp8_words(words, FORMAT: tl.constexpr):
    """Return the values [N, 4 W] of words of four codes, without rounding."""
    left, right = tl.inline_asm_elementwise(
        _E4M3 if FORMAT == "float8_e4m3" else _E5M2, "=&r,=&r,r", [words], (tl.int32, tl.int32),
        is_pure=True, pack=1)
    return _columns_of(left, right)


@jit
def _mxfp4_scales(powers):
    """Return 2^(exponent - 1) of words of four exponents: columns 0 and 1, 2 and 3, bfloat16."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high;
        prmt.b32 low, $2, 0, 0x4140;
        prmt.b32 high, $2, 0, 0x4342;
        add.u32 low, low, 0x007E007E;
        add.u32 high, high, 0x007E007E;
        shl.b32 $0, low, 7;
        shl.b32 $1, high, 7;
        }
        """, "=&r,=&r,r", [powers], (tl.int32, tl.int32), is_pure=True, pack=1)


@jit
def _decode_mxfp4_words(words, low_power, high_power):
    """Return the values of low and of high halves of four bytes a word, as `_decode_mxfp4` does.

    A code put into the bits of a bfloat16 is 2^-126 of its value.
    """
    WIDTH: tl.constexpr = words.shape[1]
    GROUPS: tl.constexpr = low_power.shape[0]
    words = tl.reshape(words, (GROUPS, 32, WIDTH))
    low_left, low_right = _mxfp4_scales(low_power[:, None, :])
    high_left, high_right = _mxfp4_scales(high_power[:, None, :])
    one, two, three, four = tl.inline_asm_elementwise(
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
        """, "=&r,=&r,=&r,=&r,r,r,r,r,r", [words, low_left, low_right, high_left, high_right],
        (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1)
    shape: tl.constexpr = (GROUPS * 32, WIDTH)
    low = _columns_of(tl.reshape(one, shape), tl.reshape(two, shape))
    high = _columns_of(tl.reshape(three, shape), tl.reshape(four, shape))
    return low, high


@jit
def _decode_mxfp4(codes, low_power, high_power, DTYPE: tl.constexpr):
    """Return the values of low and of high halves of bytes, whose groups have these exponents.

    A code (e2m1) put into the bits of a float16 is 2^-14 of its value; 2^(exponent - 127) of its
    group makes up for it, without rounding.
    """
    WIDTH: tl.constexpr = codes.shape[1]
    GROUPS: tl.constexpr = low_power.shape[0]
    codes = tl.reshape(codes, (GROUPS, 32, WIDTH))
    low_power = low_power.to(tl.int32)[:, None, :]
    high_power = high_power.to(tl.int32)[:, None, :]
    codes = codes.to(tl.uint16)
    low = (((codes << 12) & 0x8000) | ((codes << 9) & 0x0E00)).to(tl.float16, bitcast=True)
    high = (((codes << 8) & 0x8000) | ((codes << 5) & 0x0E00)).to(tl.float16, bitcast=True)
    low_scale = ((low_power + 14) << 23).to(tl.float32, bitcast=True)
    high_scale = ((high_power + 14) << 23).to(tl.float32, bitcast=True)
    low = (low.to(tl.float32) * low_scale).to(DTYPE)
    high = (high.to(tl.float32) * high_scale).to(DTYPE)
    return tl.reshape(low, (GROUPS * 32, WIDTH)), tl.reshape(high, (GROUPS * 32, WIDTH))
