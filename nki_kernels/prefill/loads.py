"""What the prefill kernel loads: token rows, weights, biases and scales.

Legend: s parity of a work tile, j row tile of a work tile, part of the intermediate or hidden axis;
h, i partitions of a tile of H or I.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.common.formula import early_offset, num_projections
from nki_kernels.common.tiles import (
    Entry,
    load_halves,
    load_matrix,
    load_pattern,
    load_rows,
    row_steps,
    when_missing,
)
from nki_kernels.prefill.buffers import Buffers, look_at_first_rows, work_tile_after
from nki_kernels.prefill.config import (
    PrefillConfig,
    Share,
    adds_offset,
    bias_is_inside,
    core_width,
    is_alone,
    is_mx,
    loads_in_parts,
    part_tiles,
    stored_parts,
)


def gather_rows(b: Buffers, s: int, j: int) -> None:
    """Gather this core's share of the token rows of a row tile; padding moves no data."""
    _gather(b, b.ids[s][0 : b.config.tile_rows, j : j + 1], s, j)


def gather_early(b: Buffers, s: int) -> None:
    """Gather the first rows of the work tile two ahead, if the buffer of this work tile's is free
    for them.

    They then reach the memory before the weights of the next work tiles, and nobody waits for them.
    """
    if b.config.loop.first_buffers == 2:
        if is_alone(b.config.loop):
            _gather_ahead(b, s)
            return
        look_at_first_rows(b, s)
        _gather(b, b.first_ids[s], s, 0)


def gather_late(b: Buffers, s: int) -> None:
    """Gather the first rows of the work tile two ahead, if the next work tile's were in their
    buffer.
    """
    if b.config.loop.first_buffers == 1:
        _gather_ahead(b, s)


def _gather_ahead(b: Buffers, s: int) -> None:
    """Gather the first rows of the work tile two ahead, if it is one of the iteration."""
    ahead = work_tile_after(b, s, 2)
    if ahead >= 0:
        gather_rows(b, ahead, 0)


def _gather(b: Buffers, ids_sb: nl.NkiTensor, s: int, j: int) -> None:
    """Gather the rows of a row tile by their [R, 1] ids."""
    config = b.config
    R, H, width = config.tile_rows, config.H, core_width(config)
    # A descriptor a row, which GpSimd makes (software DGE): hardware DGE takes no offsets by row.
    # The queue of the weights is another one, so that neither waits for the other.
    nisa.dma_copy(
        dst=b.rows[row_buffer(config, s, j)],
        src=b.x.hidden.ap([[H, R], [1, width]], offset=b.share.h_first, vector_offset=ids_sb),
        oob_mode=when_missing(config.loop.missing == "skip"),
        dge_mode=nisa.dge_mode.swdge,
    )


def row_buffer(config: PrefillConfig, s: int, j: int) -> int:
    """Return which buffer the gathered rows of tile j use: the first its own, the rest a ring."""
    first = config.loop.first_buffers
    return s % first if j == 0 else first + ring_place(config, j)


def ring_place(config: PrefillConfig, j: int) -> int:
    """Return the place of tile j, not the first of a work tile, in the ring of buffers."""
    return (j - 1) % (config.loop.row_buffers - 1)


def gather_after(b: Buffers, s: int, j: int, size: int, next_size: int) -> None:
    """Refill the buffer of tile j, which is free again: for this work tile or the next one."""
    config = b.config
    # Tile j was just transposed: nobody reads its rows any more.
    ring = config.loop.row_buffers - 1
    if j + ring < size:
        gather_rows(b, s, j + ring)
    elif 1 + ring_place(config, j) < next_size:
        following = work_tile_after(b, s, 1)
        gather_rows(b, following, 1 + ring_place(config, j))


def transposed_buffer(config: PrefillConfig, j: int) -> int:
    """Return which buffer of transposed rows tile j uses: two in turn, or all of a work tile where
    they are used again.
    """
    return j if loads_in_parts(config.loop) else j % 2


def load_gate_up(b: Buffers, expert: nl.NkiTensor, buffer: int, part: int, h_part: int) -> None:
    """Load one part of the gate and up weights of an expert."""
    config = b.config
    entry = _entry(config, b.x.gate_up, expert)
    if is_mx(config):
        _load_run(b.gate_up[buffer], entry, part)
        return
    if config.loop.h_parts > 1:
        _load_tiles(b, expert, buffer, part, h_part)
        return
    h_axis, column = config.h_axis, config.i_axis.size
    first, row, runs = _gate_up_place(config, b.share, part)
    flat = b.gate_up[buffer].reshape((h_axis.rows, h_axis.count * runs[1] * column))
    load_matrix(flat, entry, h_axis, first, row, runs, column)


