"""The operands of a launch against what the prefill kernel was compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nki_kernels.common.formula import num_projections
from nki_kernels.common.mx import in_shape, out_shape
from nki_kernels.common.work_tiles import WorkTileLists
from nki_kernels.prefill.config import (
    PrefillConfig,
    is_mx,
    largest_work_tile_of,
    mx_form,
    num_work_tiles,
    stored_parts,
)

_Expected = dict[str, tuple[tuple[int, ...], str]]


def check_blockwise_moe(
    config: PrefillConfig, work_tiles: WorkTileLists, operands: Mapping[str, Any]
) -> None:
    """Check the operands of a launch against what the kernel was compiled for.

    Args:
        config: what the kernel is compiled for.
        work_tiles: of the launch.
        operands: arrays by parameter name; those of `work_tiles` left out.

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
    _check_work_tiles(config, work_tiles)


def _check_work_tiles(config: PrefillConfig, work_tiles: WorkTileLists) -> None:
    lanes, length = config.shard.num_lanes, num_work_tiles(config)
    wanted = ((lanes, length), (lanes, length, largest_work_tile_of(config)))
    if (work_tiles.work_expert_CV.shape, work_tiles.work_row_tiles_CVG.shape) != wanted:
        raise ValueError(
            f"work tiles {list(work_tiles.work_row_tiles_CVG.shape)}: must be {list(wanted[1])}."
            " Use work_tiles_of() with this configuration."
        )


def matrix_shapes(config: PrefillConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of gate and up, and of down weights in HBM."""
    E, H, I = config.E, config.H, config.I  # noqa: E741  the axis letters
    width = num_projections(config.formula) * I
    if is_mx(config):
        form = mx_form(config)
        return (E, form.chunks, *in_shape(form)), (E, form.chunks, *out_shape(form))
    if not config.loop.by_parts:
        return (E, H, width), (E, I, H)
    in_parts, out_parts = stored_parts(config)
    return (E, in_parts, H, width // in_parts), (E, out_parts, I, H // out_parts)


def _operands(config: PrefillConfig) -> _Expected:
    """Return shape and type of every operand of the configuration."""
    E, H, I = config.E, config.H, config.I  # noqa: E741  the axis letters
    num_slots, width = config.num_tiles * config.tile_rows, num_projections(config.formula) * I
    gate_up_shape, down_shape = matrix_shapes(config)
    stored = "uint8" if is_mx(config) else config.weight_format
    found: _Expected = {
        "hidden": ((config.num_tokens, H), "bfloat16"),
        "gate_up": (gate_up_shape, stored),
        "down": (down_shape, stored),
        "slots": ((num_slots,), "int32"),
    }
    if config.formula.has_gate_up_bias and not is_mx(config):
        found["gate_up_bias"] = ((E, width), "float32")
    if config.formula.has_down_bias:
        found["down_bias"] = ((E, 3, H) if config.has_scales else (E, H), "bfloat16")
    if config.has_scales:
        found["gate_up_scale"] = ((E, width), "float32")
        found["down_scale"] = ((E, 3, H), "bfloat16")
    if config.scaling != "none":
        found["slot_scale"] = ((num_slots,), "float32")
    return found
