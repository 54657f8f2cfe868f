"""Which plan and block size a prefill gets: candidates, ranked by the estimate of fit.py.

The visits of an expected routing are listed as the device would list them, and their estimated
times are added up. What the candidates share (routing, indexing, most of the combine) is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from nki_kernels.common.chip import core
from nki_kernels.common.formula import ExpertFormula
from nki_kernels.common.visits import list_visits, loops_of
from nki_kernels.prefill.config import (
    ExpertSizes,
    PlanRequest,
    PrefillConfig,
    PrefillWork,
    num_partials,
    visit_dims,
    with_loop,
)
from nki_kernels.prefill.fit import find_loop, visit_ns
from nki_kernels.prefill.options import make_config, shard_plan_of

_START_NS = 20_000.0  # simulated: tables and the first weights, beside one visit
_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The launches that a candidate is chosen for.

    Attributes:
        num_tokens: T.
        top_k: K, choices per token among this rank's experts; of E_all experts on several ranks, on
            average, rounded up.
        routing: how likely each expert is to be chosen, E numbers; or uniform.
        num_cores, scaling, stores: as in `PrefillWork`.
    """

    num_tokens: int
    top_k: int
    routing: tuple[float, ...] | str = "uniform"
    num_cores: int = 2
    scaling: str = "none"
    stores: str = "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What candidates differ in.

    Attributes:
        block_sizes: larger ones than 128 have the same row tiles, and more padding.
        shard_plans: of `PlanRequest`; the first one must be possible.
        largest_visits: beyond 5, rows take the buffers that let loads run ahead.
    """

    block_sizes: tuple[int, ...] = (128, 64, 32)
    shard_plans: tuple[str, ...] = ("balanced", "hidden", "intermediate")
    largest_visits: tuple[int, ...] = (4, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to compute a prefill, and how long it is estimated to take.

    Attributes:
        request: for `make_config`.
        block_size: B.
        estimated_us: of the expert kernel, both cores, in microseconds.
    """

    request: PlanRequest
    block_size: int
    estimated_us: float


_ANY = PlanRequest()
_EVERYWHERE = Search()


def best_candidate(
    formula: ExpertFormula,
    sizes: ExpertSizes,
    expected: Expected,
    request: PlanRequest = _ANY,
    search: Search = _EVERYWHERE,
) -> Candidate:
    """Return the candidate with the least estimated time; see `rank_candidates`."""
    return rank_candidates(formula, sizes, expected, request, search)[0]


def rank_candidates(
    formula: ExpertFormula,
    sizes: ExpertSizes,
    expected: Expected,
    request: PlanRequest = _ANY,
    search: Search = _EVERYWHERE,
) -> list[Candidate]:
    """Return all candidates that can run, the fastest first.

    Args:
        formula: what an expert computes.
        sizes: of the experts of this rank.
        expected: the launches to be fast for.
        request: what all candidates share; how they shard, their visits and what they expect of
            an expert are theirs.
        search: what they differ in.

    Raises:
        ValueError: the first of the shard plans cannot run, or the routing is not E numbers.
    """
    num_tokens, top_k = expected.num_tokens, expected.top_k
    tokens_E = expect_tokens(num_tokens * top_k, sizes.E, expected.routing)
    found = []
    for block_size in search.block_sizes:
        tiles_E = -(-tokens_E // min(block_size, 128))
        tiles = float(tiles_E.sum() / max(1, np.count_nonzero(tiles_E)))
        num_slots = most_blocks(num_tokens, top_k, sizes.E, block_size) * block_size
        work = PrefillWork(
            block_size, num_slots, num_tokens, expected.num_cores, expected.scaling, expected.stores
        )
        first = replace(request, shard_plan=search.shard_plans[0], tiles_per_expert=tiles)
        base = make_config(formula, sizes, work, first)
        for name, largest in product(search.shard_plans, search.largest_visits):
            asked = replace(first, shard_plan=name, largest_visit=largest)
            config = _with_plan(base, asked)
            if config is not None:
                time_us = _estimate_us(config, tokens_E)
                found.append(Candidate(request=asked, block_size=block_size, estimated_us=time_us))
    return sorted(found, key=lambda candidate: candidate.estimated_us)


def most_blocks(num_tokens: int, top_k: int, num_experts: int, block_size: int) -> int:
    """Return N, the most blocks that any routing needs."""
    pairs = num_tokens * min(top_k, num_experts)
    hit = min(num_experts, pairs)
    return hit + min((pairs - hit) // block_size, hit * (-(-num_tokens // block_size) - 1))


def expect_tokens(
    num_pairs: int, num_experts: int, routing: tuple[float, ...] | str
) -> NDArray[np.int64]:
    """Return [E] tokens of each expert, drawn once and for all.

    Raises:
        ValueError: the routing is not E numbers with a positive sum.
    """
    if isinstance(routing, str):
        if routing != "uniform":
            raise ValueError(f"routing={routing!r}: must be 'uniform', or {num_experts} numbers.")
        routing = (1.0,) * num_experts
    weight_E = np.asarray(routing, float)
    if weight_E.shape != (num_experts,) or (weight_E < 0).any() or not weight_E.sum() > 0:
        raise ValueError(
            f"routing {list(weight_E.shape)}: must be {num_experts} numbers, none negative, one "
            "positive. Pass how likely each expert is."
        )
    rng = np.random.default_rng(_SEED)
    return rng.multinomial(num_pairs, weight_E / weight_E.sum())


def _with_plan(base: PrefillConfig, asked: PlanRequest) -> PrefillConfig | None:
    """Return a configuration with another shard plan and visits, None if that cannot run."""
    shard = shard_plan_of(asked.shard_plan, base.num_cores)
    if shard.splits_i and base.I % base.num_cores:
        return None
    if shard.num_lanes < base.num_cores and (base.loop.by_parts or base.loop.skips_weights):
        return None
    loop = replace(base.loop, classes=tuple(range(asked.largest_visit, 0, -1)), turns=asked.turns)
    parts = (loop.in_parts, loop.out_parts) if loop.by_parts else None
    found = find_loop(replace(base, shard=shard, loop=loop), asked.tiles_per_expert, parts)
    return None if found is None else with_loop(replace(base, shard=shard), found)


def _estimate_us(config: PrefillConfig, tokens_E: NDArray[np.int64]) -> float:
    """Return the estimated time of the expert kernel, in microseconds.

    Args:
        config: what the kernel is compiled for.
        tokens_E: [E] tokens of each expert.
    """
    tiles_E = -(-tokens_E // config.tile_rows)
    expert = np.repeat(np.arange(config.E, dtype=np.int32), tiles_E)
    tile = np.arange(len(expert), dtype=np.int32)
    if not len(tile):
        return 0.0
    lists = list_visits(tile, expert, visit_dims(config), num_tiles=len(tile), num_experts=config.E)
    live_rows = tokens_E.sum() / len(tile)
    total = _START_NS * core().transfers + visit_ns(config, 1, live_rows)
    for sizes, trips in zip(
        loops_of(config.loop.classes), lists.class_trips_1L[0].tolist(), strict=True
    ):
        total += trips * sum(visit_ns(config, size, live_rows) for size in sizes)
    # Each further partial sum is read once more, by the combine.
    extra_bytes = (num_partials(config) - 1) * tokens_E.sum() * config.H * 2
    total += extra_bytes / core().hbm_bytes_per_ns / config.num_cores
    return float(total) / 1e3
