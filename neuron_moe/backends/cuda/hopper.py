"""Warp-specialised grouped products for Hopper GPUs, in Gluon.

Two kinds of product over rows sorted as in `kernels`: rows with their experts' matrices, and (TURNED) for
each expert its rows of one buffer, turned, with its rows of another. One program runs on each
multiprocessor and walks over tiles of 128 x BLOCK_WIDTH. Its parts: a warpgroup that fills a ring of
STAGES tiles, by TMA, or by asynchronous copies of each row where rows are gathered by token; and two
warpgroups that multiply 64 of the 128 rows each, apply bias and activation in registers, and store by TMA.
Barriers in shared memory say when a stage is filled and when both have read it.

Rows of padding are computed and stored: they are rows of the expert's last tile. Depths are multiples
of BLOCK_DEPTH; widths may end inside a tile, where TMA reads zeros and stores nothing.
"""

# fmt: off
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from neuron_moe.backends.cuda.kernels import _expert_act, _tile_of

BLOCK_ROWS = gl.constexpr(128)  # of a tile: what two consumers compute
_HAS_SHORT_NAMES = gl.constexpr(hasattr(tma, "async_load"))  # Triton 3.9 renamed what 3.6 has
_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_load_rows = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)
_meet = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _locate(number, row_tiles, first_tile, tile_expert_ptr, first_tile_ptr, total_ptr,
            TURNED: gl.constexpr, COLUMN_TILES: gl.constexpr, DEPTH_STEPS: gl.constexpr,
            BLOCK_DEPTH: gl.constexpr, GROUP: gl.constexpr):
    """Return a tile's row and column, expert, the first row it sums over, and its steps."""
    if TURNED:
        expert = number // (row_tiles * COLUMN_TILES)
        tile, column = _tile_of(number % (row_tiles * COLUMN_TILES), row_tiles, COLUMN_TILES, GROUP)
        first_row = gl.load(first_tile_ptr + expert) * BLOCK_ROWS
        steps = (gl.load(total_ptr + expert) + BLOCK_DEPTH - 1) // BLOCK_DEPTH
    else:
        tile, column = _tile_of(number, row_tiles, COLUMN_TILES, GROUP)
        expert = gl.load(tile_expert_ptr + first_tile + tile)
        first_row = 0
        steps = DEPTH_STEPS
    return tile, column, expert, first_row, steps


@gluon.jit
def _count_tiles(num_tiles_ptr, first_tile, LEFT: gl.constexpr, NUM_EXPERTS: gl.constexpr,
                 TURNED: gl.constexpr, COLUMN_TILES: gl.constexpr):
    """Return the row tiles (of one expert, if TURNED), and all tiles."""
    if TURNED:
        row_tiles = (LEFT + BLOCK_ROWS - 1) // BLOCK_ROWS
        count = row_tiles * COLUMN_TILES * NUM_EXPERTS
    else:
        row_tiles = gl.maximum(gl.load(num_tiles_ptr) - first_tile, 0)
        count = row_tiles * COLUMN_TILES
    return row_tiles, count


