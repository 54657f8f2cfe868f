"""Which loops a prefill may have: those whose buffers fit SBUF, the fastest by estimate first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

import numpy as np
from numpy.typing import NDArray

from nki_kernels.common.axes import tile_axis
from nki_kernels.common.chip import BANKS, fitted_sbuf_bytes
from nki_kernels.common.formula import num_projections
from nki_kernels.common.weight_formats import ITEM_BYTES
from nki_kernels.common.work_tiles import sizes_of
from nki_kernels.prefill.config import (
    MOST_PAIRS,
    LoopPlan,
    PlanRequest,
    PrefillConfig,
    core_depth,
    core_width,
    fit_of,
    inner_banks,
    is_alone,
    is_mx,
    largest_work_tile_of,
    with_loop,
)
from nki_kernels.prefill.memory import sbuf_bytes
from nki_kernels.prefill.roofline import edge_ns, experts_ns, work_tile_ns

_MAX_OUTER_BUFFERS = 8
_LEAST_I_PART, _LEAST_H_PART = 64, 256
_H_PARTS = (1, 2, 4, 5, 7, 8, 10, 14)
_LEAST_H_BYTES = 1 << 19  # of a transfer, whose fixed time is then a small part of it
_LEAST_ROW_BANKS = 2
_LOOPS = 12  # that are looked at with all their buffers
_EDGES_OF_AN_ITERATION = 10  # take as long as its work tiles at least


def best_loop(
    config: PrefillConfig, request: PlanRequest, tokens_E: NDArray[np.int64]
) -> PrefillConfig:
    """Return the first of `loops_that_fit`.

    Raises:
        ValueError: nothing fits.
    """
    found = loops_that_fit(config, request, tokens_E)
    if found:
        return found[0]
    if _needs_whole_experts(config):
        asked = "skip_weights=True" if config.loop.skips_weights else "shard_plan='hidden'"
        raise ValueError(
            f"{asked}: experts with H={config.H}, I={config.I} do not fit SBUF whole. Use more "
            "ranks of tensor parallelism, or the default."
        )
    if request.fit is not None:
        raise ValueError(
            f"fit={request.fit}: does not fit a core with H={config.H}, I={config.I}. Leave it "
            "None, or tune for this layer."
        )
    if request.weight_parts is not None:
        parts = config.loop.in_parts, config.loop.out_parts
        raise ValueError(
            f"weight_parts: {parts} for a core with H={config.H}, I={config.I} do not fit SBUF, "
            "or are parts of less than the kernel loads. Use best_parts()."
        )
    raise ValueError(
        f"H={config.H}, I={config.I}: no part of an expert fits SBUF. Use more ranks of tensor "
        "parallelism."
    )


def loops_that_fit(
    config: PrefillConfig, request: PlanRequest, tokens_E: NDArray[np.int64]
) -> list[PrefillConfig]:
    """Return some configurations with loops that fit SBUF, those with the least estimates first.

    Args:
        config: sizes, and a loop plan whose classes are the most there may be.
        request: the parts in which weights are stored, and the choices, if they are given.
        tokens_E: tokens of the experts to expect.
    """
    trials = [with_loop(config, loop) for loop in _candidates(config, request)]
    times = [experts_ns(_with_room(trial), tokens_E) for trial in trials]
    order = sorted(range(len(trials)), key=times.__getitem__)
    fitting = islice((trials[number] for number in order if _fits(trials[number])), _LOOPS)
    found = [replace(trial, loop=_more_buffers(trial)) for trial in fitting]
    return sorted(found, key=lambda each: experts_ns(each, tokens_E))


def _with_room(config: PrefillConfig) -> PrefillConfig:
    """Return a configuration that has all the buffers of rows it may use."""
    loop = replace(config.loop, outer_buffers=_MAX_OUTER_BUFFERS, first_buffers=2)
    return replace(config, loop=loop)


def _fits(config: PrefillConfig) -> bool:
    """Whether there is room on chip, two banks of PSUM for rows among it."""
    has_banks = inner_banks(config) + _LEAST_ROW_BANKS <= BANKS
    return has_banks and sbuf_bytes(config) <= fitted_sbuf_bytes(config.chip)


def _needs_whole_experts(config: PrefillConfig) -> bool:
    """Whether this core's share of an expert must be in SBUF at once."""
    return config.loop.skips_weights or config.shard.splits_h


