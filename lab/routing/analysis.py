"""What recorded routing says: load, pairs of experts, margins, and what follows for ranks.

Letters: L MoE layers, T tokens, K choices, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.models.routing_trace import RoutingTrace
from neuron_moe.moe import MoE
from neuron_moe.parallel.placement import ExpertPlacement
from neuron_moe.tools.commands.place import place_layers
from neuron_moe.tools.tune.problem import Problem, draw_routing

BLOCK_SIZES = (32, 64, 128)  # larger ones have the row tiles of 128 and more padding
Floats = NDArray[np.float64]
MARGIN_QUANTILES = (0.05, 0.5)
BF16_STEP = 2.0**-8  # half the distance of neighbours in bfloat16, of a score of 1 to 2


def skew(load_LE: NDArray[np.int64]) -> Floats:
    """Return the busiest expert's load over the mean of its layer, [L]."""
    busiest: Floats = load_LE.max(axis=1) / load_LE.mean(axis=1)
    return busiest


def padding_rows(moe: MoE, trace: RoutingTrace, tokens: int) -> list[dict[str, Any]]:
    """Return what explain() says of each layer for a prefill of the trace's first tokens.

    Args:
        moe: any layer of the model; all have the same sizes.
        trace: the recorded choices.
        tokens: T of the prefill; at most those of the trace.

    Returns:
        For each layer the path, the block size it would use, and the padding at each block size:
        worst and expected (computed) and actual (from the trace).
    """
    rows = []
    for layer, load_E in enumerate(trace.load_LE(last=tokens)):
        explanation = moe.explain("prefill", tokens, tokens_per_expert=load_E.tolist())
        rows.append(
            {
                "layer": layer,
                "path": explanation.path,
                "block_size": explanation.block_size,
                "busiest_over_mean": float(load_E.max() / load_E.mean()),
                "padding": {
                    size: {
                        "worst": padding.worst,
                        "expected": padding.expected,
                        "actual": padding.actual,
                    }
                    for size, padding in explanation.padding_by_block_size.items()
                },
            }
        )
    return rows


def estimate_block_sizes(
    raw_config: Mapping[str, Any], trace: RoutingTrace, tokens: int
) -> dict[int, float]:
    """Return the estimated time of the prefill kernels on one rank by block size, in microseconds.

    The routing is that of the trace's most uneven layer; of each block size the best plan counts.
    """
    layer = RankLayer(raw_config, "config.json", backend="nki")
    top_k = trace.expert_index_LTK.shape[2]
    index_TK = draw_routing("", trace, tokens, trace.num_experts, top_k)
    found: dict[int, float] = {}
    for point in Problem.of(layer, tokens, index_TK, "plain").points(BLOCK_SIZES):
        found.setdefault(point.block_size, point.estimated_us)  # the fastest come first
    return dict(sorted(found.items()))


def mean_padding(layers: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the actual padding at each block size, mean of the layers."""
    sizes = layers[0]["padding"]
    return {
        size: round(float(np.mean([layer["padding"][size]["actual"] for layer in layers])), 4)
        for size in sizes
    }


def pair_lift(trace: RoutingTrace, layer: int) -> Floats:
    """Return how often two experts were chosen together over how often by chance, [E, E].

    Chance is that of K different experts with the loads of the layer; the diagonal is NaN, and so
    are pairs of an expert that nobody chose.
    """
    index_TK = trace.expert_index_LTK[layer]
    tokens, top_k = index_TK.shape
    experts = trace.num_experts
    chosen_TE = np.zeros((tokens, experts), np.float32)
    np.put_along_axis(chosen_TE, index_TK.astype(np.int64), 1.0, axis=1)
    together: Floats = (chosen_TE.T @ chosen_TE).astype(np.float64)
    load_E = np.diag(together).copy()
    without_repeats = (top_k - 1) * experts / (top_k * max(1, experts - 1))
    by_chance = np.outer(load_E, load_E) / tokens * without_repeats
    np.fill_diagonal(by_chance, 0.0)
    lift: Floats = np.full_like(together, np.nan)
    np.divide(together, by_chance, out=lift, where=by_chance > 0)
    return lift


@dataclass(frozen=True, slots=True)
class Pair:
    """Two experts of a layer.

    Attributes:
        layer: of the model's MoE layers.
        experts: their numbers.
        share: of the tokens that chose both.
        lift: that share over what chance gives.
    """

    layer: int
    experts: tuple[int, int]
    share: float
    lift: float


def strongest_pairs(trace: RoutingTrace, count: int, least_share: float = 0.01) -> list[Pair]:
    """Return the pairs with the largest lift of those that at least a share of tokens chose."""
    found = []
    for layer, index_TK in enumerate(trace.expert_index_LTK):
        lift_EE = pair_lift(trace, layer)
        for first, second in np.argwhere(np.triu(np.nan_to_num(lift_EE), 1) > 1.0).tolist():
            both = (index_TK == first).any(1) & (index_TK == second).any(1)
            if both.mean() >= least_share:
                lift = float(lift_EE[first, second])
                found.append(Pair(layer, (first, second), float(both.mean()), lift))
    return sorted(found, key=lambda pair: -pair.lift)[:count]


@dataclass(frozen=True, slots=True)
class Margins:
    """How clear the choices of a layer were, in units of the router's scores.

    Attributes:
        low: the margin that 5 % of the tokens stay below.
        median: of the tokens.
        in_rounding: share of the tokens whose margin is below half a step of bfloat16 at a score
            of 1; another implementation may choose otherwise there.
    """

    low: float
    median: float
    in_rounding: float


def margins_of(trace: RoutingTrace) -> list[Margins]:
    """Return the margins of each layer; none for a trace without."""
    if trace.margin_LT is None:
        return []
    found = []
    for margin_T in trace.margin_LT.astype(np.float64):
        low, median = map(float, np.quantile(margin_T, MARGIN_QUANTILES))
        found.append(Margins(low, median, float((margin_T < BF16_STEP).mean())))
    return found


@dataclass(frozen=True, slots=True)
class RankBalance:
    """The busiest rank over the mean, mean of the layers, on tokens no placement was made from.

    Attributes:
        ranks: expert-parallel ranks.
        before: equal runs of experts.
        packed: placed by load, without replicas.
        replicated: placed by load with replicas.
        replicas: how many, about an eighth of the experts.
        ranks_a_token: ranks on which the experts of a token are, mean, equal runs.
    """

    ranks: int
    before: float
    packed: float
    replicated: float
    replicas: int
    ranks_a_token: float


def balance_of(trace: RoutingTrace, ranks: int) -> RankBalance:
    """Place the experts by the first half of a trace, and judge on the second."""
    extra = -(-trace.num_experts // 8 // ranks) * ranks
    packed, replicated = (place_layers(trace, ranks, each) for each in (0, extra))
    runs = ExpertPlacement.contiguous(trace.num_experts, ranks)
    index = torch.from_numpy(trace.expert_index_LTK.astype(np.int64))
    rank_of_choice = index // runs.num_per_rank
    touched = torch.zeros(*index.shape[:2], ranks).scatter_(2, rank_of_choice, 1.0)
    return RankBalance(
        ranks=ranks,
        before=float(np.mean([layer.before.busiest_over_mean for layer in packed])),
        packed=float(np.mean([layer.after.busiest_over_mean for layer in packed])),
        replicated=float(np.mean([layer.after.busiest_over_mean for layer in replicated])),
        replicas=extra,
        ranks_a_token=float(touched.sum(2).mean()),
    )
