"""Which plan and block size a prefill gets: candidates, ranked by the estimate of trip_time.py.

The visits of an expected routing are listed as the device would list them, and the times of their
trips are added up, in both corners of the clock. Without a routing two extremes are expected: one
drawn from experts that are alike, and one in which a quarter of them gets most tokens; the
candidate is taken whose larger loss against the best of each is least, that of experts alike
counted four times. What the candidates share (routing, indexing) is left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nki_kernels.common.formula import ExpertFormula
from nki_kernels.common.slot_sums import sum_ns
from nki_kernels.common.visits import LiveTiles, list_visits, loops_of, sizes_of, tiles_of
from nki_kernels.prefill.config import (
    ExpertSizes,
    PlanRequest,
    PrefillConfig,
    PrefillWork,
    can_tell_short,
    fit_of,
    largest_visit_of,
    may_be_eager,
    num_partials,
    num_visits,
    tells_short,
    visit_dims,
    with_loop,
)
from nki_kernels.prefill.fit import CLOSE_LOOPS, find_loops, visit_ns
from nki_kernels.prefill.options import make_config, shard_plan_of
from nki_kernels.prefill.trip_time import CORNERS, pace_of

_EVEN_WEIGHT = 4.0  # of a loss where experts are alike, against one where the routing is skewed
_SEED, _DRAWS, _TILES = 7, 64, (32, 64, 128)
_HOT_SHARE, _HOT_CHOICES = 0.25, 0.8  # of a skewed routing: experts, and the choices they get
_CLOSE_PLANS = 16  # beside the best of each shard plan
_COARSE = 1.4  # what is slower by so much, by the coarse estimate, is not looked at closely
_NEAR_PLANS = 4  # that are looked at with short tiles told apart, too
_SHORT_GAIN = 1.005  # at least, for more loops
_ALIKE = 0.25  # of a row tile: visits whose live rows differ by less


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The launches that a candidate is chosen for.

    Attributes:
        num_tokens: T.
        top_k: K, choices of a token, whatever rank its experts are on.
        share: of the choices that fall on this rank's experts, on average.
        routing: how likely each expert is to be chosen, E numbers; or unknown.
        num_cores, scaling, stores: as in `PrefillWork`.
    """

    num_tokens: int
    top_k: int
    routing: tuple[float, ...] | str = "unknown"
    num_cores: int = 2
    scaling: str = "none"
    stores: str = "rows"
    share: float = 1.0

    @property
    def num_pairs(self) -> int:
        """Choices to expect here."""
        return round(self.num_tokens * self.top_k * self.share)


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
        times_us: of experts and combine, both cores, in microseconds: for each routing expected, in
            each corner of the clock.
    """

    request: PlanRequest
    block_size: int
    times_us: tuple[float, ...]

    @property
    def estimated_us(self) -> float:
        """Geometric mean of `times_us`."""
        return math.exp(sum(map(math.log, self.times_us)) / len(self.times_us))


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
    """Return the candidates that are worth a look, the best first; see `by_loss`.

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
    routings = _routings(sizes.E, expected)
    drafts = [
        draft
        for block_size in search.block_sizes
        for draft in _drafts(formula, sizes, expected, request, search, block_size, routings)
    ]
    looks = _eager_too(_worth_a_look(drafts))
    found = {draft: _look_at(draft, routings, expected.top_k) for draft in looks}
    order = by_loss(list(found.values()))
    for draft in filter(_may_tell_short, looks):
        if found[draft] in order[:_NEAR_PLANS]:
            telling = _telling_short(draft)
            short = _look_at(telling, routings, expected.top_k)
            if short.estimated_us * _SHORT_GAIN < found[draft].estimated_us:
                found[telling] = short
    return by_loss(list(found.values()))


def _look_at(draft: _Draft, routings: Sequence[NDArray[np.int64]], top_k: int) -> Candidate:
    """Return a draft with the estimated times of routings."""
    times = [estimate_us(draft.config, tokens_E, top_k) for tokens_E in routings]
    times_us = tuple(itertools.chain.from_iterable(times))
    return Candidate(request=draft.request, block_size=draft.block_size, times_us=times_us)