@gluon.jit
def _produce(left_desc, right_desc, rows_ptr, pair_ptr, left_ring, right_ring, filled, emptied,
             tile_expert_ptr, num_tiles_ptr, first_tile_ptr, total_ptr, first_tile,
             LEFT: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
             NUM_EXPERTS: gl.constexpr, TOP_K: gl.constexpr, GATHERS: gl.constexpr,
             TURNED: gl.constexpr, RIGHT_TURNED: gl.constexpr, PAIRED: gl.constexpr,
             COLUMN_TILES: gl.constexpr, DEPTH_STEPS: gl.constexpr, BLOCK_WIDTH: gl.constexpr,
             BLOCK_DEPTH: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
             STAGES: gl.constexpr, LAG: gl.constexpr):
    """Fill stage after stage. A gathered side is complete LAG steps after it was asked for."""
    HALF: gl.constexpr = BLOCK_WIDTH // 2
    LEFT_BYTES: gl.constexpr = 0 if GATHERS == 1 else BLOCK_ROWS * BLOCK_DEPTH * 2
    RIGHT_BYTES: gl.constexpr = 0 if GATHERS == 2 else BLOCK_WIDTH * BLOCK_DEPTH * 2
    row_tiles, count = _count_tiles(num_tiles_ptr, first_tile, LEFT, NUM_EXPERTS, TURNED, COLUMN_TILES)
    step = 0
    for number in range(gl.program_id(0), count, PROGRAMS):
        tile, column, expert, first_row, steps = _locate(
            number, row_tiles, first_tile, tile_expert_ptr, first_tile_ptr, total_ptr, TURNED,
            COLUMN_TILES, DEPTH_STEPS, BLOCK_DEPTH, GROUP)
        if GATHERS > 0:
            if TURNED:
                SPAN: gl.constexpr = BLOCK_ROWS if GATHERS == 1 else BLOCK_WIDTH
                LINE: gl.constexpr = LEFT if GATHERS == 1 else WIDTH
                across: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SPAN, SPAN // 8], [gl.num_warps(), 1], [1, 0])
                line = gl.arange(0, BLOCK_DEPTH, gl.SliceLayout(1, across))
                place = tile * BLOCK_ROWS if GATHERS == 1 else column * BLOCK_WIDTH
                wide = place + gl.arange(0, SPAN, gl.SliceLayout(0, across))
                pair = gl.load(pair_ptr + first_row + line, mask=line < steps * BLOCK_DEPTH, other=-1)
            else:
                along: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
                line = (first_tile + tile) * BLOCK_ROWS + gl.arange(0, BLOCK_ROWS, gl.SliceLayout(1, along))
                pair = gl.load(pair_ptr + line)
                token = gl.maximum(pair, 0) // TOP_K
                deep = gl.arange(0, BLOCK_DEPTH, gl.SliceLayout(0, along))
                source = rows_ptr + token.to(gl.int64)[:, None] * DEPTH + deep[None, :]
                is_row = (pair >= 0)[:, None]
        for depth_step in range(steps):
            stage = step % STAGES
            mbarrier.wait(emptied.index(stage), (step // STAGES & 1) ^ 1)
            bar = filled.index(stage)
            mbarrier.expect(bar, LEFT_BYTES + RIGHT_BYTES)
            depth = depth_step * BLOCK_DEPTH
            if TURNED:
                row = first_row + depth
                if GATHERS != 1:
                    _load_tile(left_desc, [row, tile * BLOCK_ROWS], bar, left_ring.index(stage))
                if GATHERS != 2:
                    _load_tile(right_desc, [row, column * BLOCK_WIDTH], bar, right_ring.index(stage))
            else:
                if GATHERS != 1:
                    _load_tile(left_desc, [tile * BLOCK_ROWS, depth], bar, left_ring.index(stage))
                if PAIRED:
                    row = expert * DEPTH + depth
                    _load_tile(right_desc, [row, column * HALF], bar, right_ring.index(2 * stage))
                    _load_tile(right_desc, [row, WIDTH // 2 + column * HALF], bar,
                               right_ring.index(2 * stage + 1))
                elif RIGHT_TURNED:
                    _load_tile(right_desc, [expert * WIDTH + column * BLOCK_WIDTH, depth], bar,
                               right_ring.index(stage))
                else:
                    _load_tile(right_desc, [expert * DEPTH + depth, column * BLOCK_WIDTH], bar,
                               right_ring.index(stage))
            if GATHERS > 0:
                if TURNED:
                    token = gl.maximum(pair, 0) // TOP_K
                    source = rows_ptr + token.to(gl.int64)[:, None] * LINE + wide[None, :]
                    is_inside = (pair >= 0)[:, None] & (wide < LINE)[None, :]
                    if GATHERS == 1:
                        _load_rows(left_ring.index(stage), source, is_inside)
                    else:
                        _load_rows(right_ring.index(stage), source, is_inside)
                    if depth_step + 1 < steps:
                        pair = gl.load(pair_ptr + row + BLOCK_DEPTH + line)
                else:
                    _load_rows(left_ring.index(stage), source + depth, is_row)
                async_copy.commit_group()
                if step >= LAG:
                    async_copy.wait_group(LAG)
                    fence_async_shared()
                    _meet()
                    mbarrier.arrive(filled.index((step - LAG) % STAGES), count=1)
            step += 1
    if GATHERS > 0:
        async_copy.wait_group(0)
        fence_async_shared()
        _meet()
        for late in gl.static_range(LAG):
            if step - LAG + late >= 0:
                mbarrier.arrive(filled.index((step - LAG + late) % STAGES), count=1)


@gluon.jit
def _put_piece(out_desc, staging, value, first, row, column, AXES: gl.constexpr,
               PENDING: gl.constexpr):
    """Store a piece of a tile by TMA, once PENDING stores at most still read the staging memory."""
    ROWS: gl.constexpr = staging.shape[0]
    COLUMNS: gl.constexpr = staging.shape[1]
    tma.store_wait(PENDING)
    _meet()
    staging.store(value.to(out_desc.dtype))
    fence_async_shared()
    _meet()
    if AXES == "row, column":
        _store_tile(out_desc, [row, column], staging)
    elif AXES == "first, row, column":
        _store_tile(out_desc, [first, row, column], staging.reshape([1, ROWS, COLUMNS]))
    else:
        _store_tile(out_desc, [row, first, column], staging.reshape([ROWS, 1, COLUMNS]))


@gluon.jit
def _put(out_desc, staging, value, first, row, column, AXES: gl.constexpr, PART: gl.constexpr,
         PIECES: gl.constexpr):
    """Store a tile in PIECES side by side, each through a staging memory of its own."""
    if PIECES == 1:
        _put_piece(out_desc, staging.index(PART), value, first, row, column, AXES, 0)
    else:
        ROWS: gl.constexpr = value.shape[0]
        SPAN: gl.constexpr = value.shape[1] // 2
        one, two = gl.split(gl.permute(gl.reshape(value, [ROWS, 2, SPAN]), [0, 2, 1]))
        _put_piece(out_desc, staging.index(PART * 2), one, first, row, column, AXES, 1)
        _put_piece(out_desc, staging.index(PART * 2 + 1), two, first, row, column + SPAN, AXES, 1)


@gluon.jit
def _consume(out_desc, kept_desc, bias_ptr, left_ring, right_ring, staging, filled, emptied,
             tile_expert_ptr, num_tiles_ptr, first_tile_ptr, total_ptr, first_tile, kept_tiles,
             LEFT: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
             NUM_EXPERTS: gl.constexpr, TURNED: gl.constexpr, RIGHT_TURNED: gl.constexpr,
             PAIRED: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATES: gl.constexpr,
             KEEPS: gl.constexpr, ACT: gl.constexpr, SCALE: gl.constexpr, HAS_GATE: gl.constexpr,
             GATES_ITSELF: gl.constexpr, GATE_LOW: gl.constexpr, GATE_HIGH: gl.constexpr,
             UP_LOW: gl.constexpr, UP_HIGH: gl.constexpr, UP_OFFSET: gl.constexpr,
             COLUMN_TILES: gl.constexpr, DEPTH_STEPS: gl.constexpr, BLOCK_WIDTH: gl.constexpr,
             BLOCK_DEPTH: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
             STAGES: gl.constexpr, SKEW: gl.constexpr, PIECES: gl.constexpr, PART: gl.constexpr,
             PART_ROWS: gl.constexpr):
    """Multiply PART_ROWS of each tile's rows, the PART-th of them."""
    HALF: gl.constexpr = BLOCK_WIDTH // 2
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BLOCK_WIDTH, 16])
    row_tiles, count = _count_tiles(num_tiles_ptr, first_tile, LEFT, NUM_EXPERTS, TURNED, COLUMN_TILES)
    if PART * SKEW > 0:
        if gl.program_id(0) < count:  # one part ends its tiles later, and multiplies while the other stores
            mbarrier.wait(filled.index(SKEW), 0)
    step = 0
    for number in range(gl.program_id(0), count, PROGRAMS):
        tile, column, expert, first_row, steps = _locate(
            number, row_tiles, first_tile, tile_expert_ptr, first_tile_ptr, total_ptr, TURNED,
            COLUMN_TILES, DEPTH_STEPS, BLOCK_DEPTH, GROUP)
        sums = gl.zeros([PART_ROWS, BLOCK_WIDTH], gl.float32, sums_layout)
        for depth_step in range(steps):
            stage = step % STAGES
            mbarrier.wait(filled.index(stage), step // STAGES & 1)
            left = left_ring.index(stage)
            right = right_ring.index(stage)
            if TURNED:
                left = left.permute([1, 0])
            if PART_ROWS != BLOCK_ROWS:
                left = left.slice(PART * PART_ROWS, PART_ROWS, 0)
            if RIGHT_TURNED:
                right = right.permute([1, 0])
            sums = warpgroup_mma(left, right, sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=(sums,))
            if depth_step > 0:
                _meet()
                mbarrier.arrive(emptied.index((step - 1) % STAGES), count=1)
            step += 1
        sums = warpgroup_mma_wait(0, deps=(sums,))
        if steps > 0:
            _meet()
            mbarrier.arrive(emptied.index((step - 1) % STAGES), count=1)
        if HAS_BIAS:
            within = gl.arange(0, BLOCK_WIDTH, gl.SliceLayout(0, sums_layout))
            if PAIRED:
                narrow = column * HALF + within % HALF
                wide = narrow + within // HALF * (WIDTH // 2)
                is_inside = narrow < WIDTH // 2
            else:
                wide = column * BLOCK_WIDTH + within
                is_inside = wide < WIDTH
            bias = gl.load(bias_ptr + expert * WIDTH + wide, mask=is_inside, other=0.0)
            sums = sums + bias.to(gl.float32)[None, :]
        one, two = gl.split(gl.permute(gl.reshape(sums, [PART_ROWS, 2, HALF]), [0, 2, 1]))
        row = tile * BLOCK_ROWS + PART * PART_ROWS
        if TURNED:
            _put(out_desc, staging, one, expert, row, column * BLOCK_WIDTH, "first, row, column", PART, PIECES)
            _put(out_desc, staging, two, expert, row, column * BLOCK_WIDTH + HALF, "first, row, column", PART, PIECES)
        elif PAIRED:
            if KEEPS:
                if tile < kept_tiles:
                    _put(kept_desc, staging, one, 0, row, column * HALF, "row, first, column", PART, PIECES)
                    _put(kept_desc, staging, two, 1, row, column * HALF, "row, first, column", PART, PIECES)
            if ACTIVATES:
                value, _, _ = _expert_act(one, two, ACT, SCALE, HAS_GATE, GATES_ITSELF, GATE_LOW, GATE_HIGH,
                                          UP_LOW, UP_HIGH, UP_OFFSET)
                _put(out_desc, staging, value, 0, row, column * HALF, "row, column", PART, PIECES)
        else:
            if KEEPS:
                if tile < kept_tiles:
                    _put(kept_desc, staging, one, 0, row, column * BLOCK_WIDTH, "row, column", PART, PIECES)
                    _put(kept_desc, staging, two, 0, row, column * BLOCK_WIDTH + HALF, "row, column", PART, PIECES)
            if ACTIVATES:
                one, _, _ = _expert_act(one, one, ACT, SCALE, HAS_GATE, GATES_ITSELF, GATE_LOW, GATE_HIGH,
                                        UP_LOW, UP_HIGH, UP_OFFSET)
                two, _, _ = _expert_act(two, two, ACT, SCALE, HAS_GATE, GATES_ITSELF, GATE_LOW, GATE_HIGH,
                                        UP_LOW, UP_HIGH, UP_OFFSET)
            _put(out_desc, staging, one, 0, row, column * BLOCK_WIDTH, "row, column", PART, PIECES)
            _put(out_desc, staging, two, 0, row, column * BLOCK_WIDTH + HALF, "row, column", PART, PIECES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["first_tile", "kept_tiles"])
def multiply(left_desc, right_desc, out_desc, kept_desc, rows_ptr, pair_ptr, bias_ptr,
             tile_expert_ptr, num_tiles_ptr, first_tile_ptr, total_ptr, first_tile, kept_tiles,
             LEFT: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
             NUM_EXPERTS: gl.constexpr, TOP_K: gl.constexpr, GATHERS: gl.constexpr,
             TURNED: gl.constexpr, RIGHT_TURNED: gl.constexpr, PAIRED: gl.constexpr,
             HAS_BIAS: gl.constexpr, ACTIVATES: gl.constexpr, KEEPS: gl.constexpr,
             ACT: gl.constexpr, SCALE: gl.constexpr, HAS_GATE: gl.constexpr,
             GATES_ITSELF: gl.constexpr, GATE_LOW: gl.constexpr, GATE_HIGH: gl.constexpr,
             UP_LOW: gl.constexpr, UP_HIGH: gl.constexpr, UP_OFFSET: gl.constexpr,
             BLOCK_WIDTH: gl.constexpr, BLOCK_DEPTH: gl.constexpr, GROUP: gl.constexpr,
             PROGRAMS: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
             SKEW: gl.constexpr, PIECES: gl.constexpr, CONSUMERS: gl.constexpr,
             PRODUCER_WARPS: gl.constexpr, num_warps: gl.constexpr):
    """Multiply row tiles with experts' matrices, or experts' rows with each other.

    GATHERS: 0 none, 1 the left operand's rows are read by token, 2 the right one's (if TURNED).
    RIGHT_TURNED: matrices lie as [E, WIDTH, DEPTH]. PAIRED: columns are gates, then ups; a tile takes
    BLOCK_WIDTH / 2 of both. ACTIVATES stores the activation, KEEPS the product of the first kept_tiles
    in `kept` as well. Rows of `out` count from first_tile.
    """
    PART_ROWS: gl.constexpr = BLOCK_ROWS // CONSUMERS
    SPAN: gl.constexpr = BLOCK_WIDTH // 2 if PAIRED else BLOCK_WIDTH
    COLUMNS: gl.constexpr = WIDTH // 2 if PAIRED else WIDTH
    COLUMN_TILES: gl.constexpr = (COLUMNS + SPAN - 1) // SPAN
    DEPTH_STEPS: gl.constexpr = DEPTH // BLOCK_DEPTH
    kind: gl.constexpr = left_desc.dtype
    left_ring = gl.allocate_shared_memory(kind, [STAGES] + left_desc.block_type.shape, left_desc.layout)
    if PAIRED:
        right_ring = gl.allocate_shared_memory(
            kind, [2 * STAGES] + right_desc.block_type.shape, right_desc.layout)
        if _HAS_SHORT_NAMES:
            pairs_ring = right_ring.reinterpret(kind, [STAGES, BLOCK_DEPTH, BLOCK_WIDTH], right_desc.layout)
        else:
            pairs_ring = right_ring._reinterpret(kind, [STAGES, BLOCK_DEPTH, BLOCK_WIDTH], right_desc.layout)
    else:
        right_ring = gl.allocate_shared_memory(
            kind, [STAGES] + right_desc.block_type.shape, right_desc.layout)
        pairs_ring = right_ring
    staging_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    staging = gl.allocate_shared_memory(
        kind, [CONSUMERS * PIECES, PART_ROWS, BLOCK_WIDTH // 2 // PIECES], staging_layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), 2 if GATHERS > 0 else 1)
        mbarrier.init(emptied.index(stage), CONSUMERS)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (out_desc, kept_desc, bias_ptr, left_ring, pairs_ring, staging, filled, emptied,
                        tile_expert_ptr, num_tiles_ptr, first_tile_ptr, total_ptr, first_tile, kept_tiles, LEFT,
                        DEPTH, WIDTH, NUM_EXPERTS, TURNED, RIGHT_TURNED, PAIRED, HAS_BIAS, ACTIVATES, KEEPS, ACT,
                        SCALE, HAS_GATE, GATES_ITSELF, GATE_LOW, GATE_HIGH, UP_LOW, UP_HIGH, UP_OFFSET,
                        COLUMN_TILES, DEPTH_STEPS, BLOCK_WIDTH, BLOCK_DEPTH, GROUP, PROGRAMS, STAGES, SKEW, PIECES,
                        0, PART_ROWS)),
            (_consume, (out_desc, kept_desc, bias_ptr, left_ring, pairs_ring, staging, filled, emptied,
                        tile_expert_ptr, num_tiles_ptr, first_tile_ptr, total_ptr, first_tile, kept_tiles, LEFT,
                        DEPTH, WIDTH, NUM_EXPERTS, TURNED, RIGHT_TURNED, PAIRED, HAS_BIAS, ACTIVATES, KEEPS, ACT,
                        SCALE, HAS_GATE, GATES_ITSELF, GATE_LOW, GATE_HIGH, UP_LOW, UP_HIGH, UP_OFFSET,
                        COLUMN_TILES, DEPTH_STEPS, BLOCK_WIDTH, BLOCK_DEPTH, GROUP, PROGRAMS, STAGES, SKEW, PIECES,
                        1, PART_ROWS)),
            (_produce, (left_desc, right_desc, rows_ptr, pair_ptr, left_ring, right_ring, filled, emptied,
                        tile_expert_ptr, num_tiles_ptr, first_tile_ptr, total_ptr, first_tile, LEFT, DEPTH, WIDTH,
                        NUM_EXPERTS, TOP_K, GATHERS, TURNED, RIGHT_TURNED, PAIRED, COLUMN_TILES, DEPTH_STEPS,
                        BLOCK_WIDTH, BLOCK_DEPTH, GROUP, PROGRAMS, STAGES, LAG)),
        ], [4, PRODUCER_WARPS], [216 if GATHERS > 0 else 232, 72 if GATHERS > 0 else 40])
    else:
        gl.warp_specialize([
            (_consume, (out_desc, kept_desc, bias_ptr, left_ring, pairs_ring, staging, filled, emptied,
                        tile_expert_ptr, num_tiles_ptr, first_tile_ptr, total_ptr, first_tile, kept_tiles, LEFT,
                        DEPTH, WIDTH, NUM_EXPERTS, TURNED, RIGHT_TURNED, PAIRED, HAS_BIAS, ACTIVATES, KEEPS, ACT,
                        SCALE, HAS_GATE, GATES_ITSELF, GATE_LOW, GATE_HIGH, UP_LOW, UP_HIGH, UP_OFFSET,
                        COLUMN_TILES, DEPTH_STEPS, BLOCK_WIDTH, BLOCK_DEPTH, GROUP, PROGRAMS, STAGES, SKEW, PIECES,
                        0, PART_ROWS)),
            (_produce, (left_desc, right_desc, rows_ptr, pair_ptr, left_ring, right_ring, filled, emptied,
                        tile_expert_ptr, num_tiles_ptr, first_tile_ptr, total_ptr, first_tile, LEFT, DEPTH, WIDTH,
                        NUM_EXPERTS, TOP_K, GATHERS, TURNED, RIGHT_TURNED, PAIRED, COLUMN_TILES, DEPTH_STEPS,
                        BLOCK_WIDTH, BLOCK_DEPTH, GROUP, PROGRAMS, STAGES, LAG)),
        ], [PRODUCER_WARPS], [72 if GATHERS > 0 else 40])
