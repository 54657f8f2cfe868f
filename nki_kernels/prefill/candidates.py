"""Which plan, block size and loop a prefill gets: the one with the least estimate of roofline.py.

Without a routing two extremes are expected: one drawn from experts that are alike, which counts
four times, and one in which a quarter of them gets most tokens. What the candidates share (routing,
indexing) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nki_kernels.common.formula import ExpertFormula
from nki_kernels.common.slot_sums import spread_of
from nki_kernels.prefill.config import (
    ExpertSizes,
    PlanRequest,
    PrefillWork,
    fit_of,
)
from nki_kernels.prefill.fit import best_loop, loops_that_fit
from nki_kernels.prefill.options import draft_config
from nki_kernels.prefill.roofline import estimate_us

_EVEN_WEIGHT = 0.8  # of the time where experts are alike, beside that of a skewed routing
_SEED, _DRAWS, _TILES = 7, 64, (32, 64, 128)
_HOT_SHARE, _HOT_CHOICES = 0.25, 0.8  # of a skewed routing: experts, and the choices they get
_LOOPS = 4  # of each block size and shard plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The launches that a candidate is chosen for.

    Attributes:
        num_tokens: T.
        top_k: K, choices of a token, whatever rank its experts are on.
        share: of the choices that fall on this rank's experts, on average.
        routing: how likely each expert is to be chosen, E numbers; or unknown.
        num_cores, scaling, stores: as in `PrefillWork`.
        chance: that a choice of any token falls here; smaller than the share where an all-to-all
            left out tokens without a choice here. 0: the share.
    """

    num_tokens: int
    top_k: int
    routing: tuple[float, ...] | str = "unknown"
    num_cores: int = 2
    scaling: str = "none"
    stores: str = "rows"
    share: float = 1.0
    chance: float = 0.0

    @property
    def spread(self) -> tuple[float, ...]:
        """Tokens with 0, 1, ... K pairs here."""
        chance = self.chance or self.share
        return spread_of(self.num_pairs, self.top_k, chance, self.num_tokens)

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
        largest_work_tile: beyond 5, rows take the buffers that let loads run ahead.
    """

    block_sizes: tuple[int, ...] = (128, 64, 32)
    shard_plans: tuple[str, ...] = ("balanced", "hidden", "intermediate")
    largest_work_tile: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to compute a prefill, and how long it is estimated to take.

    Attributes:
        request: for `make_config`.
        block_size: B.
        times_us: of experts and combine, both cores, in microseconds, for each routing expected.
    """

    request: PlanRequest
    block_size: int
    times_us: tuple[float, ...]

    @property
    def estimated_us(self) -> float:
        """Mean of `times_us`; experts that are alike count four times."""
        first, *others = self.times_us
        return _EVEN_WEIGHT * first + (1.0 - _EVEN_WEIGHT) * others[0] if others else first


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
    """Return the candidates that are worth a look, the best first.

    Args:
        formula: what an expert computes.
        sizes: of the experts of this rank.
        expected: the launches to be fast for.
        request: what all candidates share; how they shard, and their work tiles, are theirs.
        search: what they differ in.

    Raises:
        ValueError: the first of the shard plans cannot run, or the routing is not E numbers.
    """
    routings, found = _routings(sizes.E, expected), []
    for block_size in search.block_sizes:
        num_slots = most_blocks(expected.num_tokens, expected.top_k, sizes.E, block_size)
        work = PrefillWork(
            block_size,
            num_slots * block_size,
            expected.num_tokens,
            expected.num_cores,
            expected.scaling,
            expected.stores,
        )
        for shard_plan in search.shard_plans:
            asked = replace(
                request, shard_plan=shard_plan, largest_work_tile=search.largest_work_tile
            )
            try:
                found += _candidates(formula, sizes, work, asked, routings, expected.spread)
            except ValueError:
                if shard_plan == search.shard_plans[0]:
                    raise
    return sorted(found, key=lambda each: each.estimated_us)


def _candidates(
    formula: ExpertFormula,
    sizes: ExpertSizes,
    work: PrefillWork,
    asked: PlanRequest,
    routings: Sequence[NDArray[np.int64]],
    spread: Sequence[float],
) -> list[Candidate]:
    """Return the best loops of a block size and a shard plan."""
    found = []
    draft = draft_config(formula, sizes, work, asked)
    for config in loops_that_fit(draft, asked, routings[0])[:_LOOPS]:
        fit = fit_of(config.loop)
        fixed = replace(asked, largest_work_tile=fit.work_tile, fit=fit)
        times_us = tuple(estimate_us(config, tokens_E, spread) for tokens_E in routings)
        found.append(Candidate(request=fixed, block_size=work.block_size, times_us=times_us))
    if not found:
        best_loop(draft, asked, routings[0])  # raises, as nothing fits
    return found


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
