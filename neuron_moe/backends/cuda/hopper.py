"""Warp-specialised grouped products for Hopper GPUs, in Gluon.

Two kinds of product over rows sorted as in `kernels`: rows with their experts' matrices, and, for
each expert, its rows of one buffer, transposed, with its rows of another. One program runs on each
multiprocessor and walks over tiles of 128 x `tile.width`. Its parts: a warpgroup that fills a ring
of stages, by TMA, or by asynchronous copies of each row where rows are gathered by token; and two
warpgroups that multiply 64 of the 128 rows each, apply bias and activation in registers, and store
by TMA. Barriers in shared memory say when a stage is filled and when both have read it. Gathered
rows can be stored in their order as well, from the ring: a copy for a later product.

Rows of padding are computed and stored: they are rows of the expert's last tile. Depths are
multiples of 64; widths may end inside a tile, where TMA reads zeros and stores nothing.
"""

from triton.experimental.gluon import jit
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

BLOCK_ROWS = gl.constexpr(128)  # of a tile
PART_ROWS = gl.constexpr(64)  # of a consumer
BLOCK_DEPTH = gl.constexpr(64)  # of a step
HAS_NEW_NAMES = gl.constexpr(hasattr(tma, "async_load"))  # Triton 3.9 renamed what 3.6 has
_load_tile = tma.async_load if HAS_NEW_NAMES.value else tma.async_copy_global_to_shared
_store_tile = tma.async_store if HAS_NEW_NAMES.value else tma.async_copy_shared_to_global
_load_rows = (
    async_copy.async_load if HAS_NEW_NAMES.value else async_copy.async_copy_global_to_shared
)
_meet = gl.barrier if HAS_NEW_NAMES.value else gl.thread_barrier


