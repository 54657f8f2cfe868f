"""Triton kernels of the experts for few tokens, without a sort.

The weights, read once, set the time. A program takes up to ROWS pairs (token, choice) of one
expert, some columns and a part of the depth. The first of these pairs leads: its programs look
through all choices for the others. Sums over parts of the depth are left to the next kernel, which
adds them in order: nothing is added atomically.

One token takes two kernels: the second product activates what it reads, and the last of its
programs on some columns combines the choices. Where OVERLAPS, the second begins beside the first,
and waits for its end before it reads what the first has stored.

Axes: T tokens, K choices, P = T * K pairs, E experts, S parts of the depth, H hidden,
I intermediate.
"""

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from neuron_moe.backends.cuda.codes_kernels import load_lines
from neuron_moe.backends.cuda.kernels import _add_product, _expert_act


@jit
def _pairs_of_tile(index_ptr, leader, num_pairs, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Return the leader's expert (-1: it leads nothing), and the tile's pairs (-1: none)."""
    pairs = tl.arange(0, PAIRS)
    experts = tl.load(index_ptr + pairs, mask=pairs < num_pairs, other=-1)
    expert = tl.load(index_ptr + leader)
    is_same = experts == expert
    before = tl.sum((is_same & (pairs < leader)).to(tl.int32), axis=0)
    rank = tl.cumsum(is_same.to(tl.int32), axis=0) - 1 - before
    is_row = is_same[None, :] & (rank[None, :] == tl.arange(0, ROWS)[:, None])
    pair = tl.sum(tl.where(is_row, pairs[None, :] + 1, 0), axis=1) - 1
    return tl.where(before % ROWS == 0, expert, -1), pair


@jit
def project_pairs(
    source_ptr,
    index_ptr,
    matrix_ptr,
    scale_ptr,
    parts_ptr,
    arrived_ptr,
    num_pairs,
    expert_stride,
    depth_stride,
    width_stride,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    DEPTH_PART: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
    COUNTERS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply pairs' rows, one for TOP_K pairs, with experts' matrices: parts [S, P, WIDTH].

    COUNTERS of `finish_token` are set to zero: then pairs are of one token, each by itself.
    """
    LINES: tl.constexpr = DEPTH // 2 if FORMAT == "mxfp4" else DEPTH
    if OVERLAPS:
        gdc_launch_dependents()
    stack = matrix_ptr, scale_ptr, expert_stride, depth_stride, width_stride
    part = tl.program_id(2)
    if COUNTERS == 0:
        expert, pair = _pairs_of_tile(index_ptr, tl.program_id(0), num_pairs, ROWS, PAIRS)
    else:
        expert = tl.load(index_ptr + tl.program_id(0))
        pair = tl.where(tl.arange(0, ROWS) == 0, tl.program_id(0), -1)
        if tl.program_id(0) + tl.program_id(1) + part == 0:
            counter = tl.arange(0, COUNTERS)
            tl.store(arrived_ptr + counter, counter * 0)
    if expert >= 0:
        number = expert.to(tl.int64)
        is_row = pair >= 0
        row_place = (tl.maximum(pair, 0) // TOP_K).to(tl.int64) * DEPTH
        column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
        is_column = column < WIDTH
        sums = tl.zeros((ROWS, BLOCK_WIDTH), tl.float32)
        end = tl.minimum(LINES, (part + 1) * DEPTH_PART)
        for start in range(part * DEPTH_PART, end, BLOCK_DEPTH):
            sums = _add_product(
                sums,
                source_ptr,
                row_place,
                is_row,
                stack,
                number,
                start,
                column,
                is_column,
                DEPTH,
                WIDTH,
                BLOCK_DEPTH,
                FORMAT,
                PRECISION,
            )
        if FORMAT == "float8_e4m3" or FORMAT == "float8_e5m2":
            scale = tl.load(scale_ptr + number * WIDTH + column, mask=is_column, other=0.0)
            sums *= scale[None, :]
        place = (part * num_pairs + pair).to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(parts_ptr + place, sums, mask=is_row[:, None] & is_column[None, :])


@jit
def _activated(
    parts_ptr,
    bias_ptr,
    pair,
    num_pairs,
    expert,
    column,
    I: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORMULA: tl.constexpr,
):
    """Return the activation of some columns of a pair's first product, the sum of its PARTS."""
    WIDTH: tl.constexpr = 2 * I if FORMULA.has_gate else I
    inside = column < tl.where(expert >= 0, I, 0)
    gate = tl.zeros(column.shape, tl.float32)
    up = tl.zeros(column.shape, tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * num_pairs + pair).to(tl.int64) * WIDTH + column
        up += tl.load(parts_ptr + place + (WIDTH - I), mask=inside, other=0.0)
        if FORMULA.has_gate:
            gate += tl.load(parts_ptr + place, mask=inside, other=0.0)
    if HAS_BIAS:
        place = expert.to(tl.int64) * WIDTH + column
        up += tl.load(bias_ptr + place + (WIDTH - I), mask=inside, other=0.0).to(tl.float32)
        if FORMULA.has_gate:
            gate += tl.load(bias_ptr + place, mask=inside, other=0.0).to(tl.float32)
    value, _, _ = _expert_act(gate, up, FORMULA)
    return value


@jit
def activate_pairs(
    parts_ptr,
    bias_ptr,
    index_ptr,
    out_ptr,
    num_pairs,
    I: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORMULA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the PARTS of a pair's first product, and store its activation: out [P, I]."""
    pair = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = _activated(
        parts_ptr,
        bias_ptr,
        pair,
        num_pairs,
        tl.load(index_ptr + pair),
        column,
        I,
        PARTS,
        HAS_BIAS,
        FORMULA,
    )
    value = value.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair.to(tl.int64) * I + column, value, mask=column < I)


@jit
def _combined(
    parts_ptr,
    index_ptr,
    weight_ptr,
    bias_ptr,
    token,
    num_pairs,
    column,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Return some columns of a token's choices, weighed and added, each the sum of PARTS."""
    sums = tl.zeros(column.shape, tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(index_ptr + pair)
        row = tl.zeros(column.shape, tl.float32)
        for part in tl.static_range(PARTS):
            place = (part * num_pairs + pair).to(tl.int64) * H + column
            # Masked by the expert it would wait for its number; of no expert, it is unset memory.
            value = tl.load(parts_ptr + place, mask=column < H, other=0.0, cache_modifier=".cg")
            row += tl.where(expert >= 0, value, 0.0)
        if HAS_BIAS:
            place = expert.to(tl.int64) * H + column
            inside = column < tl.where(expert >= 0, H, 0)
            row += tl.load(bias_ptr + place, mask=inside, other=0.0).to(tl.float32)
        sums += row * tl.load(weight_ptr + pair).to(tl.float32)
    return sums


@jit
def combine_choices(
    parts_ptr,
    index_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_pairs,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weigh and add a token's choices, each the sum of PARTS, in the order of both."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = _combined(
        parts_ptr,
        index_ptr,
        weight_ptr,
        bias_ptr,
        token,
        num_pairs,
        column,
        H,
        TOP_K,
        PARTS,
        HAS_BIAS,
    )
    sums = sums.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64) * H + column, sums, mask=column < H)


@jit
def finish_token(
    first_ptr,
    first_bias_ptr,
    index_ptr,
    matrix_ptr,
    scale_ptr,
    bias_ptr,
    weight_ptr,
    down_ptr,
    arrived_ptr,
    out_ptr,
    num_pairs,
    expert_stride,
    depth_stride,
    width_stride,
    I: tl.constexpr,
    H: tl.constexpr,
    FIRST_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_FIRST_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORMULA: tl.constexpr,
    TOP_K: tl.constexpr,
    DEPTH_PART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Activate the choices of one token, multiply them with experts' matrices, and combine them.

    Each program stores a part of the second product, down [PARTS, TOP_K, H], and counts itself; the
    last of a block of columns adds the parts in their order.
    """
    LINES: tl.constexpr = I // 2 if FORMAT == "mxfp4" else I
    stack = matrix_ptr, scale_ptr, expert_stride, depth_stride, width_stride
    pair, part = tl.program_id(0), tl.program_id(2)
    expert = tl.load(index_ptr + pair)
    column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    if OVERLAPS:
        gdc_wait()
    if expert >= 0:
        number = expert.to(tl.int64)
        is_row = (tl.arange(0, ROWS) == 0)[:, None]
        sums = tl.zeros((ROWS, BLOCK_WIDTH), tl.float32)
        end = tl.minimum(LINES, (part + 1) * DEPTH_PART)
        for start in range(part * DEPTH_PART, end, BLOCK_DEPTH):
            matrix, others = load_lines(
                stack,
                number,
                start,
                column,
                column < H,
                I,
                H,
                BLOCK_DEPTH,
                FORMAT,
                out_ptr.dtype.element_ty,
            )
            line = start + tl.arange(0, BLOCK_DEPTH)
            for half in tl.static_range(2 if FORMAT == "mxfp4" else 1):
                middle = _activated(
                    first_ptr,
                    first_bias_ptr,
                    pair,
                    num_pairs,
                    expert,
                    line + half * LINES,
                    I,
                    FIRST_PARTS,
                    HAS_FIRST_BIAS,
                    FORMULA,
                )
                middle = tl.where(is_row & (line < LINES)[None, :], middle[None, :], 0.0)
                middle = middle.to(out_ptr.dtype.element_ty)
                sums = tl.dot(middle, others if half else matrix, sums, input_precision=PRECISION)
        if FORMAT == "float8_e4m3" or FORMAT == "float8_e5m2":
            scale = tl.load(scale_ptr + number * H + column, mask=column < H, other=0.0)
            sums *= scale[None, :]
        place = (part * num_pairs + pair).to(tl.int64) * H + column[None, :]
        place += tl.zeros((ROWS, 1), tl.int64)
        tl.store(down_ptr + place, sums, mask=is_row & (column < H)[None, :])
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + tl.program_id(1), 1) == TOP_K * PARTS - 1:
        sums = _combined(
            down_ptr,
            index_ptr,
            weight_ptr,
            bias_ptr,
            0,
            num_pairs,
            column,
            H,
            TOP_K,
            PARTS,
            HAS_BIAS,
        )
        tl.store(out_ptr + column, sums.to(out_ptr.dtype.element_ty), mask=column < H)
