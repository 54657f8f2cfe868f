"""What the prefill kernel is compiled for: sizes, plan, weight format, activation; and its checks.

Host code but for the records, which the kernel reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nki.language import NKIObject

from nki_kernels.plans import AxisTiles, max_steps, max_visits, tile_axis

SBUF_BYTES = 207 * 1024  # usable bytes per partition on Trn2 (KLR Trace.lean), less alignment
SMALL_TILES_BYTES = 2 * 1024  # counters, constants, biases and scales per row
MAX_OUTER_BUFFERS = 8
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024)
WEIGHT_FORMATS = ("bfloat16", "float8_e4m3", "float8_e5m2")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai")
SCALINGS = ("none", "pre", "post")
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
    """

    num_lanes: int
    splits_i: bool


@dataclass
class LoopPlan(NKIObject):
    """How a core goes through its visits.

    `classes` are the visit sizes that have a loop of their own, descending. `is_dynamic`: run-time
    trip counts; otherwise the loop covers the worst case. `slots`: 2 keeps the weights of one part
    while the next is loaded; 1 loads gate and up while down is used, and the reverse. `parts`: the
    intermediate axis in so many parts, for experts that do not fit. `outer_buffers`: output tiles
    that may wait to be stored.
    """

    classes: tuple[int, ...]
    is_dynamic: bool
    is_sorted: bool
    slots: int
    parts: int
    outer_buffers: int


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


def limits(lower: float | None, upper: float | None) -> Limits:
    """Return clamps, None meaning none."""
    return Limits(upper is not None, upper or 0.0, lower is not None, lower or 0.0)


def num_visits(config: PrefillConfig) -> int:
    """Return V, the length of the visit lists of a lane, for any routing."""
    lanes, loop = config.shard.num_lanes, config.loop
    if loop.is_sorted:
        return max_visits(config.num_tiles, config.E, lanes, loop.classes)
    return max_steps(config.num_tiles, lanes)


def sbuf_bytes(config: PrefillConfig) -> int:
    """Return the bytes per partition that the buffers of the kernel take (computed)."""
    loop, item = config.loop, ITEM_BYTES[config.weight_format]
    rows, depth = config.tile_rows, config.h_axis.count
    i_size, i_count = config.i_axis.size, config.i_axis.count
    largest = largest_visit_of(config)
    weights = loop.slots * (depth * 2 * i_size + i_count * config.H) * item
    turned = (2 if loop.parts == 1 else largest) * depth * rows * 2
    inner = largest * i_count * rows * 2
    total = weights + turned + inner + largest * config.H * 2
    total += loop.outer_buffers * config.H * 2
    total += 4 * rows * 4 + SMALL_TILES_BYTES
    # Token ids, rows to write, scales, and two more while they are made.
    total += 5 * 4 * num_visits(config) * largest
    if loop.parts > 1:
        total += largest * config.H * 4
    if config.has_scales:
        total += loop.slots * (config.H * 4 + config.H * 2)
    if config.has_down_bias:
        total += loop.slots * config.H * 2
    return total


