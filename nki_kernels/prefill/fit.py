"""Which buffers a prefill gets: those that fit SBUF and make its visits fast, by estimate.

The estimate is a coarse model of a chip, used to rank what fits, nothing else: `trip_time` looks
more closely at what comes first here, and times of a kernel come from its trace.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from nki_kernels.common.axes import is_even, tile_axis
from nki_kernels.common.chip import BANKS, core, fitted_sbuf_bytes
from nki_kernels.common.formula import num_projections
from nki_kernels.common.mx import in_shape, out_shape
from nki_kernels.common.visits import sizes_of
from nki_kernels.common.weight_formats import ITEM_BYTES
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
    largest_visit_of,
    loads_in_parts,
    mx_form,
    tells_short,
    with_loop,
)
from nki_kernels.prefill.memory import sbuf_bytes

_MAX_OUTER_BUFFERS = 8
CLOSE_LOOPS, _OF_A_KIND = 16, 8  # loops that get a close look, and how many of a kind
# Assumed: loads that may not run ahead of the tensor engine wait at times.
_ONE_BUFFER_PENALTY = 1.05
# What a visit takes beyond its engine, read off simulated visits of GPT-OSS, Qwen3, DeepSeek,
# Llama 4 and Mixtral shapes: per row tile and per row of it; per exchange between the cores. An
# intermediate tile takes so long at least, until the activation has made room for the one after
# the next.
_TILE_NS, _ROW_NS, _EXCHANGE_NS, _INNER_NS = 500.0, 2.5, 3_700.0, 350.0
_LEAST_I_PART, _LEAST_H_PART = 64, 256
_H_PARTS = (1, 2, 4, 5, 7, 8, 10, 14)
_LEAST_H_BYTES = 1 << 19  # of a transfer, whose fixed time is then a small part of it
_LEAST_ROW_BANKS = 2
# From the last product of a trip to the first of the next one, which loads for itself.
_EDGE_NS, _EDGES_OF_A_TRIP = 8_000.0, 24


def visit_ns(config: PrefillConfig, num_tiles: int, live_rows: float = 0.0) -> float:
    """Return an estimate of the time of a visit, in ns.

    Args:
        config: what the kernel is compiled for.
        num_tiles: row tiles of the visit.
        live_rows: rows of a tile that hold a token; 0 takes all.
    """
    loop, H, chip = config.loop, core_width(config), core(config.chip)
    columns = max(config.tile_rows, chip.matmul_floor_columns)
    i_count = config.i_axis.count * loop.in_parts
    halves = num_projections(config.formula)
    depth = config.h_axis.count * columns / chip.tensor_cycles_per_ns
    deep = config.h_axis.group  # elements that a matmul adds up on a partition
    into = i_count * max(halves * depth / deep, _INNER_NS * chip.steps) + (
        0.0 if loop.turns == "dma" else depth
    )
    into, out = num_tiles * into, num_tiles * i_count * H / deep / chip.tensor_cycles_per_ns
    load_in, load_out = _weights_ns(config)
    rows = num_tiles * 2 * (live_rows or config.tile_rows) * H * 2 / chip.hbm_bytes_per_ns
    load = load_in + load_out + rows
    wait = num_tiles * (_TILE_NS * chip.steps + _ROW_NS * config.tile_rows)
    if loop.weight_buffers == 2 and loads_in_parts(loop):
        # The first part of each kind came beside the other kind; the others one ahead of their use.
        in_parts = loop.in_parts * loop.h_parts
        go_in = into / in_parts + _all_but_one(in_parts, into, load_in)
        go_out = out / loop.out_parts + _all_but_one(loop.out_parts, out, load_out)
        return max(go_in + go_out, load) + wait
    if loop.weight_buffers == 2:
        if config.shard.splits_h:
            wait += _EXCHANGE_NS * chip.exchanges
        return max(into + out, num_tiles * _evict_ns(config), load) + wait
    if loop.in_parts == loop.out_parts == 1:
        apart = max(into, load_out + rows / 2) + max(out, load_in + rows / 2)
        return max(_ONE_BUFFER_PENALTY * apart, num_tiles * _evict_ns(config)) + wait
    return into + out + load_in + load_out


def _all_but_one(parts: int, work_ns: float, load_ns: float) -> float:
    """Return the time of all parts but the first, each computed while the next one loads."""
    return (parts - 1) * max(work_ns, load_ns) / parts


def _weights_ns(config: PrefillConfig) -> tuple[float, float]:
    """Return the time to load an expert's gate and up weights, and its down weights."""
    if is_mx(config):
        form = mx_form(config)
        loads = []
        for rows, run in (in_shape(form), out_shape(form)):
            loads.append(_load_ns(form.chunks * rows, form.chunks * rows * run, config.chip))
        return loads[0], loads[1]
    loop, item, H = config.loop, ITEM_BYTES[config.weight_format], core_width(config)
    halves, i_size = num_projections(config.formula), config.i_axis.size * loop.in_parts
    runs = config.h_axis.rows * loop.in_parts * loop.h_parts if loop.turns == "tensor" else H
    if (loop.in_parts > 1 or config.shard.splits_i) and not loop.by_parts:
        runs = halves * H * loop.in_parts
    load_in = _load_ns(runs, halves * H * i_size * item, config.chip)
    runs = config.i_axis.rows * loop.in_parts * loop.out_parts
    if (loop.out_parts > 1 or config.shard.splits_h) and not loop.by_parts:
        runs = i_size * loop.out_parts
    return load_in, _load_ns(runs, H * i_size * item, config.chip)


