"""From what a caller requests to what the prefill kernel is compiled for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nki_kernels.common.axes import tile_axis
from nki_kernels.common.chip import PARTITIONS, chip_in_force
from nki_kernels.common.formula import (
    EXPERT_ACTIVATIONS,
    ExpertFormula,
    Limits,
    bounds_of,
    why_no_expert,
)
from nki_kernels.common.mx import is_mx_format, mx_chunks
from nki_kernels.common.weight_formats import ITEM_BYTES, MX_WORD_BYTES, WEIGHT_FORMATS
from nki_kernels.common.work_tiles import Ints, WorkTileLists, list_work_tiles, live_tiles, sizes_of
from nki_kernels.prefill.config import (
    BLOCK_SIZES,
    MOST_PAIRS,
    MOST_TILES,
    ExpertSizes,
    LoopPlan,
    PlanRequest,
    PrefillConfig,
    PrefillWork,
    ShardPlan,
    stored_parts,
    work_tile_dims,
)
from nki_kernels.prefill.fit import best_loop
from nki_kernels.prefill.roofline import experts_ns

_EVEN_TILES = 2
_PIECE_ROWS = 32  # the tensor engine counts so many partitions by themselves
_ALLOWED = {
    "weight_format": (*WEIGHT_FORMATS, *MX_WORD_BYTES),
    "chip": ("trn2", "trn3"),
    "activation": EXPERT_ACTIVATIONS,
    "scaling": ("none", "pre", "post"),
    "stores": ("tiles", "rows"),
    "missing": ("skip", "spare"),
    "iterations": ("ahead", "alone"),
    "loop_plan": ("sorted", "dynamic", "static"),
    "shard_plan": ("balanced", "block", "intermediate", "hidden"),
}
_BY_ESTIMATE = PlanRequest()


def make_config(
    formula: ExpertFormula,
    sizes: ExpertSizes,
    work: PrefillWork,
    request: PlanRequest = _BY_ESTIMATE,
) -> PrefillConfig:
    """Check a request and choose buffers for it.

    Args:
        formula: what an expert computes.
        sizes: of the experts of this rank.
        work: of the launch.
        request: how to go through it, as far as estimates are not to choose.

    Raises:
        ValueError: a value outside the limits of the kernel.
    """
    draft = draft_config(formula, sizes, work, request)
    tokens_E = np.repeat(_even_tokens(draft, draft.num_tiles / sizes.E), 4)
    return best_loop(draft, request, tokens_E)


def best_parts(config: PrefillConfig, gain: float = 0.0) -> tuple[int, int]:
    """Return the `weight_parts` with which a configuration would be fastest, by estimate.

    (1, 1) where an expert is loaded whole: its runs are long as they are. Weights are stored once,
    for prompts of any length; experts of two row tiles are expected, with which a work tile loads
    about as long as it multiplies.

    Args:
        config: what the kernel is compiled for, with weights in plain layout.
        gain: share of the time with plain weights that others must save; else (1, 1).
    """
    tokens_E = _even_tokens(config, _EVEN_TILES)
    classes = sizes_of(MOST_TILES if config.loop.is_sorted else 1)
    loops = (replace(config.loop, by_parts=cut, classes=classes) for cut in (True, False))
    cut, plain = (replace(config, loop=loop) for loop in loops)
    best = best_loop(cut, _BY_ESTIMATE, tokens_E)
    if gain:
        plain_ns = experts_ns(best_loop(plain, _BY_ESTIMATE, tokens_E), tokens_E)
        if experts_ns(best, tokens_E) > (1 - gain) * plain_ns:
            return 1, 1
    return stored_parts(best)


def _even_tokens(config: PrefillConfig, tiles: float) -> NDArray[np.int64]:
    """Return the tokens of three experts of about so many row tiles: experts differ."""
    mean = max(1, round(tiles))
    return np.array([max(1, mean - 1), mean, mean + 1]) * config.tile_rows


def work_tiles_of(
    config: PrefillConfig, token_position_to_id: Ints, block_to_expert_N: Ints
) -> WorkTileLists:
    """Return the work tiles of a block mapping; `index_blocks` makes the same on the device.

    Args:
        config: what the kernel is compiled for.
        token_position_to_id: [N*B] int32, -1 for padding.
        block_to_expert_N: [N] int32.
    """
    tiles = live_tiles(token_position_to_id, block_to_expert_N, config.tile_rows)
    return list_work_tiles(
        tiles, work_tile_dims(config), num_tiles=config.num_tiles, num_experts=config.E
    )


def shard_plan_of(name: str, num_cores: int) -> ShardPlan:
    """Return a shard plan by its name; one core has nothing to split."""
    splits_i = name == "intermediate" and num_cores > 1
    splits_h = name == "hidden" and num_cores > 1
    return ShardPlan(1 if splits_i or splits_h else num_cores, splits_i, splits_h)


def draft_config(
    formula: ExpertFormula, sizes: ExpertSizes, work: PrefillWork, request: PlanRequest
) -> PrefillConfig:
    """Return the configuration before buffers are chosen, with the largest work tiles there may be.

    Raises:
        ValueError: as `make_config`.
    """
    _check_sizes(sizes, work)
    _check_names(formula, sizes, work, request)
    _check_formula(formula)
    _check_plan(sizes, work, request)
    if is_mx_format(sizes.weight_format):
        request = _request_of_words(formula, sizes, request)
    shard = shard_plan_of(request.shard_plan, work.num_cores)
    is_sorted = request.loop_plan == "sorted" and request.shard_plan != "block"
    in_parts, out_parts = _parts_of_core(request.weight_parts, shard, work.num_cores)
    loop = LoopPlan(
        classes=sizes_of(request.largest_work_tile if is_sorted else 1),
        is_dynamic=request.loop_plan != "static",
        is_sorted=is_sorted,
        in_halves=request.in_halves,
        skips_weights=request.skip_weights,
        by_parts=request.weight_parts is not None,
        weight_buffers=2,
        in_parts=in_parts,
        out_parts=out_parts,
        row_buffers=1,
        outer_buffers=2,
        missing=request.missing,
        piece_rows=_piece_rows(sizes, work),
        iterations=request.iterations,
        pairs=MOST_PAIRS if request.iterations == "alone" and request.loop_plan != "static" else 1,
    )
    # Rows without a token cannot be left out where nothing can.
    stores = "tiles" if request.missing == "spare" else work.stores
    tile_rows = min(work.block_size, 128)
    return PrefillConfig(
        formula,
        sizes.H,
        sizes.I,
        sizes.E,
        sizes.weight_format,
        sizes.has_scales,
        tile_rows,
        work.num_slots // tile_rows,
        work.num_tokens,
        work.num_cores,
        work.scaling,
        stores,
        shard,
        loop,
        tile_axis(sizes.H),
        tile_axis(sizes.I),
        request.chip,
    )


def _piece_rows(sizes: ExpertSizes, work: PrefillWork) -> int:
    """Return the rows that are stored together: some where GpSimd, which makes the descriptors of
    rows, takes longer for those of a work tile than the memory for its weights.
    """
    chip, rows = chip_in_force(), min(work.block_size, PARTITIONS)
    expert_bytes = 3 * sizes.H * sizes.I * ITEM_BYTES.get(sizes.weight_format, 1)
    load_ns = work.num_cores * expert_bytes / chip.hbm_bytes_per_ns
    names_ns = 2 * (chip.swdge_ns + rows * chip.swdge_index_ns)
    return min(rows, _PIECE_ROWS) if load_ns < names_ns else 1


def _request_of_words(
    formula: ExpertFormula, sizes: ExpertSizes, request: PlanRequest
) -> PlanRequest:
    """Return a request with the parts in which MX words are stored.

    Raises:
        ValueError: what words are not computed for.
    """
    name = f"weight_format={sizes.weight_format!r}"
    if request.chip != "trn3":
        raise ValueError(
            f"{name}: {request.chip} multiplies no MX words. Set chip='trn3', or re-code the"
            " weights as float8_e5m2, which loses nothing of MXFP4."
        )
    if request.shard_plan not in ("balanced", "block"):
        raise ValueError(
            f"{name}, shard_plan={request.shard_plan!r}: words are multiplied with whole experts."
            " Use shard_plan='balanced'."
        )
    if not formula.has_gate or sizes.has_scales:
        raise ValueError(
            f"{name}, has_gate={formula.has_gate}, has_scales={sizes.has_scales}: words have scales"
            " of their own, and their experts a gate. Compute other experts in torch."
        )
    parts = request.weight_parts
    if parts is None:
        parts = (mx_chunks(sizes.weight_format, sizes.H, sizes.I, sizes.E == 1), 1)
    return replace(request, weight_parts=parts)


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


def _check_sizes(sizes: ExpertSizes, work: PrefillWork) -> None:
    H, block_size, num_slots = sizes.H, work.block_size, work.num_slots
    if H < 64 or H % 64:
        raise ValueError(f"H={H}: must be a positive multiple of 64. Pad the hidden size.")
    if sizes.I < 1:
        raise ValueError(f"I={sizes.I}: must be at least 1.")
    if sizes.E < 1:
        raise ValueError(f"E={sizes.E}: must be at least 1.")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size}: must be one of {BLOCK_SIZES}.")
    if num_slots < block_size or num_slots % block_size:
        raise ValueError(
            f"num_slots={num_slots}: must be a positive multiple of block_size={block_size}. "
            "Use the slots of build_block_mapping()."
        )
    if work.num_cores not in (1, 2):
        raise ValueError(f"num_cores={work.num_cores}: must be 1 or 2.")


def _check_names(
    formula: ExpertFormula, sizes: ExpertSizes, work: PrefillWork, request: PlanRequest
) -> None:
    """Raise ValueError for a word that the kernel does not know."""
    for name, allowed in _ALLOWED.items():
        for record in (formula, sizes, work, request):
            value = getattr(record, name, allowed[0])
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}.")
    if sizes.has_scales and sizes.weight_format == "bfloat16":
        raise ValueError("has_scales=True: bfloat16 weights have none. Use a float8 format.")


def _check_formula(formula: ExpertFormula) -> None:
    """Raise ValueError unless the kernel computes this formula."""
    why = why_no_expert(formula)
    if why:
        raise ValueError(why)
    if formula.gates_itself and (formula.activation != "sigmoid" or not formula.has_gate):
        raise ValueError(
            f"gates_itself=True, activation={formula.activation!r}, has_gate={formula.has_gate}:"
            " the kernel has gates that multiply their own sigmoid. Use activation='sigmoid' with"
            " a gate, or compute such experts in torch."
        )
    if not formula.has_gate and (formula.up_offset or formula.gate_limits != Limits()):
        raise ValueError(
            f"has_gate=False: there is no gate to clamp ({bounds_of(formula.gate_limits)}) or to"
            f" multiply with up + {formula.up_offset:g}. Pass up_limits alone."
        )


def _check_plan(sizes: ExpertSizes, work: PrefillWork, request: PlanRequest) -> None:
    """Raise ValueError for a request that contradicts itself or the sizes."""
    I, shard_plan = sizes.I, request.shard_plan  # noqa: E741  the axis letter
    shard = shard_plan_of(shard_plan, work.num_cores)
    if request.largest_work_tile < 1:
        raise ValueError(f"largest_work_tile={request.largest_work_tile}: must be at least 1.")
    if shard.splits_i and I % work.num_cores:
        raise ValueError(
            f"I={I}: must be a multiple of {work.num_cores} to be split over as many cores. "
            "Use shard_plan='balanced'."
        )
    if request.in_halves and shard_plan != "block":
        raise ValueError(
            f"in_halves=True, shard_plan={shard_plan!r}: only blocks are dealt out in halves. "
            "Use shard_plan='block'."
        )
    if request.missing == "spare" and request.skip_weights:
        raise ValueError(
            "missing='spare', skip_weights=True: weights that stay are transfers left out. Use"
            " skip_weights=False."
        )
    if shard.splits_h and request.skip_weights:
        raise ValueError(
            "skip_weights=True, shard_plan='hidden': two work tiles are in flight, with weights of "
            "their own. Use another shard_plan."
        )