def _candidates(config: PrefillConfig, request: PlanRequest) -> Iterator[LoopPlan]:
    """Yield loop plans from simple to cut up, small work tiles first.

    Weights that stay for the next work tile are in the only buffer; two work tiles in flight have
    one each.
    """
    skips, is_whole = config.loop.skips_weights, _needs_whole_experts(config)
    all_buffers = (1,) if skips else (2,) if is_whole else (2, 1)
    sizes = range(1, largest_work_tile_of(config) + 1)
    for in_parts, out_parts in _part_choices(config, request):
        for buffers, size in product(all_buffers, sizes):
            h_choices = _h_choices(config, in_parts, buffers)
            outer = _outer_choices(config, out_parts, buffers, size)
            for h_parts, outer_buffers in product(h_choices, outer):
                if out_parts > 1 and in_parts * h_parts == 1:
                    continue
                loop = replace(
                    config.loop,
                    classes=sizes_of(size),
                    weight_buffers=buffers,
                    in_parts=in_parts,
                    out_parts=out_parts,
                    row_buffers=min(2, size),
                    outer_buffers=outer_buffers,
                    h_parts=h_parts,
                )
                if request.fit in (None, fit_of(loop)):
                    yield loop


def _part_choices(config: PrefillConfig, request: PlanRequest) -> list[tuple[int, int]]:
    """Return in how many parts gate and up, and down weights may be loaded."""
    as_stored = config.loop.in_parts, config.loop.out_parts
    if is_mx(config):  # words are stored in parts of I, and each part in its own transfers
        return [as_stored]
    choices = [(1, 1)]
    if not _needs_whole_experts(config):
        in_choices = _divisors(core_depth(config), _LEAST_I_PART)
        choices = [*product(in_choices, _divisors(core_width(config), _LEAST_H_PART))]
    return [each for each in choices if request.weight_parts is None or each == as_stored]


def _outer_choices(
    config: PrefillConfig, out_parts: int, buffers: int, size: int
) -> tuple[int, ...]:
    """Return how many output tiles may wait, at least."""
    outer = 2 if out_parts == 1 else size
    # Words stay in the parts they are stored in: what is left to give up is an output tile.
    return (outer, 1) if is_mx(config) and buffers == size == 1 else (outer,)


def _h_choices(config: PrefillConfig, in_parts: int, buffers: int) -> tuple[int, ...]:
    """Return in how many parts of the hidden axis a part of gate and up weights may load."""
    axis = tile_axis(core_width(config))
    is_whole = _needs_whole_experts(config) or is_mx(config) or axis.tail < axis.rows
    if is_whole or buffers == 1:
        return (1,)
    columns = num_projections(config.formula) * core_depth(config) // in_parts
    part_bytes = axis.size * columns * ITEM_BYTES[config.weight_format]
    most = max(1, part_bytes // _LEAST_H_BYTES)
    return tuple(n for n in _H_PARTS if axis.count % n == 0 and n <= most)


def _divisors(size: int, least: int) -> list[int]:
    """Return the numbers of equal parts that leave at least `least` elements, and 1."""
    return [1, *[n for n in range(2, size // least + 1) if size % n == 0 and size // n % 4 == 0]]


def _more_buffers(config: PrefillConfig) -> LoopPlan:
    """Spend what is left of SBUF on output tiles and gathered rows in turn, up to two work
    tiles.
    """
    loop, size = config.loop, largest_work_tile_of(config)
    most = fitted_sbuf_bytes(config.chip)
    caps = {
        "outer_buffers": min(_MAX_OUTER_BUFFERS, 2 * size),
        "row_buffers": size,
        "first_buffers": 2,
    }
    grows = True
    while grows:
        grows = False
        for name, cap in caps.items():
            count = getattr(loop, name)
            more = replace(loop, **{name: count + 1})
            if count < cap and sbuf_bytes(replace(config, loop=more)) <= most:
                loop, grows = more, True
    return replace(loop, pairs=_pairs(config)) if is_alone(loop) else loop


def _pairs(config: PrefillConfig) -> int:
    """Return the pairs of work tiles of an iteration, so many that its edges are a small part."""
    pairs, pair_ns = 1, 2 * work_tile_ns(config, 1, config.tile_rows)
    while 2 * pairs <= MOST_PAIRS and pairs * pair_ns < _EDGES_OF_AN_ITERATION * edge_ns(config):
        pairs *= 2
    return pairs
