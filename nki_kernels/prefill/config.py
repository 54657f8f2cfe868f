"""What the prefill kernel is compiled for: sizes, plan, weight format, activation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nki.language import NKIObject

from nki_kernels.common.axes import AxisTiles, tile_axis, tile_axis_evenly
from nki_kernels.common.visits import VisitDims, max_steps, max_visits

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024)
WEIGHT_FORMATS = ("bfloat16", "float8_e4m3", "float8_e5m2")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh", "swiglu_oai", "swish")
SCALINGS = ("none", "pre", "post")
TURNS = ("auto", "tensor", "dma")
STORES = ("tiles", "rows", "tokens")
ITEM_BYTES = {"bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1}


@dataclass
class Limits(NKIObject):
    """Clamps of a projection; a missing one is switched off."""

    has_upper: bool
    upper: float
    has_lower: bool
    lower: float


@dataclass
class ShardPlan(NKIObject):
    """Which part of the work a core does.

    `num_lanes` lists of visits: as many as cores, or one that all cores take. `splits_i`: each core
    takes its share of the intermediate axis of every visit, and the outputs are partial sums.
    `splits_h`: its share of the hidden axis; the cores add up their gate and up projections.
    """

    num_lanes: int
    splits_i: bool
    splits_h: bool


@dataclass
class Share(NKIObject):
    """What a core takes of an expert: where its part of each axis begins, and what it gives.

    `partial` is the output it adds to; `adds_bias`: one core does, where outputs are partial sums.
    """

    i_first: int
    h_first: int
    partial: int
    adds_bias: bool


@dataclass
class LoopPlan(NKIObject):
    """How a core goes through its visits.

    `classes` are the visit sizes that have a loop of their own, descending. `is_dynamic`: run-time
    trip counts; otherwise the loop covers the worst case. `in_halves`: core 0 takes the first half
    of the visits, not every second one. `skips_weights`: weights that the last visit left on chip
    are not loaded again.

    Weights are loaded in parts: gate and up in `in_parts` of the intermediate axis, down in
    `out_parts` of the hidden axis; one each where the expert fits. `by_parts`: they lie so in HBM,
    see weight_formats.split_parts, which makes their runs long. With two `slots` a part loads while
    the one before is used; with one, gate and up load while down is used, and the reverse.
    `row_buffers` hold gathered rows: one of the first tile of a visit, the others in turn.
    `outer_buffers` hold output tiles that wait to be stored. `turns` is who transposes the gathered
    rows: the tensor engine, or the gather itself ("dma"), which then wants rows of weights that lie
    further apart.
    """

    classes: tuple[int, ...]
    is_dynamic: bool
    is_sorted: bool
    in_halves: bool
    skips_weights: bool
    by_parts: bool
    slots: int
    in_parts: int
    out_parts: int
    row_buffers: int
    outer_buffers: int
    turns: str


@dataclass
class PrefillConfig(NKIObject):
    """Compile-time constants of `blockwise_moe`; see `make_config`."""

    H: int
    I: int  # noqa: E741  the axis letter
    E: int
    tile_rows: int
    num_tiles: int
    num_tokens: int
    num_cores: int
    weight_format: str
    activation: str
    activation_scale: float
    has_gate: bool
    gate_limits: Limits
    up_limits: Limits
    up_offset: float
    scaling: str
    stores: str
    has_gate_up_bias: bool
    has_down_bias: bool
    has_scales: bool
    shard: ShardPlan
    loop: LoopPlan
    h_axis: AxisTiles
    i_axis: AxisTiles


def largest_visit_of(config: PrefillConfig) -> int:
    """Return G, the row tiles of the largest visit."""
    return config.loop.classes[0]


def num_partials(config: PrefillConfig) -> int:
    """Return P, the outputs to add for one slot."""
    return config.num_cores if config.shard.splits_i else 1


def core_width(config: PrefillConfig) -> int:
    """Return the elements of the hidden axis that a core takes."""
    return config.H // config.num_cores if config.shard.splits_h else config.H


def core_depth(config: PrefillConfig) -> int:
    """Return the elements of the intermediate axis that a core takes."""
    return config.I // num_partials(config)


def stored_parts(config: PrefillConfig) -> tuple[int, int]:
    """Return in how many parts gate and up, and down weights lie in HBM."""
    if not config.loop.by_parts:
        return 1, 1
    return config.loop.in_parts * num_partials(config), config.loop.out_parts


def bias_terms(config: PrefillConfig) -> int:
    """Return how many bfloat16 numbers add up to an element of the down bias.

    Beside scales it is a quotient, which one would round once more.
    """
    return 3 if config.has_scales else 1


def share_of(config: PrefillConfig, core: int) -> Share:
    """Return what a core takes of every expert."""
    if config.shard.splits_i:
        return Share(core * core_depth(config), 0, core, core == 0)
    if config.shard.splits_h:
        return Share(0, core * core_width(config), 0, True)
    return Share(0, 0, 0, True)


def num_projections(config: PrefillConfig) -> int:
    """Return how many halves the first weights have: gate and up, or the only one."""
    return 2 if config.has_gate else 1


def scales_late(config: PrefillConfig) -> bool:
    """Whether pre-scaling is done after the projections, which are linear, and before the biases.

    Rows that the gather turned have their tokens on the free axis, so that a token's scale is no
    longer one number per partition.
    """
    return config.scaling == "pre" and config.loop.turns == "dma"


def has_scale_table(config: PrefillConfig) -> bool:
    """Whether the scales of a row tile are kept as one number per partition."""
    return config.scaling != "none" and not scales_late(config)


def limits(lower: float | None, upper: float | None) -> Limits:
    """Return clamps, None meaning none."""
    return Limits(upper is not None, upper or 0.0, lower is not None, lower or 0.0)


def num_visits(config: PrefillConfig) -> int:
    """Return V, the length of the visit lists of a lane, for any routing."""
    lanes, loop = config.shard.num_lanes, config.loop
    if loop.is_sorted:
        return max_visits(config.num_tiles, config.E, lanes, loop.classes)
    return max_steps(config.num_tiles, lanes)


def visit_dims(config: PrefillConfig) -> VisitDims:
    """Return what the lists of visits are made by, on the host or by `index_blocks`."""
    loop = config.loop
    reload_after = loop.slots if loop.skips_weights else 0
    return VisitDims(
        config.shard.num_lanes,
        largest_visit_of(config),
        num_visits(config),
        config.tile_rows,
        loop.in_halves,
        reload_after,
    )


def with_loop(config: PrefillConfig, loop: LoopPlan) -> PrefillConfig:
    """Return the configuration with another loop plan, and the intermediate axis cut to match."""
    width, depth = core_width(config), core_depth(config) // loop.in_parts
    h_axis = tile_axis_evenly(width) if loop.turns == "dma" else tile_axis(width)
    return replace(config, loop=loop, h_axis=h_axis, i_axis=tile_axis(depth))
