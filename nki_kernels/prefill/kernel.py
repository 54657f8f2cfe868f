"""Blockwise MoE prefill: every slot's row through its expert, once.

For slot n of a block of expert e, with token t = slots[n]:

    g = x[t] @ Wg[e] + bg[e]      u = x[t] @ Wu[e] + bu[e]
    y[n] = (act(clamp(g)) * (clamp(u) + up_offset)) @ Wd[e] + bd[e]

or, without a gate, y[n] = act(clamp(u)) @ Wd[e] + bd[e] with weights [E, H, I] and biases [E, I];
scaled by slot_scale[n] before (pre) or after (post) if asked; `combine` adds the slots of a token.

Inputs and outputs (H hidden, I intermediate of this rank, E experts of it, L loops):

    hidden          [T, H]       bfloat16  HBM  tokens
    gate_up         [E, H, 2I]   weights   HBM  gate columns first
    down            [E, I, H]    weights   HBM
    slots           [N*B]        int32     HBM  token of each slot, -1 for padding
    work_expert     [C, V]       int32     HBM  work tiles.WorkTileLists
    work_row_tiles  [C, V, G]    int32     HBM
    class_iterations  [1, L]     int32     HBM
    gate_up_bias    [E, 2I]      float32   HBM  optional
    down_bias       [E, H]       bfloat16  HBM  optional; with scales [E, 3, H] of bias_terms
    gate_up_scale   [E, 2I]      float32   HBM  optional, of output channels
    down_scale      [E, 3, H]    bfloat16  HBM  optional, three terms that add up to the scale
    slot_scale      [N*B]        float32   HBM  optional
    -> output       [P, N*B, H]  bfloat16  HBM  P partial sums; padding slots are not defined.
                    where spare places stand for what is missing, rows of `output_tiles`, the last
                    one zeros

On chip: weights [h, H/h, 2, I] and [i, I/i, H] with a partition owning consecutive rows (one run a
descriptor), rows [R, H] with tokens on partitions, transposed rows [h, H/h, R], inner [i, I/i, R].

Limits: `make_config`. Bytes: weights once per work tile, a row in and a row out per slot. Matmul
columns per row tile: R (2 H/h I/i) in, H I/i out, and R per tile of H for the transposes. The
next work tile's weights, and the rows after that, load while one computes.

Steps, on each core:
    1. Allocate everything that stays (memory.py), load the work tiles of the core's lane.
    2. Prologue: weights and rows of work tile 0, the first rows of work tile 1.
    3. Per loop (one for each pair of work tile sizes), per iteration: two work tiles, by parity.
    4. A work tile: gate and up projections and the activation, part by part (`_go_in`); the first
       tile of the next work tile is transposed; then the down projection, part by part, and stores
       (`_go_out`). Behind each part comes the load of the part that takes its buffer.
With the hidden axis split, step 4 is that of exchange.py: two work tiles, interleaved.

Sources: NKI 0.6 ISA; Trainium 2 architecture guide; the PE transposes and the swapped operands of
the projections follow its matmul section.
"""

from __future__ import annotations

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.work_tiles import loops_of
from nki_kernels.prefill.buffers import (
    Buffers,
    Lists,
    Operands,
    fetch_iteration,
    fill_first,
    fill_later,
    fill_rest,
    look_ahead,
    look_at_expert,
    look_at_outputs,
    make_buffers,
    start_scales,
    start_work_tiles,
    work_tile_after,
)
from nki_kernels.prefill.config import (
    PrefillConfig,
    is_alone,
    iteration_pairs,
    num_partials,
    output_tiles,
)
from nki_kernels.prefill.exchange import clear_own, run_two_work_tiles, start_apart
from nki_kernels.prefill.loads import (
    gather_after,
    gather_early,
    gather_late,
    gather_rows,
    load_beside,
    load_down,
    load_gate_up,
    prepare_part,
)
from nki_kernels.prefill.stages import (
    project_in,
    project_out,
    spread_down_scale,
    store_rows,
    store_zeros,
    transpose_tile,
)


