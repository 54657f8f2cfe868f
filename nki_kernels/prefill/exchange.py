"""The prefill kernel with the hidden axis split: cores add up each other's projections.

Both cores take every work tile. Each multiplies its half of the hidden axis, gives the other what
comes of it for the gate and up projections, computes the activation of the sum, and then its half
of the output columns. An exchange takes about as long as a small work tile computes, so two work
tiles are in flight: the second goes in while the first is exchanged, the first goes out while the
second is.

Weights of the work tile two ahead are prefetched as soon as their buffers are free.

Steps of an iteration:
    1. Both work tiles in turn: multiply this core's share of the rows, send off the projections,
       load the gate and up weights of the work tile two ahead (its buffer of weights is the work
       tile's own).
    2. Both work tiles in turn: add up what both cores computed, activate, project out, store, load
       the down weights of the work tile two ahead.

Legend: s parity of a work tile, j row tile of a work tile; h, i partitions of a tile of H or I.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.tiles import copy_alternating, rows_of
from nki_kernels.prefill.buffers import (
    Buffers,
    look_ahead,
    look_at_expert,
    look_at_outputs,
    work_tile_after,
)
from nki_kernels.prefill.config import is_alone
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
    finish_in,
    inner_buffer,
    inner_turn,
    multiply_in,
    project_out,
    spread_down_scale,
    store_rows,
    transpose_tile,
)


def start_apart(b: Buffers) -> None:
    """Load the weights of the first two work tiles; rows are on their way."""
    for s in range(2):
        load_beside(b, b.expert[s], s, 0)
        load_gate_up(b, b.expert[s], s, 0, 0)
    # Both work tiles go in before either goes out.
    for s in range(2):
        load_down(b, b.expert[s], s, 0, s)


def clear_own(b: Buffers) -> None:
    """Clear what is exchanged: the last tile goes whole, and past its end there must be numbers."""
    if b.config.i_axis.tail < b.config.i_axis.rows:
        for own_sb in b.own:
            nisa.memset(dst=own_sb, value=0.0)


def run_two_work_tiles(b: Buffers, sizes: tuple[int, int], first: int = 0) -> None:
    """Compute the row tiles of two work tiles from one on, the exchange of one beside the products
    of the other.
    """
    config = b.config
    for work_tile in (first, first + 1):
        _go_in_apart(b, work_tile, sizes)
    for s in range(2):
        work_tile = first + s
        if not is_alone(config.loop):
            look_at_outputs(b, s)
        prepare_part(b, s)
        for j in range(sizes[s]):
            _add_up(b, work_tile, j)
        # Biases and scales of this work tile are used up.
        ahead = work_tile_after(b, work_tile, 2)
        if ahead >= 0:
            load_beside(b, b.expert[ahead], s, 0)
        if config.has_scales:
            spread_down_scale(b, s)
        for j in range(sizes[s]):
            outer = (s * sizes[0] + j) % config.loop.outer_buffers
            project_out(b, work_tile, j, 0, outer)
            store_rows(b, work_tile, j, outer)
        if ahead >= 0:
            load_down(b, b.expert[ahead], s, 0, s)


def _go_in_apart(b: Buffers, s: int, sizes: tuple[int, int]) -> None:
    """Multiply this core's share of the rows of a work tile, and send off what comes of it."""
    config = b.config
    following, ahead = work_tile_after(b, s, 1), work_tile_after(b, s, 2)
    size, next_size = sizes[s % 2], sizes[1 - s % 2] if following >= 0 else 0
    last = config.i_axis.count - 1
    gather_early(b, s)
    for j in range(size, min(next_size, config.loop.row_buffers)):
        gather_rows(b, following, j)
    for j in range(size):
        for tile in range(last):
            _multiply_apart(b, s, j, tile)
        # As in kernel.py: the copies behind the transposes run beside the last product.
        if j + 1 < size:
            transpose_tile(b, s, j + 1)
            gather_after(b, s, j + 1, size, next_size)
        _multiply_apart(b, s, j, last)
        _exchange(b, s, j)
    if following >= 0:
        transpose_tile(b, following, 0)
    if not is_alone(config.loop):
        look_at_expert(b, s)
        look_ahead(b, s)
    gather_late(b, s)
    if ahead >= 0:
        # The products above were the last to read this buffer.
        load_gate_up(b, b.expert[ahead], s % 2, 0, 0)


def _multiply_apart(b: Buffers, s: int, j: int, tile: int) -> None:
    """Compute this core's part of a tile of the projections, and leave it in SBUF."""
    config = b.config
    rows = rows_of(config.i_axis, tile)
    turn = inner_turn(config, j, 0, tile)
    bank_ps = b.inner_ps[turn]
    multiply_in(b, s % 2, s, j, tile, 0, bank_ps)
    # Cores exchange SBUF, not PSUM; float32, so that the sum is rounded once.
    own_sb = b.own[inner_buffer(config, s, j)]
    copy_alternating(own_sb[0:rows, tile], bank_ps[0:rows], turn)


def _exchange(b: Buffers, s: int, j: int) -> None:
    """Give the other core this one's part of a row tile's projections, and take its part."""
    buffer, other = inner_buffer(b.config, s, j), 1 - nl.program_id(0)
    # Both cores come here for the same row tiles in the same order, so that the halves pair up.
    nisa.sendrecv(
        src=b.own[buffer], dst=b.other[buffer], send_to_rank=other, recv_from_rank=other, pipe_id=0
    )


def _add_up(b: Buffers, s: int, j: int) -> None:
    """Add both cores' parts of a row tile, and compute what goes into the down projection.

    Both cores compute the same bits, as a sum of two does not depend on their order.
    """
    config = b.config
    buffer = inner_buffer(config, s, j)
    own_sb = b.own[buffer]
    nisa.tensor_tensor(dst=own_sb, data1=own_sb, data2=b.other[buffer], op=nl.add)
    for tile in range(config.i_axis.count):
        projected = own_sb[0 : rows_of(config.i_axis, tile), tile]
        finish_in(b, s % 2, s, j, 0, tile, projected)
