"""Triton kernels of the experts for one token: four phases, in a launch each or all in one.

The weights, read once, set the time: programs share both products' matrices in pieces of equal
size. In one launch they wait for each other between phases, and ask for their next pieces before.
Sums over parts of the depth are left to the phase after, which adds them in order.

Axes: K choices, S parts of the depth, H hidden, I intermediate.
"""

# fmt: off
import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from neuron_moe.backends.cuda.codes_kernels import load_lines
from neuron_moe.backends.cuda.kernels import _expert_act

_ALL = tl.constexpr(-1)  # phases


@jit
def compute_token(hidden_ptr, index_ptr, affinity_ptr, first_ptr, first_scale_ptr, first_bias_ptr,
                  first_expert, first_line, first_column, down_ptr, down_scale_ptr, down_bias_ptr,
                  down_expert, down_line, down_column, first_parts_ptr, middle_ptr, down_parts_ptr,
                  out_ptr, arrived_ptr, H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr,
                  CHOICES: tl.constexpr, ROWS: tl.constexpr, FIRST_FORMAT: tl.constexpr,
                  DOWN_FORMAT: tl.constexpr, FIRST_PARTS: tl.constexpr, DOWN_PARTS: tl.constexpr,
                  HAS_FIRST_BIAS: tl.constexpr, HAS_DOWN_BIAS: tl.constexpr, ACT: tl.constexpr,
                  SCALE: tl.constexpr, HAS_GATE: tl.constexpr, GATES_ITSELF: tl.constexpr,
                  GATE_LOW: tl.constexpr, GATE_HIGH: tl.constexpr, UP_LOW: tl.constexpr,
                  UP_HIGH: tl.constexpr, UP_OFFSET: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
                  BLOCK_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
                  AHEAD: tl.constexpr, PROGRAMS: tl.constexpr, PHASE: tl.constexpr,
                  EARLY: tl.constexpr):
    """Run one of the phases, or all: out [H]. EARLY launches run beside the one before at first."""
    WIDTH: tl.constexpr = 2 * I if HAS_GATE else I
    program = tl.program_id(0)
    if EARLY:
        gdc_launch_dependents()
    if PHASE == _ALL or PHASE == 0:
        _project(hidden_ptr, 0, index_ptr, first_ptr, first_scale_ptr, first_expert, first_line,
                 first_column, first_parts_ptr, program, H, WIDTH, TOP_K, CHOICES, FIRST_FORMAT,
                 BLOCK_DEPTH, BLOCK_WIDTH, STAGES, PROGRAMS)
    if AHEAD > 0 and (PHASE == _ALL or PHASE == 2):
        _ask(index_ptr, down_ptr, down_expert, down_line, program, I, H, TOP_K, DOWN_FORMAT,
             BLOCK_DEPTH, BLOCK_WIDTH, AHEAD, PROGRAMS)
    if PHASE == _ALL:
        _meet(arrived_ptr, PROGRAMS)
    elif EARLY and PHASE > 0:
        gdc_wait()
    if PHASE == _ALL or PHASE == 1:
        tiles: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
        for number in range(program, TOP_K * tiles, PROGRAMS):
            choice = number // tiles
            column = number % tiles * COLUMNS + tl.arange(0, COLUMNS)
            expert = tl.load(index_ptr + choice).to(tl.int64)
            inside = column < tl.where(expert >= 0, I, 0)
            up = _sum_parts(first_parts_ptr, choice, column + (WIDTH - I), inside, WIDTH, TOP_K,
                            FIRST_PARTS, ROWS)
            gate = up
            if HAS_GATE:
                gate = _sum_parts(first_parts_ptr, choice, column, inside, WIDTH, TOP_K,
                                  FIRST_PARTS, ROWS)
            if HAS_FIRST_BIAS:
                place = first_bias_ptr + expert * WIDTH + column
                up += tl.load(place + (WIDTH - I), mask=inside, other=0.0).to(tl.float32)
                if HAS_GATE:
                    gate += tl.load(place, mask=inside, other=0.0).to(tl.float32)
            value, _, _ = _expert_act(gate, up, ACT, SCALE, HAS_GATE, GATES_ITSELF, GATE_LOW,
                                      GATE_HIGH, UP_LOW, UP_HIGH, UP_OFFSET)
            value = value.to(middle_ptr.dtype.element_ty)
            tl.store(middle_ptr + choice * I + column, value, mask=column < I)
    if PHASE == _ALL:
        _meet(arrived_ptr + 1, PROGRAMS)
    if PHASE == _ALL or PHASE == 2:
        _project(middle_ptr, I, index_ptr, down_ptr, down_scale_ptr, down_expert, down_line,
                 down_column, down_parts_ptr, program, I, H, TOP_K, CHOICES, DOWN_FORMAT,
                 BLOCK_DEPTH, BLOCK_WIDTH, STAGES, PROGRAMS)
    if PHASE == _ALL:
        _meet(arrived_ptr + 2, PROGRAMS)
    if PHASE == _ALL or PHASE == 3:
        for number in range(program, (H + COLUMNS - 1) // COLUMNS, PROGRAMS):
            column = number * COLUMNS + tl.arange(0, COLUMNS)
            sums = tl.zeros((COLUMNS,), tl.float32)
            for start in range(0, DOWN_PARTS * TOP_K, ROWS):
                row = start + tl.arange(0, ROWS)
                choice = row % TOP_K
                expert = tl.load(index_ptr + choice)
                is_row = (row < DOWN_PARTS * TOP_K) & (expert >= 0)
                inside = is_row[:, None] & (column < H)[None, :]
                place = down_parts_ptr + row[:, None] * H + column[None, :]
                rows = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
                if HAS_DOWN_BIAS:
                    place = down_bias_ptr + expert.to(tl.int64)[:, None] * H + column[None, :]
                    bias = tl.load(place, mask=inside & (row < TOP_K)[:, None], other=0.0)
                    rows += bias.to(tl.float32)
                weight = tl.load(affinity_ptr + choice).to(tl.float32)
                sums += tl.sum(rows * weight[:, None], axis=0)
            tl.store(out_ptr + column, sums.to(out_ptr.dtype.element_ty), mask=column < H)


@jit
def _project(rows_ptr, row_stride, index_ptr, matrix_ptr, scale_ptr, expert_stride, depth_stride,
             width_stride, parts_ptr, program, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
             TOP_K: tl.constexpr, CHOICES: tl.constexpr, FORMAT: tl.constexpr,
             BLOCK_DEPTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, STAGES: tl.constexpr,
             PROGRAMS: tl.constexpr):
    """Multiply the row of each choice with its expert's matrix: parts [S, K, WIDTH]."""
    LINES: tl.constexpr = DEPTH // 2 if FORMAT == "mxfp4" else DEPTH
    tiles: tl.constexpr = (WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH
    depth_parts: tl.constexpr = (LINES + BLOCK_DEPTH - 1) // BLOCK_DEPTH
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    choices = tl.arange(0, CHOICES)
    experts = tl.load(index_ptr + choices, mask=choices < TOP_K, other=-1)
    for number in tl.range(program, TOP_K * depth_parts * tiles, PROGRAMS, num_stages=STAGES):
        choice = number // (depth_parts * tiles)
        part = number // tiles % depth_parts
        column = number % tiles * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
        expert = tl.sum(tl.where(choices == choice, experts, 0), axis=0).to(tl.int64)
        is_column = column < tl.where(expert >= 0, WIDTH, 0)
        line = part * BLOCK_DEPTH + tl.arange(0, BLOCK_DEPTH)
        row_place = rows_ptr + choice * row_stride + line
        row = tl.load(row_place, mask=line < LINES, other=0.0)
        low, high = load_lines(matrix_ptr, scale_ptr, expert, part * BLOCK_DEPTH, column, is_column,
                               expert_stride, depth_stride, width_stride, DEPTH, WIDTH, BLOCK_DEPTH,
                               FORMAT, dtype)
        products = row.to(tl.float32)[:, None] * low.to(tl.float32)
        if FORMAT == "mxfp4":
            row = tl.load(row_place + LINES, mask=line < LINES, other=0.0)
            products += row.to(tl.float32)[:, None] * high.to(tl.float32)
        sums = tl.sum(products, axis=0)
        if FORMAT == "float8_e4m3" or FORMAT == "float8_e5m2":
            place = scale_ptr + expert * WIDTH + column
            sums *= tl.load(place, mask=is_column, other=0.0)
        place = parts_ptr + (part * TOP_K + choice) * WIDTH + column
        tl.store(place, sums, mask=is_column)


@jit
def _sum_parts(parts_ptr, choice, column, inside, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
               PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Return the sum over parts of some columns of a choice."""
    sums = tl.zeros(column.shape, tl.float32)
    for start in range(0, PARTS, ROWS):
        part = start + tl.arange(0, ROWS)
        place = parts_ptr + (part * TOP_K + choice)[:, None] * WIDTH + column[None, :]
        rows = tl.load(place, mask=(part < PARTS)[:, None] & inside[None, :], other=0.0,
                       cache_modifier=".cg")
        sums += tl.sum(rows, axis=0)
    return sums


@jit
def _ask(index_ptr, matrix_ptr, expert_stride, depth_stride, program, DEPTH: tl.constexpr,
         WIDTH: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
         BLOCK_WIDTH: tl.constexpr, AHEAD: tl.constexpr, PROGRAMS: tl.constexpr):
    """Ask for the pieces that a program multiplies first, so that the L2 cache has them."""
    LINES: tl.constexpr = DEPTH // 2 if FORMAT == "mxfp4" else DEPTH
    tiles: tl.constexpr = (WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH
    depth_parts: tl.constexpr = (LINES + BLOCK_DEPTH - 1) // BLOCK_DEPTH
    step: tl.constexpr = 1024 // matrix_ptr.dtype.element_ty.primitive_bitwidth  # of 128 bytes
    steps: tl.constexpr = (BLOCK_WIDTH + step - 1) // step
    for turn in tl.static_range(AHEAD):
        number = program + turn * PROGRAMS
        choice = number // (depth_parts * tiles)
        if choice < TOP_K:
            expert = tl.maximum(tl.load(index_ptr + choice), 0).to(tl.int64)
            line = number // tiles % depth_parts * BLOCK_DEPTH + tl.arange(0, BLOCK_DEPTH)
            line = tl.minimum(line, LINES - 1)
            column = number % tiles * BLOCK_WIDTH + tl.arange(0, steps) * step
            column = tl.minimum(column, WIDTH - 1)
            place = matrix_ptr + expert * expert_stride + line[:, None] * depth_stride
            place = (place + column[None, :]).to(tl.int64)
            tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place],
                                      tl.int32, is_pure=False, pack=1)


@jit
def _meet(arrived_ptr, PROGRAMS: tl.constexpr):
    """Wait until all programs have come here, and see what they have stored."""
    tl.debug_barrier()
    tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
    arrived = tl.load(arrived_ptr, volatile=True)
    while arrived < PROGRAMS:
        arrived = tl.load(arrived_ptr, volatile=True)
    tl.atomic_add(arrived_ptr, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()