def _may_tell_short(draft: _Draft) -> bool:
    config = draft.config
    return can_tell_short(config) and not tells_short(config) and largest_visit_of(config) > 1


def _telling_short(draft: _Draft) -> _Draft:
    """Return a draft that tells short tiles apart, too."""
    classes = sizes_of(largest_visit_of(draft.config), True)
    config = replace(draft.config, loop=replace(draft.config.loop, classes=classes))
    return replace(draft, config=config, request=replace(draft.request, tells_short=True))


def _worth_a_look(drafts: Sequence[_Draft]) -> list[_Draft]:
    """Return the best draft of each shard plan, and the others that may be as good as the best."""
    # Of loops that do the same, the one of smaller visits has shorter tables.
    ordered = sorted(drafts, key=lambda draft: (draft.coarse_ns, draft.request.largest_visit))
    most_ns = _COARSE * ordered[0].coarse_ns
    best = dict[str, _Draft]()
    others = dict[tuple[int, str, float], _Draft]()  # loops that do the same have the same time
    for draft in ordered:
        plan = draft.request.shard_plan
        if best.setdefault(plan, draft) is not draft and draft.coarse_ns <= most_ns:
            others.setdefault((draft.block_size, plan, draft.coarse_ns), draft)
    return [*best.values(), *list(others.values())[:_CLOSE_PLANS]]


def _eager_too(drafts: Sequence[_Draft]) -> list[_Draft]:
    """Return drafts, and those of the same loops that ask for weights earlier."""
    found = list(drafts)
    for draft in drafts:
        if may_be_eager(draft.config):
            config = replace(draft.config, loop=replace(draft.config.loop, is_eager=True))
            request = replace(draft.request, fit=fit_of(config.loop))
            found.append(replace(draft, request=request, config=config))
    return found


