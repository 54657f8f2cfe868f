"""What the prefill kernel is compiled for, and what follows from it.

A caller gives an `ExpertFormula`, sizes, the work and a request; `make_config` makes a
`PrefillConfig` of them. Stages on the chip, accounting, estimate and cost read that one record.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nki.language import NKIObject

from nki_kernels.common.axes import AxisTiles, tile_axis
from nki_kernels.common.chip import BANK_FLOATS, PARTITIONS
from nki_kernels.common.formula import ExpertFormula, early_offset, num_projections
from nki_kernels.common.mx import MxForm, is_mx_format, make_mx_form
from nki_kernels.common.work_tiles import WorkTileDims, max_steps, max_work_tiles

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024)
_FIRST_ENTRIES = 256  # of the lists of work tiles: two gathers
_ROWS_BEHIND = 1 << 12
MOST_PAIRS = 8  # of work tiles of an iteration
MOST_TILES = 4  # of a work tile, unless more are requested: 512 columns


@dataclass(frozen=True)
class ExpertSizes(NKIObject):
    """The experts of a rank, and the layout of their weights in HBM.

    Attributes:
        H: hidden size, a multiple of 64.
        I: intermediate size of this rank.
        E: experts of this rank.
        weight_format: one of weight_formats.WEIGHT_FORMATS, or an MX format of MX_WORD_BYTES, whose
            words are stored as in common/mx.py.
        has_scales: weights have a scale per output channel; only those of 8 bits do.
    """

    H: int
    I: int  # noqa: E741  the axis letter
    E: int
    weight_format: str = "bfloat16"
    has_scales: bool = False


@dataclass(frozen=True)
class PrefillWork(NKIObject):
    """What one launch computes.

    Attributes:
        block_size: B, slots in a block.
        num_slots: N*B.
        num_tokens: T.
        num_cores: physical cores of the launch (LNC), 1 or 2.
        scaling: whether slots are scaled before the projections (pre), after them (post), or not
            here (none).
        stores: whole row tiles to their slots (tiles: fewer instructions), or rows that hold a
            token (rows: fewer bytes; for small experts some rows together).
    """

    block_size: int
    num_slots: int
    num_tokens: int
    num_cores: int = 2
    scaling: str = "none"
    stores: str = "rows"


@dataclass(frozen=True)
class LoopFit(NKIObject):
    """What estimates choose of a `LoopPlan`; other buffers follow from it."""

    work_tile: int
    in_parts: int
    out_parts: int
    weight_buffers: int
    h_parts: int = 1


@dataclass(frozen=True)
class PlanRequest(NKIObject):
    """How a launch is to go through its work, as far as estimates are not to choose.

    Attributes:
        shard_plan: balanced, block, intermediate or hidden.
        loop_plan: sorted, dynamic or static.
        in_halves: core 0 takes the first half of the row tiles, not every second one; with
            shard_plan block.
        skip_weights: keep an expert's weights for the next row tile of a core; such a loop has one
            weight buffer.
        weight_parts: in how many parts gate and up, and down weights are stored in HBM, from
            weight_formats.split_parts; None: as [E, H, 2I] and [E, I, H]. `best_parts` proposes.
        largest_work_tile: most row tiles that share one load of weights.
        fit: the loop that was chosen, from a `Candidate`; None leaves it to the estimate.
        missing: what stands for no token, tile or expert: a number out of range, which transfers
            leave out (skip), or a spare row, tile or expert, for a compiler or chip on which they
            do not (spare). Then whole row tiles are stored.
        chip: what the launch is for; MX weights need a trn3.
        iterations: of run-time loops: each loads what it uses, and leaves nothing on chip for
            another one (alone), or prefetches what the next one begins with (ahead).
    """

    shard_plan: str = "balanced"
    loop_plan: str = "sorted"
    in_halves: bool = False
    skip_weights: bool = False
    weight_parts: tuple[int, int] | None = None
    largest_work_tile: int = MOST_TILES
    fit: LoopFit | None = None
    missing: str = "skip"
    chip: str = "trn2"
    iterations: str = "ahead"


@dataclass(frozen=True)
class ShardPlan(NKIObject):
    """Which part of the work a core does.

    `num_lanes` lists of work tiles: as many as cores, or one that all cores take. `splits_i`: each
    core takes its share of the intermediate axis of every work tile, and the outputs are partial
    sums. `splits_h`: its share of the hidden axis; the cores add up their gate and up projections.
    """

    num_lanes: int
    splits_i: bool
    splits_h: bool


@dataclass(frozen=True)
class LoopPlan(NKIObject):
    """How a core goes through its work tiles.

    `classes` are the work tile sizes that have a loop of their own, descending
    (common/work_tiles.py). `is_dynamic`: run-time iteration counts; otherwise the loop covers the
    worst case. `in_halves`: core 0 takes the first half of the work tiles, not every second one.
    `skips_weights`: weights that the last work tile left on chip are not loaded again.

    Weights are loaded in parts: gate and up in `in_parts` of the intermediate axis, down in
    `out_parts` of the hidden axis; one each where the expert fits. `by_parts`: stored so in HBM by
    weight_formats.split_parts, which makes their runs long. A part of gate and up is loaded in
    `h_parts` of the hidden axis, whose products add up in PSUM. With two `weight_buffers` a part
    loads while the one before is used; with one, gate and up load while down is used, and the
    reverse. A part is prefetched as soon as its buffer is free.
    `row_buffers` hold gathered rows: one of the first tile of a work tile, the others in turn. With
    two `first_buffers` the first tile of a work tile has one by the parity of the work tile, and is
    gathered two work tiles ahead. `outer_buffers` hold output tiles that wait to be stored. Where
    rows are stored, `piece_rows` that follow one another are stored together if one of them holds a
    token. `missing` is what stands for nothing.
    `iterations` is whether an iteration loads for the next one; if not, it has `pairs` of work
    tiles, a power of two, and what is left of a class makes iterations of half as many, and so on.
    """

    classes: tuple[int, ...]
    is_dynamic: bool
    is_sorted: bool
    in_halves: bool
    skips_weights: bool
    by_parts: bool
    weight_buffers: int
    in_parts: int
    out_parts: int
    row_buffers: int
    outer_buffers: int
    missing: str = "skip"
    first_buffers: int = 1
    h_parts: int = 1
    piece_rows: int = 1
    iterations: str = "ahead"
    pairs: int = 1


@dataclass(frozen=True)
class Share(NKIObject):
    """What a core takes of an expert: where its part of each axis begins, and what it gives.

    `partial` is the output it adds to; `adds_bias`: one core does, where outputs are partial sums.
    """

    i_first: int
    h_first: int
    partial: int
    adds_bias: bool


@dataclass(frozen=True)
class PrefillConfig(NKIObject):
    """Compile-time constants of `blockwise_moe`; see `make_config`."""

    formula: ExpertFormula
    H: int
    I: int  # noqa: E741  the axis letter
    E: int
    weight_format: str
    has_scales: bool
    tile_rows: int
    num_tiles: int
    num_tokens: int
    num_cores: int
    scaling: str
    stores: str
    shard: ShardPlan
    loop: LoopPlan
    h_axis: AxisTiles
    i_axis: AxisTiles
    chip: str = "trn2"


def is_mx(config: PrefillConfig) -> bool:
    """Whether the weights are words of an MX format."""
    return is_mx_format(config.weight_format)


def mx_form(config: PrefillConfig) -> MxForm:
    """Return the layout of experts of an MX format."""
    has_bias = config.formula.has_gate_up_bias
    return make_mx_form(config.weight_format, config.H, config.I, config.loop.in_parts, has_bias)


def largest_work_tile_of(config: PrefillConfig) -> int:
    """Return G, the row tiles of the largest work tile."""
    return config.loop.classes[0]


def fit_of(loop: LoopPlan) -> LoopFit:
    """Return what of a loop plan is a choice."""
    return LoopFit(
        loop.classes[0],
        loop.in_parts,
        loop.out_parts,
        loop.weight_buffers,
        loop.h_parts,
    )


def loads_in_parts(loop: LoopPlan) -> bool:
    """Whether gate and up weights come in parts, each of which takes all rows of a work tile."""
    return loop.in_parts * loop.h_parts > 1


def part_tiles(config: PrefillConfig) -> int:
    """Return the tiles of the hidden axis that are loaded at a time."""
    return config.h_axis.count // config.loop.h_parts


def inner_places(config: PrefillConfig) -> int:
    """Return how many sums of the gate and up projections are in PSUM at once: two in turn, or all
    of a work tile that wait for other parts of the hidden axis.
    """
    return 2 if config.loop.h_parts == 1 else largest_work_tile_of(config) * config.i_axis.count


def inner_banks(config: PrefillConfig) -> int:
    """Return the banks of PSUM that these sums take."""
    if config.loop.h_parts == 1:
        return inner_places(config)
    return -(-inner_places(config) // inner_per_bank(config))


def inner_per_bank(config: PrefillConfig) -> int:
    """Return how many of these sums fit a bank."""
    return BANK_FLOATS // (num_projections(config.formula) * config.tile_rows)


def is_alone(loop: LoopPlan) -> bool:
    """Whether an iteration loads what it uses, and nothing for the next one."""
    return loop.iterations == "alone" and loop.is_dynamic


def work_tiles_at_once(loop: LoopPlan) -> int:
    """Return the work tiles that are kept track of: those of an iteration, or two by parity."""
    return 2 * loop.pairs if is_alone(loop) else 2


def iteration_pairs(loop: LoopPlan) -> list[int]:
    """Return the pairs of work tiles of an iteration, for each loop over a class in order."""
    sizes, size = [loop.pairs], loop.pairs
    while size > 1:
        size = size // 2
        sizes.append(size)
    return sizes


def row_places(loop: LoopPlan) -> int:
    """Return the buffers of gathered rows: some in turn, and those of first tiles."""
    return loop.row_buffers - 1 + loop.first_buffers


def num_partials(config: PrefillConfig) -> int:
    """Return P, the outputs to add for one slot."""
    return config.num_cores if config.shard.splits_i else 1


def output_tiles(config: PrefillConfig) -> int:
    """Return the row tiles of a partial output: spare ones follow those of the slots.

    There is one for each lane to write instead of a missing tile, and one whose last row is zeros,
    for `combine` to read instead of a missing slot.
    """
    spare = config.shard.num_lanes + 1 if config.loop.missing == "spare" else 0
    return config.num_tiles + spare


def core_width(config: PrefillConfig) -> int:
    """Return the elements of the hidden axis that a core takes."""
    return config.H // config.num_cores if config.shard.splits_h else config.H


def core_depth(config: PrefillConfig) -> int:
    """Return the elements of the intermediate axis that a core takes."""
    return config.I // num_partials(config)


def stored_parts(config: PrefillConfig) -> tuple[int, int]:
    """Return in how many parts gate and up, and down weights are stored in HBM."""
    if not config.loop.by_parts:
        return 1, 1
    return config.loop.in_parts * num_partials(config), config.loop.out_parts


def bias_terms(config: PrefillConfig) -> int:
    """Return how many bfloat16 numbers add up to an element of the down bias.

    Beside scales it is a quotient, which one would round once more.
    """
    return 3 if config.has_scales else 1


def bias_is_inside(config: PrefillConfig) -> bool:
    """Whether the down bias is a spare contraction row of the first tile of down weights.

    Tiles with fewer than 128 rows have one; it costs nothing, as matmuls are paid by column.
    """
    fits = config.i_axis.is_strided and config.i_axis.rows < PARTITIONS
    return config.formula.has_down_bias and fits and config.weight_format == "bfloat16"


def adds_offset(config: PrefillConfig) -> bool:
    """Whether the bias of the up projection also carries the offset."""
    return config.formula.has_gate_up_bias and early_offset(config.formula) != 0.0


def share_of(config: PrefillConfig, core: int) -> Share:
    """Return what a core takes of every expert."""
    if config.shard.splits_i:
        return Share(core * core_depth(config), 0, core, core == 0)
    if config.shard.splits_h:
        return Share(0, core * core_width(config), 0, True)
    return Share(0, 0, 0, True)


def has_scale_table(config: PrefillConfig) -> bool:
    """Whether the scales of a row tile are kept as one number per partition."""
    return config.scaling != "none"


def first_entries(config: PrefillConfig) -> int:
    """Return the entries of the lists of work tiles that come on chip first, for several work
    tiles.
    """
    return min(_FIRST_ENTRIES, num_work_tiles(config) * largest_work_tile_of(config))


def stores_pieces(config: PrefillConfig) -> bool:
    """Whether rows are stored some together, each piece by a number of its own."""
    return config.stores == "rows" and config.loop.piece_rows > 1


def stored_rows(config: PrefillConfig) -> int:
    """Return the rows of a tile that one transfer stores, where they are contiguous."""
    return config.loop.piece_rows if stores_pieces(config) else config.tile_rows


def no_piece(config: PrefillConfig) -> int:
    """Return the number that stands for no piece: past all, and past the rows that a sum behind the
    experts may put there, which are about as many as tokens; a power of two, which bfloat16 has.
    """
    rows = num_partials(config) * output_tiles(config) * config.tile_rows
    rows += config.num_tokens + _ROWS_BEHIND
    pieces, none = rows // stored_rows(config), 1
    for _doubled in range(24):
        none = none * 2 if none < pieces else none
    return none


def num_work_tiles(config: PrefillConfig) -> int:
    """Return V, the length of the work tile lists of a lane, for any routing."""
    lanes, loop = config.shard.num_lanes, config.loop
    if loop.is_sorted:
        return max_work_tiles(config.num_tiles, config.E, lanes, largest_work_tile_of(config))
    return max_steps(config.num_tiles, lanes)


def work_tile_dims(config: PrefillConfig) -> WorkTileDims:
    """Return what the lists of work tiles are made by, on the host or by `index_blocks`."""
    loop = config.loop
    # An iteration that loads for itself knows by itself what it has on chip.
    reload_after = loop.weight_buffers if loop.skips_weights and not is_alone(loop) else 0
    return WorkTileDims(
        config.shard.num_lanes,
        largest_work_tile_of(config),
        num_work_tiles(config),
        config.tile_rows,
        loop.in_halves,
        reload_after,
    )


def with_loop(config: PrefillConfig, loop: LoopPlan) -> PrefillConfig:
    """Return the configuration with another loop plan, and the intermediate axis cut to match."""
    if is_mx(config):
        form = mx_form(replace(config, loop=loop))
        return replace(config, loop=loop, h_axis=form.h_axis, i_axis=form.i_axis)
    width, depth = core_width(config), core_depth(config) // loop.in_parts
    return replace(config, loop=loop, h_axis=tile_axis(width), i_axis=tile_axis(depth))