@nki.jit
def blockwise_moe(
    hidden: nl.NkiTensor,
    gate_up: nl.NkiTensor,
    down: nl.NkiTensor,
    slots: nl.NkiTensor,
    work_expert: nl.NkiTensor,
    work_row_tiles: nl.NkiTensor,
    class_iterations: nl.NkiTensor,
    config: PrefillConfig,
    gate_up_bias: Any = None,
    down_bias: Any = None,
    gate_up_scale: Any = None,
    down_scale: Any = None,
    slot_scale: Any = None,
) -> nl.NkiTensor:
    """Compute every slot that the work tiles name; see the module."""
    x = Operands(
        hidden,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        gate_up_scale,
        down_scale,
        slot_scale,
        make_output(config),
    )
    lists = Lists(
        slots,
        slot_scale,
        work_expert,
        work_row_tiles,
        class_iterations,
        lane_of(config),
    )
    return compute_work_tiles(make_buffers(config, x, []), lists)


def make_output(config: PrefillConfig, num_rows: int = 0) -> nl.NkiTensor:
    """Allocate the output [P, rows, H] in HBM, with as many rows as slots, or more."""
    num_rows = max(num_rows, output_tiles(config) * config.tile_rows)
    shape = (num_partials(config), num_rows, config.H)
    return nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)


def lane_of(config: PrefillConfig) -> int:
    """Return this core's row of the lists of work tiles."""
    return 0 if config.shard.num_lanes == 1 else nl.program_id(0)


def compute_work_tiles(b: Buffers, lists: Lists) -> nl.NkiTensor:
    """Compute every slot that the work tiles name; return the output."""
    config = b.config
    # `combine` reads these zeros for a slot that is missing; of a shared output one core writes.
    if config.loop.missing == "spare" and (config.shard.num_lanes == 1 or nl.program_id(0) == 0):
        store_zeros(b)
    _prologue(b, lists)
    begin: Any = 0
    for position in range(len(loops_of(config.loop.classes))):
        if is_alone(config.loop):
            begin = _run_alone(b, position, begin)
        else:
            _run_class(b, position)
    return b.x.output


def _run_alone(b: Buffers, position: int, begin: Any) -> Any:
    """Go through the work tiles of one loop in iterations that load for themselves, from a pair on;
    return where they end.
    """
    sizes, pairs = loops_of(b.config.loop.classes)[position], iteration_pairs(b.config.loop)
    for number in range(len(pairs)):
        # Where it is needed, not before: what comes behind waits for the register.
        end = nisa.register_alloc()
        nisa.register_load(end, b.ends[0][0:1, position, number : number + 1])
        _loop_over(b, sizes, begin, end, pairs[number])
        begin = end
    return begin


def _loop_over(b: Buffers, sizes: tuple[int, int], begin: Any, end: Any, pairs: int) -> None:
    """Loop over iterations of so many pairs of work tiles."""

    def one_iteration(pair: Any) -> None:
        fetch_iteration(b, pair, 2 * pairs)
        _iteration_prologue(b, sizes)
        for s in range(0, 2 * pairs, 2):
            if b.config.shard.splits_h:
                run_two_work_tiles(b, sizes, s)
            else:
                _run_work_tile(b, s, sizes)
                _run_work_tile(b, s + 1, sizes)

    nl.fori_loop(begin, end, one_iteration, step=pairs)


def _iteration_prologue(b: Buffers, sizes: tuple[int, int]) -> None:
    """Do what work tile 0 of an iteration expects to be done: its weights and rows, then those of
    work tile 1.
    """
    config, loop = b.config, b.config.loop
    if config.shard.splits_h:
        gather_rows(b, 0, 0)
        start_apart(b)
    else:
        _load_step(b, 0, 0)
        gather_rows(b, 0, 0)
    for j in range(1, min(sizes[0], loop.row_buffers)):
        gather_rows(b, 0, j)
    if loop.first_buffers == 2:
        gather_rows(b, 1, 0)
    if not config.shard.splits_h:
        _load_behind(b)
    transpose_tile(b, 0, 0)
    # The single buffer of first tiles is free now.
    if loop.first_buffers == 1:
        gather_rows(b, 1, 0)


