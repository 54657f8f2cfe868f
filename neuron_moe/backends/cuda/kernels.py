"""Triton kernels of an MoE layer's experts: sort, grouped products, activation and its derivative,
combine.

Rows are pairs (token, choice) sorted by expert. Every expert's rows start at a multiple of
BLOCK_ROWS, so that row tile m is rows m * BLOCK_ROWS on of every buffer, of one expert: padding
rows hold pair -1, read zeros and are read by nobody. The number of tiles in use stays on the
device; the host launches for the most that any routing can need. Nothing is added atomically:
reruns are equal to the bit.

Axes: T tokens, K choices, P = T * K pairs, E experts, R rows, H hidden, I intermediate. A product
is [R, depth] @ [E, depth, width].
"""

import os

import triton.language as tl
from triton import jit

from neuron_moe.backends.cuda.codes_kernels import load_lines

IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
MOST_NEGATIVE = tl.constexpr(-3e38)  # less is no limit


@jit
def rank_pairs(
    index_ptr,
    rank_ptr,
    counts_ptr,
    pair_ptr,
    num_pairs,
    num_experts,
    num_rows,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Number the pairs of each expert within a chunk, and count them: rank [P], counts [C, E].

    Rows are given no pair, ROWS by each program.
    """
    chunk = tl.program_id(0)
    row = chunk * ROWS + tl.arange(0, ROWS)
    tl.store(pair_ptr + row, tl.full((ROWS,), -1, tl.int32), mask=row < num_rows)
    place = tl.arange(0, CHUNK)
    pair = chunk * CHUNK + place
    expert = tl.load(index_ptr + pair, mask=pair < num_pairs, other=-1)
    is_same = (expert[:, None] == expert[None, :]) & (place[:, None] < place[None, :])
    rank = tl.sum(is_same.to(tl.int32), axis=0)  # within threads: faster than along the other axis
    tl.store(rank_ptr + pair, rank, mask=pair < num_pairs)
    bins = tl.arange(0, BINS)
    counted = tl.histogram(tl.where(expert < 0, num_experts, expert), BINS)
    tl.store(counts_ptr + chunk * num_experts + bins, counted, mask=bins < num_experts)


@jit
def sum_chunks(counts_ptr, offset_ptr, total_ptr, num_chunks, num_experts, CHUNKS: tl.constexpr):
    """Turn the counts of one expert into the rows before each chunk, and their total."""
    expert = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    count = tl.load(counts_ptr + chunk * num_experts + expert, mask=chunk < num_chunks, other=0)
    before = tl.cumsum(count, axis=0) - count
    tl.store(offset_ptr + chunk * num_experts + expert, before, mask=chunk < num_chunks)
    tl.store(total_ptr + expert, tl.sum(count, axis=0))


@jit
def place_pairs(
    index_ptr,
    rank_ptr,
    offset_ptr,
    total_ptr,
    pair_ptr,
    slot_ptr,
    tile_expert_ptr,
    first_tile_ptr,
    num_tiles_ptr,
    num_pairs,
    num_experts,
    most_tiles,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Give each pair its row, and each row tile its expert."""
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.load(total_ptr + bins, mask=bins < num_experts, other=0)
    tiles = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
    end = tl.cumsum(tiles, axis=0)
    if chunk == 0:
        tl.store(first_tile_ptr + bins, end - tiles, mask=bins < num_experts)
        tl.store(num_tiles_ptr, tl.sum(tiles, axis=0))
    tile = chunk * TILES + tl.arange(0, TILES)
    is_past = (tile[None, :] >= end[:, None]) & (bins < num_experts)[:, None]
    expert_of_tile = tl.sum(is_past.to(tl.int32), axis=0)
    expert_of_tile = tl.minimum(expert_of_tile, num_experts - 1)
    tl.store(tile_expert_ptr + tile, expert_of_tile, mask=tile < most_tiles)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    is_pair = pair < num_pairs
    expert = tl.load(index_ptr + pair, mask=is_pair, other=-1)
    is_real = expert >= 0
    is_before = bins[:, None] < expert[None, :]
    first = tl.sum(tl.where(is_before, tiles[:, None], 0), axis=0) * BLOCK_ROWS
    offset = tl.load(offset_ptr + chunk * num_experts + expert, mask=is_real, other=0)
    rank = tl.load(rank_ptr + pair, mask=is_pair, other=0)
    slot = first + offset + rank
    tl.store(slot_ptr + pair, tl.where(is_real, slot, -1), mask=is_pair)
    tl.store(pair_ptr + slot, pair, mask=is_real)


@jit
def _tile_of(number, num_row_tiles, num_column_tiles, group):
    """Return row and column tile of a number; a group of row tiles shares matrices in the cache."""
    in_group = group * num_column_tiles
    first = number // in_group * group
    size = tl.minimum(num_row_tiles - first, group)
    rest = number % in_group
    return first + rest % size, rest // size


@jit
def _sigmoid(z):
    """Return 1 / (1 + exp(-z)), on a GPU by approximations of 2^x and 1/x, good to a few ulp.

    The constants are -log2(e) and 1.
    """
    if IS_INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-z))
    return tl.inline_asm_elementwise(
        """
        {
        .reg .f32 t;
        mul.f32 t, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 $0, t;
        }
        """,
        "=f,f",
        [z],
        tl.float32,
        is_pure=True,
        pack=1,
    )