def by_loss(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates by their larger loss against the best of each routing expected, the first
    of which counts more.
    """
    best: list[float] = [min(each) for each in zip(*map(_means_us, candidates), strict=True)]

    def loss(candidate: Candidate) -> float:
        even, *skewed = (m / b - 1.0 for m, b in zip(_means_us(candidate), best, strict=True))
        return max(_EVEN_WEIGHT * even, *skewed, 0.0)

    return sorted(candidates, key=lambda each: (loss(each), each.estimated_us))


def _means_us(candidate: Candidate) -> list[float]:
    """Return the geometric mean of the corners, for each routing."""
    times, corners = candidate.times_us, len(CORNERS)
    groups = [times[k : k + corners] for k in range(0, len(times), corners)]
    return [math.exp(sum(map(math.log, group)) / corners) for group in groups]


@dataclass(frozen=True, slots=True)
class _Draft:
    """A candidate before it is looked at closely."""

    request: PlanRequest
    block_size: int
    config: PrefillConfig
    coarse_ns: float


class _Loop(NamedTuple):
    """Trips alike: the sizes of their two visits in half tiles, how many, how full tiles are
    (`_levels`), and the shares of their first and second visits that have a tile.
    """

    sizes: tuple[int, int]
    trips: int
    levels: tuple[tuple[float, float], ...]
    present: tuple[float, float] = (1.0, 1.0)


def _routings(num_experts: int, expected: Expected) -> list[NDArray[np.int64]]:
    """Return [E] tokens of each expert, for each routing to expect."""
    pairs, share = expected.num_pairs, expected.share
    if expected.routing != "unknown":
        return [expect_tokens(pairs, num_experts, expected.routing, share)]
    hot = max(1, int(num_experts * _HOT_SHARE))
    cold_share = (1 - _HOT_CHOICES) / max(1, num_experts - hot)
    skewed = (_HOT_CHOICES / hot,) * hot + (cold_share,) * (num_experts - hot)
    return [
        # A token chooses an expert once.
        np.minimum(expect_tokens(pairs, num_experts, weights, share), expected.num_tokens)
        for weights in ("uniform", skewed)
    ]


def _drafts(
    formula: ExpertFormula,
    sizes: ExpertSizes,
    expected: Expected,
    request: PlanRequest,
    search: Search,
    block_size: int,
    routings: Sequence[NDArray[np.int64]],
) -> list[_Draft]:
    """Return the loops of each shard plan that are fast by the coarse estimate."""
    tiles_E = -(-routings[0] // min(block_size, 128))
    tiles = float(tiles_E.sum() / max(1, np.count_nonzero(tiles_E)))
    num_slots = most_blocks(expected.num_tokens, expected.top_k, sizes.E, block_size) * block_size
    work = PrefillWork(
        block_size,
        num_slots,
        expected.num_tokens,
        expected.num_cores,
        expected.scaling,
        expected.stores,
    )
    largest = max(search.largest_visits)
    first = replace(
        request, shard_plan=search.shard_plans[0], largest_visit=largest, tiles_per_expert=tiles
    )
    base = make_config(formula, sizes, work, first)
    found = []
    for name in search.shard_plans:
        asked = replace(first, shard_plan=name)
        for config in _configs_of(base, asked):
            fit = fit_of(config.loop)
            fixed = replace(asked, largest_visit=fit.visit, fit=fit)
            coarse_ns = sum(_coarse_ns(config, tokens_E) for tokens_E in routings)
            found.append(_Draft(fixed, block_size, config, coarse_ns))
    return found


def most_blocks(num_tokens: int, top_k: int, num_experts: int, block_size: int) -> int:
    """Return N, the most blocks that any routing needs."""
    pairs = num_tokens * min(top_k, num_experts)
    hit = min(num_experts, pairs)
    return hit + min((pairs - hit) // block_size, hit * (-(-num_tokens // block_size) - 1))


def expect_tokens(
    num_pairs: int, num_experts: int, routing: tuple[float, ...] | str, share: float = 1.0
) -> NDArray[np.int64]:
    """Return [E] tokens of each expert: of many draws one with about the mean number of row tiles.

    Where a mean number of tokens fills its tiles, any one draw may be off by a tile for a third of
    the experts, and a plan by 5 %.

    Args:
        num_pairs: choices that fall on these experts on average.
        num_experts: E.
        routing: how likely each of them is to be chosen, or "uniform".
        share: of all choices that they are.

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
    chances = [*(share * weight_E / weight_E.sum()), 1.0 - share]
    tokens_DE = rng.multinomial(round(num_pairs / share), chances, size=_DRAWS)[:, :-1]
    off_D = np.zeros(_DRAWS)
    for rows in _TILES:
        tiles_D = (-(-tokens_DE // rows)).sum(1)
        # A tile more costs more than one less gains.
        usual = max(1.0, np.ceil(tiles_D.mean()))
        off_D += np.abs(tiles_D - usual) / usual
    typical: NDArray[np.int64] = tokens_DE[off_D.argmin()]
    return typical


def _configs_of(base: PrefillConfig, asked: PlanRequest) -> list[PrefillConfig]:
    """Return configurations with another shard plan; none if that cannot run."""
    shard = shard_plan_of(asked.shard_plan, base.num_cores)
    if shard.splits_i and base.I % base.num_cores:
        return []
    if shard.num_lanes < base.num_cores and (base.loop.by_parts or base.loop.skips_weights):
        return []
    classes = sizes_of(asked.largest_visit, asked.tells_short)
    loop = replace(base.loop, classes=classes, turns=asked.turns)
    draft = replace(base, shard=shard, loop=loop)
    loops = find_loops(draft, asked, asked.tiles_per_expert, CLOSE_LOOPS)
    return [with_loop(draft, loop) for loop in loops]


def _loops(config: PrefillConfig, tokens_E: NDArray[np.int64]) -> list[_Loop]:
    """Return the loops that have trips.

    Args:
        config: what the kernel is compiled for.
        tokens_E: [E] tokens of each expert.
    """
    R = config.tile_rows
    tiles_E = -(-tokens_E // R)
    expert = np.repeat(np.arange(config.E, dtype=np.int32), tiles_E)
    tile = np.arange(len(expert), dtype=np.int32)
    if not len(tile):
        return []
    if not config.loop.is_dynamic:  # every trip there may be, most without a tile
        trips = num_visits(config) // 2
        rows = float(tokens_E.sum()) / (2 * trips * config.shard.num_lanes)
        return [_Loop(loops_of(config.loop.classes)[0], trips, ((1.0, rows),))]
    rows_n = np.minimum(R, tokens_E[expert] - R * (tile - (tiles_E.cumsum() - tiles_E)[expert]))
    tiles = LiveTiles(tile, expert, rows_n <= R // 2)
    lists = list_visits(tiles, visit_dims(config), num_tiles=len(tile), num_experts=config.E)
    found, first = [], 0
    loops = zip(loops_of(config.loop.classes), lists.class_trips_1L[0].tolist(), strict=True)
    for sizes, trips in loops:
        visits = lists.visit_tile_CVG[:, first : first + 2 * trips]
        first += 2 * trips
        if trips:
            is_there_CV = np.any(visits < len(tile), axis=2)
            present = float(is_there_CV[:, ::2].mean()), float(is_there_CV[:, 1::2].mean())
            found.append(_Loop(sizes, trips, _levels(visits, rows_n, R), present))
    return found


def _levels(
    visit_tile_CVG: NDArray[np.int32], rows_n: NDArray[np.int64], tile_rows: int
) -> tuple[tuple[float, float], ...]:
    """Return shares of visits and the rows of their tiles: those below the mean and the others,
    or all of them where they are alike.

    Args:
        visit_tile_CVG: row tiles of visits, a number past the last one where there is none.
        rows_n: rows of each tile that hold a token.
        tile_rows: R.
    """
    is_tile = visit_tile_CVG < len(rows_n)
    rows = np.where(is_tile, rows_n[np.minimum(visit_tile_CVG, len(rows_n) - 1)], 0).sum(2)
    counts = is_tile.sum(2)
    each = rows[counts > 0] / counts[counts > 0]
    mean = float(each.mean())
    if each.max() - each.min() <= _ALIKE * tile_rows:
        return ((1.0, mean),)
    few = each[each < mean]
    share = len(few) / len(each)
    return (share, float(few.mean())), (1.0 - share, float(each[each >= mean].mean()))


def _coarse_ns(config: PrefillConfig, tokens_E: NDArray[np.int64]) -> float:
    """Return a rough estimate of the time of the experts' visits."""
    total = 0.0
    for loop in _loops(config, tokens_E):
        for share, rows in loop.levels:
            trip_ns = sum(visit_ns(config, tiles_of(size), rows) for size in loop.sizes)
            total += share * loop.trips * trip_ns
    return total


def estimate_us(
    config: PrefillConfig, tokens_E: NDArray[np.int64], top_k: int
) -> tuple[float, ...]:
    """Return the estimated time of experts and combine, in microseconds, in each of CORNERS.

    Args:
        config: what the kernel is compiled for.
        tokens_E: [E] tokens of each expert.
        top_k: K, choices of a token, whatever rank its experts are on.
    """
    loops = _loops(config, tokens_E)
    shared_ns = sum_ns(
        config.num_tokens,
        top_k,
        config.H,
        num_partials(config),
        int(tokens_E.sum()),
        config.num_cores,
    )
    found = []
    for corner in CORNERS:
        total_ns = shared_ns
        for number, loop in enumerate(loops):
            for share, rows in loop.levels:
                pace = pace_of(config, loop.sizes, rows, loop.present)[corner]
                total_ns += share * loop.trips * pace.next_ns
                if number == 0:
                    total_ns += share * (pace.first_ns - pace.next_ns)
        found.append(total_ns / 1e3)
    return tuple(found)
