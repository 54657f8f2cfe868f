"""Triton kernels of the experts for few tokens, without a sort.

The weights, read once, set the time. A program takes up to ROWS pairs (token, choice) of one
expert, some columns and, in the second product, a part of the depth. The first of these pairs
leads: its programs look through all choices for the others. Sums over parts of the depth are left
to the next kernel, which adds them in order: nothing is added atomically. Where the GPU can, a
kernel starts while the one before it runs, and waits where it needs the other's results.

Axes: T tokens, K choices, P = T * K pairs, E experts, S parts of the depth, H hidden,
I intermediate.
"""

# fmt: off
import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from neuron_moe.backends.cuda.kernels import _expert_act


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
def _multiply(source_ptr, base, token, is_row, wide, is_column, depth_stride, width_stride, first,
              end, DEPTH: tl.constexpr, BLOCK_DEPTH: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply rows of a source with columns of a matrix, over a part of the depth."""
    sums = tl.zeros((token.shape[0], wide.shape[0]), tl.float32)
    for start in range(first, end, BLOCK_DEPTH):
        depth = start + tl.arange(0, BLOCK_DEPTH)
        rows = tl.load(source_ptr + token[:, None] * DEPTH + depth[None, :],
                       mask=is_row[:, None] & (depth < DEPTH)[None, :], other=0.0)
        place = depth[:, None] * depth_stride + wide[None, :] * width_stride
        matrix = tl.load(base + place, mask=(depth < DEPTH)[:, None] & is_column[None, :],
                         other=0.0)
        sums = tl.dot(rows, matrix, sums, input_precision=PRECISION)
    return sums


@jit
def activate_pairs(source_ptr, index_ptr, matrix_ptr, bias_ptr, out_ptr, num_pairs, expert_stride,
                   depth_stride, width_stride, H: tl.constexpr, I: tl.constexpr,
                   TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr,
                   SCALE: tl.constexpr, HAS_GATE: tl.constexpr, GATES_ITSELF: tl.constexpr,
                   GATE_LOW: tl.constexpr, GATE_HIGH: tl.constexpr, UP_LOW: tl.constexpr,
                   UP_HIGH: tl.constexpr, UP_OFFSET: tl.constexpr, ROWS: tl.constexpr,
                   PAIRS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
                   PRECISION: tl.constexpr, OVERLAPS: tl.constexpr):
    """Multiply pairs' tokens with experts' first matrices; store the activation: out [P, I].

    A program's columns are as many gates as ups, where there are gates.
    """
    WIDTH: tl.constexpr = 2 * I if HAS_GATE else I
    SPAN: tl.constexpr = BLOCK_WIDTH // 2 if HAS_GATE else BLOCK_WIDTH
    if OVERLAPS:
        gdc_launch_dependents()
    expert, pair = _pairs_of_tile(index_ptr, tl.program_id(0), num_pairs, ROWS, PAIRS)
    if expert >= 0:
        within = tl.arange(0, BLOCK_WIDTH)
        narrow = tl.program_id(1) * SPAN + within % SPAN
        wide = narrow + within // SPAN * I
        token = (tl.maximum(pair, 0) // TOP_K).to(tl.int64)
        base = matrix_ptr + expert.to(tl.int64) * expert_stride
        sums = _multiply(source_ptr, base, token, pair >= 0, wide, narrow < I, depth_stride,
                         width_stride, 0, H, H, BLOCK_DEPTH, PRECISION)
        if HAS_BIAS:
            place = bias_ptr + expert.to(tl.int64) * WIDTH + wide
            sums += tl.load(place, mask=narrow < I, other=0.0).to(tl.float32)[None, :]
        if HAS_GATE:
            parts = tl.permute(tl.reshape(sums, (ROWS, 2, SPAN)), (0, 2, 1))
            gate, up = tl.split(parts)
        else:
            gate = sums
            up = sums
        value, _, _ = _expert_act(
            gate,
            up,
            ACT,
            SCALE,
            HAS_GATE,
            GATES_ITSELF,
            GATE_LOW,
            GATE_HIGH,
            UP_LOW,
            UP_HIGH,
            UP_OFFSET,
        )
        column = (tl.program_id(1) * SPAN + tl.arange(0, SPAN))[None, :]
        place = pair.to(tl.int64)[:, None] * I + column
        tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty),
                 mask=(pair >= 0)[:, None] & (column < I))


@jit
def project_pairs(source_ptr, index_ptr, matrix_ptr, parts_ptr, num_pairs, expert_stride,
                  depth_stride, width_stride, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
                  DEPTH_PART: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
                  BLOCK_WIDTH: tl.constexpr, BLOCK_DEPTH: tl.constexpr, PRECISION: tl.constexpr,
                  LINE: tl.constexpr, OVERLAPS: tl.constexpr):
    """Multiply pairs' rows with experts' matrices: parts [S, P, WIDTH].

    Where kernels overlap, it asks for its part of the matrix, in lines of the cache of LINE
    elements, before the kernel before it has ended.
    """
    part = tl.program_id(2)
    first = part * DEPTH_PART
    expert, pair = _pairs_of_tile(index_ptr, tl.program_id(0), num_pairs, ROWS, PAIRS)
    base = matrix_ptr + tl.maximum(expert, 0).to(tl.int64) * expert_stride
    end = tl.where(expert >= 0, tl.minimum(DEPTH, first + DEPTH_PART), 0)
    if OVERLAPS:
        gdc_launch_dependents()
        line = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH // LINE) * LINE
        for start in range(first, end, BLOCK_DEPTH):
            depth = (start + tl.arange(0, BLOCK_DEPTH))[:, None]
            place = depth * depth_stride + line[None, :] * width_stride
            place = tl.where((depth < DEPTH) & (line < WIDTH)[None, :], place, 0)
            tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
                                      [base + place], tl.int32, is_pure=False, pack=1)
        gdc_wait()
    if expert >= 0:
        column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
        row = tl.maximum(pair, 0).to(tl.int64)
        sums = _multiply(source_ptr, base, row, pair >= 0, column, column < WIDTH, depth_stride,
                         width_stride, first, end, DEPTH, BLOCK_DEPTH, PRECISION)
        place = (part * num_pairs + pair).to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(parts_ptr + place, sums, mask=(pair >= 0)[:, None] & (column < WIDTH)[None, :])


@jit
def combine_choices(parts_ptr, index_ptr, weight_ptr, bias_ptr, out_ptr, num_pairs, H: tl.constexpr,
                    TOP_K: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
                    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Weigh and add a token's choices, each the sum of PARTS, in the order of both."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    if OVERLAPS:
        gdc_wait()
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(index_ptr + pair)
        inside = column < tl.where(expert >= 0, H, 0)
        row = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(PARTS):
            place = (part * num_pairs + pair).to(tl.int64) * H + column
            row += tl.load(parts_ptr + place, mask=inside, other=0.0)
        if HAS_BIAS:
            place = expert.to(tl.int64) * H + column
            row += tl.load(bias_ptr + place, mask=inside, other=0.0).to(tl.float32)
        sums += row * tl.load(weight_ptr + pair).to(tl.float32)
    sums = sums.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64) * H + column, sums, mask=column < H)
