"""From what a caller asks for to what the kernel is compiled for; refuses what cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nki_kernels.common.axes import is_even, tile_axis
from nki_kernels.common.visits import Ints, VisitLists, list_visits, live_tiles
from nki_kernels.prefill.config import (
    ACTIVATIONS,
    BLOCK_SIZES,
    SCALINGS,
    STORES,
    TURNS,
    WEIGHT_FORMATS,
    LoopPlan,
    PrefillConfig,
    ShardPlan,
    largest_visit_of,
    limits,
    num_projections,
    num_visits,
    stored_parts,
    visit_dims,
    with_loop,
)
from nki_kernels.prefill.fit import fit_loop

MOST_CLASSES = (4, 3, 2, 1)  # visits of up to four row tiles: 512 columns
EVEN_TILES = 2.0
SHARD_PLANS = ("balanced", "block", "intermediate", "hidden")
OAI_SCALE = 1.702  # of the sigmoid that the Scalar engine's sigmoid form of gelu has


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
    activation_scale: float = 1.0,
    has_gate: bool = True,
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
    in_halves: bool = False,
    skip_weights: bool = False,
    weight_parts: tuple[int, int] | None = None,
    turns: str = "auto",
    largest_visit: int = len(MOST_CLASSES),
    tiles_per_expert: float = 0.0,
) -> PrefillConfig:
    """Check a request and choose buffers for it.

    Args:
        H: hidden size, a multiple of 64.
        I: intermediate size of this rank.
        E: experts of this rank.
        block_size: B, slots in a block.
        num_slots: N*B.
        num_tokens: T.
        num_cores: physical cores of the launch (LNC), 1 or 2.
        weight_format: bfloat16, float8_e4m3 or float8_e5m2.
        activation: silu, gelu, gelu_tanh, relu, sigmoid, tanh; or swish, x * sigmoid(scale x),
            which swiglu_oai is with a scale of 1.702.
        activation_scale: the scale of swish; the others are act(scale x).
        has_gate: whether there is a gate; without one, the first weights are [E, H, I] and the
            activation is that of the up projection.
        gate_limits, up_limits: (lower, upper) clamps of the projections.
        up_offset: added to the up projection after its clamp (1 for SwiGLU-OAI).
        scaling: whether slots are scaled before the projections, after them, or not here.
        stores: whole row tiles to their slots (fewer instructions), rows that hold a token to their
            slots (fewer bytes), or rows to their tokens (for one choice per token; the output is
            the layer's, no combine follows).
        has_gate_up_bias, has_down_bias, has_scales: which optional operands there are.
        loop_plan: sorted, dynamic or static.
        shard_plan: balanced, block, intermediate or hidden.
        in_halves: core 0 takes the first half of the row tiles, not every second one; with
            shard_plan block.
        skip_weights: keep an expert's weights for the next row tile of a core; such a loop has one
            buffer for weights.
        weight_parts: in how many parts gate and up, and down weights lie in HBM, from
            weight_formats.split_parts; None: as [E, H, 2I] and [E, I, H]. `best_parts` proposes.
        turns: who transposes gathered rows: tensor, dma (only where H has equal tiles), or auto,
            the faster by estimate.
        largest_visit: most row tiles that share one load of weights.
        tiles_per_expert: row tiles of an expert to expect; 0 takes the mean of `num_slots`.

    Raises:
        ValueError: a value outside the limits of the kernel.
    """
    _check_sizes(H, I, E, block_size, num_slots, num_cores)
    for name, value, allowed in (
        ("weight_format", weight_format, WEIGHT_FORMATS),
        ("activation", activation, ACTIVATIONS),
        ("scaling", scaling, SCALINGS),
        ("stores", stores, STORES),
        ("turns", turns, TURNS),
        ("loop_plan", loop_plan, ("sorted", "dynamic", "static")),
        ("shard_plan", shard_plan, SHARD_PLANS),
    ):
        if value not in allowed:
            raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}.")
    if has_scales and weight_format == "bfloat16":
        raise ValueError("has_scales=True: bfloat16 weights have none. Use a float8 format.")
    if turns == "dma" and not is_even(H):
        raise ValueError(f"turns='dma': needs H in equal tiles, not H={H}. Use turns='tensor'.")
    if largest_visit < 1:
        raise ValueError(f"largest_visit={largest_visit}: must be at least 1.")
    splits_i = shard_plan == "intermediate" and num_cores > 1
    if splits_i and I % num_cores:
        raise ValueError(
            f"I={I}: must be a multiple of {num_cores} to be split over as many cores. "
            "Use shard_plan='balanced'."
        )
    if in_halves and shard_plan != "block":
        raise ValueError(
            f"in_halves=True, shard_plan={shard_plan!r}: only blocks are dealt out in halves. "
            "Use shard_plan='block'."
        )
    if not has_gate and (up_offset or gate_limits != (None, None)):
        raise ValueError(
            f"has_gate=False: there is no gate to clamp ({gate_limits}) or to multiply with up + "
            f"{up_offset:g}. Pass up_limits alone."
        )
    if activation == "swiglu_oai" and activation_scale != 1.0:
        raise ValueError(
            f"activation='swiglu_oai', activation_scale={activation_scale:g}: its scale is "
            f"{OAI_SCALE}. Use activation='swish'."
        )
    is_sorted = loop_plan == "sorted" and shard_plan != "block"
    splits_h = shard_plan == "hidden" and num_cores > 1
    if splits_h and skip_weights:
        raise ValueError(
            "skip_weights=True, shard_plan='hidden': two visits are in flight, with weights of "
            "their own. Use another shard_plan."
        )
    shard = ShardPlan(1 if splits_i or splits_h else num_cores, splits_i, splits_h)
    classes = tuple(range(largest_visit, 0, -1)) if is_sorted else (1,)
    loop = LoopPlan(
        classes,
        loop_plan != "static",
        is_sorted,
        in_halves,
        skip_weights,
        weight_parts is not None,
        2,
        *_parts_of_core(weight_parts, shard, num_cores),
        1,
        2,
        turns,
    )
    tile_rows = min(block_size, 128)
    config = PrefillConfig(
        H, I, E, tile_rows, num_slots // tile_rows, num_tokens, num_cores, weight_format,
        *_activation(activation, activation_scale), has_gate,
        limits(*(gate_limits if has_gate else up_limits)), limits(*up_limits), up_offset, scaling,
        stores,
        has_gate_up_bias, has_down_bias, has_scales, shard, loop, tile_axis(H), tile_axis(I),
    )  # fmt: skip
    expected = tiles_per_expert or config.num_tiles / E
    parts = None if weight_parts is None else (loop.in_parts, loop.out_parts)
    return with_loop(config, fit_loop(config, expected, parts))


def best_parts(config: PrefillConfig, tiles_per_expert: float = EVEN_TILES) -> tuple[int, int]:
    """Return the `weight_parts` with which a configuration would be fastest, by estimate.

    (1, 1) where an expert is loaded whole: its runs are long as they are.

    Args:
        config: what the kernel is compiled for, with weights in plain layout.
        tiles_per_expert: row tiles of an expert to expect. The default suits prompts of any length,
            as weights lie in one way: with two, a visit loads about as long as it multiplies.
    """
    classes = MOST_CLASSES if config.loop.is_sorted else (1,)
    loop = replace(config.loop, by_parts=True, classes=classes)
    fitted = fit_loop(replace(config, loop=loop), tiles_per_expert)
    return stored_parts(replace(config, loop=fitted))


def _parts_of_core(
    parts: tuple[int, int] | None, shard: ShardPlan, num_cores: int
) -> tuple[int, int]:
    """Return the parts that one core loads; (1, 1) for weights in plain layout.

    Raises:
        ValueError: they cannot be shared out.
    """
    if parts is None:
        return 1, 1
    shares = num_cores if shard.splits_i else 1
    if min(parts) < 1 or parts[0] % shares or (shard.splits_h and parts != (1, 1)):
        raise ValueError(
            f"weight_parts={parts}: must be positive, a multiple of the cores with "
            "shard_plan='intermediate', and (1, 1) with 'hidden'. Use best_parts()."
        )
    return parts[0] // shares, parts[1]


def _activation(activation: str, scale: float) -> tuple[str, float]:
    """Return the function of the Scalar engine that is meant, and its scale."""
    known = {("swish", 1.0): "silu", ("swish", OAI_SCALE): "swiglu_oai"}
    found = known.get((activation, scale))
    return (found, 1.0) if found else (activation, scale)


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
    if I < 1:
        raise ValueError(f"I={I}: must be at least 1.")
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


def plan_on_host(
    config: PrefillConfig, token_position_to_id: Ints, block_to_expert_N: Ints
) -> VisitLists:
    """Return the visits of a block mapping; `index_blocks` makes the same on the device.

    Args:
        config: what the kernel is compiled for.
        token_position_to_id: [N*B] int32, -1 for padding.
        block_to_expert_N: [N] int32.
    """
    tile, expert = live_tiles(token_position_to_id, block_to_expert_N, config.tile_rows)
    return list_visits(
        tile, expert, visit_dims(config), num_tiles=config.num_tiles, num_experts=config.E
    )


def check_blockwise_moe(
    config: PrefillConfig, plan: VisitLists, operands: Mapping[str, Any]
) -> None:
    """Check the operands of a launch against what the kernel was compiled for.

    Args:
        config: what the kernel is compiled for.
        plan: the visits.
        operands: arrays by parameter name; those of `plan` left out.

    Raises:
        ValueError: an operand is missing, not expected, or of another shape or type.
    """
    expected = _operands(config)
    for name in operands:
        if name not in expected:
            raise ValueError(
                f"{name}: not expected, as the configuration has none. Pass it to make_config()."
            )
    for name, (shape, dtype) in expected.items():
        if name not in operands:
            raise ValueError(f"{name}: missing; must be {list(shape)} {dtype}.")
        value = operands[name]
        if tuple(value.shape) != shape:
            raise ValueError(f"{name} {list(value.shape)}: must be {list(shape)}.")
        found = str(value.dtype).removeprefix("torch.")
        if found != dtype:
            raise ValueError(f"{name} {found}: must be {dtype}. Convert it.")
    lanes, visits = config.shard.num_lanes, num_visits(config)
    wanted = ((lanes, visits), (lanes, visits, largest_visit_of(config)))
    if (plan.visit_expert_CV.shape, plan.visit_tile_CVG.shape) != wanted:
        raise ValueError(
            f"plan {list(plan.visit_tile_CVG.shape)}: must be {list(wanted[1])}. Use list_visits() "
            "with the classes of this configuration."
        )


def _operands(config: PrefillConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and type of every operand that the configuration asks for."""
    E, H, I = config.E, config.H, config.I  # noqa: E741  the axis letters
    num_slots, width = config.num_tiles * config.tile_rows, num_projections(config) * I
    gate_up_shape: tuple[int, ...] = (E, H, width)
    down_shape: tuple[int, ...] = (E, I, H)
    if config.loop.by_parts:
        in_parts, out_parts = stored_parts(config)
        gate_up_shape = (E, in_parts, H, width // in_parts)
        down_shape = (E, out_parts, I, H // out_parts)
    found: dict[str, tuple[tuple[int, ...], str]] = {
        "hidden": ((config.num_tokens, H), "bfloat16"),
        "gate_up": (gate_up_shape, config.weight_format),
        "down": (down_shape, config.weight_format),
        "slots": ((num_slots,), "int32"),
    }
    if config.has_gate_up_bias:
        found["gate_up_bias"] = ((E, width), "float32")
    if config.has_down_bias:
        found["down_bias"] = ((E, 3, H) if config.has_scales else (E, H), "bfloat16")
    if config.has_scales:
        found["gate_up_scale"] = ((E, width), "float32")
        found["down_scale"] = ((E, 3, H), "bfloat16")
    if config.scaling != "none":
        found["slot_scale"] = ((num_slots,), "float32")
    return found