def _load_behind(b: Buffers) -> None:
    """Load what the first work tile of an iteration needs beyond its weights, then the next one's.

    Rows that are issued first are first in the queues, as GpSimd touches experts after them.
    """
    loop = b.config.loop
    steps, buffers = loop.in_parts * loop.h_parts, range(loop.weight_buffers)
    experts_sb = b.fetched[0].own_sb[0:1, 0 : b.work_tiles]
    # Copied onto themselves: the loads below read them, and so wait until GpSimd has issued the
    # gathers before this.
    nisa.tensor_copy(dst=experts_sb, src=experts_sb, engine=nisa.engine.gpsimd)
    for work_tile in range(2):
        for step in buffers:
            if step > 0 and step // steps == work_tile:
                _load_step(b, 0, step)
        for part in buffers:
            if part // loop.out_parts == work_tile:
                _load_part(b, 0, part)


def _run_class(b: Buffers, position: int) -> None:
    """Go through the work tiles of one loop, two an iteration."""
    config = b.config
    sizes = loops_of(config.loop.classes)[position]

    def two_work_tiles(_iteration: int) -> None:
        if config.shard.splits_h:
            run_two_work_tiles(b, sizes)
        else:
            _run_work_tile(b, 0, sizes)
            _run_work_tile(b, 1, sizes)

    if config.loop.is_dynamic:
        iterations = nisa.register_alloc()
        nisa.register_load(iterations, b.iterations[0:1, position : position + 1])
        nl.fori_loop(0, iterations, two_work_tiles)
    else:
        # The last two work tiles are empty, for the iterations that look two ahead.
        for _iteration in range((b.expert_table.shape[1] - 2) // 2):
            two_work_tiles(_iteration)


def _prologue(b: Buffers, lists: Lists) -> None:
    """Do what work tile 0 expects to be done: its weights and rows, the first rows of work tile 1.

    The first rows come before the weights, which are used once they are transposed.
    """
    loop = b.config.loop
    fill_first(b, lists)
    if is_alone(loop):
        start_scales(b, lists)
        fill_later(b, lists)
        fill_rest(b, lists)
        clear_own(b)
        return
    start_work_tiles(b)
    gather_rows(b, 0, 0)
    start_scales(b, lists)
    # Once transposed, a single buffer of first tiles is free for that of work tile 1.
    waits = loop.first_buffers == 1
    if not waits:
        gather_rows(b, 1, 0)
    if b.config.shard.splits_h:
        start_apart(b)
        clear_own(b)
        fill_later(b, lists)
    else:
        for step in range(loop.weight_buffers):
            _load_step(b, 0, step)
        fill_later(b, lists)
        for part in range(loop.weight_buffers):
            _load_part(b, 0, part)
    for j in range(1, loop.row_buffers):
        gather_rows(b, 0, j)
    fill_rest(b, lists)
    transpose_tile(b, 0, 0)
    if waits:
        gather_rows(b, 1, 0)


def _run_work_tile(b: Buffers, s: int, sizes: tuple[int, int]) -> None:
    """Compute the row tiles of one work tile of an iteration, and load what the next two need.

    The first tile of the next work tile is transposed before this one's down projection, so that
    the tensor engine has work while the last activation is computed.
    """
    config = b.config
    following, alone = work_tile_after(b, s, 1), is_alone(config.loop)
    size, next_size = sizes[s % 2], sizes[1 - s % 2] if following >= 0 else 0
    if not alone:
        look_at_outputs(b, s)
    gather_early(b, s)
    # A smaller work tile leaves row buffers idle: the larger one after it fills them early.
    for j in range(size, min(next_size, config.loop.row_buffers)):
        gather_rows(b, following, j)
    _go_in(b, s, size, next_size)
    if following >= 0:
        transpose_tile(b, following, 0)
    # This work tile has used its expert and ids: they become those of the work tile two ahead,
    # whose first rows take the buffer that was just transposed.
    if not alone:
        look_ahead(b, s)
    gather_late(b, s)
    if config.has_scales:
        spread_down_scale(b, s)
    _go_out(b, s, size, s % 2 * sizes[0])


def _go_in(b: Buffers, s: int, size: int, next_size: int) -> None:
    """Do the gate and up projections of a work tile, part by part of the intermediate axis, and of
    the hidden axis inside.
    """
    loop = b.config.loop
    parts, h_parts, buffers = loop.in_parts, loop.h_parts, loop.weight_buffers
    last = b.config.i_axis.count - 1
    steps = parts * h_parts
    for step in range(steps):
        part, h_part = step // h_parts, step % h_parts
        buffer = (s * steps + step) % buffers
        beside = (s * parts + part) % buffers
        if h_part == 0:
            prepare_part(b, beside)
        # A part of weights meets all row tiles before the next part: its buffer is free the sooner.
        for j in range(size):
            for tile in range(last):
                project_in(b, buffer, beside, s, j, part, h_part, tile)
            # The next tile is transposed before the last product of this one, so that the engines
            # that copy it are done when its own products begin.
            if step == 0 and j + 1 < size:
                transpose_tile(b, s, j + 1)
                gather_after(b, s, j + 1, size, next_size)
            project_in(b, buffer, beside, s, j, part, h_part, last)
        # No load of gate and up weights needs this work tile's expert any more; the next one may
        # be for the work tile two ahead.
        if step == steps - 1 and not is_alone(loop):
            look_at_expert(b, s)
        _load_step(b, s, step + loop.weight_buffers)


def _go_out(b: Buffers, s: int, size: int, first_outer: int) -> None:
    """Do the down projection of a work tile, part by part of the hidden axis, and store its
    rows.
    """
    config = b.config
    parts = config.loop.out_parts
    for part in range(parts):
        for j in range(size):
            outer = (first_outer + j) % config.loop.outer_buffers
            # The columns of a row come part by part; its transfer needs all of them.
            project_out(b, s, j, part, outer)
            if part == parts - 1:
                store_rows(b, s, j, outer)
        _load_part(b, s, part + config.loop.weight_buffers)


def _load_step(b: Buffers, s: int, step: int) -> None:
    """Load a part of the gate and up weights, counted from the first one of work tile s."""
    loop = b.config.loop
    steps = loop.in_parts * loop.h_parts
    work_tile = work_tile_after(b, s, step // steps)
    if work_tile < 0:
        return
    expert = b.expert[work_tile]
    part, h_part = step % steps // loop.h_parts, step % loop.h_parts
    if h_part == 0:
        beside = (s * loop.in_parts + step // loop.h_parts) % loop.weight_buffers
        load_beside(b, expert, beside, part)
    load_gate_up(b, expert, (s * steps + step) % loop.weight_buffers, part, h_part)


def _load_part(b: Buffers, s: int, part: int) -> None:
    """Load a part of the down weights, counted from the first one of work tile s."""
    config = b.config
    parts = config.loop.out_parts
    work_tile, buffer = (
        work_tile_after(b, s, part // parts),
        (s * parts + part) % config.loop.weight_buffers,
    )
    if is_alone(config.loop):
        if work_tile >= 0:
            load_down(b, b.expert[work_tile], buffer, part % parts, work_tile)
        return
    # `expert` of this parity is that of the work tile two ahead by now (`look_at_expert`);
    # `expert_out` keeps those whose down weights are still to come.
    expert = b.expert[s] if part // parts == 2 else b.expert_out[work_tile]
    load_down(b, expert, buffer, part % parts, work_tile)