def _load_tiles(b: Buffers, expert: nl.NkiTensor, buffer: int, part: int, h_part: int) -> None:
    """Load a part of the hidden axis of one part of the gate and up weights."""
    config = b.config
    h_axis, column, count = config.h_axis, config.i_axis.size, part_tiles(config)
    first, row, runs = _gate_up_place(config, b.share, part)
    apart, step = row_steps(h_axis, row)
    flat = b.gate_up[buffer].reshape((h_axis.rows, count * runs[1] * column))
    pattern = [[apart, h_axis.rows], [step, count], runs, [1, column]]
    load_pattern(flat, _entry(config, b.x.gate_up, expert), pattern, first + h_part * count * step)


def _gate_up_place(config: PrefillConfig, share: Share, part: int) -> tuple[int, int, list[int]]:
    """Return the first element of a part in an expert, the elements of a row, and its pieces."""
    halves = num_projections(config.formula)
    width = config.I // stored_parts(config)[0]
    column = share.i_first + part * config.i_axis.size
    # Parts before this one, rows of other cores, columns of other parts.
    first = column // width * config.H * halves * width
    first = first + share.h_first * halves * width + column % width
    return first, halves * width, [width, halves]


def load_beside(b: Buffers, expert: nl.NkiTensor, buffer: int, part: int) -> None:
    """Load biases and scales of one part of the gate and up projections."""
    config = b.config
    first = b.share.i_first + part * config.i_axis.size
    if config.formula.has_gate_up_bias and not is_mx(config):
        bias = _entry(config, b.x.gate_up_bias, expert)
        load_halves(b.gate_up_bias[buffer], bias, config.i_axis, config.I, first)
    if config.has_scales:
        scale = _entry(config, b.x.gate_up_scale, expert)
        load_halves(b.gate_up_scale[buffer], scale, config.i_axis, config.I, first)


def _entry(config: PrefillConfig, stack: nl.NkiTensor, expert: nl.NkiTensor) -> Entry:
    """Return an expert's part of an operand."""
    return Entry(stack, expert, config.loop.missing == "skip")


def _load_run(dst_sb: nl.NkiTensor, entry: Entry, part: int) -> None:
    """Load a part of MX words, a run per partition."""
    rows, run = dst_sb.shape
    load_rows(dst_sb, entry, run, part * rows * run, run)


def prepare_part(b: Buffers, buffer: int) -> None:
    """Make of what was loaded beside the weights of a part what its use needs.

    Done when the part is used, not when it is loaded: engines take their work in order. What was
    loaded stays as it is, for a work tile that finds it still there.
    """
    config = b.config
    if adds_offset(config):
        rows, count = config.i_axis.rows, config.i_axis.count
        nisa.tensor_scalar(
            dst=b.up_bias[buffer],
            data=b.gate_up_bias[buffer][0:rows, 1, 0:count],
            op0=nl.add,
            operand0=early_offset(config.formula),
        )


def load_down(b: Buffers, expert: nl.NkiTensor, buffer: int, part: int, s: int) -> None:
    """Load one part of the columns of an expert's down weights, with bias and, once, scales.

    Args:
        expert: (1, 1) int32 tile.
        buffer: which one to fill.
        part: which part of the columns.
        s: parity of the work tile that the weights are for.
    """
    config = b.config
    H, i_axis, in_parts = config.H, config.i_axis, config.loop.in_parts
    width = core_width(config)
    columns = width // config.loop.out_parts
    begin = b.share.h_first + part * columns
    row = H // stored_parts(config)[1]
    first = begin // row * config.I * row + begin % row
    # Scales first: `spread_down_scale` takes them before the first product with these weights.
    if config.has_scales and part == 0:
        scale_sb = b.down_scale_parts[s % config.loop.weight_buffers]
        load_rows(scale_sb, _entry(config, b.x.down_scale, expert), H, b.share.h_first, width)
    if config.formula.has_down_bias:
        bias_sb = b.down_bias[buffer]
        if bias_is_inside(config):
            bias_sb = b.down[buffer][i_axis.rows : i_axis.rows + 1, 0, 0:columns]
        load_rows(bias_sb, _entry(config, b.x.down_bias, expert), H, begin, columns)
    if is_mx(config):
        rows, _, run = b.down[buffer].shape
        for k in range(in_parts):
            _load_run(b.down[buffer][0:rows, k, 0:run], _entry(config, b.x.down, expert), k)
        return
    flat = b.down[buffer].reshape((b.down[buffer].shape[0], in_parts * i_axis.count * columns))
    size, entry = i_axis.count * columns, _entry(config, b.x.down, expert)
    # Every part of I on its own: the partitions hold its rows in the order of the gate and up
    # projections of that part.
    for k in range(in_parts):
        part_sb = flat[0 : i_axis.rows, k * size : (k + 1) * size]
        base = first + (b.share.i_first + k * i_axis.size) * row
        load_matrix(part_sb, entry, i_axis, base, row, [1, 1], columns)