@jit
def _act(z, ACT: tl.constexpr):
    """Return an activation's value and derivative."""
    if ACT == "silu":
        gate = _sigmoid(z)
        value = z * gate
        slope = gate * (1.0 + z * (1.0 - gate))
    elif ACT == "sigmoid":
        value = _sigmoid(z)
        slope = value * (1.0 - value)
    elif ACT == "tanh":
        value = 2.0 * _sigmoid(2.0 * z) - 1.0
        slope = 1.0 - value * value
    elif ACT == "relu":
        slope = tl.where(z > 0, 1.0, 0.0)
        value = tl.where(z > 0, z, 0.0)
    elif ACT == "relu2":
        slope = tl.where(z > 0, 2.0 * z, 0.0)
        value = 0.5 * z * slope
    elif ACT == "leaky_relu":
        slope = tl.where(z > 0, 1.0, 0.01)
        value = z * slope
    elif ACT == "gelu":
        half = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        value = z * half
        slope = half + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    else:
        inner = 0.7978845608028654 * (z + 0.044715 * z * z * z)
        bend = 2.0 * _sigmoid(2.0 * inner) - 1.0
        value = 0.5 * z * (1.0 + bend)
        inner_slope = 0.7978845608028654 * (1.0 + 0.134145 * z * z)
        slope = 0.5 * (1.0 + bend) + 0.5 * z * (1.0 - bend * bend) * inner_slope
    return value, slope