def _evict_ns(config: PrefillConfig) -> float:
    """Return the time that Vector and Scalar engine together take to empty PSUM, for a row tile."""
    R, H, i_count = config.tile_rows, core_width(config), config.i_axis.count * config.loop.in_parts
    turned = 0 if config.loop.turns == "dma" else config.h_axis.count * R
    columns = turned + H + 3 * i_count * R
    instructions = -(-turned // 1024) + -(-H // 512) + 3 * i_count
    chip = core(config.chip)
    return (columns + instructions * chip.vector_overhead_cycles) / 2 / chip.vector_cycles_per_ns


def _load_ns(runs: int, size_bytes: int, name: str) -> float:
    chip = core(name)
    engines = (
        runs / chip.dma_engines * chip.dma_run_ns
        + size_bytes / chip.dma_engines / chip.dma_bytes_per_ns
    )
    return max(engines, size_bytes / chip.hbm_bytes_per_ns)


def fit_loop(config: PrefillConfig, request: PlanRequest, tiles_per_expert: float) -> LoopPlan:
    """Return the best of `find_loops`.

    Raises:
        ValueError: nothing fits.
    """
    found = find_loops(config, request, tiles_per_expert, 1)
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


def find_loops(
    config: PrefillConfig, request: PlanRequest, tiles_per_expert: float, count: int
) -> list[LoopPlan]:
    """Return the loop plans with the least estimated times among those that fit SBUF.

    Only so many of a kind, which would crowd out others that this estimate puts too high.

    Args:
        config: sizes, and a loop plan whose classes are the most there may be.
        request: the parts in which weights lie, and the choices, if they are given.
        tiles_per_expert: row tiles of an expert to expect.
        count: how many, at most.
    """
    tiles = max(1, round(tiles_per_expert))
    found: list[tuple[float, int, PrefillConfig]] = []
    parts = None
    if request.weight_parts is not None:
        parts = config.loop.in_parts, config.loop.out_parts
    for loop in _candidates(config):
        if parts not in (None, (loop.in_parts, loop.out_parts)):
            continue
        if request.fit is not None:
            loop = replace(loop, is_eager=request.fit.is_eager)
        if request.fit not in (None, fit_of(loop)):
            continue
        trial = with_loop(config, loop)
        if _fits(trial):
            found.append((_experts_ns(trial, tiles), len(found), trial))
    kinds = Counter[tuple[int, str, bool]]()
    best = []
    for _, _, trial in sorted(found):
        kind = trial.loop.weight_buffers, trial.loop.turns, loads_in_parts(trial.loop)
        kinds[kind] += 1
        if kinds[kind] <= _OF_A_KIND:
            best.append(trial)
    return [_more_buffers(trial) for trial in best[:count]]


def _fits(config: PrefillConfig) -> bool:
    """Whether there is room on chip, two banks of PSUM for rows among it."""
    has_banks = inner_banks(config) + _LEAST_ROW_BANKS <= BANKS
    return has_banks and sbuf_bytes(config) <= fitted_sbuf_bytes(config.chip)


def _experts_ns(config: PrefillConfig, tiles: int) -> float:
    """Return the time of three experts of about so many row tiles: experts differ."""
    total, largest = 0.0, largest_visit_of(config)
    for count in (max(1, tiles - 1), tiles, tiles + 1):
        visits = -(-count // largest)
        total += sum(visit_ns(config, len(range(k, count, visits))) for k in range(visits))
    return total


def _needs_whole_experts(config: PrefillConfig) -> bool:
    """Whether this core's share of an expert must be in SBUF at once."""
    return config.loop.skips_weights or config.shard.splits_h


def _candidates(config: PrefillConfig) -> Iterator[LoopPlan]:
    """Yield loop plans from simple to cut up, large visits first.

    Weights that stay for the next visit are in the only buffer; two visits in flight have one each.
    """
    skips, is_whole = config.loop.skips_weights, _needs_whole_experts(config)
    in_choices = (1,) if is_whole else _divisors(core_depth(config), _LEAST_I_PART)
    if is_mx(config):  # words lie in parts of I, and each part in its own transfers
        in_choices = (config.loop.in_parts,)
    for in_parts in in_choices:
        for out_parts in (
            (1,) if is_whole or is_mx(config) else _divisors(core_width(config), _LEAST_H_PART)
        ):
            for buffers in (1,) if skips else (2,) if is_whole else (2, 1):
                for size, turns in _sizes_and_turns(config, in_parts):
                    outer = _outer_choices(config, out_parts, buffers, size)
                    h_choices = _h_choices(config, in_parts, buffers, turns)
                    for h_parts, outer_buffers in itertools.product(h_choices, outer):
                        if out_parts > 1 and in_parts * h_parts == 1:
                            continue
                        yield replace(
                            config.loop,
                            classes=sizes_of(size, tells_short(config)),
                            weight_buffers=buffers,
                            in_parts=in_parts,
                            out_parts=out_parts,
                            row_buffers=min(2, size),
                            outer_buffers=outer_buffers,
                            turns=turns,
                            h_parts=h_parts,
                        )


def _outer_choices(
    config: PrefillConfig, out_parts: int, buffers: int, size: int
) -> tuple[int, ...]:
    """Return how many output tiles may wait, at least."""
    outer = 2 if out_parts == 1 else size
    # Words lie in the parts they lie in: what is left to give up is an output tile.
    return (outer, 1) if is_mx(config) and buffers == size == 1 else (outer,)


def _h_choices(config: PrefillConfig, in_parts: int, buffers: int, turns: str) -> tuple[int, ...]:
    """Return in how many parts of the hidden axis a part of gate and up weights may load."""
    axis = tile_axis(core_width(config))
    is_whole = _needs_whole_experts(config) or is_mx(config) or axis.tail < axis.rows
    if is_whole or buffers == 1 or turns == "dma":
        return (1,)
    columns = num_projections(config.formula) * core_depth(config) // in_parts
    part_bytes = axis.size * columns * ITEM_BYTES[config.weight_format]
    most = max(1, part_bytes // _LEAST_H_BYTES)
    return tuple(n for n in _H_PARTS if axis.count % n == 0 and n <= most)


def _sizes_and_turns(config: PrefillConfig, in_parts: int) -> Iterator[tuple[int, str]]:
    """Yield visit sizes, and who transposes; the DMA where rows are used in one part only."""
    asked = config.loop.turns
    by_dma = is_even(core_width(config)) and in_parts == 1
    for size in range(largest_visit_of(config), 0, -1):
        if asked != "dma":
            yield size, "tensor"
        if asked != "tensor" and by_dma and not is_alone(config.loop):
            yield size, "dma"


def _divisors(size: int, least: int) -> list[int]:
    """Return the numbers of equal parts that leave at least `least` elements, and 1."""
    return [1, *[n for n in range(2, size // least + 1) if size % n == 0 and size // n % 4 == 0]]


def _more_buffers(config: PrefillConfig) -> LoopPlan:
    """Spend what is left of SBUF on output tiles and gathered rows in turn, up to two visits."""
    loop, size = config.loop, largest_visit_of(config)
    most = fitted_sbuf_bytes(config.chip)
    caps = {"outer_buffers": min(_MAX_OUTER_BUFFERS, 2 * size), "row_buffers": size}
    if loop.turns == "tensor":
        caps["first_buffers"] = 2
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
    """Return the pairs of visits of a trip: so many that its edges are a small part of it."""
    pairs, pair_ns = 1, 2 * visit_ns(config, 1)
    while 2 * pairs <= MOST_PAIRS and pairs * pair_ns < _EDGES_OF_A_TRIP * _EDGE_NS:
        pairs *= 2
    return pairs
