"""Which plan and block size a prefill gets, by the estimate of `blockwise_fit`.

The visits of an expected routing are planned as the device would plan them, and their estimated
times are added up. What the candidates share (routing, indexing, most of the combine) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_kernels.common.chip import CORE
from nki_kernels.common.visits import list_visits, loops_of
from nki_kernels.prefill.config import (
    PrefillConfig,
    ShardPlan,
    num_partials,
    visit_dims,
    with_loop,
)
from nki_kernels.prefill.fit import find_loop, visit_ns
from nki_kernels.prefill.options import make_config

BLOCK_SIZES = (128, 64, 32)  # larger ones have the same row tiles, and more padding
SHARD_PLANS = ("balanced", "hidden", "intermediate")
LARGEST_VISITS = (4, 5)  # beyond, rows take the buffers that let loads run ahead
START_NS = 20_000.0  # simulated: tables and the first weights, beside one visit
SEED = 7


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """A plan, in the words of `make_config`, and how long it is estimated to take.

    Attributes:
        shard_plan: balanced, hidden or intermediate.
        loop_plan: sorted; nothing else is ever faster.
        block_size: B.
        tiles_per_expert: row tiles of an expert to expect.
        largest_visit: most row tiles that share one load of weights.
        estimated_us: of the expert kernel, both cores, in microseconds.
    """

    shard_plan: str
    loop_plan: str
    block_size: int
    tiles_per_expert: float
    largest_visit: int
    estimated_us: float


def choose_plan(
    *,
    H: int,
    I: int,  # noqa: E741  the axis letter
    E: int,
    num_tokens: int,
    top_k: int,
    routing: Sequence[float] | str = "uniform",
    num_cores: int = 2,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    shard_plans: Sequence[str] = SHARD_PLANS,
    **options: Any,
) -> PlanChoice:
    """Return the plan with the least estimated time.

    Args:
        H, I, E: sizes of this rank's experts.
        num_tokens: T.
        top_k: K, choices per token among this rank's experts; of E_all experts on several ranks, on
            average, rounded up.
        routing: how likely each expert is to be chosen, E numbers; or uniform.
        num_cores: physical cores of the launch.
        block_sizes: those to choose from.
        shard_plans: those to choose from; the first one must be possible.
        options: what else `make_config` takes.

    Raises:
        ValueError: the first of the shard plans cannot run, or the routing is not E numbers.
    """
    return rank_plans(
        H=H, I=I, E=E, num_tokens=num_tokens, top_k=top_k, routing=routing, num_cores=num_cores,
        block_sizes=block_sizes, shard_plans=shard_plans, **options,
    )[0]  # fmt: skip


def rank_plans(
    *,
    H: int,
    I: int,  # noqa: E741  the axis letter
    E: int,
    num_tokens: int,
    top_k: int,
    routing: Sequence[float] | str = "uniform",
    num_cores: int = 2,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    shard_plans: Sequence[str] = SHARD_PLANS,
    **options: Any,
) -> list[PlanChoice]:
    """Return all plans that can run, the fastest first; arguments as of `choose_plan`."""
    tokens_E = expect_tokens(num_tokens * top_k, E, routing)
    visits = (options["largest_visit"],) if "largest_visit" in options else LARGEST_VISITS
    choices = []
    for block_size in block_sizes:
        tiles_E = -(-tokens_E // min(block_size, 128))
        expected = float(tiles_E.sum() / max(1, np.count_nonzero(tiles_E)))
        base = make_config(
            H=H, I=I, E=E, block_size=block_size, num_tokens=num_tokens, num_cores=num_cores,
            num_slots=most_blocks(num_tokens, top_k, E, block_size) * block_size,
            shard_plan=shard_plans[0], tiles_per_expert=expected, **options,
        )  # fmt: skip
        turns = options.get("turns", "auto")
        for name, largest in product(shard_plans, visits):
            config = _with_plan(base, name, largest, expected, turns)
            if config is not None:
                time_us = estimate_us(config, tokens_E)
                choices.append(PlanChoice(name, "sorted", block_size, expected, largest, time_us))
    return sorted(choices, key=lambda choice: choice.estimated_us)


def most_blocks(num_tokens: int, top_k: int, num_experts: int, block_size: int) -> int:
    """Return N, the most blocks that any routing needs."""
    pairs = num_tokens * min(top_k, num_experts)
    hit = min(num_experts, pairs)
    return hit + min((pairs - hit) // block_size, hit * (-(-num_tokens // block_size) - 1))


def expect_tokens(
    num_pairs: int, num_experts: int, routing: Sequence[float] | str
) -> NDArray[np.int64]:
    """Return [E] tokens of each expert, drawn once and for all.

    Raises:
        ValueError: the routing is not E numbers with a positive sum.
    """
    if isinstance(routing, str):
        if routing != "uniform":
            raise ValueError(f"routing={routing!r}: must be 'uniform', or {num_experts} numbers.")
        routing = [1.0] * num_experts
    weight_E = np.asarray(routing, float)
    if weight_E.shape != (num_experts,) or (weight_E < 0).any() or not weight_E.sum() > 0:
        raise ValueError(
            f"routing {list(weight_E.shape)}: must be {num_experts} numbers, none negative, one "
            "positive. Pass how likely each expert is."
        )
    rng = np.random.default_rng(SEED)
    return rng.multinomial(num_pairs, weight_E / weight_E.sum())


def _with_plan(
    base: PrefillConfig, shard_plan: str, largest: int, expected: float, turns: str
) -> PrefillConfig | None:
    """Return a configuration with another shard plan and visits, None if that cannot run."""
    splits_i, splits_h = shard_plan == "intermediate", shard_plan == "hidden"
    is_split = base.num_cores > 1 and (splits_i or splits_h)
    if is_split and splits_i and base.I % base.num_cores:
        return None
    if is_split and (base.loop.by_parts or base.loop.skips_weights):
        return None
    shard = ShardPlan(
        1 if is_split else base.num_cores, is_split and splits_i, is_split and splits_h
    )
    loop = replace(base.loop, classes=tuple(range(largest, 0, -1)), turns=turns)
    parts = (loop.in_parts, loop.out_parts) if loop.by_parts else None
    found = find_loop(replace(base, shard=shard, loop=loop), expected, parts)
    return None if found is None else with_loop(replace(base, shard=shard), found)


def estimate_us(config: PrefillConfig, tokens_E: NDArray[np.int64]) -> float:
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
    plan = list_visits(tile, expert, visit_dims(config), num_tiles=len(tile), num_experts=config.E)
    live_rows = tokens_E.sum() / len(tile)
    total = START_NS + visit_ns(config, 1, live_rows)
    for sizes, trips in zip(
        loops_of(config.loop.classes), plan.class_trips_1L[0].tolist(), strict=True
    ):
        total += trips * sum(visit_ns(config, size, live_rows) for size in sizes)
    # Each further partial sum is read once more, by the combine.
    extra_bytes = (num_partials(config) - 1) * tokens_E.sum() * config.H * 2
    total += extra_bytes / CORE.hbm_bytes_per_ns / config.num_cores
    return float(total) / 1e3