def fit_loop(config: PrefillConfig) -> LoopPlan:
    """Return the loop plan with the most reuse that fits SBUF.

    Two slots first, then one, then the intermediate axis in parts; large visits before small ones.

    Raises:
        ValueError: nothing fits.
    """
    largest = largest_visit_of(config)
    i_core = config.I // (config.num_cores if config.shard.splits_i else 1)
    for parts in range(1, i_core + 1):
        if i_core % parts or (parts > 1 and i_core // parts < 32):
            continue
        for slots in (2, 1) if parts == 1 else (1,):
            for size in range(largest, 0, -1):
                if size < largest and size < 2:
                    continue
                classes = tuple(c for c in range(size, 0, -1))
                loop = replace(config.loop, classes=classes, slots=slots, parts=parts)
                trial = with_loop(config, loop)
                if sbuf_bytes(trial) <= SBUF_BYTES:
                    return _more_outer_buffers(trial)
    raise ValueError(
        f"H={config.H}, I={config.I}: no part of an expert fits SBUF. Use more ranks of tensor "
        "parallelism."
    )


def _more_outer_buffers(config: PrefillConfig) -> LoopPlan:
    """Return the loop plan with up to two visits' worth of output tiles, as far as they fit."""
    loop = config.loop
    for count in range(min(MAX_OUTER_BUFFERS, 2 * largest_visit_of(config)), 2, -1):
        more = replace(loop, outer_buffers=count)
        if sbuf_bytes(replace(config, loop=more)) <= SBUF_BYTES:
            return more
    return loop


def make_config(
    *,
    H: int,
    I: int,  # noqa: E741  the axis letter
    E: int,
    block_size: int,
    num_slots: int,
    num_tokens: int,
    num_cores: int = 2,
    weight_format: str = "bfloat16",
    activation: str = "silu",
    gate_limits: tuple[float | None, float | None] = (None, None),
    up_limits: tuple[float | None, float | None] = (None, None),
    up_offset: float = 0.0,
    scaling: str = "none",
    stores: str = "rows",
    has_gate_up_bias: bool = False,
    has_down_bias: bool = False,
    has_scales: bool = False,
    loop_plan: str = "sorted",
    shard_plan: str = "balanced",
    largest_visit: int = 4,
) -> PrefillConfig:
    """Check a request and choose buffers for it.

    Args:
        H: hidden size, a multiple of 64.
        I: intermediate size of this rank, a multiple of 4.
        E: experts of this rank.
        block_size: B, slots in a block.
        num_slots: N*B.
        num_tokens: T.
        num_cores: physical cores of the launch (LNC), 1 or 2.
        weight_format: bfloat16, float8_e4m3 or float8_e5m2.
        activation: silu, gelu, gelu_tanh, relu, or swiglu_oai (x * sigmoid(1.702 x)).
        gate_limits, up_limits: (lower, upper) clamps of the projections.
        up_offset: added to the up projection after its clamp (1 for SwiGLU-OAI).
        scaling: whether slots are scaled before the projections, after them, or not here.
        stores: whole row tiles to their slots (fewer instructions), rows that hold a token to their
            slots (fewer bytes), or rows to their tokens (for one choice per token; the output is
            the layer's, no combine follows).
        has_gate_up_bias, has_down_bias, has_scales: which optional operands there are.
        loop_plan: sorted, dynamic or static.
        shard_plan: balanced, block or intermediate.
        largest_visit: most row tiles that share one load of weights.

    Raises:
        ValueError: a value outside the limits of the kernel.
    """
    _check_sizes(H, I, E, block_size, num_slots, num_cores)
    for name, value, allowed in (
        ("weight_format", weight_format, WEIGHT_FORMATS),
        ("activation", activation, ACTIVATIONS),
        ("scaling", scaling, SCALINGS),
        ("stores", stores, STORES),
        ("loop_plan", loop_plan, ("sorted", "dynamic", "static")),
        ("shard_plan", shard_plan, ("balanced", "block", "intermediate")),
    ):
        if value not in allowed:
            raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}.")
    if has_scales and weight_format == "bfloat16":
        raise ValueError("has_scales=True: bfloat16 weights have none. Use a float8 format.")
    splits_i = shard_plan == "intermediate" and num_cores > 1
    if splits_i and I % (4 * num_cores):
        raise ValueError(
            f"I={I}: must be a multiple of {4 * num_cores} to be split over {num_cores} cores. "
            "Use shard_plan='balanced'."
        )
    is_sorted = loop_plan == "sorted" and shard_plan != "block"
    shard = ShardPlan(1 if splits_i else num_cores, splits_i)
    classes = tuple(range(largest_visit, 0, -1)) if is_sorted else (1,)
    loop = LoopPlan(classes, loop_plan != "static", is_sorted, 2, 1, 2)
    tile_rows = min(block_size, 128)
    config = PrefillConfig(
        H, I, E, tile_rows, num_slots // tile_rows, num_tokens, num_cores, weight_format,
        activation,        limits(*gate_limits), limits(*up_limits), up_offset, scaling, stores, has_gate_up_bias,
        has_down_bias, has_scales, shard, loop, tile_axis(H), tile_axis(I),
    )  # fmt: skip
    return with_loop(config, fit_loop(config))


def with_loop(config: PrefillConfig, loop: LoopPlan) -> PrefillConfig:
    """Return the configuration with another loop plan, and the intermediate axis cut to match."""
    i_core = config.I // (config.num_cores if config.shard.splits_i else 1)
    return replace(config, loop=loop, i_axis=tile_axis(i_core // loop.parts))


def _check_sizes(
    H: int,
    I: int,  # noqa: E741  the axis letter
    E: int,
    block_size: int,
    num_slots: int,
    num_cores: int,
) -> None:
    if H < 64 or H % 64:
        raise ValueError(f"H={H}: must be a positive multiple of 64. Pad the hidden size.")
    if I < 4 or I % 4:
        raise ValueError(f"I={I}: must be a positive multiple of 4. Pad the expert weights.")
    if E < 1:
        raise ValueError(f"E={E}: must be at least 1.")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size}: must be one of {BLOCK_SIZES}.")
    if num_slots < block_size or num_slots % block_size:
        raise ValueError(
            f"num_slots={num_slots}: must be a positive multiple of block_size={block_size}. "
            "Use the slots of build_block_mapping()."
        )
    if num_cores not in (1, 2):
        raise ValueError(f"num_cores={num_cores}: must be 1 or 2.")