@jit
def _locate(
    number, row_tiles, first_tile, tile_expert_ptr, first_tile_ptr, total_ptr, P: gl.constexpr
):
    """Return a tile's row and column, expert, the first row it sums over, and its steps.

    Row tiles of an expert follow each other, in groups as equal as can be, so that its matrices are
    read once for each group.
    """
    if P.sums_rows:
        expert = number // (row_tiles * P.column_tiles)
        within = number % (row_tiles * P.column_tiles)
        GROUP: gl.constexpr = P.tile.group
        tile, column = _tile_of(within, row_tiles, P.column_tiles, GROUP)
        first_row = gl.load(first_tile_ptr + expert) * BLOCK_ROWS
        steps = (gl.load(total_ptr + expert) + BLOCK_DEPTH - 1) // BLOCK_DEPTH
    else:
        expert = gl.load(tile_expert_ptr + first_tile + number // P.column_tiles)
        before = gl.load(first_tile_ptr + expert) - first_tile
        end = before + (gl.load(total_ptr + expert) + BLOCK_ROWS - 1) // BLOCK_ROWS
        before = gl.maximum(before, 0)
        groups = (end - before + P.tile.group - 1) // P.tile.group
        group = (end - before + groups - 1) // groups
        within = number - before * P.column_tiles
        tile, column = _tile_of(within, end - before, P.column_tiles, group)
        tile += before
        first_row = 0
        steps = P.depth // BLOCK_DEPTH
    return tile, column, expert, first_row, steps


@jit
def _count_tiles(num_tiles_ptr, first_tile, P: gl.constexpr):
    """Return the row tiles, of one expert if rows are summed, and all tiles."""
    if P.sums_rows:
        row_tiles = (P.height + BLOCK_ROWS - 1) // BLOCK_ROWS
        count = row_tiles * P.column_tiles * P.num_experts
    else:
        row_tiles = gl.maximum(gl.load(num_tiles_ptr) - first_tile, 0)
        count = row_tiles * P.column_tiles
    return row_tiles, count


@jit
def _load_stage(
    left_desc,
    right_desc,
    left_ring,
    right_ring,
    filled,
    stage,
    tile,
    column,
    expert,
    first_row,
    depth,
    P: gl.constexpr,
):
    """Issue the TMA loads of the operands of a step."""
    bar = filled.index(stage)
    mbarrier.expect(bar, P.loaded_bytes)
    if P.sums_rows:
        if P.gathers != "left":
            place = [first_row + depth, tile * BLOCK_ROWS]
            _load_tile(left_desc, place, bar, left_ring.index(stage))
        if P.gathers != "right":
            place = [first_row + depth, column * P.tile.width]
            _load_tile(right_desc, place, bar, right_ring.index(stage))
    else:
        if P.gathers != "left":
            _load_tile(left_desc, [tile * BLOCK_ROWS, depth], bar, left_ring.index(stage))
        if P.is_paired and P.right_is_transposed:
            row = expert * P.width + column * P.span
            _load_tile(right_desc, [row, depth], bar, right_ring.index(2 * stage))
            place = [row + P.width // 2, depth]
            _load_tile(right_desc, place, bar, right_ring.index(2 * stage + 1))
        elif P.is_paired:
            row = expert * P.depth + depth
            _load_tile(right_desc, [row, column * P.span], bar, right_ring.index(2 * stage))
            place = [row, P.width // 2 + column * P.span]
            _load_tile(right_desc, place, bar, right_ring.index(2 * stage + 1))
        elif P.right_is_transposed:
            place = [expert * P.width + column * P.tile.width, depth]
            _load_tile(right_desc, place, bar, right_ring.index(stage))
        else:
            place = [expert * P.depth + depth, column * P.tile.width]
            _load_tile(right_desc, place, bar, right_ring.index(stage))


@jit
def _produce(
    left_desc,
    right_desc,
    rows_ptr,
    pair_ptr,
    left_ring,
    right_ring,
    filled,
    emptied,
    tile_expert_ptr,
    num_tiles_ptr,
    first_tile_ptr,
    total_ptr,
    first_tile,
    P: gl.constexpr,
):
    """Fill stage after stage. Gathered rows arrive by themselves: nothing waits for them here."""
    row_tiles, count = _count_tiles(num_tiles_ptr, first_tile, P)
    step = 0
    for number in range(gl.program_id(0), count, P.programs):
        tile, column, expert, first_row, steps = _locate(
            number, row_tiles, first_tile, tile_expert_ptr, first_tile_ptr, total_ptr, P
        )
        if P.gathers != "none":
            lanes: gl.constexpr = [256 // P.gathered_columns, P.gathered_columns // 8]
            layout: gl.constexpr = gl.BlockedLayout([1, 8], lanes, [gl.num_warps(), 1], [1, 0])
            line = gl.arange(0, P.gathered_rows, gl.SliceLayout(1, layout))
            wide = gl.arange(0, P.gathered_columns, gl.SliceLayout(0, layout))
            if P.sums_rows:
                if P.gathers == "left":
                    wide += tile * BLOCK_ROWS
                else:
                    wide += column * P.tile.width
                is_first = line < steps * BLOCK_DEPTH
                pair = gl.load(pair_ptr + first_row + line, mask=is_first, other=-1)
            else:
                pair = gl.load(pair_ptr + (first_tile + tile) * BLOCK_ROWS + line)
        for depth_step in range(steps):
            stage = step % P.tile.stages
            depth = depth_step * BLOCK_DEPTH
            mbarrier.wait(emptied.index(stage), (step // P.tile.stages & 1) ^ 1)
            _load_stage(
                left_desc,
                right_desc,
                left_ring,
                right_ring,
                filled,
                stage,
                tile,
                column,
                expert,
                first_row,
                depth,
                P,
            )
            if P.gathers != "none":
                token = (gl.maximum(pair, 0) // P.top_k).to(gl.int64)
                source = rows_ptr + token[:, None] * P.line + wide[None, :]
                is_row = (pair >= 0)[:, None]
                if P.gathers == "right":
                    _load_rows(right_ring.index(stage), source, is_row & (wide < P.line)[None, :])
                elif P.sums_rows:
                    _load_rows(left_ring.index(stage), source, is_row & (wide < P.line)[None, :])
                else:
                    _load_rows(left_ring.index(stage), source + depth, is_row)
                async_copy.mbarrier_arrive(filled.index(stage), increment_count=False)
                if P.sums_rows:
                    if depth_step + 1 < steps:
                        pair = gl.load(pair_ptr + first_row + depth + BLOCK_DEPTH + line)
            step += 1


@jit
def _put_piece(out_desc, staging, value, first, row, column, AXES: gl.constexpr):
    """Store a piece of a tile by TMA, once the one before the last has left its staging memory."""
    ROWS: gl.constexpr = staging.shape[0]
    COLUMNS: gl.constexpr = staging.shape[1]
    tma.store_wait(1)
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


@jit
def _halve(value):
    """Return the left and the right half of a tile's columns."""
    ROWS: gl.constexpr = value.shape[0]
    COLUMNS: gl.constexpr = value.shape[1]
    return gl.split(gl.permute(gl.reshape(value, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))


@jit
def _put(out_desc, staging, value, first, row, column, AXES: gl.constexpr, PART: gl.constexpr):
    """Store half a tile in two pieces, each through a staging memory of its own."""
    one, two = _halve(value)
    _put_piece(out_desc, staging.index(2 * PART), one, first, row, column, AXES)
    column += value.shape[1] // 2
    _put_piece(out_desc, staging.index(2 * PART + 1), two, first, row, column, AXES)


@jit
def _activate(gate, up, P: gl.constexpr):
    """Return what the down projection takes."""
    FORMULA: gl.constexpr = P.formula
    value, _, _ = _expert_act(gate, up, FORMULA)
    return value


@jit
def _finish(
    out_desc,
    kept_desc,
    staging,
    sums,
    tile,
    column,
    expert,
    kept_tiles,
    PART: gl.constexpr,
    P: gl.constexpr,
):
    """Activate and store a tile's sums."""
    one, two = _halve(sums)
    row = tile * BLOCK_ROWS + PART * PART_ROWS
    place = column * P.span
    if P.sums_rows:
        _put(out_desc, staging, one, expert, row, place, "first, row, column", PART)
        place += P.tile.width // 2
        _put(out_desc, staging, two, expert, row, place, "first, row, column", PART)
    elif P.is_paired:
        if P.keeps:
            if tile < kept_tiles:
                _put(kept_desc, staging, one, 0, row, place, "row, first, column", PART)
                _put(kept_desc, staging, two, 1, row, place, "row, first, column", PART)
        _put(out_desc, staging, _activate(one, two, P), 0, row, place, "row, column", PART)
    else:
        next_place = place + P.tile.width // 2
        if P.keeps:
            if tile < kept_tiles:
                _put(kept_desc, staging, one, 0, row, place, "row, column", PART)
                _put(kept_desc, staging, two, 0, row, next_place, "row, column", PART)
        if P.activates:
            one = _activate(one, one, P)
            two = _activate(two, two, P)
        _put(out_desc, staging, one, 0, row, place, "row, column", PART)
        _put(out_desc, staging, two, 0, row, next_place, "row, column", PART)


@jit
def _multiply_steps(
    copy_desc,
    left_ring,
    right_ring,
    filled,
    emptied,
    tile,
    column,
    step,
    steps,
    layout: gl.constexpr,
    PART: gl.constexpr,
    P: gl.constexpr,
):
    """Return the sums of a tile, and the number of the step after it."""
    BLOCK_WIDTH: gl.constexpr = P.tile.width
    COPIES: gl.constexpr = P.copies and PART == 0
    sums = gl.zeros([PART_ROWS, BLOCK_WIDTH], gl.float32, layout)
    for depth_step in range(steps):
        stage = step % P.tile.stages
        mbarrier.wait(filled.index(stage), step // P.tile.stages & 1)
        if P.gathers != "none":
            fence_async_shared()  # gathered rows were not written by TMA
        left = left_ring.index(stage)
        right = right_ring.index(stage)
        if P.sums_rows:
            left = left.permute([1, 0])
        left = left.slice(PART * PART_ROWS, PART_ROWS, 0)
        if P.right_is_transposed:
            right = right.permute([1, 0])
        if COPIES:
            if column == 0:
                place = [tile * BLOCK_ROWS, depth_step * BLOCK_DEPTH]
                _store_tile(copy_desc, place, left_ring.index(stage))
        sums = warpgroup_mma(left, right, sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=(sums,))
        if COPIES:
            tma.store_wait(1)  # the step before is read
        if depth_step > 0:
            _meet()
            mbarrier.arrive(emptied.index((step - 1) % P.tile.stages), count=1)
        step += 1
    sums = warpgroup_mma_wait(0, deps=(sums,))
    if COPIES:
        tma.store_wait(0)
    if steps > 0:
        _meet()
        mbarrier.arrive(emptied.index((step - 1) % P.tile.stages), count=1)
    return sums, step


@jit
def _consume(
    out_desc,
    kept_desc,
    copy_desc,
    bias_ptr,
    left_ring,
    right_ring,
    staging,
    filled,
    emptied,
    tile_expert_ptr,
    num_tiles_ptr,
    first_tile_ptr,
    total_ptr,
    first_tile,
    kept_tiles,
    PART: gl.constexpr,
    P: gl.constexpr,
):
    """Multiply the PART-th rows of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, P.tile.width, 16]
    )
    row_tiles, count = _count_tiles(num_tiles_ptr, first_tile, P)
    step = 0
    for number in range(gl.program_id(0), count, P.programs):
        tile, column, expert, _, steps = _locate(
            number, row_tiles, first_tile, tile_expert_ptr, first_tile_ptr, total_ptr, P
        )
        sums, step = _multiply_steps(
            copy_desc,
            left_ring,
            right_ring,
            filled,
            emptied,
            tile,
            column,
            step,
            steps,
            layout,
            PART,
            P,
        )
        if P.has_bias:
            within = gl.arange(0, P.tile.width, gl.SliceLayout(0, layout))
            narrow = column * P.span + within % P.span
            wide = narrow + within // P.span * (P.width // 2)
            inside = narrow < P.columns
            bias = gl.load(bias_ptr + expert * P.width + wide, mask=inside, other=0.0)
            sums = sums + bias.to(gl.float32)[None, :]
        _finish(out_desc, kept_desc, staging, sums, tile, column, expert, kept_tiles, PART, P)
    tma.store_wait(0)


@jit(do_not_specialize=["first_tile", "kept_tiles"])
def multiply(
    left_desc,
    right_desc,
    out_desc,
    kept_desc,
    copy_desc,
    rows_ptr,
    pair_ptr,
    bias_ptr,
    tile_expert_ptr,
    num_tiles_ptr,
    first_tile_ptr,
    total_ptr,
    first_tile,
    kept_tiles,
    P: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute the product that P describes, a `products.Product`.

    Rows of `out` count from first_tile; kept_tiles of them keep the product before activation.
    """
    kind: gl.constexpr = left_desc.dtype
    left_block: gl.constexpr = left_desc.block_type.shape
    right_block: gl.constexpr = right_desc.block_type.shape
    left_ring = gl.allocate_shared_memory(kind, [P.tile.stages] + left_block, left_desc.layout)
    rights: gl.constexpr = 2 * P.tile.stages if P.is_paired else P.tile.stages
    right_ring = gl.allocate_shared_memory(kind, [rights] + right_block, right_desc.layout)
    whole_ring = right_ring
    if P.is_paired:  # gates and ups of a stage are side by side: one operand
        whole: gl.constexpr = [P.tile.stages] + P.right_operand
        if HAS_NEW_NAMES:
            whole_ring = right_ring.reinterpret(kind, whole, right_desc.layout)
        else:
            whole_ring = right_ring._reinterpret(kind, whole, right_desc.layout)
    staging_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    staging = gl.allocate_shared_memory(kind, [4, PART_ROWS, P.piece_width], staging_layout)
    filled = gl.allocate_shared_memory(gl.int64, [P.tile.stages, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [P.tile.stages, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = P.tile.stages
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), P.arrivals)
        mbarrier.init(emptied.index(stage), 2)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_desc,
                    kept_desc,
                    copy_desc,
                    bias_ptr,
                    left_ring,
                    whole_ring,
                    staging,
                    filled,
                    emptied,
                    tile_expert_ptr,
                    num_tiles_ptr,
                    first_tile_ptr,
                    total_ptr,
                    first_tile,
                    kept_tiles,
                    0,
                    P,
                ),
            ),
            (
                _consume,
                (
                    out_desc,
                    kept_desc,
                    copy_desc,
                    bias_ptr,
                    left_ring,
                    whole_ring,
                    staging,
                    filled,
                    emptied,
                    tile_expert_ptr,
                    num_tiles_ptr,
                    first_tile_ptr,
                    total_ptr,
                    first_tile,
                    kept_tiles,
                    1,
                    P,
                ),
            ),
            (
                _produce,
                (
                    left_desc,
                    right_desc,
                    rows_ptr,
                    pair_ptr,
                    left_ring,
                    right_ring,
                    filled,
                    emptied,
                    tile_expert_ptr,
                    num_tiles_ptr,
                    first_tile_ptr,
                    total_ptr,
                    first_tile,
                    P,
                ),
            ),
        ],
        [4, P.producer_warps],
        [P.consumer_registers, P.producer_registers],
    )