@jit
def _clamp(value, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Return a value within limits, and 1 where it was inside, else 0."""
    inside = tl.where((value >= LOW) & (value <= HIGH), 1.0, 0.0)
    if LOW > MOST_NEGATIVE:
        value = tl.maximum(value, LOW)
    if HIGH < -MOST_NEGATIVE:
        value = tl.minimum(value, HIGH)
    return value, inside


@jit
def _cap(value, CAP: tl.constexpr):
    """Return a softly capped value and its derivative; CAP 0 for no cap."""
    if CAP == 0.0:
        slope = 1.0
    else:
        bend = 2.0 * _sigmoid(2.0 / CAP * value) - 1.0
        slope = 1.0 - bend * bend
        value = CAP * bend
    return value, slope


@jit
def _expert_act(gate, up, FORMULA: tl.constexpr):
    """Return what the down projection takes, and its derivatives by gate and up."""
    up, up_inside = _clamp(up, FORMULA.up_low, FORMULA.up_high)
    if not FORMULA.has_gate:
        value, slope = _act(up * FORMULA.scale, FORMULA.act)
        return value, up_inside, slope * FORMULA.scale * up_inside
    gate, gate_inside = _clamp(gate, FORMULA.gate_low, FORMULA.gate_high)
    value, slope = _act(gate * FORMULA.scale, FORMULA.act)
    slope = slope * FORMULA.scale
    if FORMULA.gates_itself:
        gate, gate_slope = _cap(gate, FORMULA.gate_cap)
        slope = value * gate_slope + gate * slope
        value = gate * value
    up, up_slope = _cap(up, FORMULA.up_cap)
    up = up + FORMULA.up_offset
    return value * up, slope * up * gate_inside, value * up_inside * up_slope


@jit
def _add_product(
    sums,
    rows_ptr,
    row_place,
    is_row,
    stack,
    expert,
    start,
    column,
    is_column,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    FORMAT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the product of rows with BLOCK_DEPTH lines of an expert's matrix from `start` on.

    fp8 codes are not scaled here: their columns are, after the sum.
    """
    LINES: tl.constexpr = DEPTH // 2 if FORMAT == "mxfp4" else DEPTH
    line = start + tl.arange(0, BLOCK_DEPTH)
    row_place = rows_ptr + row_place[:, None] + line[None, :]
    is_row = is_row[:, None] & (line < LINES)[None, :]
    rows = tl.load(row_place, mask=is_row, other=0.0)
    if FORMAT == "mxfp4":
        other_rows = tl.load(row_place + LINES, mask=is_row, other=0.0)
    matrix, others = load_lines(
        stack,
        expert,
        start,
        column,
        is_column,
        DEPTH,
        WIDTH,
        BLOCK_DEPTH,
        FORMAT,
        rows_ptr.dtype.element_ty,
    )
    sums = tl.dot(rows, matrix, sums, input_precision=PRECISION)
    if FORMAT == "mxfp4":
        sums = tl.dot(other_rows, others, sums, input_precision=PRECISION)
    return sums


@jit
def project(
    rows_ptr,
    pair_ptr,
    matrix_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    kept_ptr,
    tile_expert_ptr,
    num_tiles_ptr,
    first_tile,
    kept_tiles,
    expert_stride,
    depth_stride,
    width_stride,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    KEEPS: tl.constexpr,
    FORMULA: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Multiply row tiles with their experts' matrices, of some format, from first_tile on.

    GATHERS reads the tokens of the rows. ACTIVATES stores the activation of a product whose columns
    are gates, then ups, WIDTH in all: a tile takes BLOCK_WIDTH / 2 of both, one product. KEEPS
    stores the product of the first kept_tiles as well. Rows of `out` count from first_tile.
    """
    PAIRED: tl.constexpr = ACTIVATES and FORMULA.has_gate
    SPAN: tl.constexpr = BLOCK_WIDTH // 2 if PAIRED else BLOCK_WIDTH
    COLUMNS: tl.constexpr = WIDTH // 2 if PAIRED else WIDTH
    LINES: tl.constexpr = DEPTH // 2 if FORMAT == "mxfp4" else DEPTH
    column_tiles: tl.constexpr = (COLUMNS + SPAN - 1) // SPAN
    num_tiles = tl.maximum(tl.load(num_tiles_ptr) - first_tile, 0)
    within = tl.arange(0, BLOCK_WIDTH)
    stack = matrix_ptr, scale_ptr, expert_stride, depth_stride, width_stride
    for number in tl.range(tl.program_id(0), num_tiles * column_tiles, PROGRAMS):
        tile, column = _tile_of(number, num_tiles, column_tiles, GROUP)
        expert = tl.load(tile_expert_ptr + first_tile + tile).to(tl.int64)
        row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        if GATHERS:
            pair = tl.load(pair_ptr + first_tile * BLOCK_ROWS + row)
            source = tl.where(pair >= 0, pair // TOP_K, 0).to(tl.int64)
            is_row = pair >= 0
        else:
            source = row.to(tl.int64)
            is_row = row >= 0
        narrow = column * SPAN + within % SPAN
        wide = narrow + within // SPAN * COLUMNS
        is_column = narrow < COLUMNS
        sums = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
        for start in range(0, LINES, BLOCK_DEPTH):
            sums = _add_product(
                sums,
                rows_ptr,
                source * DEPTH,
                is_row,
                stack,
                expert,
                start,
                wide,
                is_column,
                DEPTH,
                WIDTH,
                BLOCK_DEPTH,
                FORMAT,
                PRECISION,
            )
        if FORMAT == "float8_e4m3" or FORMAT == "float8_e5m2":
            scale = tl.load(scale_ptr + expert * WIDTH + wide, mask=is_column, other=0.0)
            sums *= scale[None, :]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * WIDTH + wide, mask=is_column, other=0.0)
            sums += bias.to(tl.float32)[None, :]
        place = row.to(tl.int64)[:, None]
        if KEEPS:
            if tile < kept_tiles:
                tl.store(
                    kept_ptr + place * WIDTH + wide[None, :],
                    sums.to(kept_ptr.dtype.element_ty),
                    mask=is_column[None, :],
                )
        if not ACTIVATES:
            tl.store(
                out_ptr + place * WIDTH + wide[None, :],
                sums.to(out_ptr.dtype.element_ty),
                mask=is_column[None, :],
            )
        else:
            if PAIRED:
                parts = tl.permute(tl.reshape(sums, (BLOCK_ROWS, 2, SPAN)), (0, 2, 1))
                gate, up = tl.split(parts)
            else:
                gate = sums
                up = sums
            value, _, _ = _expert_act(gate, up, FORMULA)
            out = column * SPAN + tl.arange(0, SPAN)
            tl.store(
                out_ptr + place * COLUMNS + out[None, :],
                value.to(out_ptr.dtype.element_ty),
                mask=(out < COLUMNS)[None, :],
            )


@jit
def combine_rows(
    rows_ptr,
    slot_ptr,
    weight_ptr,
    out_ptr,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the K rows of a token in float32, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = tl.load(slot_ptr + token * TOP_K + choice).to(tl.int64)
        place = slot * H + column
        row = tl.load(rows_ptr + place, mask=(column < H) & (place >= 0), other=0.0)
        row = row.to(tl.float32)
        if HAS_WEIGHTS:
            row = row * tl.load(weight_ptr + token * TOP_K + choice)
        sums += row
    tl.store(out_ptr + token * H + column, sums.to(out_ptr.dtype.element_ty), mask=column < H)


@jit
def copy_rows(
    source_ptr,
    slot_ptr,
    pair_ptr,
    num_tiles_ptr,
    out_ptr,
    num_tokens,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy each token, read once, to its rows; programs after these fill padding with zeros."""
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if program < num_tokens:
        value = tl.load(source_ptr + program.to(tl.int64) * H + column, mask=column < H, other=0.0)
        for choice in tl.static_range(TOP_K):
            slot = tl.load(slot_ptr + program * TOP_K + choice).to(tl.int64)
            place = slot * H + column
            tl.store(out_ptr + place, value, mask=(column < H) & (place >= 0))
    else:
        tile = program - num_tokens
        if tile < tl.load(num_tiles_ptr):
            of_tile = tl.load(pair_ptr + tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))
            if tl.min(of_tile, axis=0) < 0:
                for part in range(0, BLOCK_ROWS, ROWS):
                    row = tile * BLOCK_ROWS + part + tl.arange(0, ROWS)
                    is_filled = (tl.load(pair_ptr + row) < 0)[:, None] & (column < H)[None, :]
                    place = row.to(tl.int64)[:, None] * H + column[None, :]
                    zeros = tl.zeros((ROWS, BLOCK), out_ptr.dtype.element_ty)
                    tl.store(out_ptr + place, zeros, mask=is_filled)


@jit(do_not_specialize=["kept_tiles"])
def differentiate(
    back_ptr,
    kept_ptr,
    fresh_ptr,
    pair_ptr,
    weight_ptr,
    grad_ptr,
    bias_ptr,
    tile_expert_ptr,
    num_tiles_ptr,
    product_ptr,
    middle_ptr,
    affinity_ptr,
    kept_tiles,
    H: tl.constexpr,
    I: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORMULA: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From dA and the first product h: dh, the weighted activation, and the affinities' gradients.

    h is read from `kept` for the first kept_tiles, else from `fresh`, whose rows count from there.
    """
    WIDTH: tl.constexpr = 2 * I if FORMULA.has_gate else I
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(0) * ROWS // BLOCK_ROWS
    if tile < tl.load(num_tiles_ptr):
        place = row.to(tl.int64)[:, None]
        pair = tl.load(pair_ptr + row)
        is_real = pair >= 0
        weight = tl.load(weight_ptr + pair, mask=is_real, other=0.0).to(tl.float32)
        is_kept = (row < kept_tiles * BLOCK_ROWS)[:, None]
        is_fresh = (row >= kept_tiles * BLOCK_ROWS)[:, None]
        fresh = place - kept_tiles.to(tl.int64) * BLOCK_ROWS
        slope_of_weight = tl.zeros((ROWS,), tl.float32)
        for start in range(0, I, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            inside = column < I
            back = tl.load(back_ptr + place * I + column, mask=inside, other=0.0).to(tl.float32)
            up_column = column + (WIDTH - I)
            gate = tl.load(kept_ptr + place * WIDTH + column, mask=inside & is_kept, other=0.0)
            up = tl.load(kept_ptr + place * WIDTH + up_column, mask=inside & is_kept, other=0.0)
            gate += tl.load(fresh_ptr + fresh * WIDTH + column, mask=inside & is_fresh, other=0.0)
            up += tl.load(fresh_ptr + fresh * WIDTH + up_column, mask=inside & is_fresh, other=0.0)
            value, gate_slope, up_slope = _expert_act(
                gate.to(tl.float32), up.to(tl.float32), FORMULA
            )
            slope_of_weight += tl.sum(tl.where(inside, back * value, 0.0), axis=1)
            back = back * weight[:, None]
            kind = product_ptr.dtype.element_ty
            if FORMULA.has_gate:
                tl.store(
                    product_ptr + place * WIDTH + column, (back * gate_slope).to(kind), mask=inside
                )
            tl.store(
                product_ptr + place * WIDTH + up_column, (back * up_slope).to(kind), mask=inside
            )
            tl.store(
                middle_ptr + place * I + column, (value * weight[:, None]).to(kind), mask=inside
            )
        if HAS_BIAS:
            expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
            token = tl.where(is_real, pair // TOP_K, 0).to(tl.int64)[:, None]
            for start in range(0, H, BLOCK):
                column = start + tl.arange(0, BLOCK)[None, :]
                inside = (column < H) & is_real[:, None]
                grad = tl.load(grad_ptr + token * H + column, mask=inside, other=0.0)
                bias = tl.load(bias_ptr + expert * H + column, mask=column < H, other=0.0)
                slope_of_weight += tl.sum(grad.to(tl.float32) * bias.to(tl.float32), axis=1)
        tl.store(affinity_ptr + pair, slope_of_weight, mask=is_real)


@jit
def multiply_transposed(
    left_ptr,
    right_ptr,
    pair_ptr,
    first_tile_ptr,
    total_ptr,
    out_ptr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    GATHERS_LEFT: tl.constexpr,
    GATHERS_RIGHT: tl.constexpr,
    ROWS_PER_TILE: tl.constexpr,
    BLOCK_LEFT: tl.constexpr,
    BLOCK_RIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply, for each expert, its rows of `left`, transposed, with its rows of `right`.

    out [E, LEFT, RIGHT]; a side that gathers is read by token. An expert without rows gets zeros.
    """
    left_tiles: tl.constexpr = (LEFT + BLOCK_LEFT - 1) // BLOCK_LEFT
    right_tiles: tl.constexpr = (RIGHT + BLOCK_RIGHT - 1) // BLOCK_RIGHT
    in_expert: tl.constexpr = left_tiles * right_tiles
    for number in tl.range(tl.program_id(0), NUM_EXPERTS * in_expert, PROGRAMS):
        expert = number // in_expert
        left_tile, right_tile = _tile_of(number % in_expert, left_tiles, right_tiles, GROUP)
        first = tl.load(first_tile_ptr + expert) * ROWS_PER_TILE
        count = tl.load(total_ptr + expert)
        left = left_tile * BLOCK_LEFT + tl.arange(0, BLOCK_LEFT)
        right = right_tile * BLOCK_RIGHT + tl.arange(0, BLOCK_RIGHT)
        sums = tl.zeros((BLOCK_LEFT, BLOCK_RIGHT), tl.float32)
        for start in range(0, count, BLOCK_ROWS):
            place = start + tl.arange(0, BLOCK_ROWS)
            is_row = place < count
            row = (first + place).to(tl.int64)
            if GATHERS_LEFT or GATHERS_RIGHT:
                pair = tl.load(pair_ptr + row, mask=is_row, other=0)
                token = (pair // TOP_K).to(tl.int64)
            left_row = token if GATHERS_LEFT else row
            right_row = token if GATHERS_RIGHT else row
            a = tl.load(
                left_ptr + left_row[:, None] * LEFT + left[None, :],
                mask=is_row[:, None] & (left < LEFT)[None, :],
                other=0.0,
            )
            b = tl.load(
                right_ptr + right_row[:, None] * RIGHT + right[None, :],
                mask=is_row[:, None] & (right < RIGHT)[None, :],
                other=0.0,
            )
            sums = tl.dot(tl.trans(a), b, sums, input_precision=PRECISION)
        out = expert.to(tl.int64) * LEFT * RIGHT + left.to(tl.int64)[:, None] * RIGHT
        tl.store(
            out_ptr + out + right[None, :],
            sums.to(out_ptr.dtype.element_ty),
            mask=(left < LEFT)[:, None] & (right < RIGHT)[None, :],
        )


@jit
def sum_rows(
    rows_ptr,
    pair_ptr,
    weight_ptr,
    first_tile_ptr,
    total_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHERS: tl.constexpr,
    ROWS_PER_TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the rows of each expert, [E, WIDTH]; those that gather are weighed by the affinities."""
    expert = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(first_tile_ptr + expert) * ROWS_PER_TILE
    count = tl.load(total_ptr + expert)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK_ROWS):
        place = start + tl.arange(0, BLOCK_ROWS)
        is_row = place < count
        row = (first + place).to(tl.int64)
        pair = tl.load(pair_ptr + row, mask=is_row, other=0)
        source = (pair // TOP_K).to(tl.int64) if GATHERS else row
        mask = is_row[:, None] & (column < WIDTH)[None, :]
        value = tl.load(rows_ptr + source[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
        value = value.to(tl.float32)
        if GATHERS:
            value = value * tl.load(weight_ptr + pair, mask=is_row, other=0.0)[:, None]
        sums += tl.sum(value, axis=0)
    tl.store(
        out_ptr + expert.to(tl.int64) * WIDTH + column,
        sums.to(out_ptr.dtype.element_ty),
        mask=column < WIDTH,
    )
